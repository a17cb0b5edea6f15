//! Turning a plan into a running pipeline: lease, load, link. All or nothing.

use std::sync::Arc;
use std::time::Duration;

use crate::card::ModelCard;
use crate::catalog::LocalModel;
use crate::env::{Env, TextModel};
use crate::ids::{InstanceId, LeaseId, NodeId, PlanEpoch, Term};
use crate::lease::{Beneficiary, Grant, LeaseKeeper, LeaseSpec, LeaseUse};
use crate::membership::Membership;
use crate::plan::{Plan, StagePlan};
use crate::scheduler::SchedulerConfig;
use crate::service::Services;
use crate::stage::message::{Tokens, step_bytes};
use crate::stage::pipes::{Connect, OpenPort, Pipes};
use crate::stage::port::{Port, PortPlan, PortSender};
use crate::stage::{LinkStage, LoadStage, LoadedStage, StageKey, StageReply, StageRequest, Stages};
use futures::future::join_all;

/// How long a node may take to load its layers.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);
/// How long a node may take to link a stage.
const LINK_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a node may take to drop a stage before its leases are taken back without its word. The next placing of the model waits
/// for this, and an owner fences a stage itself before it lends the memory again.
const UNLOAD_TIMEOUT: Duration = Duration::from_secs(2);
/// Room in a step message for the sequences that it opens and frees, in bytes.
const OPENS_BYTES: usize = 256 * 1024;
/// Sequences at once, whatever the memory: each has its sampler and its place in the page tables.
pub(super) const SEQUENCES_MAX: u32 = 64;
/// Requests that wait or run at once.
const REQUESTS_MAX: usize = 1024;

/// What assembling needs of the node.
#[derive(Clone)]
pub struct Ground {
    /// Seams.
    pub env: Env,
    /// This node, which will conduct.
    pub node: NodeId,
    /// Peers.
    pub services: Services,
    /// What pipelines run on.
    pub pipes: Arc<dyn Pipes>,
    /// Leases that this node holds.
    pub keeper: LeaseKeeper,
    /// Who is there.
    pub membership: Membership,
}

/// What is to be assembled.
#[derive(Clone)]
pub struct Order {
    /// The instance.
    pub instance: InstanceId,
    /// The term that it is conducted under.
    pub term: Term,
    /// The arrangement's number.
    pub epoch: PlanEpoch,
    /// The model on disk.
    pub model: LocalModel,
    /// Its sizes.
    pub card: ModelCard,
    /// Where its layers go.
    pub plan: Plan,
    /// Everybody who may conduct it.
    pub members: Vec<NodeId>,
}

impl Order {
    fn key(&self, stage: usize) -> StageKey {
        StageKey { instance: self.instance, term: self.term, epoch: self.epoch, stage: u32::try_from(stage).unwrap_or(u32::MAX) }
    }

    /// Who owns the memory of each lease of [`Order::specs`].
    fn owners(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.plan.stages.iter().flat_map(|stage| stage.memory.by_purpose().map(|_| stage.node))
    }

    /// The leases of all stages: one for each purpose of each.
    fn specs(&self, env: &Env) -> Vec<(NodeId, LeaseSpec)> {
        let spec = |stage: &StagePlan, purpose, bytes| LeaseSpec {
            id: LeaseId::random(&*env.rng),
            beneficiary: Beneficiary::Instance(self.instance),
            purpose,
            bytes,
            term: self.term,
            members: self.members.clone(),
            stage: Some(stage.layers.clone()),
        };
        self.plan
            .stages
            .iter()
            .flat_map(|stage| stage.memory.by_purpose().map(move |(purpose, bytes)| (stage.node, spec(stage, purpose, bytes))))
            .collect()
    }
}

/// A pipeline that runs as soon as its port is started.
pub struct Assembled {
    /// Leases that it stands on.
    pub leases: Vec<LeaseId>,
    /// Where steps go.
    pub sender: PortSender,
    /// The pipeline's ends.
    pub port: Port,
    /// Limits for the scheduler.
    pub config: SchedulerConfig,
    /// Tokenizer and template.
    pub text: Arc<dyn TextModel>,
}

/// Assembles, or undoes what it had done and says why.
///
/// # Errors
/// Words for the user: which node refused what, and why.
pub(super) async fn assemble(ground: &Ground, order: &Order, loading: &(dyn Fn() + Send + Sync)) -> Result<Assembled, String> {
    let specs = order.specs(&ground.env);
    let leases: Vec<LeaseId> = specs.iter().map(|(_, spec)| spec.id).collect();
    let grants = ground.keeper.acquire_all(specs).await.map_err(|error| error.to_string())?;
    loading();
    match build(ground, order, &grants).await {
        Ok((sender, port, config, text)) => Ok(Assembled { leases, sender, port, config, text }),
        Err(reason) => {
            take_down(ground, order, &leases).await;
            Err(reason)
        }
    }
}

/// Drops every stage and gives every lease back. Nodes that are gone are not waited for: their leases expire.
pub(super) async fn take_down(ground: &Ground, order: &Order, leases: &[LeaseId]) {
    let unload = |(index, stage): (usize, &StagePlan)| {
        let remote = ground.services.remote::<Stages>(stage.node);
        let request = StageRequest::Unload(order.key(index));
        let node = stage.node;
        async move {
            match ground.membership.while_present(node, remote.call(request, UNLOAD_TIMEOUT)).await {
                Some(Ok(_)) => {}
                Some(Err(error)) => {
                    tracing::debug!(target: "shoal::conductor", ?node, %error, "a stage was not unloaded; its leases expire")
                }
                None => tracing::debug!(target: "shoal::conductor", ?node, "the holder of a stage is gone; its leases expire"),
            }
        }
    };
    join_all(order.plan.stages.iter().enumerate().map(unload)).await;
    let view = ground.membership.view();
    // Leases come in the order of the stages.
    let (reachable, lost): (Vec<_>, Vec<_>) = order.owners().zip(leases.iter().copied()).partition(|(owner, _)| view.is_present(*owner));
    let ids = |leases: Vec<(NodeId, LeaseId)>| leases.into_iter().map(|(_, lease)| lease).collect::<Vec<_>>();
    // Asked for at once, answered perhaps never.
    drop(ground.keeper.release(&ids(lost)));
    ground.keeper.release(&ids(reachable)).await;
}

type Built = (PortSender, Port, SchedulerConfig, Arc<dyn TextModel>);

async fn build(ground: &Ground, order: &Order, grants: &[Grant]) -> Result<Built, String> {
    let stages = order.plan.stages.len();
    let rows_max = order.plan.rows_max;
    let hidden = order.card.hidden as usize;
    let slot = |hidden: usize| u32::try_from(step_bytes(rows_max as usize, hidden) + OPENS_BYTES).unwrap_or(u32::MAX);
    let token_bytes = u32::try_from(Tokens::bytes_max(rows_max.max(SEQUENCES_MAX) as usize)).unwrap_or(u32::MAX);
    // What goes into stage i; what comes out of the last one goes to the port.
    let slot_into = |stage: usize| if stage == 0 { slot(0) } else { slot(hidden) };

    let path = order.model.path.clone();
    let compute = Arc::clone(&ground.env.compute);
    let text = ground.env.blocking("shoal-text", move || compute.text(&path)).await?.map_err(|error| error.to_string())?;

    // Grants come in the order of the specs, which is the order of the stages.
    let mut left = grants.iter();
    let load = order.plan.stages.iter().enumerate().map(|(index, stage)| {
        let leases: Vec<LeaseUse> = stage.memory.by_purpose().filter_map(|_| left.next()).map(LeaseUse::from).collect();
        let from = if index == 0 { ground.node } else { order.plan.stages[index - 1].node };
        let request = LoadStage {
            key: order.key(index),
            from,
            slot_bytes: slot_into(index),
            model: order.model.name.clone(),
            sha256: order.model.sha256.clone(),
            layers: stage.layers.clone(),
            leases,
            kv_bytes: stage.memory.kv,
            rows_max,
            sequences_max: SEQUENCES_MAX,
            context_tokens: order.plan.context_tokens,
            members: order.members.clone(),
        };
        let remote = ground.services.remote::<Stages>(stage.node);
        let (node, name) = (stage.node, stage.name.clone());
        async move {
            match ground.membership.while_present(node, remote.call(StageRequest::Load(Box::new(request)), LOAD_TIMEOUT)).await {
                Some(Ok(Ok(StageReply::Loaded(loaded)))) => Ok(*loaded),
                Some(Ok(Ok(_))) => Err(format!("node {name} gave no answer to a load")),
                Some(Ok(Err(refusal))) => Err(format!("node {name} could not load its layers: {refusal}")),
                Some(Err(error)) => Err(format!("node {name} could not load its layers: {error}")),
                None => Err(format!("node {name} went away while it loaded its layers")),
            }
        }
    });
    let loaded: Vec<LoadedStage> = join_all(load.collect::<Vec<_>>()).await.into_iter().collect::<Result<_, _>>()?;
    if let Some((stage, odd)) =
        order.plan.stages.iter().zip(&loaded).find(|(_, l)| l.hidden != order.card.hidden || l.vocabulary != order.card.vocabulary)
    {
        return Err(format!("node {} loaded a model of another shape (hidden {}, vocabulary {})", stage.name, odd.hidden, odd.vocabulary));
    }

    let last = order.plan.stages.last().map_or(ground.node, |stage| stage.node);
    let OpenPort { endpoints, ticket, connect: open } = ground.pipes.port(last, token_bytes)?;
    let mut hops = Vec::new();
    for index in 0..stages {
        let after = loaded.get(index + 1);
        let link = LinkStage {
            key: order.key(index),
            to: order.plan.stages.get(index + 1).map_or(ground.node, |stage| stage.node),
            endpoints: after.map_or_else(|| endpoints.clone(), |l| l.endpoints.clone()),
            ticket: after.map_or_else(|| ticket.clone(), |l| l.ticket.clone()),
            slot_bytes: if after.is_some() { slot_into(index + 1) } else { token_bytes },
        };
        let StagePlan { node, name, .. } = order.plan.stages[index].clone();
        let remote = ground.services.remote::<Stages>(node);
        hops.push(async move {
            match ground.membership.while_present(node, remote.call(StageRequest::Link(Box::new(link)), LINK_TIMEOUT)).await {
                Some(Ok(Ok(_))) => Ok(()),
                Some(Ok(Err(refusal))) => Err(format!("node {name} could not link its stage: {refusal}")),
                Some(Err(error)) => Err(format!("node {name} could not link its stage: {error}")),
                None => Err(format!("node {name} went away while its stage was linked")),
            }
        });
    }
    let (sender, port) = {
        let connect = connect(order, &loaded, open, slot(0));
        let (hops, port) = futures::future::join(join_all(hops), connect).await;
        hops.into_iter().collect::<Result<Vec<()>, String>>()?;
        port?
    };
    let page_tokens = loaded.iter().map(|l| l.page_tokens).max().unwrap_or(1).max(1) as usize;
    let tokens = loaded.iter().map(|l| l.pages as usize * l.page_tokens as usize).min().unwrap_or(0);
    let config = SchedulerConfig {
        depth: stages,
        rows_max: rows_max as usize,
        // With several stages a prompt is cut so that they can work on it at the same time.
        chunk_rows: if stages == 1 { rows_max as usize } else { (rows_max as usize).min(128) },
        sequences_max: SEQUENCES_MAX as usize,
        pages: tokens / page_tokens,
        page_tokens,
        context_tokens: order.plan.context_tokens,
        requests_max: REQUESTS_MAX,
    };
    Ok((sender, port, config, text))
}

async fn connect(order: &Order, loaded: &[LoadedStage], open: Connect, step_bytes: u32) -> Result<(PortSender, Port), String> {
    let (Some(first), Some(stage)) = (loaded.first(), order.plan.stages.first()) else { return Err("the plan has no stages".to_owned()) };
    let plan = PortPlan {
        fence: order.key(0).fence(),
        first: stage.node,
        first_endpoints: first.endpoints.clone(),
        first_ticket: first.ticket.clone(),
        step_bytes,
        depth: loaded.len(),
    };
    open(plan).await
}
