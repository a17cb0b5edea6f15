//! Records in memory that two processes share: one writes them, the other reads them in the same order.
//!
//! A record is a head, which is one word and never zero, and bytes. It begins at a cache line, and its bytes follow its head. The
//! reading end looks at nothing but the place where the next head will be: so a short message and the news of it move from one processor to
//! the other in the same line. For that the writing end puts a zero where the next head will be before it shows a record, whatever
//! is there from before.
//!
//! A lane has two rings for its records, a small and a large one. Each record says in which of them the next one is. The small one stays
//! in the caches of both processors, which is most of what there is to gain for short messages; it takes short records, as long as it
//! has room. Everything else goes through the large one, so nobody ever waits for the small one. A long record that was announced in the
//! small ring is pointed to from there.
//!
//! Each end keeps its own counts of bytes where nobody else can change them. The reading end shows from time to time how far it
//! has got, and the writing end asks only when it needs room; it believes the answer only as far as the ring is long. The reading end
//! takes no head's word for anything that does not lie in the ring. So a peer that scribbles over shared memory can garble what it
//! sends, which checks above find, and nothing else.
//!
//! Whoever has to wait raises its flag and looks once more; whoever publishes looks at the flag afterwards. With the
//! fences between, one of the two sees the other, and no wake-up is lost. A flag that stays up because its owner was
//! killed costs a needless ring of the bell.
//!
//! All this is written over [`Memory`] and [`Atomics`], so that a model checker can try it with its own (`ring/model.rs`).

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

/// Which of a lane's rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    /// The one that stays in caches.
    Small,
    /// The other one.
    Large,
}

/// Longest line of any memory.
const LINE_MAX: usize = 64;

/// What rings lie in.
pub(super) trait Memory {
    /// Its atomics.
    type Atomics: Atomics;
    /// Bytes of a line: records begin at multiples of it.
    const LINE: usize;
    /// Bytes of a head.
    const HEAD: usize;
    /// Records that take so many bytes or fewer are short: the small ring is for them, and another such is expected after each.
    const SHORT: usize;
    /// The control words of a lane.
    fn lane(&self, lane: usize) -> &Lane<Self::Atomics>;
    /// Bytes of a ring.
    fn ring_bytes(&self, size: Size) -> usize;
    /// The word at a count of bytes of a ring, which is that of a line.
    fn head(&self, lane: usize, size: Size, at: u64) -> &<Self::Atomics as Atomics>::Count;
    /// Copies into a ring, at a count of bytes.
    fn copy_in(&self, lane: usize, size: Size, at: u64, bytes: &[u8]);
    /// Copies out of a ring.
    fn copy_out(&self, lane: usize, size: Size, at: u64, into: &mut [u8]);
}

impl Memory for Segment {
    type Atomics = Processor;
    const LINE: usize = 64;
    const HEAD: usize = 8;
    const SHORT: usize = 256;

    fn lane(&self, lane: usize) -> &Lane {
        self.lane(lane)
    }

    fn ring_bytes(&self, size: Size) -> usize {
        self.ring_bytes(size)
    }

    fn head(&self, lane: usize, size: Size, at: u64) -> &AtomicU64 {
        self.word(lane, size, at)
    }

    fn copy_in(&self, lane: usize, size: Size, at: u64, bytes: &[u8]) {
        self.copy_in(lane, size, at, bytes);
    }

    fn copy_out(&self, lane: usize, size: Size, at: u64, into: &mut [u8]) {
        self.copy_out(lane, size, at, into);
    }
}

/// A control word with a cache line (and its neighbour, which processors fetch along) of its own.
#[repr(C, align(128))]
struct Line<T>(T);

/// The control words of one direction, as they lie in shared memory.
#[repr(C)]
pub(super) struct Lane<A: Atomics = Processor> {
    /// Bytes read since the start, of the small ring and of the large one; only the reading end stores them.
    read: Line<[A::Count; 2]>,
    /// Not zero while the reading end waits for a record.
    reader_waits: Line<A::Flag>,
    /// Not zero while the writing end waits for room.
    writer_waits: Line<A::Flag>,
}

/// What the other end has put into memory is impossible.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scribbled;

/// Of a head, what is the user's. The byte above is the ring's.
pub(super) const HEAD_MAX: u64 = (1 << 56) - 1;
/// In a head: the next record is in the small ring.
const SMALL_NEXT: u64 = 1 << 56;
/// In place of a head in the small ring: the record is in the large one.
const ELSEWHERE: u64 = 2 << 56;

/// Bytes of whole lines that a record with so many bytes behind its head takes.
const fn span<M: Memory>(bytes: usize) -> usize {
    (M::HEAD + bytes).next_multiple_of(M::LINE)
}

/// Takes a flag down and says whether it was up.
fn taken_down(flag: &impl Word<u32>) -> bool {
    flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::AcqRel) != 0
}

/// A ring as the writing end knows it.
#[derive(Default)]
struct Out {
    /// Where the next head in this ring is or will be.
    at: u64,
    /// The last word of the reading end.
    read: u64,
}

/// The writing end of a lane.
pub(super) struct Writer<M = Segment> {
    memory: Arc<M>,
    lane: usize,
    rings: [Out; 2],
    /// Where the reading end looks for the next record. There is a zero now.
    next: Size,
    /// Where it will be.
    to: Size,
    /// Bytes that were written of it.
    body: usize,
    /// Those of its first line. The reading end looks at that line all the time, and takes it away from this processor whenever it does: so
    /// it is touched last, and all of it at once.
    first: [u8; LINE_MAX],
}

impl<M: Memory> Writer<M> {
    /// Bytes of a record that lie beside its head.
    const BESIDE: usize = M::LINE - M::HEAD;

    /// The writing end of a fresh lane. There must be one at most.
    pub(super) fn new(memory: Arc<M>, lane: usize) -> Self {
        const { assert!(M::LINE <= LINE_MAX) };
        Self { memory, lane, rings: Default::default(), next: Size::Large, to: Size::Large, body: 0, first: [0; LINE_MAX] }
    }

    fn words(&self) -> &Lane<M::Atomics> {
        self.memory.lane(self.lane)
    }

    /// What the reading end's last word leaves of a ring. The line of the next head is taken, too.
    #[inline]
    fn known_room(&self, size: Size) -> usize {
        let ring = &self.rings[size as usize];
        let used = usize::try_from(ring.at.wrapping_sub(ring.read)).unwrap_or(usize::MAX);
        self.memory.ring_bytes(size).saturating_sub(used).saturating_sub(M::LINE)
    }

    /// Asks the reading end how far it has got, which costs a cache miss.
    fn ask(&mut self, size: Size) {
        self.rings[size as usize].read = self.words().read.0[size as usize].load(Ordering::Acquire);
    }

    /// Whether records, with their heads and the rests of their last lines, can take so many bytes now.
    #[inline]
    pub(super) fn has_room(&mut self, bytes: usize) -> Result<bool, Scribbled> {
        if self.next == Size::Small && bytes <= M::SHORT {
            // There was so much when it was announced.
            self.to = Size::Small;
            return Ok(true);
        }
        self.to = Size::Large;
        if bytes <= self.known_room(Size::Large) {
            return Ok(true);
        }
        self.ask(Size::Large);
        let ring = &self.rings[Size::Large as usize];
        // It cannot have read what was not published.
        if ring.at.wrapping_sub(ring.read) > self.ring_bytes() as u64 {
            return Err(Scribbled);
        }
        Ok(bytes <= self.known_room(Size::Large))
    }

    /// What a record with so many bytes takes.
    #[inline]
    pub(super) fn takes(bytes: usize) -> usize {
        span::<M>(bytes)
    }

    /// Bytes of the large ring.
    #[inline]
    pub(super) fn ring_bytes(&self) -> usize {
        self.memory.ring_bytes(Size::Large)
    }

    /// Writes more of the next record, for which [`Writer::has_room`] said there was room.
    #[inline]
    pub(super) fn write(&mut self, mut bytes: &[u8]) {
        if self.body == 0 && bytes.len() >= Self::BESIDE {
            // What is usual, and a constant length, which takes a few instructions.
            let (beside, behind) = bytes.split_at(Self::BESIDE);
            self.first[..Self::BESIDE].copy_from_slice(beside);
            (self.body, bytes) = (Self::BESIDE, behind);
        } else if let Some(room) = self.first.get_mut(self.body..Self::BESIDE) {
            let (beside, behind) = bytes.split_at(bytes.len().min(room.len()));
            room[..beside.len()].copy_from_slice(beside);
            self.body += beside.len();
            bytes = behind;
        }
        if !bytes.is_empty() {
            let at = self.rings[self.to as usize].at.wrapping_add((M::HEAD + self.body) as u64);
            self.memory.copy_in(self.lane, self.to, at, bytes);
            self.body += bytes.len();
        }
    }

    /// Where the record after one that takes so many bytes is going to be.
    #[inline]
    fn after(&mut self, takes: usize) -> Size {
        if takes > M::SHORT {
            return Size::Large;
        }
        if self.known_room(Size::Small) < M::SHORT {
            // If this word is impossible there is no room.
            self.ask(Size::Small);
        }
        if self.known_room(Size::Small) < M::SHORT { Size::Large } else { Size::Small }
    }

    /// Shows the reading end what was written, under a head that is neither zero nor more than [`HEAD_MAX`]. `true` if it waits and has
    /// to be woken.
    #[must_use]
    #[inline]
    pub(super) fn publish(&mut self, head: u64) -> bool {
        let takes = span::<M>(self.body);
        let here = self.rings[self.to as usize].at;
        self.rings[self.to as usize].at = here.wrapping_add(takes as u64);
        let small = &mut self.rings[Size::Small as usize];
        let pointer = (self.next != self.to).then_some(small.at);
        if pointer.is_some() {
            small.at = small.at.wrapping_add(M::LINE as u64);
        }
        let next = self.after(takes);
        self.memory.head(self.lane, next, self.rings[next as usize].at).store(0, Ordering::Relaxed);
        let head = if next == Size::Small { head | SMALL_NEXT } else { head };
        // Of a constant length, which is faster; behind a shorter record lies what means nothing.
        self.memory.copy_in(self.lane, self.to, here.wrapping_add(M::HEAD as u64), &self.first[..Self::BESIDE]);
        self.memory.head(self.lane, self.to, here).store(head, Ordering::Release);
        if let Some(at) = pointer {
            self.memory.head(self.lane, Size::Small, at).store(ELSEWHERE, Ordering::Release);
        }
        (self.next, self.to, self.body) = (next, next, 0);
        M::Atomics::fence(Ordering::SeqCst);
        taken_down(&self.words().reader_waits.0)
    }

    /// Says that this end is about to wait for room; [`Writer::has_room`] has to be looked at once more.
    pub(super) fn will_wait(&self) {
        self.words().writer_waits.0.store(1, Ordering::Relaxed);
        M::Atomics::fence(Ordering::SeqCst);
    }
}

/// A ring as the reading end knows it.
#[derive(Default)]
struct In {
    /// Where the next head in this ring is or will be.
    at: u64,
    /// Up to where the room was given back.
    given_back: u64,
}

/// The reading end of a lane.
pub(super) struct Reader<M = Segment> {
    memory: Arc<M>,
    lane: usize,
    rings: [In; 2],
    /// Where the next record is or will be.
    next: Size,
    /// Where the one after it will be, once its head was seen.
    after: Size,
}

impl<M: Memory> Reader<M> {
    /// The reading end of a fresh lane. There must be one at most.
    pub(super) fn new(memory: Arc<M>, lane: usize) -> Self {
        Self { memory, lane, rings: Default::default(), next: Size::Large, after: Size::Large }
    }

    fn words(&self) -> &Lane<M::Atomics> {
        self.memory.lane(self.lane)
    }

    #[inline]
    fn word(&self) -> u64 {
        self.memory.head(self.lane, self.next, self.rings[self.next as usize].at).load(Ordering::Acquire)
    }

    /// The head of the next record, or zero if there is none yet.
    #[inline]
    pub(super) fn head(&mut self) -> Result<u64, Scribbled> {
        let mut word = self.word();
        if word == 0 {
            return Ok(0);
        }
        if word == ELSEWHERE && self.next == Size::Small {
            let small = &mut self.rings[Size::Small as usize];
            small.at = small.at.wrapping_add(M::LINE as u64);
            self.next = Size::Large;
            // It was there before the pointer.
            word = self.word();
        }
        self.after = match word & !HEAD_MAX {
            0 => Size::Large,
            SMALL_NEXT => Size::Small,
            _ => return Err(Scribbled),
        };
        match word & HEAD_MAX {
            0 => Err(Scribbled),
            head => Ok(head),
        }
    }

    /// Reads a record whose head was seen, all of its bytes, and goes on to the next.
    #[inline]
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<(), Scribbled> {
        let takes = span::<M>(into.len());
        if takes > self.memory.ring_bytes(self.next) {
            return Err(Scribbled);
        }
        let ring = &mut self.rings[self.next as usize];
        self.memory.copy_out(self.lane, self.next, ring.at.wrapping_add(M::HEAD as u64), into);
        ring.at = ring.at.wrapping_add(takes as u64);
        self.next = self.after;
        Ok(())
    }

    /// Bytes of the large ring.
    #[inline]
    pub(super) fn ring_bytes(&self) -> usize {
        self.memory.ring_bytes(Size::Large)
    }

    /// Bytes read of the large ring whose room was not given back yet.
    #[inline]
    pub(super) fn owed(&self) -> usize {
        let ring = &self.rings[Size::Large as usize];
        ring.at.wrapping_sub(ring.given_back) as usize
    }

    fn give_back_of(&mut self, size: Size) {
        let ring = &mut self.rings[size as usize];
        ring.given_back = ring.at;
        self.memory.lane(self.lane).read.0[size as usize].store(ring.at, Ordering::Release);
    }

    /// Gives the room in the small ring back, for which nobody waits.
    #[inline]
    pub(super) fn give_back_small(&mut self) {
        let ring = &self.rings[Size::Small as usize];
        if ring.at != ring.given_back {
            self.give_back_of(Size::Small);
        }
    }

    /// Gives the room of what was read back. `true` if the writing end waits for it and has to be woken.
    #[must_use]
    pub(super) fn give_back(&mut self) -> bool {
        self.give_back_of(Size::Small);
        self.give_back_of(Size::Large);
        M::Atomics::fence(Ordering::SeqCst);
        taken_down(&self.words().writer_waits.0)
    }

    /// Says that this end is about to wait for a record; [`Reader::head`] has to be looked at once more.
    pub(super) fn will_wait(&self) {
        self.words().reader_waits.0.store(1, Ordering::Relaxed);
        M::Atomics::fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::os::fd::AsFd;

    use proptest::prelude::*;

    use super::*;

    const RING: usize = 4096;

    fn ends() -> (Writer, Reader, Arc<Segment>) {
        let segment = Arc::new(Segment::create(RING).unwrap());
        (Writer::new(Arc::clone(&segment), 0), Reader::new(Arc::clone(&segment), 0), segment)
    }

    fn takes(bytes: usize) -> usize {
        Writer::<Segment>::takes(bytes)
    }

    proptest! {
        #[test]
        fn it_is_a_queue_of_records(steps in prop::collection::vec((0..4u8, prop_oneof![3 => 0..200usize, 1 => 0..RING]), 1..300)) {
            let (mut writer, mut reader, _) = ends();
            let mut model = VecDeque::<Vec<u8>>::new();
            for (i, (step, bytes)) in steps.into_iter().enumerate() {
                prop_assert_eq!(reader.head().unwrap(), model.front().map_or(0, |record| record.len() as u64 + 1));
                if step < 2 && writer.has_room(takes(bytes)).unwrap() {
                    // Bytes that would all be heads.
                    let record = vec![i as u8 | 1; bytes];
                    writer.write(&record[..bytes / 3]);
                    writer.write(&record[bytes / 3..]);
                    prop_assert_eq!(reader.head().unwrap() == 0, model.is_empty(), "what is not published is not seen");
                    prop_assert!(!writer.publish(bytes as u64 + 1), "nobody waits");
                    model.push_back(record);
                } else if let Some(record) = model.pop_front() {
                    let mut got = vec![0; record.len()];
                    prop_assert_eq!(reader.head().unwrap(), record.len() as u64 + 1);
                    reader.read(&mut got).unwrap();
                    prop_assert_eq!(got, record);
                    if step == 2 {
                        reader.give_back_small();
                    } else if step == 3 {
                        prop_assert!(!reader.give_back(), "nobody waits");
                    }
                }
            }
            // Whatever has been, the large ring is there for who waits for it.
            for record in model {
                reader.head().unwrap();
                reader.read(&mut vec![0; record.len()]).unwrap();
            }
            let _ = reader.give_back();
            prop_assert!(writer.has_room(RING - 64).unwrap());
            prop_assert!(!writer.has_room(RING).unwrap(), "the next head has to lie somewhere");
        }

        #[test]
        fn what_is_impossible_is_seen(read in any::<u64>(), word in any::<u64>(), bytes in 0..2 * RING) {
            let (mut writer, mut reader, segment) = ends();
            segment.lane(0).read.0[Size::Large as usize].store(read, Ordering::Relaxed);
            segment.lane(0).read.0[Size::Small as usize].store(read, Ordering::Relaxed);
            // Nothing has been written, so nothing can have been read.
            let possible = 0u64.wrapping_sub(read) <= RING as u64;
            prop_assert_eq!(writer.has_room(RING).is_ok(), possible);
            for record in 0..100 {
                // A word about the small ring is believed or not; nothing is written where there is no room.
                if writer.has_room(takes(1)) != Ok(true) {
                    break;
                }
                writer.write(&[record]);
                let _ = writer.publish(1);
            }
            let (_, mut reader2, segment) = ends();
            segment.word(0, Size::Large, 0).store(word, Ordering::Relaxed);
            let sound = word == 0 || word >> 56 <= 1 && word & HEAD_MAX != 0;
            prop_assert_eq!(reader2.head().is_ok(), sound);
            prop_assert_eq!(reader2.read(&mut vec![0; bytes]).is_ok(), bytes + 8 <= RING);
            let _ = reader.head();
        }
    }

    /// As `docs/wire.md` has it.
    #[test]
    fn records_lie_where_the_page_says() {
        let (mut writer, mut reader, segment) = ends();
        let mut put = |bytes: &[u8], head| {
            assert_eq!(writer.has_room(takes(bytes.len())), Ok(true));
            writer.write(bytes);
            assert!(!writer.publish(head));
        };
        put(&[0xaa; 56], 0x02_0304_0506_0708);
        put(&[0xbb; 57], 9);
        put(&[0xcc; 2000], 10);
        put(&[0xdd; 1], 11);
        put(&[0xee; 1], 12);
        let file = std::fs::File::from(segment.as_fd().try_clone_to_owned().unwrap());
        let read = |at: u64, bytes: usize| {
            let mut found = vec![0; bytes];
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut found, at).unwrap();
            found
        };
        let lies = |at, head: [u8; 8], byte, bytes| {
            assert!(read(at, 8 + bytes) == [&head[..], &vec![byte; bytes]].concat(), "at {at}");
        };
        // The next one is in the small ring.
        lies(8192, [8, 7, 6, 5, 4, 3, 2, 1], 0xaa, 56);
        lies(4096, [9, 0, 0, 0, 0, 0, 0, 1], 0xbb, 57);
        // Too long for it, and pointed to from there.
        lies(4096 + 128, [0, 0, 0, 0, 0, 0, 0, 2], 0, 0);
        lies(8192 + 64, [10, 0, 0, 0, 0, 0, 0, 0], 0xcc, 2000);
        // Nobody knew that this one would be short.
        lies(8192 + 64 + 2048, [11, 0, 0, 0, 0, 0, 0, 1], 0xdd, 1);
        lies(4096 + 192, [12, 0, 0, 0, 0, 0, 0, 1], 0xee, 1);
        // A zero where the next head will be.
        lies(4096 + 256, [0; 8], 0, 0);
        // Control words: how far the reading end has got at 0 and 8, its flag at 128, the writing end's at 256.
        for (head, bytes) in [(0x02_0304_0506_0708, 56), (9, 57), (10, 2000), (11, 1), (12, 1)] {
            assert_eq!(reader.head(), Ok(head));
            reader.read(&mut vec![0; bytes]).unwrap();
        }
        assert!(!reader.give_back());
        reader.will_wait();
        writer.will_wait();
        let mut words = vec![0; 384];
        words[..2].copy_from_slice(&256u16.to_le_bytes());
        words[8..10].copy_from_slice(&2176u16.to_le_bytes());
        (words[128], words[256]) = (1, 1);
        assert_eq!(read(1024, 384), words);
    }

    #[test]
    fn what_an_earlier_round_left_is_no_head() {
        let (mut writer, mut reader, _) = ends();
        for round in 1..=40 {
            for bytes in [3000, 200, 100, 200] {
                assert_eq!(reader.head(), Ok(0));
                assert_eq!(writer.has_room(takes(bytes)), Ok(true));
                writer.write(&vec![0xff; bytes]);
                let _ = writer.publish(round);
                assert_eq!(reader.head(), Ok(round));
                reader.read(&mut vec![0; bytes]).unwrap();
                let _ = reader.give_back();
            }
        }
    }

    #[test]
    fn who_waits_is_woken_once() {
        let (mut writer, mut reader, _) = ends();
        reader.will_wait();
        assert_eq!(writer.has_room(64), Ok(true));
        writer.write(b"x");
        assert!(writer.publish(1));
        assert!(!writer.publish(1));
        writer.will_wait();
        reader.head().unwrap();
        reader.read(&mut [0]).unwrap();
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
                    let bytes = if at % 3 == 0 { at % 1500 } else { at % 100 };
                    let bytes: Vec<u8> = (at..TOTAL.min(at + 1 + bytes)).map(byte).collect();
                    while !writer.has_room(takes(bytes.len())).unwrap() {
                        std::thread::yield_now();
                    }
                    writer.write(&bytes);
                    let _ = writer.publish(bytes.len() as u64);
                    at += bytes.len();
                }
            });
            let mut at = 0;
            while at < TOTAL {
                let bytes = reader.head().unwrap() as usize;
                if bytes == 0 {
                    reader.give_back_small();
                    std::thread::yield_now();
                    continue;
                }
                let mut got = vec![0; bytes];
                reader.read(&mut got).unwrap();
                assert!((at..at + bytes).map(byte).eq(got), "at {at}");
                if at % 5 > 0 {
                    let _ = reader.give_back();
                }
                at += bytes;
            }
        });
    }
}
