//! The actor: who asked for what, and who is told of changes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ractor::{Actor, ActorProcessingErr, ActorRef, SupervisionEvent};
use tokio::sync::oneshot;

use super::cancel::Cancel;
use super::fetch::{FetchError, Progress, ProgressSink};
use super::pull::Shared;
use super::reference::Reference;
use super::store::{Listing, LocalModel, StoreError};
use super::{CatalogError, ModelsSink};
use crate::card::ModelOnDisk;
use crate::env::Spawner;

/// The answer to a pull.
pub(crate) type Reply = oneshot::Sender<Result<LocalModel, CatalogError>>;

/// What the actor is told.
pub(crate) enum Message {
    /// Somebody wants a model.
    Pull { reference: Reference, waiter: u64, progress: ProgressSink, reply: Reply },
    /// That somebody does not any more.
    Leave { waiter: u64 },
    /// A thread is done.
    Pulled { job: u64, result: Result<LocalModel, CatalogError> },
    /// The folder may have changed.
    Look,
    /// What the folder holds.
    Seen(Result<Listing, StoreError>),
    /// Somebody wants to know of changes.
    Subscribe(ModelsSink),
}

pub(crate) struct CatalogActor;

/// What the actor starts with.
pub(crate) struct Arguments {
    pub(crate) shared: Shared,
    pub(crate) spawner: Arc<dyn Spawner>,
}

pub(crate) struct State {
    shared: Shared,
    spawner: Arc<dyn Spawner>,
    jobs: BTreeMap<u64, PullJob>,
    next_job: u64,
    /// What was last told, once the folder has been looked at.
    models: Option<Vec<ModelOnDisk>>,
    subscribers: Vec<ModelsSink>,
    looking: bool,
    look_again: bool,
}

/// A download and all who wait for it.
struct PullJob {
    /// What it fetches, in the form in which references are compared.
    key: String,
    cancel: Cancel,
    fan: Arc<Mutex<Fan>>,
    waiters: BTreeMap<u64, Reply>,
}

#[derive(Default)]
struct Fan {
    sinks: BTreeMap<u64, ProgressSink>,
    last: Option<Progress>,
}

impl Fan {
    fn tell(fan: &Mutex<Self>, progress: &Progress) {
        let sinks: Vec<ProgressSink> = {
            let mut fan = fan.lock().unwrap_or_else(PoisonError::into_inner);
            fan.last = Some(progress.clone());
            fan.sinks.values().cloned().collect()
        };
        for sink in sinks {
            sink(progress);
        }
    }
}

/// Tells the actor how a thread ended, even if that was a panic.
struct Report {
    actor: ActorRef<Message>,
    job: u64,
    result: Option<Result<LocalModel, CatalogError>>,
}

impl Report {
    fn finish(mut self, body: impl FnOnce() -> Result<LocalModel, CatalogError>) {
        self.result = Some(body());
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        let result = self.result.take().unwrap_or(Err(CatalogError::Internal { what: "a pull" }));
        // There is nobody to tell after the actor has stopped.
        let _ = self.actor.cast(Message::Pulled { job: self.job, result });
    }
}

impl Actor for CatalogActor {
    type Msg = Message;
    type State = State;
    type Arguments = Arguments;

    async fn pre_start(&self, myself: ActorRef<Message>, arguments: Arguments) -> Result<State, ActorProcessingErr> {
        let Arguments { shared, spawner } = arguments;
        let _ = myself.cast(Message::Look);
        Ok(State {
            shared,
            spawner,
            jobs: BTreeMap::new(),
            next_job: 0,
            models: None,
            subscribers: Vec::new(),
            looking: false,
            look_again: false,
        })
    }

    async fn handle(&self, myself: ActorRef<Message>, message: Message, state: &mut State) -> Result<(), ActorProcessingErr> {
        match message {
            Message::Pull { reference, waiter, progress, reply } => state.pull(&myself, reference, waiter, progress, reply),
            Message::Leave { waiter } => state.leave(waiter),
            Message::Pulled { job, result } => {
                if let Some(job) = state.jobs.remove(&job) {
                    for (_, reply) in job.waiters {
                        let _ = reply.send(result.clone());
                    }
                }
                state.look(&myself);
            }
            Message::Look => state.look(&myself),
            Message::Seen(seen) => {
                state.looking = false;
                state.seen(seen);
                if std::mem::take(&mut state.look_again) {
                    state.look(&myself);
                }
            }
            Message::Subscribe(sink) => {
                if let Some(models) = &state.models {
                    sink(models);
                }
                state.subscribers.push(sink);
            }
        }
        Ok(())
    }

    async fn post_stop(&self, _myself: ActorRef<Message>, state: &mut State) -> Result<(), ActorProcessingErr> {
        for job in state.jobs.values() {
            job.cancel.cancel();
        }
        // Dropping the replies tells the waiters.
        state.jobs.clear();
        Ok(())
    }

    async fn handle_supervisor_evt(&self, _: ActorRef<Message>, _: SupervisionEvent, _: &mut State) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}

impl State {
    fn pull(&mut self, myself: &ActorRef<Message>, reference: Reference, waiter: u64, progress: ProgressSink, reply: Reply) {
        let key = reference.to_string();
        if let Some(job) = self.jobs.values_mut().find(|job| job.key == key) {
            let last = {
                let mut fan = job.fan.lock().unwrap_or_else(PoisonError::into_inner);
                fan.sinks.insert(waiter, Arc::clone(&progress));
                fan.last.clone()
            };
            job.waiters.insert(waiter, reply);
            if let Some(last) = last {
                progress(&last);
            }
            return;
        }
        let number = self.next_job;
        self.next_job += 1;
        let fan = Arc::new(Mutex::new(Fan { sinks: BTreeMap::from([(waiter, progress)]), last: None }));
        let cancel = Cancel::new();
        let thread = {
            let (fan, cancel, shared, actor) = (Arc::clone(&fan), cancel.clone(), self.shared.clone(), myself.clone());
            let report = Report { actor, job: number, result: None };
            move || report.finish(|| shared.pull(&reference, &cancel, &|progress| Fan::tell(&fan, progress)))
        };
        if let Err(error) = self.spawner.thread(format!("pull {key}"), Box::new(thread)) {
            let _ = reply.send(Err(CatalogError::Thread { reason: error.to_string() }));
            return;
        }
        self.jobs.insert(number, PullJob { key, cancel, fan, waiters: BTreeMap::from([(waiter, reply)]) });
    }

    /// The last one to leave ends the download; its thread may need a moment, but nobody waits for that: a new pull
    /// of the same model gets a thread of its own, which waits for the lock.
    fn leave(&mut self, waiter: u64) {
        let Some((number, job)) = self.jobs.iter_mut().find(|(_, job)| job.waiters.contains_key(&waiter)) else { return };
        if let Some(reply) = job.waiters.remove(&waiter) {
            let _ = reply.send(Err(FetchError::Cancelled.into()));
        }
        job.fan.lock().unwrap_or_else(PoisonError::into_inner).sinks.remove(&waiter);
        if job.waiters.is_empty() {
            job.cancel.cancel();
            let number = *number;
            self.jobs.remove(&number);
        }
    }

    fn look(&mut self, myself: &ActorRef<Message>) {
        if self.looking {
            self.look_again = true;
            return;
        }
        let (store, actor) = (self.shared.store.clone(), myself.clone());
        let thread = move || {
            let _ = actor.cast(Message::Seen(store.list()));
        };
        match self.spawner.thread("list models".to_owned(), Box::new(thread)) {
            Ok(_) => self.looking = true,
            Err(error) => tracing::warn!(target: "shoal::catalog", %error, "the models folder could not be looked at"),
        }
    }

    fn seen(&mut self, seen: Result<Listing, StoreError>) {
        let listing = match seen {
            Ok(listing) => listing,
            Err(error) => {
                tracing::warn!(target: "shoal::catalog", %error, "the models folder could not be looked at");
                return;
            }
        };
        let models: Vec<ModelOnDisk> = listing.models.iter().map(LocalModel::on_disk).collect();
        if self.models.as_ref() == Some(&models) {
            return;
        }
        for entry in &listing.broken {
            tracing::warn!(target: "shoal::catalog", path = %entry.path.display(), reason = entry.reason, "broken entry in the models folder");
        }
        for sink in &self.subscribers {
            sink(&models);
        }
        self.models = Some(models);
    }
}
