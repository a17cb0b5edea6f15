//! Which nodes in which order are worth a closer look.
//!
//! Up to [`EXACT_NODES_MAX`] nodes it is every choice in every order. Beyond that it is every node, every ordered
//! pair, and for each larger number of nodes a few choices that follow speed, memory or short links. Nodes of one
//! machine always come one after the other: the way between them is the shortest there is.

use std::collections::BTreeSet;

use super::EXACT_NODES_MAX;
use super::cost::{Speed, Work};
use super::links::LinkMatrix;
use crate::ids::NodeId;

/// A node that may take part.
#[derive(Debug, Clone)]
pub(super) struct Candidate {
    pub(super) node: NodeId,
    pub(super) name: String,
    pub(super) host: u128,
    pub(super) free: u64,
    pub(super) speed: Speed,
    pub(super) on_disk: bool,
    pub(super) pinned: bool,
}

/// Most nodes of which every pair is tried.
const PAIRS_MAX: usize = 64;

/// How many nodes are tried as the first of a chain.
const STARTS: usize = 3;

/// The orders to try, as indices into `nodes`; each has `min..=max` nodes, all pinned ones among them.
pub(super) fn orders(nodes: &[Candidate], links: &LinkMatrix, work: &Work<'_>, min: usize, max: usize) -> Vec<Vec<usize>> {
    let pinned: BTreeSet<usize> = (0..nodes.len()).filter(|&n| nodes[n].pinned).collect();
    let min = min.max(pinned.len()).max(1);
    let max = max.min(nodes.len());
    let mut orders = BTreeSet::new();
    if nodes.len() <= EXACT_NODES_MAX {
        every_order(nodes, max, &mut Vec::new(), &mut orders);
    } else {
        let fastest = ranked(nodes, |n| (1.0 / nodes[n].speed.read, 0));
        let roomiest = ranked(nodes, |n| (0.0, u64::MAX - nodes[n].free));
        orders.extend((0..nodes.len()).map(|n| vec![n]));
        let few = &fastest[..fastest.len().min(PAIRS_MAX)];
        orders.extend(few.iter().flat_map(|&a| few.iter().filter(move |&&b| a != b).map(move |&b| vec![a, b])));
        for size in sizes(min.max(3), max) {
            for ranking in [&fastest, &roomiest] {
                let set: BTreeSet<usize> = ranking.iter().copied().take(size).collect();
                let start = ranking.first().copied().unwrap_or(0);
                orders.insert(chain(nodes, links, work, &set, start, size));
            }
            let everyone: BTreeSet<usize> = (0..nodes.len()).collect();
            for &start in fastest.iter().take(STARTS) {
                orders.insert(chain(nodes, links, work, &everyone, start, size));
            }
        }
    }
    let acceptable = |order: &Vec<usize>| {
        let set: BTreeSet<usize> = order.iter().copied().collect();
        (min..=max).contains(&order.len()) && pinned.is_subset(&set) && hosts_are_together(nodes, order)
    };
    orders.into_iter().filter(acceptable).collect()
}

fn every_order(nodes: &[Candidate], max: usize, prefix: &mut Vec<usize>, orders: &mut BTreeSet<Vec<usize>>) {
    if !prefix.is_empty() {
        orders.insert(prefix.clone());
    }
    if prefix.len() == max {
        return;
    }
    for n in 0..nodes.len() {
        if !prefix.contains(&n) {
            prefix.push(n);
            every_order(nodes, max, prefix, orders);
            prefix.pop();
        }
    }
}

/// Whether the nodes of each machine are neighbours in the order.
pub(super) fn hosts_are_together(nodes: &[Candidate], order: &[usize]) -> bool {
    let mut left = BTreeSet::new();
    order.windows(2).all(|pair| {
        let (before, after) = (nodes[pair[0]].host, nodes[pair[1]].host);
        if before != after {
            left.insert(before);
        }
        !left.contains(&after)
    })
}

/// The nodes by a measure, smallest first; pinned ones before all others, and where the measure is equal those that
/// have the model.
fn ranked(nodes: &[Candidate], measure: impl Fn(usize) -> (f64, u64)) -> Vec<usize> {
    let mut ranking: Vec<usize> = (0..nodes.len()).collect();
    ranking.sort_by(|&a, &b| {
        let ((fa, ia), (fb, ib)) = (measure(a), measure(b));
        let (a, b) = (&nodes[a], &nodes[b]);
        b.pinned
            .cmp(&a.pinned)
            .then(fa.total_cmp(&fb))
            .then(ia.cmp(&ib))
            .then(b.on_disk.cmp(&a.on_disk))
            .then(b.free.cmp(&a.free))
            .then(a.node.cmp(&b.node))
    });
    ranking
}

/// All sizes while they are small, then ever fewer, but always both ends.
fn sizes(min: usize, max: usize) -> Vec<usize> {
    (min..=max).filter(|&size| size <= 8 || size == min || size == max || [10, 12, 16, 20, 24, 32, 40, 48, 56].contains(&size)).collect()
}

/// An order of `size` nodes of `set` that begins at `start` and always goes on to a node of the same machine, if there
/// is one, else to a pinned one, else over the link and to the node that together cost the least.
fn chain(nodes: &[Candidate], links: &LinkMatrix, work: &Work<'_>, set: &BTreeSet<usize>, start: usize, size: usize) -> Vec<usize> {
    let mut rest = set.clone();
    rest.remove(&start);
    let mut order = vec![start];
    let mut pinned_left = rest.iter().filter(|&&n| nodes[n].pinned).count();
    let chunk = work.activation_bytes(work.chunks().1);
    while order.len() < size {
        let here = &nodes[order[order.len() - 1]];
        let room = size - order.len();
        let cost = |n: usize| {
            let there = &nodes[n];
            let same = there.host == here.host;
            let link = links.get(here.node, there.node, same).seconds(chunk);
            // A typical layer's reading, so that a slow node does not win by a short link alone.
            link + work.model.layer_bytes.first().map_or(0.0, |&b| b as f64 / there.speed.read)
        };
        let next = rest
            .iter()
            .copied()
            // Pinned nodes must all find a place.
            .filter(|&n| room > pinned_left || nodes[n].pinned)
            .min_by(|&a, &b| {
                let (ca, cb) = (&nodes[a], &nodes[b]);
                (cb.host == here.host)
                    .cmp(&(ca.host == here.host))
                    .then(cb.pinned.cmp(&ca.pinned))
                    .then(cost(a).total_cmp(&cost(b)))
                    .then(cb.on_disk.cmp(&ca.on_disk))
                    .then(ca.node.cmp(&cb.node))
            });
        let Some(next) = next else { break };
        rest.remove(&next);
        pinned_left -= usize::from(nodes[next].pinned);
        order.push(next);
    }
    order
}
