//! The actor that holds one instance together: it assembles the pipeline, watches those who hold its stages, makes it whole
//! when it breaks, and takes everything down when that cannot be done or it is not wanted any more.

mod moving;

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::assemble::{Assembled, Cancel, Ground, Order, Paid, assemble, take_down};
use super::instance::{InstanceState, InstanceSummary};
use super::journal::{self, Journal, JournalEntry, JournalRequest};
use super::leaving::Vacated;
use super::moves;
use super::recover::{Recovered, Standing, recover, tell_owners};
use super::succession::{Heir, describe};
use crate::env::{Instant, TextModel};
use crate::ids::{InstanceId, LeaseId, NodeId, PlanEpoch, Term};
use crate::lease::LeaseUse;
use crate::membership::ClusterView;
use crate::plan::Plan;
use crate::scheduler::{Pipeline, SchedulerActor, SchedulerArguments, SchedulerMsg};
use crate::stage::StageNotice;
use crate::stage::port::{PortCloser, PortEvents};

/// How long the answers of a broken instance can still be read before its scheduler goes.
const LINGER: Duration = Duration::from_secs(5);
/// How long a broken pipeline waits for the word of the stage that broke first: its neighbours notice at the same
/// time, and only know that it is gone.
const CAUSE_WAIT: Duration = Duration::from_millis(150);

/// A pipeline that breaks again and again, sooner than this after it was made whole, and with nobody lost, is given up: what broke
/// it will break it again.
const SETTLED: Duration = Duration::from_secs(30);
/// How often it may.
const RELAPSES: u32 = 3;
/// How often a conductor looks whether there is another one.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// What a conductor reports to the placement actor: the state and, once it is ready, what runs.
pub type StateSink = Arc<dyn Fn(InstanceState, Option<Running>) + Send + Sync>;

/// An instance that answers.
#[derive(Debug, Clone)]
pub struct Running {
    /// Who answers.
    pub scheduler: ActorRef<SchedulerMsg>,
    /// On which nodes.
    pub plan: Plan,
    /// Whether some of those who held it before may be going on without it.
    pub forked: bool,
}

/// What a conductor is started with.
pub struct ConductorArguments {
    /// The node's parts.
    pub ground: Ground,
    /// What to assemble.
    pub order: Order,
    /// Whether there is something of it already.
    pub begin: Begin,
    /// Told of every change.
    pub state: StateSink,
}

/// What a conductor begins with.
#[derive(Debug)]
pub struct Begin {
    /// What stands from an arrangement before; `None`: nothing.
    standing: Option<Vec<Paid>>,
    /// Requests to go on with.
    entries: Vec<JournalEntry>,
    /// Why it has to be made whole.
    reason: String,
}

impl Begin {
    /// With nothing.
    pub fn anew() -> Self {
        Self { standing: None, entries: Vec::new(), reason: String::new() }
    }
}

impl ConductorArguments {
    /// Goes on with what was taken over.
    pub fn heir(ground: Ground, heir: Heir, state: StateSink) -> Self {
        let Heir { order, paid, entries, reason } = heir;
        Self { ground, order, begin: Begin { standing: Some(paid), entries, reason }, state }
    }
}

/// Messages of a conductor.
pub enum ConductorMsg {
    /// The pipeline stands, or could not be made.
    #[doc(hidden)]
    Assembled(Box<Result<Assembled, String>>),
    /// It is whole again, or cannot be.
    #[doc(hidden)]
    Recovered(Box<Whole>),
    /// A stage holder says that a stage is gone.
    Notice(StageNotice),
    /// A node is gone.
    Gone(NodeId),
    /// This node does not hold a lease any more.
    LeaseLost(LeaseId, String),
    /// The pipeline of an arrangement is broken; the cause may still be on its way.
    Broken(PlanEpoch, String),
    /// Time to act on it.
    #[doc(hidden)]
    Act,
    /// Time to look whether those who were lost have gone on with the model themselves.
    #[doc(hidden)]
    Look,
    /// Not wanted any more; answered when everything is given back.
    Unload(Box<dyn FnOnce() + Send>),
    /// A node is about to leave: nothing of the instance is to be there any more.
    #[doc(hidden)]
    Vacate(NodeId, moving::Vacating),
    /// Time to see to those who leave.
    #[doc(hidden)]
    MoveOn,
    /// Another arrangement is ready, or could not be made.
    #[doc(hidden)]
    Ready(Box<moving::Ready>),
    /// The instance was handed over, or could not be.
    #[doc(hidden)]
    Handed(Box<moving::Handed>),
    /// The heir is known, and nothing is left here.
    #[doc(hidden)]
    Over(NodeId),
}

impl std::fmt::Debug for ConductorMsg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Assembled(_) => "Assembled",
            Self::Recovered(_) => "Recovered",
            Self::Notice(_) => "Notice",
            Self::Gone(_) => "Gone",
            Self::LeaseLost(..) => "LeaseLost",
            Self::Broken(..) => "Broken",
            Self::Act => "Act",
            Self::Look => "Look",
            Self::Unload(_) => "Unload",
            Self::Vacate(..) => "Vacate",
            Self::MoveOn => "MoveOn",
            Self::Ready(_) => "Ready",
            Self::Handed(_) => "Handed",
            Self::Over(_) => "Over",
        })
    }
}

/// What a recovery came to, opaque outside.
#[doc(hidden)]
pub struct Whole(Result<Recovered, String>);

/// Holds one instance together: assembles it, watches its holders, makes it whole, takes it down.
pub struct Conductor;

/// What the actor remembers.
pub struct ConductorState {
    arguments: ConductorArguments,
    me: ActorRef<ConductorMsg>,
    leases: Vec<Vec<LeaseUse>>,
    scheduler: Option<ActorRef<SchedulerMsg>>,
    closer: Option<PortCloser>,
    assembling: bool,
    /// Why it broke: the word of whoever knows best.
    broken: Option<(Cause, String)>,
    /// An [`ConductorMsg::Act`] is on its way.
    acting: bool,
    /// Leases that were lost while it was made whole.
    lost: Vec<LeaseId>,
    /// When it was made whole, if nobody had been lost, and how often in a row.
    relapses: (Option<Instant>, u32),
    fork: Option<Fork>,
    ended: bool,
    unloads: Vec<Box<dyn FnOnce() + Send>>,
    /// Tokenizer and template, once they are known.
    text: Option<Arc<dyn TextModel>>,
    /// The highest number that was given to an arrangement.
    newest: PlanEpoch,
    /// Ends what is being put together when it is dropped.
    wanted: Option<tokio::sync::watch::Sender<bool>>,
    /// Nodes that wait to be rid of the instance.
    vacates: Vec<(NodeId, Vacated)>,
    /// What is being got ready beside the pipeline.
    moving: Option<moving::Moving>,
    /// What the arrangement before has left behind.
    left: Option<moving::Left>,
    /// The recovery under way is no recovery: nothing was broken.
    planned: bool,
    /// The instance is being handed to another node.
    handing: bool,
    /// When it ends it is still wanted: it only fits nowhere.
    waits: bool,
    /// Since when the pipeline stands as it is.
    stood_since: Option<Instant>,
    /// What a better plan was last looked for in.
    considered: Option<moves::Standing>,
}

/// What an instance remembers that was made whole without some of its holders: they may only have been cut off, and have gone on with
/// the model as well. When they are back, one of the two is too many.
struct Fork {
    /// Who was missing.
    missing: BTreeSet<NodeId>,
    /// The instances of the model that were known then; what came up since is suspected.
    known: BTreeSet<InstanceId>,
}

/// How much a report explains, least first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Cause {
    /// A link ended.
    Symptom,
    /// A stage holder says why its stage ended.
    Stage,
    /// Membership or the lease keeper says that a node or lease is gone.
    Node,
}

impl ConductorState {
    fn name(&self, node: NodeId) -> String {
        self.arguments.order.plan.stages.iter().find(|stage| stage.node == node).map_or_else(|| node.short(), |stage| stage.name.clone())
    }

    fn layers(&self, node: NodeId) -> String {
        let held = self.arguments.order.plan.stages.iter().filter(|stage| stage.node == node);
        held.map(|stage| layers(&stage.layers)).collect::<Vec<_>>().join(" and ")
    }

    async fn assembled(&mut self, result: Result<Assembled, String>) {
        self.assembling = false;
        match result {
            Ok(assembled) => self.run(assembled).await,
            Err(reason) => {
                self.ended = true;
                (self.arguments.state)(InstanceState::Failed(reason), None);
                self.unloaded();
            }
        }
    }

    /// Sets a pipeline running that stands.
    async fn run(&mut self, assembled: Assembled) {
        let Assembled { leases, sender, port, config, text } = assembled;
        self.leases = leases;
        self.text = Some(Arc::clone(&text));
        self.newest = PlanEpoch(self.newest.0.max(self.arguments.order.epoch.0));
        self.closer = Some(port.closer());
        if !self.unloads.is_empty() {
            return self.end().await;
        }
        if let Some(by) = self.newer_term() {
            return self.superseded(by).await;
        }
        let (me, ground, order) = (self.me.clone(), &self.arguments.ground, &self.arguments.order);
        let epoch = order.epoch;
        let broken: Arc<dyn Fn(String) + Send + Sync> = Arc::new(move |reason| drop(me.cast(ConductorMsg::Broken(epoch, reason))));
        let sequences_max = config.rows_max.max(config.sequences_max);
        let pipeline = Pipeline { epoch, members: order.members.clone(), config, port: sender, broken: Arc::clone(&broken) };
        let scheduler = match &self.scheduler {
            Some(scheduler) => {
                let _ = scheduler.cast(SchedulerMsg::Resume(Box::new(pipeline)));
                scheduler.clone()
            }
            None => {
                let arguments = SchedulerArguments {
                    env: ground.env.clone(),
                    node: ground.node,
                    instance: order.instance,
                    term: order.term,
                    pipeline,
                    vocabulary: order.card.vocabulary as usize,
                    text,
                    entries: std::mem::take(&mut self.arguments.begin.entries),
                    services: ground.services.clone(),
                    membership: ground.membership.clone(),
                };
                match Actor::spawn_linked(None, SchedulerActor, arguments, self.me.get_cell()).await {
                    Ok((scheduler, _)) => self.scheduler.insert(scheduler).clone(),
                    Err(error) => return self.give_up(format!("the scheduler did not start: {error}")).await,
                }
            }
        };
        let answers = scheduler.clone();
        let tokens = Box::new(move |tokens| drop(answers.cast(SchedulerMsg::Answer(epoch, tokens))));
        let events = PortEvents { tokens, broken };
        if let Err(error) = port.start(sequences_max, events) {
            return self.give_up(format!("cannot start the pipeline's threads: {error}")).await;
        }
        let running = Running { scheduler, plan: order.plan.clone(), forked: self.fork.is_some() };
        (self.arguments.state)(InstanceState::Ready, Some(running));
        self.stood_since = Some(self.arguments.ground.env.clock.now());
        // What came while it was put together.
        let lost = std::mem::take(&mut self.lost);
        if let Some(lease) = lost.into_iter().find(|lease| self.holds(*lease)) {
            self.broke(Cause::Node, format!("lease {lease:?} was lost"));
        }
        if let Some(reason) = self.gone_holder() {
            self.broke(Cause::Node, reason);
        }
        if self.broken.is_some() {
            self.act_soon();
        }
        self.move_on();
    }

    fn holds(&self, lease: LeaseId) -> bool {
        self.leases.iter().flatten().any(|held| held.lease == lease)
    }

    fn gone(&self, node: NodeId) -> String {
        format!("node {}, which held {}, is gone", self.name(node), self.layers(node))
    }

    /// The words on a holder that is not there, if there is one.
    fn gone_holder(&self) -> Option<String> {
        let view = self.arguments.ground.membership.view();
        self.arguments.order.plan.nodes().find(|node| !view.is_present(*node)).map(|node| self.gone(node))
    }

    /// Makes a broken pipeline whole, or takes the instance down.
    async fn act(&mut self) {
        self.acting = false;
        if self.ended || self.assembling || self.handing {
            return;
        }
        // What is being got ready beside it counts on what is broken now.
        self.moving = None;
        if let Some(by) = self.newer_term() {
            return self.superseded(by).await;
        }
        let now = self.arguments.ground.env.clock.now();
        let settled = self.relapses.0.is_none_or(|since| now.since(since) >= SETTLED);
        if settled {
            self.relapses.1 = 0;
        }
        if self.scheduler.is_none() || !self.unloads.is_empty() || self.relapses.1 >= RELAPSES {
            return self.end().await;
        }
        let reason = self.broken.as_ref().map(|(_, reason)| reason.clone()).unwrap_or_default();
        tracing::warn!(target: "shoal::conductor", model = %self.arguments.order.model.name, %reason, "a pipeline broke and is made whole");
        let standing = self.take_standing();
        self.relink(standing, BTreeSet::new(), reason);
        self.planned = false;
    }

    async fn recovered(&mut self, result: Result<Recovered, String>) {
        self.assembling = false;
        let planned = std::mem::take(&mut self.planned);
        let (why, broken) = (std::mem::take(&mut self.arguments.begin.reason), self.broken.take());
        // What the end of the arrangement before looked like from elsewhere explains nothing if it was meant to end.
        let cause = broken.filter(|_| !planned).map_or(why, |(_, reason)| reason);
        self.clean_up();
        match result {
            Ok(Recovered { order, placed, assembled }) => {
                let now = self.arguments.ground.env.clock.now();
                self.relapses = if placed || planned { (None, 0) } else { (Some(now), self.relapses.1 + 1) };
                self.forked();
                self.watch(&order);
                self.arguments.order = order;
                self.run(assembled).await;
            }
            Err(_) if !self.unloads.is_empty() => self.end().await,
            Err(reason) => {
                // By now it is known who is gone, which says more than who noticed.
                let cause = self.gone_holder().unwrap_or(cause);
                self.waits = true;
                self.give_up(format!("{cause}, and the model could not be placed on the nodes that are left: {reason}")).await
            }
        }
    }

    /// Notes who is missing now, of everybody who was of the instance.
    fn forked(&mut self) {
        let order = &self.arguments.order;
        let view = self.arguments.ground.membership.view();
        let missing: BTreeSet<NodeId> = order.members.iter().copied().filter(|node| !view.is_present(*node)).collect();
        if missing.is_empty() {
            return;
        }
        let known = others(&view, order).map(|(_, other)| other.instance).collect();
        self.fork.get_or_insert(Fork { missing: BTreeSet::new(), known }).missing.extend(missing);
    }

    fn look_soon(&self) {
        let (me, clock) = (self.me.clone(), Arc::clone(&self.arguments.ground.env.clock));
        let look = async move {
            clock.sleep_until(clock.now() + LOOK_EVERY).await;
            let _ = me.cast(ConductorMsg::Look);
        };
        self.arguments.ground.env.spawner.task("conductor", Box::pin(look));
    }

    /// Looks whether somebody else conducts the instance by now, or has the model on an instance that came up among those who were
    /// missing: then one of the two is too many.
    async fn look(&mut self) {
        if self.ended {
            return;
        }
        if self.assembling || self.handing {
            return self.look_soon();
        }
        if let Some(by) = self.newer_term() {
            return self.superseded(by).await;
        }
        let view = self.arguments.ground.membership.view();
        self.renew_members(&view);
        let order = &self.arguments.order;
        if let (Some(fork), Some(scheduler), false) = (&self.fork, &self.scheduler, self.assembling) {
            let theirs = others(&view, order).find(|(conductor, other)| {
                let among = fork.missing.contains(conductor) || other.stages.iter().any(|stage| fork.missing.contains(&stage.node));
                // If they think the same of this one, only one of the two yields.
                among && !fork.known.contains(&other.instance) && (!other.forked || other.instance < order.instance)
            });
            if let Some((conductor, other)) = theirs {
                let me = self.me.clone();
                tracing::info!(target: "shoal::conductor", ?conductor, theirs = ?other.instance, "the model is there twice; yielding once idle");
                let _ = scheduler.cast(SchedulerMsg::IfIdle(Box::new(move || drop(me.cast(ConductorMsg::Unload(Box::new(|| {})))))));
            }
        }
        self.move_on();
        self.consider();
        self.look_soon();
    }

    /// Whoever is gone is no member any more, and others take their places where there are fewer than three.
    fn renew_members(&mut self, view: &ClusterView) {
        let Some(scheduler) = self.scheduler.as_ref().filter(|_| !self.assembling && self.broken.is_none()) else { return };
        let order = &self.arguments.order;
        let holders: Vec<NodeId> = order.plan.nodes().filter(|node| !view.is_leaving(*node)).collect();
        let there = order.members.iter().copied().chain(std::iter::once(self.arguments.ground.node)).filter(|node| view.is_present(*node));
        let members = journal::members(&holders, there.chain(view.staying().map(|(node, _)| node)).filter(|node| !view.is_leaving(*node)));
        if members == order.members {
            return;
        }
        let order = Order { members, ..order.clone() };
        let _ = scheduler.cast(SchedulerMsg::Members(order.members.clone()));
        self.watch(&order);
        self.arguments.order = order.clone();
        let ground = self.arguments.ground.clone();
        let tell = async move {
            tell_owners(&ground, &order).await;
            describe(&ground, &order).await;
        };
        self.arguments.ground.env.spawner.task("members", Box::pin(tell));
    }

    /// A higher term than this conductor's, if one is known of: from a claimant that asked this node, or from a conductor's card.
    fn newer_term(&self) -> Option<Term> {
        let (ground, order) = (&self.arguments.ground, &self.arguments.order);
        let asked = ground.journal.lock().unwrap_or_else(PoisonError::into_inner).term(order.instance);
        let view = ground.membership.view();
        let told = view.alive().flat_map(|(_, member)| &member.card.instances).filter(|other| other.instance == order.instance);
        told.map(|other| other.term).chain(asked).filter(|term| *term > order.term).max()
    }

    /// Somebody conducts the instance under a higher term: what is held of it here goes, and who is answered here finds the other one.
    async fn superseded(&mut self, by: Term) {
        tracing::warn!(target: "shoal::conductor", instance = ?self.arguments.order.instance, ?by, "the instance is conducted under a higher term");
        if let Some(scheduler) = self.scheduler.take() {
            // Readers are told that it is not here, not that it failed.
            scheduler.stop(None);
        }
        self.broken = Some((Cause::Node, format!("node {} conducts it now", by.node.short())));
        self.end().await;
    }

    /// Watches who is of the instance in `order`, and nobody else.
    fn watch(&self, order: &Order) {
        let membership = &self.arguments.ground.membership;
        let (old, new) = (watched(&self.arguments.order), watched(order));
        new.difference(&old).for_each(|node| membership.watch_closely(*node));
        old.difference(&new).for_each(|node| membership.unwatch(*node));
    }

    async fn give_up(&mut self, reason: String) {
        self.broken = Some((Cause::Node, reason));
        self.end().await;
    }

    /// Notes a reason and acts a little later, when a better one may have come.
    fn broke(&mut self, cause: Cause, reason: String) {
        if self.ended {
            return;
        }
        if self.broken.as_ref().is_none_or(|(known, _)| *known < cause) {
            self.broken = Some((cause, reason));
        }
        self.act_soon();
    }

    fn act_soon(&mut self) {
        if self.acting || self.assembling {
            return;
        }
        self.acting = true;
        let (me, clock) = (self.me.clone(), Arc::clone(&self.arguments.ground.env.clock));
        let act = async move {
            clock.sleep_until(clock.now() + CAUSE_WAIT).await;
            let _ = me.cast(ConductorMsg::Act);
        };
        self.arguments.ground.env.spawner.task("conductor", Box::pin(act));
    }

    /// Ends every answer, drops every stage, gives every lease back.
    async fn end(&mut self) {
        if self.ended || self.assembling || self.handing {
            return;
        }
        self.ended = true;
        self.moving = None;
        let model = self.arguments.order.model.name.clone();
        let reason = match &self.broken {
            Some((_, reason)) => format!("{model} stopped: {reason}"),
            None => format!("{model} was unloaded"),
        };
        (self.arguments.state)(InstanceState::Stopping(reason.clone()), None);
        if let Some(scheduler) = &self.scheduler {
            let _ = scheduler.cast(SchedulerMsg::Broken(reason.clone()));
        }
        if let Some(closer) = self.closer.take() {
            closer.close();
        }
        let (ground, order) = (&self.arguments.ground, &self.arguments.order);
        for member in order.members.iter().filter(|member| **member != ground.node) {
            let forget = JournalRequest::Forget { instance: order.instance, term: order.term };
            // One that cannot be told forgets it when newer instances push it out.
            let _ = ground.services.remote::<Journal>(*member).cast(forget);
        }
        take_down(ground, order, &self.leases).await;
        for node in watched(order) {
            ground.membership.unwatch(node);
        }
        let state = if self.waits { InstanceState::Waiting(reason) } else { InstanceState::Failed(reason) };
        (self.arguments.state)(state, None);
        self.unloaded();
    }

    /// Answers who waited for the end, and stops once late readers have had their time.
    fn unloaded(&mut self) {
        self.unloads.drain(..).for_each(|tell| tell());
        std::mem::take(&mut self.vacates).into_iter().for_each(|(_, reply)| reply.tell(Ok(())));
        let (me, clock) = (self.me.clone(), Arc::clone(&self.arguments.ground.env.clock));
        let stop = async move {
            clock.sleep_until(clock.now() + LINGER).await;
            me.stop(None);
        };
        self.arguments.ground.env.spawner.task("conductor", Box::pin(stop));
    }
}

/// Who holds stages of an instance, or remembers its requests: their death has to be known in about a second.
fn watched(order: &Order) -> BTreeSet<NodeId> {
    order.plan.nodes().chain(order.members.iter().copied()).collect()
}

/// The other instances of the same model that answer, with their conductors.
fn others<'a>(view: &'a ClusterView, order: &'a Order) -> impl Iterator<Item = (NodeId, &'a InstanceSummary)> {
    view.alive().flat_map(|(node, member)| member.card.instances.iter().map(move |instance| (node, instance))).filter(move |(_, other)| {
        other.sha256 == order.model.sha256 && other.instance != order.instance && other.state == InstanceState::Ready
    })
}

/// `layers 0–11`, or `layer 11`.
fn layers(range: &std::ops::Range<u32>) -> String {
    match range.end.saturating_sub(range.start) {
        0 | 1 => format!("layer {}", range.start),
        _ => format!("layers {}–{}", range.start, range.end - 1),
    }
}

impl Actor for Conductor {
    type Msg = ConductorMsg;
    type State = ConductorState;
    type Arguments = ConductorArguments;

    async fn pre_start(&self, me: ActorRef<ConductorMsg>, arguments: ConductorArguments) -> Result<ConductorState, ActorProcessingErr> {
        for node in watched(&arguments.order) {
            arguments.ground.membership.watch_closely(node);
        }
        let mut arguments = arguments;
        let (wanted, cancel) = Cancel::new();
        let (ground, order, state, reply) = (arguments.ground.clone(), arguments.order.clone(), Arc::clone(&arguments.state), me.clone());
        match arguments.begin.standing.take() {
            None => {
                state(InstanceState::Leasing, None);
                let task = async move {
                    let result = assemble(&ground, &order, &[], (None, &cancel), &|| state(InstanceState::Loading, None)).await;
                    if result.is_ok() {
                        describe(&ground, &order).await;
                    }
                    let _ = reply.cast(ConductorMsg::Assembled(Box::new(result.map_err(|failure| failure.reason))));
                };
                arguments.ground.env.spawner.task("assemble", Box::pin(task));
            }
            Some(paid) => {
                state(InstanceState::Recovering(arguments.begin.reason.clone()), None);
                let task = async move {
                    let result = recover(&ground, Standing { order, paid, text: None }, &cancel).await;
                    let _ = reply.cast(ConductorMsg::Recovered(Box::new(Whole(result))));
                };
                arguments.ground.env.spawner.task("recover", Box::pin(task));
            }
        }
        let state = ConductorState {
            arguments,
            me,
            leases: Vec::new(),
            scheduler: None,
            closer: None,
            assembling: true,
            broken: None,
            acting: false,
            lost: Vec::new(),
            relapses: (None, 0),
            fork: None,
            ended: false,
            unloads: Vec::new(),
            text: None,
            newest: PlanEpoch(0),
            wanted: Some(wanted),
            vacates: Vec::new(),
            moving: None,
            left: None,
            planned: false,
            handing: false,
            waits: false,
            stood_since: None,
            considered: None,
        };
        state.look_soon();
        Ok(state)
    }

    async fn handle(
        &self,
        _me: ActorRef<ConductorMsg>,
        message: ConductorMsg,
        state: &mut ConductorState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            ConductorMsg::Assembled(result) => state.assembled(*result).await,
            ConductorMsg::Recovered(whole) => state.recovered(whole.0).await,
            ConductorMsg::Notice(notice) => {
                let order = &state.arguments.order;
                let current = notice.key.instance == order.instance && notice.key.term == order.term && notice.key.epoch == order.epoch;
                if let Some(stage) = order.plan.stages.get(notice.key.stage as usize).filter(|_| current) {
                    let reason = format!("node {} lost {}: {}", stage.name, layers(&stage.layers), notice.reason);
                    state.broke(Cause::Stage, reason);
                }
            }
            ConductorMsg::Gone(node) => {
                if state.arguments.order.plan.nodes().any(|holder| holder == node) {
                    state.broke(Cause::Node, state.gone(node));
                }
            }
            ConductorMsg::LeaseLost(lease, _) if state.assembling => state.lost.push(lease),
            ConductorMsg::LeaseLost(lease, reason) => {
                if state.holds(lease) {
                    state.broke(Cause::Node, reason);
                }
            }
            ConductorMsg::Broken(epoch, reason) => {
                if epoch == state.arguments.order.epoch {
                    state.broke(Cause::Symptom, reason);
                }
            }
            ConductorMsg::Act => state.act().await,
            ConductorMsg::Look => state.look().await,
            ConductorMsg::Unload(done) => {
                if state.ended {
                    done();
                } else {
                    state.unloads.push(done);
                    // What is being put together is not wanted any more either.
                    state.wanted = None;
                    state.end().await;
                }
            }
            ConductorMsg::Vacate(node, reply) => state.vacate(node, reply),
            ConductorMsg::MoveOn => state.move_on(),
            ConductorMsg::Ready(ready) => state.ready(*ready),
            ConductorMsg::Handed(handed) => state.handed(*handed).await,
            ConductorMsg::Over(heir) => state.over(heir),
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _me: ActorRef<ConductorMsg>,
        event: ractor::SupervisionEvent,
        state: &mut ConductorState,
    ) -> Result<(), ActorProcessingErr> {
        if let ractor::SupervisionEvent::ActorFailed(_, error) = event {
            // The answers are lost with it.
            state.scheduler = None;
            state.broke(Cause::Node, format!("the scheduler failed: {error}"));
        }
        Ok(())
    }
}
