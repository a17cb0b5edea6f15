//! When a holder moves bytes itself: through a window, which it asks the owner for and which is for one lease, term and generation.

use std::sync::Arc;

use super::message::DONE;
use super::{RemoteRegion, TransferError};
use crate::Effects;
use crate::access::{AccessTable, Denied, Operation};
use crate::env::Instant;
use crate::link::Link;

#[cfg(target_os = "linux")]
pub(super) use here::{Hands, Native};
#[cfg(not(target_os = "linux"))]
pub(super) use nowhere::{Hands, Native};

#[cfg(target_os = "linux")]
mod here {
    use super::*;
    use crate::env::Clock;
    use crate::provider::ProviderKind;
    use crate::provider::shm::window::{self as mapped, Meeting, Waiting};
    use crate::provider::verbs::OneSided;
    use crate::provider::verbs::window::{ANSWER_BYTES, Answer, Asking, Closer, REQUEST_BYTES, Reach, Request};
    use crate::remote::Denial;
    use crate::remote::message::{HANDED, WINDOW};

    /// What a link's windows are made of.
    #[derive(Debug, Clone)]
    enum Means {
        /// Memory that both processes map.
        Mapping,
        /// Adapters that reach it.
        Adapters(OneSided),
    }

    impl Means {
        fn of(link: &Arc<dyn Link>) -> Option<Self> {
            if link.provider() == ProviderKind::Shm {
                return Some(Self::Mapping);
            }
            Arc::clone(link).one_sided().map(Self::Adapters)
        }
    }

    /// A window, however it came about.
    #[derive(Debug)]
    pub(in crate::remote) enum Window {
        Mapped(mapped::Window),
        Reached(Box<Reach>),
    }

    impl Window {
        /// Whether it can be written.
        pub(in crate::remote) fn writable(&self) -> bool {
            match self {
                Self::Mapped(window) => window.writable(),
                Self::Reached(reach) => reach.writable(),
            }
        }

        /// Moves `bytes` to `offset`, and says how many of them are known to be in the owner's memory.
        pub(in crate::remote) fn put(&mut self, offset: u64, bytes: &[u8], clock: &dyn Clock, deadline: Instant) -> usize {
            match self {
                Self::Mapped(window) => window.put(offset, bytes, clock, deadline),
                Self::Reached(reach) => reach.put(offset, bytes, clock, deadline),
            }
        }

        /// Moves bytes from `offset` on to `into`, and says how many.
        pub(in crate::remote) fn get(&mut self, offset: u64, into: &mut [u8], clock: &dyn Clock, deadline: Instant) -> usize {
            match self {
                Self::Mapped(window) => window.get(offset, into, clock, deadline),
                Self::Reached(reach) => reach.get(offset, into, clock, deadline),
            }
        }

        /// Whether it is known to be of no use any more.
        fn has_ended(&self) -> bool {
            match self {
                // It may be opened again.
                Self::Mapped(_) => false,
                Self::Reached(reach) => reach.has_ended(),
            }
        }
    }

    /// After so many windows in a row that nothing went through, the adapters are taken for ones that do not do what they promise: each
    /// costs the time in which an operation fails.
    const FRUITLESS_MAX: u8 = 3;

    /// The window of a region.
    #[derive(Debug)]
    pub(in crate::remote) struct Native {
        link: Arc<dyn Link>,
        /// None: there will be no window.
        means: Option<Means>,
        state: State,
        /// Windows in a row that nothing went through.
        fruitless: u8,
    }

    #[derive(Debug)]
    enum State {
        /// One is asked for at the next operation.
        Shut,
        /// The owner has none to give for this lease.
        Refused,
        /// As long as the link lives, so that the owner's end is noticed.
        Open(Window),
    }

    impl Native {
        /// What can be had over a link whose messages have so much room.
        pub(in crate::remote) fn over(link: &Arc<dyn Link>, piece_bytes: usize) -> Self {
            let means = Means::of(link).filter(|_| piece_bytes >= Meeting::BYTES.max(ANSWER_BYTES));
            Self { link: Arc::clone(link), means, state: State::Shut, fruitless: 0 }
        }

        /// There will be no window.
        pub(in crate::remote) fn forgo(&mut self) {
            self.means = None;
            self.state = State::Shut;
        }

        pub(in crate::remote) fn is_open(&self) -> bool {
            matches!(&self.state, State::Open(window) if !window.has_ended())
        }

        /// Gives the window up. Another lease, term or generation may get one.
        pub(in crate::remote) fn shut(&mut self) {
            if let State::Open(Window::Reached(reach)) = &self.state
                && reach.has_ended()
            {
                self.fruitless = if reach.was_of_use() { 0 } else { self.fruitless.saturating_add(1) };
                if self.fruitless >= FRUITLESS_MAX {
                    tracing::warn!(link = %self.link.peer(), "adapters do not reach this peer's memory; its thread moves all bytes");
                    self.means = None;
                }
            }
            self.state = State::Shut;
        }

        fn give_up(&mut self, why: &dyn std::fmt::Display) {
            tracing::debug!(%why, "leased memory is asked for, not reached");
            self.state = State::Refused;
        }
    }

    impl RemoteRegion {
        /// The window onto the lease, if there can be one. Where the owner denies it, the operation itself will hear the same.
        pub(in crate::remote) fn window(&mut self, deadline: Instant) -> Result<Option<(&mut Window, &Effects)>, TransferError> {
            match &self.native.state {
                State::Refused => return Ok(None),
                State::Open(_) if self.native.link.health().closed.is_some() => {
                    self.native.shut();
                    return Ok(None);
                }
                State::Open(window) if !window.has_ended() => {}
                State::Open(_) | State::Shut => {
                    self.native.shut();
                    match self.native.means.clone() {
                        Some(Means::Mapping) => self.open_mapped(deadline)?,
                        Some(Means::Adapters(end)) => self.open_reached(&end, deadline)?,
                        None => {}
                    }
                }
            }
            Ok(match &mut self.native.state {
                State::Open(window) => Some((window, &self.effects)),
                State::Shut | State::Refused => None,
            })
        }

        /// The window of an adapter that is open, for tests that play a holder who takes no notice.
        #[cfg(test)]
        pub(crate) fn reach(&mut self) -> Option<&mut Reach> {
            match &mut self.native.state {
                State::Open(Window::Reached(reach)) => Some(reach),
                _ => None,
            }
        }

        /// Asks for a window: how long the answer is. None: there is none, now or for this lease.
        fn ask_for_window(&mut self, how: &[u8], answer: &mut [u8], deadline: Instant) -> Result<Option<usize>, TransferError> {
            // Who believes that the lease is longer than it is gets none: a window may begin a generation, and what reaches outside
            // must not.
            let head = self.head(self.lease.bytes, 0);
            match self.ask_into(WINDOW, &head, &[how], answer, deadline) {
                Ok((HANDED, bytes)) => return Ok(Some(bytes)),
                Ok((DONE, _)) => self.native.give_up(&"the owner has no window for it"),
                Ok(_) => return Err(TransferError::Answer),
                // What may only be written has no window.
                Err(TransferError::Denied(denial @ Denial::Rights)) => self.native.give_up(&denial),
                Err(TransferError::Denied(_)) => {}
                Err(error) => return Err(error),
            }
            Ok(None)
        }

        fn open_mapped(&mut self, deadline: Instant) -> Result<(), TransferError> {
            let waiting = match Waiting::new(&*self.effects.rng, &*self.effects.clock) {
                Ok(waiting) => waiting,
                Err(error) => {
                    self.native.give_up(&error);
                    return Ok(());
                }
            };
            if self.ask_for_window(&waiting.meeting().encode(), &mut [], deadline)?.is_some() {
                match waiting.take(self.lease.bytes, &*self.effects.clock) {
                    Ok(window) => self.native.state = State::Open(Window::Mapped(window)),
                    Err(error) => self.native.give_up(&error),
                }
            }
            Ok(())
        }

        fn open_reached(&mut self, end: &OneSided, deadline: Instant) -> Result<(), TransferError> {
            let asking = match Asking::new(end, &*self.effects.rng, &*self.effects.clock) {
                Ok(asking) => asking,
                Err(error) => {
                    self.native.give_up(&error);
                    return Ok(());
                }
            };
            let mut answer = [0; ANSWER_BYTES];
            let Some(bytes) = self.ask_for_window(&asking.request().encode(), &mut answer, deadline)? else { return Ok(()) };
            let answer = Answer::decode(&answer[..bytes.min(ANSWER_BYTES)]).map_err(|_| TransferError::Answer)?;
            match asking.open(&answer, self.lease.bytes) {
                Ok(reach) => self.native.state = State::Open(Window::Reached(Box::new(reach))),
                Err(error) => self.native.give_up(&error),
            }
            Ok(())
        }
    }

    /// The owner's part: how it hands windows to the peer of one link.
    #[derive(Debug)]
    pub(in crate::remote) struct Hands {
        means: Option<Means>,
        /// The window that the peer's adapter was let at last. It has one at a time, and none when the link has ended.
        last: Option<Closer>,
    }

    impl Hands {
        pub(in crate::remote) fn over(link: &Arc<dyn Link>) -> Self {
            Self { means: Means::of(link), last: None }
        }

        /// What to answer a holder that asks for a window, with what comes behind the head; none if it asks for nonsense.
        pub(in crate::remote) fn hand_over(
            &mut self,
            table: &AccessTable,
            operation: Operation,
            generation: u64,
            how: &[u8],
        ) -> Option<Result<(u8, Vec<u8>), Denied>> {
            let nothing = || Some(Ok((DONE, Vec::new())));
            if how.len() == REQUEST_BYTES {
                let request = Request::decode(how)?;
                let Some(Means::Adapters(end)) = &self.means else { return nothing() };
                // Who asks for another has given up the one that it had.
                self.last = None;
                let opened =
                    table.open_reach(operation, generation, |pages, bytes, rights| match end.expose(&request, pages, bytes, rights) {
                        Ok(exposed) => Some(exposed),
                        Err(error) => {
                            tracing::debug!(%error, "leased memory was not opened to an adapter");
                            None
                        }
                    });
                return match opened {
                    Ok(Some((answer, closer))) => {
                        self.last = Some(closer);
                        Some(Ok((HANDED, answer.encode().to_vec())))
                    }
                    Ok(None) => nothing(),
                    Err(denied) => Some(Err(denied)),
                };
            }
            let meeting = Meeting::decode(how)?;
            // Only a process of this machine, which has proved itself over shared memory, says where on this machine to go.
            let Some(Means::Mapping) = &self.means else { return nothing() };
            let opened = table.open_window(operation, generation, &meeting);
            Some(opened.map(|handed| (if handed { HANDED } else { DONE }, Vec::new())))
        }
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

        pub(in crate::remote) fn put(&mut self, _: u64, _: &[u8], _: &dyn crate::env::Clock, _: Instant) -> usize {
            match *self {}
        }

        pub(in crate::remote) fn get(&mut self, _: u64, _: &mut [u8], _: &dyn crate::env::Clock, _: Instant) -> usize {
            match *self {}
        }
    }

    impl Native {
        pub(in crate::remote) fn over(_: &Arc<dyn Link>, _: usize) -> Self {
            Self
        }

        pub(in crate::remote) fn forgo(&mut self) {}

        pub(in crate::remote) const fn is_open(&self) -> bool {
            false
        }

        pub(in crate::remote) fn shut(&mut self) {}
    }

    impl RemoteRegion {
        #[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
        pub(in crate::remote) fn window(&mut self, _: Instant) -> Result<Option<(&mut Window, &Effects)>, TransferError> {
            Ok(None)
        }
    }

    #[derive(Debug)]
    pub(in crate::remote) struct Hands;

    impl Hands {
        pub(in crate::remote) fn over(_: &Arc<dyn Link>) -> Self {
            Self
        }

        pub(in crate::remote) fn hand_over(
            &mut self,
            _: &AccessTable,
            _: Operation,
            _: u64,
            how: &[u8],
        ) -> Option<Result<(u8, Vec<u8>), Denied>> {
            matches!(how.len(), 16 | 48).then(|| Ok((DONE, Vec::new())))
        }
    }
}
