//! How a window comes from the owner to the holder.
//!
//! ```text
//! holder                                                   owner
//!   over the link: a fresh name and a fresh secret       →
//!                                                        ←   connects to the name, which the kernel says is of the same user
//!                                                        ←   secret 32, bytes u64, now u64, writable u8, zero 15,
//!                                                            with the page and the memory
//! ```
//!
//! The link has authenticated both ends; the name is in the abstract namespace of sockets, where nobody can guess it, and the
//! secret shows the holder that it is the owner who came. The owner never waits: the holder listens before it asks.
//!
//! Nothing more is said on the connection. It lasts as long as the holder has the memory mapped, so its end, which a kernel sees
//! to when a process dies, says that the mapping is gone.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::page::Page;
use super::{Window, odd};
use crate::env::{Clock, Instant, Rng};
use crate::provider::shm::door::of_this_user;
use crate::region::{Lent, Writer};

/// What is handed over: the page and the memory.
const HANDED: usize = 2;
const NOTE_BYTES: usize = 64;

/// Where a window is to be handed over, as the holder asks for it. 48 bytes on the wire: name u128, secret.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Meeting {
    name: u128,
    secret: [u8; 32],
}

impl Meeting {
    pub(crate) const BYTES: usize = 48;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..16].copy_from_slice(&self.name.to_le_bytes());
        out[16..].copy_from_slice(&self.secret);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (name, secret) = bytes.split_first_chunk()?;
        Some(Self { name: u128::from_le_bytes(*name), secret: secret.try_into().ok()? })
    }

    fn path(&self) -> String {
        format!("shoal/window/{:032x}", self.name)
    }
}

/// What the owner says with the descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Note {
    bytes: u64,
    now: Instant,
    writable: bool,
}

impl Note {
    fn encode(&self, secret: &[u8; 32]) -> [u8; NOTE_BYTES] {
        let mut out = [0; NOTE_BYTES];
        out[..32].copy_from_slice(secret);
        out[32..40].copy_from_slice(&self.bytes.to_le_bytes());
        out[40..48].copy_from_slice(&self.now.as_nanos().to_le_bytes());
        out[48] = u8::from(self.writable);
        out
    }

    /// The note, if it comes from who knows the secret. Takes the same time wherever that is wrong.
    fn decode(note: &[u8; NOTE_BYTES], secret: &[u8; 32]) -> Option<Self> {
        let (theirs, rest) = note.split_first_chunk::<32>()?;
        let (bytes, rest) = rest.split_first_chunk()?;
        let (now, rest) = rest.split_first_chunk()?;
        let known = blake3::Hash::from_bytes(*theirs) == blake3::Hash::from_bytes(*secret);
        let writable = match rest {
            [writable @ (0 | 1), zeros @ ..] if zeros.iter().all(|zero| *zero == 0) => *writable == 1,
            _ => return None,
        };
        known.then(|| Self { bytes: u64::from_le_bytes(*bytes), now: Instant::from_nanos(u64::from_le_bytes(*now)), writable })
    }
}

/// A window that was handed over, as its owner keeps it. Dropping it ends the window.
pub(crate) struct Handed {
    page: Page,
    line: UnixStream,
    writer: Writer,
}

/// What is lent through a window, and how.
pub(crate) struct Terms {
    /// Length of the lease.
    pub(crate) bytes: u64,
    /// When it ends.
    pub(crate) deadline: Instant,
    /// Term and generation that the holder acts under, through this window.
    pub(crate) writer: Writer,
}

impl Handed {
    /// Hands a window onto `lent` to whoever listens at `meeting`. Never waits.
    ///
    /// # Errors
    /// If nobody listens there, somebody of another user does, or the system has nothing left.
    pub(crate) fn over(meeting: &Meeting, lent: &Lent, terms: &Terms, now: Instant) -> io::Result<Self> {
        let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&socket2::SockAddr::unix(format!("\0{}", meeting.path()))?)?;
        let line = UnixStream::from(OwnedFd::from(socket));
        if !of_this_user(&line) {
            return Err(odd("a process of another user listens there"));
        }
        let page = Page::new(terms.deadline)?;
        let note = Note { bytes: terms.bytes, now, writable: lent.writable() }.encode(&meeting.secret);
        let sent = lent.with_file(|memory| -> io::Result<usize> {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDED))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let handed = [page.as_fd(), memory.as_fd()];
            if !control.push(SendAncillaryMessage::ScmRights(&handed)) {
                return Err(ErrorKind::OutOfMemory.into());
            }
            // A fresh socket has room for it.
            Ok(sendmsg(&line, &[IoSlice::new(&note)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?)
        })?;
        if sent != NOTE_BYTES {
            return Err(ErrorKind::WriteZero.into());
        }
        Ok(Self { page, line, writer: terms.writer })
    }

    /// Term and generation that the holder acts under, through this window.
    pub(crate) fn writer(&self) -> Writer {
        self.writer
    }

    /// Ends the window: an honest holder uses it no more.
    pub(crate) fn end(&self) {
        self.page.end();
    }

    /// Moves its deadline.
    pub(crate) fn set_deadline(&self, deadline: Instant) {
        self.page.set_deadline(deadline);
    }

    /// Whether the holder's mapping is gone: it gave it up, or its process is dead.
    pub(crate) fn is_gone(&self) -> bool {
        // Whatever the holder may have said on it before.
        let mut line = [PollFd::new(&self.line, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut line, Some(&now)).is_ok_and(|_| line[0].revents().intersects(PollFlags::HUP | PollFlags::ERR))
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        self.end();
    }
}

/// A holder that listens for the window that it is about to ask for.
pub(crate) struct Waiting {
    listener: UnixListener,
    meeting: Meeting,
    since: Instant,
}

impl Waiting {
    /// Listens at a fresh name.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn new(rng: &dyn Rng, clock: &dyn Clock) -> io::Result<Self> {
        let mut bytes = [0; Meeting::BYTES];
        rng.fill("window", &mut bytes);
        let meeting = Meeting::decode(&bytes).ok_or(ErrorKind::InvalidData)?;
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(meeting.path())?)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, meeting, since: clock.now() })
    }

    /// What to ask the owner with.
    pub(crate) fn meeting(&self) -> &Meeting {
        &self.meeting
    }

    /// Takes the window that the owner says it has handed over: it is there, so nothing is waited for. `bytes` is the length of
    /// the lease as the holder knows it.
    ///
    /// # Errors
    /// If there is none, or it is not what it should be, or the owner has another clock.
    pub(crate) fn take(self, bytes: u64, clock: &dyn Clock) -> io::Result<Window> {
        let Received { line, note, page, memory } = self.receive()?;
        // The page's deadline means something only if both read the same clock, which nothing but the machine's gives them.
        if note.now < self.since || note.now > clock.now() {
            return Err(odd("the owner of the memory has another clock"));
        }
        if note.bytes < bytes {
            return Err(odd("the owner's lease is shorter than this node's"));
        }
        Window::open(line, page, memory, note.bytes, note.writable)
    }

    /// What the owner handed over, for tests that play a holder who wants more.
    #[cfg(test)]
    pub(crate) fn take_raw(self) -> io::Result<(UnixStream, OwnedFd, OwnedFd)> {
        self.receive().map(|received| (received.line, received.page, received.memory))
    }

    fn receive(&self) -> io::Result<Received> {
        loop {
            // Whoever else found the name came without the secret.
            let (line, _) = self.listener.accept()?;
            if let Some(received) = self.hear(line)? {
                return Ok(received);
            }
        }
    }

    fn hear(&self, line: UnixStream) -> io::Result<Option<Received>> {
        if !of_this_user(&line) {
            return Ok(None);
        }
        let mut note = [0; NOTE_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(HANDED))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let Ok(received) = recvmsg(&line, &mut [IoSliceMut::new(&mut note)], &mut control, flags) else { return Ok(None) };
        let mut handed = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                handed.extend(fds);
            }
        }
        let note = Some(note).filter(|_| received.bytes == NOTE_BYTES).and_then(|note| Note::decode(&note, &self.meeting.secret));
        let Some(note) = note else { return Ok(None) };
        let [page, memory]: [OwnedFd; HANDED] = handed.try_into().map_err(|_| odd("a window came without its memory"))?;
        Ok(Some(Received { line, note, page, memory }))
    }
}

/// What came from the owner.
struct Received {
    line: UnixStream,
    note: Note,
    page: OwnedFd,
    memory: OwnedFd,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::env::SystemRng;
    use crate::testing::{effects, soon};

    fn terms(deadline: Instant) -> Terms {
        Terms { bytes: 10_000, deadline, writer: Writer::OWNER }
    }

    #[test]
    fn the_wire_is_pinned() {
        let meeting = Meeting { name: 0x0102, secret: [7; 32] };
        let bytes = meeting.encode();
        assert_eq!((&bytes[..4], &bytes[16..]), (&[2, 1, 0, 0][..], &[7; 32][..]));
        let note = Note { bytes: 0x0304, now: Instant::from_nanos(0x0506), writable: true };
        let mut golden = [0; NOTE_BYTES];
        golden[..32].fill(9);
        for (at, value) in [(32, 4), (33, 3), (40, 6), (41, 5), (48, 1)] {
            golden[at] = value;
        }
        assert_eq!(note.encode(&[9; 32]), golden);
        assert_eq!(Note::decode(&golden, &[9; 32]), Some(note));
        assert_eq!(Note::decode(&golden, &[8; 32]), None);
    }

    #[test]
    fn what_the_owner_hands_over_is_the_memory_and_its_end_is_seen() {
        let effects = effects();
        let clock = &*effects.clock;
        let lent = Lent::new(10_000, true).unwrap();
        assert!(lent.write(9000, b"here", Writer::OWNER).is_ok());
        let waiting = Waiting::new(&SystemRng, clock).unwrap();
        let meeting = *waiting.meeting();
        assert!(Meeting::decode(&meeting.encode()) == Some(meeting));
        // Somebody else of this user who found the name.
        let _stranger = UnixStream::connect_addr(&SocketAddr::from_abstract_name(meeting.path()).unwrap()).unwrap();
        let handed = Handed::over(&meeting, &lent, &terms(soon(&effects)), clock.now()).unwrap();
        let window = waiting.take(10_000, clock).unwrap();
        let mut got = [0; 4];
        assert_eq!(window.get(9000, &mut got, clock, soon(&effects)), 4);
        assert_eq!(&got, b"here");
        assert_eq!(window.put(5, b"there", clock, soon(&effects)), 5);
        let mut there = [0; 5];
        assert!(lent.read(5, &mut there) && &there == b"there");
        assert!(!handed.is_gone());
        std::io::Write::write_all(&mut window.line(), &[0; 1000]).unwrap();
        assert!(!handed.is_gone());
        drop(window);
        assert!(handed.is_gone());
    }

    #[test]
    fn another_clock_a_short_lease_and_no_listener_are_said() {
        let effects = effects();
        let clock = &*effects.clock;
        let lent = Lent::new(10_000, true).unwrap();
        for now in [clock.now() - Duration::from_secs(5), clock.now() + Duration::from_secs(5)] {
            let waiting = Waiting::new(&SystemRng, clock).unwrap();
            let handed = Handed::over(waiting.meeting(), &lent, &terms(soon(&effects)), now).unwrap();
            assert!(waiting.take(1, clock).err().unwrap().to_string().contains("another clock"));
            assert!(handed.is_gone());
        }
        let waiting = Waiting::new(&SystemRng, clock).unwrap();
        let _handed = Handed::over(waiting.meeting(), &lent, &terms(soon(&effects)), clock.now()).unwrap();
        assert!(waiting.take(10_001, clock).err().unwrap().to_string().contains("shorter"));
        assert!(Handed::over(&Meeting { name: 5, secret: [0; 32] }, &lent, &terms(soon(&effects)), clock.now()).is_err());
    }

    proptest! {
        #[test]
        fn notes_of_any_bytes_are_read_or_refused(bytes in prop::array::uniform32(any::<u8>()), zero in any::<bool>()) {
            let mut note = [0; NOTE_BYTES];
            note[32..].copy_from_slice(&bytes);
            if zero {
                note[48] %= 3;
                note[49..].fill(0);
            }
            if let Some(read) = Note::decode(&note, &[0; 32]) {
                prop_assert_eq!(read.encode(&[0; 32]), note);
            }
        }
    }
}
