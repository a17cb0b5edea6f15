//! Lent memory that the holder's adapter reaches by itself: `put` and `get` are WRITE and READ, without any thread of the owner.
//!
//! Only profile `rc` has this; `uc` keeps to Apple's contract, in which there is SEND and nothing else.
//!
//! | module | what |
//! |---|---|
//! | `words` | what holder and owner say to each other, byte for byte |
//! | `reach` | the holder's end |
//! | `room` | how much may be open at once |
//!
//! A window is a queue pair on each end, apart from the link's own. The holder makes its queue pair and asks over the link; the owner makes
//! another, in a protection domain of its own, registers exactly the lease's bytes there, and answers with address and key. So a window
//! that breaks, as it does whenever the owner's adapter refuses something, leaves the link as it was. The owner's queue pair never sends: it
//! stays in the state RTR, where it answers. The holder's grants nothing to its peer.
//!
//! # Why the fence holds
//!
//! * What can reach the memory: requests that come to the owner's queue pair of this window. Other queue pairs of the device, those of the
//!   same peer and those of others, are in other protection domains, and a key means nothing outside of its domain (IBTA vol. 1, 10.2.3),
//!   whoever guesses or copies it. Bounds and rights are the registration's, which covers what was lent and no byte more.
//! * Ending a window destroys the queue pair and then takes the registration back, and returns when the device has said yes to both. When a
//!   queue pair has been destroyed, the device handles nothing more that comes to its number (10.2.4.4); what comes later is dropped
//!   there. The order matters on devices made of software: soft-RoCE looks up the registration with the first packet of a long WRITE and
//!   keeps it to the last, and taking back a registration in use makes it wait and then give up; destroying the queue pair stops its
//!   responder, waits until it stands still, and drops what it kept. Then nobody is left who knows the registration.
//! * Where a device refuses either, the window counts as open: the lease's memory stays charged, and a later term goes on in a copy
//!   (`access`). In any case the pages belong to no other lease, before or after (`region::lent`), and are not given back while a
//!   device may know them.
//! * An adapter looks at no clock. The owner closes a window at the deadline (`access::watch`), and before it looks at the memory itself
//!   after that; so an owner that was stopped or suspended for a while, and closes late, has seen nothing that came late. The holder is
//!   told how long the lease lasts, counts from before it asked, and stops earlier.
//! * A window is for one term and one generation of writes; when a later one begins, the windows of earlier ones end before it is let in.
//!
//! # When a put is in the owner's memory
//!
//! An acknowledged WRITE has arrived at the owner's adapter, and the specification lets nobody rely on its bytes being in memory before a
//! later SEND or READ of the same queue pair has been handled (9.5, o9-20 and what follows): it may still be on its way over
//! the bus. So a put ends with a READ of its last byte. A responder handles requests in order and a READ after a WRITE reads what was
//! written (9.5, table on ordering rules); on PCI Express a read's completion pushes writes before it into memory. When the READ is
//! complete, all bytes are where the owner's processors see them, and a notice, which goes over another queue pair, is sent after that.
//!
//! # What a holder hears
//!
//! A queue pair that was destroyed answers nothing, so a holder would find out by repeating itself for half a second. Therefore the owner
//! tells it over the link which windows have ended (`wire`, kind 6); where the link is gone, too, its anchor says so. Whatever a window does not let through is put to the owner's thread,
//! which says why; denials are the same everywhere.

mod reach;
mod room;
mod words;

#[cfg(test)]
mod guest;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::device::{Ask, Device, Gid, Init, Pair, ReadyToReceive, ReliableReceive, VerbsError, access};
use super::link::VerbsLink;
use super::profile::Profile;
use crate::access::Rights;
use crate::env::Instant;
use crate::link::lock;
use crate::region::{LentPages, Writer};

pub(crate) use reach::{Asking, Reach};
use room::Room;
pub(in crate::provider::verbs) use room::Rooms;
pub(crate) use words::{ANSWER_BYTES, Answer, REQUEST_BYTES, Request};

/// READs that a holder may have under way; devices grant 16 and more.
const READS_MAX: u8 = 4;

/// The way of a link on its device: what another queue pair between the same ends is set up with.
#[derive(Debug)]
pub(in crate::provider::verbs) struct Route {
    pub(in crate::provider::verbs) device: Arc<dyn Device>,
    pub(in crate::provider::verbs) port: u8,
    pub(in crate::provider::verbs) gid_index: u8,
    pub(in crate::provider::verbs) mtu: u8,
    pub(in crate::provider::verbs) peer: Gid,
    pub(in crate::provider::verbs) rooms: Rooms,
}

impl Route {
    fn ready_to_receive(&self, peer_number: u32, receive_psn: u32) -> ReadyToReceive {
        ReadyToReceive {
            mtu: self.mtu,
            peer_number,
            receive_psn,
            peer: self.peer,
            gid_index: self.gid_index,
            hop_limit: 64,
            port: self.port,
            reliable: Some(ReliableReceive { min_rnr_timer: 12, reads_max: READS_MAX }),
        }
    }
}

/// An end of a link whose adapters can move bytes by themselves. What is done with it is between the ends of [`crate::remote`].
#[derive(Clone)]
pub struct OneSided(Arc<VerbsLink>);

impl OneSided {
    pub(in crate::provider::verbs) fn new(link: Arc<VerbsLink>) -> Self {
        Self(link)
    }

    /// Lets the peer's queue pair that asks reach the first `bytes` of `pages`. The peer is not told yet.
    ///
    /// # Errors
    /// [`Refused`]; nothing is left then.
    pub(crate) fn expose(&self, request: &Request, pages: &LentPages, bytes: u64, rights: Rights) -> Result<Exposed, Refused> {
        let route = self.0.route();
        let room = route.rooms.take(bytes).ok_or(Refused::NoRoom)?;
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let ask = Ask { profile: Profile::Rc, send_depth: 1, receive_depth: 1, completions: 2, inline_bytes: 0, alone: true };
        let mut pair = route.device.create(&ask)?;
        let may = |right: bool, bit| if right { bit } else { 0 };
        let access = may(rights.read, access::REMOTE_READ) | may(rights.write, access::REMOTE_WRITE);
        pair.init(&Init { port: route.port, access })?;
        let key = pair.expose(pages, bytes, access)?;
        pair.ready_to_receive(&route.ready_to_receive(request.number, request.psn))?;
        let answer = Answer {
            number: pair.number(),
            key,
            address: pages.start() as u64,
            bytes: bytes as u64,
            writable: rights.write,
            left: Duration::ZERO,
            window: self.0.number_window(),
        };
        Ok(Exposed { pair, room, answer, link: Arc::downgrade(&self.0) })
    }
}

impl fmt::Debug for OneSided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OneSided").field(&self.0).finish()
    }
}

/// Why there is no window.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("as much memory is open to adapters as may be")]
    NoRoom,
    #[error("{0}")]
    Device(String),
    #[error(transparent)]
    Memory(#[from] crate::region::RegionError),
    #[error("the owner's answer makes no sense: {0}")]
    Answer(&'static str),
    #[error(transparent)]
    System(#[from] std::io::Error),
}

impl From<VerbsError> for Refused {
    fn from(error: VerbsError) -> Self {
        Self::Device(error.to_string())
    }
}

/// Memory that a peer reaches and has not been told of.
pub(crate) struct Exposed {
    /// Dropped before the room is free.
    pair: Box<dyn Pair>,
    room: Room,
    answer: Answer,
    link: Weak<VerbsLink>,
}

impl Exposed {
    /// Goes on as a window for `writer` until `deadline`, which is so far ahead.
    pub(crate) fn keep(self, writer: Writer, deadline: Instant, left: Duration) -> (Handed, Answer, Closer) {
        let answer = Answer { left, ..self.answer };
        let inside = Inside { ending: false, pair: Some(self.pair), _room: Some(self.room), deadline };
        let open = Arc::new(Open { number: answer.window, link: self.link, inside: Mutex::new(inside) });
        (Handed { open: Arc::clone(&open), writer }, answer, Closer(open))
    }
}

struct Inside {
    /// It is to have ended, and has unless `pair` is there.
    ending: bool,
    /// None when the window has ended.
    pair: Option<Box<dyn Pair>>,
    _room: Option<Room>,
    deadline: Instant,
}

impl Inside {
    fn destroy(&mut self) {
        if self.pair.as_mut().is_some_and(|pair| pair.destroy()) {
            self.pair = None;
            self._room = None;
        }
    }
}

struct Open {
    number: u64,
    link: Weak<VerbsLink>,
    inside: Mutex<Inside>,
}

impl Open {
    /// When this returns, the peer reaches nothing any more, or [`Open::is_gone`] says that the device refused.
    fn end(&self) {
        {
            let mut inside = lock(&self.inside);
            inside.destroy();
            if std::mem::replace(&mut inside.ending, true) {
                return;
            }
        }
        if let Some(link) = self.link.upgrade() {
            link.tell_ended(self.number);
        }
    }

    fn is_gone(&self) -> bool {
        let mut inside = lock(&self.inside);
        // A device that refused is asked again.
        if inside.ending {
            inside.destroy();
        }
        inside.pair.is_none()
    }
}

/// A window, as the owner's table keeps it. Dropping it ends the window.
pub(crate) struct Handed {
    open: Arc<Open>,
    writer: Writer,
}

impl Handed {
    /// Term and generation that the holder acts under, through this window.
    pub(crate) fn writer(&self) -> Writer {
        self.writer
    }

    /// Ends the window. Afterwards the holder's adapter reaches nothing, unless the device refuses to let go; see [`Handed::is_gone`].
    pub(crate) fn end(&self) {
        self.open.end();
    }

    /// Whether it has ended and the device knows nothing of the memory any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.open.is_gone()
    }

    /// When it has to end.
    pub(crate) fn deadline(&self) -> Instant {
        lock(&self.open.inside).deadline
    }

    /// Moves that.
    pub(crate) fn set_deadline(&self, deadline: Instant) {
        lock(&self.open.inside).deadline = deadline;
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        self.end();
    }
}

/// With which the thread that serves the link ends its window when the holder wants another, or is gone. Dropping it does so.
pub(crate) struct Closer(Arc<Open>);

impl Closer {
    pub(crate) fn close(&self) {
        self.0.end();
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Closer").field(&self.0.number).finish()
    }
}
