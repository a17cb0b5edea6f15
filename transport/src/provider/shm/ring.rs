//! A ring of bytes in memory that two processes share: one writes, the other reads.
//!
//! Each end keeps its own count of bytes where nobody else can change it and publishes it in the lane's control words;
//! it reads the other end's word, and believes it only as far as the ring is long. So a peer that scribbles over shared
//! memory can garble what it sends, which checks above find, and nothing else.
//!
//! Whoever has to wait raises its flag and looks once more; whoever publishes looks at the flag afterwards. With the
//! fences between, one of the two sees the other, and no wake-up is lost. A flag that stays up because its owner was
//! killed costs a needless ring of the bell.

//! The ring is written over [`Memory`] and [`Atomics`], so that a model checker can try it with its own (`ring/model.rs`).

#[cfg(test)]
mod model;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::segment::Segment;

/// An integer that two processes store to and load from.
pub(super) trait Word<T> {
    /// As the standard library's.
    fn load(&self, order: Ordering) -> T;
    /// As the standard library's.
    fn store(&self, value: T, order: Ordering);
    /// As the standard library's.
    fn swap(&self, value: T, order: Ordering) -> T;
}

/// Where atomics come from.
pub(super) trait Atomics {
    /// A count of bytes.
    type Count: Word<u64>;
    /// A flag.
    type Flag: Word<u32>;
    /// As the standard library's.
    fn fence(order: Ordering);
}

/// The processor's.
pub(super) struct Processor;

macro_rules! word {
    ($of:ty, $atomic:ty) => {
        impl Word<$of> for $atomic {
            #[inline]
            fn load(&self, order: Ordering) -> $of {
                self.load(order)
            }
            #[inline]
            fn store(&self, value: $of, order: Ordering) {
                self.store(value, order);
            }
            #[inline]
            fn swap(&self, value: $of, order: Ordering) -> $of {
                self.swap(value, order)
            }
        }
    };
}
#[cfg(test)]
use word;

word!(u64, AtomicU64);
word!(u32, AtomicU32);

impl Atomics for Processor {
    type Count = AtomicU64;
    type Flag = AtomicU32;

    #[inline]
    fn fence(order: Ordering) {
        fence(order);
    }
}

/// What a ring lies in.
pub(super) trait Memory {
    /// Its atomics.
    type Atomics: Atomics;
    /// The control words of a lane.
    fn lane(&self, lane: usize) -> &Lane<Self::Atomics>;
    /// Bytes of each ring.
    fn ring_bytes(&self) -> usize;
    /// Copies into a lane's ring, at a count of bytes.
    fn copy_in(&self, lane: usize, at: u64, bytes: &[u8]);
    /// Copies out of a lane's ring.
    fn copy_out(&self, lane: usize, at: u64, into: &mut [u8]);
}

impl Memory for Segment {
    type Atomics = Processor;

    fn lane(&self, lane: usize) -> &Lane {
        self.lane(lane)
    }

    fn ring_bytes(&self) -> usize {
        self.ring_bytes()
    }

    fn copy_in(&self, lane: usize, at: u64, bytes: &[u8]) {
        self.copy_in(lane, at, bytes);
    }

    fn copy_out(&self, lane: usize, at: u64, into: &mut [u8]) {
        self.copy_out(lane, at, into);
    }
}

/// A control word with a cache line (and its neighbour, which processors fetch along) of its own.
#[repr(C, align(128))]
struct Line<T>(T);

/// The control words of one direction, as they lie in shared memory.
#[repr(C)]
pub(super) struct Lane<A: Atomics = Processor> {
    /// Bytes written since the start; only the writing end stores it.
    written: Line<A::Count>,
    /// Bytes read since the start; only the reading end stores it.
    read: Line<A::Count>,
    /// Not zero while the reading end waits for bytes.
    reader_waits: Line<A::Flag>,
    /// Not zero while the writing end waits for room.
    writer_waits: Line<A::Flag>,
}

/// The other end's count is impossible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scribbled;

/// Takes a flag down and says whether it was up.
fn taken_down(flag: &impl Word<u32>) -> bool {
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::AcqRel) != 0
}

/// The writing end of a lane.
pub(super) struct Writer<M = Segment> {
    memory: Arc<M>,
    lane: usize,
    /// Bytes written, published or not.
    at: u64,
    /// Of them published.
    published: u64,
    /// The last word of the reading end.
    read: u64,
}

impl<M: Memory> Writer<M> {
    /// The writing end of a fresh lane. There must be one at most.
    pub(super) fn new(memory: Arc<M>, lane: usize) -> Self {
        Self { memory, lane, at: 0, published: 0, read: 0 }
    }

    fn words(&self) -> &Lane<M::Atomics> {
        self.memory.lane(self.lane)
    }

    /// Bytes that can be written now.
    pub(super) fn room(&mut self) -> Result<usize, Scribbled> {
        self.read = self.words().read.0.load(Ordering::Acquire);
        let used = self.at.wrapping_sub(self.read);
        let ring = self.memory.ring_bytes() as u64;
        // The reading end cannot have read what was not published.
        if used > ring || self.published.wrapping_sub(self.read) > ring {
            return Err(Scribbled);
        }
        Ok((ring - used) as usize)
    }

    /// Whether so many bytes can be written now. Asks the other end, whose word costs a cache miss, only if what it said last is not
    /// enough.
    #[inline]
    pub(super) fn has_room(&mut self, bytes: usize) -> Result<bool, Scribbled> {
        let used = self.at.wrapping_sub(self.read) as usize;
        Ok(used.saturating_add(bytes) <= self.memory.ring_bytes() || self.room()? >= bytes)
    }

    /// Bytes that the ring holds.
    pub(super) fn ring_bytes(&self) -> usize {
        self.memory.ring_bytes()
    }

    /// Bytes written and not yet published.
    pub(super) fn unpublished(&self) -> usize {
        self.at.wrapping_sub(self.published) as usize
    }

    /// Writes bytes for which [`Writer::room`] said there was room.
    #[inline]
    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.memory.copy_in(self.lane, self.at, bytes);
        self.at = self.at.wrapping_add(bytes.len() as u64);
    }

    /// Shows the reading end what was written. `true` if it waits and has to be woken.
    #[must_use]
    #[inline]
    pub(super) fn publish(&mut self) -> bool {
        self.published = self.at;
        self.words().written.0.store(self.at, Ordering::Release);
        M::Atomics::fence(Ordering::SeqCst);
        taken_down(&self.words().reader_waits.0)
    }

    /// Says that this end is about to wait for room; [`Writer::room`] has to be looked at once more.
    pub(super) fn will_wait(&self) {
        self.words().writer_waits.0.store(1, Ordering::Relaxed);
        M::Atomics::fence(Ordering::SeqCst);
    }
}

/// The reading end of a lane.
pub(super) struct Reader<M = Segment> {
    memory: Arc<M>,
    lane: usize,
    /// Bytes read, given back or not.
    at: u64,
    /// Of them given back.
    given_back: u64,
    /// The last word of the writing end.
    written: u64,
}

impl<M: Memory> Reader<M> {
    /// The reading end of a fresh lane. There must be one at most.
    pub(super) fn new(memory: Arc<M>, lane: usize) -> Self {
        Self { memory, lane, at: 0, given_back: 0, written: 0 }
    }

    fn words(&self) -> &Lane<M::Atomics> {
        self.memory.lane(self.lane)
    }

    /// Bytes that can be read now.
    #[inline]
    pub(super) fn ready(&mut self) -> Result<usize, Scribbled> {
        let written = self.words().written.0.load(Ordering::Acquire);
        let ready = written.wrapping_sub(self.at);
        // What was once there does not go away.
        if ready > self.memory.ring_bytes() as u64 || self.written.wrapping_sub(self.at) > ready {
            return Err(Scribbled);
        }
        self.written = written;
        Ok(ready as usize)
    }

    /// Bytes of which the writing end has said already that they can be read.
    #[inline]
    pub(super) fn known(&self) -> usize {
        self.written.wrapping_sub(self.at) as usize
    }

    /// Reads bytes of which [`Reader::ready`] said that they were there.
    #[inline]
    pub(super) fn read(&mut self, into: &mut [u8]) {
        self.memory.copy_out(self.lane, self.at, into);
        self.at = self.at.wrapping_add(into.len() as u64);
    }

    /// Bytes that the ring holds.
    pub(super) fn ring_bytes(&self) -> usize {
        self.memory.ring_bytes()
    }

    /// Bytes read whose room was not given back yet.
    #[inline]
    pub(super) fn owed(&self) -> usize {
        self.at.wrapping_sub(self.given_back) as usize
    }

    /// Gives the room of what was read back. `true` if the writing end waits for it and has to be woken.
    #[must_use]
    pub(super) fn give_back(&mut self) -> bool {
        self.given_back = self.at;
        self.words().read.0.store(self.at, Ordering::Release);
        M::Atomics::fence(Ordering::SeqCst);
        taken_down(&self.words().writer_waits.0)
    }

    /// Says that this end is about to wait for bytes; [`Reader::ready`] has to be looked at once more.
    pub(super) fn will_wait(&self) {
        self.words().reader_waits.0.store(1, Ordering::Relaxed);
        M::Atomics::fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const RING: usize = 4096;

    fn ends() -> (Writer, Reader, Arc<Segment>) {
        let segment = Arc::new(Segment::create(RING).unwrap());
        (Writer::new(Arc::clone(&segment), 0), Reader::new(Arc::clone(&segment), 0), segment)
    }

    proptest! {
        #[test]
        fn it_is_a_queue_of_bytes(steps in prop::collection::vec((any::<bool>(), 0..RING + 1), 1..200)) {
            let (mut writer, mut reader, _) = ends();
            let mut model = VecDeque::new();
            let mut next = 0u8;
            for (write, bytes) in steps {
                let room = writer.room().unwrap();
                let ready = reader.ready().unwrap();
                prop_assert_eq!((room, ready), (RING - model.len(), model.len()));
                if write {
                    let bytes: Vec<u8> = (0..bytes.min(room)).map(|_| { next = next.wrapping_mul(5).wrapping_add(1); next }).collect();
                    writer.write(&bytes);
                    prop_assert_eq!(reader.ready().unwrap(), ready, "what is not published is not seen");
                    prop_assert!(!writer.publish(), "nobody waits");
                    model.extend(bytes);
                } else {
                    let mut bytes = vec![0; bytes.min(ready)];
                    reader.read(&mut bytes);
                    prop_assert_eq!(writer.room().unwrap(), room, "what is not given back is not free");
                    prop_assert!(!reader.give_back(), "nobody waits");
                    prop_assert!(bytes.iter().eq(model.drain(..bytes.len()).collect::<Vec<_>>().iter()));
                }
            }
        }

        #[test]
        fn an_impossible_count_is_seen(written in any::<u64>(), read in any::<u64>()) {
            let (mut writer, mut reader, segment) = ends();
            segment.lane(0).written.0.store(written, Ordering::Relaxed);
            segment.lane(0).read.0.store(read, Ordering::Relaxed);
            prop_assert_eq!(reader.ready().is_ok(), written <= RING as u64);
            // Nothing has been written, so nothing can have been read.
            prop_assert_eq!(writer.room().is_ok(), read == 0 || 0u64.wrapping_sub(read) <= RING as u64);
        }
    }

    #[test]
    fn who_waits_is_woken_once() {
        let (mut writer, mut reader, _) = ends();
        reader.will_wait();
        writer.write(b"x");
        assert!(writer.publish());
        assert!(!writer.publish());
        writer.will_wait();
        reader.read(&mut [0]);
        assert!(reader.give_back());
        assert!(!reader.give_back());
    }

    #[test]
    fn two_threads_pass_a_stream_through() {
        let (mut writer, mut reader, _) = ends();
        const TOTAL: usize = 3_000_000;
        let byte = |at: usize| (at ^ (at >> 7) ^ (at >> 15)) as u8;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut at = 0;
                while at < TOTAL {
                    let bytes: Vec<u8> = (at..TOTAL.min(at + 1 + at % 1500)).map(byte).collect();
                    while writer.room().unwrap() < bytes.len() {
                        std::thread::yield_now();
                    }
                    writer.write(&bytes);
                    let _ = writer.publish();
                    at += bytes.len();
                }
            });
            let (mut at, mut bytes) = (0, vec![0; RING]);
            while at < TOTAL {
                let ready = reader.ready().unwrap();
                if ready == 0 {
                    std::thread::yield_now();
                }
                reader.read(&mut bytes[..ready]);
                assert!((at..at + ready).map(byte).eq(bytes[..ready].iter().copied()), "at {at}");
                let _ = reader.give_back();
                at += ready;
            }
        });
    }
}
