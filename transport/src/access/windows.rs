//! The windows onto a lease's memory that its holder was handed.

#[cfg(target_os = "linux")]
use super::{AccessTable, Denied, Operation};
use crate::env::Instant;
#[cfg(target_os = "linux")]
use crate::frame::TermTag;
#[cfg(target_os = "linux")]
use crate::link::lock;
#[cfg(target_os = "linux")]
use crate::provider::shm::window::{Handed, Meeting, Terms};
use crate::region::Writer;

/// As many as a lease may have at once; each takes a connection and a page of the owner.
#[cfg(target_os = "linux")]
const WINDOWS_MAX: usize = 16;

#[cfg(not(target_os = "linux"))]
use nowhere::Handed;

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

    /// Whether somebody still has the memory mapped through one of them.
    pub(super) fn any_living(&mut self) -> bool {
        self.0.retain(|window| !window.is_gone());
        !self.0.is_empty()
    }
}

#[cfg(target_os = "linux")]
impl AccessTable {
    /// Hands the holder of a lease a window onto its memory, if it may read it, under the term and generation of `operation`, which
    /// is an empty read. `false`: not this lease, or not now.
    ///
    /// # Errors
    /// [`Denied`], as [`AccessTable::admit`].
    pub(crate) fn open_window(&self, operation: Operation, generation: u64, meeting: &Meeting) -> Result<bool, Denied> {
        let AccessTable(inner) = self;
        let now = inner.effects.clock.now();
        let mut state = lock(&inner.state);
        state.machine.admit(now, operation)?;
        state.machine.finish(operation.handle);
        let Some(grant) = state.machine.grant_of(operation.handle).copied() else { return Err(Denied::Unknown) };
        // Who only reads is never late by its generation.
        let mut writer = Writer { term: operation.term, generation: u64::MAX };
        if grant.rights.write {
            let before = state.machine.generation(operation.handle);
            state.machine.admit(now, Operation { write: Some(generation), ..operation })?;
            state.machine.finish(operation.handle);
            writer.generation = generation;
            if generation > before {
                state.raise(operation.handle, Writer { term: TermTag::default(), generation });
            }
        }
        let Some(held) = state.held.get_mut(&operation.handle) else { return Err(Denied::Unknown) };
        held.windows.any_living();
        if held.windows.0.len() >= WINDOWS_MAX {
            return Ok(false);
        }
        let terms = Terms { bytes: grant.bytes, deadline: grant.deadline, writer };
        match Handed::over(meeting, &held.lent, &terms, inner.effects.clock.now()) {
            Ok(handed) => {
                held.windows.0.push(handed);
                Ok(true)
            }
            Err(error) => {
                tracing::debug!(%error, "a window onto leased memory was not handed over");
                Ok(false)
            }
        }
    }
}
