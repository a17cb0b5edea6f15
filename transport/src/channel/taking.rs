//! What is done with a frame that was taken off a link.

use std::sync::Arc;

use super::Broken;
use super::machine::Arrival;
use super::shared::State;
use super::turn::{Side, Took};
use crate::frame::{FrameClass, FrameError, FrameHeader, HEADER_BYTES};
use crate::link::Link;
use crate::region::Slot;

/// A link, and the slot that its next frame is received into: the one that is handed out, if it is a message.
pub(super) struct Landing {
    pub(super) slot: Slot,
    pub(super) link: Arc<dyn Link>,
    /// Longest payload of a message, where this end receives any.
    message_bytes_max: Option<u32>,
    /// Longest payload of any frame that may come.
    payload_bytes_max: u32,
}

/// What was taken.
pub(super) enum Taken {
    /// A whole frame, so many bytes long.
    Frame(FrameHeader, usize),
    /// Nothing more will come.
    Broken(Broken),
}

impl Landing {
    pub(super) fn new(slot: Slot, link: Arc<dyn Link>, message_bytes_max: Option<u32>) -> Self {
        let payload_bytes_max = u32::try_from(slot.len().saturating_sub(HEADER_BYTES)).unwrap_or(u32::MAX);
        Self { slot, link, message_bytes_max, payload_bytes_max }
    }

    /// Looks at what was received. The check of a payload takes as long as reading it, so this holds nobody up: the channel's lock is
    /// not needed.
    pub(super) fn look(&self, bytes: usize) -> Taken {
        match self.checked(bytes) {
            Ok(header) => Taken::Frame(header, bytes),
            Err(broken) => Taken::Broken(broken),
        }
    }

    fn checked(&self, bytes: usize) -> Result<FrameHeader, Broken> {
        let message = &self.slot.as_slice()[..bytes];
        let header = FrameHeader::decode(message, self.payload_bytes_max)?;
        if header.class != FrameClass::Grant {
            let limit = self.message_bytes_max.ok_or(Broken::Direction)?;
            // A grant may be longer than the smallest slots.
            if header.length > limit {
                return Err(FrameError::TooLong { bytes: header.length, limit }.into());
            }
        }
        header.verify(&message[HEADER_BYTES..])?;
        Ok(header)
    }

    /// Puts what was taken where it belongs.
    pub(super) fn put(&mut self, taken: Taken, state: &mut State) -> Result<Took, Broken> {
        let (header, bytes) = match taken {
            Taken::Broken(broken) => return Err(broken),
            Taken::Frame(header, bytes) => (header, bytes),
        };
        if header.class == FrameClass::Grant {
            let sender = state.sender.as_mut().ok_or(Broken::Direction)?;
            sender.granted(&header, &self.slot.as_slice()[HEADER_BYTES..bytes])?;
            return Ok(Took::For(Side::Credited));
        }
        let inbox = state.inbox.as_mut().ok_or(Broken::Direction)?;
        match inbox.machine.arrive(&header)? {
            Arrival::Expected => {}
            Arrival::Fenced | Arrival::Repeated | Arrival::Answer => return Ok(Took::Nothing),
            Arrival::Ahead(fence) => {
                inbox.ahead = Some(fence);
                return Ok(Took::For(Side::Arrived));
            }
        }
        if inbox.machine.accept(&header) {
            // The machine lets in no more messages than there are slots, so one is free.
            if let Some(free) = inbox.free.pop() {
                inbox.ready.push_back((header, std::mem::replace(&mut self.slot, free)));
            }
        }
        Ok(Took::For(Side::Arrived))
    }
}
