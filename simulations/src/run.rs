//! Running a future in a world: everything that can run runs, then comes the next event.

use std::future::{Future, poll_fn};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use crate::world::World;

/// Why a run did not come to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// Something that must always hold does not, or a part of a node failed.
    #[error("{0}")]
    Failed(String),
    /// The scenario waits, and no event is left that could end its wait.
    #[error("nothing is left to happen, but the scenario has not ended: it waits for something that never comes")]
    Stuck,
    /// The scenario itself panicked.
    #[error("the scenario panicked: {0}")]
    Panicked(String),
    /// There is no runtime to run it in.
    #[error("the runtime did not start: {0}")]
    Runtime(String),
}

/// Tells the root future that nothing else can run: tokio is about to put its only thread to sleep.
#[derive(Clone, Default)]
struct Idle {
    state: Arc<Mutex<(bool, Option<Waker>)>>,
}

impl Idle {
    /// Called by the runtime before it sleeps. Waking the root future keeps it awake.
    fn parked(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(waker) = state.1.take() {
            state.0 = true;
            drop(state);
            waker.wake();
        }
    }

    /// Resolves when nothing else can run.
    async fn wait(&self) {
        poll_fn(|cx| {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if std::mem::take(&mut state.0) {
                return Poll::Ready(());
            }
            let before = state.1.replace(cx.waker().clone());
            drop(state);
            drop(before);
            Poll::Pending
        })
        .await;
    }
}

/// Runs `main` in `world` until it ends. `check` is called whenever nothing can run, which is after each event.
///
/// The runtime has one thread and no timer of its own: whoever uses tokio's time instead of the node's clock panics,
/// and the run fails.
///
/// # Errors
/// [`RunError`], at the first thing that is wrong.
pub fn run<T: Send + 'static>(
    world: &World,
    main: impl Future<Output = T> + Send + 'static,
    mut check: impl FnMut() -> Result<(), String>,
) -> Result<T, RunError> {
    let idle = Idle::default();
    let parked = idle.clone();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .on_thread_park(move || parked.parked())
        .build()
        .map_err(|error| RunError::Runtime(error.to_string()))?;
    let result = runtime.block_on(async {
        let main = tokio::spawn(main);
        loop {
            idle.wait().await;
            check().map_err(RunError::Failed)?;
            if let Some(reason) = world.failure() {
                return Err(RunError::Failed(reason));
            }
            if main.is_finished() {
                return main.await.map_err(|error| RunError::Panicked(error.to_string()));
            }
            if !world.step() {
                return Err(RunError::Stuck);
            }
        }
    });
    drop(runtime);
    world.end();
    result
}
