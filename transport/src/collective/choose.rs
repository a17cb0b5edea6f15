//! Which schedule is soonest done, from what is known of the links.

use super::schedule::Schedule;

/// One direction between two ranks, as measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wire {
    /// Half of a short message's round trip, in seconds.
    pub latency: f64,
    /// Bytes in a second.
    pub bytes_per_second: f64,
}

impl Wire {
    fn takes(&self, bytes: f64) -> f64 {
        self.latency + bytes / self.bytes_per_second.max(1.0)
    }
}

/// The wires of a group: `wire(from, to)`, none where there is no channel.
pub type Wires<'a> = dyn Fn(usize, usize) -> Option<Wire> + 'a;

/// Seconds that an all-reduce of `bytes` takes by a schedule, the slowest wire of each round deciding and a rank's messages to several
/// peers leaving one after the other; none if a channel is missing. A message holds at most `message_bytes`.
pub fn predict(schedule: Schedule, ranks: usize, bytes: usize, message_bytes: usize, wires: &Wires<'_>) -> Option<f64> {
    if ranks < 2 {
        return Some(0.0);
    }
    let pairs = || (0..ranks).flat_map(|from| (0..ranks).filter(move |to| *to != from).map(move |to| (from, to)));
    let slowest = |pairs: &mut dyn Iterator<Item = (usize, usize)>, bytes: f64| {
        let mut worst = 0f64;
        for (from, to) in pairs {
            worst = worst.max(wires(from, to)?.takes(bytes));
        }
        Some(worst)
    };
    // A rank sends to all others: the wires run beside each other, the rank's own memory does not.
    let round = |bytes: f64| {
        let wire = slowest(&mut pairs(), 0.0)?;
        let rank = |from: usize| {
            (0..ranks).filter(|to| *to != from).try_fold(0f64, |sum, to| Some(sum + bytes / wires(from, to)?.bytes_per_second.max(1.0)))
        };
        let sending = (0..ranks).try_fold(0f64, |worst, from| Some(worst.max(rank(from)?)))?;
        Some(wire + sending)
    };
    let bytes = bytes as f64;
    match schedule {
        Schedule::Exchange => round(bytes),
        Schedule::Scatter => Some(2.0 * round(bytes / ranks as f64)?),
        Schedule::Chain => {
            let pieces = (bytes / message_bytes.max(1) as f64).ceil().max(1.0);
            let mut neighbours = (1..ranks).flat_map(|rank| [(rank - 1, rank), (rank, rank - 1)]);
            // Up and down once, and one more piece behind the other for each that follows.
            Some(slowest(&mut neighbours, bytes / pieces)? * (2.0 * (ranks - 1) as f64 + (pieces - 1.0) * 2.0))
        }
    }
}

/// The schedule that [`predict`] says is soonest done; none if the ranks are not connected well enough for any.
pub fn choose(ranks: usize, bytes: usize, message_bytes: usize, wires: &Wires<'_>) -> Option<Schedule> {
    let all = [Schedule::Exchange, Schedule::Scatter, Schedule::Chain];
    let timed = all.into_iter().filter_map(|schedule| Some((schedule, predict(schedule, ranks, bytes, message_bytes, wires)?)));
    timed.min_by(|one, other| one.1.total_cmp(&other.1)).map(|(schedule, _)| schedule)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Wire = Wire { latency: 5e-6, bytes_per_second: 5e9 };

    #[test]
    fn short_vectors_are_exchanged_and_long_ones_scattered() {
        let mesh = |_: usize, _: usize| Some(FAST);
        assert_eq!(choose(4, 2 * 1024, 1 << 20, &mesh), Some(Schedule::Exchange));
        assert_eq!(choose(4, 16 << 20, 1 << 20, &mesh), Some(Schedule::Scatter));
        // Between two, a part is half of it: scattering saves nothing that two messages do not cost.
        assert_eq!(choose(2, 2 * 1024, 1 << 20, &mesh), Some(Schedule::Exchange));
    }

    #[test]
    fn where_cables_make_a_chain_there_is_nothing_else() {
        let chain = |from: usize, to: usize| (from.abs_diff(to) == 1).then_some(FAST);
        assert_eq!(choose(4, 1024, 1 << 20, &chain), Some(Schedule::Chain));
        let broken = |from: usize, to: usize| (from.min(to) == 0 && from.abs_diff(to) == 1).then_some(FAST);
        assert_eq!(choose(4, 1024, 1 << 20, &broken), None);
        assert_eq!(choose(1, 1024, 1 << 20, &broken), Some(Schedule::Exchange));
    }

    #[test]
    fn one_slow_cable_beside_the_chain_is_avoided() {
        let wire = |from: usize, to: usize| Some(if from.abs_diff(to) == 1 { FAST } else { Wire { latency: 2e-3, bytes_per_second: 1e7 } });
        assert_eq!(choose(3, 1 << 20, 1 << 18, &wire), Some(Schedule::Chain));
    }
}
