//! When nobody wants memory any more, all of it is soon free.

use std::time::Duration;

use super::{Invariant, Scene};
use crate::world::nanos;

/// From a while after everybody has given everything back on, no node has anything lent.
#[derive(Debug)]
pub struct MemoryComesBack {
    within: u64,
    applies: bool,
}

impl MemoryComesBack {
    /// The owners get `within` to notice.
    pub fn new(within: Duration) -> Self {
        Self { within: nanos(within), applies: false }
    }
}

impl Invariant for MemoryComesBack {
    fn name(&self) -> &'static str {
        "memory comes back"
    }

    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String> {
        if scene.phases.closed_since.is_none_or(|since| scene.now < since + self.within) {
            return Ok(());
        }
        match scene.since(&mut self.applies, scene.books).into_iter().find(|node| node.used > 0) {
            Some(node) => Err(format!("node {} still lends {:?}", node.number, node.lent)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::scene::tests::Made;
    use super::*;

    #[test]
    fn nothing_stays_lent() {
        let (mut made, mut invariant) = (Made::new(2), MemoryComesBack::new(Duration::from_nanos(50)));
        made.lend(0, 7, 1, 10);
        made.now = 1000;
        made.check(&mut invariant, &[0, 1]).unwrap();
        made.phases.closed_since = Some(1000);
        made.now = 1049;
        made.check(&mut invariant, &[0, 1]).unwrap();
        // The moment has come, and the node has not changed.
        made.now = 1050;
        let why = made.check(&mut invariant, &[]).unwrap_err();
        assert!(why.contains("node 0 still lends"), "{why}");
    }

    #[test]
    fn what_came_back_stays() {
        let (mut made, mut invariant) = (Made::new(2), MemoryComesBack::new(Duration::ZERO));
        made.phases.closed_since = Some(0);
        made.check(&mut invariant, &[]).unwrap();
        made.lend(1, 7, 0, 10);
        made.check(&mut invariant, &[1]).unwrap_err();
    }
}
