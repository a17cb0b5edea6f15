//! The best split of the layers over nodes in a given order: a dynamic programme over (stage, layers so far).
//!
//! The time to answer is the sum of what a token or chunk meets on its way, plus what the busiest machine adds while
//! several are under way. A sum and a maximum together have no single best prefix, so each cell keeps all prefixes of
//! which none is better in everything. What is kept is small, because most prefixes are worse in everything.

use std::rc::Rc;

use super::cost::{Picos, Speed, Work};
use super::{ANSWER_TOKENS, LABELS_MAX, LABELS_MAX_LARGE};

/// A node in an order.
#[derive(Debug, Clone)]
pub(super) struct Seat {
    /// For as many stages as the order has.
    pub(super) prices: Rc<Prices>,
    pub(super) free: u64,
    /// Whether the node before it in the order is on the same machine.
    pub(super) same_host_as_before: bool,
}

/// The best split that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Split {
    /// Where each stage ends.
    pub(super) ends: Vec<usize>,
    /// Time for the reference job, without links.
    pub(super) score: Picos,
    /// Work of the busiest stage: the tie-break that balances.
    pub(super) busiest: Picos,
}

/// What each layer costs on one node.
#[derive(Debug)]
pub(super) struct Prices {
    /// `way[l]`: the first `l` layers, for one job that passes through.
    way: Vec<Picos>,
    /// `load[l]`: the first `l` layers, for what else passes at the same time.
    load: Vec<Picos>,
    way_head: Picos,
    load_head: Picos,
    way_stage: Picos,
    load_stage: Picos,
}

/// A prefix of stages.
#[derive(Debug, Clone, Copy)]
struct Label {
    way: Picos,
    /// Load of the busiest machine that is complete.
    host_max: Picos,
    /// Load of the machine of the last stage so far.
    host: Picos,
    busiest: Picos,
    /// Where the last stage begins, and which label of that cell it continues.
    from: usize,
    parent: usize,
}

impl Label {
    fn covers(&self, other: &Self) -> bool {
        self.way <= other.way && self.host_max <= other.host_max && self.host <= other.host && self.busiest <= other.busiest
    }

    fn score(&self) -> Picos {
        self.way.saturating_add(self.host_max.max(self.host))
    }
}

/// What the layers cost on a node of this speed, in a pipeline of so many stages.
pub(super) fn prices(work: &Work<'_>, speed: Speed, stages: usize) -> Prices {
    let (chunks, _) = work.chunks();
    let (groups, rows) = work.groups(stages);
    let way_of = |chunk: Picos, token: Picos| chunk.saturating_add(token.saturating_mul(ANSWER_TOKENS));
    let load_of = |chunk: Picos, token: Picos| {
        chunk.saturating_mul(chunks - 1).saturating_add(token.saturating_mul(ANSWER_TOKENS).saturating_mul(groups - 1))
    };
    let (mut way, mut load): (Vec<Picos>, Vec<Picos>) = (vec![0], vec![0]);
    for layer in 0..work.layers() {
        let (chunk, token) = (work.chunk_picos(layer, speed), work.token_picos(layer, speed, rows));
        way.push(way[layer].saturating_add(way_of(chunk, token)));
        load.push(load[layer].saturating_add(load_of(chunk, token)));
    }
    let head = work.head_picos(speed, rows);
    let stage = work.overhead_picos();
    Prices {
        way,
        load,
        // Only the last chunk of a prompt samples.
        way_head: way_of(work.head_picos(speed, 1), head),
        load_head: load_of(0, head),
        way_stage: way_of(stage, stage),
        load_stage: load_of(stage, stage),
    }
}

/// Splits the layers over `seats` in their order, at least one layer each. `None` if no split fits the memory, or if
/// none scores at most `bound`.
pub(super) fn split(work: &Work<'_>, seats: &[Seat], bound: Picos) -> Option<Split> {
    let layers = work.layers();
    let stages = seats.len();
    if stages == 0 || stages > layers {
        return None;
    }
    let free = seats.iter().fold(0_u64, |sum, seat| sum.saturating_add(seat.free));
    if work.model.layer_bytes.iter().fold(0_u64, |sum, &bytes| sum.saturating_add(bytes)) > free {
        return None;
    }
    let labels_max = if stages <= super::EXACT_NODES_MAX { LABELS_MAX } else { LABELS_MAX_LARGE };
    // rest[l]: the least that the layers from `l` on can cost, whoever gets them. A prefix that leaves no room for that
    // under the bound is not worth keeping.
    let mut rest: Vec<Picos> = vec![0; layers + 1];
    for layer in (0..layers).rev() {
        let least = seats.iter().map(|seat| seat.prices.way[layer + 1] - seat.prices.way[layer]).min().unwrap_or(0);
        rest[layer] = rest[layer + 1].saturating_add(least);
    }
    // cells[i][l]: prefixes of i + 1 stages that cover l layers.
    let mut cells: Vec<Vec<Vec<Label>>> = Vec::with_capacity(stages);
    for (i, seat) in seats.iter().enumerate() {
        let prices = &seat.prices;
        let last = i + 1 == stages;
        let mut row: Vec<Vec<Label>> = vec![Vec::new(); layers + 1];
        let begins = if i == 0 { 0..1 } else { i..layers };
        for from in begins {
            if i > 0 && cells[i - 1][from].is_empty() {
                continue;
            }
            let ends = if last { layers..layers + 1 } else { from + 1..layers - (stages - 1 - i) + 1 };
            for to in ends {
                // More layers need more memory: what does not fit now will not fit later.
                if work.total(from, to) > seat.free {
                    break;
                }
                let head = to == layers;
                let way = prices.way[to] - prices.way[from] + prices.way_stage + if head { prices.way_head } else { 0 };
                let load = prices.load[to] - prices.load[from] + prices.load_stage + if head { prices.load_head } else { 0 };
                if i == 0 {
                    let label = Label { way, host_max: 0, host: load, busiest: way.saturating_add(load), from, parent: 0 };
                    if label.score().saturating_add(rest[to]) <= bound {
                        insert(&mut row[to], label, labels_max);
                    }
                    continue;
                }
                for (parent, before) in cells[i - 1][from].iter().enumerate() {
                    let (host_max, host) = if seat.same_host_as_before {
                        (before.host_max, before.host.saturating_add(load))
                    } else {
                        (before.host_max.max(before.host), load)
                    };
                    let label = Label {
                        way: before.way.saturating_add(way),
                        host_max,
                        host,
                        busiest: before.busiest.max(way.saturating_add(load)),
                        from,
                        parent,
                    };
                    if label.score().saturating_add(rest[to]) <= bound {
                        insert(&mut row[to], label, labels_max);
                    }
                }
            }
        }
        cells.push(row);
    }
    let finals = &cells[stages - 1][layers];
    let (mut at, best) = finals.iter().enumerate().min_by_key(|(n, label)| (label.score(), label.busiest, *n))?;
    let (score, busiest) = (best.score(), best.busiest);
    let mut ends = vec![layers];
    let mut to = layers;
    for i in (0..stages).rev() {
        let label = cells[i][to][at];
        (to, at) = (label.from, label.parent);
        if i > 0 {
            ends.push(to);
        }
    }
    ends.reverse();
    Some(Split { ends, score, busiest })
}

/// Adds a prefix to a cell unless another one is as good in everything, and drops those that it beats in everything.
fn insert(cell: &mut Vec<Label>, label: Label, labels_max: usize) {
    if cell.iter().any(|known| known.covers(&label)) {
        return;
    }
    cell.retain(|known| !label.covers(known));
    cell.push(label);
    if cell.len() > labels_max {
        // Far beyond what small clusters need; the one that looks worst by now goes.
        if let Some((worst, _)) = cell.iter().enumerate().max_by_key(|(n, label)| (label.score(), label.busiest, *n)) {
            cell.swap_remove(worst);
        }
    }
}
