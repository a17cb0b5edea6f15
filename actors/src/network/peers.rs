//! Which connection to a peer carries the frames.
//!
//! The node with the lower id decides. A second connection to a peer is one of three things: the other half of two
//! simultaneous dials, the peer after a restart, or the peer after it lost the first connection without us noticing.
//! The boot number in the handshake gives away the restart. For the rest the lower id asks over the new connection
//! whether the peer still holds the old one: if so, the new one is a duplicate; if not, the old one is dead. An end that
//! has heard nothing over a connection although it should have doubts it, and does not count on it any more: so a cable that is
//! pulled costs the connection and not the peer, where another one leads there.
//!
//! A pure state machine; the driver of the swarm feeds it and does what it says.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::hello::Hello;
use crate::env::{DisconnectReason, Instant};
use crate::ids::NodeId;

/// A connection that has passed the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verified {
    pub(super) peer: NodeId,
    pub(super) boot: u64,
    pub(super) session: u128,
    pub(super) address: SocketAddr,
    pub(super) dialled: bool,
}

/// What the table wants done, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Output<C> {
    /// Send this over the connection.
    Tell(C, Hello),
    /// The connection carries the frames from now on, and the peer is connected. `accept`: tell the peer so first.
    Adopt { connection: C, accept: bool },
    /// The peer is no longer connected; the connection is closed. `drain`: after what is queued was sent.
    Leave { connection: C, peer: NodeId, reason: DisconnectReason, drain: bool },
    /// The connection is closed; it never carried frames.
    Drop(C),
    /// A dial reached a peer that was connected.
    Already { connection: C, peer: NodeId, address: SocketAddr },
}

/// All connections that have passed the handshake.
#[derive(Debug)]
pub(super) struct Peers<C> {
    me: NodeId,
    current: BTreeMap<NodeId, (C, Verified)>,
    /// Connections about which nothing is decided yet.
    waiting: BTreeMap<C, Verified>,
    /// Connections that this node dialled and that the peer may already count on: all but its proof is there.
    greeted: BTreeMap<C, (NodeId, u128)>,
    /// Connections that carry frames, and since when nothing is heard over them.
    doubted: BTreeMap<C, Instant>,
}

impl<C: Copy + Ord> Peers<C> {
    pub(super) fn new(me: NodeId) -> Self {
        Self { me, current: BTreeMap::new(), waiting: BTreeMap::new(), greeted: BTreeMap::new(), doubted: BTreeMap::new() }
    }

    pub(super) fn is_connected(&self, peer: NodeId) -> bool {
        self.current.contains_key(&peer)
    }

    fn decides(&self, peer: NodeId) -> bool {
        self.me < peer
    }

    /// Nothing is heard over the connection to `peer`: any other will do. Gives that connection.
    pub(super) fn doubt(&mut self, peer: NodeId, now: Instant) -> Option<C> {
        let (connection, _) = self.current.get(&peer)?;
        self.doubted.insert(*connection, now);
        Some(*connection)
    }

    /// When something was heard over the connection to `peer` last: after it was doubted it is trusted again.
    pub(super) fn heard(&mut self, peer: NodeId, at: Instant) {
        if let Some((connection, _)) = self.current.get(&peer)
            && self.doubted.get(connection).is_some_and(|since| at > *since)
        {
            self.doubted.remove(connection);
        }
    }

    /// Whether the connection to `peer` is there and not doubted, and, if a session is given, is that one.
    fn holds(&self, peer: NodeId, session: Option<u128>) -> bool {
        let current = self.current.get(&peer).filter(|(connection, _)| !self.doubted.contains_key(connection));
        current.is_some_and(|(_, verified)| session.is_none_or(|session| verified.session == session))
    }

    /// A connection to `peer` has got its name and will soon pass the handshake, if the peer is of the cluster.
    pub(super) fn greeted(&mut self, connection: C, peer: NodeId, session: u128) {
        self.greeted.insert(connection, (peer, session));
    }

    /// A connection has passed the handshake.
    pub(super) fn verified(&mut self, connection: C, verified: Verified) -> Vec<Output<C>> {
        self.greeted.remove(&connection);
        let peer = verified.peer;
        if !self.decides(peer) {
            self.waiting.insert(connection, verified);
            return vec![];
        }
        match self.current.get(&peer) {
            Some((_, current)) if current.boot == verified.boot => {
                let query = Hello::Query { session: current.session };
                self.waiting.insert(connection, verified);
                vec![Output::Tell(connection, query)]
            }
            _ => self.adopt(connection, verified, true),
        }
    }

    /// The peer said something over a connection that carries no frames yet.
    pub(super) fn said(&mut self, connection: C, hello: &Hello) -> Vec<Output<C>> {
        let Some(verified) = self.waiting.remove(&connection) else { return vec![] };
        let peer = verified.peer;
        match (self.decides(peer), hello) {
            (true, Hello::Holding(true)) if self.holds(peer, None) => {
                let mut outputs = vec![Output::Tell(connection, Hello::Duplicate), Output::Drop(connection)];
                if verified.dialled {
                    outputs.push(Output::Already { connection, peer, address: verified.address });
                }
                outputs
            }
            (true, Hello::Holding(_)) => self.adopt(connection, verified, true),
            (false, Hello::Accept) => self.adopt(connection, verified, false),
            (false, Hello::Query { session }) => {
                // One about which nothing is decided yet counts: the decision for it may be on its way.
                let holding = self.holds(peer, Some(*session))
                    || self.waiting.values().any(|other| other.peer == peer && other.session == *session)
                    || self.greeted.values().any(|other| *other == (peer, *session));
                self.waiting.insert(connection, verified);
                vec![Output::Tell(connection, Hello::Holding(holding))]
            }
            (false, Hello::Duplicate) => {
                let already = verified.dialled.then_some(Output::Already { connection, peer, address: verified.address });
                std::iter::once(Output::Drop(connection)).chain(already).collect()
            }
            _ => vec![Output::Drop(connection)],
        }
    }

    fn adopt(&mut self, connection: C, verified: Verified, accept: bool) -> Vec<Output<C>> {
        let peer = verified.peer;
        let replaced = self.current.insert(peer, (connection, verified));
        if let Some((old, _)) = &replaced {
            self.doubted.remove(old);
        }
        let leave = replaced.map(|(old, _)| Output::Leave { connection: old, peer, reason: DisconnectReason::Closed, drain: false });
        leave.into_iter().chain([Output::Adopt { connection, accept }]).collect()
    }

    /// A connection has ended. The peer's words, if it broke the protocol, are in `reason`.
    pub(super) fn ended(&mut self, connection: C, reason: DisconnectReason) -> Vec<Output<C>> {
        self.waiting.remove(&connection);
        self.greeted.remove(&connection);
        self.doubted.remove(&connection);
        let peer = self.current.iter().find(|(_, (current, _))| *current == connection).map(|(peer, _)| *peer);
        match peer {
            Some(peer) => {
                self.current.remove(&peer);
                vec![Output::Leave { connection, peer, reason, drain: false }]
            }
            None => vec![],
        }
    }

    /// This node wants to be rid of a peer.
    pub(super) fn disconnect(&mut self, peer: NodeId, drain: bool) -> Vec<Output<C>> {
        let current = self.current.remove(&peer);
        if let Some((connection, _)) = &current {
            self.doubted.remove(connection);
        }
        let leave = current.map(|(connection, _)| Output::Leave { connection, peer, reason: DisconnectReason::Requested, drain });
        let waiting: Vec<C> = self.waiting.iter().filter(|(_, other)| other.peer == peer).map(|(connection, _)| *connection).collect();
        for connection in &waiting {
            self.waiting.remove(connection);
        }
        leave.into_iter().chain(waiting.into_iter().map(Output::Drop)).collect()
    }

    /// Everybody who is connected or about to be.
    pub(super) fn everybody(&self) -> Vec<NodeId> {
        let mut peers: Vec<NodeId> = self.current.keys().copied().chain(self.waiting.values().map(|other| other.peer)).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use proptest::prelude::*;

    use super::*;

    const LOW: NodeId = NodeId([1; 32]);
    const HIGH: NodeId = NodeId([2; 32]);

    /// Two tables and the connections between them, each an ordered pipe in both directions.
    struct Pair {
        ends: [Peers<u32>; 2],
        boots: [u64; 2],
        carrying: [Option<u32>; 2],
        connects: [usize; 2],
        /// Events under way to an end.
        pipes: BTreeMap<(u32, usize), VecDeque<Event>>,
        open: [BTreeSet<u32>; 2],
        next: u32,
    }

    #[derive(Debug, Clone)]
    enum Event {
        Verified(bool),
        Said(Hello),
        Ended,
    }

    impl Pair {
        fn new() -> Self {
            Self {
                ends: [Peers::new(LOW), Peers::new(HIGH)],
                boots: [1, 1],
                carrying: [None; 2],
                connects: [0; 2],
                pipes: BTreeMap::new(),
                open: [BTreeSet::new(), BTreeSet::new()],
                next: 0,
            }
        }

        fn dial(&mut self, from: usize) -> u32 {
            let connection = self.next;
            self.next += 1;
            // The lower id learns that a connection is good only after the other end has its name.
            self.ends[1].greeted(connection, LOW, u128::from(connection));
            for end in 0..2 {
                self.open[end].insert(connection);
                self.pipes.entry((connection, end)).or_default().push_back(Event::Verified(end == from));
            }
            connection
        }

        /// Delivers the oldest event of one pipe.
        fn deliver(&mut self, connection: u32, end: usize) {
            let Some(event) = self.pipes.get_mut(&(connection, end)).and_then(VecDeque::pop_front) else { return };
            if !self.open[end].contains(&connection) {
                return;
            }
            let peer = [HIGH, LOW][end];
            let outputs = match event {
                Event::Verified(dialled) => {
                    let address = SocketAddr::from(([10, 0, 0, 1], 1));
                    let (boot, session) = (self.boots[1 - end], u128::from(connection));
                    self.ends[end].verified(connection, Verified { peer, boot, session, address, dialled })
                }
                Event::Said(hello) => self.ends[end].said(connection, &hello),
                Event::Ended => {
                    self.open[end].remove(&connection);
                    self.ends[end].ended(connection, DisconnectReason::Closed)
                }
            };
            self.obey(end, outputs);
        }

        fn obey(&mut self, end: usize, outputs: Vec<Output<u32>>) {
            let send = |pipes: &mut BTreeMap<_, VecDeque<Event>>, connection, event| {
                pipes.entry((connection, 1 - end)).or_default().push_back(event);
            };
            for output in outputs {
                match output {
                    Output::Tell(connection, hello) => send(&mut self.pipes, connection, Event::Said(hello)),
                    Output::Adopt { connection, accept } => {
                        assert_eq!(self.carrying[end], None, "a peer is not connected twice");
                        self.carrying[end] = Some(connection);
                        self.connects[end] += 1;
                        if accept {
                            send(&mut self.pipes, connection, Event::Said(Hello::Accept));
                        }
                    }
                    Output::Leave { connection, .. } => {
                        assert_eq!(self.carrying[end], Some(connection));
                        self.carrying[end] = None;
                        if self.open[end].remove(&connection) {
                            send(&mut self.pipes, connection, Event::Ended);
                        }
                    }
                    Output::Drop(connection) => {
                        self.open[end].remove(&connection);
                        send(&mut self.pipes, connection, Event::Ended);
                    }
                    Output::Already { .. } => {}
                }
            }
        }

        fn settle(&mut self) {
            while let Some((&(connection, end), _)) = self.pipes.iter().find(|(_, pipe)| !pipe.is_empty()) {
                self.deliver(connection, end);
            }
        }
    }

    #[test]
    fn simultaneous_dials_give_one_connection() {
        let mut pair = Pair::new();
        pair.dial(0);
        pair.dial(1);
        pair.settle();
        assert_eq!(pair.carrying[0], pair.carrying[1]);
        assert!(pair.carrying[0].is_some());
        assert_eq!(pair.connects, [1, 1]);
    }

    #[test]
    fn a_restarted_peer_replaces_its_old_self() {
        for restarted in 0..2 {
            let mut pair = Pair::new();
            pair.dial(0);
            pair.settle();
            pair.ends[restarted] = Peers::new([LOW, HIGH][restarted]);
            pair.boots[restarted] = 2;
            pair.carrying[restarted] = None;
            pair.open[restarted].clear();
            let fresh = pair.dial(restarted);
            pair.settle();
            assert_eq!(pair.carrying, [Some(fresh); 2]);
            assert_eq!(pair.connects[1 - restarted], 2);
        }
    }

    #[test]
    fn a_connection_that_only_one_end_lost_is_replaced() {
        for end in 0..2 {
            let mut pair = Pair::new();
            let first = pair.dial(0);
            pair.settle();
            let outputs = pair.ends[end].disconnect([HIGH, LOW][end], false);
            pair.obey(end, outputs);
            // The other end never hears of it: the cable is cut.
            pair.pipes.remove(&(first, 1 - end));
            let second = pair.dial(end);
            pair.settle();
            assert_eq!(pair.carrying, [Some(second); 2], "end {end}");
        }
    }

    #[test]
    fn a_connection_over_which_nothing_is_heard_is_replaced_by_another() {
        // Who doubts, and who dials.
        for (doubting, dialling) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let mut pair = Pair::new();
            let first = pair.dial(0);
            pair.settle();
            let peer = [HIGH, LOW][doubting];
            assert_eq!(pair.ends[doubting].doubt(peer, Instant::ZERO), Some(first));
            // The cable is out: what either end says over it does not arrive.
            let second = pair.dial(dialling);
            while let Some((&(connection, end), _)) = pair.pipes.iter().find(|(key, pipe)| key.0 != first && !pipe.is_empty()) {
                pair.deliver(connection, end);
            }
            assert_eq!(pair.carrying, [Some(second); 2], "{doubting} doubts, {dialling} dials");
            // It is as good as any from then on.
            pair.dial(1 - dialling);
            pair.settle();
            assert_eq!(pair.carrying, [Some(second); 2]);
        }
    }

    #[test]
    fn a_doubt_that_is_over_replaces_nothing() {
        for end in 0..2 {
            let mut pair = Pair::new();
            let first = pair.dial(0);
            pair.settle();
            let peer = [HIGH, LOW][end];
            let later = Instant::ZERO + std::time::Duration::from_millis(1);
            pair.ends[end].doubt(peer, Instant::ZERO);
            pair.ends[end].heard(peer, later);
            pair.dial(end);
            pair.settle();
            assert_eq!(pair.carrying, [Some(first); 2]);
            assert_eq!(pair.connects, [1, 1]);
        }
    }

    proptest! {
        /// However the news of simultaneous dials arrive, nobody sees the peer come twice.
        #[test]
        fn dials_alone_connect_once(dials in prop::collection::vec(0..2_usize, 1..5), order in prop::collection::vec(any::<prop::sample::Index>(), 0..60)) {
            let mut pair = Pair::new();
            for from in dials {
                pair.dial(from);
            }
            for index in order {
                let busy: Vec<_> = pair.pipes.iter().filter(|(_, pipe)| !pipe.is_empty()).map(|(key, _)| *key).collect();
                if !busy.is_empty() {
                    let (connection, end) = busy[index.index(busy.len())];
                    pair.deliver(connection, end);
                }
            }
            pair.settle();
            prop_assert_eq!(pair.connects, [1, 1]);
            prop_assert_eq!(pair.carrying[0], pair.carrying[1]);
        }

        /// Whatever is dialled and lost, and in whatever order news arrive, both ends end up with the same
        /// connection, and with one if any is left.
        #[test]
        fn both_ends_agree(actions in prop::collection::vec((0..7_u8, any::<prop::sample::Index>()), 1..80)) {
            let mut pair = Pair::new();
            for (action, index) in actions {
                match action {
                    0 => drop(pair.dial(0)),
                    1 => drop(pair.dial(1)),
                    2 => {
                        // One end loses its connection; the other hears of it some time later.
                        let end = index.index(2);
                        let outputs = pair.ends[end].disconnect([HIGH, LOW][end], false);
                        pair.obey(end, outputs);
                    }
                    3 => {
                        let end = index.index(2);
                        pair.ends[end].doubt([HIGH, LOW][end], Instant::ZERO);
                    }
                    _ => {
                        let busy: Vec<_> = pair.pipes.iter().filter(|(_, pipe)| !pipe.is_empty()).map(|(key, _)| *key).collect();
                        if !busy.is_empty() {
                            let (connection, end) = busy[index.index(busy.len())];
                            pair.deliver(connection, end);
                        }
                    }
                }
            }
            pair.settle();
            prop_assert_eq!(pair.carrying[0], pair.carrying[1]);
            let last = pair.dial(0);
            pair.settle();
            prop_assert_eq!(pair.carrying[0], pair.carrying[1]);
            prop_assert!(pair.carrying[0].is_some(), "the dial {} came to nothing", last);
        }
    }
}
