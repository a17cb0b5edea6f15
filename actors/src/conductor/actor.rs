//! The actor that holds one instance together: it assembles the pipeline, watches those who hold its stages, and takes
//! everything down when it breaks or is not wanted any more.

use std::sync::Arc;
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::assemble::{Assembled, Ground, Order, assemble, take_down};
use super::instance::InstanceState;
use super::journal::{Journal, JournalRequest};
use crate::ids::{LeaseId, NodeId};
use crate::scheduler::{SchedulerActor, SchedulerArguments, SchedulerMsg};
use crate::stage::StageNotice;
use crate::stage::port::{PortCloser, PortEvents};

/// How long the answers of a broken instance can still be read before its scheduler goes.
const LINGER: Duration = Duration::from_secs(5);
/// How long a broken pipeline waits for the word of the stage that broke first: its neighbours notice at the same
/// time, and only know that it is gone.
const CAUSE_WAIT: Duration = Duration::from_millis(150);

/// What a conductor reports to the placement actor.
pub type StateSink = Arc<dyn Fn(InstanceState, Option<ActorRef<SchedulerMsg>>) + Send + Sync>;

/// What a conductor is started with.
pub struct ConductorArguments {
    /// The node's parts.
    pub ground: Ground,
    /// What to assemble.
    pub order: Order,
    /// Told of every change.
    pub state: StateSink,
}

/// Messages of a conductor.
pub enum ConductorMsg {
    /// The pipeline stands, or could not be made.
    #[doc(hidden)]
    Assembled(Box<Result<Assembled, String>>),
    /// A stage holder says that a stage is gone.
    Notice(StageNotice),
    /// A node is gone.
    Gone(NodeId),
    /// This node does not hold a lease any more.
    LeaseLost(LeaseId, String),
    /// The pipeline is broken; the cause may still be on its way.
    Broken(String),
    /// Time to act on it.
    #[doc(hidden)]
    Act,
    /// Not wanted any more; answered when everything is given back.
    Unload(Box<dyn FnOnce() + Send>),
}

impl std::fmt::Debug for ConductorMsg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Assembled(_) => "Assembled",
            Self::Notice(_) => "Notice",
            Self::Gone(_) => "Gone",
            Self::LeaseLost(..) => "LeaseLost",
            Self::Broken(_) => "Broken",
            Self::Act => "Act",
            Self::Unload(_) => "Unload",
        })
    }
}

/// Holds one instance together: assembles it, watches its holders, takes it down.
pub struct Conductor;

/// What the actor remembers.
pub struct ConductorState {
    arguments: ConductorArguments,
    me: ActorRef<ConductorMsg>,
    leases: Vec<LeaseId>,
    scheduler: Option<ActorRef<SchedulerMsg>>,
    closer: Option<PortCloser>,
    assembling: bool,
    /// Why it broke: the word of whoever knows best.
    broken: Option<(Cause, String)>,
    ended: bool,
    unloads: Vec<Box<dyn FnOnce() + Send>>,
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
        let assembled = match result {
            Ok(assembled) => assembled,
            Err(reason) => {
                self.ended = true;
                (self.arguments.state)(InstanceState::Failed(reason), None);
                return self.unloaded();
            }
        };
        let Assembled { leases, sender, port, config, text } = assembled;
        self.leases = leases;
        if !self.unloads.is_empty() || self.broken.is_some() {
            return self.end().await;
        }
        let (me, ground, order) = (self.me.clone(), &self.arguments.ground, &self.arguments.order);
        let broken: Arc<dyn Fn(String) + Send + Sync> = Arc::new(move |reason| drop(me.cast(ConductorMsg::Broken(reason))));
        self.closer = Some(port.closer());
        let sequences_max = config.rows_max.max(config.sequences_max);
        let arguments = SchedulerArguments {
            env: ground.env.clone(),
            node: ground.node,
            instance: order.instance,
            term: order.term,
            members: order.members.clone(),
            config,
            vocabulary: order.card.vocabulary as usize,
            text,
            port: sender,
            services: ground.services.clone(),
            broken: Arc::clone(&broken),
        };
        let scheduler = match Actor::spawn_linked(None, SchedulerActor, arguments, self.me.get_cell()).await {
            Ok((scheduler, _)) => scheduler,
            Err(error) => return self.broke(Cause::Node, format!("the scheduler did not start: {error}")),
        };
        let answers = scheduler.clone();
        let tokens = Box::new(move |tokens| drop(answers.cast(SchedulerMsg::Answer(tokens))));
        let events = PortEvents { tokens, broken };
        if let Err(error) = port.start(sequences_max, events) {
            return self.broke(Cause::Node, format!("cannot start the pipeline's threads: {error}"));
        }
        self.scheduler = Some(scheduler.clone());
        (self.arguments.state)(InstanceState::Ready, Some(scheduler));
    }

    /// Notes a reason and acts a little later, when a better one may have come.
    fn broke(&mut self, cause: Cause, reason: String) {
        if self.ended {
            return;
        }
        let first = self.broken.is_none();
        if self.broken.as_ref().is_none_or(|(known, _)| *known < cause) {
            self.broken = Some((cause, reason));
        }
        if first {
            let (me, clock) = (self.me.clone(), Arc::clone(&self.arguments.ground.env.clock));
            let act = async move {
                clock.sleep_until(clock.now() + CAUSE_WAIT).await;
                let _ = me.cast(ConductorMsg::Act);
            };
            self.arguments.ground.env.spawner.task("conductor", Box::pin(act));
        }
    }

    /// Ends every answer, drops every stage, gives every lease back.
    async fn end(&mut self) {
        if self.ended || self.assembling {
            return;
        }
        self.ended = true;
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
        for node in order.plan.nodes() {
            ground.membership.unwatch(node);
        }
        (self.arguments.state)(InstanceState::Failed(reason), None);
        self.unloaded();
    }

    /// Answers who waited for the end, and stops once late readers have had their time.
    fn unloaded(&mut self) {
        self.unloads.drain(..).for_each(|tell| tell());
        let (me, clock) = (self.me.clone(), Arc::clone(&self.arguments.ground.env.clock));
        let stop = async move {
            clock.sleep_until(clock.now() + LINGER).await;
            me.stop(None);
        };
        self.arguments.ground.env.spawner.task("conductor", Box::pin(stop));
    }
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
        for node in arguments.order.plan.nodes() {
            arguments.ground.membership.watch_closely(node);
        }
        (arguments.state)(InstanceState::Leasing, None);
        let (ground, order, state, reply) = (arguments.ground.clone(), arguments.order.clone(), Arc::clone(&arguments.state), me.clone());
        let task = async move {
            let result = assemble(&ground, &order, &|| state(InstanceState::Loading, None)).await;
            let _ = reply.cast(ConductorMsg::Assembled(Box::new(result)));
        };
        arguments.ground.env.spawner.task("assemble", Box::pin(task));
        Ok(ConductorState {
            arguments,
            me,
            leases: Vec::new(),
            scheduler: None,
            closer: None,
            assembling: true,
            broken: None,
            ended: false,
            unloads: Vec::new(),
        })
    }

    async fn handle(
        &self,
        _me: ActorRef<ConductorMsg>,
        message: ConductorMsg,
        state: &mut ConductorState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            ConductorMsg::Assembled(result) => state.assembled(*result).await,
            ConductorMsg::Notice(notice) => {
                let order = &state.arguments.order;
                let current = notice.key.instance == order.instance && notice.key.term == order.term && notice.key.epoch == order.epoch;
                if let Some(stage) = order.plan.stages.get(notice.key.stage as usize).filter(|_| current) {
                    let reason = format!("node {} lost {}: {}", stage.name, layers(&stage.layers), notice.reason);
                    state.broke(Cause::Stage, reason);
                }
            }
            ConductorMsg::Gone(node) => {
                let holds = state.arguments.order.plan.nodes().any(|holder| holder == node);
                if holds {
                    let (name, layers) = (state.name(node), state.layers(node));
                    state.broke(
                        Cause::Node,
                        format!("node {name}, which held {layers}, is gone; the next request places the model on the nodes that are left"),
                    );
                }
            }
            ConductorMsg::LeaseLost(lease, reason) => {
                if state.leases.contains(&lease) {
                    state.broke(Cause::Node, reason);
                }
            }
            ConductorMsg::Broken(reason) => state.broke(Cause::Symptom, reason),
            ConductorMsg::Act => state.end().await,
            ConductorMsg::Unload(done) => {
                if state.ended {
                    done();
                } else {
                    state.unloads.push(done);
                    state.end().await;
                }
            }
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
            state.broke(Cause::Node, format!("the scheduler failed: {error}"));
        }
        Ok(())
    }
}
