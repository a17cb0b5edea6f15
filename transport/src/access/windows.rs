//! The windows onto a lease's memory that its holder was handed.
//!
//! There are two kinds. Through shared memory an honest holder looks itself whether its window is open, and nobody looks at what the
//! others write. An adapter that was let at the memory looks at no clock and no word of the owner's, so its window is closed for good when
//! it ends: by whoever ends the lease, by whoever asks for the lease after its deadline, and else by `watch`.

use crate::env::Instant;
use crate::region::Writer;
#[cfg(target_os = "linux")]
pub(super) use here::Handed;
#[cfg(not(target_os = "linux"))]
use nowhere::Handed;

/// As many as a lease may have at once; each takes a connection and a page of the owner, or a queue pair.
#[cfg(target_os = "linux")]
const WINDOWS_MAX: usize = 16;

/// Other systems have none.
#[cfg(not(target_os = "linux"))]
mod nowhere {
    use super::{Instant, Writer};

    pub(super) enum Handed {}

    impl Handed {
        pub(super) fn end(&self) {}
        pub(super) fn set_deadline(&self, _: Instant) {}
        pub(super) fn is_gone(&self) -> bool {
            true
        }
        pub(super) fn writer(&self) -> Writer {
            Writer::OWNER
        }
        pub(super) fn closes_at(&self) -> Option<Instant> {
            None
        }
    }
}

/// Those of one lease.
#[derive(Default)]
pub(super) struct Windows(Vec<Handed>);

impl Windows {
    /// Ends them all.
    pub(super) fn end(&self) {
        self.0.iter().for_each(Handed::end);
    }

    /// Ends those of adapters, which write to the pages that they were let at and no others.
    #[cfg(target_os = "linux")]
    pub(super) fn end_adapters(&self) {
        self.0.iter().filter(|window| window.closes_at().is_some()).for_each(Handed::end);
    }

    /// Ends those of adapters whose deadline has passed, and says when the next one's does.
    pub(super) fn end_due(&self, now: Instant) -> Option<Instant> {
        let open = self.0.iter().filter_map(|window| window.closes_at().map(|at| (at, window)));
        let (due, later): (Vec<_>, Vec<_>) = open.partition(|(at, _)| *at <= now);
        due.into_iter().for_each(|(_, window)| window.end());
        later.into_iter().map(|(at, _)| at).min()
    }

    pub(super) fn set_deadline(&self, deadline: Instant) {
        self.0.iter().for_each(|window| window.set_deadline(deadline));
    }

    /// Takes out those under which is written later than may be.
    pub(super) fn take_late(&mut self, floor: &Writer) -> Self {
        Self(self.0.extract_if(.., |window| window.writer().is_late(floor)).collect())
    }

    /// Takes them in again.
    pub(super) fn join(&mut self, mut others: Self) {
        self.0.append(&mut others.0);
    }

    /// Whether somebody still has the memory mapped through one of them, or an adapter that did not let go of it knows it.
    pub(super) fn any_living(&mut self) -> bool {
        self.0.retain(|window| !window.is_gone());
        !self.0.is_empty()
    }

    /// Whether there is room for one more.
    #[cfg(target_os = "linux")]
    fn has_room(&mut self) -> bool {
        self.any_living();
        self.0.len() < WINDOWS_MAX
    }
}

#[cfg(target_os = "linux")]
mod here {
    use super::{Instant, Windows, Writer};
    use crate::access::{AccessTable, Denied, Grant, Handle, Operation, Rights, State};
    use crate::frame::TermTag;
    use crate::link::lock;
    use crate::provider::shm::window as mapped;
    use crate::provider::verbs::window as reached;
    use crate::region::LentPages;

    /// One of either kind.
    pub(in crate::access) enum Handed {
        Mapped(mapped::Handed),
        Reached(reached::Handed),
    }

    impl Handed {
        pub(super) fn end(&self) {
            match self {
                Self::Mapped(handed) => handed.end(),
                Self::Reached(handed) => handed.end(),
            }
        }

        pub(super) fn set_deadline(&self, deadline: Instant) {
            match self {
                Self::Mapped(handed) => handed.set_deadline(deadline),
                Self::Reached(handed) => handed.set_deadline(deadline),
            }
        }

        pub(super) fn is_gone(&self) -> bool {
            match self {
                Self::Mapped(handed) => handed.is_gone(),
                Self::Reached(handed) => handed.is_gone(),
            }
        }

        pub(super) fn writer(&self) -> Writer {
            match self {
                Self::Mapped(handed) => handed.writer(),
                Self::Reached(handed) => handed.writer(),
            }
        }

        /// When somebody has to close it, if it does not see to that itself.
        pub(super) fn closes_at(&self) -> Option<Instant> {
            match self {
                Self::Mapped(_) => None,
                Self::Reached(handed) => (!handed.is_gone()).then(|| handed.deadline()),
            }
        }
    }

    impl State {
        /// Whether a window may be opened for `operation`, an empty read, and for writes of `generation` where the lease allows writing:
        /// which lease that is, and who writes through it.
        fn may_open(&mut self, now: Instant, operation: Operation, generation: u64) -> Result<(Grant, Writer), Denied> {
            self.machine.admit(now, operation)?;
            self.machine.finish(operation.handle);
            let Some(grant) = self.machine.grant_of(operation.handle).copied() else { return Err(Denied::Unknown) };
            // Who only reads is never late by its generation.
            let mut writer = Writer { term: operation.term, generation: u64::MAX };
            if grant.rights.write {
                let before = self.machine.generation(operation.handle);
                self.machine.admit(now, Operation { write: Some(generation), ..operation })?;
                self.machine.finish(operation.handle);
                writer.generation = generation;
                if generation > before {
                    self.raise(operation.handle, Writer { term: TermTag::default(), generation });
                }
            }
            Ok((grant, writer))
        }

        /// Whether a window onto these pages of a lease may be added to those that there are.
        fn may_join(&mut self, handle: Handle, pages: &LentPages) -> bool {
            self.held.get_mut(&handle).is_some_and(|held| held.lent.uses(pages) && held.windows.has_room())
        }

        /// Takes back what nobody was told of. Should the device refuse, the lease has to end: its pages can be written to.
        fn discard(&mut self, handle: Handle, exposed: reached::Exposed, now: Instant) {
            let (handed, ..) = exposed.keep(Writer::OWNER, now, std::time::Duration::ZERO);
            handed.end();
            if !handed.is_gone() {
                tracing::warn!(?handle, "a device does not let go of leased memory; the lease is fenced");
                if let Some(held) = self.held.get_mut(&handle) {
                    held.windows.0.push(Handed::Reached(handed));
                }
                self.machine.fence(handle);
            }
        }

        fn windows(&mut self, operation: &Operation) -> Result<&mut Windows, Denied> {
            self.held.get_mut(&operation.handle).map(|held| &mut held.windows).ok_or(Denied::Unknown)
        }
    }

    impl AccessTable {
        /// Hands the holder of a lease a window onto its memory, if it may read it, under the term and generation of `operation`, which
        /// is an empty read. `false`: not this lease, or not now.
        ///
        /// # Errors
        /// [`Denied`], as [`AccessTable::admit`].
        pub(crate) fn open_window(&self, operation: Operation, generation: u64, meeting: &mapped::Meeting) -> Result<bool, Denied> {
            let AccessTable(inner) = self;
            let now = inner.effects.clock.now();
            let mut state = lock(&inner.state);
            let (grant, writer) = state.may_open(now, operation, generation)?;
            let Some(held) = state.held.get_mut(&operation.handle) else { return Err(Denied::Unknown) };
            if !held.windows.has_room() {
                return Ok(false);
            }
            let terms = mapped::Terms { bytes: grant.bytes, deadline: grant.deadline, writer };
            match mapped::Handed::over(meeting, &held.lent, &terms, inner.effects.clock.now()) {
                Ok(handed) => {
                    held.windows.0.push(Handed::Mapped(handed));
                    Ok(true)
                }
                Err(error) => {
                    tracing::debug!(%error, "a window onto leased memory was not handed over");
                    Ok(false)
                }
            }
        }

        /// Lets the adapter of a lease's holder at its memory, under the same conditions as [`AccessTable::open_window`]. `expose` does it,
        /// for so many bytes of the pages and these rights. What it gave is told with how long the lease lasts from now, in nanoseconds.
        ///
        /// # Errors
        /// [`Denied`], as [`AccessTable::admit`].
        pub(crate) fn open_reach(
            &self,
            operation: Operation,
            generation: u64,
            expose: impl FnOnce(&LentPages, u64, Rights) -> Option<reached::Exposed>,
        ) -> Result<Option<(reached::Answer, reached::Closer)>, Denied> {
            let AccessTable(inner) = self;
            let mut state = lock(&inner.state);
            let (grant, _) = state.may_open(inner.effects.clock.now(), operation, generation)?;
            if !state.windows(&operation)?.has_room() {
                return Ok(None);
            }
            let Some(lent) = state.held.get(&operation.handle).map(|held| held.lent.clone()) else { return Err(Denied::Unknown) };
            // To register long memory takes long, and is not waited for by others. As long as this operation is inside, the lease stays.
            state.machine.admit(inner.effects.clock.now(), operation)?;
            drop(state);
            let pages = lent.pages();
            let exposed = expose(&pages, grant.bytes, grant.rights);
            let mut state = lock(&inner.state);
            let opened = self.keep_reach(&mut state, operation, generation, &grant, &pages, exposed);
            // What was not kept has been closed by now.
            state.machine.finish(operation.handle);
            drop(state);
            inner.finished.notify_all();
            opened
        }

        /// The holder has not been told of what was opened meanwhile, and is not, unless everything is as it was before.
        fn keep_reach(
            &self,
            state: &mut State,
            operation: Operation,
            generation: u64,
            before: &Grant,
            pages: &LentPages,
            exposed: Option<reached::Exposed>,
        ) -> Result<Option<(reached::Answer, reached::Closer)>, Denied> {
            let Some(exposed) = exposed else { return Ok(None) };
            let now = self.0.effects.clock.now();
            let outcome = state.may_open(now, operation, generation);
            let same = |grant: &Grant| grant.bytes == before.bytes && grant.rights == before.rights;
            let (grant, writer) = match outcome {
                Ok((grant, writer)) if same(&grant) && state.may_join(operation.handle, pages) => (grant, writer),
                other => {
                    state.discard(operation.handle, exposed, now);
                    return other.map(|_| None);
                }
            };
            let (handed, answer, closer) = exposed.keep(writer, grant.deadline, grant.deadline.since(now));
            if let Some(held) = state.held.get_mut(&operation.handle) {
                held.windows.0.push(Handed::Reached(handed));
            }
            if let Err(error) = self.watch(state) {
                tracing::warn!(%error, "no thread to close windows onto leased memory in time; the owner's thread moves all bytes");
                closer.close();
                return Ok(None);
            }
            Ok(Some((answer, closer)))
        }
    }
}
