//! What each rank does in a collective, as data: no channel, no thread, no clock.
//!
//! Sums are formed over `f32`, rank by rank from 0 up, in every schedule: `((x₀ + x₁) + x₂) + …`. So the result is the same,
//! bit for bit, on every rank, whichever schedule was chosen for its length and whichever machine has which rank.
//!
//! | schedule | who needs a channel | what a rank sends of a vector of `n` | messages one after the other |
//! |---|---|---|---|
//! | exchange | all pairs | `n` to each | 1 |
//! | scatter | all pairs | two `1/ranks` of `n` to each | 2 |
//! | chain | neighbours | `n` up and `n` down | 2 (ranks − 1), overlapped by pieces |
//!
//! A vector longer than a channel's slots goes in pieces. With exchange and scatter a piece is finished before the next begins; along a
//! chain they follow each other. Channels with [`IN_FLIGHT`] slots are enough for all of them: no order of events makes ranks wait for
//! each other for ever.

use std::ops::Range;

/// Slots that a channel needs: messages that are under way on it at once.
pub const IN_FLIGHT: u16 = 2;

/// How ranks work together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Schedule {
    /// Everybody sends everything to everybody.
    Exchange,
    /// Everybody sums one part, which the others send, and sends the sum to the others.
    Scatter,
    /// Partial sums go up the ranks, the sum comes down.
    Chain,
}

/// What a message holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum What {
    /// The sender's own elements.
    Own,
    /// Sums over some of the ranks.
    Partial,
    /// Sums over all ranks.
    Total,
}

/// One thing that a rank does. Ranges are of elements of its vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Send elements.
    Send {
        /// To which rank.
        to: usize,
        /// Of what.
        what: What,
        /// Which.
        range: Range<usize>,
    },
    /// Begin a sum with own elements.
    BeginOwn(Range<usize>),
    /// Add own elements to a sum.
    AddOwn(Range<usize>),
    /// Put what a rank sends in the place of sums.
    Take {
        /// Which rank.
        from: usize,
        /// What it sends.
        what: What,
        /// Which elements.
        range: Range<usize>,
    },
    /// Add what a rank sends of its own to sums.
    Add {
        /// Which rank.
        from: usize,
        /// Which elements.
        range: Range<usize>,
    },
}

/// Part `index` of `range` cut in `of` parts whose lengths differ by one at most.
pub fn part(range: &Range<usize>, index: usize, of: usize) -> Range<usize> {
    let length = range.len();
    let cut = |at: usize| range.start + length * at / of;
    cut(index)..cut(index + 1)
}

/// Cuts `elements` into pieces of at most `most`; one empty piece if there are none, so that ranks still meet.
fn pieces(elements: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = elements.div_ceil(most.max(1)).max(1);
    (0..count).map(move |index| part(&(0..elements), index, count))
}

/// A sum over all ranks in order, of own elements and what the others send.
fn reduce(rank: usize, ranks: usize, range: &Range<usize>, out: &mut Vec<Step>) {
    for from in 0..ranks {
        let range = range.clone();
        out.push(match (from == rank, from) {
            (true, 0) => Step::BeginOwn(range),
            (true, _) => Step::AddOwn(range),
            (false, 0) => Step::Take { from, what: What::Own, range },
            (false, _) => Step::Add { from, range },
        });
    }
}

fn others(rank: usize, ranks: usize) -> impl Iterator<Item = usize> {
    // Everybody begins with another one.
    (1..ranks).map(move |ahead| (rank + ahead) % ranks)
}

/// The steps of `rank` of `ranks` to sum vectors of `elements`; a message holds at most `most` elements. Afterwards every rank has the
/// whole sum.
pub fn all_reduce(schedule: Schedule, rank: usize, ranks: usize, elements: usize, most: usize) -> Vec<Step> {
    let mut out = Vec::new();
    match schedule {
        _ if ranks == 1 => out.push(Step::BeginOwn(0..elements)),
        Schedule::Exchange => {
            for range in pieces(elements, most) {
                out.extend(others(rank, ranks).map(|to| Step::Send { to, what: What::Own, range: range.clone() }));
                reduce(rank, ranks, &range, &mut out);
            }
        }
        Schedule::Scatter => {
            for block in pieces(elements, most.saturating_mul(ranks)) {
                scatter(rank, ranks, &block, &mut out);
                let mine = part(&block, rank, ranks);
                out.extend(others(rank, ranks).map(|to| Step::Send { to, what: What::Total, range: mine.clone() }));
                out.extend(others(rank, ranks).map(|from| Step::Take { from, what: What::Total, range: part(&block, from, ranks) }));
            }
        }
        Schedule::Chain => {
            let pieces: Vec<Range<usize>> = pieces(elements, most).collect();
            // A piece comes down here so many turns after it went up: it passes the ranks above on both ways, while others follow it.
            let delay = 2 * (ranks - 1 - rank);
            for turn in 0..pieces.len() + delay {
                if let Some(range) = pieces.get(turn) {
                    up(rank, ranks, range, &mut out);
                }
                if let Some(range) = turn.checked_sub(delay).and_then(|piece| pieces.get(piece)) {
                    down(rank, ranks, range, &mut out);
                }
            }
        }
    }
    out
}

fn scatter(rank: usize, ranks: usize, block: &Range<usize>, out: &mut Vec<Step>) {
    out.extend(others(rank, ranks).map(|to| Step::Send { to, what: What::Own, range: part(block, to, ranks) }));
    reduce(rank, ranks, &part(block, rank, ranks), out);
}

fn up(rank: usize, ranks: usize, range: &Range<usize>, out: &mut Vec<Step>) {
    match rank.checked_sub(1) {
        None => out.push(Step::BeginOwn(range.clone())),
        Some(from) => {
            out.push(Step::Take { from, what: What::Partial, range: range.clone() });
            out.push(Step::AddOwn(range.clone()));
        }
    }
    if rank + 1 < ranks {
        out.push(Step::Send { to: rank + 1, what: What::Partial, range: range.clone() });
    }
}

fn down(rank: usize, ranks: usize, range: &Range<usize>, out: &mut Vec<Step>) {
    if rank + 1 < ranks {
        out.push(Step::Take { from: rank + 1, what: What::Total, range: range.clone() });
    }
    if let Some(to) = rank.checked_sub(1) {
        out.push(Step::Send { to, what: What::Total, range: range.clone() });
    }
}

/// The steps to leave each rank the sum of its part of the vector, which is [`part`]`(0..elements, rank, ranks)`. Needs channels between
/// all pairs.
pub fn reduce_scatter(rank: usize, ranks: usize, elements: usize, most: usize) -> Vec<Step> {
    let mut out = Vec::new();
    let all = 0..elements;
    let count = (0..ranks).map(|rank| part(&all, rank, ranks).len()).max().unwrap_or(0).div_ceil(most.max(1)).max(1);
    for piece in 0..count {
        let of = |owner: usize| part(&part(&all, owner, ranks), piece, count);
        out.extend(others(rank, ranks).map(|to| Step::Send { to, what: What::Own, range: of(to) }));
        reduce(rank, ranks, &of(rank), &mut out);
    }
    out
}

/// The steps to give every rank the parts of all: `range` says which elements are whose. Needs channels between all pairs.
pub fn all_gather(rank: usize, ranks: usize, range: impl Fn(usize) -> Range<usize>, most: usize) -> Vec<Step> {
    let mut out = vec![Step::BeginOwn(range(rank))];
    let count = (0..ranks).map(|rank| range(rank).len()).max().unwrap_or(0).div_ceil(most.max(1)).max(1);
    for piece in 0..count {
        out.extend(others(rank, ranks).map(|to| Step::Send { to, what: What::Own, range: part(&range(rank), piece, count) }));
        out.extend(others(rank, ranks).map(|from| Step::Take { from, what: What::Own, range: part(&range(from), piece, count) }));
    }
    out
}

/// The steps to give every rank the vector of `root`. Needs channels between the root and all others.
pub fn broadcast(rank: usize, ranks: usize, root: usize, elements: usize, most: usize) -> Vec<Step> {
    let mut out = Vec::new();
    if rank == root {
        out.push(Step::BeginOwn(0..elements));
    }
    for range in pieces(elements, most) {
        if rank == root {
            out.extend(others(rank, ranks).map(|to| Step::Send { to, what: What::Own, range: range.clone() }));
        } else {
            out.push(Step::Take { from: root, what: What::Own, range });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};

    use proptest::prelude::*;

    use super::*;

    /// Messages under way, by sender and receiver.
    type Queues = BTreeMap<(usize, usize), VecDeque<(What, Range<usize>, Vec<f32>)>>;

    /// Runs all ranks' steps against queues of `slots` messages, one step of a rank at a time in the order that `turns` says. Gives what
    /// each rank has in the end.
    fn run(steps: Vec<Vec<Step>>, own: &[Vec<f32>], slots: usize, turns: &[u8]) -> Vec<Vec<f32>> {
        let ranks = own.len();
        let mut sums: Vec<Vec<f32>> = own.iter().map(|own| vec![f32::NAN; own.len()]).collect();
        let mut queues = Queues::new();
        let mut at = vec![0; ranks];
        let (mut stuck, mut turn) = (0, 0);
        while stuck < ranks * 300 {
            let rank = turns.get(turn % turns.len().max(1)).map_or(turn, |turn| *turn as usize) % ranks;
            turn += 1;
            // Every so often in turn, so that a bad draw starves nobody.
            let rank = if turn % 3 == 0 { (turn / 3) % ranks } else { rank };
            stuck += 1;
            let Some(step) = steps[rank].get(at[rank]) else { continue };
            let sum = &mut sums[rank];
            let done = match step {
                Step::Send { to, what, range } => {
                    assert_ne!(*to, rank);
                    let from = if *what == What::Own { &own[rank] } else { &*sum };
                    let queue = queues.entry((rank, *to)).or_default();
                    let room = queue.len() < slots;
                    if room {
                        queue.push_back((*what, range.clone(), from[range.clone()].to_vec()));
                    }
                    room
                }
                Step::BeginOwn(range) => {
                    sum[range.clone()].copy_from_slice(&own[rank][range.clone()]);
                    true
                }
                Step::AddOwn(range) => {
                    range.clone().for_each(|i| sum[i] += own[rank][i]);
                    true
                }
                Step::Add { from, range } | Step::Take { from, range, .. } => {
                    let due = if let Step::Take { what, .. } = step { *what } else { What::Own };
                    match queues.get_mut(&(*from, rank)).and_then(VecDeque::pop_front) {
                        None => false,
                        Some((what, sent, values)) => {
                            assert_eq!((what, &sent), (due, range), "rank {rank} takes what rank {from} did not mean");
                            let add = matches!(step, Step::Add { .. });
                            range.clone().zip(values).for_each(|(i, value)| sum[i] = if add { sum[i] + value } else { value });
                            true
                        }
                    }
                }
            };
            if done {
                at[rank] += 1;
                stuck = 0;
            }
        }
        for rank in 0..ranks {
            assert_eq!(at[rank], steps[rank].len(), "rank {rank} waits for ever at {:?}", steps[rank].get(at[rank]));
        }
        assert!(queues.values().all(VecDeque::is_empty), "a message is left");
        sums
    }

    /// Numbers whose sum depends on the order.
    fn vectors(ranks: usize, elements: usize) -> Vec<Vec<f32>> {
        let value = |rank: usize, i: usize| ((rank * 7919 + i * 104_729) % 1000) as f32 * [1e-3, 1.0, 1e4][(rank + i) % 3] - 300.0;
        (0..ranks).map(|rank| (0..elements).map(|i| value(rank, i)).collect()).collect()
    }

    fn in_order(own: &[Vec<f32>]) -> Vec<f32> {
        (0..own[0].len()).map(|i| own[1..].iter().fold(own[0][i], |sum, one| sum + one[i])).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    proptest! {
        #[test]
        fn every_schedule_gives_every_rank_the_same_bits(
            ranks in 1usize..=16, elements in 0usize..200, most in 1usize..80, turns in prop::collection::vec(any::<u8>(), 1..60),
        ) {
            let own = vectors(ranks, elements);
            let expected = bits(&in_order(&own));
            for schedule in [Schedule::Exchange, Schedule::Scatter, Schedule::Chain] {
                let steps = (0..ranks).map(|rank| all_reduce(schedule, rank, ranks, elements, most)).collect();
                let sums = run(steps, &own, IN_FLIGHT as usize, &turns);
                for sum in sums {
                    prop_assert_eq!(bits(&sum), expected.clone(), "{:?}", schedule);
                }
            }
        }

        #[test]
        fn parts_are_summed_gathered_and_spread(
            ranks in 1usize..=16, elements in 0usize..200, most in 1usize..80, root in any::<prop::sample::Index>(),
            turns in prop::collection::vec(any::<u8>(), 1..60),
        ) {
            let own = vectors(ranks, elements);
            let expected = in_order(&own);
            let steps = (0..ranks).map(|rank| reduce_scatter(rank, ranks, elements, most)).collect();
            let sums = run(steps, &own, IN_FLIGHT as usize, &turns);
            for (rank, sum) in sums.iter().enumerate() {
                let mine = part(&(0..elements), rank, ranks);
                prop_assert_eq!(bits(&sum[mine.clone()]), bits(&expected[mine]));
            }
            let steps = (0..ranks).map(|rank| all_gather(rank, ranks, |rank| part(&(0..elements), rank, ranks), most)).collect();
            let gathered = run(steps, &own, IN_FLIGHT as usize, &turns);
            for got in gathered {
                for owner in 0..ranks {
                    let theirs = part(&(0..elements), owner, ranks);
                    prop_assert_eq!(bits(&got[theirs.clone()]), bits(&own[owner][theirs]));
                }
            }
            let root = root.index(ranks);
            let steps = (0..ranks).map(|rank| broadcast(rank, ranks, root, elements, most)).collect();
            let spread = run(steps, &own, IN_FLIGHT as usize, &turns);
            for got in spread {
                prop_assert_eq!(bits(&got), bits(&own[root]));
            }
        }

        #[test]
        fn messages_are_as_short_as_asked_for(ranks in 2usize..=16, elements in 0usize..500, most in 1usize..80) {
            for rank in 0..ranks {
                let all = [Schedule::Exchange, Schedule::Scatter, Schedule::Chain].map(|s| all_reduce(s, rank, ranks, elements, most));
                let more = [reduce_scatter(rank, ranks, elements, most), broadcast(rank, ranks, 0, elements, most)];
                for step in all.iter().chain(&more).flatten() {
                    if let Step::Send { range, .. } = step {
                        prop_assert!(range.len() <= most);
                    }
                }
            }
        }
    }

    #[test]
    fn a_chain_needs_neighbours_only() {
        for rank in 0..5usize {
            for step in all_reduce(Schedule::Chain, rank, 5, 100, 7) {
                if let Step::Send { to: peer, .. } | Step::Add { from: peer, .. } | Step::Take { from: peer, .. } = step {
                    assert_eq!(peer.abs_diff(rank), 1);
                }
            }
        }
    }
}
