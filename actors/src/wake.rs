//! Waking an actor when its machine has something to do.

use std::sync::Arc;

use ractor::{ActorRef, Message};

use crate::env::{Clock, Instant, Spawner};

/// The alarm clock of one actor. At most one alarm counts; earlier ones replace later ones.
#[derive(Debug)]
pub(crate) struct Wake {
    name: &'static str,
    clock: Arc<dyn Clock>,
    spawner: Arc<dyn Spawner>,
    armed: Option<Instant>,
}

impl Wake {
    /// An alarm clock that is not set. `name` names its tasks.
    pub(crate) fn new(name: &'static str, clock: Arc<dyn Clock>, spawner: Arc<dyn Spawner>) -> Self {
        Self { name, clock, spawner, armed: None }
    }

    /// Sends `message` to the actor at `deadline`, unless an alarm before it is set already. The actor then calls
    /// [`Wake::fired`] and sets the next.
    pub(crate) fn set<M: Message>(&mut self, actor: &ActorRef<M>, deadline: Instant, message: M) {
        if self.armed.is_some_and(|armed| armed <= deadline) {
            return;
        }
        self.armed = Some(deadline);
        let (clock, actor) = (Arc::clone(&self.clock), actor.clone());
        self.spawner.task(
            self.name,
            Box::pin(async move {
                clock.sleep_until(deadline).await;
                // An actor that has stopped needs no waking.
                drop(actor.cast(message));
            }),
        );
    }

    /// An alarm came. Those that were replaced come too, and do no harm.
    pub(crate) fn fired(&mut self, now: Instant) {
        if self.armed.is_some_and(|armed| armed <= now) {
            self.armed = None;
        }
    }
}
