//! The protocol of a channel, without I/O, clock or memory of its own.
//!
//! The sending end numbers data frames from 0 in each fence and sends only what the receiving end has granted. The
//! receiving end takes frames strictly in order, and grants as its user gives slots back. Both compare every frame with the
//! fence that they are armed with: an older one is dropped and counted, a newer one is reported and waits for
//! [`SenderMachine::rearm`] or [`ReceiverMachine::rearm`].
//!
//! After a link was replaced, the receiving end says how far it got ([`Grant::acked`]) and the sending end repeats the
//! rest; that is why it keeps what is not acknowledged.

use std::cmp::Ordering;
use std::ops::Range;

use super::grant::{GRANT_BYTES, Grant};
use crate::frame::{Fence, FrameClass, FrameHeader, payload_crc};

/// The peer did what no correct peer does; the link is of no use any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// A data frame came ahead of one that is missing.
    #[error("frame {found} came where {expected} was next: the stream has a hole")]
    Gap {
        /// What was next.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// A data frame came that was not granted.
    #[error("frame {found} came, only those before {limit} were granted")]
    Ungranted {
        /// What came.
        found: u64,
        /// The grant's limit.
        limit: u64,
    },
    /// A grant acknowledges what was never sent, or takes back what was granted.
    #[error("a grant makes no sense: acknowledged {acked}, limit {limit}, while {sent} were sent and {limit_before} granted")]
    Grant {
        /// The grant's acknowledgement.
        acked: u64,
        /// The grant's limit.
        limit: u64,
        /// Messages sent so far.
        sent: u64,
        /// The limit before.
        limit_before: u64,
    },
    /// A grant whose payload is none.
    #[error("a grant of {bytes} bytes cannot be read")]
    GrantMalformed {
        /// Its length.
        bytes: usize,
    },
}

/// Why a channel cannot be armed with a fence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a channel armed with {armed:?} cannot be armed with {wanted:?}: only a newer term or plan epoch of the same instance replaces it")]
pub struct RearmError {
    /// What it is armed with.
    pub armed: Fence,
    /// What was asked for.
    pub wanted: Fence,
}

/// How often things happened that were dealt with, for people who look for trouble.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Frames of an older fence, or of another instance, that were dropped.
    pub fenced: u64,
    /// Frames of a newer fence, which wait for the channel to be armed again.
    pub ahead: u64,
    /// Data frames that had arrived before; they come when a link is replaced.
    pub repeated: u64,
}

/// Whether a frame's fence lets it through.
enum Passage {
    Now,
    Old,
    New,
}

fn passage(armed: &Fence, frame: &Fence) -> Passage {
    match frame.compare(armed) {
        Some(Ordering::Equal) => Passage::Now,
        Some(Ordering::Greater) => Passage::New,
        Some(Ordering::Less) | None => Passage::Old,
    }
}

fn check_rearm(armed: Fence, wanted: Fence) -> Result<(), RearmError> {
    if wanted.supersedes(&armed) { Ok(()) } else { Err(RearmError { armed, wanted }) }
}

/// What a sending end may do with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Send it now.
    Now,
    /// Wait for a grant: the receiving end has no free slot, or has not been armed yet.
    Wait,
    /// Send [`SenderMachine::probe`], then wait for the grant that answers it: this end's own slots are all
    /// unacknowledged, and the receiving end, which has more, sees no reason to grant.
    Probe,
    /// Never: it is longer than a slot.
    TooLong {
        /// Longest payload, in bytes.
        limit: u32,
    },
    /// Not in this fence: the receiving end is armed with a newer one.
    Ahead(Fence),
}

/// What a grant brought to a sending end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granted {
    /// More may be sent, or slots are free again; or nothing new.
    Taken,
    /// It belonged to an older fence and was dropped.
    Fenced,
    /// It belongs to a newer fence and is kept for when this end is armed with it.
    Ahead(Fence),
}

/// The sending end.
#[derive(Debug, Clone)]
pub struct SenderMachine {
    fence: Fence,
    /// Own slots: what may be unacknowledged at a time.
    window: u64,
    slot_bytes: u32,
    next: u64,
    acked: u64,
    limit: u64,
    /// Payload limit of the receiving end, known once it has granted anything.
    peer_slot_bytes: Option<u32>,
    /// The newest grant of a newer fence.
    ahead: Option<(Fence, Grant)>,
    /// Frames from here to `next` went to a link that is gone, and are to be repeated once the receiver has said how
    /// far it got.
    relinking: bool,
    /// A probe is under way.
    probing: bool,
    counters: Counters,
}

impl SenderMachine {
    /// A sending end that keeps at most `window` unacknowledged messages of at most `slot_bytes` each.
    pub fn new(fence: Fence, window: u16, slot_bytes: u32) -> Self {
        Self {
            fence,
            window: u64::from(window.max(1)),
            slot_bytes,
            next: 0,
            acked: 0,
            limit: 0,
            peer_slot_bytes: None,
            ahead: None,
            relinking: false,
            probing: false,
            counters: Counters::default(),
        }
    }

    /// Whether a message of this length may be sent now.
    pub fn admit(&self, payload_bytes: usize) -> Admission {
        if let Some((fence, _)) = self.ahead {
            return Admission::Ahead(fence);
        }
        let limit = self.peer_slot_bytes.map_or(self.slot_bytes, |theirs| theirs.min(self.slot_bytes));
        if u32::try_from(payload_bytes).map_or(true, |bytes| bytes > limit) {
            return Admission::TooLong { limit };
        }
        if self.relinking || self.next >= self.limit {
            return Admission::Wait;
        }
        match (self.next - self.acked < self.window, self.probing) {
            (true, _) => Admission::Now,
            (false, false) => Admission::Probe,
            (false, true) => Admission::Wait,
        }
    }

    /// Takes the next sequence number for an admitted message and gives its header.
    pub fn commit(&mut self, kind: u8, flags: u8, length: u32, crc32c: u32) -> FrameHeader {
        let header = FrameHeader { class: FrameClass::Data, kind, flags, length, sequence: self.next, fence: self.fence, crc32c };
        self.next += 1;
        header
    }

    /// Takes the last commit back: nothing of the frame reached the link.
    pub fn abort(&mut self) {
        if self.next > self.acked {
            self.next -= 1;
        }
    }

    /// A grant arrived.
    ///
    /// # Errors
    /// [`Violation`] if no correct receiving end would have sent it.
    pub fn granted(&mut self, header: &FrameHeader, payload: &[u8]) -> Result<Granted, Violation> {
        let grant = Grant::decode(payload).ok_or(Violation::GrantMalformed { bytes: payload.len() })?;
        match passage(&self.fence, &header.fence) {
            Passage::Old => {
                self.counters.fenced += 1;
                Ok(Granted::Fenced)
            }
            Passage::New => {
                self.counters.ahead += 1;
                let newest = self.ahead.is_none_or(|(fence, _)| !fence.supersedes(&header.fence));
                if newest {
                    self.ahead = Some((header.fence, grant));
                }
                Ok(Granted::Ahead(header.fence))
            }
            Passage::Now => {
                self.take(grant)?;
                Ok(Granted::Taken)
            }
        }
    }

    fn take(&mut self, grant: Grant) -> Result<(), Violation> {
        let Grant { acked, limit, slot_bytes } = grant;
        if acked > self.next || acked < self.acked || limit < self.limit {
            return Err(Violation::Grant { acked, limit, sent: self.next, limit_before: self.limit });
        }
        self.acked = acked;
        self.limit = limit;
        self.peer_slot_bytes = Some(slot_bytes);
        self.relinking = false;
        self.probing = false;
        Ok(())
    }

    /// Replaces the fence. Numbering starts again and nothing of the old fence is repeated.
    ///
    /// # Errors
    /// [`RearmError`] if the fence is not newer.
    pub fn rearm(&mut self, fence: Fence) -> Result<(), RearmError> {
        check_rearm(self.fence, fence)?;
        self.fence = fence;
        self.next = 0;
        self.acked = 0;
        self.limit = 0;
        self.relinking = false;
        self.probing = false;
        if let Some((ahead, grant)) = self.ahead {
            if ahead == fence {
                self.ahead = None;
                self.limit = grant.limit;
                self.peer_slot_bytes = Some(grant.slot_bytes);
            } else if !ahead.supersedes(&fence) {
                self.ahead = None;
            }
        }
        Ok(())
    }

    /// The link was replaced: nothing is sent until the receiving end has said how far it got.
    pub fn relink(&mut self) {
        self.relinking = true;
        self.probing = false;
    }

    /// Whether the answer to [`SenderMachine::relink`] is still to come.
    pub fn is_relinking(&self) -> bool {
        self.relinking
    }

    /// The sequence numbers that were sent and not acknowledged. Their slots must be kept.
    pub fn unacked(&self) -> Range<u64> {
        self.acked..self.next
    }

    /// Asks the receiving end to say how far it is.
    pub fn probe(&mut self) -> FrameHeader {
        self.probing = true;
        control(FrameClass::Probe, self.next, self.fence, &[])
    }

    /// The fence that this end is armed with.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// What was counted.
    pub fn counters(&self) -> Counters {
        self.counters
    }
}

/// What a receiving end does with a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Check the payload, then [`ReceiverMachine::accept`] it.
    Expected,
    /// Drop it: it is of an older fence or another instance.
    Fenced,
    /// Drop it: it has arrived before.
    Repeated,
    /// Drop it and tell the user: the sender is armed with a newer fence.
    Ahead(Fence),
    /// A probe: send a grant.
    Answer,
}

/// The receiving end.
#[derive(Debug, Clone)]
pub struct ReceiverMachine {
    fence: Fence,
    slots: u64,
    slot_bytes: u32,
    /// Data frames that have arrived.
    arrived: u64,
    /// Data frames whose slots the user has given back.
    released: u64,
    /// The limit that was last sent.
    granted: u64,
    /// What the last grant acknowledged.
    acked: u64,
    due: bool,
    counters: Counters,
}

impl ReceiverMachine {
    /// A receiving end with `slots` slots of `slot_bytes` each. Its first grant is due at once.
    pub fn new(fence: Fence, slots: u16, slot_bytes: u32) -> Self {
        Self {
            fence,
            slots: u64::from(slots.max(1)),
            slot_bytes,
            arrived: 0,
            released: 0,
            granted: 0,
            acked: 0,
            due: true,
            counters: Counters::default(),
        }
    }

    /// What to do with a data frame or probe that has come. Counts it, unless it is [`Arrival::Expected`].
    ///
    /// # Errors
    /// [`Violation`] if no correct sending end would have sent it.
    pub fn arrive(&mut self, header: &FrameHeader) -> Result<Arrival, Violation> {
        match passage(&self.fence, &header.fence) {
            Passage::Old => {
                self.counters.fenced += 1;
                return Ok(Arrival::Fenced);
            }
            Passage::New => {
                self.counters.ahead += 1;
                return Ok(Arrival::Ahead(header.fence));
            }
            Passage::Now => {}
        }
        if header.class == FrameClass::Probe {
            self.due = true;
            return Ok(Arrival::Answer);
        }
        let (expected, found) = (self.arrived, header.sequence);
        let limit = self.released + self.slots;
        match found.cmp(&expected) {
            Ordering::Less => {
                self.counters.repeated += 1;
                Ok(Arrival::Repeated)
            }
            Ordering::Greater => Err(Violation::Gap { expected, found }),
            Ordering::Equal if found >= limit => Err(Violation::Ungranted { found, limit }),
            Ordering::Equal => Ok(Arrival::Expected),
        }
    }

    /// The expected frame's payload is whole. `false` if the frame is no longer expected, because the fence changed since.
    pub fn accept(&mut self, header: &FrameHeader) -> bool {
        let expected = header.fence == self.fence && header.sequence == self.arrived;
        if expected {
            self.arrived += 1;
        } else {
            self.counters.fenced += 1;
        }
        expected
    }

    /// The user has given back the slot of the oldest message that it holds. A grant becomes due when half of the slots
    /// can be granted again: one grant for several messages, and the sender never runs dry.
    pub fn release(&mut self) {
        if self.released < self.arrived {
            self.released += 1;
        }
        if (self.released + self.slots).saturating_sub(self.granted) * 2 >= self.slots {
            self.due = true;
        }
    }

    /// Whether a grant should be sent.
    pub fn grant_due(&self) -> bool {
        self.due
    }

    /// Whether a grant would tell the sender anything new.
    pub fn grant_useful(&self) -> bool {
        self.due || self.acked < self.arrived || self.granted < self.released + self.slots
    }

    /// The present grant, to be sent at once.
    pub fn grant(&mut self) -> (FrameHeader, [u8; GRANT_BYTES]) {
        let grant = Grant { acked: self.arrived, limit: self.released + self.slots, slot_bytes: self.slot_bytes };
        self.granted = grant.limit;
        self.acked = grant.acked;
        self.due = false;
        let payload = grant.encode();
        (control(FrameClass::Grant, 0, self.fence, &payload), payload)
    }

    /// The last grant did not reach the link.
    pub fn grant_failed(&mut self) {
        self.due = true;
    }

    /// Replaces the fence: what has arrived under the old one and was not received is to be dropped, and a grant is due.
    ///
    /// # Errors
    /// [`RearmError`] if the fence is not newer.
    pub fn rearm(&mut self, fence: Fence) -> Result<(), RearmError> {
        check_rearm(self.fence, fence)?;
        self.counters.fenced += self.arrived - self.released;
        self.fence = fence;
        self.arrived = 0;
        self.released = 0;
        self.granted = 0;
        self.acked = 0;
        self.due = true;
        Ok(())
    }

    /// The link was replaced: the sender must hear how far this end got.
    pub fn relink(&mut self) {
        self.due = true;
    }

    /// Messages that have arrived and whose slots are not free again.
    pub fn held(&self) -> u64 {
        self.arrived - self.released
    }

    /// The fence that this end is armed with.
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// Longest payload of a slot, in bytes.
    pub fn slot_bytes(&self) -> u32 {
        self.slot_bytes
    }

    /// What was counted.
    pub fn counters(&self) -> Counters {
        self.counters
    }
}

fn control(class: FrameClass, sequence: u64, fence: Fence, payload: &[u8]) -> FrameHeader {
    FrameHeader { class, kind: 0, flags: 0, length: payload.len() as u32, sequence, fence, crc32c: payload_crc(&[payload]) }
}
