//! How much of a device is given to windows: queue pairs are few, and what is registered is locked in memory.

use std::sync::{Arc, Mutex};

use crate::link::lock;

/// What is open on one device, and may be.
#[derive(Debug, Clone)]
pub(in crate::provider::verbs) struct Rooms {
    taken: Arc<Mutex<Taken>>,
    windows_max: usize,
    bytes_max: u64,
}

#[derive(Debug, Default)]
struct Taken {
    windows: usize,
    bytes: u64,
}

/// A window's place. Dropping it frees it.
#[derive(Debug)]
pub(super) struct Room {
    taken: Arc<Mutex<Taken>>,
    bytes: u64,
}

impl Rooms {
    pub(in crate::provider::verbs) fn new(windows_max: usize, bytes_max: u64) -> Self {
        Self { taken: Arc::default(), windows_max, bytes_max }
    }

    /// A place for so many bytes, if there is one.
    pub(super) fn take(&self, bytes: u64) -> Option<Room> {
        let mut taken = lock(&self.taken);
        let sum = taken.bytes.checked_add(bytes).filter(|sum| *sum <= self.bytes_max)?;
        if taken.windows >= self.windows_max {
            return None;
        }
        taken.windows += 1;
        taken.bytes = sum;
        Some(Room { taken: Arc::clone(&self.taken), bytes })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut taken = lock(&self.taken);
        taken.windows -= 1;
        taken.bytes -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_windows_nor_bytes_are_more_than_there_may_be() {
        let rooms = Rooms::new(3, 100);
        let first = rooms.take(60).unwrap();
        assert!(rooms.take(41).is_none() && rooms.take(u64::MAX).is_none());
        let more = [rooms.take(40).unwrap(), rooms.take(0).unwrap()];
        assert!(rooms.take(0).is_none(), "a fourth");
        drop(first);
        let _again = rooms.take(60).unwrap();
        drop(more);
    }
}
