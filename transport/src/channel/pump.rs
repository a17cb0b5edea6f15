//! The thread of a link: it takes frames from the link into slots.

use std::sync::Arc;
use std::time::Duration;

use super::Broken;
use super::machine::Arrival;
use super::shared::Shared;
use crate::frame::{FrameClass, FrameHeader, HEADER_BYTES};
use crate::link::{CloseReason, Link, RecvError};
use crate::region::Slot;

/// How long to wait for a frame while there is nothing else to do. What ends the link also ends the wait.
const IDLE: Duration = Duration::from_secs(3600);

/// How soon to try again to send a grant that a busy link did not take.
const GRANT_RETRY: Duration = Duration::from_millis(10);

pub(super) struct Pump {
    shared: Arc<Shared>,
    link: Arc<dyn Link>,
    landing: Slot,
    /// Longest payload of any frame that may come.
    payload_bytes_max: u32,
}

impl Pump {
    pub(super) fn new(shared: Arc<Shared>, link: Arc<dyn Link>, landing: Slot) -> Self {
        let payload_bytes_max = u32::try_from(landing.len().saturating_sub(HEADER_BYTES)).unwrap_or(u32::MAX);
        Self { shared, link, landing, payload_bytes_max }
    }

    pub(super) fn run(mut self) {
        let broken = self.take_frames();
        if !matches!(broken, Broken::Link(_)) {
            self.link.close(CloseReason::Misbehaved(broken.to_string()));
        }
        self.shared.break_with(broken);
        self.shared.return_landing(self.landing);
    }

    fn take_frames(&mut self) -> Broken {
        loop {
            // This thread must not wait for the sending half: the peer's may be waiting for this thread to receive.
            let granted = self.shared.send_due_grant(false);
            let wait = if granted { IDLE } else { GRANT_RETRY };
            let until = self.shared.effects.after(wait);
            match self.link.recv(self.landing.as_mut_slice(), until) {
                Ok(bytes) => {
                    if let Err(broken) = self.frame(bytes) {
                        return broken;
                    }
                }
                Err(RecvError::Deadline) => {}
                Err(RecvError::Closed(reason)) => return Broken::Link(reason),
            }
        }
    }

    fn frame(&mut self, bytes: usize) -> Result<(), Broken> {
        let message = &self.landing.as_slice()[..bytes];
        let header = FrameHeader::decode(message, self.payload_bytes_max)?;
        match header.class {
            FrameClass::Grant => self.grant(&header, bytes),
            FrameClass::Probe | FrameClass::Data => self.arrival(&header, bytes),
        }
    }

    fn grant(&self, header: &FrameHeader, bytes: usize) -> Result<(), Broken> {
        let payload = &self.landing.as_slice()[HEADER_BYTES..bytes];
        header.verify(payload)?;
        let mut state = self.shared.state();
        let sender = state.sender.as_mut().ok_or(Broken::Direction)?;
        sender.granted(header, payload)?;
        drop(state);
        self.shared.notify_credited();
        Ok(())
    }

    fn arrival(&mut self, header: &FrameHeader, bytes: usize) -> Result<(), Broken> {
        let mut state = self.shared.state();
        let inbox = state.inbox.as_mut().ok_or(Broken::Direction)?;
        let machine = &mut inbox.machine;
        if header.length > machine.slot_bytes() {
            // A grant may be longer than the smallest slots.
            let limit = machine.slot_bytes();
            return Err(crate::frame::FrameError::TooLong { bytes: header.length, limit }.into());
        }
        match machine.arrive(header)? {
            Arrival::Expected => {}
            Arrival::Fenced | Arrival::Repeated | Arrival::Answer => return Ok(()),
            Arrival::Ahead(fence) => {
                inbox.ahead = Some(fence);
                drop(state);
                self.shared.notify_arrived();
                return Ok(());
            }
        }
        drop(state);
        // The check takes as long as reading the payload, so it is done without holding anybody up.
        header.verify(&self.landing.as_slice()[HEADER_BYTES..bytes])?;
        let mut state = self.shared.state();
        let Some(inbox) = state.inbox.as_mut() else { return Ok(()) };
        if inbox.machine.accept(header) {
            // The machine lets in no more messages than there are slots, so one is free.
            if let Some(free) = inbox.free.pop() {
                inbox.ready.push_back((*header, std::mem::replace(&mut self.landing, free)));
            }
        }
        drop(state);
        self.shared.notify_arrived();
        Ok(())
    }
}
