//! How many links a device carries: asking some devices for one too many makes them refuse for good.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::device::VerbsError;

/// The links of one device.
#[derive(Debug, Default, Clone)]
pub(super) struct Seats(Arc<AtomicUsize>);

/// A link's place. Dropping it frees it, which must come after its queue pair is gone.
#[derive(Debug)]
pub(super) struct Seat(Arc<AtomicUsize>);

impl Seats {
    /// Takes a place, of at most `limit`.
    pub(super) fn take(&self, device: &str, limit: usize) -> Result<Seat, VerbsError> {
        let one_more = |taken: usize| (taken < limit).then(|| taken + 1);
        match self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more) {
            Ok(_) => Ok(Seat(Arc::clone(&self.0))),
            Err(_) => Err(VerbsError::Full { device: device.to_owned(), limit }),
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_as_there_are() {
        let seats = Seats::default();
        let mut taken: Vec<_> = (0..3).map(|_| seats.take("x", 3).unwrap()).collect();
        assert!(matches!(seats.take("x", 3), Err(VerbsError::Full { limit: 3, .. })));
        taken.pop();
        seats.take("x", 3).unwrap();
    }
}
