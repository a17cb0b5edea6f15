//! The file of peers that were met before, so that a node finds its cluster again where no multicast passes.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::ids::NodeId;

/// A peer as it is written down: addresses as text, because that keeps the scope of link-local ones.
#[derive(Serialize, Deserialize)]
struct Line {
    node: NodeId,
    addresses: Vec<String>,
    starts: u16,
}

/// Name of the file in the node's folder.
pub(crate) const FILE: &str = "peers-seen";
/// The most peers that are kept.
pub(crate) const PEERS_MAX: usize = 256;
/// The most addresses that are kept of a peer.
pub(crate) const ADDRESSES_MAX: usize = 4;
/// A peer that was not met in so many starts of this node is forgotten. There is no calendar here: a machine's clock
/// may be wrong by years, and a machine that is off for months should still find its cluster.
const STARTS_MAX: u16 = 30;
/// The longest file that is read.
const BYTES_MAX: usize = 64 * 1024;
const FORMAT: u8 = 1;

/// A peer of an earlier run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SeenPeer {
    /// Who.
    pub(crate) node: NodeId,
    /// Where, the one that worked first.
    pub(crate) addresses: Vec<SocketAddr>,
    /// Starts of this node since it was met.
    pub(crate) starts: u16,
}

/// Why a file of peers is not used. The node starts with an empty book.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the file `{FILE}` of peers met before is damaged and is started anew")]
pub(crate) struct SeenError;

/// The content of the file. Peers of the last start come first; what is too much is cut.
pub(crate) fn encode(peers: &[SeenPeer]) -> Vec<u8> {
    let mut peers = peers.to_vec();
    peers.sort_by_key(|peer| peer.starts);
    peers.truncate(PEERS_MAX);
    let lines = peers.iter().map(|peer| Line {
        node: peer.node,
        addresses: peer.addresses.iter().take(ADDRESSES_MAX).map(SocketAddr::to_string).collect(),
        starts: peer.starts,
    });
    postcard::to_extend(&lines.collect::<Vec<Line>>(), vec![FORMAT]).unwrap_or_default()
}

/// Reads the file and counts one more start for every peer in it.
pub(crate) fn decode(content: &[u8]) -> Result<Vec<SeenPeer>, SeenError> {
    let body = match content {
        [FORMAT, body @ ..] if content.len() <= BYTES_MAX => body,
        _ => return Err(SeenError),
    };
    let lines: Vec<Line> = postcard::from_bytes(body).map_err(|_| SeenError)?;
    if lines.len() > PEERS_MAX {
        return Err(SeenError);
    }
    let peers = lines.into_iter().map(|line| SeenPeer {
        node: line.node,
        addresses: line.addresses.iter().take(ADDRESSES_MAX).filter_map(|address| address.parse().ok()).collect(),
        starts: line.starts.saturating_add(1),
    });
    Ok(peers.filter(|peer| peer.starts <= STARTS_MAX && !peer.addresses.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn peer(node: u8, starts: u16) -> SeenPeer {
        SeenPeer { node: NodeId([node; 32]), addresses: vec!["10.0.0.1:5".parse().unwrap(), "[fe80::1%2]:6".parse().unwrap()], starts }
    }

    #[test]
    fn peers_are_kept_and_the_long_unseen_forgotten() {
        let read = decode(&encode(&[peer(1, 0), peer(2, STARTS_MAX)])).unwrap();
        assert_eq!(read, [peer(1, 1)]);
    }

    #[test]
    fn the_file_stays_small_whatever_is_put_in() {
        let mut many: Vec<SeenPeer> = (0..2000).map(|i| peer((i % 251) as u8, (i % 7) as u16)).collect();
        many[5].addresses = vec!["[fd00::1]:65535".parse().unwrap(); 500];
        let content = encode(&many);
        assert!(content.len() <= BYTES_MAX);
        assert_eq!(decode(&content).unwrap().len(), PEERS_MAX);
    }

    proptest! {
        #[test]
        fn any_content_is_survived(content in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(&content);
            let mut with_format = vec![FORMAT];
            with_format.extend_from_slice(&content);
            let _ = decode(&with_format);
        }
    }
}
