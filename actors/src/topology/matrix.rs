//! What is known of the links, as a snapshot.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ids::NodeId;

/// What was measured from one node to another.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LinkMeasure {
    /// A small message there and back, smoothed, at the control network.
    pub rtt: Duration,
    /// Bytes a second through the control network, if it was measured: a lower bound for what tensor links reach.
    pub bytes_per_second: Option<f64>,
}

impl LinkMeasure {
    /// Whether the figures make sense; those of peers may not.
    pub(super) fn is_sane(&self) -> bool {
        self.rtt <= Duration::from_secs(60) && self.bytes_per_second.is_none_or(|rate| rate.is_finite() && rate >= 1.0)
    }
}

/// The links that are known, by direction: (who measured, to whom). A snapshot: it never changes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LinkMatrix {
    pub(super) links: BTreeMap<(NodeId, NodeId), LinkMeasure>,
}

impl LinkMatrix {
    /// What is known between two nodes, whoever measured it: of two measurements the shorter time and the larger rate,
    /// as what disturbs a measurement makes it worse and never better.
    pub fn between(&self, one: NodeId, other: NodeId) -> Option<LinkMeasure> {
        let there = self.links.get(&(one, other));
        let back = self.links.get(&(other, one));
        match (there, back) {
            (Some(a), Some(b)) => {
                let rates = [a.bytes_per_second, b.bytes_per_second].into_iter().flatten();
                Some(LinkMeasure { rtt: a.rtt.min(b.rtt), bytes_per_second: rates.reduce(f64::max) })
            }
            (one, other) => one.or(other).copied(),
        }
    }

    /// All that was measured: who, to whom, what.
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, NodeId, LinkMeasure)> + '_ {
        self.links.iter().map(|((from, to), measure)| (*from, *to, *measure))
    }
}
