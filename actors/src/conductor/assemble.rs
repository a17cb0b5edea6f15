//! Turning a plan into a running pipeline: lease, load, link. All or nothing.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::journal::{self, JournalStore};
use crate::card::{ModelCard, NodeCard};
use crate::catalog::LocalModel;
use crate::env::{Env, TextModel};
use crate::ids::{InstanceId, LeaseId, NodeId, PlanEpoch, Term};
use crate::lease::{Beneficiary, LeaseKeeper, LeaseSpec, LeaseUse};
use crate::membership::Membership;
use crate::plan::{Goal, LinkMatrix, Plan, StagePlan};
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
    /// How they are connected, as far as it was measured.
    pub links: Arc<dyn Fn() -> LinkMatrix + Send + Sync>,
    /// What this node remembers for others.
    pub journal: Arc<Mutex<JournalStore>>,
    /// Finds a model on this node's disk by its hash. May take a while.
    pub models: FindModel,
    /// How long a pipeline has stood at least before it goes over to a plan that is only better.
    pub replan_after: Duration,
}

impl Ground {
    /// The cards of the nodes that are there. This one has the model, even if it lies outside the models folder or its card is a
    /// moment old.
    pub(super) fn cards(&self, model: &LocalModel) -> Vec<NodeCard> {
        let view = self.membership.view();
        let mut cards: Vec<NodeCard> = view.alive().map(|(_, member)| (*member.card).clone()).collect();
        let own = cards.iter_mut().filter(|card| card.node == view.me && card.models.iter().all(|known| known.sha256 != model.sha256));
        own.for_each(|card| card.models.push(model.on_disk()));
        cards
    }

    /// Those who are there and about to leave: they are given nothing more.
    pub(super) fn leaving(&self) -> BTreeSet<NodeId> {
        self.membership.view().present().filter(|(_, member)| member.card.leaving).map(|(node, _)| node).collect()
    }

    /// Everybody who may conduct an instance whose stages are on `holders`. Who is about to leave only holds.
    pub(super) fn members(&self, holders: impl IntoIterator<Item = NodeId>) -> Vec<NodeId> {
        let view = self.membership.view();
        let stays = |node: &NodeId| !view.is_leaving(*node);
        let holders: Vec<NodeId> = holders.into_iter().filter(stays).collect();
        let others = std::iter::once(self.node).filter(stays).chain(view.staying().map(|(node, _)| node));
        journal::members(&holders, others)
    }
}

/// Finds a model on disk by its hash.
pub type FindModel = Arc<dyn Fn(&str) -> Option<LocalModel> + Send + Sync>;

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
    /// What it was placed for: where layers may go when some have to be placed again.
    pub goal: Goal,
    /// Where its layers go.
    pub plan: Plan,
    /// Everybody who may conduct it.
    pub members: Vec<NodeId>,
}

impl Order {
    pub(super) fn key(&self, stage: usize) -> StageKey {
        StageKey { instance: self.instance, term: self.term, epoch: self.epoch, stage: u32::try_from(stage).unwrap_or(u32::MAX) }
    }

    /// The leases of the stages that nothing pays for yet: one for each purpose of each.
    fn specs(&self, env: &Env, paid: &[Paid]) -> Vec<(NodeId, LeaseSpec)> {
        let spec = |stage: &StagePlan, purpose, bytes| LeaseSpec {
            id: LeaseId::random(&*env.rng),
            beneficiary: Beneficiary::Instance(self.instance),
            purpose,
            bytes,
            term: self.term,
            members: self.members.clone(),
            stage: Some(stage.layers.clone()),
        };
        self.unpaid(paid)
            .flat_map(|(_, stage)| stage.memory.by_purpose().map(move |(purpose, bytes)| (stage.node, spec(stage, purpose, bytes))))
            .collect()
    }

    /// The stages that nothing pays for yet.
    fn unpaid<'a>(&'a self, paid: &'a [Paid]) -> impl Iterator<Item = (usize, &'a StagePlan)> {
        self.plan.stages.iter().enumerate().filter(|(index, _)| paid.get(*index).is_none_or(Option::is_none))
    }
}

/// The leases of a stage that stands from an arrangement before, in the order of their purposes; `None` for a stage that is to be
/// leased and loaded.
pub(super) type Paid = Option<Vec<LeaseUse>>;

/// A pipeline that runs as soon as its port is started.
pub struct Assembled {
    /// Leases that its stages stand on, stage by stage.
    pub leases: Vec<Vec<LeaseUse>>,
    /// Where steps go.
    pub sender: PortSender,
    /// The pipeline's ends.
    pub port: Port,
    /// Limits for the scheduler.
    pub config: SchedulerConfig,
    /// Tokenizer and template.
    pub text: Arc<dyn TextModel>,
}

/// Why a pipeline was not assembled.
#[derive(Debug)]
pub(super) struct Failure {
    /// Words for the user: which node refused what, and why.
    pub(super) reason: String,
    /// The stages that failed.
    pub(super) stages: BTreeSet<usize>,
}

impl Failure {
    fn of(stage: usize, reason: String) -> Self {
        Self { reason, stages: BTreeSet::from([stage]) }
    }
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self { reason, stages: BTreeSet::new() }
    }
}

/// Ends what is being put together, from outside. Every clone is the same.
#[derive(Clone, Debug)]
pub(super) struct Cancel(tokio::sync::watch::Receiver<bool>);

impl Cancel {
    /// What ends it, and what is ended. Dropping the first ends it, too.
    pub(super) fn new() -> (tokio::sync::watch::Sender<bool>, Self) {
        let (send, receive) = tokio::sync::watch::channel(false);
        (send, Self(receive))
    }

    /// Whether it is over.
    pub(super) fn asked(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// What `work` comes to, or `None` as soon as nobody wants it; then it is dropped unfinished.
    pub(super) async fn unless<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut asked = self.0.clone();
        tokio::select! {
            biased;
            _ = asked.wait_for(|asked| *asked) => None,
            result = work => Some(result),
        }
    }
}

/// Leases of the stages of an arrangement, those that were paid for and those that are new.
pub(super) struct Leased {
    /// Stage by stage.
    pub(super) leases: Vec<Vec<LeaseUse>>,
    /// The new ones, with their owners.
    new: Vec<(NodeId, LeaseId)>,
}

/// Leases what is not paid for.
pub(super) async fn lease(ground: &Ground, order: &Order, paid: &[Paid]) -> Result<Leased, Failure> {
    let specs = order.specs(&ground.env, paid);
    let new = specs.iter().map(|(owner, spec)| (*owner, spec.id)).collect();
    let grants = if specs.is_empty() {
        Vec::new()
    } else {
        ground.keeper.acquire_all(specs).await.map_err(|error| {
            let owner = error.owner();
            let stages = order.unpaid(paid).filter(|(_, stage)| owner == Some(stage.node)).map(|(index, _)| index).collect();
            Failure { reason: error.to_string(), stages }
        })?
    };
    // Grants come in the order of the specs, which is the order of the stages.
    let mut left = grants.iter().map(LeaseUse::from);
    let leases = order.plan.stages.iter().enumerate().map(|(index, stage)| match paid.get(index) {
        Some(Some(paid)) => paid.clone(),
        _ => stage.memory.by_purpose().filter_map(|_| left.next()).collect(),
    });
    Ok(Leased { leases: leases.collect(), new })
}

impl Leased {
    /// Drops the stages that were not paid for before, and gives their leases back.
    pub(super) async fn undo(self, ground: &Ground, order: &Order, paid: &[Paid]) {
        let new: Vec<(NodeId, StageRequest)> =
            order.unpaid(paid).map(|(index, stage)| (stage.node, StageRequest::Unload(order.key(index)))).collect();
        unload(ground, new).await;
        give_back(ground, self.new).await;
    }
}

/// Assembles, or undoes what it had done and says why. Stages that are `paid` for are asked to take their places in this
/// arrangement, the others are leased and loaded. `text` is the model's tokenizer and template, if they are known.
///
/// # Errors
/// [`Failure`]; the leases that paid for stages before are held as before, whether or not their stages have moved.
pub(super) async fn assemble(
    ground: &Ground,
    order: &Order,
    paid: &[Paid],
    (text, cancel): (Option<Arc<dyn TextModel>>, &Cancel),
    loading: &(dyn Fn() + Send + Sync),
) -> Result<Assembled, Failure> {
    let cancelled = || Failure::from("it was unloaded".to_owned());
    let leased = cancel.unless(lease(ground, order, paid)).await.unwrap_or_else(|| Err(cancelled()))?;
    loading();
    match cancel.unless(build(ground, order, &leased.leases, text)).await.unwrap_or_else(|| Err(cancelled())) {
        Ok((sender, port, config, text)) => Ok(Assembled { leases: leased.leases, sender, port, config, text }),
        Err(failure) => {
            leased.undo(ground, order, paid).await;
            Err(failure)
        }
    }
}

/// Drops some stages of an arrangement, which are in it under these numbers, and gives their leases back.
pub(super) async fn drop_stages(ground: &Ground, order: &Order, stages: &[(usize, Vec<LeaseUse>)]) {
    let node = |index: usize| order.plan.stages.get(index).map(|stage| stage.node);
    let requests = stages.iter().filter_map(|(index, _)| Some((node(*index)?, StageRequest::Unload(order.key(*index)))));
    unload(ground, requests.collect()).await;
    let leases = stages.iter().filter_map(|(index, leases)| Some((node(*index)?, leases)));
    give_back(ground, leases.flat_map(|(node, leases)| leases.iter().map(move |lease| (node, lease.lease))).collect()).await;
}

/// Drops every stage of an arrangement and of those before it, and gives their leases back. Nodes that are gone are not waited for:
/// their leases expire.
pub(super) async fn take_down(ground: &Ground, order: &Order, leases: &[Vec<LeaseUse>]) {
    let nodes: BTreeSet<NodeId> = order.plan.nodes().collect();
    let all = StageRequest::UnloadAll { instance: order.instance, term: order.term };
    unload(ground, nodes.into_iter().map(|node| (node, all.clone())).collect()).await;
    let leases = order.plan.nodes().zip(leases).flat_map(|(node, leases)| leases.iter().map(move |lease| (node, lease.lease)));
    give_back(ground, leases.collect()).await;
}

async fn unload(ground: &Ground, requests: Vec<(NodeId, StageRequest)>) {
    let unload = |(node, request): (NodeId, StageRequest)| {
        let remote = ground.services.remote::<Stages>(node);
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
    join_all(requests.into_iter().map(unload)).await;
}

/// Gives leases back to their owners.
pub(super) async fn give_back(ground: &Ground, leases: Vec<(NodeId, LeaseId)>) {
    let view = ground.membership.view();
    // One that was killed is disconnected some time before it counts as gone.
    let answers = |owner: NodeId| view.get(owner).is_some_and(|member| member.state.is_present() && member.connected);
    let (reachable, lost): (Vec<_>, Vec<_>) = leases.into_iter().partition(|(owner, _)| answers(*owner));
    let ids = |leases: Vec<(NodeId, LeaseId)>| leases.into_iter().map(|(_, lease)| lease).collect::<Vec<_>>();
    // Asked for at once, answered perhaps never.
    drop(ground.keeper.release(&ids(lost)));
    ground.keeper.release(&ids(reachable)).await;
}

type Built = (PortSender, Port, SchedulerConfig, Arc<dyn TextModel>);

/// Longest message into a stage, in bytes; what comes out of the last one goes to the port.
fn slot_into(order: &Order, stage: usize) -> u32 {
    let hidden = if stage == 0 { 0 } else { order.card.hidden as usize };
    u32::try_from(step_bytes(order.plan.rows_max as usize, hidden) + OPENS_BYTES).unwrap_or(u32::MAX)
}

/// Has the holders load their stages, or give those that they have their places in this arrangement: all stages, or those that
/// `which` picks, in order.
pub(super) async fn load(
    ground: &Ground,
    order: &Order,
    leases: &[Vec<LeaseUse>],
    which: impl Fn(usize) -> bool,
) -> Result<Vec<LoadedStage>, Failure> {
    let rows_max = order.plan.rows_max;
    let picked: Vec<usize> = (0..order.plan.stages.len()).filter(|index| which(*index)).collect();
    let load = picked.iter().filter_map(|index| Some((*index, order.plan.stages.get(*index)?))).map(|(index, stage)| {
        let from = if index == 0 { ground.node } else { order.plan.stages[index - 1].node };
        let request = LoadStage {
            key: order.key(index),
            from,
            slot_bytes: slot_into(order, index),
            model: order.model.name.clone(),
            sha256: order.model.sha256.clone(),
            layers: stage.layers.clone(),
            leases: leases.get(index).cloned().unwrap_or_default(),
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
    let loaded: Vec<LoadedStage> = all(&picked, join_all(load.collect::<Vec<_>>()).await)?;
    let odd = |(_, l): &(&usize, &LoadedStage)| l.hidden != order.card.hidden || l.vocabulary != order.card.vocabulary;
    if let Some((index, odd)) = picked.iter().zip(&loaded).find(odd) {
        let name = &order.plan.stages[*index].name;
        let reason = format!("node {name} loaded a model of another shape (hidden {}, vocabulary {})", odd.hidden, odd.vocabulary);
        return Err(Failure::of(*index, reason));
    }
    Ok(loaded)
}

async fn build(ground: &Ground, order: &Order, leases: &[Vec<LeaseUse>], text: Option<Arc<dyn TextModel>>) -> Result<Built, Failure> {
    let stages = order.plan.stages.len();
    let rows_max = order.plan.rows_max;
    let token_bytes = u32::try_from(Tokens::bytes_max(rows_max.max(SEQUENCES_MAX) as usize)).unwrap_or(u32::MAX);
    let text = match text {
        Some(text) => text,
        None => {
            let (path, compute) = (order.model.path.clone(), Arc::clone(&ground.env.compute));
            ground.env.blocking("shoal-text", move || compute.text(&path)).await?.map_err(|error| error.to_string())?
        }
    };
    let loaded = load(ground, order, leases, |_| true).await?;

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
            slot_bytes: if after.is_some() { slot_into(order, index + 1) } else { token_bytes },
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
        let connect = connect(order, &loaded, open, slot_into(order, 0));
        let (hops, port) = futures::future::join(join_all(hops), connect).await;
        all(&(0..stages).collect::<Vec<_>>(), hops)?;
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
        // Pages are shared by all stages alike.
        prefix_cache: loaded.iter().all(|l| page_tokens.is_multiple_of((l.page_tokens as usize).max(1))),
    };
    Ok((sender, port, config, text))
}

/// All of the results of these stages, or everything that failed.
fn all<T>(stages: &[usize], results: Vec<Result<T, String>>) -> Result<Vec<T>, Failure> {
    let failed: Vec<(usize, &String)> =
        stages.iter().zip(&results).filter_map(|(index, result)| result.as_ref().err().map(|reason| (*index, reason))).collect();
    if let Some((_, reason)) = failed.first() {
        return Err(Failure { reason: (*reason).clone(), stages: failed.iter().map(|(index, _)| *index).collect() });
    }
    Ok(results.into_iter().flatten().collect())
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
