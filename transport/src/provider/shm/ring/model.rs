//! The ring under a model checker, which tries the orders in which two threads can run and what they can see of each other's stores.
//!
//! The bytes are cells that the checker watches: it fails if one end could touch a byte while the other does. Sleeping is a
//! lock and a condition without a timeout, so that a lost wake-up is a deadlock, which it reports.

use std::sync::Arc as Plain;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};

use super::{Atomics, Lane, Line, Memory, Reader, Size, Word, Writer};

/// What is left out, to see that the checker finds out.
mod without {
    pub(super) const NOTHING: u8 = 0;
    /// The fences between a flag and what is looked at.
    pub(super) const FENCES: u8 = 1;
    /// Acquiring and releasing.
    pub(super) const ORDER: u8 = 2;
    /// The zero where the next head will be.
    pub(super) const ZEROS: u8 = 3;
}

struct Model<const WITHOUT: u8>;
struct Count<const WITHOUT: u8>(AtomicU64);
struct Flag<const WITHOUT: u8>(AtomicU32);

const fn or_none<const WITHOUT: u8>(order: Ordering) -> Ordering {
    if WITHOUT == without::ORDER { Ordering::Relaxed } else { order }
}

impl<const WITHOUT: u8> Atomics for Model<WITHOUT> {
    type Count = Count<WITHOUT>;
    type Flag = Flag<WITHOUT>;

    fn fence(order: Ordering) {
        if WITHOUT != without::FENCES {
            fence(order);
        }
    }
}

impl<const WITHOUT: u8> Word<u64> for Count<WITHOUT> {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(or_none::<WITHOUT>(order))
    }

    fn store(&self, value: u64, order: Ordering) {
        if WITHOUT != without::ZEROS || value != 0 {
            self.0.store(value, or_none::<WITHOUT>(order));
        }
    }

    fn swap(&self, value: u64, order: Ordering) -> u64 {
        self.0.swap(value, or_none::<WITHOUT>(order))
    }
}

impl<const WITHOUT: u8> Word<u32> for Flag<WITHOUT> {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }

    fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }

    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.0.swap(value, order)
    }
}

/// Rings of very few bytes: a line is two, of which a head takes one.
struct Toy<const WITHOUT: u8> {
    lane: Lane<Model<WITHOUT>>,
    rings: [Ring<WITHOUT>; 2],
}

struct Ring<const WITHOUT: u8> {
    /// The first byte of each line, as a head and as one of a record's bytes.
    heads: Vec<Count<WITHOUT>>,
    bytes: Vec<UnsafeCell<u8>>,
}

impl<const WITHOUT: u8> Toy<WITHOUT> {
    fn new(rings: [usize; 2]) -> Self {
        let count = || Count(AtomicU64::new(0));
        let flag = || Line(Flag(AtomicU32::new(0)));
        let lane = Lane { read: Line([count(), count()]), reader_waits: flag(), writer_waits: flag() };
        let rings = rings.map(|bytes| Ring {
            heads: (0..bytes / Self::LINE).map(|_| count()).collect(),
            bytes: (0..bytes).map(|_| UnsafeCell::new(0)).collect(),
        });
        Self { lane, rings }
    }

    fn cell(&self, size: Size, at: u64) -> &UnsafeCell<u8> {
        let bytes = &self.rings[size as usize].bytes;
        &bytes[(at % bytes.len() as u64) as usize]
    }
}

impl<const WITHOUT: u8> Memory for Toy<WITHOUT> {
    type Atomics = Model<WITHOUT>;
    const LINE: usize = 2;
    const HEAD: usize = 1;
    const SHORT: usize = 2;

    fn lane(&self, _: usize) -> &Lane<Self::Atomics> {
        &self.lane
    }

    fn ring_bytes(&self, size: Size) -> usize {
        self.rings[size as usize].bytes.len()
    }

    fn head(&self, _: usize, size: Size, at: u64) -> &Count<WITHOUT> {
        assert_eq!(at % Self::LINE as u64, 0, "a head is at the start of a line");
        let heads = &self.rings[size as usize].heads;
        &heads[(at as usize / Self::LINE) % heads.len()]
    }

    fn copy_in(&self, _: usize, size: Size, at: u64, bytes: &[u8]) {
        for (at, byte) in (at..).zip(bytes) {
            // SAFETY: the pointer is good during the call, and the checker fails if another thread is at the cell.
            self.cell(size, at).with_mut(|cell| unsafe { *cell = *byte });
            if at % Self::LINE as u64 == 0 {
                // Whoever takes it for a head is wrong.
                self.head(0, size, at).store(u64::MAX, Ordering::Relaxed);
            }
        }
    }

    fn copy_out(&self, _: usize, size: Size, at: u64, into: &mut [u8]) {
        for (at, byte) in (at..).zip(into) {
            // SAFETY: as above.
            self.cell(size, at).with(|cell| *byte = unsafe { *cell });
        }
    }
}

/// Rung by one end, waited on by the other, and never silent for long enough to be missed.
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn new() -> Self {
        Self { rung: Mutex::new(false), changed: Condvar::new() }
    }

    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.changed.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// Passes records with so many bytes through rings of `rings` bytes, each end sleeping whenever it can.
fn pass<const WITHOUT: u8>(rings: [usize; 2], records: &'static [usize]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        #[expect(clippy::arc_with_non_send_sync, reason = "the checker's threads take turns, and it watches the cells")]
        let toy = Plain::new(Toy::<WITHOUT>::new(rings));
        let bells = Arc::new([Bell::new(), Bell::new()]);
        let (mut writer, mut reader) = (Writer::new(Plain::clone(&toy), 0), Reader::new(toy, 0));
        let writing = {
            let bells = Arc::clone(&bells);
            loom::thread::spawn(move || {
                for (i, bytes) in (1..).zip(records) {
                    let takes = Writer::<Toy<WITHOUT>>::takes(*bytes);
                    // As `await_room`, without spinning.
                    while !writer.has_room(takes).unwrap() {
                        writer.will_wait();
                        if !writer.has_room(takes).unwrap() {
                            bells[1].wait();
                        }
                    }
                    writer.write(&vec![i; *bytes]);
                    if writer.publish(u64::from(i)) {
                        bells[0].ring();
                    }
                }
            })
        };
        for (i, bytes) in (1..).zip(records) {
            // As `await_record`.
            reader.give_back_small();
            let head = loop {
                match reader.head().expect("a record's head") {
                    0 => {}
                    head => break head,
                }
                reader.will_wait();
                if reader.head().expect("a record's head") == 0 {
                    bells[0].wait();
                }
            };
            assert_eq!(head, u64::from(i), "a record's head");
            let mut got = vec![0; *bytes];
            reader.read(&mut got).unwrap();
            assert!(got.iter().all(|byte| *byte == i), "{got:?} came as record {i}");
            if reader.owed() > 0 && reader.give_back() {
                bells[1].ring();
            }
        }
        writing.join().unwrap();
    });
}

/// A ring that never has room beside the next head.
const NONE: usize = 2;

#[test]
fn no_wake_up_is_lost_and_no_byte_is_torn() {
    // Room for one record beside the next head, which lies where the last one was; for one of two lines; and for two.
    pass::<{ without::NOTHING }>([NONE, 4], &[1, 1, 1, 1]);
    pass::<{ without::NOTHING }>([NONE, 6], &[2, 2, 2]);
    pass::<{ without::NOTHING }>([NONE, 6], &[1, 1, 1, 1]);
}

#[test]
fn records_go_to_and_fro_between_the_rings() {
    pass::<{ without::NOTHING }>([4, 4], &[1, 1, 1, 1]);
    pass::<{ without::NOTHING }>([4, 6], &[1, 2, 1, 1]);
    pass::<{ without::NOTHING }>([6, 6], &[1, 1, 2, 1]);
}

#[test]
#[ignore = "the checker ends the process: started by another test, in a process of its own"]
fn alone_without_fences() {
    pass::<{ without::FENCES }>([NONE, 4], &[1, 1, 1]);
}

#[test]
#[ignore = "the checker ends the process: started by another test, in a process of its own"]
fn alone_without_order() {
    pass::<{ without::ORDER }>([NONE, 4], &[1, 1, 1]);
}

#[test]
#[ignore = "the checker ends the process: started by another test, in a process of its own"]
fn alone_without_zeros() {
    pass::<{ without::ZEROS }>([4, 4], &[1, 1, 1, 1]);
}

#[test]
fn what_is_left_out_is_missed() {
    use crate::testing::finds;
    finds("provider::shm::ring::model::alone_without_fences", "deadlock");
    finds("provider::shm::ring::model::alone_without_order", "Causality violation");
    finds("provider::shm::ring::model::alone_without_zeros", "a record's head");
}
