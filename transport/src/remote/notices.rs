//! What holders tell the owner of the memory.

use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};

use super::Denial;
use crate::access::Handle;
use crate::env::{Clock, Instant};
use crate::link::{lock, nap};

/// As many may wait for the owner; a holder that tells more is refused.
const WAITING_MAX: usize = 1024;

/// Something was written, as its holder says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Notice {
    /// The lease.
    pub handle: Handle,
    /// Where the range begins, in bytes from the start of the lease. It lies inside.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
    /// What the holder calls it.
    pub number: u64,
}

/// Why there is no notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoticesError {
    /// None came by the deadline.
    #[error("no notice came by the deadline")]
    Deadline,
    /// Every server that could tell one has ended, and all that were told have been taken.
    #[error("nobody is left who could tell a notice")]
    Ended,
}

/// The end that servers tell: see [`RegionServer::with_notices`](super::RegionServer::with_notices). Cheap to clone, for several links.
#[derive(Debug, Clone)]
pub struct NoticeSender(SyncSender<Notice>);

/// The end that the owner of the memory listens at. Those of one link come in the order in which the holder told them.
#[derive(Debug)]
pub struct Notices(Mutex<Receiver<Notice>>);

/// Both ends.
pub fn notices() -> (NoticeSender, Notices) {
    let (sender, receiver) = sync_channel(WAITING_MAX);
    (NoticeSender(sender), Notices(Mutex::new(receiver)))
}

impl NoticeSender {
    /// Never waits.
    pub(super) fn tell(&self, notice: Notice) -> Result<(), Denial> {
        self.0.try_send(notice).map_err(|error| match error {
            TrySendError::Full(_) => Denial::Busy,
            TrySendError::Disconnected(_) => Denial::Deaf,
        })
    }
}

impl Notices {
    /// The next one.
    ///
    /// # Errors
    /// [`NoticesError`].
    pub fn recv(&self, clock: &dyn Clock, deadline: Instant) -> Result<Notice, NoticesError> {
        let receiver = lock(&self.0);
        loop {
            match receiver.try_recv() {
                Ok(notice) => return Ok(notice),
                Err(TryRecvError::Disconnected) => return Err(NoticesError::Ended),
                Err(TryRecvError::Empty) => {}
            }
            let wait = nap(clock.now(), deadline).ok_or(NoticesError::Deadline)?;
            match receiver.recv_timeout(wait) {
                Ok(notice) => return Ok(notice),
                Err(RecvTimeoutError::Disconnected) => return Err(NoticesError::Ended),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing::effects;

    #[test]
    fn a_full_board_a_deaf_owner_and_the_end_are_said() {
        let effects = effects();
        let (sender, notices) = notices();
        let notice = |number| Notice { handle: Handle(1), offset: 0, bytes: 0, number };
        let soon = || effects.after(Duration::from_millis(5));
        assert_eq!(notices.recv(&*effects.clock, soon()), Err(NoticesError::Deadline));
        for number in 0..WAITING_MAX as u64 {
            sender.tell(notice(number)).unwrap();
        }
        assert_eq!(sender.tell(notice(0)), Err(Denial::Busy));
        for number in 0..WAITING_MAX as u64 {
            assert_eq!(notices.recv(&*effects.clock, soon()), Ok(notice(number)));
        }
        let other = sender.clone();
        drop(sender);
        other.tell(notice(7)).unwrap();
        drop(other);
        assert_eq!(notices.recv(&*effects.clock, soon()), Ok(notice(7)));
        assert_eq!(notices.recv(&*effects.clock, soon()), Err(NoticesError::Ended));
        let (sender, notices) = super::notices();
        drop(notices);
        assert_eq!(sender.tell(notice(0)), Err(Denial::Deaf));
    }
}
