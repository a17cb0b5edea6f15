//! The holder's thread: it has the link to a lease's memory, and makes it again when it fails.

use std::fmt;
use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use shoal_transport::frame::{Fence, TermTag};
use shoal_transport::remote::{RegionLease, RemoteRegion, TransferError};
use tokio::sync::oneshot;

use super::server::channel_options;
use super::service::{RegionMemory, RegionOffer, RegionRefusal, RegionRequest};
use crate::lease::{Grant, LeaseKeeper};
use crate::service::{CallError, Services};
use crate::stage::links::{LinkFailure, TensorLinks};

/// Longest message on a link, in bytes.
const SLOT_BYTES: u32 = 1024 * 1024;
/// How long the owner may take to answer, and how long one transfer may take.
const OFFER_MAX: Duration = Duration::from_secs(5);
const TRANSFER_MAX: Duration = Duration::from_secs(60);
/// Links that one transfer is tried on.
const TRIES: usize = 3;
/// How often a thread that has nothing to do looks whether the lease still holds.
const IDLE: Duration = Duration::from_secs(1);

/// Why leased memory was not read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// The lease has ended, for its holder.
    #[error("the lease has ended: {why}; lease memory again")]
    Ended {
        /// Why, as far as its holder knows.
        why: String,
    },
    /// The owner could not be asked.
    #[error("the owner of the memory cannot be asked: {0}")]
    Call(#[from] CallError),
    /// The owner refused.
    #[error("the owner of the memory refused: {0}")]
    Refused(#[from] RegionRefusal),
    /// There was no link to it.
    #[error(transparent)]
    Link(#[from] LinkFailure),
    /// The link did not open.
    #[error("the link to the memory did not open: {0}")]
    Open(String),
    /// The transfer failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// No thread could be had, or it is gone.
    #[error("no thread for leased memory: {0}")]
    Thread(String),
}

enum Work {
    Put { offset: u64, bytes: Vec<u8> },
    Get { offset: u64, bytes: usize },
}

struct Job {
    work: Work,
    done: oneshot::Sender<Result<Vec<u8>, RegionError>>,
}

/// Reads and writes the memory of a lease. Its thread starts with the first use, and ends when it is dropped or the lease ends.
pub struct RegionClient {
    services: Services,
    links: TensorLinks,
    keeper: LeaseKeeper,
    grant: Grant,
    jobs: Mutex<Option<mpsc::Sender<Job>>>,
}

impl RegionClient {
    /// For the memory of `grant`, which `keeper` renews.
    pub fn new(services: Services, links: TensorLinks, keeper: LeaseKeeper, grant: Grant) -> Self {
        Self { services, links, keeper, grant, jobs: Mutex::default() }
    }

    /// Writes `bytes` at `offset`, in bytes from the start of the lease. When it returns, they are in the owner's memory.
    ///
    /// # Errors
    /// [`RegionError`]. Some of the bytes may have been written.
    pub async fn put(&self, offset: u64, bytes: Vec<u8>) -> Result<(), RegionError> {
        self.run(Work::Put { offset, bytes }).await.map(drop)
    }

    /// Reads so many bytes from `offset` on. Memory that nobody has written is zero.
    ///
    /// # Errors
    /// [`RegionError`].
    pub async fn get(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, RegionError> {
        self.run(Work::Get { offset, bytes }).await
    }

    async fn run(&self, work: Work) -> Result<Vec<u8>, RegionError> {
        let (done, answer) = oneshot::channel();
        self.hand_over(Job { work, done })?;
        answer.await.unwrap_or_else(|_| Err(RegionError::Thread("it ended".to_owned())))
    }

    /// Hands a job to the thread, which is started if there is none.
    fn hand_over(&self, job: Job) -> Result<(), RegionError> {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let job = match jobs.as_ref() {
            Some(jobs) => match jobs.send(job) {
                Ok(()) => return Ok(()),
                // It has ended with the lease, and a new one will say so.
                Err(mpsc::SendError(job)) => job,
            },
            None => job,
        };
        let (send, receive) = mpsc::channel();
        let mover = Mover {
            services: self.services.clone(),
            links: self.links.clone(),
            keeper: self.keeper.clone(),
            grant: self.grant.clone(),
            region: None,
            generation: 0,
        };
        let body = Box::new(move || mover.run(&receive));
        let started = self.links.effects().spawner.thread("shoal-region-user".to_owned(), body);
        drop(started.map_err(|error| RegionError::Thread(error.to_string()))?);
        // It was started a moment ago, so it hears this.
        drop(send.send(job));
        *jobs = Some(send);
        Ok(())
    }
}

impl fmt::Debug for RegionClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionClient").field("lease", &self.grant.lease).finish_non_exhaustive()
    }
}

/// The thread.
struct Mover {
    services: Services,
    links: TensorLinks,
    keeper: LeaseKeeper,
    grant: Grant,
    region: Option<RemoteRegion>,
    /// Of writes: higher on every link.
    generation: u64,
}

impl Mover {
    fn run(mut self, jobs: &mpsc::Receiver<Job>) {
        loop {
            match jobs.recv_timeout(IDLE) {
                Ok(Job { work, done }) => {
                    // Who does not wait any more has no use for the answer.
                    drop(done.send(self.perform(&work)));
                }
                Err(mpsc::RecvTimeoutError::Timeout) if self.keeper.may_use(self.grant.lease) => {}
                Err(_) => return,
            }
        }
    }

    fn perform(&mut self, work: &Work) -> Result<Vec<u8>, RegionError> {
        let mut tries = 0;
        loop {
            tries += 1;
            if !self.keeper.may_use(self.grant.lease) {
                let why = self.keeper.why_lost(self.grant.lease).map(|why| why.to_string());
                let why = why.unwrap_or_else(|| "its owner was not reached to renew it".to_owned());
                return Err(RegionError::Ended { why });
            }
            let deadline = self.links.effects().after(TRANSFER_MAX);
            let region = match self.region.as_mut() {
                Some(region) => region,
                None => {
                    let region = self.open()?;
                    self.region.insert(region)
                }
            };
            let moved = match work {
                Work::Put { offset, bytes } => region.put(*offset, bytes, deadline).map(|()| Vec::new()),
                Work::Get { offset, bytes } => within(*offset, *bytes, self.grant.bytes).and_then(|()| {
                    let mut into = vec![0; *bytes];
                    region.get(*offset, &mut into, deadline).map(|()| into)
                }),
            };
            match moved {
                // Both may be done again: a put writes the same bytes once more.
                Err(TransferError::Send(_) | TransferError::Recv(_)) if tries < TRIES => self.region = None,
                Err(error) => {
                    if !matches!(error, TransferError::Bounds { .. } | TransferError::Denied(_)) {
                        self.region = None;
                    }
                    return Err(error.into());
                }
                Ok(moved) => return Ok(moved),
            }
        }
    }

    /// Makes a link to the memory.
    fn open(&mut self) -> Result<RemoteRegion, RegionError> {
        let owner = self.grant.owner;
        let request = RegionRequest { right: (&self.grant).into(), slot_bytes: SLOT_BYTES };
        let remote = self.services.remote::<RegionMemory>(owner);
        let effects = self.links.effects();
        let answer = remote.call_and_wait(&*effects.spawner, "leased memory", request, OFFER_MAX);
        let offer = answer.ok_or_else(|| RegionError::Thread("the node stops".to_owned()))??;
        let RegionOffer { endpoints, ticket, handle } = offer?;
        let link = self.links.dial_link(owner, &endpoints, &ticket, SLOT_BYTES)?;
        self.generation += 1;
        let lease = RegionLease { handle, bytes: self.grant.bytes, term: TermTag::default(), generation: self.generation };
        RemoteRegion::open(link, Fence::default(), channel_options(SLOT_BYTES), lease, effects)
            .map_err(|error| RegionError::Open(error.to_string()))
    }
}

/// Before as much is allocated.
fn within(offset: u64, bytes: usize, lease_bytes: u64) -> Result<(), TransferError> {
    let end = u64::try_from(bytes).ok().and_then(|bytes| offset.checked_add(bytes));
    match end.filter(|end| *end <= lease_bytes) {
        Some(_) => Ok(()),
        None => Err(TransferError::Bounds { offset, bytes, lease_bytes }),
    }
}
