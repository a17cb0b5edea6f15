//! How fast a link is: round trips and bandwidth of channel messages, by their size.
//!
//! What is measured is what tensors go through: headers, checks, slots and credits, between two threads that do nothing else. One
//! end [`answer`]s, the other one [`measure`]s. Messages of kind 1 come back as they are, those of kind 2 do not.

use std::sync::Arc;
use std::time::Duration;

use crate::Effects;
use crate::channel::{self, Broken, ChannelOptions, OpenError, RecvError, SendError};
use crate::env::Instant;
use crate::frame::Fence;
use crate::link::{CloseReason, Link};

/// Comes back.
const ECHO: u8 = 1;
/// Stays.
const SINK: u8 = 2;

/// Slots of each direction.
const SLOTS: u16 = 4;
/// Longest message that can be measured, in bytes.
pub const MESSAGE_BYTES_MAX: u32 = 16 * 1024 * 1024;
/// Most sizes of one measurement.
const SIZES_MAX: usize = 64;
/// How long one message may take.
const STEP_MAX: Duration = Duration::from_secs(10);
/// Fewest and most round trips of a size.
const ROUND_TRIPS: std::ops::RangeInclusive<usize> = 8..=20_000;
/// Fewest messages in one direction, and most bytes, of a size.
const MESSAGES_MIN: u64 = 8;
const BYTES_MAX: u64 = 2 << 30;

/// What to measure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BenchOptions {
    /// Message lengths in bytes, 1 to [`MESSAGE_BYTES_MAX`], in the order in which they are measured.
    pub sizes: Vec<u32>,
    /// How long round trips, and then bandwidth, of each size are measured.
    pub time: Duration,
}

impl BenchOptions {
    /// 64 B to 16 MiB in powers of four, 0.2 s each.
    pub fn usual() -> Self {
        Self { sizes: (3..=12).map(|power| 1 << (2 * power)).collect(), time: Duration::from_millis(200) }
    }

    /// Slots that hold the longest message.
    ///
    /// # Errors
    /// [`BenchError::Sizes`] if there is none, or one is too long.
    pub fn slot_bytes(&self) -> Result<u32, BenchError> {
        let right = !self.sizes.is_empty() && self.sizes.len() <= SIZES_MAX;
        let longest = self.sizes.iter().copied().max().filter(|_| right && self.sizes.iter().all(|size| *size > 0));
        longest.filter(|longest| *longest <= MESSAGE_BYTES_MAX).ok_or(BenchError::Sizes)
    }
}

/// What was measured of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BenchRow {
    /// Length of the messages.
    pub bytes: u32,
    /// Median of the times there and back.
    pub rtt_p50: Duration,
    /// What 99 of 100 took no longer than.
    pub rtt_p99: Duration,
    /// Bytes a second in one direction.
    pub bytes_per_second: f64,
}

/// Why nothing, or no more, was measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// No sizes, too many, or impossible ones.
    #[error("measure 1 to {SIZES_MAX} message sizes of 1 byte to 16 MiB")]
    Sizes,
    /// The channel was not opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A message did not go out.
    #[error("the other end takes nothing: {0}")]
    Send(#[from] SendError),
    /// A message did not come back.
    #[error("the other end does not answer: {0}")]
    Recv(#[from] RecvError),
    /// Something else came back.
    #[error("the other end answers something else than was sent")]
    Answer,
    /// The end that answers was asked for more than it has promised.
    #[error("the other end asks for more than a measurement may take")]
    Spent,
}

fn options(slot_bytes: u32) -> ChannelOptions {
    ChannelOptions { slot_bytes, slots: SLOTS }
}

/// Answers until the other end closes the link, at most until `until` and for `bytes_max` bytes there and back.
///
/// # Errors
/// [`BenchError`] if it ended otherwise; the link is closed in any case.
pub fn answer(link: Arc<dyn Link>, slot_bytes: u32, bytes_max: u64, until: Instant, effects: &Effects) -> Result<(), BenchError> {
    let (mut sender, mut receiver) = channel::duplex(link, Fence::default(), options(slot_bytes), effects)?;
    let closer = receiver.closer();
    let mut left = bytes_max;
    let ended = loop {
        let received = match receiver.recv(until) {
            Ok(received) => received,
            Err(RecvError::Broken(Broken::Link(CloseReason::Peer))) => break Ok(()),
            Err(RecvError::Deadline) => break Err(BenchError::Spent),
            Err(error) => break Err(error.into()),
        };
        let echoed = received.kind() == ECHO;
        // A message of nothing costs time, too.
        let cost = (received.payload().len() as u64).max(64) * if echoed { 2 } else { 1 };
        left = match left.checked_sub(cost) {
            Some(left) => left,
            None => break Err(BenchError::Spent),
        };
        if echoed && let Err(error) = sender.send(ECHO, &[received.payload()], until.min(effects.after(STEP_MAX))) {
            break Err(error.into());
        }
    };
    closer.close();
    ended
}

/// Measures each size and calls `each` with what came of it, until that says `false`.
///
/// # Errors
/// [`BenchError`].
pub fn measure(
    link: Arc<dyn Link>,
    wanted: &BenchOptions,
    effects: &Effects,
    each: &mut dyn FnMut(BenchRow) -> bool,
) -> Result<(), BenchError> {
    let slot_bytes = wanted.slot_bytes()?;
    let (mut sender, mut receiver) = channel::duplex(link, Fence::default(), options(slot_bytes), effects)?;
    let clock = &*effects.clock;
    let soon = || effects.after(STEP_MAX);
    let message = vec![0x5a; usize::try_from(slot_bytes).unwrap_or(0)];
    for bytes in &wanted.sizes {
        let message = &message[..usize::try_from(*bytes).unwrap_or(0)];
        let mut times = Vec::new();
        // The first ones touch memory that nobody has touched before.
        let warm = usize::from(SLOTS);
        let mut begin = clock.now();
        loop {
            let sent = clock.now();
            sender.send(ECHO, &[message], soon())?;
            let received = receiver.recv(soon())?;
            if received.kind() != ECHO || received.payload().len() != message.len() {
                return Err(BenchError::Answer);
            }
            let now = clock.now();
            times.push(now.since(sent));
            if times.len() == warm {
                begin = now;
            }
            let counted = times.len().saturating_sub(warm);
            let enough = now.since(begin) >= wanted.time && counted >= *ROUND_TRIPS.start();
            if enough || counted >= *ROUND_TRIPS.end() {
                break;
            }
        }
        times.drain(..warm);
        times.sort_unstable();
        receiver.give_back();
        let begin = clock.now();
        let (mut count, mut total) = (0, 0);
        while count < MESSAGES_MIN || (clock.now().since(begin) < wanted.time && total < BYTES_MAX) {
            sender.send(SINK, &[message], soon())?;
            count += 1;
            total += u64::from(*bytes);
        }
        sender.flush(soon())?;
        let seconds = clock.now().since(begin).as_secs_f64().max(1e-9);
        let at = |share: usize| times.get((times.len() * share).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default();
        let row = BenchRow { bytes: *bytes, rtt_p50: at(50), rtt_p99: at(99), bytes_per_second: total as f64 / seconds };
        if !each(row) {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::SystemRng;
    use crate::link::LinkOptions;
    use crate::provider::memory::{MemoryFabric, MemoryProvider, Shape};
    use crate::provider::{Provider, Ticket};
    use crate::testing::{effects, soon};

    /// Both ends of a link, and what keeps it alive.
    fn link(effects: &Effects, slot_bytes: u32) -> (Arc<dyn Link>, Arc<dyn Link>, [MemoryProvider; 2]) {
        let fabric = MemoryFabric::new(&SystemRng, Shape::default());
        let (near, far) = (MemoryProvider::new(effects.clone(), &fabric), MemoryProvider::new(effects.clone(), &fabric));
        let (ticket, options) = (Ticket::random(&SystemRng), LinkOptions::for_payload(slot_bytes));
        let expected = far.expect(&ticket, options).unwrap();
        let dialled = near.dial(&far.endpoints()[0], &ticket, options, soon(effects)).unwrap();
        let accepted = expected.accept(soon(effects)).unwrap();
        (dialled, accepted, [near, far])
    }

    #[test]
    fn each_size_gets_a_row_and_the_other_end_ends() {
        let effects = effects();
        let wanted = BenchOptions { sizes: vec![1, 64, 5000], time: Duration::from_millis(1) };
        let (near, far, _providers) = link(&effects, wanted.slot_bytes().unwrap());
        std::thread::scope(|scope| {
            let answering = scope.spawn(|| answer(far, 5000, 1 << 40, soon(&effects), &effects));
            let mut rows = Vec::new();
            measure(near, &wanted, &effects, &mut |row| {
                rows.push(row);
                rows.len() < 2
            })
            .unwrap();
            assert_eq!(rows.iter().map(|row| row.bytes).collect::<Vec<_>>(), [1, 64], "it ends when it is told to");
            assert!(rows.iter().all(|row| row.rtt_p50 <= row.rtt_p99 && row.rtt_p50 > Duration::ZERO && row.bytes_per_second > 0.0));
            assert!(answering.join().unwrap().is_ok());
        });
    }

    #[test]
    fn whoever_answers_does_no_more_than_it_promised() {
        let effects = effects();
        let wanted = BenchOptions { sizes: vec![1000], time: Duration::from_secs(60) };
        for (bytes_max, until) in [(100_000, soon(&effects)), (u64::MAX, effects.after(Duration::from_millis(30)))] {
            let (near, far, _providers) = link(&effects, 1000);
            std::thread::scope(|scope| {
                let answering = scope.spawn(|| answer(far, 1000, bytes_max, until, &effects));
                assert!(measure(near, &wanted, &effects, &mut |_| true).is_err());
                assert!(matches!(answering.join().unwrap(), Err(BenchError::Spent)));
            });
        }
    }

    #[test]
    fn impossible_sizes_are_refused() {
        for sizes in [vec![], vec![0], vec![MESSAGE_BYTES_MAX + 1], vec![1; SIZES_MAX + 1]] {
            assert!(matches!(BenchOptions { sizes, time: Duration::ZERO }.slot_bytes(), Err(BenchError::Sizes)));
        }
        assert_eq!(BenchOptions::usual().slot_bytes().unwrap(), MESSAGE_BYTES_MAX);
        assert_eq!(BenchOptions::usual().sizes[0], 64);
    }
}
