//! Which instances there are, as their members would know it from the journal. Nobody asks it who is right: that is
//! for the owners of the memory to say.

use std::collections::BTreeMap;

use shoal_actors::ids::{InstanceId, LeaseId, NodeId, Term};

/// An instance without a model.
#[derive(Debug, Clone)]
pub(super) struct Instance {
    /// Under which term it is held, and by whom.
    pub(super) term: Term,
    /// Who may take it over.
    pub(super) members: Vec<NodeId>,
    /// Its leases and their owners.
    pub(super) leases: Vec<(NodeId, LeaseId)>,
}

/// All instances.
#[derive(Debug, Default)]
pub(super) struct Registry {
    pub(super) instances: BTreeMap<InstanceId, Instance>,
}

impl Registry {
    /// The instances that `member` may take over from `holder`.
    pub(super) fn left_by(&self, holder: NodeId, member: NodeId) -> Vec<InstanceId> {
        let orphaned = |instance: &Instance| instance.term.node == holder && instance.members.contains(&member);
        self.instances.iter().filter(|(_, instance)| orphaned(instance)).map(|(id, _)| *id).collect()
    }
}
