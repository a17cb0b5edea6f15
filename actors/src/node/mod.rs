//! A node: what people start, embed and ask.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use shoal_actors::node::{GenerateOptions, Node, Piece};
//!
//! let node = Node::builder().start().await?;
//! let mut answer = node.generate("smollm2:135m", GenerateOptions::chat("Why is the sky blue?")).await?;
//! while let Some(piece) = answer.next().await {
//!     if let Piece::Token(token) = piece? {
//!         print!("{}", token.text);
//!     }
//! }
//! node.leave().await;
//! # Ok(()) }
//! ```

mod builder;
mod error;
mod generation;
mod lock;
mod parts;
mod pool;
mod tensors;

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ractor::ActorRef;
use shoal_engine::sampler::SamplingParams;
use shoal_transport::path::PathHealth;
use tokio::sync::watch;

pub use builder::NodeBuilder;
pub use error::{NodeError, StartError};
pub use generation::{GenerateError, Generation, Piece, Reach};
pub use pool::{LeaseFailure, Pool, UserLease};

use crate::catalog::{Catalog, CatalogError, Reference};
use crate::conductor::instance::{InstanceState, InstanceSummary};
use crate::conductor::{Drain, Placement, PlacementMsg, PlacementReply, PlacementRequest, Reuse, Undrained};
use crate::discovery::Discovery;
use crate::env::{BoxFuture, Env, Trouble};
use crate::ids::{InstanceId, LeaseId, NodeId, RequestId};
use crate::lease::{HeldLease, LeaseKeeper, LeaseView, Leases};
use crate::linkbench::{self, BenchOptions, LinkBenchError, LinkBenchRow};
use crate::membership::{ClusterView, Membership};
use crate::network::NetworkHandle;
use crate::plan::{Goal, Plan};
use crate::pressure::MemoryWatch;
use crate::request::{ChatMessage, Client, GenerateRequest, Priority, Prompt, Unread};
use crate::scheduler::GenerateRefusal;
use crate::service::{Remote, ServeError, Service, Services};
use crate::stage::links::TensorLinks;
use crate::stage::{DetourServer, WorkersMsg};
use crate::topology::{LinkMatrix, Topology};
use lock::FolderLock;
use parts::SupervisorMsg;

/// How long placing and loading a model may take.
const LOAD_TIMEOUT: Duration = Duration::from_secs(660);
/// How long planning may take: the placing node reads the model's header.
const PLAN_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a node that leaves takes to give away what it has, unless told otherwise.
pub const DRAIN: Duration = Duration::from_secs(30);
/// How long a conductor may take to say whether it still has an instance.
const PRESENCE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it takes a member, at most, to be seen as the heir of a conductor that is gone: its death is noticed, the claim made and
/// gossiped.
const HEIR_WAIT: Duration = Duration::from_secs(4);
/// How long an instance may change hands before a request that it does not take fails.
const SETTLES: Duration = Duration::from_secs(15);
/// How often it is looked for.
const HEIR_LOOK: Duration = Duration::from_millis(100);

/// A running node. Every clone is the same one.
#[derive(Clone)]
pub struct Node(Arc<Inner>);

struct Inner {
    env: Env,
    node: NodeId,
    services: Services,
    network: NetworkHandle,
    discovery: Discovery,
    membership: Membership,
    topology: Topology,
    catalog: Catalog,
    leases: Leases,
    memory: MemoryWatch,
    keeper: LeaseKeeper,
    links: TensorLinks,
    detours: DetourServer,
    placement: ActorRef<PlacementMsg>,
    workers: ActorRef<WorkersMsg>,
    supervisor: ActorRef<SupervisorMsg>,
    stopped: watch::Receiver<Option<String>>,
    lock: Mutex<Option<FolderLock>>,
    left: tokio::sync::OnceCell<()>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Node({:?})", self.0.node)
    }
}

/// What to generate, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// What to continue.
    pub prompt: Prompt,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Most tokens; none: as many as the context holds.
    pub max_tokens: Option<u32>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// Whether to go on when the model ends its text.
    pub ignore_end: bool,
    /// What to place the model for, if it is not placed yet.
    pub goal: Goal,
    /// The request's name; none: a fresh one that nobody can guess.
    pub id: Option<RequestId>,
    /// What becomes of it when nobody reads its answer any more.
    pub unread: Unread,
    /// How the answer is shaped for its client ([`GenerateRequest::shape`]).
    pub shape: String,
    /// Who asks, so that nobody takes more than a fair share from others; none: this node.
    pub client: Option<Client>,
    /// How urgent it is.
    pub priority: Priority,
}

impl GenerateOptions {
    /// Continues `prompt`, choosing the likeliest token always.
    pub fn new(prompt: Prompt) -> Self {
        Self {
            prompt,
            sampling: SamplingParams::greedy(),
            max_tokens: None,
            stop: Vec::new(),
            ignore_end: false,
            goal: default_goal(),
            id: None,
            unread: Unread::Cancel,
            shape: String::new(),
            client: None,
            priority: Priority::Normal,
        }
    }

    /// Answers one message of a user.
    pub fn chat(text: impl Into<String>) -> Self {
        Self::new(Prompt::Chat { messages: vec![ChatMessage::new("user", text)], tools: String::new() })
    }
}

/// A model as a node found it in the cluster.
struct Found {
    /// The name under which the catalogue knows it.
    name: String,
    /// The node that is to place it, and the file's hash there; none if no node has it.
    placer: Option<(NodeId, String)>,
    /// Why this node's own file of it cannot be used.
    unusable: Option<CatalogError>,
    /// What to call it when asking that node.
    asked: String,
}

fn other_question() -> NodeError {
    NodeError::NotPlaced("the placing node gave an answer to another question".to_owned())
}

/// What models are placed for when nobody says otherwise: a context of 4096 tokens, four sequences of half that length
/// or two of all of it.
pub fn default_goal() -> Goal {
    Goal { context_tokens: 4096, sequences: 2, ..Goal::default() }
}

impl Node {
    /// Sets a node up.
    pub fn builder() -> NodeBuilder {
        NodeBuilder::default()
    }

    /// Who it is.
    pub fn id(&self) -> NodeId {
        self.0.node
    }

    /// The seams it was started with.
    pub fn env(&self) -> &Env {
        &self.0.env
    }

    /// Its services, to serve and to call others.
    pub fn services(&self) -> &Services {
        &self.0.services
    }

    /// Serves `S` with an actor, to which a request is one of its messages.
    ///
    /// # Errors
    /// If the service's number is taken.
    pub fn serve<S, M>(&self, actor: ActorRef<M>) -> Result<(), ServeError>
    where
        S: Service,
        M: ractor::Message + From<crate::service::Inbound<S>>,
    {
        self.0.services.serve_actor::<S, M>(actor)
    }

    /// The service `S` on a node.
    pub fn remote<S: Service>(&self, node: NodeId) -> Remote<S> {
        self.0.services.remote(node)
    }

    /// The cluster as this node sees it.
    pub fn view(&self) -> Arc<ClusterView> {
        self.0.membership.view()
    }

    /// Who is there.
    pub fn membership(&self) -> &Membership {
        &self.0.membership
    }

    /// The search for peers.
    pub fn discovery(&self) -> &Discovery {
        &self.0.discovery
    }

    /// The control network.
    pub fn network(&self) -> &NetworkHandle {
        &self.0.network
    }

    /// What keeps this node from finding others or lending what it was told to, or others from finding it, at the moment: a given peer
    /// that does not answer, a port that another program has, other programs that need the memory.
    pub fn troubles(&self) -> Vec<Trouble> {
        let mut troubles = self.0.network.troubles();
        troubles.extend(self.0.discovery.troubles());
        troubles.extend(self.0.memory.trouble());
        troubles
    }

    /// How nodes are connected.
    pub fn topology(&self) -> &Topology {
        &self.0.topology
    }

    /// The links between nodes, as far as they are known.
    pub fn links(&self) -> Arc<LinkMatrix> {
        self.0.topology.links()
    }

    /// Measures tensor links to a connected peer, over each provider that both have. Rows come as they are measured; dropping their
    /// receiver ends it.
    pub fn bench_links(&self, peer: NodeId, options: BenchOptions) -> tokio::sync::mpsc::Receiver<Result<LinkBenchRow, LinkBenchError>> {
        linkbench::start(&self.0.env, &self.0.services, &self.0.links, peer, options)
    }

    /// What this node lends.
    pub fn leases(&self) -> LeaseView {
        self.0.leases.view()
    }

    /// What carries each hop of a pipeline that leads from this node to another one, or to itself.
    pub fn hops(&self) -> Vec<(NodeId, PathHealth)> {
        self.0.links.hops()
    }

    /// What each node of the cluster lends: its own word, or why there is none.
    pub async fn lending(&self) -> Vec<(NodeId, Result<LeaseView, String>)> {
        pool::lending(self).await
    }

    /// Takes memory back that this node lends. Its holder is told `why`; the memory is free when nobody can touch it any more.
    pub fn revoke(&self, lease: LeaseId, why: impl Into<String>) {
        self.0.leases.revoke(lease, why);
    }

    /// What this node holds of others and of itself.
    pub fn held(&self) -> Vec<HeldLease> {
        self.0.keeper.held()
    }

    /// Leases memory of other nodes.
    pub fn keeper(&self) -> &LeaseKeeper {
        &self.0.keeper
    }

    /// Its tensor links.
    pub(crate) fn tensor_links(&self) -> &TensorLinks {
        &self.0.links
    }

    /// The memory of the whole cluster, for a program of the user's own. `name` is what lenders see.
    pub fn pool(&self, name: impl Into<String>) -> Pool {
        Pool::new(self.clone(), name.into())
    }

    /// The models on this machine.
    pub fn catalog(&self) -> &Catalog {
        &self.0.catalog
    }

    /// Every placed model of the cluster, as their conductors announce them, in order of their ids.
    pub fn instances(&self) -> Vec<InstanceSummary> {
        let view = self.view();
        let mut all: Vec<InstanceSummary> = view.present().flat_map(|(_, member)| member.card.instances.clone()).collect();
        all.sort_by_key(|instance| instance.instance);
        all
    }

    /// The name under which the catalogue knows what a user wrote, and the file's hash if it is on this machine, or why the file that
    /// is there cannot be used.
    async fn canonical(&self, model: &str) -> Result<(String, Result<String, CatalogError>), NodeError> {
        let error = match self.0.catalog.resolve(model).await {
            Ok(local) => return Ok((local.name, Ok(local.sha256))),
            Err(error) => error,
        };
        match self.0.catalog.parse(model)? {
            // A path names a file of this machine: no other node has anything by that name.
            Reference::File(_) => Err(error.into()),
            reference => Ok((reference.to_string(), Err(error))),
        }
    }

    /// The node that is to place a model: of those that have it on disk the one that a hash of both names, so that all
    /// nodes choose the same. `usable` says whether this node can use what it has.
    fn placer(&self, name: &str, sha256: Option<&str>, usable: bool) -> Option<(NodeId, String)> {
        let view = self.view();
        let having = view.staying().filter(|(node, _)| usable || *node != self.0.node).filter_map(|(node, member)| {
            let card = &member.card;
            let found = card.models.iter().find(|model| sha256.map_or(model.name == name, |hash| model.sha256 == hash))?;
            // Where the model waits for room it is known what it is wanted for.
            let waits = |known: &InstanceSummary| matches!(known.state, InstanceState::Waiting(_)) && known.sha256 == found.sha256;
            Some(((card.instances.iter().any(waits), node.rank_for(&found.sha256)), (node, found.sha256.clone())))
        });
        let best = having.max_by_key(|(rank, _)| *rank).map(|(_, found)| found);
        // A file outside the models folder is in nobody's card, so this node has to place it.
        best.or_else(|| sha256.map(|hash| (self.0.node, hash.to_owned())))
    }

    fn unknown(&self, model: &str) -> NodeError {
        let view = self.view();
        let mut on_disk: Vec<String> =
            view.alive().flat_map(|(_, member)| member.card.models.iter().map(|model| model.name.clone())).collect();
        on_disk.sort();
        on_disk.dedup();
        NodeError::UnknownModel { model: model.to_owned(), on_disk }
    }

    /// Finds a model and the node that is to place it.
    async fn find(&self, model: &str) -> Result<Found, NodeError> {
        let (name, local) = self.canonical(model).await?;
        let unusable = local.as_ref().err().filter(|error| !matches!(error, CatalogError::NotHere { .. })).cloned();
        let placer = self.placer(&name, local.ok().as_deref(), unusable.is_none());
        // Only this node knows a file by the path that its user wrote.
        let own = placer.as_ref().is_some_and(|(node, _)| *node == self.0.node);
        let asked = if own { model.to_owned() } else { name.clone() };
        Ok(Found { name, placer, unusable, asked })
    }

    /// Asks the placing node of a model that was found.
    async fn ask(&self, model: &str, found: &Found, request: PlacementRequest, timeout: Duration) -> Result<PlacementReply, NodeError> {
        let nobody = || found.unusable.clone().map_or_else(|| self.unknown(model), NodeError::from);
        let (placer, _) = found.placer.as_ref().ok_or_else(nobody)?;
        self.place(*placer, request, timeout).await
    }

    async fn place(&self, node: NodeId, request: PlacementRequest, timeout: Duration) -> Result<PlacementReply, NodeError> {
        match self.remote::<Placement>(node).call(request, timeout).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(refusal)) => Err(NodeError::NotPlaced(refusal.reason)),
            Err(error) => Err(NodeError::Unreachable(error)),
        }
    }

    /// Has the placing node load a model that was found, or name the instance that it has of it.
    async fn place_ready(&self, model: &str, found: &Found, goal: Goal, reuse: Reuse) -> Result<InstanceSummary, NodeError> {
        // Who asks a question and says nothing of how large the instance is to be is content with what fits.
        let smaller = reuse == Reuse::Any && goal == default_goal();
        let request = PlacementRequest::Load { model: found.asked.clone(), goal, reuse, smaller };
        match self.ask(model, found, request, LOAD_TIMEOUT).await? {
            PlacementReply::Ready(summary) => Ok(*summary),
            _ => Err(other_question()),
        }
    }

    /// How a model could be placed now, best first.
    ///
    /// # Errors
    /// If no node has it, or it fits nowhere; the text says what is missing.
    pub fn plan<'a>(&'a self, model: &'a str, goal: Goal) -> BoxFuture<'a, Result<Vec<Plan>, NodeError>> {
        Box::pin(self.do_plan(model, goal))
    }

    async fn do_plan(&self, model: &str, goal: Goal) -> Result<Vec<Plan>, NodeError> {
        let found = self.find(model).await?;
        let request = PlacementRequest::Plan { model: found.asked.clone(), goal };
        match self.ask(model, &found, request, PLAN_TIMEOUT).await? {
            PlacementReply::Plans(plans) => Ok(plans),
            _ => Err(other_question()),
        }
    }

    /// An instance of a model as the goal asks for it (see [`InstanceSummary::meets`]), placed if there is none; ready when this
    /// resolves. With `replica` another one is placed in any case.
    ///
    /// A goal whose context is longer than the model's asks for the model's.
    ///
    /// # Errors
    /// If no node has it, it fits nowhere, or a node cannot load its layers; the text says what is missing.
    pub fn load<'a>(&'a self, model: &'a str, goal: Goal, replica: bool) -> BoxFuture<'a, Result<InstanceSummary, NodeError>> {
        Box::pin(self.instance(model, goal, if replica { Reuse::Never } else { Reuse::Fitting }))
    }

    /// As [`Node::load`], but a model that fits nowhere waits until there is room for it, in the state
    /// [`InstanceState::Waiting`]: that resolves at once. It is then placed by itself; [`Node::unload`] takes the wish back.
    ///
    /// # Errors
    /// If no node has it, or it can never be placed as the goal says.
    pub fn want<'a>(&'a self, model: &'a str, goal: Goal) -> BoxFuture<'a, Result<InstanceSummary, NodeError>> {
        Box::pin(async move {
            let found = self.find(model).await?;
            let request = PlacementRequest::Want { model: found.asked.clone(), goal };
            match self.ask(model, &found, request, LOAD_TIMEOUT).await? {
                PlacementReply::Ready(summary) | PlacementReply::Waiting(summary) => Ok(*summary),
                _ => Err(other_question()),
            }
        })
    }

    async fn instance(&self, model: &str, goal: Goal, reuse: Reuse) -> Result<InstanceSummary, NodeError> {
        let found = self.find(model).await?;
        let same = |instance: &InstanceSummary| match &found.placer {
            Some((_, hash)) => &instance.sha256 == hash,
            None => instance.model == found.name,
        };
        let will_do =
            |instance: &InstanceSummary| instance.state == InstanceState::Ready && same(instance) && reuse.allows(instance, &goal);
        for ready in self.instances().into_iter().filter(will_do) {
            // Cards are a moment old. Who only has a question finds out by asking it.
            if reuse == Reuse::Any || self.is_there(&ready).await {
                return Ok(ready);
            }
        }
        self.place_ready(model, &found, goal, reuse).await
    }

    /// Whether the conductor that announced an instance still has it.
    async fn is_there(&self, instance: &InstanceSummary) -> bool {
        let request = PlacementRequest::Has(instance.instance);
        let answer = self.remote::<Placement>(instance.term.node).call(request, PRESENCE_TIMEOUT).await;
        matches!(answer, Ok(Ok(PlacementReply::Done)))
    }

    /// Takes a placed model down. Resolves when its stages are dropped and its leases released; their owners lend the memory again as
    /// soon as they have fenced it.
    ///
    /// # Errors
    /// If there is no such instance, or its conductor does not answer.
    pub fn unload(&self, instance: InstanceId) -> BoxFuture<'_, Result<(), NodeError>> {
        Box::pin(self.do_unload(instance))
    }

    async fn do_unload(&self, instance: InstanceId) -> Result<(), NodeError> {
        let found = self.instances().into_iter().find(|known| known.instance == instance).ok_or(NodeError::UnknownInstance(instance))?;
        match self.place(found.term.node, PlacementRequest::Unload(instance), PLAN_TIMEOUT).await? {
            PlacementReply::Done => Ok(()),
            // The card that named it is old news.
            PlacementReply::NoInstance => Err(NodeError::UnknownInstance(instance)),
            _ => Err(other_question()),
        }
    }

    /// Asks a model for text. It is placed first if it is on a node's disk and not placed yet.
    ///
    /// # Errors
    /// As [`Node::load`], and what the model's conductor says of the request.
    pub fn generate<'a>(&'a self, model: &'a str, options: GenerateOptions) -> BoxFuture<'a, Result<Generation, NodeError>> {
        Box::pin(self.do_generate(model, options))
    }

    async fn do_generate(&self, model: &str, options: GenerateOptions) -> Result<Generation, NodeError> {
        let id = options.id.unwrap_or_else(|| RequestId::random(&*self.0.env.rng));
        let mut instance = self.instance(model, options.goal.clone(), Reuse::Any).await?;
        let began = self.0.env.clock.now();
        loop {
            let request = GenerateRequest {
                id,
                instance: instance.instance,
                prompt: options.prompt.clone(),
                sampling: options.sampling.clone(),
                max_tokens: options.max_tokens,
                stop: options.stop.clone(),
                ignore_end: options.ignore_end,
                unread: options.unread,
                shape: options.shape.clone(),
                client: options.client.unwrap_or_else(|| Client::new(&self.id().0, None)),
                priority: options.priority,
            };
            let refused = match Generation::start(self.reach(), instance.term.node, request.clone()).await {
                // The instance went down between the look and the request: its card is old news.
                Err(error @ GenerateError::Refused(GenerateRefusal::UnknownInstance(_) | GenerateRefusal::Unavailable(_))) => error,
                // Its conductor did: another member may take it over.
                Err(error @ GenerateError::Unreachable(_)) => {
                    if self.has_heir(&instance).await {
                        return Ok(Generation::elsewhere(self.reach(), instance.term.node, request, error).await?);
                    }
                    error
                }
                result => return Ok(result?),
            };
            let gone = (instance.instance, instance.term);
            instance = self.load_other(model, &options.goal).await?;
            if self.0.env.clock.now().since(began) >= SETTLES {
                // It had its time, and has said why it does not take the request.
                return Err(refused.into());
            }
            if (instance.instance, instance.term) == gone {
                // It is the same: it may be about to be another's.
                self.0.env.clock.sleep_until(self.0.env.clock.now() + HEIR_LOOK).await;
            }
        }
    }

    /// Goes on with a request that any node of the cluster knows, from the beginning of its answer; it may have been asked at another
    /// node, which may be gone. `None` if nobody knows it. With `at_once` that is said as soon as all nodes that are known have said so,
    /// else it takes a moment longer, in which nodes find each other.
    ///
    /// # Errors
    /// If a node that may know it does not answer, or its instance is gone.
    pub fn resume(&self, request: RequestId, at_once: bool) -> BoxFuture<'_, Result<Option<Generation>, NodeError>> {
        Box::pin(async move { Ok(Generation::find(self.reach(), request, at_once).await?) })
    }

    /// Whether somebody soon takes over an instance whose conductor cannot be reached.
    async fn has_heir(&self, instance: &InstanceSummary) -> bool {
        let (clock, locate) = (&self.0.env.clock, generation::locate(self.0.membership.clone()));
        let until = clock.now() + HEIR_WAIT;
        while clock.now() < until {
            if locate(instance.instance).is_some_and(|node| node != instance.term.node) {
                return true;
            }
            clock.sleep_until(clock.now() + HEIR_LOOK).await;
        }
        false
    }

    /// How answers of this node find who conducts their instance.
    fn reach(&self) -> Reach {
        Reach { services: self.0.services.clone(), clock: Arc::clone(&self.0.env.clock), membership: self.0.membership.clone() }
    }

    /// Places a model whose known instance is gone, whatever the cards still say.
    async fn load_other(&self, model: &str, goal: &Goal) -> Result<InstanceSummary, NodeError> {
        let found = self.find(model).await?;
        self.place_ready(model, &found, goal.clone(), Reuse::Any).await
    }

    /// Resolves if the node stops by itself, with the reason. Never resolves for a node that was told to leave.
    pub async fn stopped(&self) -> String {
        let mut stopped = self.0.stopped.clone();
        loop {
            if let Some(reason) = stopped.borrow_and_update().clone() {
                return reason;
            }
            if stopped.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Gets ready to leave: from now on this node is given nothing new, the stages that it holds move to other nodes while their
    /// pipelines run, and what it conducts is handed to others. Resolves when nothing is left, or `within` is over, or at once if what
    /// is left fits nowhere else and answers nobody; gives what is left.
    pub fn drain(&self, within: Duration) -> BoxFuture<'_, Vec<Undrained>> {
        let clock = Arc::clone(&self.0.env.clock);
        let drain = Drain {
            node: self.0.node,
            clock: Arc::clone(&clock),
            services: self.0.services.clone(),
            membership: self.0.membership.clone(),
            leases: self.0.leases.clone(),
        };
        Box::pin(async move { drain.run(clock.now() + within).await })
    }

    /// Leaves the cluster: gives away what this node conducts and holds, for at most [`DRAIN`] ([`Node::drain`]), and then as
    /// [`Node::leave_at_once`].
    pub fn leave(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            if !self.0.left.initialized() {
                drop(self.drain(DRAIN).await);
            }
            self.leave_at_once().await;
        })
    }

    /// Leaves the cluster: takes down what this node conducts and holds, says good-bye, stops every actor and thread and
    /// frees every port.
    pub fn leave_at_once(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.0.left.get_or_init(|| self.0.stop()).await;
        })
    }
}

impl Inner {
    async fn stop(&self) {
        parts::stop_instances(&self.env, &self.placement).await;
        parts::stop_stages(&self.env, &self.workers).await;
        self.keeper.stop().await;
        self.membership.leave().await;
        self.catalog.stop().await;
        self.placement.stop(None);
        self.workers.stop(None);
        let (send, receive) = tokio::sync::oneshot::channel();
        if self.supervisor.cast(SupervisorMsg::Stop(Some(send))).is_ok() {
            let _ = receive.await;
        }
        let (links, detours) = (self.links.clone(), self.detours.clone());
        let end = move || {
            detours.end();
            links.shutdown();
        };
        let _ = self.env.blocking("shoal-links", end).await;
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}
