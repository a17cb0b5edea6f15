//! A ring of bytes in memory that two processes share: one writes, the other reads.
//!
//! Each end keeps its own count of bytes where nobody else can change it and publishes it in the lane's control words;
//! it reads the other end's word, and believes it only as far as the ring is long. So a peer that scribbles over shared
//! memory can garble what it sends, which checks above find, and nothing else.
//!
//! Whoever has to wait raises its flag and looks once more; whoever publishes looks at the flag afterwards. With the
//! fences between, one of the two sees the other, and no wake-up is lost. A flag that stays up because its owner was
//! killed costs a needless ring of the bell.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::segment::Segment;

/// A control word with a cache line (and its neighbour, which processors fetch along) of its own.
#[repr(C, align(128))]
struct Line<T>(T);

/// The control words of one direction, as they lie in shared memory.
#[repr(C)]
pub(super) struct Lane {
    /// Bytes written since the start; only the writing end stores it.
    written: Line<AtomicU64>,
    /// Bytes read since the start; only the reading end stores it.
    read: Line<AtomicU64>,
    /// Not zero while the reading end waits for bytes.
    reader_waits: Line<AtomicU32>,
    /// Not zero while the writing end waits for room.
    writer_waits: Line<AtomicU32>,
}

/// The other end's count is impossible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scribbled;

/// Takes a flag down and says whether it was up.
fn taken_down(flag: &AtomicU32) -> bool {
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::AcqRel) != 0
}

/// The writing end of a lane.
pub(super) struct Writer {
    segment: Arc<Segment>,
    lane: usize,
    /// Bytes written, published or not.
    at: u64,
    /// Of them published.
    published: u64,
    /// The last word of the reading end.
    read: u64,
}

impl Writer {
    /// The writing end of a fresh lane. There must be one at most.
    pub(super) fn new(segment: Arc<Segment>, lane: usize) -> Self {
        Self { segment, lane, at: 0, published: 0, read: 0 }
    }

    fn words(&self) -> &Lane {
        self.segment.lane(self.lane)
    }

    /// Bytes that can be written now.
    pub(super) fn room(&mut self) -> Result<usize, Scribbled> {
        self.read = self.words().read.0.load(Ordering::Acquire);
        let used = self.at.wrapping_sub(self.read);
        let ring = self.segment.ring_bytes() as u64;
        // The reading end cannot have read what was not published.
        if used > ring || self.published.wrapping_sub(self.read) > ring {
            return Err(Scribbled);
        }
        Ok((ring - used) as usize)
    }

    /// Bytes that the ring holds.
    pub(super) fn ring_bytes(&self) -> usize {
        self.segment.ring_bytes()
    }

    /// Bytes written and not yet published.
    pub(super) fn unpublished(&self) -> usize {
        self.at.wrapping_sub(self.published) as usize
    }

    /// Writes bytes for which [`Writer::room`] said there was room.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        self.segment.copy_in(self.lane, self.at, bytes);
        self.at = self.at.wrapping_add(bytes.len() as u64);
    }

    /// Shows the reading end what was written. `true` if it waits and has to be woken.
    #[must_use]
    pub(super) fn publish(&mut self) -> bool {
        self.published = self.at;
        self.words().written.0.store(self.at, Ordering::Release);
        fence(Ordering::SeqCst);
        taken_down(&self.words().reader_waits.0)
    }

    /// Says that this end is about to wait for room; [`Writer::room`] has to be looked at once more.
    pub(super) fn will_wait(&self) {
        self.words().writer_waits.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

/// The reading end of a lane.
pub(super) struct Reader {
    segment: Arc<Segment>,
    lane: usize,
    /// Bytes read, given back or not.
    at: u64,
}

impl Reader {
    /// The reading end of a fresh lane. There must be one at most.
    pub(super) fn new(segment: Arc<Segment>, lane: usize) -> Self {
        Self { segment, lane, at: 0 }
    }

    fn words(&self) -> &Lane {
        self.segment.lane(self.lane)
    }

    /// Bytes that can be read now.
    pub(super) fn ready(&self) -> Result<usize, Scribbled> {
        let ready = self.words().written.0.load(Ordering::Acquire).wrapping_sub(self.at);
        if ready > self.segment.ring_bytes() as u64 {
            return Err(Scribbled);
        }
        Ok(ready as usize)
    }

    /// Reads bytes of which [`Reader::ready`] said that they were there.
    pub(super) fn read(&mut self, into: &mut [u8]) {
        self.segment.copy_out(self.lane, self.at, into);
        self.at = self.at.wrapping_add(into.len() as u64);
    }

    /// Gives the room of what was read back. `true` if the writing end waits for it and has to be woken.
    #[must_use]
    pub(super) fn give_back(&self) -> bool {
        self.words().read.0.store(self.at, Ordering::Release);
        fence(Ordering::SeqCst);
        taken_down(&self.words().writer_waits.0)
    }

    /// Says that this end is about to wait for bytes; [`Reader::ready`] has to be looked at once more.
    pub(super) fn will_wait(&self) {
        self.words().reader_waits.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
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
            let (mut writer, reader, segment) = ends();
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
