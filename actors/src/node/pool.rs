//! Memory of the cluster for programs that embed a node.

use std::time::Duration;

use crate::ids::{LeaseId, NodeId};
use crate::lease::{AcquireError, Grant, LeaseKeeper, LeaseReply, LeaseRequest, LeaseSpec, LeaseView, Leases, size};
use crate::membership::ClusterView;
use crate::region::{REGION_UNIT, RegionClient, RegionError};

use super::Node;

/// How long an owner may take to tell what it lends.
const TELL_MAX: Duration = Duration::from_secs(3);

/// Why memory was not lent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseFailure {
    /// Nobody has as much free as was asked for.
    #[error("no node has {} free: the most are {}; start another node, raise --memory, or lease less at a time", size(*asked), size(*most))]
    NobodyHas {
        /// Bytes asked for.
        asked: u64,
        /// The most that any node has free.
        most: u64,
    },
    /// An owner refused, or could not be asked.
    #[error(transparent)]
    Refused(#[from] AcquireError),
}

/// The memory of the cluster, as a program leases it under a name. See [`Node::pool`].
#[derive(Debug, Clone)]
pub struct Pool {
    node: Node,
    name: String,
}

impl Pool {
    pub(super) fn new(node: Node, name: String) -> Self {
        Self { node, name }
    }

    /// Leases at least so many bytes from a node, or from whichever has the most free: whole multiples of [`REGION_UNIT`]. The lease is
    /// renewed until it is released or dropped.
    ///
    /// # Errors
    /// [`LeaseFailure`] says who refused and why.
    pub async fn lease(&self, bytes: u64, from: Option<NodeId>) -> Result<UserLease, LeaseFailure> {
        let owners = match from {
            Some(owner) => vec![owner],
            None => lenders(&self.node.view(), bytes)?,
        };
        let bytes = whole_units(bytes);
        let mut failure = None;
        // Cards are hints: who is thought to have enough may have lent it a moment ago.
        for owner in owners {
            let id = LeaseId::random(&*self.node.env().rng);
            let spec = LeaseSpec::user(id, self.node.id(), self.name.clone(), bytes);
            match self.node.keeper().acquire_all(vec![(owner, spec)]).await {
                Ok(grants) => {
                    let Some(grant) = grants.into_iter().next() else { return Err(AcquireError::Stopped.into()) };
                    return Ok(UserLease::new(&self.node, grant));
                }
                Err(error) => failure = Some(error),
            }
        }
        Err(failure.unwrap_or(AcquireError::Stopped).into())
    }
}

fn whole_units(bytes: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(REGION_UNIT).unwrap_or(bytes)
}

/// What every member of the cluster that is there lends, in order of their ids: each owner's own word, or why there is none.
pub(super) async fn lending(node: &Node) -> Vec<(NodeId, Result<LeaseView, String>)> {
    let view = node.view();
    let asked = view.alive().map(|(owner, _)| owner).map(|owner| async move {
        let told = node.remote::<Leases>(owner).call(LeaseRequest::List, TELL_MAX).await;
        let told = match told {
            Ok(LeaseReply::View(view)) => Ok(view),
            Ok(_) => Err("its answer does not fit the question".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        (owner, told)
    });
    futures::future::join_all(asked).await
}

/// Who could lend so much, the one with the most first.
fn lenders(view: &ClusterView, bytes: u64) -> Result<Vec<NodeId>, LeaseFailure> {
    let mut free: Vec<(u64, NodeId)> = view.alive().map(|(node, member)| (member.card.memory_free_bytes, node)).collect();
    free.sort_by_key(|(free, node)| (std::cmp::Reverse(*free), *node));
    let most = free.first().map_or(0, |(free, _)| *free);
    free.retain(|(free, _)| *free >= whole_units(bytes));
    if free.is_empty() {
        return Err(LeaseFailure::NobodyHas { asked: bytes, most });
    }
    Ok(free.into_iter().map(|(_, node)| node).collect())
}

/// Memory of a node, lent to this one. It goes back when this is dropped; [`UserLease::release`] also waits until the
/// owner knows.
#[derive(Debug)]
pub struct UserLease {
    keeper: LeaseKeeper,
    grant: Grant,
    region: RegionClient,
}

impl UserLease {
    fn new(node: &Node, grant: Grant) -> Self {
        let keeper = node.keeper().clone();
        let region = RegionClient::new(node.services().clone(), node.tensor_links().clone(), keeper.clone(), grant.clone());
        Self { keeper, grant, region }
    }

    /// Writes `bytes` at `offset`, in bytes from the start of the lease. When it returns, they are in the owner's memory. Over shared
    /// memory where the owner is a process of this machine, else over the network; a link that fails is made again.
    ///
    /// # Errors
    /// [`RegionError`]; of the bytes, some may have been written.
    pub async fn put(&self, offset: u64, bytes: impl Into<Vec<u8>>) -> Result<(), RegionError> {
        self.region.put(offset, bytes.into()).await
    }

    /// Reads so many bytes from `offset` on. What nobody has written is zero.
    ///
    /// # Errors
    /// [`RegionError`].
    pub async fn get(&self, offset: u64, bytes: usize) -> Result<Vec<u8>, RegionError> {
        self.region.get(offset, bytes).await
    }

    /// Its name.
    pub fn id(&self) -> LeaseId {
        self.grant.lease
    }

    /// Whose memory it is.
    pub fn owner(&self) -> NodeId {
        self.grant.owner
    }

    /// How much, in bytes: what was asked for, or somewhat more.
    pub fn bytes(&self) -> u64 {
        self.grant.bytes
    }

    /// What proves the right to it, to show to whoever serves the memory.
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Whether it may be used at this moment. Once it may not, e.g. because its owner died, it never may again.
    pub fn is_usable(&self) -> bool {
        self.keeper.may_use(self.grant.lease)
    }

    /// Gives it back. Resolves when its owner has heard it, or after a few seconds; the node goes on trying by itself.
    pub async fn release(self) {
        let back = self.keeper.release(&[self.grant.lease]);
        drop(self);
        back.await;
    }
}

impl Drop for UserLease {
    fn drop(&mut self) {
        // Asked for at once; nobody needs to wait for the answer.
        drop(self.keeper.release(&[self.grant.lease]));
    }
}
