//! Sums, and gathering, over the vectors of several ranks: what tensor-parallel layers need of a network.
//!
//! A [`Group`] is one rank's end: a channel to and from every other rank that it is connected to. Every rank calls the same collective
//! in the same order, each from the thread that owns its group. The work is laid out by [`schedule`], which is pure, and the way is chosen
//! by [`choose`] from measured links; both give the same bits on every rank.
//!
//! A rank that fails, or waits past the deadline, closes all its channels, and every rank that waits for it does the same: no rank
//! outlives the group by more than the time a closed link takes to be seen. A group that has failed stays failed.

pub mod choose;
mod element;
pub mod schedule;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

pub use element::Element;
pub use schedule::{IN_FLIGHT, Schedule};

use crate::channel::{Receiver, RecvError, SendError, Sender};
use crate::env::Instant;
use schedule::{Step, What};

/// Most ranks of a group.
pub const RANKS_MAX: usize = 16;

/// The kind of a collective's messages in a channel's headers.
const KIND: u8 = 0x43;

/// Why a collective gave no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A rank could not be sent to.
    #[error("rank {rank} cannot be sent to: {source}")]
    Send {
        /// Which rank.
        rank: usize,
        /// Why.
        source: SendError,
    },
    /// A rank sent nothing.
    #[error("nothing comes from rank {rank}: {source}")]
    Recv {
        /// Which rank.
        rank: usize,
        /// Why.
        source: RecvError,
    },
    /// A rank takes part in something else, or has another vector.
    #[error(
        "rank {rank} sent {found} bytes of message {kind} where {expected} bytes of a collective were due: it is in another step, or has a vector of another length"
    )]
    Mismatch {
        /// Which rank.
        rank: usize,
        /// The kind of what came.
        kind: u8,
        /// How long it is.
        found: usize,
        /// How long it should be.
        expected: usize,
    },
    /// A schedule needs a channel that the group does not have.
    #[error("there is no channel to rank {rank}, which this schedule needs")]
    NotConnected {
        /// Which rank.
        rank: usize,
    },
    /// The group failed before.
    #[error("the group has failed before: {0}")]
    Failed(Box<CollectiveError>),
}

/// Why ranks make no group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// Too few, or too many.
    #[error("a group has 1 to {RANKS_MAX} ranks, not {0}")]
    Ranks(usize),
    /// A rank that the group does not have, or has a channel to itself.
    #[error("rank {rank} of {ranks} cannot be: ranks count from 0, and none has a channel to itself")]
    Rank {
        /// The rank.
        rank: usize,
        /// How many there are.
        ranks: usize,
    },
    /// Slots that hold no element.
    #[error("messages of {0} bytes hold no element; give the channels longer slots")]
    Slot(usize),
}

/// One rank's end of a group.
pub struct Group {
    rank: usize,
    peers: Vec<Option<(Sender, Receiver)>>,
    message_bytes: usize,
    /// Bytes on their way out.
    outgoing: Vec<u8>,
    sums: Vec<f32>,
    failed: Option<CollectiveError>,
}

impl Group {
    /// The end of `rank`, with a channel both ways to each rank that `peers` gives one for; the place of `rank` itself is empty. Every
    /// channel has slots of `message_bytes` or more, and at least [`IN_FLIGHT`] of them.
    ///
    /// # Errors
    /// [`GroupError`].
    pub fn new(rank: usize, peers: Vec<Option<(Sender, Receiver)>>, message_bytes: usize) -> Result<Self, GroupError> {
        let ranks = peers.len();
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(GroupError::Ranks(ranks));
        }
        if rank >= ranks || peers[rank].is_some() {
            return Err(GroupError::Rank { rank, ranks });
        }
        if message_bytes < size_of::<f32>() {
            return Err(GroupError::Slot(message_bytes));
        }
        Ok(Self { rank, peers, message_bytes, outgoing: Vec::new(), sums: Vec::new(), failed: None })
    }

    /// Which rank this is.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many there are.
    pub fn ranks(&self) -> usize {
        self.peers.len()
    }

    /// Sums the ranks' vectors, which have the same length, into each. Sums are formed over `f32` in the order of the ranks, and rounded
    /// once if elements are shorter.
    ///
    /// # Errors
    /// [`CollectiveError`]; the vector is in an undefined state then.
    pub fn all_reduce<E: Element>(&mut self, vector: &mut [E], schedule: Schedule, deadline: Instant) -> Result<(), CollectiveError> {
        let steps = schedule::all_reduce(schedule, self.rank, self.ranks(), vector.len(), self.most::<f32>());
        self.run(&steps, vector, 0..vector.len(), deadline)
    }

    /// Leaves each rank the sum of its own part of the vectors, which is
    /// [`schedule::part`]`(0..length, rank, ranks)`; the rest of the vector is undefined afterwards.
    ///
    /// # Errors
    /// [`CollectiveError`].
    pub fn reduce_scatter<E: Element>(&mut self, vector: &mut [E], deadline: Instant) -> Result<Range<usize>, CollectiveError> {
        let mine = schedule::part(&(0..vector.len()), self.rank, self.ranks());
        let steps = schedule::reduce_scatter(self.rank, self.ranks(), vector.len(), self.most::<f32>());
        self.run(&steps, vector, mine.clone(), deadline)?;
        Ok(mine)
    }

    /// Gives every rank the parts of all: `part` says which elements of the vector are whose.
    ///
    /// # Errors
    /// [`CollectiveError`].
    pub fn all_gather<E: Element>(
        &mut self,
        vector: &mut [E],
        part: impl Fn(usize) -> Range<usize>,
        deadline: Instant,
    ) -> Result<(), CollectiveError> {
        let steps = schedule::all_gather(self.rank, self.ranks(), part, self.most::<f32>());
        self.run(&steps, vector, 0..vector.len(), deadline)
    }

    /// Gives every rank the vector of `root`.
    ///
    /// # Errors
    /// [`CollectiveError`].
    pub fn broadcast<E: Element>(&mut self, vector: &mut [E], root: usize, deadline: Instant) -> Result<(), CollectiveError> {
        if root >= self.ranks() {
            return Err(CollectiveError::NotConnected { rank: root });
        }
        let steps = schedule::broadcast(self.rank, self.ranks(), root, vector.len(), self.most::<f32>());
        self.run(&steps, vector, 0..vector.len(), deadline)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// [`CollectiveError`].
    pub fn barrier(&mut self, schedule: Schedule, deadline: Instant) -> Result<(), CollectiveError> {
        self.all_reduce::<f32>(&mut [], schedule, deadline)
    }

    /// Ends the group for every rank.
    pub fn abort(&self) {
        for (sender, _) in self.peers.iter().flatten() {
            sender.closer().close();
        }
    }

    /// Elements that a message holds.
    fn most<E>(&self) -> usize {
        self.message_bytes / size_of::<E>()
    }

    fn run<E: Element>(
        &mut self,
        steps: &[Step],
        vector: &mut [E],
        result: Range<usize>,
        deadline: Instant,
    ) -> Result<(), CollectiveError> {
        if let Some(failed) = &self.failed {
            return Err(CollectiveError::Failed(Box::new(failed.clone())));
        }
        let mut sums = std::mem::take(&mut self.sums);
        sums.clear();
        sums.resize(vector.len(), 0.0);
        let done = steps.iter().try_for_each(|step| self.step(step, vector, &mut sums, deadline));
        if done.is_ok() {
            vector[result.clone()].iter_mut().zip(&sums[result]).for_each(|(element, sum)| *element = E::from_f32(*sum));
        }
        self.sums = sums;
        if let Err(error) = &done {
            self.failed = Some(error.clone());
            self.abort();
        }
        done
    }

    fn step<E: Element>(&mut self, step: &Step, own: &[E], sums: &mut [f32], deadline: Instant) -> Result<(), CollectiveError> {
        match step {
            Step::Send { to, what, range } => {
                self.outgoing.clear();
                match what {
                    What::Own => E::encode(&own[range.clone()], &mut self.outgoing),
                    What::Partial => f32::encode(&sums[range.clone()], &mut self.outgoing),
                    What::Total => E::encode_sums(&sums[range.clone()], &mut self.outgoing),
                }
                let Some(Some((sender, _))) = self.peers.get_mut(*to) else { return Err(CollectiveError::NotConnected { rank: *to }) };
                sender.send(KIND, &[&self.outgoing], deadline).map_err(|source| CollectiveError::Send { rank: *to, source })
            }
            Step::BeginOwn(range) => {
                sums[range.clone()].iter_mut().zip(&own[range.clone()]).for_each(|(sum, element)| *sum = element.to_f32());
                Ok(())
            }
            Step::AddOwn(range) => {
                sums[range.clone()].iter_mut().zip(&own[range.clone()]).for_each(|(sum, element)| *sum += element.to_f32());
                Ok(())
            }
            Step::Take { from, what: What::Partial, range } => {
                self.receive::<f32>(*from, &mut sums[range.clone()], deadline, |sum, value| *sum = value)
            }
            Step::Take { from, range, .. } => self.receive::<E>(*from, &mut sums[range.clone()], deadline, |sum, value| *sum = value),
            Step::Add { from, range } => self.receive::<E>(*from, &mut sums[range.clone()], deadline, |sum, value| *sum += value),
        }
    }

    fn receive<E: Element>(
        &mut self,
        from: usize,
        sums: &mut [f32],
        deadline: Instant,
        put: impl Fn(&mut f32, f32),
    ) -> Result<(), CollectiveError> {
        let Some(Some((_, receiver))) = self.peers.get_mut(from) else { return Err(CollectiveError::NotConnected { rank: from }) };
        let received = receiver.recv(deadline).map_err(|source| CollectiveError::Recv { rank: from, source })?;
        let (kind, payload) = (received.kind(), received.payload());
        let expected = size_of_val(sums) / size_of::<f32>() * size_of::<E>();
        if kind != KIND || payload.len() != expected {
            return Err(CollectiveError::Mismatch { rank: from, kind, found: payload.len(), expected });
        }
        sums.iter_mut().zip(E::decode(payload)).for_each(|(sum, value)| put(sum, value));
        receiver.give_back();
        Ok(())
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks())
            .field("failed", &self.failed)
            .finish_non_exhaustive()
    }
}
