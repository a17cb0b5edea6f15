//! The catalogue: which models there are, which are on disk, and how they get there.
//!
//! [`Catalog`] is the handle of a node's catalogue actor. Models are named as [`Reference`] says, live in a folder
//! that all nodes of a user share ([`Store`]), and come from the hub or from a package index.
//!
//! What is fetched is checked: by the SHA-256 in the catalogue's table for a model that it knows, by the one that the
//! hub or the index promises for any other, and by reading the file's header.

mod actor;
mod cancel;
mod check;
mod digest;
mod fetch;
mod known;
mod pull;
mod reference;
mod store;

#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ractor::{Actor, ActorRef};
use tokio::sync::oneshot;

pub use cancel::{Cancel, CancelGuard};
pub use check::ModelCheck;
pub use digest::{Sha256, Sha256Error};
pub use fetch::{
    FetchError, HUB_DEFAULT, HubSettings, INDEX_DEFAULT, IndexSettings, Phase, Progress, ProgressSink, RetryPolicy, Sources, Space,
    SystemSpace,
};
pub use known::{HubFile, KnownModel, Source, WheelPart, builtin};
pub use reference::{HubReference, Reference, ReferenceError};
pub(crate) use store::InUse;
pub use store::{BrokenEntry, Listing, LocalModel, Store, StoreError};

use crate::card::ModelOnDisk;
use crate::env::{Clock, Http, ProxyRules, Rng, Spawner, SystemHttp, TlsRoots};
use actor::{Arguments, CatalogActor, Message};
use pull::Shared;

/// How often the folder is looked at for what other processes changed.
const REFRESH: Duration = Duration::from_secs(5);

/// Is told of the models on disk whenever they change. It must not block.
pub type ModelsSink = Box<dyn Fn(&[ModelOnDisk]) + Send + Sync>;

/// What a catalogue works with.
#[derive(Debug, Clone)]
pub struct CatalogSettings {
    /// The models folder.
    pub root: PathBuf,
    /// The user's home folder, for `~`.
    pub home: Option<PathBuf>,
    /// The models that are known by name, the default first.
    pub known: Vec<KnownModel>,
    /// Where models come from.
    pub sources: Sources,
    /// How patiently.
    pub retry: RetryPolicy,
    /// How often to look for changes that other processes make to the folder; never if none.
    pub refresh: Option<Duration>,
    /// What a file must pass to count as a model.
    pub check: ModelCheck,
    /// Who tells how much disk space is free.
    pub space: Arc<dyn Space>,
}

impl CatalogSettings {
    /// Follows the variables and configuration files named at [`HubSettings::from_variables`],
    /// [`IndexSettings::from_variables`] and [`Store::default_root`].
    ///
    /// # Errors
    /// If there is no place for models.
    pub fn from_variables(variable: &dyn Fn(&str) -> Option<String>, home: Option<&Path>) -> Result<Self, StoreError> {
        Ok(Self {
            root: Store::default_root(variable, home)?,
            home: home.map(Path::to_owned),
            known: builtin(),
            sources: Sources { hub: HubSettings::from_variables(variable, home), index: IndexSettings::from_variables(variable, home) },
            retry: RetryPolicy::default(),
            refresh: Some(REFRESH),
            check: ModelCheck::default(),
            space: Arc::new(SystemSpace),
        })
    }

    /// The same, with the variables of the process and its user's home folder.
    ///
    /// # Errors
    /// If there is no place for models.
    #[expect(clippy::disallowed_methods, reason = "where the process's settings are read")]
    pub fn from_process() -> Result<Self, StoreError> {
        let folders = directories::BaseDirs::new();
        Self::from_variables(&|name| std::env::var(name).ok(), folders.as_ref().map(directories::BaseDirs::home_dir))
    }

    /// HTTP that follows the proxies and certificates of the same variables, and pip's `cert` setting.
    pub fn http(&self, variable: &dyn Fn(&str) -> Option<String>) -> SystemHttp {
        let mut roots = TlsRoots::from_variables(variable);
        if let Some(bundle) = self.sources.index.certificates() {
            roots.trust(bundle.to_owned());
        }
        SystemHttp::new(ProxyRules::from_variables(variable), &roots)
    }
}

/// The effects that a catalogue has besides its folder.
#[derive(Debug, Clone)]
pub struct CatalogEffects {
    /// The network.
    pub http: Arc<dyn Http>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Chance.
    pub rng: Arc<dyn Rng>,
    /// Tasks and threads.
    pub spawner: Arc<dyn Spawner>,
}

/// Why the catalogue could not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogError {
    /// The text names no model.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// The models folder.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Fetching.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The model is not on this machine.
    #[error("{name} is not on this machine; fetch it with `shoal pull {name}`")]
    NotHere {
        /// The model.
        name: String,
    },
    /// The operating system gives no thread.
    #[error("the operating system starts no thread ({reason}); close other programs and try again")]
    Thread {
        /// Its words.
        reason: String,
    },
    /// The catalogue, and probably its node, has stopped.
    #[error("the catalogue has stopped")]
    Stopped,
    /// A bug.
    #[error("{what} failed for a reason that should not exist; please report it")]
    Internal {
        /// What failed.
        what: &'static str,
    },
}

/// A node's catalogue. Cheap to clone.
#[derive(Clone)]
pub struct Catalog {
    shared: Shared,
    spawner: Arc<dyn Spawner>,
    actor: ActorRef<Message>,
    next_waiter: Arc<AtomicU64>,
}

impl Catalog {
    /// Starts the actor.
    ///
    /// # Errors
    /// If the models folder cannot be made.
    pub async fn start(settings: CatalogSettings, effects: CatalogEffects) -> Result<Self, CatalogError> {
        let CatalogEffects { http, clock, rng, spawner } = effects;
        let root = settings.root.clone();
        let store = blocking(&*spawner, move || Store::open(&root)).await??;
        let refresh = settings.refresh;
        let shared = Shared { settings: Arc::new(settings), store, http, rng, clock: Arc::clone(&clock) };
        let arguments = Arguments { shared: shared.clone(), spawner: Arc::clone(&spawner) };
        let (actor, _) = Actor::spawn(None, CatalogActor, arguments).await.map_err(|_| CatalogError::Internal { what: "the start" })?;
        if let Some(interval) = refresh {
            let actor = actor.clone();
            let look = async move {
                loop {
                    clock.sleep_until(clock.now() + interval).await;
                    if actor.cast(Message::Look).is_err() {
                        return;
                    }
                }
            };
            spawner.task("catalog refresh", Box::pin(look));
        }
        Ok(Self { shared, spawner, actor, next_waiter: Arc::default() })
    }

    /// The models that are known by name, the default first, whether they are on disk or not.
    pub fn known(&self) -> &[KnownModel] {
        &self.shared.settings.known
    }

    /// The models folder.
    pub fn root(&self) -> &Path {
        self.shared.store.root()
    }

    /// Reads what a user wrote for a model, without looking whether it is there.
    ///
    /// # Errors
    /// [`CatalogError::Reference`], with near matches.
    pub fn parse(&self, model: &str) -> Result<Reference, CatalogError> {
        self.shared.parse(model)
    }

    /// What the models folder holds.
    ///
    /// # Errors
    /// If it cannot be read.
    pub async fn list(&self) -> Result<Listing, CatalogError> {
        let store = self.shared.store.clone();
        Ok(blocking(&*self.spawner, move || store.list()).await??)
    }

    /// The model in the models folder with this hash. Reads the folder: a few small files.
    pub fn with_hash(&self, sha256: &str) -> Option<LocalModel> {
        let listing = self.shared.store.list().ok()?;
        listing.models.into_iter().find(|model| model.sha256 == sha256)
    }

    /// The file of a model that is on this machine. A file outside the models folder is hashed when it is first asked
    /// for, which takes a while for a large one.
    ///
    /// # Errors
    /// [`CatalogError::NotHere`] if it has yet to be fetched, others if it cannot be used.
    pub async fn resolve(&self, model: &str) -> Result<LocalModel, CatalogError> {
        let reference = self.parse(model)?;
        let shared = self.shared.clone();
        blocking(&*self.spawner, move || shared.resolve(&reference)).await?
    }

    /// Fetches a model unless it is on this machine. Who asks for a model that is already on its way shares that
    /// download; it goes on until the last one who wants it cancels or drops this future. What had come by then is
    /// kept.
    ///
    /// # Errors
    /// [`CatalogError::Fetch`] with what each source said, or [`FetchError::Cancelled`] therein.
    pub async fn pull(&self, model: &str, progress: ProgressSink, cancel: &Cancel) -> Result<LocalModel, CatalogError> {
        let reference = self.parse(model)?;
        if cancel.is_cancelled() {
            return Err(FetchError::Cancelled.into());
        }
        let waiter = self.next_waiter.fetch_add(1, Ordering::Relaxed);
        let (reply, answer) = oneshot::channel();
        let message = Message::Pull { reference, waiter, progress, reply };
        self.actor.cast(message).map_err(|_| CatalogError::Stopped)?;
        // Whether this future is dropped or the switch is turned on, the actor hears of it after the message above.
        let _leave = Leave { actor: self.actor.clone(), waiter };
        let actor = self.actor.clone();
        let _guard = cancel.on_cancel(move || drop(actor.cast(Message::Leave { waiter })));
        answer.await.map_err(|_| CatalogError::Stopped)?
    }

    /// Removes a model from the models folder, and what an interrupted fetch of it left there. `in_use` says whether
    /// an instance needs it.
    ///
    /// # Errors
    /// If it is in use, is not there, or lies outside the models folder.
    pub async fn remove(&self, model: &str, in_use: impl Fn(&LocalModel) -> bool + Send + 'static) -> Result<(), CatalogError> {
        let reference = self.parse(model)?;
        let shared = self.shared.clone();
        let removed = blocking(&*self.spawner, move || {
            let name = match &reference {
                Reference::File(path) => {
                    let reason = "it lies outside the models folder, and only what was pulled is removed".to_owned();
                    return Err(CatalogError::Store(StoreError::Disk { doing: "remove", path: path.clone(), reason }));
                }
                // The name on disk says which file of the repository it is.
                Reference::Hub(_) => shared.resolve(&reference).map_or_else(|_| reference.to_string(), |model| model.name),
                _ => reference.to_string(),
            };
            Ok(shared.store.remove(&name, &in_use)?)
        });
        let removed = removed.await?;
        let _ = self.actor.cast(Message::Look);
        removed
    }

    /// Calls `sink` with the models on disk: as soon as they are known, and whenever they change, whoever changes
    /// them.
    pub fn subscribe(&self, sink: ModelsSink) {
        let _ = self.actor.cast(Message::Subscribe(sink));
    }

    /// Stops the actor. Downloads end at the next piece that comes; what has come is kept.
    pub async fn stop(&self) {
        let _ = self.actor.stop_and_wait(None, None).await;
    }
}

impl fmt::Debug for Catalog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Catalog").field("root", &self.root()).finish_non_exhaustive()
    }
}

struct Leave {
    actor: ActorRef<Message>,
    waiter: u64,
}

impl Drop for Leave {
    fn drop(&mut self) {
        let _ = self.actor.cast(Message::Leave { waiter: self.waiter });
    }
}

/// Runs `body` on a thread.
async fn blocking<T: Send + 'static>(spawner: &dyn Spawner, body: impl FnOnce() -> T + Send + 'static) -> Result<T, CatalogError> {
    let (reply, answer) = oneshot::channel();
    let thread = move || drop(reply.send(body()));
    spawner.thread("catalog".to_owned(), Box::new(thread)).map_err(|error| CatalogError::Thread { reason: error.to_string() })?;
    answer.await.map_err(|_| CatalogError::Internal { what: "an operation of the catalogue" })
}
