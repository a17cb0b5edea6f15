//! The actor that looks at the machine's memory and has the lease owner offer what is there.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SpawnErr};

use crate::env::{Clock, Spawner, Trouble};
use crate::lease::{Leases, size};
use crate::wake::Wake;

use super::MemoryGauge;
use super::machine::{LOOK_EVERY, Pressure};

/// What the watch has found, for the rest of the node. It outlives restarts of the actor.
#[derive(Clone)]
pub(crate) struct MemoryWatch {
    shared: Arc<Mutex<(Pressure, Option<Trouble>)>>,
    allowed: u64,
}

impl MemoryWatch {
    /// Before its actor runs: all that the user allowed is offered, in bytes.
    pub(crate) fn new(allowed: u64) -> Self {
        Self { shared: Arc::new(Mutex::new((Pressure::new(allowed), None))), allowed }
    }

    /// What is wrong, if much less is offered than the user allowed.
    pub(crate) fn trouble(&self) -> Option<Trouble> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner).1.clone()
    }
}

impl fmt::Debug for MemoryWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWatch").field("allowed", &self.allowed).finish_non_exhaustive()
    }
}

/// What a [`MemoryWatchActor`] is started with. A clone starts its successor.
#[derive(Debug, Clone)]
pub(crate) struct MemoryWatchArguments {
    /// What others see of it.
    pub(crate) handle: MemoryWatch,
    /// Time.
    pub(crate) clock: Arc<dyn Clock>,
    /// Tasks.
    pub(crate) spawner: Arc<dyn Spawner>,
    /// How much there is.
    pub(crate) gauge: Arc<dyn MemoryGauge>,
    /// Who offers it.
    pub(crate) leases: Leases,
}

/// Its only message: look.
#[derive(Debug)]
pub(crate) struct Look;

/// Runs a node's [`MemoryWatch`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct MemoryWatchActor;

impl MemoryWatchActor {
    /// Starts the actor, linked to `supervisor`.
    pub(crate) async fn start(arguments: MemoryWatchArguments, supervisor: ActorCell) -> Result<ActorRef<Look>, SpawnErr> {
        Actor::spawn_linked(None, Self, arguments, supervisor).await.map(|(actor, _)| actor)
    }
}

impl Actor for MemoryWatchActor {
    type Msg = Look;
    type State = (MemoryWatchArguments, Wake);
    type Arguments = MemoryWatchArguments;

    async fn pre_start(&self, me: ActorRef<Look>, arguments: MemoryWatchArguments) -> Result<Self::State, ActorProcessingErr> {
        let mut wake = Wake::new("memory", Arc::clone(&arguments.clock), Arc::clone(&arguments.spawner));
        wake.set(&me, arguments.clock.now() + LOOK_EVERY, Look);
        Ok((arguments, wake))
    }

    async fn handle(&self, me: ActorRef<Look>, Look: Look, (arguments, wake): &mut Self::State) -> Result<(), ActorProcessingErr> {
        let now = arguments.clock.now();
        wake.fired(now);
        if let Some(reading) = arguments.gauge.read() {
            let allowed = arguments.handle.allowed;
            let mut state = arguments.handle.shared.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(offer) = state.0.step(now, reading, arguments.leases.totals()) {
                tracing::info!(target: "shoal::memory", offer, allowed, available = reading.available_bytes, "another offer");
                arguments.leases.offer(offer);
                // A little less is daily life.
                state.1 = (offer < allowed / 4 * 3).then(|| trouble(offer, allowed));
            }
        }
        wake.set(&me, now + LOOK_EVERY, Look);
        Ok(())
    }
}

fn trouble(offer: u64, allowed: u64) -> Trouble {
    Trouble {
        about: "memory".to_owned(),
        what: format!("other programs use so much that only {} of {} are on offer", size(offer), size(allowed)),
        help: "close what you do not need, or start the node with a lower --memory; what comes free is offered again".to_owned(),
    }
}
