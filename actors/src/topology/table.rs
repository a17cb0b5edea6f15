//! Which link to measure when, and what is known: a machine without I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::matrix::{LinkMatrix, LinkMeasure};
use crate::dice::Dice;
use crate::env::Instant;
use crate::ids::NodeId;

/// Echoes to a new peer in quick succession, so that a planner has a figure at once.
const FIRST_ECHOES: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Pause between two echoes to a known peer.
const PAUSE: Duration = Duration::from_secs(10);
/// The most peers whose links are kept fresh, and the most links that are believed of one peer.
const PEERS_MAX: usize = 64;
/// An echo that was lost is given up by its deadline; this is when it is sent again at the latest.
const GIVEN_UP: Duration = Duration::from_secs(5);

/// What the table is told.
#[derive(Debug, Clone)]
pub(super) enum Input {
    /// Time has passed.
    Tick,
    /// Who is connected and there.
    Peers(BTreeSet<NodeId>),
    /// An echo came back, or did not.
    Echoed { peer: NodeId, rtt: Option<Duration> },
    /// A peer told its row.
    Row { peer: NodeId, row: Vec<(NodeId, LinkMeasure)> },
    /// The bandwidth to a peer was measured.
    Bandwidth { peer: NodeId, bytes_per_second: f64 },
}

/// What the table wants done.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Output {
    /// Send an echo.
    Echo(NodeId),
    /// Ask for the peer's row.
    FetchRow(NodeId),
    /// Publish.
    Matrix(Arc<LinkMatrix>),
}

#[derive(Debug)]
struct Peer {
    due: Instant,
    echoes: u32,
    under_way: bool,
    rtt: Option<Duration>,
    bytes_per_second: Option<f64>,
    row: BTreeMap<NodeId, LinkMeasure>,
}

/// The table of one node.
#[derive(Debug)]
pub(super) struct LinkTable {
    me: NodeId,
    dice: Dice,
    peers: BTreeMap<NodeId, Peer>,
    shown: Arc<LinkMatrix>,
}

impl LinkTable {
    /// An empty table.
    pub(super) fn new(me: NodeId, seed: u64) -> Self {
        Self { me, dice: Dice::new(seed), peers: BTreeMap::new(), shown: Arc::default() }
    }

    /// What this node has measured itself.
    pub(super) fn row(&self) -> Vec<(NodeId, LinkMeasure)> {
        let measured = self.peers.iter().filter_map(|(node, peer)| Some((*node, peer.measure()?)));
        measured.collect()
    }

    /// Takes what happened and says what to do.
    pub(super) fn step(&mut self, now: Instant, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        match input {
            Input::Tick => {}
            Input::Peers(present) => {
                self.peers.retain(|node, _| present.contains(node));
                for node in present {
                    if node != self.me && self.peers.len() < PEERS_MAX {
                        self.peers.entry(node).or_insert_with(|| Peer {
                            due: now,
                            echoes: 0,
                            under_way: false,
                            rtt: None,
                            bytes_per_second: None,
                            row: BTreeMap::new(),
                        });
                    }
                }
            }
            Input::Echoed { peer, rtt } => {
                let pause = self.dice.jitter(PAUSE);
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.under_way = false;
                    peer.due = now + if peer.echoes < FIRST_ECHOES { FIRST_PAUSE } else { pause };
                    if let Some(sample) = rtt {
                        // The first figures are of a cold connection: the best of them is nearest the truth. Later
                        // ones are smoothed one eighth at a time (RFC 6298).
                        peer.rtt = Some(match peer.rtt {
                            None => sample,
                            Some(old) if peer.echoes <= FIRST_ECHOES => old.min(sample),
                            Some(old) => old - old / 8 + sample / 8,
                        });
                    }
                }
            }
            Input::Row { peer, row } => {
                if let Some(known) = self.peers.get_mut(&peer) {
                    let sane = row.into_iter().filter(|(to, measure)| *to != peer && measure.is_sane());
                    known.row = sane.take(PEERS_MAX).collect();
                }
            }
            Input::Bandwidth { peer, bytes_per_second } => {
                if let Some(peer) = self.peers.get_mut(&peer) {
                    peer.bytes_per_second = Some(bytes_per_second);
                }
            }
        }
        for (node, peer) in &mut self.peers {
            if peer.due <= now {
                peer.echoes = peer.echoes.saturating_add(1);
                peer.under_way = true;
                peer.due = now + GIVEN_UP;
                outputs.push(Output::Echo(*node));
                // The peer has measured by the time its first echoes are through, and has news now and then.
                if peer.echoes >= FIRST_ECHOES {
                    outputs.push(Output::FetchRow(*node));
                }
            }
        }
        let matrix = self.matrix();
        if self.differs(&matrix) {
            self.shown = Arc::new(matrix);
            outputs.push(Output::Matrix(Arc::clone(&self.shown)));
        }
        outputs
    }

    /// When there is something to do though nothing happens, if ever.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.peers.values().map(|peer| peer.due).min()
    }

    fn matrix(&self) -> LinkMatrix {
        let mut links = BTreeMap::new();
        for (node, peer) in &self.peers {
            links.extend(peer.measure().map(|measure| ((self.me, *node), measure)));
            links.extend(peer.row.iter().map(|(to, measure)| ((*node, *to), *measure)));
        }
        LinkMatrix { links }
    }

    /// Whether a matrix says something new to a planner: links that came or went, or figures that moved by a tenth.
    fn differs(&self, matrix: &LinkMatrix) -> bool {
        let (old, new) = (&self.shown.links, &matrix.links);
        old.len() != new.len()
            || old.iter().zip(new).any(|((was, old), (is, new))| {
                let rate = |measure: &LinkMeasure| measure.bytes_per_second.unwrap_or(0.0);
                was != is || old.rtt.abs_diff(new.rtt) > old.rtt / 10 || (rate(old) - rate(new)).abs() > rate(old) / 10.0
            })
    }
}

impl Peer {
    fn measure(&self) -> Option<LinkMeasure> {
        Some(LinkMeasure { rtt: self.rtt?, bytes_per_second: self.bytes_per_second })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Instant {
        Instant::ZERO + Duration::from_millis(millis)
    }

    fn node(byte: u8) -> NodeId {
        NodeId([byte; 32])
    }

    fn echoes(outputs: &[Output]) -> usize {
        outputs.iter().filter(|output| matches!(output, Output::Echo(_))).count()
    }

    #[test]
    fn a_new_peer_is_measured_at_once_and_then_seldom() {
        let mut table = LinkTable::new(node(1), 1);
        let mut sent = echoes(&table.step(at(0), Input::Peers([node(1), node(2)].into())));
        let mut now = at(0);
        while now < at(60_000) {
            let rtt = Some(Duration::from_micros(if sent < 3 { 900 } else { 300 }));
            sent += echoes(&table.step(now, Input::Echoed { peer: node(2), rtt }));
            now = table.deadline().unwrap();
            sent += echoes(&table.step(now, Input::Tick));
        }
        assert!((8..16).contains(&sent), "{sent}");
        assert_eq!(table.shown.between(node(2), node(1)).unwrap().rtt, Duration::from_micros(300));
        table.step(now, Input::Peers([node(1)].into()));
        assert_eq!(table.shown.between(node(2), node(1)), None);
    }

    #[test]
    fn an_echo_that_is_lost_is_sent_again() {
        let mut table = LinkTable::new(node(1), 1);
        table.step(at(0), Input::Peers([node(2)].into()));
        assert_eq!(table.deadline(), Some(at(0) + GIVEN_UP));
        assert_eq!(echoes(&table.step(at(5000), Input::Tick)), 1);
    }

    #[test]
    fn rows_of_others_complete_the_matrix_and_nonsense_does_not() {
        let mut table = LinkTable::new(node(1), 1);
        table.step(at(0), Input::Peers([node(2), node(3)].into()));
        let measure = |micros, bytes_per_second| LinkMeasure { rtt: Duration::from_micros(micros), bytes_per_second };
        let row = vec![(node(3), measure(100, Some(1e9))), (node(4), measure(5, Some(f64::NAN))), (node(2), measure(1, None))];
        table.step(at(1), Input::Row { peer: node(2), row });
        table.step(at(1), Input::Row { peer: node(3), row: vec![(node(2), measure(200, None))] });
        table.step(at(1), Input::Row { peer: node(9), row: vec![(node(2), measure(1, None))] });
        assert_eq!(table.shown.between(node(3), node(2)), Some(measure(100, Some(1e9))));
        assert_eq!(table.shown.iter().count(), 2);
        assert_eq!(table.shown.between(node(2), node(4)), None);
    }
}
