//! Nobody waits for ever.

use std::time::Duration;

use super::{Invariant, Scene};
use crate::world::nanos;

/// A request ends in so much time, well or not, if the node that asked lives that long.
#[derive(Debug)]
pub struct RequestsEnd {
    within: u64,
}

impl RequestsEnd {
    /// Requests may take `within`.
    pub fn new(within: Duration) -> Self {
        Self { within: nanos(within) }
    }
}

impl Invariant for RequestsEnd {
    fn name(&self) -> &'static str {
        "requests end"
    }

    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String> {
        for (request, open) in &scene.served.open {
            let lives = scene.nodes.get(&open.number).is_some_and(|node| node.life == open.life);
            if lives && scene.now.saturating_sub(open.since) > self.within {
                let waited = Duration::from_nanos(scene.now - open.since);
                return Err(format!("node {} waits for request {request:?} since {waited:?}", open.number));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shoal_actors::ids::RequestId;

    use super::super::OpenRequest;
    use super::super::scene::tests::Made;
    use super::*;

    #[test]
    fn those_who_live_do_not_wait_longer() {
        let (mut made, mut invariant) = (Made::new(2), RequestsEnd::new(Duration::from_nanos(10)));
        made.served.open.insert(RequestId(1), OpenRequest { number: 1, life: 1, since: 100 });
        made.now = 110;
        made.check(&mut invariant, &[]).unwrap();
        made.now = 111;
        let why = made.check(&mut invariant, &[]).unwrap_err();
        assert!(why.contains("node 1 waits"), "{why}");
        made.node(1).life = 7;
        made.check(&mut invariant, &[]).unwrap();
        made.nodes.remove(&1);
        made.check(&mut invariant, &[]).unwrap();
    }
}
