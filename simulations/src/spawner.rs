//! A node's tasks: they end with it.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::FutureExt;
use shoal_actors::env::{BoxFuture, Join, Spawner};
use tokio::task::AbortHandle;

use crate::world::World;

#[derive(Debug, Default)]
struct Tasks {
    crashed: bool,
    last: u64,
    running: BTreeMap<u64, AbortHandle>,
}

/// The tasks of one life of a node. A crash ends them all where they stand.
///
/// There are no threads in a simulation: what asks for one is run to its end on the spot, which suits work that blocks
/// for a while (hashing, loading) and not loops that wait for messages.
#[derive(Debug, Clone)]
pub struct SimSpawner {
    world: World,
    node: u16,
    tasks: Arc<Mutex<Tasks>>,
}

impl SimSpawner {
    /// For one life of a node.
    pub fn new(world: World, node: u16) -> Self {
        Self { world, node, tasks: Arc::default() }
    }

    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all tasks, and starts no more.
    pub fn crash(&self) {
        let running = {
            let mut tasks = self.tasks();
            tasks.crashed = true;
            std::mem::take(&mut tasks.running)
        };
        for task in running.into_values() {
            task.abort();
        }
    }

    /// Tasks that have not ended.
    pub fn running(&self) -> usize {
        self.tasks().running.len()
    }
}

impl Spawner for SimSpawner {
    fn task(&self, name: &'static str, future: BoxFuture<'static, ()>) {
        let number = {
            let mut tasks = self.tasks();
            if tasks.crashed {
                return;
            }
            tasks.last += 1;
            tasks.last
        };
        let me = self.clone();
        let task = tokio::spawn(async move {
            if AssertUnwindSafe(future).catch_unwind().await.is_err() {
                me.world.fail(format!("the task `{name}` of node {} panicked", me.node));
            }
            me.tasks().running.remove(&number);
        });
        self.tasks().running.insert(number, task.abort_handle());
    }

    fn thread(&self, name: String, body: Box<dyn FnOnce() + Send>) -> io::Result<Box<dyn Join>> {
        if self.tasks().crashed {
            return Err(io::Error::other(format!("the node has crashed and starts no thread `{name}`")));
        }
        let well = catch_unwind(AssertUnwindSafe(body)).is_ok();
        if !well {
            self.world.fail(format!("the thread `{name}` of node {} panicked", self.node));
        }
        Ok(Box::new(Ended(well)))
    }
}

/// A thread that has run to its end.
struct Ended(bool);

impl Join for Ended {
    fn join(self: Box<Self>) -> bool {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::run;

    #[test]
    fn a_crash_ends_tasks_and_a_panic_is_a_failure() {
        let world = World::new(1);
        let spawner = SimSpawner::new(world.clone(), 3);
        let count = Arc::new(AtomicUsize::new(0));
        let (inside, counted) = (world.clone(), Arc::clone(&count));
        let main = async move {
            for seconds in [1, 3] {
                let (world, counted) = (inside.clone(), Arc::clone(&counted));
                spawner.task(
                    "count",
                    Box::pin(async move {
                        world.sleep(3, Duration::from_secs(seconds)).await;
                        counted.fetch_add(1, Ordering::Relaxed);
                    }),
                );
            }
            inside.sleep(0, Duration::from_secs(2)).await;
            assert_eq!(spawner.running(), 1);
            spawner.crash();
            assert!(spawner.thread("late".to_owned(), Box::new(|| {})).is_err());
            inside.sleep(0, Duration::from_secs(2)).await;
            let next = SimSpawner::new(inside.clone(), 3);
            next.task("bad", Box::pin(async { panic!("as told") }));
            inside.sleep(0, Duration::from_secs(1)).await;
        };
        let error = run(&world, main, || Ok(())).unwrap_err();
        assert!(error.to_string().contains("`bad` of node 3"), "{error}");
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
