//! The actor around [`super::Scheduler`] and [`super::Answers`]: one for each instance, at its conductor.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use shoal_engine::sampler::StopMatcher;

use super::answers::{Answers, Pushed};
use super::find::Finding;
use super::machine::{Event, Finish, Scheduler, SchedulerConfig, SubmitError, Work};
use super::service::{Generate, GenerateCall, GenerateRefusal, GenerateReply};
use crate::conductor::journal::{self, Journal, JournalEntry, JournalRequest};
use crate::env::{Env, TextModel};
use crate::ids::{InstanceId, NodeId, PlanEpoch, RequestId, Term};
use crate::membership::Membership;
use crate::request::{Chunk, GenerateRequest, SHAPE_BYTES_MAX};
use crate::service::{Inbound, Replier, Services};
use crate::stage::message::{TOP_MAX, Tokens};
use crate::stage::port::PortSender;

/// How often waiting readers are looked after.
const TICK: Duration = Duration::from_millis(250);
/// How long another member may take to remember a request.
const JOURNAL_TIMEOUT: Duration = Duration::from_secs(2);
/// When none could, the members are asked again after this: one that died is replaced by then.
const JOURNAL_PAUSE: Duration = Duration::from_millis(500);
/// How often they are asked in all: for longer than it takes to notice that a member is gone.
const JOURNAL_TRIES: u32 = 12;

/// A pipeline to run on.
pub struct Pipeline {
    /// The arrangement of stages that it is.
    pub epoch: PlanEpoch,
    /// Who else remembers requests.
    pub members: Vec<NodeId>,
    /// Limits.
    pub config: SchedulerConfig,
    /// Where steps go.
    pub port: PortSender,
    /// Told when the pipeline answers nonsense or does not take a step.
    pub broken: Arc<dyn Fn(String) + Send + Sync>,
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pipeline").field("epoch", &self.epoch).field("config", &self.config).finish_non_exhaustive()
    }
}

/// What the scheduler actor is started with.
pub struct SchedulerArguments {
    /// Seams.
    pub env: Env,
    /// This node.
    pub node: NodeId,
    /// The instance.
    pub instance: InstanceId,
    /// The term it is conducted under.
    pub term: Term,
    /// What it begins with.
    pub pipeline: Pipeline,
    /// Entries of the model's vocabulary.
    pub vocabulary: usize,
    /// Tokenizer and template.
    pub text: Arc<dyn TextModel>,
    /// Requests to go on with, as the members of the instance remember them.
    pub entries: Vec<JournalEntry>,
    /// Peers.
    pub services: Services,
    /// Who of them is there.
    pub membership: Membership,
}

/// Messages of the scheduler actor.
pub enum SchedulerMsg {
    /// A call from a node.
    Call(Inbound<Generate>),
    /// A node looks for a request.
    Find(RequestId, Finding),
    /// The last stage's answer to a step, in an arrangement.
    Answer(PlanEpoch, Tokens),
    /// Another member has stored a request, or none could.
    Journaled {
        /// Which.
        request: RequestId,
        /// Whether one did.
        stored: bool,
    },
    /// Have the members remember a request that none of them could.
    #[doc(hidden)]
    StoreAgain(RequestId),
    /// The pipeline is broken and another one is being made: nothing is sent until it is there. Requests wait.
    Suspend,
    /// It is there: what ran is run again and goes on.
    Resume(Box<Pipeline>),
    /// Others remember its requests from now on.
    Members(Vec<NodeId>),
    /// Called with every open request as far as it is, for whoever goes on with them.
    Entries(Box<dyn FnOnce(Vec<JournalEntry>) + Send>),
    /// Called if no request is open; else dropped.
    IfIdle(Box<dyn FnOnce() + Send>),
    /// The instance broke: every request ends with this reason.
    Broken(String),
    /// Time passes.
    Tick,
}

impl From<Inbound<Generate>> for SchedulerMsg {
    fn from(call: Inbound<Generate>) -> Self {
        Self::Call(call)
    }
}

impl std::fmt::Debug for SchedulerMsg {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Call(_) => "Call",
            Self::Find(..) => "Find",
            Self::Answer(..) => "Answer",
            Self::Journaled { .. } => "Journaled",
            Self::StoreAgain(_) => "StoreAgain",
            Self::Suspend => "Suspend",
            Self::Resume(_) => "Resume",
            Self::Members(_) => "Members",
            Self::Entries(_) => "Entries",
            Self::IfIdle(_) => "IfIdle",
            Self::Broken(_) => "Broken",
            Self::Tick => "Tick",
        })
    }
}

/// Runs one instance's [`Scheduler`] and [`Answers`].
pub struct SchedulerActor;

/// What the actor remembers.
pub struct SchedulerState {
    arguments: SchedulerArguments,
    me: ActorRef<SchedulerMsg>,
    machine: Scheduler,
    answers: Answers<Replier<Generate>>,
    /// Submissions that wait until another member has stored the request.
    accepting: Vec<(RequestId, Replier<Generate>)>,
    /// Requests that another member has stored, or that need no other.
    journaled: BTreeSet<RequestId>,
    /// The requests that have not ended, and how often members were asked in vain to remember them.
    requests: BTreeMap<RequestId, (GenerateRequest, u32)>,
    suspended: bool,
    broken: Option<String>,
    message: Vec<u8>,
}

fn send_chunk(reply: Replier<Generate>, chunk: Chunk) {
    reply.reply(Ok(GenerateReply::Chunk(chunk)));
}

impl SchedulerState {
    /// The other members that are there.
    fn others(&self) -> Vec<NodeId> {
        let view = self.arguments.membership.view();
        let other = |member: &NodeId| *member != self.arguments.node && view.is_present(*member);
        self.arguments.pipeline.members.iter().copied().filter(other).collect()
    }

    fn submit(&mut self, request: GenerateRequest, reply: Option<Replier<Generate>>) {
        let id = request.id;
        if let Some((known, prompt_tokens)) = self.answers.asked(id) {
            // The same id is the same request.
            let same = known.asks_the_same(&request);
            match reply {
                Some(reply) if !same => reply.reply(Err(GenerateRefusal::OtherRequest(id))),
                // It was accepted before, or has even ended by now.
                Some(reply) if self.journaled.contains(&id) || !self.requests.contains_key(&id) => {
                    reply.reply(Ok(GenerateReply::Accepted { prompt_tokens }));
                }
                Some(reply) => self.accepting.push((id, reply)),
                None => {}
            }
            return;
        }
        match self.take(request) {
            Ok(()) => self.accepting.extend(reply.map(|reply| (id, reply))),
            Err(refusal) => {
                if let Some(reply) = reply {
                    reply.reply(Err(refusal));
                }
                return;
            }
        }
        self.store(id);
        self.pump();
    }

    fn take(&mut self, request: GenerateRequest) -> Result<(), GenerateRefusal> {
        if let Some(reason) = &self.broken {
            return Err(GenerateRefusal::Unavailable(reason.clone()));
        }
        let invalid = |reason: String| Err(GenerateRefusal::Invalid(reason));
        let stop = StopMatcher::new(request.stop.clone()).map_err(|error| GenerateRefusal::Invalid(error.to_string()))?;
        request.sampling.validate(self.arguments.vocabulary).map_err(|error| GenerateRefusal::Invalid(error.to_string()))?;
        if request.sampling.logprobs.is_some_and(|count| usize::from(count) > TOP_MAX) {
            return invalid(format!("`top_logprobs` is at most {TOP_MAX}"));
        }
        if request.shape.len() > SHAPE_BYTES_MAX {
            return invalid(format!("the shape of an answer is described in at most {SHAPE_BYTES_MAX} bytes"));
        }
        if request.max_tokens == Some(0) {
            return invalid("`max_tokens` is at least 1".to_owned());
        }
        let prompt = self.arguments.text.encode(&request.prompt).map_err(GenerateRefusal::Invalid)?;
        let work = Work {
            id: request.id,
            client: request.client,
            priority: request.priority,
            prompt: prompt.clone(),
            emitted: Vec::new(),
            sampling: request.sampling.clone(),
            max_tokens: request.max_tokens.unwrap_or(u32::MAX),
            ends: if request.ignore_end { BTreeSet::new() } else { self.arguments.text.ends() },
        };
        let now = self.arguments.env.clock.now();
        self.machine.submit(now, work).map_err(|error| match error {
            SubmitError::Busy { .. } => GenerateRefusal::Busy(error.to_string()),
            _ => GenerateRefusal::Invalid(error.to_string()),
        })?;
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        self.answers.open(now, request.clone(), prompt_tokens, self.arguments.text.decoder(), stop);
        self.requests.insert(request.id, (request, 0));
        Ok(())
    }

    /// Goes on with a request that a conductor before had accepted. What it told its reader of how likely those tokens were is lost.
    fn inherit(&mut self, entry: JournalEntry) {
        let JournalEntry { request, prompt, emitted, ended: known } = entry;
        let (now, id) = (self.arguments.env.clock.now(), request.id);
        let Ok(stop) = StopMatcher::new(request.stop.clone()) else { return };
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        self.answers.open(now, request.clone(), prompt_tokens, self.arguments.text.decoder(), stop);
        let pushed = |token: &u32| self.answers.push(id, *token, None, Vec::new(), &mut send_chunk);
        let stopped = emitted.iter().map(pushed).any(|pushed| pushed == Pushed::Stopped);
        if let Some(journal::Ended { reason, timing, .. }) = known {
            return self.answers.finish(now, id, reason, timing, &mut send_chunk);
        }
        let max_tokens = request.max_tokens.unwrap_or(u32::MAX);
        let ended = match (stopped, emitted.len() >= max_tokens as usize) {
            (true, _) => Some(Finish::Stop),
            (false, true) => Some(Finish::Length),
            _ if prompt.len() + emitted.len() >= self.arguments.pipeline.config.context_tokens as usize => Some(Finish::Length),
            _ => None,
        };
        if let Some(reason) = ended {
            return self.answers.finish(now, id, reason, super::Timing::default(), &mut send_chunk);
        }
        let ends = if request.ignore_end { BTreeSet::new() } else { self.arguments.text.ends() };
        let (client, priority, sampling) = (request.client, request.priority, request.sampling.clone());
        let work = Work { id, client, priority, prompt, emitted, sampling, max_tokens, ends };
        if let Err(error) = self.machine.submit(now, work) {
            return self.answers.fail(now, id, error.to_string(), &mut send_chunk);
        }
        self.journaled.insert(id);
        self.requests.insert(id, (request, 0));
    }

    /// A request that has not ended, as far as it is.
    fn entry(&self, request: RequestId) -> Option<JournalEntry> {
        let ((prompt, emitted), (asked, _)) = self.machine.known(request).zip(self.requests.get(&request))?;
        Some(JournalEntry { request: asked.clone(), prompt: prompt.to_vec(), emitted: emitted.to_vec(), ended: None })
    }

    /// Has the other members remember a request as far as it is; the first that does is enough to accept it.
    fn store(&mut self, request: RequestId) {
        let Some(entry) = self.entry(request) else {
            // It has ended meanwhile.
            return self.journaled(request, false);
        };
        let (instance, term) = (self.arguments.instance, self.arguments.term);
        let calls: Vec<_> = self
            .others()
            .into_iter()
            .map(|member| {
                let remote = self.arguments.services.remote::<Journal>(member);
                let store = JournalRequest::Store { instance, term, entry: Box::new(entry.clone()) };
                let membership = self.arguments.membership.clone();
                Box::pin(async move {
                    let stored = membership.while_present(member, remote.call(store, JOURNAL_TIMEOUT)).await;
                    matches!(stored, Some(Ok(Ok(_)))).then_some(()).ok_or(())
                })
            })
            .collect();
        if calls.is_empty() {
            return self.journaled(request, true);
        }
        let me = self.me.clone();
        let first = async move {
            let mut calls = calls;
            let mut stored = false;
            while !calls.is_empty() {
                let (result, _, rest) = futures::future::select_all(calls).await;
                if result.is_ok() && !stored {
                    stored = true;
                    let _ = me.cast(SchedulerMsg::Journaled { request, stored });
                }
                // The others are still waited for: dropping a call would take it back.
                calls = rest;
            }
            if !stored {
                let _ = me.cast(SchedulerMsg::Journaled { request, stored });
            }
        };
        self.arguments.env.spawner.task("journal", Box::pin(first));
    }

    fn journaled(&mut self, request: RequestId, stored: bool) {
        let Some(prompt_tokens) = self.answers.prompt_tokens(request) else { return };
        // One that has ended meanwhile needs nobody to remember it: all of its answer is here.
        let stored = stored || !self.requests.contains_key(&request);
        if stored && self.requests.contains_key(&request) {
            self.journaled.insert(request);
        }
        if !stored && self.may_be_stored_later(request) {
            return;
        }
        let mut kept = Vec::new();
        for (id, reply) in std::mem::take(&mut self.accepting) {
            match (id == request, stored) {
                (false, _) => kept.push((id, reply)),
                (true, true) => reply.reply(Ok(GenerateReply::Accepted { prompt_tokens })),
                (true, false) => reply.reply(Err(GenerateRefusal::Unavailable(
                    "no other member of the instance could remember the request; try again".to_owned(),
                ))),
            }
        }
        self.accepting = kept;
        if !stored {
            self.cancel(request, "no other member of the instance could remember the request");
        }
    }

    /// Whether there is nothing to be done about a request that no member could remember: because it is promised already and
    /// goes on, or because they will be asked again.
    fn may_be_stored_later(&mut self, request: RequestId) -> bool {
        let Some((_, tries)) = self.requests.get_mut(&request) else { return false };
        // Those who could not may be gone by now: then the next try finds out that nobody is needed.
        if self.suspended || self.journaled.contains(&request) {
            // Every request is stored again when the pipeline stands.
            return true;
        }
        *tries += 1;
        if *tries >= JOURNAL_TRIES {
            return false;
        }
        let (me, clock) = (self.me.clone(), Arc::clone(&self.arguments.env.clock));
        let again = async move {
            clock.sleep_until(clock.now() + JOURNAL_PAUSE).await;
            let _ = me.cast(SchedulerMsg::StoreAgain(request));
        };
        self.arguments.env.spawner.task("journal", Box::pin(again));
        true
    }

    /// Tells the other members' journals something that needs no answer: what is lost is told again with the next
    /// store, or replayed from the request.
    fn tell(&self, request: &JournalRequest) {
        for member in self.others() {
            if let Err(error) = self.arguments.services.remote::<Journal>(member).cast(request.clone()) {
                tracing::debug!(target: "shoal::scheduler", %error, "a member's journal misses an entry");
            }
        }
    }

    fn cancel(&mut self, request: RequestId, why: &str) {
        let now = self.arguments.env.clock.now();
        if self.machine.finish(now, request, Finish::Cancelled).is_some() {
            self.answers.fail(now, request, why.to_owned(), &mut send_chunk);
            self.ended(request, None);
            self.pump();
        }
    }

    fn ended(&mut self, request: RequestId, ended: Option<journal::Ended>) {
        self.journaled.remove(&request);
        self.requests.remove(&request);
        self.tell(&JournalRequest::Finish { instance: self.arguments.instance, term: self.arguments.term, request, ended });
    }

    /// Sends steps while the machine has some to send.
    fn pump(&mut self) {
        if self.broken.is_some() || self.suspended {
            return;
        }
        while let Some(step) = self.machine.next_step(self.arguments.env.clock.now()) {
            step.encode(&mut self.message);
            if let Err(error) = self.arguments.pipeline.port.send(std::mem::take(&mut self.message)) {
                (self.arguments.pipeline.broken)(error.to_string());
                return;
            }
        }
    }

    fn resume(&mut self, pipeline: Pipeline) {
        if self.broken.is_some() {
            return;
        }
        self.suspended = false;
        let never = self.machine.restart(pipeline.config.clone());
        self.arguments.pipeline = pipeline;
        for request in never {
            self.cancel(
                request,
                "the nodes that are left have no memory for an answer of this length; load the model with a longer context",
            );
        }
        self.pump();
        // The members may be others than before.
        self.store_all();
    }

    fn store_all(&mut self) {
        let all: Vec<RequestId> = self.requests.keys().copied().collect();
        all.into_iter().for_each(|request| self.store(request));
    }

    fn answer(&mut self, epoch: PlanEpoch, tokens: Tokens) {
        if self.suspended || epoch != self.arguments.pipeline.epoch {
            return;
        }
        let now = self.arguments.env.clock.now();
        let events = match self.machine.tokens(now, tokens) {
            Ok(events) => events,
            Err(error) => {
                (self.arguments.pipeline.broken)(error.to_string());
                return;
            }
        };
        // The next step leaves before anybody is told about this one: that is what the stages wait for.
        self.pump();
        let mut stopped = Vec::new();
        for event in events {
            match event {
                Event::Emitted { id, index, token, logprob, top } => {
                    let (instance, term) = (self.arguments.instance, self.arguments.term);
                    self.tell(&JournalRequest::Append { instance, term, request: id, from: index, tokens: vec![token] });
                    if self.answers.push(id, token, logprob, top, &mut send_chunk) == Pushed::Stopped {
                        stopped.push(id);
                    }
                }
                Event::Finished { id, reason, timing } => self.finished(id, reason, timing),
            }
        }
        for id in stopped {
            if let Some(Event::Finished { id, reason, timing }) = self.machine.finish(now, id, Finish::Stop) {
                self.finished(id, reason, timing);
            }
        }
        self.pump();
    }

    fn finished(&mut self, id: RequestId, reason: Finish, timing: super::Timing) {
        let now = self.arguments.env.clock.now();
        self.answers.finish(now, id, reason, timing, &mut send_chunk);
        let tokens = self.answers.tokens(id);
        self.ended(id, Some(journal::Ended { reason, timing, tokens }));
    }

    fn call(&mut self, call: Inbound<Generate>) {
        let Inbound { request, reply, .. } = call;
        let now = self.arguments.env.clock.now();
        match request {
            GenerateCall::Submit(request) => self.submit(*request, reply),
            GenerateCall::Read { request, after, .. } => {
                let Some(reply) = reply else { return };
                if self.machine.wake(request) {
                    self.pump();
                }
                if let Err(reply) = self.answers.read(now, request, after, reply, &mut send_chunk) {
                    reply.reply(Err(GenerateRefusal::UnknownRequest(request)));
                }
            }
            GenerateCall::Cancel { request, .. } => {
                self.cancel(request, "the request was cancelled");
                if let Some(reply) = reply {
                    reply.reply(Ok(GenerateReply::Done));
                }
            }
            GenerateCall::Leave { request, .. } => {
                if self.answers.leave(now, request) {
                    // Until its reader comes back, others have what it would need.
                    self.machine.pause(request);
                    self.pump();
                }
                if let Some(reply) = reply {
                    reply.reply(Ok(GenerateReply::Done));
                }
            }
            // Comes as [`SchedulerMsg::Find`].
            GenerateCall::Find(request) => {
                if let Some(reply) = reply {
                    reply.reply(Err(GenerateRefusal::UnknownRequest(request)));
                }
            }
        }
    }

    fn tick(&mut self) {
        let now = self.arguments.env.clock.now();
        for request in self.answers.tick(now, &mut send_chunk) {
            self.cancel(request, "nobody read the answer");
        }
    }

    fn break_off(&mut self, reason: String) {
        let now = self.arguments.env.clock.now();
        for request in self.answers.open_requests() {
            let _ = self.machine.finish(now, request, Finish::Cancelled);
            self.answers.fail(now, request, reason.clone(), &mut send_chunk);
        }
        self.requests.clear();
        for (_, reply) in std::mem::take(&mut self.accepting) {
            reply.reply(Err(GenerateRefusal::Unavailable(reason.clone())));
        }
        self.broken.get_or_insert(reason);
    }
}

impl Actor for SchedulerActor {
    type Msg = SchedulerMsg;
    type State = SchedulerState;
    type Arguments = SchedulerArguments;

    async fn pre_start(&self, me: ActorRef<SchedulerMsg>, arguments: SchedulerArguments) -> Result<SchedulerState, ActorProcessingErr> {
        let (clock, ticker) = (arguments.env.clock.clone(), me.clone());
        let ticks = async move {
            loop {
                clock.sleep_until(clock.now() + TICK).await;
                if ticker.cast(SchedulerMsg::Tick).is_err() {
                    return;
                }
            }
        };
        arguments.env.spawner.task("scheduler ticks", Box::pin(ticks));
        let mut arguments = arguments;
        let entries = std::mem::take(&mut arguments.entries);
        let mut state = SchedulerState {
            machine: Scheduler::new(arguments.pipeline.config.clone()),
            arguments,
            me,
            answers: Answers::default(),
            accepting: Vec::new(),
            journaled: BTreeSet::new(),
            requests: BTreeMap::new(),
            suspended: false,
            broken: None,
            message: Vec::new(),
        };
        entries.into_iter().for_each(|entry| state.inherit(entry));
        state.store_all();
        Ok(state)
    }

    async fn post_start(&self, _me: ActorRef<SchedulerMsg>, state: &mut SchedulerState) -> Result<(), ActorProcessingErr> {
        state.pump();
        Ok(())
    }

    async fn handle(
        &self,
        _me: ActorRef<SchedulerMsg>,
        message: SchedulerMsg,
        state: &mut SchedulerState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            SchedulerMsg::Call(call) => state.call(call),
            SchedulerMsg::Find(request, finding) => {
                if let Some((asked, prompt_tokens)) = state.answers.asked(request) {
                    finding.found(asked, Some(prompt_tokens));
                }
            }
            SchedulerMsg::Answer(epoch, tokens) => state.answer(epoch, tokens),
            SchedulerMsg::Journaled { request, stored } => state.journaled(request, stored),
            SchedulerMsg::StoreAgain(request) if state.journaled.contains(&request) => {}
            SchedulerMsg::StoreAgain(request) => state.store(request),
            SchedulerMsg::Suspend => state.suspended = true,
            SchedulerMsg::Resume(pipeline) => state.resume(*pipeline),
            SchedulerMsg::Members(members) => {
                state.arguments.pipeline.members = members;
                state.store_all();
            }
            SchedulerMsg::Entries(call) => call(state.requests.keys().filter_map(|request| state.entry(*request)).collect()),
            SchedulerMsg::IfIdle(call) if state.requests.is_empty() => call(),
            SchedulerMsg::IfIdle(_) => {}
            SchedulerMsg::Broken(reason) => state.break_off(reason),
            SchedulerMsg::Tick => state.tick(),
        }
        Ok(())
    }
}
