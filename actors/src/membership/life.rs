//! Drawing a node's incarnation.

use std::io;

use crate::env::{Rng, Storage};
use crate::ids::Incarnation;

/// Name of the file that counts the node's lives.
const FILE: &str = "lives";

/// Why a node got no incarnation.
#[derive(Debug, thiserror::Error)]
#[error(
    "the file `{FILE}` in the node's folder cannot be read or written: {source}; a node cannot start without it, or its peers would take it for its former self"
)]
pub struct LifeError {
    /// The system's words.
    #[from]
    source: io::Error,
}

/// Draws the incarnation of a start: later than all before it, so that peers can tell the new life from the old.
///
/// The upper half counts starts, the lower is random, so that two processes that were started from copies of one
/// folder do not share one.
///
/// # Errors
/// If the count cannot be kept.
pub fn next_incarnation(storage: &dyn Storage, rng: &dyn Rng) -> Result<Incarnation, LifeError> {
    let content = storage.read(FILE)?;
    // A damaged count starts over. Peers that remember a later life then say so (see `Superseded` in the log).
    let last = content.and_then(|content| content.try_into().ok()).map_or(0, u32::from_le_bytes);
    let next = last.saturating_add(1);
    storage.write(FILE, &next.to_le_bytes(), false)?;
    Ok(Incarnation(u64::from(next) << 32 | (rng.next_u64("incarnation") & 0xffff_ffff)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::{MemoryStorage, SystemRng};

    #[test]
    fn each_life_is_later_than_the_last() {
        let storage = MemoryStorage::default();
        let lives: Vec<Incarnation> = (0..5).map(|_| next_incarnation(&storage, &SystemRng).unwrap()).collect();
        assert!(lives.windows(2).all(|pair| pair[0] < pair[1]), "{lives:?}");
    }
}
