//! When a holder moves bytes itself: through a window, which it asks the owner for and which is for one lease, term and generation.

use std::sync::Arc;

use super::message::DONE;
use super::{RemoteRegion, TransferError};
use crate::Effects;
use crate::access::{AccessTable, Denied, Operation};
use crate::env::Instant;
use crate::link::Link;

#[cfg(target_os = "linux")]
pub(super) use here::{Native, hand_over};
#[cfg(not(target_os = "linux"))]
pub(super) use nowhere::{Native, hand_over};

#[cfg(target_os = "linux")]
mod here {
    use super::*;
    use crate::provider::ProviderKind;
    use crate::provider::shm::window::{Meeting, Waiting, Window};
    use crate::remote::Denial;
    use crate::remote::message::{HANDED, WINDOW};

    /// The window of a region.
    #[derive(Debug)]
    pub(in crate::remote) enum Native {
        /// There is none, and will be none.
        Never,
        /// One is asked for at the next operation.
        Shut(Arc<dyn Link>),
        /// The owner has none to give for this lease.
        Refused(Arc<dyn Link>),
        /// As long as the link lives, so that the owner's end is noticed.
        Open(Arc<dyn Link>, Window),
    }

    impl Native {
        /// What can be had over a link whose messages have so much room.
        pub(in crate::remote) fn over(link: &Arc<dyn Link>, piece_bytes: usize) -> Self {
            let possible = link.provider() == ProviderKind::Shm && piece_bytes >= Meeting::BYTES;
            if possible { Self::Shut(Arc::clone(link)) } else { Self::Never }
        }

        pub(in crate::remote) const fn never() -> Self {
            Self::Never
        }

        pub(in crate::remote) const fn is_open(&self) -> bool {
            matches!(self, Self::Open(..))
        }

        /// Gives the window up. Another lease, term or generation may get one.
        pub(in crate::remote) fn shut(&mut self) {
            *self = match std::mem::replace(self, Self::Never) {
                Self::Never => Self::Never,
                Self::Shut(link) | Self::Refused(link) | Self::Open(link, _) => Self::Shut(link),
            };
        }

        fn give_up(&mut self) {
            self.shut();
            if let Self::Shut(link) = self {
                *self = Self::Refused(Arc::clone(link));
            }
        }
    }

    impl RemoteRegion {
        /// The window onto the lease, if there can be one. Where the owner denies it, the operation itself will hear the same.
        pub(in crate::remote) fn window(&mut self, deadline: Instant) -> Result<Option<(&Window, &Effects)>, TransferError> {
            match &self.native {
                Native::Never | Native::Refused(_) => return Ok(None),
                Native::Open(link, _) if link.health().closed.is_some() => {
                    self.native.shut();
                    return Ok(None);
                }
                Native::Open(..) => {}
                Native::Shut(_) => self.open_window(deadline)?,
            }
            Ok(match &self.native {
                Native::Open(_, window) => Some((window, &self.effects)),
                _ => None,
            })
        }

        fn open_window(&mut self, deadline: Instant) -> Result<(), TransferError> {
            let Ok(waiting) = Waiting::new(&*self.effects.rng, &*self.effects.clock) else {
                self.native.give_up();
                return Ok(());
            };
            // Who believes that the lease is longer than it is gets none: a window may begin a generation, and what reaches outside
            // must not.
            let head = self.head(self.lease.bytes, 0);
            match self.ask(WINDOW, &head, &[&waiting.meeting().encode()], deadline) {
                Ok(HANDED) => {}
                Ok(DONE) => {
                    self.native.give_up();
                    return Ok(());
                }
                Ok(_) => return Err(TransferError::Answer),
                // What may only be written cannot be mapped.
                Err(TransferError::Denied(Denial::Rights)) => {
                    self.native.give_up();
                    return Ok(());
                }
                Err(TransferError::Denied(_)) => return Ok(()),
                Err(error) => return Err(error),
            }
            match waiting.take(self.lease.bytes, &*self.effects.clock) {
                Ok(window) => {
                    if let Native::Shut(link) = &self.native {
                        self.native = Native::Open(Arc::clone(link), window);
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "leased memory is not mapped, but asked for");
                    self.native.give_up();
                }
            }
            Ok(())
        }
    }

    /// The owner's part: what to answer a holder that asks for a window, of a process of this machine or not; none if it asks for
    /// nonsense.
    pub(in crate::remote) fn hand_over(
        table: &AccessTable,
        here: bool,
        operation: Operation,
        generation: u64,
        meeting: &[u8],
    ) -> Option<Result<u8, Denied>> {
        let meeting = Meeting::decode(meeting)?;
        // Only a process of this machine, which has proved itself over shared memory, says where on this machine to go.
        if !here {
            return Some(Ok(DONE));
        }
        Some(table.open_window(operation, generation, &meeting).map(|handed| if handed { HANDED } else { DONE }))
    }
}

#[cfg(not(target_os = "linux"))]
mod nowhere {
    use super::*;

    /// No system but Linux has windows yet.
    #[derive(Debug)]
    pub(in crate::remote) struct Native;

    /// What no region has.
    pub(in crate::remote) enum Window {}

    impl Window {
        pub(in crate::remote) fn writable(&self) -> bool {
            match *self {}
        }

        pub(in crate::remote) fn put(&self, _: u64, _: &[u8], _: &dyn crate::env::Clock, _: Instant) -> usize {
            match *self {}
        }

        pub(in crate::remote) fn get(&self, _: u64, _: &mut [u8], _: &dyn crate::env::Clock, _: Instant) -> usize {
            match *self {}
        }
    }

    impl Native {
        pub(in crate::remote) fn over(_: &Arc<dyn Link>, _: usize) -> Self {
            Self
        }

        pub(in crate::remote) const fn never() -> Self {
            Self
        }

        pub(in crate::remote) const fn is_open(&self) -> bool {
            false
        }

        pub(in crate::remote) fn shut(&mut self) {}
    }

    impl RemoteRegion {
        #[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
        pub(in crate::remote) fn window(&mut self, _: Instant) -> Result<Option<(&Window, &Effects)>, TransferError> {
            Ok(None)
        }
    }

    pub(in crate::remote) fn hand_over(_: &AccessTable, _: bool, _: Operation, _: u64, meeting: &[u8]) -> Option<Result<u8, Denied>> {
        (meeting.len() == 48).then_some(Ok(DONE))
    }
}
