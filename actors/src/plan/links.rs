//! What is known of the links between nodes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ids::NodeId;

/// One direction of a link.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// There and back for a small message, in seconds.
    pub rtt_seconds: f64,
    /// Bytes a second.
    pub bytes_per_second: f64,
}

impl Link {
    /// What is assumed between two machines until it is measured: wired gigabit.
    pub const NETWORK: Self = Self { rtt_seconds: 500e-6, bytes_per_second: 110e6 };

    /// What is assumed between two nodes of one machine until it is measured.
    pub const SAME_HOST: Self = Self { rtt_seconds: 60e-6, bytes_per_second: 2e9 };

    /// How long `bytes` take from one end to the other, in seconds.
    pub fn seconds(&self, bytes: f64) -> f64 {
        self.rtt_seconds / 2.0 + bytes / self.bytes_per_second
    }

    /// A measurement can be absent or absurd; then `fallback` stands in for the part that is.
    fn or(self, fallback: Self) -> Self {
        let sane = |value: f64| value.is_finite() && value >= 0.0;
        Self {
            rtt_seconds: if sane(self.rtt_seconds) { self.rtt_seconds } else { fallback.rtt_seconds },
            bytes_per_second: if sane(self.bytes_per_second) && self.bytes_per_second >= 1.0 {
                self.bytes_per_second
            } else {
                fallback.bytes_per_second
            },
        }
    }
}

/// A measured direction, as it is stored and sent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkEntry {
    /// The sender.
    pub from: NodeId,
    /// The receiver.
    pub to: NodeId,
    /// What was measured.
    pub link: Link,
}

/// The links between nodes, by direction. What was not measured has a default.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(from = "Vec<LinkEntry>", into = "Vec<LinkEntry>")]
pub struct LinkMatrix {
    links: BTreeMap<(NodeId, NodeId), Link>,
}

impl LinkMatrix {
    /// Nothing measured.
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes what was measured in one direction.
    pub fn set(&mut self, from: NodeId, to: NodeId, link: Link) {
        self.links.insert((from, to), link);
    }

    /// Notes what was measured, for both directions.
    pub fn set_both(&mut self, one: NodeId, other: NodeId, link: Link) {
        self.set(one, other, link);
        self.set(other, one, link);
    }

    /// The link from one node to another: as measured, else as measured the other way round, else the default.
    pub fn get(&self, from: NodeId, to: NodeId, same_host: bool) -> Link {
        let fallback = if same_host { Link::SAME_HOST } else { Link::NETWORK };
        let measured = self.links.get(&(from, to)).or_else(|| self.links.get(&(to, from)));
        measured.map_or(fallback, |link| link.or(fallback))
    }

    /// What was measured, in the order of the ids.
    pub fn entries(&self) -> impl Iterator<Item = LinkEntry> + '_ {
        self.links.iter().map(|(&(from, to), &link)| LinkEntry { from, to, link })
    }
}

impl From<Vec<LinkEntry>> for LinkMatrix {
    fn from(entries: Vec<LinkEntry>) -> Self {
        Self { links: entries.into_iter().map(|e| ((e.from, e.to), e.link)).collect() }
    }
}

impl From<LinkMatrix> for Vec<LinkEntry> {
    fn from(matrix: LinkMatrix) -> Self {
        matrix.entries().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_or_absurd_has_a_default() {
        let (a, b, c) = (NodeId([1; 32]), NodeId([2; 32]), NodeId([3; 32]));
        let mut links = LinkMatrix::new();
        let fast = Link { rtt_seconds: 20e-6, bytes_per_second: 6e9 };
        links.set(a, b, fast);
        links.set(a, c, Link { rtt_seconds: f64::NAN, bytes_per_second: 0.0 });
        assert_eq!(links.get(a, b, false), fast);
        assert_eq!(links.get(b, a, false), fast);
        assert_eq!(links.get(a, c, false), Link::NETWORK);
        assert_eq!(links.get(b, c, true), Link::SAME_HOST);
        let mut sane = LinkMatrix::new();
        sane.set(a, b, fast);
        let text = serde_json::to_string(&sane).expect("encodes");
        assert_eq!(serde_json::from_str::<LinkMatrix>(&text).expect("decodes"), sane);
    }
}
