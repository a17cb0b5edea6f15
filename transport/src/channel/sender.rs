//! The sending end of a channel, for the thread that has something to send.

use std::sync::Arc;

use super::machine::{Admission, Counters, RearmError, SenderMachine};
use super::shared::{Half, slots};
use super::{Broken, ChannelCloser, ChannelOptions};
use crate::env::Instant;
use crate::frame::{Fence, FrameHeader, HEADER_BYTES, payload_crc};
use crate::link::{self, Link, LinkHealth};
use crate::region::{RegionError, Slot};

/// Why a message was not sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The receiving end granted nothing, or the link took nothing, by the deadline. The message was not sent.
    #[error("the receiving end took nothing by the deadline")]
    Deadline,
    /// The message is longer than a slot.
    #[error("a payload of {bytes} bytes does not fit the {limit} bytes of this channel's slots; send fewer rows at a time")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// Longest payload.
        limit: u32,
    },
    /// The receiving end is armed with a newer term or plan epoch. The message was not sent.
    #[error("the receiving end is armed with {theirs:?}, this end with {armed:?}; arm this end again")]
    Ahead {
        /// This end's fence.
        armed: Fence,
        /// The newer one.
        theirs: Fence,
    },
    /// The channel is broken. A message on which the link broke is repeated once the channel is put onto another one.
    #[error(transparent)]
    Broken(#[from] Broken),
}

/// Why a channel was not put onto another link.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelinkError {
    /// The link's thread could not be started.
    #[error("cannot start a thread for a tensor channel: {0}")]
    Thread(std::io::Error),
    /// What was not acknowledged could not be repeated.
    #[error("cannot repeat what the receiving end has not acknowledged: {0}")]
    Repeat(#[from] SendError),
}

/// The sending end.
#[derive(Debug)]
pub struct Sender {
    half: Half,
    /// Messages that are not acknowledged, at their sequence number modulo the count.
    slots: Vec<Slot>,
    /// Lengths of the messages in them.
    lengths: Vec<usize>,
    /// The link that everything unacknowledged was sent on.
    link: Arc<dyn Link>,
}

/// The sending end's memory, allocated before anything is started.
pub(super) fn sender_slots(options: ChannelOptions) -> Result<Vec<Slot>, RegionError> {
    slots(usize::from(options.slots.max(1)), options.slot_bytes)
}

/// Pieces of a message that are handed to the link as they lie.
const PIECES_MAX: usize = 8;

/// Puts a message into the slot where it stays until it is acknowledged.
fn keep(slot: &mut Slot, header: &[u8; HEADER_BYTES], parts: &[&[u8]]) {
    let mut rest = slot.as_mut_slice();
    for part in std::iter::once(&header[..]).chain(parts.iter().copied()) {
        let (to, after) = rest.split_at_mut(part.len());
        to.copy_from_slice(part);
        rest = after;
    }
}

impl Sender {
    pub(super) fn new(half: Half, slots: Vec<Slot>) -> Self {
        let link = Arc::clone(&half.state().link);
        Self { lengths: vec![0; slots.len()], half, slots, link }
    }

    /// Sends one message: `parts` one after the other, behind a header with `kind`.
    ///
    /// Waits while the receiving end has no free slot. The parts are copied, so they are free when this returns.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn send(&mut self, kind: u8, parts: &[&[u8]], deadline: Instant) -> Result<(), SendError> {
        self.send_flagged(kind, 0, parts, deadline)
    }

    /// [`Sender::send`] with the header's `flags`, which the receiving end is handed as they are.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn send_flagged(&mut self, kind: u8, flags: u8, parts: &[&[u8]], deadline: Instant) -> Result<(), SendError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        let crc32c = payload_crc(parts);
        let header = self.admitted(bytes, deadline, |machine, length| machine.commit(kind, flags, length, crc32c))?;
        let place = self.place(header.sequence);
        let encoded = header.encode();
        let mut urged = false;
        let mut blocked = || {
            self.half.urge();
            urged = true;
        };
        // The bytes go out first and are kept afterwards, while the peer is at them.
        let mut pieces: [&[u8]; PIECES_MAX] = [&[]; PIECES_MAX];
        let sent = if parts.len() < PIECES_MAX {
            pieces[0] = &encoded;
            pieces[1..=parts.len()].copy_from_slice(parts);
            let sent = self.link.send_or_tell(&pieces[..=parts.len()], deadline, &mut blocked);
            keep(&mut self.slots[place], &encoded, parts);
            sent
        } else {
            keep(&mut self.slots[place], &encoded, parts);
            self.link.send_or_tell(&[&self.slots[place].as_slice()[..HEADER_BYTES + bytes]], deadline, &mut blocked)
        };
        self.lengths[place] = HEADER_BYTES + bytes;
        self.half.sent(urged);
        match sent {
            Ok(()) => Ok(()),
            Err(link::SendError::Closed(reason)) => Err(self.half.state().broken.clone().unwrap_or(Broken::Link(reason)).into()),
            Err(other) => {
                if let Some(machine) = &mut self.half.state().sender {
                    machine.abort();
                }
                Err(match other {
                    link::SendError::TooLong { limit, .. } => {
                        SendError::TooLong { bytes, limit: u32::try_from(limit.saturating_sub(HEADER_BYTES)).unwrap_or(u32::MAX) }
                    }
                    _ => SendError::Deadline,
                })
            }
        }
    }

    /// Waits until everything sent has arrived whole at the receiving end.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn flush(&mut self, deadline: Instant) -> Result<(), SendError> {
        self.catch_up(deadline)?;
        let mut state = self.half.state();
        let Some(machine) = &mut state.sender else { return Ok(()) };
        if machine.unacked().is_empty() {
            return Ok(());
        }
        let probe = machine.probe().encode();
        drop(state);
        self.ask(&probe, deadline)?;
        let mut state = self.half.state();
        loop {
            if state.sender.as_ref().is_none_or(|machine| machine.unacked().is_empty()) {
                return Ok(());
            }
            if let Some(broken) = &state.broken {
                return Err(broken.clone().into());
            }
            state = self.half.wait_credited(state, deadline).ok_or(SendError::Deadline)?;
        }
    }

    /// Arms this end with a newer fence. What was not acknowledged under the old one is forgotten.
    ///
    /// # Errors
    /// [`RearmError`] if the fence is not newer.
    pub fn rearm(&mut self, fence: Fence) -> Result<(), RearmError> {
        match &mut self.half.state().sender {
            Some(machine) => machine.rearm(fence),
            None => Ok(()),
        }
    }

    /// Puts the channel onto another link, whose other end does the same, and repeats what the receiving end lacks. The
    /// old link is closed first. Where both directions share the link, the other half moves along.
    ///
    /// # Errors
    /// [`RelinkError`].
    pub fn relink(&mut self, link: &Arc<dyn Link>, deadline: Instant) -> Result<(), RelinkError> {
        self.half.relink(link);
        Ok(self.catch_up(deadline)?)
    }

    /// The fence that this end is armed with.
    pub fn fence(&self) -> Fence {
        self.half.state().sender.as_ref().map(SenderMachine::fence).unwrap_or_default()
    }

    /// How many messages were taken under this fence, which is the number of the next one. After [`SendError::Broken`] it says whether the
    /// message was taken, and will be repeated on the next link, or has to be sent again.
    pub fn taken(&self) -> u64 {
        self.half.state().sender.as_ref().map_or(0, |machine| machine.unacked().end)
    }

    /// The number that the next message gets. One that has a number is kept, and repeated on other links.
    pub fn next_sequence(&self) -> u64 {
        self.half.state().sender.as_ref().map_or(0, |machine| machine.unacked().end)
    }

    /// How many messages are sent and not acknowledged.
    pub fn unacknowledged(&self) -> u64 {
        self.half.state().sender.as_ref().map_or(0, |machine| machine.unacked().end - machine.unacked().start)
    }

    /// What was counted at this end.
    pub fn counters(&self) -> Counters {
        self.half.state().sender.as_ref().map(SenderMachine::counters).unwrap_or_default()
    }

    /// What the link knows of itself.
    pub fn health(&self) -> LinkHealth {
        let link = Arc::clone(&self.half.state().link);
        link.health()
    }

    /// A handle with which another thread can end the channel's link.
    pub fn closer(&self) -> ChannelCloser {
        ChannelCloser::new(&self.half)
    }

    fn place(&self, sequence: u64) -> usize {
        // The count is at least 1 and fits u16.
        usize::try_from(sequence % self.slots.len().max(1) as u64).unwrap_or(0)
    }

    /// Waits until a message of this length may be sent, and takes its number.
    fn admitted(
        &mut self,
        bytes: usize,
        deadline: Instant,
        commit: impl FnOnce(&mut SenderMachine, u32) -> FrameHeader,
    ) -> Result<FrameHeader, SendError> {
        loop {
            let mut state = self.half.state();
            loop {
                if !Arc::ptr_eq(&state.link, &self.link) {
                    drop(state);
                    self.catch_up(deadline)?;
                    break;
                }
                if let Some(broken) = &state.broken {
                    return Err(broken.clone().into());
                }
                let Some(machine) = &mut state.sender else { return Err(Broken::Direction.into()) };
                match machine.admit(bytes) {
                    // Admission has compared the length with a u32.
                    Admission::Now => return Ok(commit(machine, u32::try_from(bytes).unwrap_or(u32::MAX))),
                    Admission::Wait => {}
                    Admission::Probe => {
                        let probe = machine.probe().encode();
                        drop(state);
                        self.ask(&probe, deadline)?;
                        state = self.half.state();
                        continue;
                    }
                    Admission::TooLong { limit } => return Err(SendError::TooLong { bytes, limit }),
                    Admission::Ahead(theirs) => return Err(SendError::Ahead { armed: machine.fence(), theirs }),
                }
                state = self.half.wait_credited(state, deadline).ok_or(SendError::Deadline)?;
            }
        }
    }

    /// After the link was replaced: hears how far the receiving end got and repeats the rest.
    fn catch_up(&mut self, deadline: Instant) -> Result<(), SendError> {
        let mut state = self.half.state();
        while !Arc::ptr_eq(&state.link, &self.link) {
            if let Some(broken) = &state.broken {
                return Err(broken.clone().into());
            }
            let Some(machine) = &state.sender else { return Err(Broken::Direction.into()) };
            if machine.is_relinking() {
                state = self.half.wait_credited(state, deadline).ok_or(SendError::Deadline)?;
                continue;
            }
            let unacked = machine.unacked();
            let link = Arc::clone(&state.link);
            drop(state);
            for sequence in unacked {
                let place = self.place(sequence);
                let message = &self.slots[place].as_slice()[..self.lengths[place]];
                match link.send(&[message], deadline) {
                    Ok(()) => {}
                    Err(link::SendError::Closed(reason)) => return Err(Broken::Link(reason).into()),
                    Err(_) => return Err(SendError::Deadline),
                }
            }
            self.link = link;
            state = self.half.state();
        }
        Ok(())
    }

    /// Sends a probe on the present link.
    fn ask(&self, probe: &[u8], deadline: Instant) -> Result<(), SendError> {
        self.link.send(&[probe], deadline).map_err(|error| match error {
            link::SendError::Closed(reason) => SendError::Broken(Broken::Link(reason)),
            _ => SendError::Deadline,
        })
    }
}
