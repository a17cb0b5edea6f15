//! So many at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A bounded number of places. Every clone hands out the same ones.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    most: usize,
    taken: Arc<AtomicUsize>,
}

/// A place, free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Place(Arc<AtomicUsize>);

impl Places {
    /// So many.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, taken: Arc::default() }
    }

    /// Takes one, if there is one.
    pub(crate) fn take(&self) -> Option<Place> {
        // Given back at once if there was none.
        let place = Place(Arc::clone(&self.taken));
        (self.taken.fetch_add(1, Ordering::AcqRel) < self.most).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_so_many_and_they_come_back() {
        let places = Places::new(2);
        let (first, second) = (places.take(), places.clone().take());
        assert!(first.is_some() && second.is_some());
        assert!(places.take().is_none() && places.take().is_none(), "asking in vain takes nothing");
        drop(first);
        assert!(places.take().is_some());
        drop(second);
        assert_eq!(places.taken.load(Ordering::Acquire), 0);
    }
}
