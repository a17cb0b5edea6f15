//! Which news travel with the next message.

use std::collections::BTreeMap;

use super::message::{GOSSIP_MAX, Update};
use crate::ids::NodeId;

/// How often a piece of news is passed on, times the logarithm of the cluster's size (SWIM, section 4.1, calls it λ).
const REPEAT: u32 = 3;

/// News that are not yet passed on often enough. At most one about each node.
#[derive(Debug, Default)]
pub(crate) struct Gossip {
    news: BTreeMap<NodeId, (u32, Update)>,
}

impl Gossip {
    /// Spreads `update`, which supersedes older news about its node.
    pub(crate) fn push(&mut self, update: Update) {
        self.news.insert(update.node, (0, update));
    }

    /// News for one message to one peer of a cluster of `members`, the freshest first.
    pub(crate) fn take(&mut self, members: usize) -> Vec<Update> {
        if self.news.is_empty() {
            return Vec::new();
        }
        let mut order: Vec<(u32, NodeId)> = self.news.iter().map(|(node, (sent, _))| (*sent, *node)).collect();
        order.sort_unstable();
        order.truncate(GOSSIP_MAX);
        let budget = REPEAT * (usize::BITS - members.leading_zeros()).max(1);
        let mut updates = Vec::with_capacity(order.len());
        for (_, node) in order {
            if let Some((sent, update)) = self.news.get_mut(&node) {
                updates.push(*update);
                *sent += 1;
                if *sent >= budget {
                    self.news.remove(&node);
                }
            }
        }
        updates
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Incarnation;
    use crate::membership::MemberState;

    fn update(node: u8, version: u32) -> Update {
        Update { node: NodeId([node; 32]), incarnation: Incarnation(1), version, state: MemberState::Alive, revision: 0 }
    }

    #[test]
    fn news_are_passed_on_about_three_log_n_times_and_the_freshest_first() {
        let mut gossip = Gossip::default();
        gossip.push(update(1, 0));
        assert_eq!(gossip.take(100).len(), 1);
        for node in 2..=30 {
            gossip.push(update(node, 0));
        }
        let next = gossip.take(100);
        assert_eq!(next.len(), GOSSIP_MAX);
        assert!(!next.contains(&update(1, 0)), "what was sent already waits");
        let mut gossip = Gossip::default();
        gossip.push(update(1, 0));
        gossip.push(update(1, 1));
        let times =
            std::iter::from_fn(|| Some(gossip.take(100)).filter(|news| !news.is_empty())).inspect(|news| assert_eq!(news, &[update(1, 1)]));
        assert_eq!(times.count(), 21);
    }
}
