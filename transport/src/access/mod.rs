//! Which lease may touch which bytes of a slab.
//!
//! The lease actor is the only writer of an [`AccessTable`]; threads that serve peers ask it before a byte moves. A peer
//! names a lease by an opaque [`Handle`] that nobody can guess; the handle means nothing without the holder's
//! connection, the rights, the bounds, the term and the deadline, all of which are checked each time.
//!
//! Revoking is a fence: from then on nothing is let in, and [`AccessTable::revoke`] returns when what was let in before
//! has finished. Only then may the bytes be lent again, and the table refuses to lend them earlier.

mod machine;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, Condvar, Mutex};

use serde::{Deserialize, Serialize};

pub use machine::{AccessMachine, Denied, Grant, GrantError, Operation, Rights, Settled};

use crate::Effects;
use crate::env::Instant;
use crate::frame::TermTag;
use crate::link::{lock, nap};

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

/// The table of one slab, shared by the lease actor and the threads that serve peers. Cheap to clone.
#[derive(Clone)]
pub struct AccessTable(Arc<Inner>);

struct Inner {
    effects: Effects,
    machine: Mutex<AccessMachine>,
    /// An operation finished.
    finished: Condvar,
}

impl AccessTable {
    /// An empty table for a slab of `bytes`.
    pub fn new(effects: Effects, bytes: u64) -> Self {
        Self(Arc::new(Inner { effects, machine: Mutex::new(AccessMachine::new(bytes)), finished: Condvar::new() }))
    }

    /// Lends a range of the slab.
    ///
    /// # Errors
    /// [`GrantError`] if the range is not all free.
    pub fn grant(&self, grant: Grant) -> Result<Handle, GrantError> {
        let mut bytes = [0; 16];
        self.0.effects.rng.fill("access handle", &mut bytes);
        let handle = Handle(u128::from_le_bytes(bytes));
        lock(&self.0.machine).grant(handle, grant)?;
        Ok(handle)
    }

    /// Moves a lease's deadline; a lease that is fenced stays so.
    ///
    /// # Errors
    /// [`RevokeError::Unknown`].
    pub fn renew(&self, handle: Handle, deadline: Instant) -> Result<(), RevokeError> {
        if lock(&self.0.machine).renew(handle, deadline) { Ok(()) } else { Err(RevokeError::Unknown { handle }) }
    }

    /// Raises the term under which a lease may be used: holders of an older one are refused from now on.
    ///
    /// # Errors
    /// [`RevokeError::Unknown`].
    pub fn raise_term(&self, handle: Handle, term: TermTag) -> Result<(), RevokeError> {
        if lock(&self.0.machine).raise_term(handle, term) { Ok(()) } else { Err(RevokeError::Unknown { handle }) }
    }

    /// Ends a lease: lets nothing more in, waits for what is inside, and frees the range.
    ///
    /// # Errors
    /// [`RevokeError`]. After [`RevokeError::InFlight`] the lease stays fenced and its range charged.
    pub fn revoke(&self, handle: Handle, deadline: Instant) -> Result<(), RevokeError> {
        let mut machine = lock(&self.0.machine);
        machine.fence(handle);
        loop {
            let in_flight = match machine.settle(handle) {
                Settled::Freed => return Ok(()),
                Settled::Unknown => return Err(RevokeError::Unknown { handle }),
                Settled::InFlight(in_flight) => in_flight,
            };
            let Some(wait) = nap(self.0.effects.clock.now(), deadline) else { return Err(RevokeError::InFlight { handle, in_flight }) };
            machine = match self.0.finished.wait_timeout(machine, wait) {
                Ok((machine, _)) => machine,
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
        let start = lock(&self.0.machine).admit(now, operation)?;
        Ok(Pass { table: self.clone(), handle: operation.handle, start, bytes: operation.bytes })
    }

    /// Length of the slab in bytes.
    pub fn slab_bytes(&self) -> u64 {
        lock(&self.0.machine).slab_bytes()
    }

    /// Bytes that are lent, fenced ones included.
    pub fn lent_bytes(&self) -> u64 {
        lock(&self.0.machine).lent_bytes()
    }
}

impl fmt::Debug for AccessTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = lock(&self.0.machine);
        f.debug_struct("AccessTable").field("bytes", &machine.slab_bytes()).field("lent", &machine.lent_bytes()).finish()
    }
}

/// An operation that was let in. Dropping it says that it has finished.
#[derive(Debug)]
pub struct Pass {
    table: AccessTable,
    handle: Handle,
    start: u64,
    bytes: u64,
}

impl Pass {
    /// Where in the slab the operation may begin, in bytes.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// How many bytes it may touch.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        lock(&self.table.0.machine).finish(self.handle);
        self.table.0.finished.notify_all();
    }
}
