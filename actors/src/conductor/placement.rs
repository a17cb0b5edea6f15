//! The actor that places models: one for each node, the conductor of what it places.

mod waiting;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef, ActorStatus};
use serde::{Deserialize, Serialize};

use super::actor::{Begin, Conductor, ConductorArguments, ConductorMsg, Running, StateSink};
use super::assemble::{Ground, Order};
use super::elsewhere::{Elsewhere, elsewhere};
use super::files::LocalFiles;
use super::instance::{InstanceState, InstanceSummary};
use super::journal::JournalStore;
use super::leaving::{Leavings, serve_leaving};
use super::succession::{Heir, succeed};
use crate::card::ModelCard;
use crate::catalog::{Catalog, LocalModel};
use crate::countdown::Countdown;
use crate::env::Instant;
use crate::ids::{InstanceId, LeaseId, NodeId, PlanEpoch, Term};
use crate::lease::timing;
use crate::plan::{Goal, Link, LinkMatrix, Plan, PlanError, PlanRequest, plan};
use crate::scheduler::{Finding, Generate, GenerateCall, GenerateRefusal, SchedulerMsg};
use crate::service::{Inbound, Replier, Service, ServiceId};
use crate::service_numbers as ids;
use crate::stage::{StageNotice, StageNotices};
use waiting::{Waiting, Wish, may_fit_later};

/// Most plans in an answer.
const PLANS_MAX: usize = 8;
/// Sequences and contexts that are tried one after the other where a smaller instance will do.
const SMALLER: [(u32, u32); 4] = [(1, u32::MAX), (1, 2048), (1, 1024), (1, 512)];
/// How long after its death the leases of a node may keep memory from others.
const LEASES_END: Duration = Duration::from_secs(timing::TTL.as_secs() + timing::SWEEP.as_secs() + 3);
/// How often a load that waits for that is looked at again.
const AGAIN: Duration = Duration::from_millis(500);

/// Placing of models, as any node asks it of the one that is to conduct.
#[derive(Debug)]
pub struct Placement;

impl Service for Placement {
    const ID: ServiceId = ids::PLACEMENT;
    const NAME: &'static str = "placement";
    type Request = PlacementRequest;
    type Reply = Result<PlacementReply, PlacementRefusal>;
}

/// When an instance that is there already answers a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Reuse {
    /// Whatever it was placed for: who has a question wants an answer.
    Any,
    /// If it is what the goal asks for.
    Fitting,
    /// Never: another copy is wanted beside it.
    Never,
}

impl Reuse {
    /// Whether `instance` will do for `goal`.
    pub fn allows(self, instance: &InstanceSummary, goal: &Goal) -> bool {
        match self {
            Self::Any => true,
            Self::Fitting => instance.meets(goal),
            Self::Never => false,
        }
    }
}

/// What is asked of a placing node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PlacementRequest {
    /// Place a model that the node has on disk, unless it conducts one already. Answered when it is ready.
    Load {
        /// The model as users name it.
        model: String,
        /// What it is placed for.
        goal: Goal,
        /// Which instance that is there already will do.
        reuse: Reuse,
        /// Whether one for fewer sequences and a shorter context will do where the goal's does not fit.
        smaller: bool,
    },
    /// Say how it would be placed.
    Plan {
        /// The model as users name it.
        model: String,
        /// What it would be placed for.
        goal: Goal,
    },
    /// Take an instance down. Answered when its memory is given back.
    Unload(InstanceId),
    /// Say whether the node conducts an instance, and it is not being taken down.
    Has(InstanceId),
    /// As a load of what fits the goal; but if there is no room for it, it waits until there is. That is answered at once.
    Want {
        /// The model as users name it.
        model: String,
        /// What it is placed for.
        goal: Goal,
    },
}

/// A placing node's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PlacementReply {
    /// It is placed and ready.
    Ready(Box<InstanceSummary>),
    /// How it could be placed, best first.
    Plans(Vec<Plan>),
    /// Done.
    Done,
    /// The node conducts no such instance, perhaps not any more.
    NoInstance,
    /// It waits until there is room.
    Waiting(Box<InstanceSummary>),
}

/// Why a node did not place a model, or not unload it; for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{reason}")]
pub struct PlacementRefusal {
    /// What happened, to what, and what to do.
    pub reason: String,
}

/// The schedulers of the instances that a node conducts, by instance.
#[derive(Clone)]
pub struct Schedulers {
    known: Arc<RwLock<BTreeMap<InstanceId, ActorRef<SchedulerMsg>>>>,
    journal: Arc<Mutex<JournalStore>>,
}

impl fmt::Debug for Schedulers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Schedulers")
    }
}

impl Schedulers {
    /// None yet. `journal` is what the node remembers of the requests of other conductors.
    pub fn new(journal: Arc<Mutex<JournalStore>>) -> Self {
        Self { known: Arc::default(), journal }
    }

    fn insert(&self, instance: InstanceId, scheduler: ActorRef<SchedulerMsg>) {
        let mut map = self.known.write().unwrap_or_else(PoisonError::into_inner);
        map.retain(|_, known| !matches!(known.get_status(), ActorStatus::Stopped));
        map.insert(instance, scheduler);
    }

    /// Hands a call to the scheduler of the instance that it asks for.
    pub fn route(&self, mut call: Inbound<Generate>) {
        if let GenerateCall::Find(request) = call.request {
            let finding = Finding::new(request, Arc::clone(&self.journal), call.reply.take());
            for scheduler in self.known.read().unwrap_or_else(PoisonError::into_inner).values() {
                // One that has stopped drops its copy.
                let _ = scheduler.cast(SchedulerMsg::Find(request, finding.clone()));
            }
            return;
        }
        let Some(instance) = call.request.instance() else { return };
        let scheduler = self.known.read().unwrap_or_else(PoisonError::into_inner).get(&instance).cloned();
        let alive = scheduler.filter(|known| !matches!(known.get_status(), ActorStatus::Stopping | ActorStatus::Stopped));
        match alive {
            // If it stops at this moment the call is dropped, which the caller is told.
            Some(scheduler) => drop(scheduler.cast(SchedulerMsg::Call(call))),
            None => {
                if let Some(reply) = call.reply.take() {
                    reply.reply(Err(GenerateRefusal::UnknownInstance(instance)));
                }
            }
        }
    }
}

/// Told of the instances that this node conducts whenever they change.
pub type InstancesSink = Arc<dyn Fn(Vec<InstanceSummary>) + Send + Sync>;

/// What the actor is started with.
pub struct PlacementArguments {
    /// The node's parts.
    pub ground: Ground,
    /// Models on disk.
    pub catalog: Catalog,
    /// Models outside the models folder.
    pub files: LocalFiles,
    /// Where schedulers are found.
    pub schedulers: Schedulers,
    /// Told of changes.
    pub instances: InstancesSink,
}

/// Messages of the actor.
pub enum PlacementMsg {
    /// A node asks for something.
    Call(Inbound<Placement>),
    /// A model was looked at.
    #[doc(hidden)]
    Prepared(Box<Prepared>),
    /// A conductor reports.
    #[doc(hidden)]
    State(InstanceId, Term, InstanceState, Option<Box<Running>>),
    /// A stage holder reports.
    Notice(StageNotice),
    /// A node is gone.
    Gone {
        /// Which.
        node: NodeId,
        /// Whether it said good-bye: then it has taken down what it conducted.
        left: bool,
    },
    /// An instance whose conductor is gone was taken over.
    #[doc(hidden)]
    Heir(Box<Heir>),
    /// A node that leaves asks for something.
    Leaving(Inbound<Leavings>),
    /// This node does not hold a lease any more; the text says why.
    LeaseLost(LeaseId, String),
    /// Take everything down; answered when it is.
    Stop(Box<dyn FnOnce() + Send>),
    /// Time to look at what waits for room.
    #[doc(hidden)]
    Look,
}

#[doc(hidden)]
pub struct Prepared {
    call: Inbound<Placement>,
    result: Result<(LocalModel, ModelCard), String>,
    elsewhere: Elsewhere,
}

impl From<Inbound<Placement>> for PlacementMsg {
    fn from(call: Inbound<Placement>) -> Self {
        Self::Call(call)
    }
}

impl From<Inbound<Leavings>> for PlacementMsg {
    fn from(call: Inbound<Leavings>) -> Self {
        Self::Leaving(call)
    }
}

impl From<Inbound<StageNotices>> for PlacementMsg {
    fn from(notice: Inbound<StageNotices>) -> Self {
        Self::Notice(notice.request)
    }
}

impl fmt::Debug for PlacementMsg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Call(_) => "Call",
            Self::Prepared(_) => "Prepared",
            Self::State(..) => "State",
            Self::Notice(_) => "Notice",
            Self::Gone { .. } => "Gone",
            Self::Heir(_) => "Heir",
            Self::Leaving(_) => "Leaving",
            Self::LeaseLost(..) => "LeaseLost",
            Self::Stop(_) => "Stop",
            Self::Look => "Look",
        })
    }
}

/// Places models, and keeps the conductors of what it placed.
pub struct PlacementActor;

/// What the actor remembers.
pub struct PlacementState {
    arguments: PlacementArguments,
    me: ActorRef<PlacementMsg>,
    instances: BTreeMap<InstanceId, Held>,
    /// What is wanted and fits nowhere.
    waiting: BTreeMap<InstanceId, Waiting>,
    /// It will be looked at again.
    looking: bool,
    last_counter: u64,
    /// When a node was last lost.
    last_gone: Option<Instant>,
}

struct Held {
    summary: InstanceSummary,
    conductor: ActorRef<ConductorMsg>,
    /// What is wanted if nothing of it stands any more.
    again: Wish,
    /// What it was placed for, if that has waited for room, until it is ready.
    wished: Option<Wish>,
    /// Somebody has it taken down.
    unwanted: bool,
    /// Who waits for it to be ready.
    waiting: Vec<Replier<Placement>>,
    /// Loads of the same model that came while it was going down.
    after: Vec<Inbound<Placement>>,
}

impl PlacementState {
    fn publish(&self) {
        let waiting = self.waiting.values().map(|waiting| &waiting.summary);
        (self.arguments.instances)(self.instances.values().map(|held| &held.summary).chain(waiting).cloned().collect());
    }

    fn call(&mut self, call: Inbound<Placement>) {
        match &call.request {
            PlacementRequest::Unload(instance) => {
                let Some(reply) = call.reply else { return };
                if self.waiting.remove(instance).is_some() {
                    self.publish();
                    return reply.reply(Ok(PlacementReply::Done));
                }
                let Some(held) = self.instances.get_mut(instance) else { return reply.reply(Ok(PlacementReply::NoInstance)) };
                held.unwanted = true;
                let done = Box::new(move || reply.reply(Ok(PlacementReply::Done)));
                // If the conductor has stopped, dropping the answer tells the caller.
                let _ = held.conductor.cast(ConductorMsg::Unload(done));
            }
            PlacementRequest::Has(instance) => {
                let has = self.instances.get(instance).is_some_and(|held| !held.summary.state.is_gone());
                let answer = if has { PlacementReply::Done } else { PlacementReply::NoInstance };
                call.reply.into_iter().for_each(|way| way.reply(Ok(answer.clone())));
            }
            PlacementRequest::Load { model, .. } | PlacementRequest::Plan { model, .. } | PlacementRequest::Want { model, .. } => {
                self.prepare(model.clone(), call)
            }
        }
    }

    /// Looks the model up, reads its sizes, and asks others what they have of it: it takes a while, so in a task.
    fn prepare(&self, model: String, call: Inbound<Placement>) {
        let (catalog, files, me) = (self.arguments.catalog.clone(), self.arguments.files.clone(), self.me.clone());
        let (ground, gone) = (self.arguments.ground.clone(), self.last_gone);
        let env = ground.env.clone();
        let task = async move {
            let look = async {
                let model = catalog.resolve(&model).await.map_err(|error| error.to_string())?;
                files.note(catalog.root(), &model);
                let (compute, path) = (Arc::clone(&env.compute), model.path.clone());
                let card = env.blocking("shoal-card", move || compute.model_card(&path)).await?.map_err(|error| error.to_string())?;
                Ok((model, card))
            };
            let result: Result<(LocalModel, ModelCard), String> = look.await;
            let wanted = match &call.request {
                PlacementRequest::Load { reuse, goal, .. } => Some((*reuse, goal)),
                PlacementRequest::Want { goal, .. } => Some((Reuse::Fitting, goal)),
                _ => None,
            };
            let elsewhere = match (&result, wanted) {
                (Ok((model, card)), Some((reuse, goal))) => {
                    let goal = Goal { context_tokens: goal.context_tokens.min(card.context_tokens), ..goal.clone() };
                    elsewhere(&ground, &model.sha256, reuse, &goal, gone).await
                }
                _ => Elsewhere::Nothing,
            };
            let _ = me.cast(PlacementMsg::Prepared(Box::new(Prepared { call, result, elsewhere })));
        };
        self.arguments.ground.env.spawner.task("prepare", Box::pin(task));
    }

    async fn prepared(&mut self, prepared: Prepared) {
        let Prepared { call, result, elsewhere } = prepared;
        let refuse = |call: Inbound<Placement>, reason: String| {
            call.reply.into_iter().for_each(|way| way.reply(Err(PlacementRefusal { reason: reason.clone() })))
        };
        let (model, card) = match result {
            Ok(found) => found,
            Err(reason) => return refuse(call, reason),
        };
        let of_model = |goal: &Goal| Goal { context_tokens: goal.context_tokens.min(card.context_tokens), ..goal.clone() };
        let (reuse, goal, smaller, waits) = match &call.request {
            PlacementRequest::Load { reuse, goal, smaller, .. } => (*reuse, of_model(goal), *smaller, false),
            PlacementRequest::Want { goal, .. } => (Reuse::Fitting, of_model(goal), false, true),
            PlacementRequest::Plan { goal, .. } => {
                return match self.plans(&model, &card, goal.clone()) {
                    Ok(plans) => call.reply.into_iter().for_each(|way| way.reply(Ok(PlacementReply::Plans(plans.clone())))),
                    Err(error) => refuse(call, error.to_string()),
                };
            }
            PlacementRequest::Unload(_) | PlacementRequest::Has(_) => return,
        };
        // What is there, or will be, comes before any plan: the memory for another one may be taken by it.
        let will_do = |held: &&mut Held| held.summary.sha256 == model.sha256 && reuse.allows(&held.summary, &goal);
        if let Some(held) = self.instances.values_mut().find(will_do) {
            match held.summary.state {
                InstanceState::Ready => {
                    let ready = PlacementReply::Ready(Box::new(held.summary.clone()));
                    call.reply.into_iter().for_each(|way| way.reply(Ok(ready.clone())));
                }
                InstanceState::Leasing | InstanceState::Loading | InstanceState::Recovering(_) => held.waiting.extend(call.reply),
                _ => held.after.push(call),
            }
            return;
        }
        match elsewhere {
            Elsewhere::Ready(summary) => {
                let ready = PlacementReply::Ready(summary);
                return call.reply.into_iter().for_each(|way| way.reply(Ok(ready.clone())));
            }
            Elsewhere::Soon => return self.again(call),
            Elsewhere::Nothing => {}
        }
        let mut plans = self.plans(&model, &card, goal.clone());
        for (sequences, context_tokens) in SMALLER {
            let less =
                Goal { sequences: goal.sequences.min(sequences), context_tokens: goal.context_tokens.min(context_tokens), ..goal.clone() };
            let short = matches!(plans, Err(PlanError::NotEnoughMemory(_) | PlanError::NoSplit(_)));
            if smaller && short && less != goal {
                plans = self.plans(&model, &card, less).or(plans);
            }
        }
        let best = match plans.map(|plans| plans.into_iter().next()) {
            Ok(Some(best)) => best,
            Ok(None) => return refuse(call, "no plan was found".to_owned()),
            Err(error @ (PlanError::NotEnoughMemory(_) | PlanError::NoSplit(_))) if self.leases_may_end() && !waits => {
                tracing::info!(target: "shoal::conductor", model = %model.name, %error, "waiting for the leases of a node that is gone");
                return self.again(call);
            }
            Err(error) if waits && may_fit_later(&error) => {
                let goal = Goal { sha256: Some(model.sha256.clone()), only_on_disk: true, ..goal };
                let summary = self.wish(Wish { model, card, goal, tries: 0 }, error.to_string());
                return call.reply.into_iter().for_each(|way| way.reply(Ok(PlacementReply::Waiting(Box::new(summary.clone())))));
            }
            Err(error) => return refuse(call, self.waits_because(&model.sha256, error.to_string())),
        };
        match self.start(Wish { model, card, goal, tries: 0 }, best, waits).await {
            Ok(instance) => {
                if let Some(held) = self.instances.get_mut(&instance) {
                    held.waiting.extend(call.reply);
                }
                self.publish();
            }
            Err(reason) => refuse(call, reason),
        }
    }

    fn plans(&self, model: &LocalModel, card: &ModelCard, goal: Goal) -> Result<Vec<Plan>, PlanError> {
        plans(&self.arguments.ground, model, card, goal)
    }

    /// Whether a node was lost so lately that the leases it held may still be in force.
    fn leases_may_end(&self) -> bool {
        self.last_gone.is_some_and(|gone| self.arguments.ground.env.clock.now().since(gone) < LEASES_END)
    }

    /// Looks at a load again a little later.
    fn again(&self, call: Inbound<Placement>) {
        let (me, clock) = (self.me.clone(), Arc::clone(&self.arguments.ground.env.clock));
        let later = async move {
            clock.sleep_until(clock.now() + AGAIN).await;
            let _ = me.cast(PlacementMsg::Call(call));
        };
        self.arguments.ground.env.spawner.task("prepare", Box::pin(later));
    }

    /// What a new instance is called, and under which term it begins.
    fn next_name(&mut self) -> (InstanceId, Term) {
        self.last_counter += 1;
        let ground = &self.arguments.ground;
        (InstanceId::random(&*ground.env.rng), Term { counter: self.last_counter, node: ground.node })
    }

    /// Places a model. If it `waits`, it waits for room again should this fail.
    async fn start(&mut self, wish: Wish, plan: Plan, waits: bool) -> Result<InstanceId, String> {
        let (instance, term) = self.next_name();
        let ground = &self.arguments.ground;
        let members = ground.members(plan.nodes());
        let Wish { model, card, goal, .. } = wish.clone();
        let goal = Goal { sha256: Some(model.sha256.clone()), only_on_disk: true, ..goal };
        let order = Order { instance, term, epoch: PlanEpoch(0), model, card, goal, plan, members };
        let arguments = ConductorArguments { ground: ground.clone(), order, begin: Begin::anew(), state: self.sink(instance, term) };
        self.conduct(InstanceState::Leasing, arguments, waits.then_some(wish)).await
    }

    /// What a conductor of this node reports to.
    fn sink(&self, instance: InstanceId, term: Term) -> StateSink {
        let me = self.me.clone();
        Arc::new(move |state, running| drop(me.cast(PlacementMsg::State(instance, term, state, running.map(Box::new)))))
    }

    /// Goes on with an instance that was taken over.
    async fn heir(&mut self, heir: Heir) {
        let (instance, term) = (heir.instance(), heir.order().term);
        let arguments = ConductorArguments::heir(self.arguments.ground.clone(), heir, self.sink(instance, term));
        let begins = InstanceState::Recovering("its conductor is gone".to_owned());
        match self.conduct(begins, arguments, None).await {
            Ok(_) => self.publish(),
            Err(reason) => tracing::error!(target: "shoal::conductor", ?instance, %reason, "an instance that was taken over is lost"),
        }
    }

    /// Starts a conductor.
    async fn conduct(&mut self, begins: InstanceState, arguments: ConductorArguments, wished: Option<Wish>) -> Result<InstanceId, String> {
        let again = Wish::again(&arguments.order);
        let summary = InstanceSummary::of(&arguments.order, begins);
        let instance = summary.instance;
        let spawned = Actor::spawn_linked(None, Conductor, arguments, self.me.get_cell()).await;
        let (conductor, _) = spawned.map_err(|error| format!("the conductor did not start: {error}"))?;
        let held = Held { summary, conductor, again, wished, unwanted: false, waiting: Vec::new(), after: Vec::new() };
        if let Some(before) = self.instances.insert(instance, held)
            && let Some(held) = self.instances.get_mut(&instance)
        {
            // This node conducts it under an older term, too; that conductor will notice. Who waits goes on waiting.
            (held.waiting, held.after) = (before.waiting, before.after);
        }
        Ok(instance)
    }

    fn state(&mut self, instance: InstanceId, term: Term, state: InstanceState, running: Option<Box<Running>>) {
        // A conductor that was superseded, perhaps by another one of this node, has no say any more.
        let Some(held) = self.instances.get_mut(&instance).filter(|held| held.summary.term == term) else { return };
        held.summary.state = state.clone();
        let waits = matches!(state, InstanceState::Waiting(_));
        match state {
            InstanceState::Ready => {
                held.wished = None;
                if let Some(running) = running {
                    held.summary.runs(&running);
                    self.arguments.schedulers.insert(instance, running.scheduler);
                }
                let ready = PlacementReply::Ready(Box::new(held.summary.clone()));
                held.waiting.drain(..).for_each(|way| way.reply(Ok(ready.clone())));
            }
            InstanceState::Stopping(reason) => {
                held.waiting.drain(..).for_each(|way| way.reply(Err(PlacementRefusal { reason: reason.clone() })));
            }
            InstanceState::Failed(reason) | InstanceState::Waiting(reason) => {
                if let Some(mut held) = self.instances.remove(&instance) {
                    std::mem::take(&mut held.waiting)
                        .into_iter()
                        .for_each(|way| way.reply(Err(PlacementRefusal { reason: reason.clone() })));
                    let after = std::mem::take(&mut held.after);
                    match held.wished.take() {
                        _ if held.unwanted => {}
                        Some(wish) => self.tried(held, wish, reason),
                        None if waits => self.waits(held, reason),
                        None => {}
                    }
                    after.into_iter().for_each(|call| self.call(call));
                }
            }
            _ => {}
        }
        self.publish();
    }

    fn tell(&self, message: impl Fn() -> ConductorMsg) {
        for held in self.instances.values() {
            let _ = held.conductor.cast(message());
        }
    }

    /// Takes every instance down; `done` is called when the last is.
    fn stop(&mut self, done: Box<dyn FnOnce() + Send>) {
        self.pass_on();
        let last = Countdown::new(done);
        for held in self.instances.values_mut() {
            held.unwanted = true;
            let last = last.clone();
            let _ = held.conductor.cast(ConductorMsg::Unload(Box::new(move || drop(last))));
        }
    }
}

/// Measured links as the planner takes them. A rate that was not measured is left to its assumptions.
pub(crate) fn links(measured: &crate::topology::LinkMatrix) -> LinkMatrix {
    let mut links = LinkMatrix::new();
    for (from, to, _) in measured.iter() {
        if let Some(best) = measured.between(from, to) {
            let bytes_per_second = best.bytes_per_second.unwrap_or(f64::NAN);
            links.set(from, to, Link { rtt_seconds: best.rtt.as_secs_f64(), bytes_per_second });
        }
    }
    links
}

fn plans(ground: &Ground, model: &LocalModel, card: &ModelCard, mut goal: Goal) -> Result<Vec<Plan>, PlanError> {
    goal.sha256 = Some(model.sha256.clone());
    // Every stage reads its own tensors from its own disk.
    goal.only_on_disk = true;
    goal.context_tokens = goal.context_tokens.min(card.context_tokens);
    let (mut cards, links) = (ground.cards(model), (ground.links)());
    cards.retain(|card| !card.leaving);
    let mut plans = plan(&PlanRequest { cards: &cards, links: &links, model: card, goal: &goal })?;
    plans.truncate(PLANS_MAX);
    Ok(plans)
}

impl Actor for PlacementActor {
    type Msg = PlacementMsg;
    type State = PlacementState;
    type Arguments = PlacementArguments;

    async fn pre_start(&self, me: ActorRef<PlacementMsg>, arguments: PlacementArguments) -> Result<PlacementState, ActorProcessingErr> {
        Ok(PlacementState {
            arguments,
            me,
            instances: BTreeMap::new(),
            waiting: BTreeMap::new(),
            looking: false,
            last_counter: 0,
            last_gone: None,
        })
    }

    async fn handle(
        &self,
        _me: ActorRef<PlacementMsg>,
        message: PlacementMsg,
        state: &mut PlacementState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            PlacementMsg::Call(call) => state.call(call),
            PlacementMsg::Prepared(prepared) => state.prepared(*prepared).await,
            PlacementMsg::State(instance, term, new, running) => state.state(instance, term, new, running),
            PlacementMsg::Notice(notice) => {
                if let Some(held) = state.instances.get(&notice.key.instance) {
                    let _ = held.conductor.cast(ConductorMsg::Notice(notice));
                }
            }
            PlacementMsg::Gone { node, left } => {
                state.last_gone = Some(state.arguments.ground.env.clock.now());
                state.tell(|| ConductorMsg::Gone(node));
                let me = state.me.clone();
                if left {
                    return Ok(());
                }
                succeed(&state.arguments.ground, node, move |heir| drop(me.cast(PlacementMsg::Heir(Box::new(heir)))));
            }
            PlacementMsg::Heir(heir) => state.heir(*heir).await,
            PlacementMsg::Leaving(call) => {
                let me = state.me.clone();
                let conductor = |instance| state.instances.get(&instance).map(|held| held.conductor.clone());
                serve_leaving(&state.arguments.ground, call, conductor, move |heir| drop(me.cast(PlacementMsg::Heir(Box::new(heir)))));
            }
            PlacementMsg::LeaseLost(lease, reason) => state.tell(|| ConductorMsg::LeaseLost(lease, reason.clone())),
            PlacementMsg::Stop(done) => state.stop(done),
            PlacementMsg::Look => state.look().await,
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        _me: ActorRef<PlacementMsg>,
        event: ractor::SupervisionEvent,
        state: &mut PlacementState,
    ) -> Result<(), ActorProcessingErr> {
        // A conductor stops by itself when its instance is gone. One that fails takes its instance with it: its leases
        // are not renewed any more and expire at their owners.
        if let ractor::SupervisionEvent::ActorFailed(cell, error) = event {
            let of = |held: &&Held| held.conductor.get_id() == cell.get_id();
            let failed: Vec<(InstanceId, Term)> =
                state.instances.values().filter(of).map(|held| (held.summary.instance, held.summary.term)).collect();
            for (instance, term) in failed {
                state.state(instance, term, InstanceState::Failed(format!("its conductor failed: {error}")), None);
            }
        }
        Ok(())
    }
}
