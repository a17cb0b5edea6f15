//! The ring under a model checker, which tries the orders in which two threads can run and what they can see of each other's stores.
//!
//! The bytes are cells that the checker watches: it fails if one end could touch a byte while the other does. Sleeping is a
//! lock and a condition without a timeout, so that a lost wake-up is a deadlock, which it reports.

use std::sync::Arc as Plain;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};

use super::{Atomics, Lane, Line, Memory, Reader, Word, Writer, word};

word!(u64, AtomicU64);
word!(u32, AtomicU32);

struct Model;

impl Atomics for Model {
    type Count = AtomicU64;
    type Flag = AtomicU32;

    fn fence(order: Ordering) {
        fence(order);
    }
}

/// Without the fences: to see that the checker finds out.
struct Fenceless;

impl Atomics for Fenceless {
    type Count = AtomicU64;
    type Flag = AtomicU32;

    fn fence(_: Ordering) {}
}

/// A ring of very few bytes.
struct Toy<A: Atomics> {
    lane: Lane<A>,
    bytes: Vec<UnsafeCell<u8>>,
}

impl<A: Atomics<Count = AtomicU64, Flag = AtomicU32>> Toy<A> {
    fn new(ring: usize) -> Self {
        let lane = Lane {
            written: Line(AtomicU64::new(0)),
            read: Line(AtomicU64::new(0)),
            reader_waits: Line(AtomicU32::new(0)),
            writer_waits: Line(AtomicU32::new(0)),
        };
        Self { lane, bytes: (0..ring).map(|_| UnsafeCell::new(0)).collect() }
    }

    fn cell(&self, at: u64) -> &UnsafeCell<u8> {
        &self.bytes[(at % self.bytes.len() as u64) as usize]
    }
}

impl<A: Atomics<Count = AtomicU64, Flag = AtomicU32>> Memory for Toy<A> {
    type Atomics = A;

    fn lane(&self, _: usize) -> &Lane<A> {
        &self.lane
    }

    fn ring_bytes(&self) -> usize {
        self.bytes.len()
    }

    fn copy_in(&self, _: usize, at: u64, bytes: &[u8]) {
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: the pointer is good during the call, and the checker fails if another thread is at the cell.
            self.cell(at + i as u64).with_mut(|cell| unsafe { *cell = *byte });
        }
    }

    fn copy_out(&self, _: usize, at: u64, into: &mut [u8]) {
        for (i, byte) in into.iter_mut().enumerate() {
            // SAFETY: as above.
            self.cell(at + i as u64).with(|cell| *byte = unsafe { *cell });
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

/// Passes `messages` of so many bytes through a ring of `ring`, each end sleeping whenever it can.
fn pass<A: Atomics<Count = AtomicU64, Flag = AtomicU32> + 'static>(ring: usize, message: usize, messages: u8) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let toy = Plain::new(Toy::<A>::new(ring));
        let bells = Arc::new([Bell::new(), Bell::new()]);
        let (mut writer, mut reader) = (Writer::new(Plain::clone(&toy), 0), Reader::new(toy, 0));
        let writing = {
            let bells = Arc::clone(&bells);
            loom::thread::spawn(move || {
                for i in 0..messages {
                    // As `await_room`, without spinning.
                    while !writer.has_room(message).unwrap() {
                        writer.will_wait();
                        if writer.room().unwrap() < message {
                            bells[1].wait();
                        }
                    }
                    writer.write(&vec![i + 1; message]);
                    if writer.publish() {
                        bells[0].ring();
                    }
                }
            })
        };
        for i in 0..messages {
            // As `await_bytes`.
            while reader.known() < message && reader.ready().unwrap() < message {
                reader.will_wait();
                if reader.ready().unwrap() < message {
                    bells[0].wait();
                }
            }
            let mut got = vec![0; message];
            reader.read(&mut got);
            assert!(got.iter().all(|byte| *byte == i + 1), "{got:?} came as message {i}");
            if reader.give_back() {
                bells[1].ring();
            }
        }
        writing.join().unwrap();
    });
}

#[test]
fn no_wake_up_is_lost_and_no_byte_is_torn() {
    // Room for one message, for one and a half, and for all.
    pass::<Model>(2, 2, 3);
    pass::<Model>(3, 2, 3);
    pass::<Model>(4, 1, 4);
}

#[test]
#[ignore = "the checker ends the process: started by another test, in a process of its own"]
fn alone_without_fences() {
    pass::<Fenceless>(2, 2, 3);
}

#[test]
fn without_the_fences_one_is_lost() {
    crate::testing::finds_deadlock("provider::shm::ring::model::alone_without_fences");
}
