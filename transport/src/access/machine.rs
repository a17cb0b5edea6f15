//! The rules of an access table, without clock, locks or chance.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Handle;
use crate::env::Instant;
use crate::frame::TermTag;

/// What a lease's holder may do from afar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rights {
    /// Read the bytes.
    pub read: bool,
    /// Write them.
    pub write: bool,
}

impl Rights {
    /// Both.
    pub const ALL: Self = Self { read: true, write: true };
}

/// A lease, as far as access goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// Who holds it: the public key that its control connection proved.
    pub holder: [u8; 32],
    /// Where in the slab it begins, in bytes.
    pub start: u64,
    /// How long it is, in bytes; at least 1.
    pub bytes: u64,
    /// What may be done.
    pub rights: Rights,
    /// The oldest term under which it may be used.
    pub term: TermTag,
    /// When it ends, on the owner's clock.
    pub deadline: Instant,
}

/// Why a range cannot be lent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// It is empty, or reaches past the end of the slab.
    #[error("a lease of {bytes} bytes at {start} does not lie in the slab of {slab_bytes} bytes")]
    Bounds {
        /// Where it was to begin.
        start: u64,
        /// How long it was to be.
        bytes: u64,
        /// Length of the slab.
        slab_bytes: u64,
    },
    /// Part of it is lent, or fenced and not yet free.
    #[error("bytes {start} to {end} are lent to {other:?} or not yet free of it")]
    Taken {
        /// Where the other lease begins.
        start: u64,
        /// Where it ends.
        end: u64,
        /// Its handle.
        other: Handle,
    },
    /// It does not begin at a page, and a page cannot be lent to two.
    #[error("a lease at {start} does not begin at a multiple of {unit} bytes")]
    Unaligned {
        /// Where it was to begin.
        start: u64,
        /// What leases begin at multiples of.
        unit: u64,
    },
    /// Memory of ended leases is still mapped by who held them, and what is left is not enough.
    #[error(
        "a lease of {bytes} bytes does not fit beside {lent} bytes that are lent and {retired} that earlier holders still have mapped; \
         it will when they give them up, or end"
    )]
    Charged {
        /// How long it was to be.
        bytes: u64,
        /// What is lent.
        lent: u64,
        /// What is not lent any more and not free yet.
        retired: u64,
    },
    /// The machine has no memory for it.
    #[error("no memory for a lease: {0}")]
    Memory(String),
    /// The handle is in use, which does not happen to random ones.
    #[error("{handle:?} is in use")]
    Handle {
        /// Which.
        handle: Handle,
    },
}

/// A remote read or write that asks to be let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operation {
    /// The lease, as the peer names it.
    pub handle: Handle,
    /// Who asks: the public key of the peer at the other end of the link.
    pub peer: [u8; 32],
    /// The term that it acts under.
    pub term: TermTag,
    /// `Some(generation)` for a write. A holder raises the generation when it changes links, so that a write that is late
    /// on an old one cannot overwrite a newer one.
    pub write: Option<u64>,
    /// Where it begins, in bytes from the start of the lease.
    pub offset: u64,
    /// How long it is, in bytes.
    pub bytes: u64,
}

/// Which check an operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Denied {
    /// No lease has this handle.
    #[error("no lease has this handle")]
    Unknown,
    /// The lease belongs to somebody else.
    #[error("the lease belongs to another node")]
    Holder,
    /// It was revoked.
    #[error("the lease was revoked")]
    Fenced,
    /// It has run out.
    #[error("the lease has run out")]
    Expired,
    /// The peer acts under a term that has been superseded.
    #[error("the peer acts under a term that has been superseded")]
    Term,
    /// The lease does not allow it.
    #[error("the lease does not allow this operation")]
    Rights,
    /// It reaches outside the lease.
    #[error("the operation reaches outside the lease")]
    Bounds,
    /// A write of an older generation.
    #[error("the write is of a generation that has been superseded")]
    Generation,
    /// More operations at once than can be counted.
    #[error("too many operations are under way")]
    TooMany,
}

#[derive(Debug, Clone)]
struct Entry {
    grant: Grant,
    generation: u64,
    in_flight: u32,
    fenced: bool,
}

impl Entry {
    /// What the lease takes of the slab: whole units.
    fn range(&self, unit: u64) -> Range<u64> {
        self.grant.start..self.grant.start + self.grant.bytes.next_multiple_of(unit)
    }
}

/// What became of a revoked lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// Nothing is inside any more: the range is free.
    Freed,
    /// This many operations are still inside.
    InFlight(u32),
    /// There is no such lease.
    Unknown,
}

/// The table's state.
#[derive(Debug, Clone)]
pub struct AccessMachine {
    slab_bytes: u64,
    /// Leases begin at multiples of this, and take whole ones.
    unit: u64,
    entries: BTreeMap<Handle, Entry>,
    /// Where lent ranges begin.
    starts: BTreeMap<u64, Handle>,
    /// Memory of ended leases that somebody still has mapped: bytes by number.
    retired: BTreeMap<u64, u64>,
    last_retired: u64,
}

impl AccessMachine {
    /// An empty table for a slab of `slab_bytes`, of which whole multiples of `unit` bytes are lent: the machine's pages.
    pub fn new(slab_bytes: u64, unit: u64) -> Self {
        // Longer than any memory, and short enough to be rounded up.
        let slab_bytes = slab_bytes.min(u64::MAX / 4);
        let unit = unit.clamp(1, u64::MAX / 4);
        Self { slab_bytes, unit, entries: BTreeMap::new(), starts: BTreeMap::new(), retired: BTreeMap::new(), last_retired: 0 }
    }

    /// Lends a range under a handle.
    ///
    /// # Errors
    /// [`GrantError`] if the range is not all free.
    pub fn grant(&mut self, handle: Handle, grant: Grant) -> Result<(), GrantError> {
        let Grant { start, bytes, .. } = grant;
        let inside = start.checked_add(bytes).is_some_and(|end| bytes > 0 && end <= self.slab_bytes);
        if !inside {
            return Err(GrantError::Bounds { start, bytes, slab_bytes: self.slab_bytes });
        }
        if !start.is_multiple_of(self.unit) {
            return Err(GrantError::Unaligned { start, unit: self.unit });
        }
        if self.entries.contains_key(&handle) {
            return Err(GrantError::Handle { handle });
        }
        let taken = bytes.next_multiple_of(self.unit);
        // Ranges do not overlap, so the last one that begins before the end is the only one that can reach into this one,
        // unless it ends before; then no earlier one reaches further.
        if let Some((_, other)) = self.starts.range(..start + taken).next_back()
            && let Some(range) = self.entries.get(other).map(|entry| entry.range(self.unit))
            && range.end > start
        {
            return Err(GrantError::Taken { start: range.start, end: range.end, other: *other });
        }
        let (lent, retired) = (self.lent_bytes(), self.retired_bytes());
        if retired > 0 && lent.saturating_add(retired).saturating_add(taken) > self.slab_bytes.next_multiple_of(self.unit) {
            return Err(GrantError::Charged { bytes, lent, retired });
        }
        self.starts.insert(start, handle);
        self.entries.insert(handle, Entry { grant, generation: 0, in_flight: 0, fenced: false });
        Ok(())
    }

    /// Moves a deadline; `false` if there is no such lease or it is fenced.
    pub fn renew(&mut self, handle: Handle, deadline: Instant) -> bool {
        let Some(entry) = self.entries.get_mut(&handle).filter(|entry| !entry.fenced) else { return false };
        entry.grant.deadline = deadline;
        true
    }

    /// Raises the oldest accepted term, never lowers it; `false` if there is no such lease or it is fenced.
    pub fn raise_term(&mut self, handle: Handle, term: TermTag) -> bool {
        let Some(entry) = self.entries.get_mut(&handle).filter(|entry| !entry.fenced) else { return false };
        entry.grant.term = entry.grant.term.max(term);
        true
    }

    /// Lets an operation in and counts it, and says where in the slab it begins. A write of a later generation than any before is
    /// admitted as every other; [`AccessMachine::generation`] is later then.
    ///
    /// # Errors
    /// [`Denied`].
    pub fn admit(&mut self, now: Instant, operation: Operation) -> Result<u64, Denied> {
        let entry = self.entries.get_mut(&operation.handle).ok_or(Denied::Unknown)?;
        let grant = &entry.grant;
        // Whose it is comes first: another node learns nothing about the state of a lease that is not its own.
        if grant.holder != operation.peer {
            return Err(Denied::Holder);
        }
        if entry.fenced {
            return Err(Denied::Fenced);
        }
        if now >= grant.deadline {
            return Err(Denied::Expired);
        }
        if operation.term < grant.term {
            return Err(Denied::Term);
        }
        let allowed = if operation.write.is_some() { grant.rights.write } else { grant.rights.read };
        if !allowed {
            return Err(Denied::Rights);
        }
        let end = operation.offset.checked_add(operation.bytes);
        if end.is_none_or(|end| end > grant.bytes) {
            return Err(Denied::Bounds);
        }
        if operation.write.is_some_and(|generation| generation < entry.generation) {
            return Err(Denied::Generation);
        }
        entry.in_flight = entry.in_flight.checked_add(1).ok_or(Denied::TooMany)?;
        entry.generation = operation.write.unwrap_or(0).max(entry.generation);
        Ok(grant.start + operation.offset)
    }

    /// The latest generation of writes that was let in.
    pub fn generation(&self, handle: Handle) -> u64 {
        self.entries.get(&handle).map_or(0, |entry| entry.generation)
    }

    /// An operation that was let in has finished.
    pub fn finish(&mut self, handle: Handle) {
        if let Some(entry) = self.entries.get_mut(&handle) {
            entry.in_flight = entry.in_flight.saturating_sub(1);
        }
    }

    /// Lets nothing more in.
    pub fn fence(&mut self, handle: Handle) {
        if let Some(entry) = self.entries.get_mut(&handle) {
            entry.fenced = true;
        }
    }

    /// Frees a fenced lease if nothing is inside any more.
    pub fn settle(&mut self, handle: Handle) -> Settled {
        let Some(entry) = self.entries.get(&handle) else { return Settled::Unknown };
        if !entry.fenced || entry.in_flight > 0 {
            return Settled::InFlight(entry.in_flight);
        }
        self.starts.remove(&entry.grant.start);
        self.entries.remove(&handle);
        Settled::Freed
    }

    /// Charges memory that was lent and is still mapped by who held it, and gives the number under which it is charged.
    pub fn retire(&mut self, bytes: u64) -> u64 {
        self.last_retired += 1;
        self.retired.insert(self.last_retired, bytes.min(u64::MAX / 4).next_multiple_of(self.unit));
        self.last_retired
    }

    /// Nobody has it mapped any more.
    pub fn forget(&mut self, retired: u64) {
        self.retired.remove(&retired);
    }

    /// Bytes of ended leases that somebody still has mapped.
    pub fn retired_bytes(&self) -> u64 {
        self.retired.values().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// What a lease was granted as, with the terms that hold now.
    pub fn grant_of(&self, handle: Handle) -> Option<&Grant> {
        self.entries.get(&handle).map(|entry| &entry.grant)
    }

    /// Length of the slab in bytes.
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    /// Bytes that are lent, fenced ones included, in whole units.
    pub fn lent_bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.grant.bytes.next_multiple_of(self.unit)).sum()
    }
}
