//! Compute threads: a fork-join pool whose workers spin for some microseconds, then sleep; and a way for them to write
//! to disjoint parts of one buffer.

use std::any::Any;
use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};

/// How often a waiting thread looks before it sleeps: some 10 to 20 µs. Several nodes may share a machine's cores, and a
/// thread that spins for long takes the core from the one it waits for.
const SPINS: usize = 400;

/// Share `worker` of `items` when `workers` share them: contiguous, in order, sizes differing by one at most.
pub(crate) fn share(items: usize, worker: usize, workers: usize) -> Range<usize> {
    items * worker / workers..items * (worker + 1) / workers
}

/// A job: called once in each thread with the thread's number. Its true lifetime is that of the call of [`Pool::run`].
type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// The current job. Written by the owner before `epoch` grows, read by workers after.
    job: UnsafeCell<Option<Job>>,
    /// Jobs so far.
    epoch: AtomicUsize,
    /// Workers that have not finished the current job.
    running: AtomicUsize,
    /// One for each worker: whether it sleeps, or is about to.
    asleep: Vec<AtomicBool>,
    /// Whether the owner sleeps, or is about to.
    owner_asleep: AtomicBool,
    /// The thread that runs the current job's share 0.
    owner: Mutex<Option<Thread>>,
    /// What a worker panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

// SAFETY: `job` is the only part that is not `Sync` or `Send` by itself. It is written only by `Pool::run`, which has the pool
// exclusively, while no worker runs (`running` is zero), and read by workers after they acquired the `epoch` that was
// released after the write. What it points to is `Sync` and outlives the job, because `run` returns only when `running` is zero.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// A fixed number of compute threads, the caller's among them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// A pool of `threads` threads; one (or none) means that everything runs in the caller's and no thread is made.
    ///
    /// # Errors
    /// When the system gives no more threads.
    pub(crate) fn new(threads: usize) -> std::io::Result<Self> {
        let count = threads.max(1) - 1;
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(None),
            epoch: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            asleep: (0..count).map(|_| AtomicBool::new(false)).collect(),
            owner_asleep: AtomicBool::new(false),
            owner: Mutex::new(None),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let mut pool = Self { shared, workers: Vec::with_capacity(count) };
        for worker in 0..count {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("shoal-compute-{}", worker + 1));
            pool.workers.push(builder.spawn(move || shared.work(worker))?);
        }
        Ok(pool)
    }

    /// Threads, the caller's included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `job` once in each thread, with numbers from 0, and returns when all calls have.
    ///
    /// # Panics
    /// When a call did, after all have ended.
    pub(crate) fn run(&mut self, job: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() {
            return job(0);
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime is changed. The pointer is used by workers only while `running` is not zero, and this
        // function leaves, normally or by unwinding, only after it has become zero.
        let erased: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(job) };
        *shared.owner.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current());
        // SAFETY: no worker runs, so none reads the cell: see `Shared`.
        unsafe { *shared.job.get() = Some(erased) };
        shared.running.store(self.workers.len(), Ordering::Relaxed);
        // Sequentially consistent, as is a worker's announcement that it sleeps: one of the two sees the other.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        for (asleep, worker) in shared.asleep.iter().zip(&self.workers) {
            if asleep.load(Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        let own = catch_unwind(AssertUnwindSafe(|| job(0)));
        wait(&shared.owner_asleep, || shared.running.load(Ordering::SeqCst) == 0);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        if let Some(panic) = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its jobs' panics, so there is nothing to learn from the result.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            wait(&self.asleep[worker], || self.epoch.load(Ordering::SeqCst) != seen);
            seen += 1;
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // SAFETY: the epoch was acquired, so the owner's write is visible, and it writes again only when `running` is zero.
            let job = unsafe { *self.job.get() };
            if let Some(job) = job {
                // SAFETY: the owner is in `Pool::run`, so what the pointer was made from is alive.
                let job = unsafe { &*job };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job(worker + 1))) {
                    *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                }
            }
            // The owner may leave as soon as the count is zero, but `self` is kept alive by this thread's own reference.
            if self.running.fetch_sub(1, Ordering::SeqCst) == 1
                && self.owner_asleep.load(Ordering::SeqCst)
                && let Some(owner) = &*self.owner.lock().unwrap_or_else(PoisonError::into_inner)
            {
                owner.unpark();
            }
        }
    }
}

/// Waits until `ready`: looks [`SPINS`] times, then sleeps. Whoever makes it ready unparks the thread if `asleep`.
fn wait(asleep: &AtomicBool, ready: impl Fn() -> bool) {
    for _ in 0..SPINS {
        if ready() {
            return;
        }
        std::hint::spin_loop();
    }
    asleep.store(true, Ordering::SeqCst);
    while !ready() {
        std::thread::park();
    }
    asleep.store(false, Ordering::SeqCst);
}

/// A buffer that several threads write at once, each its own parts.
pub(crate) struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    buffer: PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out parts of a `&mut [T]` of which, by `part`'s contract, no two overlap: as if the slice had been split and each part
// sent to a thread.
unsafe impl<T: Send> Sync for Parts<'_, T> {}
// SAFETY: as for `&mut [T]`.
unsafe impl<T: Send> Send for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    /// Takes the buffer for as long as parts are written.
    pub(crate) fn new(buffer: &'a mut [T]) -> Self {
        Self { start: buffer.as_mut_ptr(), len: buffer.len(), buffer: PhantomData }
    }

    /// The elements in `range`.
    ///
    /// # Panics
    /// When the range is not within the buffer.
    ///
    /// # Safety
    /// While the part is in use, no other part that overlaps it may be.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "parts are disjoint, which is this function's contract")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of a buffer of {}", self.len);
        // SAFETY: the range is within the buffer, which is borrowed exclusively for `'a`; no overlapping part is in use.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once() {
        for items in 0..40 {
            for workers in 1..7 {
                let all: Vec<usize> = (0..workers).flat_map(|w| share(items, w, workers)).collect();
                assert_eq!(all, (0..items).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn every_thread_runs_every_job_once() {
        for threads in [0, 1, 2, 3, 5] {
            let mut pool = Pool::new(threads).unwrap();
            let count = pool.threads();
            let mut sums = vec![0usize; count * 64];
            for round in 0..300 {
                // Sometimes long enough for the workers to fall asleep.
                if round % 100 == 99 {
                    std::thread::yield_now();
                    std::thread::park_timeout(std::time::Duration::from_millis(2));
                }
                let parts = Parts::new(&mut sums);
                pool.run(&|worker| {
                    // SAFETY: each worker takes its own part.
                    for sum in unsafe { parts.part(share(count * 64, worker, count)) } {
                        *sum += round;
                    }
                });
            }
            assert!(sums.iter().all(|sum| *sum == 300 * 299 / 2));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_leaves_the_pool_usable() {
        let mut pool = Pool::new(3).unwrap();
        for thread in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| pool.run(&|worker| assert!(worker != thread, "as asked"))));
            assert!(result.is_err());
            let calls = AtomicUsize::new(0);
            pool.run(&|_| {
                calls.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(calls.into_inner(), 3);
        }
    }

    #[test]
    #[should_panic(expected = "part 3..9 of a buffer of 8")]
    fn a_part_outside_the_buffer_is_refused() {
        let mut buffer = [0; 8];
        let parts = Parts::new(&mut buffer);
        // SAFETY: the only part.
        let _ = unsafe { parts.part(3..9) };
    }

    #[test]
    fn a_pool_moves_between_threads() {
        let mut pool = Pool::new(2).unwrap();
        pool.run(&|_| {});
        let mut pool = std::thread::spawn(move || {
            pool.run(&|_| {});
            pool
        })
        .join()
        .unwrap();
        pool.run(&|_| {});
    }
}
