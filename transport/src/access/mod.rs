//! Which lease may touch which bytes of a slab.
//!
//! The lease actor is the only writer of an [`AccessTable`]; threads that serve peers ask it before a byte moves. A peer
//! names a lease by an opaque [`Handle`] that nobody can guess; the handle means nothing without the holder's
//! connection, the rights, the bounds, the term and the deadline, all of which are checked each time.
//!
//! Revoking is a fence: from then on nothing is let in, and [`AccessTable::revoke`] returns when what was let in before
//! has finished. Only then may the bytes be lent again, and the table refuses to lend them earlier.
//!
//! The memory of a lease is its own: made, and zeroed, when it is granted, and gone when it is over. A holder in another process of
//! this machine may be handed a window onto it (Linux), through which no thread of the owner is asked; `provider::shm::window` says
//! why a fence holds there, too, and why such memory may stay charged for a while after its lease. A holder on another machine may be let
//! at it by RDMA adapters: `provider::verbs::window`.

mod machine;
#[cfg(test)]
mod tests;
mod watch;
mod windows;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex};

use serde::{Deserialize, Serialize};

pub use machine::{AccessMachine, Denied, Grant, GrantError, Operation, Rights, Settled};

use crate::Effects;
use crate::env::Instant;
use crate::frame::TermTag;
use crate::link::{lock, nap};
use crate::region::{Lent, WriteRefused, Writer, page_bytes};
use watch::Watch;
use windows::Windows;

/// What a peer calls a lease on the wire. Drawn at random; whoever knows it and holds the lease may use it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Handle(pub u128);

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({:08x}…)", (self.0 >> 96) as u32)
    }
}

/// Why a revoked lease is not free yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RevokeError {
    /// What was let in before has not finished by the deadline. Nothing more is let in; ask again, or end the peer's link.
    #[error("{in_flight} operations on {handle:?} had not finished by the deadline; its bytes stay out of use until they have")]
    InFlight {
        /// The lease's handle.
        handle: Handle,
        /// How many.
        in_flight: u32,
    },
    /// No lease has this handle (any more).
    #[error("{handle:?} names no lease")]
    Unknown {
        /// What was asked for.
        handle: Handle,
    },
}

/// The table of one slab, with the memory that is lent; shared by the lease actor and the threads that serve peers. Cheap to
/// clone.
///
/// A slab is an account of so many bytes, lent in whole pages. What is not lent takes no memory of the machine.
#[derive(Clone)]
pub struct AccessTable(Arc<Inner>);

struct Inner {
    effects: Effects,
    state: Mutex<State>,
    /// An operation finished.
    finished: Condvar,
    watch: Arc<Watch>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.watch.ring();
    }
}

struct State {
    machine: AccessMachine,
    held: BTreeMap<Handle, Held>,
    /// Memory that is not lent any more, by the number that it is charged under.
    retired: BTreeMap<u64, Windows>,
    /// Whether a thread closes windows in time.
    watched: bool,
}

/// The memory of a lease, and who has it mapped.
struct Held {
    lent: Arc<Lent>,
    windows: Windows,
}

impl State {
    /// Takes what nobody has mapped any more off the account.
    fn sweep(&mut self) {
        let machine = &mut self.machine;
        self.retired.retain(|number, windows| {
            let living = windows.any_living();
            if !living {
                machine.forget(*number);
            }
            living
        });
    }

    /// Ends windows of adapters whose lease has run out, and says when the next one does.
    fn end_due(&self, now: Instant) -> Option<Instant> {
        self.held.values().filter_map(|held| held.windows.end_due(now)).min()
    }

    /// The same for one lease.
    fn end_due_of(&self, handle: Handle, now: Instant) {
        if let Some(held) = self.held.get(&handle) {
            held.windows.end_due(now);
        }
    }

    /// Charges memory that went out of use, as long as one of `windows` is there.
    fn retire(&mut self, bytes: u64, mut windows: Windows) {
        if windows.any_living() {
            let number = self.machine.retire(bytes);
            self.retired.insert(number, windows);
        }
    }

    /// Lets only this and later terms and generations write, also through windows.
    fn raise(&mut self, handle: Handle, to: Writer) {
        let Some(held) = self.held.get_mut(&handle) else { return };
        held.lent.raise(to);
        let mut late = held.windows.take_late(&to);
        late.end();
        if late.any_living() {
            self.move_on(handle, late);
        }
    }

    /// Goes on in other pages, because those of `late` can be written to by who may not any more.
    #[cfg(target_os = "linux")]
    fn move_on(&mut self, handle: Handle, late: Windows) {
        let Some(held) = self.held.get_mut(&handle) else { return };
        let bytes = self.machine.grant_of(handle).map_or(0, |grant| grant.bytes);
        held.windows.end_adapters();
        if let Err(error) = held.lent.replace() {
            // The machine has no memory left. Late holders that are honest are kept out all the same; the others only by the end of
            // the lease, which now has to come.
            tracing::warn!(?handle, %error, "a lease that was taken over could not be moved; it is fenced");
            held.windows.join(late);
            self.machine.fence(handle);
            return;
        }
        self.retire(bytes, late);
    }

    /// Other systems have no windows, so none is late.
    #[cfg(not(target_os = "linux"))]
    fn move_on(&mut self, handle: Handle, late: Windows) {
        if let Some(held) = self.held.get_mut(&handle) {
            held.windows.join(late);
        }
        self.machine.fence(handle);
    }

    /// The memory of a lease whose fence holds goes out of use.
    fn free(&mut self, handle: Handle, bytes: u64) {
        let Some(mut held) = self.held.remove(&handle) else { return };
        held.windows.end();
        #[cfg(target_os = "linux")]
        if held.windows.any_living() {
            held.lent.scrap();
        }
        self.retire(bytes, held.windows);
    }
}

impl AccessTable {
    /// An empty table for a slab of `bytes`.
    pub fn new(effects: Effects, bytes: u64) -> Self {
        let machine = AccessMachine::new(bytes, page_bytes() as u64);
        let state = State { machine, held: BTreeMap::new(), retired: BTreeMap::new(), watched: false };
        Self(Arc::new(Inner { effects, state: Mutex::new(state), finished: Condvar::new(), watch: Arc::default() }))
    }

    /// Lends a range of the slab, which begins at a page. Its memory is zeroed.
    ///
    /// # Errors
    /// [`GrantError`] if the range is not all free.
    pub fn grant(&self, grant: Grant) -> Result<Handle, GrantError> {
        let mut bytes = [0; 16];
        self.0.effects.rng.fill("access handle", &mut bytes);
        let handle = Handle(u128::from_le_bytes(bytes));
        let mut state = lock(&self.0.state);
        state.sweep();
        state.machine.grant(handle, grant)?;
        match Lent::new(grant.bytes, grant.rights.write) {
            Ok(lent) => {
                state.held.insert(handle, Held { lent: Arc::new(lent), windows: Windows::default() });
                Ok(handle)
            }
            Err(error) => {
                state.machine.fence(handle);
                state.machine.settle(handle);
                Err(GrantError::Memory(error.to_string()))
            }
        }
    }

    /// Moves a lease's deadline; a lease that is fenced stays so.
    ///
    /// # Errors
    /// [`RevokeError::Unknown`].
    pub fn renew(&self, handle: Handle, deadline: Instant) -> Result<(), RevokeError> {
        let mut state = lock(&self.0.state);
        if !state.machine.renew(handle, deadline) {
            return Err(RevokeError::Unknown { handle });
        }
        if let Some(held) = state.held.get(&handle) {
            held.windows.set_deadline(deadline);
        }
        state.end_due_of(handle, self.0.effects.clock.now());
        if state.watched {
            self.0.watch.ring();
        }
        Ok(())
    }

    /// Raises the term under which a lease may be used: holders of an older one are refused from now on, and nothing that they
    /// still write is seen.
    ///
    /// # Errors
    /// [`RevokeError::Unknown`].
    pub fn raise_term(&self, handle: Handle, term: TermTag) -> Result<(), RevokeError> {
        let mut state = lock(&self.0.state);
        if !state.machine.raise_term(handle, term) {
            return Err(RevokeError::Unknown { handle });
        }
        let generation = state.machine.generation(handle);
        state.raise(handle, Writer { term, generation });
        Ok(())
    }

    /// Ends a lease: lets nothing more in, waits for what the owner's threads are doing for it, takes its memory out of use and frees
    /// the range. Who has the memory mapped is not waited for: nobody sees what it does there.
    ///
    /// # Errors
    /// [`RevokeError`]. After [`RevokeError::InFlight`] the lease stays fenced and its range charged.
    pub fn revoke(&self, handle: Handle, deadline: Instant) -> Result<(), RevokeError> {
        let mut state = lock(&self.0.state);
        state.machine.fence(handle);
        if let Some(held) = state.held.get(&handle) {
            held.windows.end();
        }
        let bytes = state.machine.grant_of(handle).map_or(0, |grant| grant.bytes);
        loop {
            let in_flight = match state.machine.settle(handle) {
                Settled::Freed => {
                    state.free(handle, bytes);
                    return Ok(());
                }
                Settled::Unknown => return Err(RevokeError::Unknown { handle }),
                Settled::InFlight(in_flight) => in_flight,
            };
            let Some(wait) = nap(self.0.effects.clock.now(), deadline) else { return Err(RevokeError::InFlight { handle, in_flight }) };
            state = match self.0.finished.wait_timeout(state, wait) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Lets an operation in, if its lease allows it. While the [`Pass`] lives, the lease is not freed.
    ///
    /// # Errors
    /// [`Denied`] says which check failed, for the owner's log; peers are told less.
    pub fn admit(&self, operation: Operation) -> Result<Pass, Denied> {
        let now = self.0.effects.clock.now();
        let mut state = lock(&self.0.state);
        state.end_due_of(operation.handle, now);
        let before = state.machine.generation(operation.handle);
        state.machine.admit(now, operation)?;
        let generation = state.machine.generation(operation.handle);
        if generation > before {
            state.raise(operation.handle, Writer { term: TermTag::default(), generation });
        }
        let Some(held) = state.held.get(&operation.handle) else {
            state.machine.finish(operation.handle);
            return Err(Denied::Unknown);
        };
        Ok(Pass { table: self.clone(), operation, lent: Arc::clone(&held.lent) })
    }

    /// Reads leased memory as its owner, whatever the lease says; `false` if there is no such lease or the range reaches past its
    /// last page.
    pub fn read(&self, handle: Handle, offset: u64, into: &mut [u8]) -> bool {
        self.memory(handle).is_some_and(|lent| lent.read(offset, into))
    }

    /// Writes leased memory as its owner, whatever the lease says; `false` as [`AccessTable::read`].
    pub fn write(&self, handle: Handle, offset: u64, from: &[u8]) -> bool {
        self.memory(handle).is_some_and(|lent| lent.write(offset, from, Writer::OWNER).is_ok())
    }

    fn memory(&self, handle: Handle) -> Option<Arc<Lent>> {
        let state = lock(&self.0.state);
        // What is seen after a lease has run out does not change any more.
        state.end_due_of(handle, self.0.effects.clock.now());
        state.held.get(&handle).map(|held| Arc::clone(&held.lent))
    }

    /// Length of the slab in bytes.
    pub fn slab_bytes(&self) -> u64 {
        lock(&self.0.state).machine.slab_bytes()
    }

    /// Bytes that are lent, fenced ones included, in whole pages.
    pub fn lent_bytes(&self) -> u64 {
        lock(&self.0.state).machine.lent_bytes()
    }

    /// Bytes whose leases are over, and which processes of this machine still have mapped. They are charged until those give them
    /// up, or end.
    pub fn retired_bytes(&self) -> u64 {
        let mut state = lock(&self.0.state);
        state.sweep();
        state.machine.retired_bytes()
    }
}

impl fmt::Debug for AccessTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = lock(&self.0.state);
        f.debug_struct("AccessTable").field("bytes", &state.machine.slab_bytes()).field("lent", &state.machine.lent_bytes()).finish()
    }
}

/// An operation that was let in. Dropping it says that it has finished.
pub struct Pass {
    table: AccessTable,
    operation: Operation,
    lent: Arc<Lent>,
}

impl Pass {
    /// Copies what the operation may read into `into`, which must not be longer.
    ///
    /// # Errors
    /// [`Denied::Bounds`] if it is.
    pub fn read(&self, into: &mut [u8]) -> Result<(), Denied> {
        self.within(into.len())?;
        if self.lent.read(self.operation.offset, into) { Ok(()) } else { Err(Denied::Bounds) }
    }

    /// Copies `from` to where the operation may write.
    ///
    /// # Errors
    /// [`Denied::Rights`] if it is no write, [`Denied::Bounds`] if `from` is longer than it, [`Denied::Term`] or
    /// [`Denied::Generation`] if a later one has begun since it was let in.
    pub fn write(&self, from: &[u8]) -> Result<(), Denied> {
        self.within(from.len())?;
        let generation = self.operation.write.ok_or(Denied::Rights)?;
        let writer = Writer { term: self.operation.term, generation };
        self.lent.write(self.operation.offset, from, writer).map_err(|refused| match refused {
            WriteRefused::Outside => Denied::Bounds,
            WriteRefused::Term => Denied::Term,
            WriteRefused::Generation => Denied::Generation,
        })
    }

    fn within(&self, bytes: usize) -> Result<(), Denied> {
        if u64::try_from(bytes).is_ok_and(|bytes| bytes <= self.operation.bytes) { Ok(()) } else { Err(Denied::Bounds) }
    }
}

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pass").field(&self.operation).finish()
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        lock(&self.table.0.state).machine.finish(self.operation.handle);
        self.table.0.finished.notify_all();
    }
}
