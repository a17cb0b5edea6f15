//! What two nodes say before the first frame: that they are of one cluster, and which connection they will use.
//!
//! ```text
//! dialler                          listener
//!   Greeting {wire, private, nonce} ─▶
//!                                  ◀─ Greeting {wire, private, nonce}   or  Refusal
//!   Proof {tag, boot}              ─▶
//!                                  ◀─ Proof {tag, boot}                 or  Refusal
//!                (from here the two know each other; see `peers`)
//!   lower id: Accept, or Query {session} ─▶ Holding ─▶ Accept or Duplicate
//! ```
//!
//! The dialler proves itself first, so a stranger that dials learns no tag that it could test guesses of a key
//! against. A tag covers both ids, both nonces and who made it; Noise vouches for the ids, so a tag is of no use on
//! another connection.

use serde::{Deserialize, Serialize};

use crate::ids::NodeId;
use crate::secret::ClusterKey;

/// Longest encoded [`Hello`], in bytes. A stranger cannot make us keep more than this.
pub(super) const HELLO_BYTES_MAX: usize = 128;

/// A message of the handshake. Within one wire version the enum may only grow at its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Hello {
    /// The first word of both ends.
    Greeting {
        /// Wire version.
        wire: u32,
        /// Whether the sender's cluster has a key.
        private: bool,
        /// Fresh for every connection.
        nonce: [u8; 32],
    },
    /// The sender is of the cluster.
    Proof {
        /// Made with the cluster's key, if it has one.
        tag: Option<[u8; 32]>,
        /// Which life of the sender this is.
        boot: u64,
    },
    /// The other end may not come in.
    Refusal(Refusal),
    /// This connection carries the frames.
    Accept,
    /// Does the other end still hold this earlier connection?
    Query {
        /// Named by both nonces of its handshake.
        session: u128,
    },
    /// The answer to a query.
    Holding(bool),
    /// There is a connection already; this one is closed.
    Duplicate,
}

impl Hello {
    pub(super) fn encode(&self) -> Vec<u8> {
        // Nothing in here has an unknown length, which is the only thing that postcard cannot encode.
        postcard::to_stdvec(self).unwrap_or_default()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (hello, rest) = postcard::take_from_bytes(bytes).ok()?;
        rest.is_empty().then_some(hello)
    }
}

/// Why a node is turned away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refusal {
    /// The refused node has no key and the refusing one does.
    NeedsKey,
    /// The refused node has a key and the refusing one does not.
    NoKeyHere,
    /// Both have a key, and not the same.
    WrongKey,
    /// The refusing node speaks this other wire version.
    Version(u32),
}

impl Refusal {
    /// What happened and what to do, for the people of the node that refused (`by_us`) or was refused.
    pub(super) fn text(self, by_us: bool, peer: NodeId, our_wire: u32) -> String {
        let peer = peer.short();
        match (self, by_us) {
            (Self::NeedsKey, true) => {
                format!(
                    "this cluster needs a key, and node {peer} has none: start that node with `--key` and this cluster's key to let it in"
                )
            }
            (Self::NeedsKey, false) => {
                format!(
                    "this cluster needs a key: node {peer} belongs to a private cluster; start this node with `--key` and the same key to join it"
                )
            }
            (Self::NoKeyHere, true) => format!(
                "this node has no key but the peer's cluster does: start this node with `--key` and the key of node {peer}, or that node without a key"
            ),
            (Self::NoKeyHere, false) => format!(
                "node {peer} has no key but this cluster does: start that node with `--key` and this cluster's key, or this node without a key"
            ),
            (Self::WrongKey, _) => {
                format!("wrong key: node {peer} has another cluster key than this node; start both with the same `--key`")
            }
            (Self::Version(_), true) => format!(
                "node {peer} speaks another wire version than this node, which speaks {our_wire}: install the same version of shoal on both"
            ),
            (Self::Version(wire), false) => other_version(&peer, wire, our_wire),
        }
    }
}

/// What to say about a peer of another wire version.
pub(super) fn other_version(peer: &str, theirs: u32, ours: u32) -> String {
    let older = if theirs < ours { "that node" } else { "this node" };
    format!(
        "node {peer} speaks wire version {theirs} and this node speaks {ours}: update shoal on {older}, so that both run the same version"
    )
}

/// Whether two nodes that greet each other can be of one cluster; if not, what `ours` says to the other.
pub(super) fn judge(our_wire: u32, we_are_private: bool, wire: u32, private: bool) -> Option<Refusal> {
    match (we_are_private, private) {
        _ if wire != our_wire => Some(Refusal::Version(our_wire)),
        (true, false) => Some(Refusal::NeedsKey),
        (false, true) => Some(Refusal::NoKeyHere),
        _ => None,
    }
}

/// What the handshake wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Output {
    /// Send this.
    Send(Hello),
    /// The dialler knows the connection's name, the same at both ends, and is about to prove itself.
    Greeted {
        /// The name.
        session: u128,
    },
    /// The peer is of the cluster.
    Verified {
        /// Which life of it.
        boot: u64,
        /// The connection's name, the same at both ends.
        session: u128,
    },
    /// One end turned the other away. The connection ends once what was sent before has arrived.
    Refused {
        /// Whether this end did.
        by_us: bool,
        /// Why.
        refusal: Refusal,
    },
    /// The peer does not keep to the protocol. The connection ends.
    Broken(&'static str),
}

/// What a node brings to a handshake.
#[derive(Clone)]
pub(super) struct Party {
    /// This node.
    pub(super) node: NodeId,
    /// Its wire version.
    pub(super) wire: u32,
    /// Its cluster's key.
    pub(super) key: Option<ClusterKey>,
    /// Which life of it this is.
    pub(super) boot: u64,
}

/// One end of a handshake.
pub(super) struct Handshake {
    party: Party,
    peer: NodeId,
    dialler: bool,
    nonce: [u8; 32],
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    AwaitGreeting,
    AwaitProof { nonce: [u8; 32] },
    Done,
}

impl Handshake {
    /// One end, with a fresh `nonce`. What comes first is in the outputs.
    pub(super) fn start(party: Party, peer: NodeId, dialler: bool, nonce: [u8; 32]) -> (Self, Vec<Output>) {
        let handshake = Self { party, peer, dialler, nonce, state: State::AwaitGreeting };
        let first = if dialler { vec![Output::Send(handshake.greeting())] } else { Vec::new() };
        (handshake, first)
    }

    fn greeting(&self) -> Hello {
        Hello::Greeting { wire: self.party.wire, private: self.party.key.is_some(), nonce: self.nonce }
    }

    /// Takes the peer's next message.
    pub(super) fn step(&mut self, hello: Hello) -> Vec<Output> {
        match (self.state, hello) {
            (State::Done, _) => vec![],
            (_, Hello::Refusal(refusal)) => {
                self.state = State::Done;
                vec![Output::Refused { by_us: false, refusal }]
            }
            (State::AwaitGreeting, Hello::Greeting { wire, private, nonce }) => {
                if let Some(refusal) = judge(self.party.wire, self.party.key.is_some(), wire, private) {
                    return self.refuse(refusal);
                }
                self.state = State::AwaitProof { nonce };
                if self.dialler {
                    let session = session(&self.nonce, &nonce);
                    vec![Output::Greeted { session }, Output::Send(self.proof(&nonce))]
                } else {
                    vec![Output::Send(self.greeting())]
                }
            }
            (State::AwaitProof { nonce }, Hello::Proof { tag, boot }) => {
                let expected = self.tag(self.peer, self.party.node, &nonce, &self.nonce);
                // The comparison of two `blake3::Hash` takes constant time.
                if expected != tag.map(blake3::Hash::from) {
                    return self.refuse(Refusal::WrongKey);
                }
                self.state = State::Done;
                let (dialler, listener) = if self.dialler { (&self.nonce, &nonce) } else { (&nonce, &self.nonce) };
                let verified = Output::Verified { boot, session: session(dialler, listener) };
                // First on our books, then proved to the peer: what it says next must find the connection there.
                if self.dialler { vec![verified] } else { vec![verified, Output::Send(self.proof(&nonce))] }
            }
            _ => {
                self.state = State::Done;
                vec![Output::Broken("it said something else than the handshake asks for")]
            }
        }
    }

    fn refuse(&mut self, refusal: Refusal) -> Vec<Output> {
        self.state = State::Done;
        vec![Output::Send(Hello::Refusal(refusal)), Output::Refused { by_us: true, refusal }]
    }

    fn proof(&self, theirs: &[u8; 32]) -> Hello {
        let tag = self.tag(self.party.node, self.peer, &self.nonce, theirs);
        Hello::Proof { tag: tag.map(Into::into), boot: self.party.boot }
    }

    fn tag(&self, maker: NodeId, reader: NodeId, makers: &[u8; 32], readers: &[u8; 32]) -> Option<blake3::Hash> {
        let mut message = [0; 128];
        for (part, bytes) in message.chunks_exact_mut(32).zip([&maker.0, &reader.0, makers, readers]) {
            part.copy_from_slice(bytes);
        }
        self.party.key.as_ref().map(|key| key.tag("shoal control hello v1", &message))
    }
}

fn session(dialler: &[u8; 32], listener: &[u8; 32]) -> u128 {
    let hash = blake3::Hasher::new_derive_key("shoal control session v1").update(dialler).update(listener).finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_bytes()[..16]);
    u128::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn party(node: u8, wire: u32, key: Option<&str>) -> Party {
        let key = key.map(|text| ClusterKey::from_text(text).unwrap());
        Party { node: NodeId([node; 32]), wire, key, boot: u64::from(node) }
    }

    /// Runs both ends against each other; returns what each of them concluded.
    fn meet(dialler: Party, listener: Party) -> (Vec<Output>, Vec<Output>) {
        let (left_id, right_id) = (dialler.node, listener.node);
        let (mut left, first) = Handshake::start(dialler, right_id, true, [1; 32]);
        let (mut right, none) = Handshake::start(listener, left_id, false, [2; 32]);
        assert!(none.is_empty());
        let (mut to_right, mut to_left) = (vec![], vec![]);
        let (mut left_end, mut right_end) = (vec![], vec![]);
        let sort = |outputs: Vec<Output>, wire: &mut Vec<Hello>, end: &mut Vec<Output>| {
            for output in outputs {
                match output {
                    Output::Send(hello) => {
                        let bytes = hello.encode();
                        assert!(bytes.len() <= HELLO_BYTES_MAX);
                        wire.push(Hello::decode(&bytes).unwrap());
                    }
                    Output::Greeted { .. } => {}
                    other => end.push(other),
                }
            }
        };
        sort(first, &mut to_right, &mut left_end);
        while !to_right.is_empty() || !to_left.is_empty() {
            for hello in std::mem::take(&mut to_right) {
                sort(right.step(hello), &mut to_left, &mut right_end);
            }
            for hello in std::mem::take(&mut to_left) {
                sort(left.step(hello), &mut to_right, &mut left_end);
            }
        }
        (left_end, right_end)
    }

    #[track_caller]
    fn refused(ends: (Vec<Output>, Vec<Output>), refusal: Refusal) {
        assert_eq!(ends.0, [Output::Refused { by_us: false, refusal }]);
        assert_eq!(ends.1, [Output::Refused { by_us: true, refusal }]);
    }

    const KEY: &str = "correct horse battery";
    const OTHER: &str = "incorrect horse battery";

    #[test]
    fn two_of_one_cluster_agree() {
        for key in [None, Some(KEY)] {
            let (left, right) = meet(party(1, 1, key), party(2, 1, key));
            let [Output::Verified { boot: 2, session: one }] = left[..] else { panic!("{left:?}") };
            let [Output::Verified { boot: 1, session: two }] = right[..] else { panic!("{right:?}") };
            assert_eq!(one, two);
        }
    }

    #[test]
    fn strangers_are_refused_with_the_reason() {
        refused(meet(party(1, 1, None), party(2, 1, Some(KEY))), Refusal::NeedsKey);
        refused(meet(party(1, 1, Some(KEY)), party(2, 1, None)), Refusal::NoKeyHere);
        refused(meet(party(1, 1, Some(OTHER)), party(2, 1, Some(KEY))), Refusal::WrongKey);
        refused(meet(party(1, 2, Some(KEY)), party(2, 1, Some(KEY))), Refusal::Version(1));
    }

    #[test]
    fn a_stranger_that_dials_gets_no_tag() {
        let peer = NodeId([1; 32]);
        let (mut listener, _) = Handshake::start(party(2, 1, Some(KEY)), peer, false, [2; 32]);
        let greeting = Hello::Greeting { wire: 1, private: true, nonce: [1; 32] };
        let said = [listener.step(greeting), listener.step(Hello::Proof { tag: Some([0; 32]), boot: 1 })].concat();
        assert!(!said.iter().any(|output| matches!(output, Output::Send(Hello::Proof { .. }))), "{said:?}");
        assert!(said.contains(&Output::Refused { by_us: true, refusal: Refusal::WrongKey }));
    }

    #[test]
    fn a_reflected_tag_is_worth_nothing() {
        let peer = NodeId([1; 32]);
        let (mut dialler, _) = Handshake::start(party(2, 1, Some(KEY)), peer, true, [2; 32]);
        let sent = dialler.step(Hello::Greeting { wire: 1, private: true, nonce: [2; 32] });
        let [Output::Greeted { .. }, Output::Send(Hello::Proof { tag, .. })] = sent[..] else { panic!("{sent:?}") };
        let end = dialler.step(Hello::Proof { tag, boot: 1 });
        assert!(end.contains(&Output::Refused { by_us: true, refusal: Refusal::WrongKey }));
    }

    #[test]
    fn golden_bytes() {
        let nonce = [7; 32];
        let mut greeting = vec![0, 1, 1];
        greeting.extend([7; 32]);
        let mut proof = vec![1, 1];
        proof.extend([7; 32]);
        proof.push(9);
        for (hello, bytes) in [
            (Hello::Greeting { wire: 1, private: true, nonce }, greeting),
            (Hello::Proof { tag: Some(nonce), boot: 9 }, proof),
            (Hello::Proof { tag: None, boot: 9 }, vec![1, 0, 9]),
            (Hello::Refusal(Refusal::NeedsKey), vec![2, 0]),
            (Hello::Refusal(Refusal::NoKeyHere), vec![2, 1]),
            (Hello::Refusal(Refusal::WrongKey), vec![2, 2]),
            (Hello::Refusal(Refusal::Version(3)), vec![2, 3, 3]),
            (Hello::Accept, vec![3]),
            (Hello::Query { session: 5 }, vec![4, 5]),
            (Hello::Holding(true), vec![5, 1]),
            (Hello::Duplicate, vec![6]),
        ] {
            assert_eq!(hello.encode(), bytes);
            assert_eq!(Hello::decode(&bytes), Some(hello));
        }
    }

    #[test]
    fn texts_say_what_to_do() {
        let peer = NodeId([1; 32]);
        assert!(Refusal::NeedsKey.text(false, peer, 1).starts_with("this cluster needs a key"));
        assert!(Refusal::WrongKey.text(false, peer, 1).starts_with("wrong key"));
        assert!(Refusal::NoKeyHere.text(true, peer, 1).starts_with("this node has no key but the peer's cluster does"));
        assert!(Refusal::Version(2).text(false, peer, 1).contains("update shoal on this node"));
        assert!(Refusal::Version(1).text(false, peer, 2).contains("update shoal on that node"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..6), dialler: bool) {
            let (mut handshake, _) = Handshake::start(party(2, 1, Some(KEY)), NodeId([1; 32]), dialler, [2; 32]);
            for message in messages {
                if let Some(hello) = Hello::decode(&message) {
                    let outputs = handshake.step(hello);
                    let verified = outputs.iter().any(|output| matches!(output, Output::Verified { .. }));
                    prop_assert!(!verified);
                }
            }
        }
    }
}
