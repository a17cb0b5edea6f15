//! Waiting for the other process: bells that it rings, and the socket that says when it is gone.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// An event counter: rung by one end, waited on by the other.
pub(super) struct Bell(OwnedFd);

/// What ended a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Woken {
    /// The bell, or the time is up.
    Look,
    /// The other end is gone.
    Gone,
    /// The other end spoke where it has nothing to say.
    Spoke,
}

impl Bell {
    /// A silent one.
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// One that the peer handed over.
    pub(super) fn handed_over(fd: OwnedFd) -> std::io::Result<Self> {
        // Whatever it is: ringing it must not block.
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// Wakes whoever waits, now or next.
    pub(super) fn ring(&self) {
        // It can only fail if it has been rung 2⁶⁴ times and not been heard.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Waits for the bell or for the end of `anchor`, at most for `wait`.
    pub(super) fn wait(&self, anchor: &UnixStream, wait: Duration) -> std::io::Result<Woken> {
        let timeout = Timespec { tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX), tv_nsec: wait.subsec_nanos().into() };
        let mut fds = [PollFd::new(&self.0, PollFlags::IN), PollFd::new(anchor, PollFlags::IN | PollFlags::RDHUP)];
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Woken::Look),
            Err(error) => return Err(error.into()),
        }
        let [bell, end] = [fds[0].revents(), fds[1].revents()];
        if !bell.is_empty() {
            let mut count = [0; 8];
            let _ = rustix::io::read(&self.0, &mut count);
        }
        if end.is_empty() {
            return Ok(Woken::Look);
        }
        let mut anchor = anchor;
        match anchor.read(&mut [0; 8]) {
            Ok(0) => Ok(Woken::Gone),
            Ok(_) => Ok(Woken::Spoke),
            Err(error) if matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) => Ok(Woken::Look),
            Err(_) => Ok(Woken::Gone),
        }
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bell_that_was_rung_before_is_heard_once() {
        let (anchor, far) = UnixStream::pair().unwrap();
        anchor.set_nonblocking(true).unwrap();
        let bell = Bell::new().unwrap();
        let rung = Bell::handed_over(bell.as_fd().try_clone_to_owned().unwrap()).unwrap();
        rung.ring();
        rung.ring();
        let long = Duration::from_secs(60);
        assert_eq!(bell.wait(&anchor, long).unwrap(), Woken::Look);
        assert_eq!(bell.wait(&anchor, Duration::from_millis(1)).unwrap(), Woken::Look);
        std::io::Write::write_all(&mut &far, b"what?").unwrap();
        assert_eq!(bell.wait(&anchor, long).unwrap(), Woken::Spoke);
        drop(far);
        assert_eq!(bell.wait(&anchor, long).unwrap(), Woken::Gone);
    }
}
