//! The links that a provider has made, for as long as they live.

use std::sync::{Arc, Mutex, Weak};

use crate::link::{Link, lock};

/// A link that can be asked, without much ado, whether it has ended.
pub(super) trait Living: Link {
    /// Whether it has.
    fn has_ended(&self) -> bool;
}

/// A provider's links. It keeps none of them alive.
pub(super) struct Links<L>(Mutex<Vec<Weak<L>>>);

impl<L> Default for Links<L> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<L: Living> Links<L> {
    /// Notes a link, so that it is kept alive by the provider's keep-alives and ends with it.
    pub(super) fn add(&self, link: &Arc<L>) {
        lock(&self.0).push(Arc::downgrade(link));
    }

    /// All that have not ended. The others are forgotten.
    pub(super) fn living(&self) -> Vec<Arc<L>> {
        let mut links = lock(&self.0);
        let living: Vec<_> = links.iter().filter_map(Weak::upgrade).filter(|link| !link.has_ended()).collect();
        if living.len() < links.len() {
            *links = living.iter().map(Arc::downgrade).collect();
        }
        living
    }
}
