//! A queue pair with its books and slots: takes what has come, sends what is due. Whoever holds the link's lock turns it.

use std::collections::VecDeque;

use super::accounts::{Accounts, Fault, Purpose, SENDS_KEPT_BACK};
use super::device::{Done, Pair, VerbsError, Way};
use super::profile::Profile;
use super::wire::{HEADER_BYTES, Header, Kind};
use crate::link::CloseReason;
use crate::region::Slot;

/// The payload of a keep-alive, and of the word that windows have ended.
const STAMP_BYTES: usize = 8;

/// Who may be asleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Sender = 0,
    Receiver = 1,
}

/// A piece of a message that came.
#[derive(Debug)]
pub(super) struct Chunk {
    pub(super) header: Header,
    pub(super) slot: Slot,
}

impl Chunk {
    /// What it carries.
    pub(super) fn payload(&self) -> &[u8] {
        // The header was found to fit what came.
        let end = (HEADER_BYTES + self.header.length as usize).min(self.slot.len());
        &self.slot.as_slice()[HEADER_BYTES..end]
    }
}

/// What has changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Moved {
    /// A piece of a message is there.
    pub(super) arrived: bool,
    /// There may be room to send.
    pub(super) room: bool,
    /// Anything came from the peer.
    pub(super) heard: bool,
    /// A keep-alive came back: this is when it was sent.
    pub(super) echoed: Option<u64>,
    /// Windows onto the peer's memory have ended, up to this one.
    pub(super) ended: Option<u64>,
}

/// See the module.
pub(super) struct Pump {
    pair: Box<dyn Pair>,
    books: Accounts,
    profile: Profile,
    chunk_bytes: usize,
    /// What the checks of chunks begin with: ours, the peer's.
    salts: [u32; 2],
    /// Slots to send from.
    free: Vec<Slot>,
    arrived: VecDeque<Chunk>,
    done: Vec<Done>,
    /// A keep-alive of the peer's that is to be echoed.
    echo: Option<u64>,
    /// Windows onto this end's memory have ended, up to this one, and the peer is to be told.
    ended: Option<u64>,
    /// Whether each of [`Who`] sleeps or is about to.
    pub(super) asleep: [bool; 2],
}

/// What a pump is made of.
pub(super) struct Parts {
    /// Ready to send, with all receives posted.
    pub(super) pair: Box<dyn Pair>,
    pub(super) books: Accounts,
    pub(super) profile: Profile,
    pub(super) chunk_bytes: usize,
    pub(super) salts: [u32; 2],
    /// Slots to send from.
    pub(super) free: Vec<Slot>,
}

fn broke(error: &VerbsError) -> CloseReason {
    CloseReason::Broken(error.to_string())
}

/// The check of a chunk's payload. A reliable connection has its own.
pub(super) fn payload_check(profile: Profile, salt: u32, payload: &[u8]) -> u32 {
    if profile.is_reliable() { 0 } else { crc32c::crc32c_append(salt, payload) }
}

impl Pump {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { pair, books, profile, chunk_bytes, salts, free } = parts;
        let (arrived, done) = (VecDeque::new(), Vec::new());
        Self { pair, books, profile, chunk_bytes, salts, free, arrived, done, echo: None, ended: None, asleep: [false; 2] }
    }

    pub(super) fn books(&self) -> &Accounts {
        &self.books
    }

    /// Takes what is over and, if it may still speak, says what is due.
    pub(super) fn turn(&mut self, speaking: bool) -> Result<Moved, CloseReason> {
        let mut moved = Moved::default();
        let mut done = std::mem::take(&mut self.done);
        let polled = self.pair.poll(&mut done).map_err(|error| broke(&error));
        let mut taken = Ok(());
        for done in done.drain(..) {
            // All are taken, so that nothing that arrived is lost by a failure beside it.
            taken = taken.and(self.take(done, speaking, &mut moved));
        }
        self.done = done;
        polled.and(taken)?;
        if speaking {
            self.speak()?;
        }
        Ok(moved)
    }

    fn take(&mut self, done: Done, speaking: bool, moved: &mut Moved) -> Result<(), CloseReason> {
        let Done { way, slot, bytes, failed } = done;
        if let Some(status) = failed {
            // Once the link has ended, its queue pair is expected to lose its peer.
            let text = format!("the device gave a chunk back with status {status}");
            return if speaking { Err(CloseReason::Broken(text)) } else { Ok(()) };
        }
        if way == Way::Sent {
            self.books.send_completed();
            self.free.push(slot);
            moved.room = true;
            return Ok(());
        }
        let header = Header::decode(slot.as_slice(), self.salts[1], bytes)
            .map_err(|what| CloseReason::Broken(format!("chunk {} was damaged on its way: {what}", self.books.received())))?;
        self.books.heard(header.sequence, header.posted).map_err(|fault| match fault {
            Fault::Gap { .. } => CloseReason::Broken(fault.to_string()),
            other => CloseReason::Misbehaved(other.to_string()),
        })?;
        moved.heard = true;
        moved.room = true;
        let chunk = Chunk { header, slot };
        match header.kind {
            Kind::First | Kind::More => {
                moved.arrived = true;
                self.arrived.push_back(chunk);
                return Ok(());
            }
            Kind::Note => {}
            Kind::Ping | Kind::Pong | Kind::Ended => {
                let payload = chunk.payload();
                let stamp = <[u8; STAMP_BYTES]>::try_from(payload).ok().map(u64::from_le_bytes).filter(|_| {
                    // What a device could have changed is checked before it is believed.
                    payload_check(self.profile, self.salts[1], payload) == header.payload_check
                });
                let Some(stamp) = stamp else { return Err(CloseReason::Broken("a short word was damaged on its way".to_owned())) };
                match header.kind {
                    Kind::Ping => self.echo = Some(stamp),
                    Kind::Ended => moved.ended = moved.ended.max(Some(stamp)),
                    _ => moved.echoed = Some(stamp),
                }
            }
        }
        if speaking { self.give_back(chunk.slot) } else { Ok(()) }
    }

    /// Sends what is due apart from messages.
    pub(super) fn speak(&mut self) -> Result<(), CloseReason> {
        if let Some(stamp) = self.echo
            && self.beat(Kind::Pong, stamp)?
        {
            self.echo = None;
        }
        if let Some(number) = self.ended
            && self.beat(Kind::Ended, number)?
        {
            self.ended = None;
        }
        if self.books.note_due()
            && self.books.sendable(Purpose::Note) > 0
            && let Some(slot) = self.free.pop()
        {
            self.send(slot, Kind::Note, 0, 0, payload_check(self.profile, self.salts[0], &[]))?;
        }
        Ok(())
    }

    /// Tells the peer, as soon as that is possible, that windows up to this one have ended.
    pub(super) fn tell_ended(&mut self, number: u64) {
        self.ended = self.ended.max(Some(number));
    }

    /// Sends a keep-alive, its echo, or as short a word, if that is possible now.
    pub(super) fn beat(&mut self, kind: Kind, stamp: u64) -> Result<bool, CloseReason> {
        if self.books.sendable(Purpose::Beat) == 0 {
            return Ok(false);
        }
        let Some(mut slot) = self.free.pop() else { return Ok(false) };
        let payload = stamp.to_le_bytes();
        slot.as_mut_slice()[HEADER_BYTES..HEADER_BYTES + STAMP_BYTES].copy_from_slice(&payload);
        self.send(slot, kind, STAMP_BYTES, 0, payload_check(self.profile, self.salts[0], &payload))?;
        Ok(true)
    }

    /// A slot to send data from, once `chunks` of them may be sent without a wait.
    pub(super) fn slot_for_data(&mut self, chunks: u64) -> Option<Slot> {
        let enough = self.books.sendable(Purpose::Data) >= chunks && self.free.len() > SENDS_KEPT_BACK as usize;
        enough.then(|| self.free.pop()).flatten()
    }

    /// A slot that was not used after all.
    pub(super) fn put_back(&mut self, slot: Slot) {
        self.free.push(slot);
    }

    /// Sends a chunk whose payload is in the slot behind the place of the header.
    pub(super) fn send(&mut self, mut slot: Slot, kind: Kind, length: usize, message: u32, payload_check: u32) -> Result<(), CloseReason> {
        let (sequence, posted) = self.books.sending();
        let header = Header { kind, sequence, posted, length: length as u32, message, payload_check };
        slot.as_mut_slice()[..HEADER_BYTES].copy_from_slice(&header.encode(self.salts[0]));
        let bytes = self.profile.sent_bytes(HEADER_BYTES + length, self.chunk_bytes);
        self.pair.post_send(slot, bytes).map_err(|error| broke(&error))
    }

    /// The next piece of a message.
    pub(super) fn next(&mut self) -> Option<Chunk> {
        self.arrived.pop_front()
    }

    /// Posts a slot for receiving again.
    pub(super) fn give_back(&mut self, slot: Slot) -> Result<(), CloseReason> {
        self.books.receive_posted();
        self.pair.post_receive(slot).map_err(|error| broke(&error))
    }

    /// Asks for an event; look once more afterwards.
    pub(super) fn arm(&mut self) -> Result<(), CloseReason> {
        self.pair.take_events();
        self.pair.arm().map_err(|error| broke(&error))
    }
}
