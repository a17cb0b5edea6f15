//! Has models placed, asks them, and reports what it was told.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::{Either, select};
use shoal_actors::SamplingParams;
use shoal_actors::conductor::Order;
use shoal_actors::conductor::instance::InstanceState;
use shoal_actors::conductor::journal;
use shoal_actors::env::TextModel;
use shoal_actors::ids::{InstanceId, NodeId, PlanEpoch, RequestId, Term};
use shoal_actors::node::{GenerateError, Generation, Piece, Reach};
use shoal_actors::plan::{Goal, LinkMatrix, PlanRequest, plan};
use shoal_actors::request::{GenerateRequest, Prompt, Unread};

use super::{Stage, model};
use crate::broken::Broken;
use crate::chance::Chance;
use crate::cluster::Life;
use crate::compute::ByteText;
use crate::invariants::{Heard, OpenRequest, Placed};
use crate::scenario::lock;
use crate::serving;

/// Pause between two acts.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(2500));
/// Instances that a client is content with.
const INSTANCES: usize = 2;
/// Requests of a client at a time.
const REQUESTS: u64 = 3;

/// The client of one life of a node.
pub(super) struct Client {
    stage: Stage,
    life: Arc<Life>,
    chance: Mutex<Chance>,
}

impl Client {
    /// Starts one on a node; it ends with this life of the node.
    pub(super) fn start(stage: Stage, life: Arc<Life>) {
        let number = life.node.number;
        let spawner = Arc::clone(&life.node.env.spawner);
        for n in 0..REQUESTS {
            let chance = stage.cluster.world.chance("client", life.life << 20 | n << 16 | u64::from(number));
            let client = Self { stage: stage.clone(), life: Arc::clone(&life), chance: Mutex::new(chance) };
            if n == 0 {
                client.hear();
            }
            spawner.task("client", Box::pin(async move { client.go_on(n == 0).await }));
        }
    }

    fn note(&self, text: String) {
        self.stage.cluster.world.note(format!("node {} {text}", self.life.node.number));
    }

    async fn go_on(&self, places: bool) {
        let world = self.stage.cluster.world.clone();
        loop {
            let pause = lock(&self.chance).duration(PAUSE.0, PAUSE.1);
            world.sleep(self.life.node.number, pause).await;
            if self.stage.closed() {
                return;
            }
            let known = self.known();
            let (one_more, picked) = {
                let mut chance = lock(&self.chance);
                (chance.percent(30), chance.pick(&known).copied())
            };
            match picked {
                Some((instance, conductor)) if !(places && one_more && known.len() < INSTANCES) => self.ask(instance, conductor).await,
                _ if places => self.place().await,
                _ => {}
            }
        }
    }

    /// The instances whose conductors are there, as far as this node can see.
    fn known(&self) -> Vec<(InstanceId, NodeId)> {
        let view = self.life.node.membership.view();
        let instances = lock(&self.stage.instances);
        instances.iter().filter(|(_, conductor)| view.is_present(**conductor)).map(|(id, conductor)| (*id, *conductor)).collect()
    }

    /// Places the model over some nodes, as they stand in the cards that have come here.
    async fn place(&self) {
        let node = &self.life.node;
        let Some(serving) = &node.serving else { return };
        let view = node.membership.view();
        let cards: Vec<_> = view.staying().map(|(_, member)| (*member.card).clone()).collect();
        let nodes_min = lock(&self.chance).between(1, 4.min(cards.len() as u64));
        let goal = Goal {
            context_tokens: model::CONTEXT,
            sequences: 4,
            rows_max: 16,
            nodes_min: u32::try_from(nodes_min).unwrap_or(1),
            ..Goal::default()
        };
        let card = model::card();
        let plans = plan(&PlanRequest { cards: &cards, links: &LinkMatrix::new(), model: &card, goal: &goal });
        let mut plan = match plans.map(|plans| plans.into_iter().next()) {
            Ok(Some(plan)) => plan,
            Ok(None) => return,
            Err(error) => {
                self.note(format!("finds no place for the model: {error}"));
                return self.stage.count(|counts| counts.not_placed += 1);
            }
        };
        if self.stage.cluster.broken() == Some(Broken::LayerTwice)
            && let Some(second) = plan.stages.get_mut(1)
        {
            second.layers.start -= 1;
        }
        let instance = InstanceId::random(&*node.env.rng);
        let stages: Vec<_> = plan.stages.iter().map(|stage| stage.layers.clone()).collect();
        self.note(format!("places {instance:?}: {stages:?}"));
        lock(&self.stage.served).placed.push(Placed { instance, layers: card.layers, stages });
        let holders: Vec<NodeId> = plan.nodes().collect();
        let members = journal::members(&holders, std::iter::once(node.id).chain(view.alive().map(|(node, _)| node)));
        let model = serving::model(&model::path());
        let term = Term { counter: 1, node: node.id };
        let goal = Goal { nodes_min: 1, ..goal };
        let order = Order { instance, term, epoch: PlanEpoch(0), model, card, goal, plan, members };
        if let Err(error) = serving.place(order).await {
            self.stage.cluster.world.fail(format!("node {}: {error}", node.number));
        }
    }

    /// Keeps the books on what this node conducts.
    fn hear(&self) {
        let Some(serving) = &self.life.node.serving else { return };
        let (stage, number, me) = (self.stage.clone(), self.life.node.number, self.life.node.id);
        serving.hear(Arc::new(move |instance, state, plan| {
            stage.cluster.world.note(format!("node {number} says of {instance:?}: {state:?}"));
            match state {
                InstanceState::Ready => {
                    let again = lock(&stage.instances).insert(instance, me);
                    stage.count(|counts| match again {
                        None => counts.placed += 1,
                        Some(before) if before == me => counts.recovered += 1,
                        Some(_) => counts.inherited += 1,
                    });
                    if let Some(plan) = plan.filter(|_| again.is_some()) {
                        let stages = plan.stages.into_iter().map(|stage| stage.layers).collect();
                        lock(&stage.served).placed.push(Placed { instance, layers: model::card().layers, stages });
                    }
                }
                InstanceState::Stopping(_) | InstanceState::Failed(_) | InstanceState::Waiting(_) => {
                    lock(&stage.instances).retain(|known, conductor| *known != instance || *conductor != me);
                }
                _ => {}
            }
        }));
    }

    /// Asks something, and reads the answer to its end, or for as long as it likes.
    async fn ask(&self, instance: InstanceId, conductor: NodeId) {
        let node = &self.life.node;
        let (prompt, sampling, most, patience) = {
            let mut chance = lock(&self.chance);
            // Two in three begin like others do, so that pages are shared.
            let family = chance.below(3);
            let word = |chance: &mut Chance, place| if family < 2 && place < 33 { family * 100 + place } else { chance.below(256) };
            let length = chance.between(1, 40);
            let prompt: Vec<u32> = (0..length).map(|place| u32::try_from(word(&mut chance, place)).unwrap_or(0)).collect();
            let temperature = if chance.percent(50) { 0.0 } else { 1.0 };
            let sampling = SamplingParams { temperature, seed: chance.below(1 << 40), ..SamplingParams::default() };
            let most = u32::try_from(chance.between(1, 48)).unwrap_or(1);
            let patience = chance.percent(15).then(|| chance.duration(Duration::ZERO, Duration::from_millis(400)));
            (prompt, sampling, most, patience)
        };
        let expected = match model::alone(&prompt, &sampling, most, &ByteText.ends()) {
            Ok(expected) => expected,
            Err(error) => return self.stage.cluster.world.fail(error),
        };
        let id = RequestId::random(&*node.env.rng);
        let request = GenerateRequest {
            id,
            instance,
            prompt: Prompt::Tokens(prompt),
            sampling,
            max_tokens: Some(most),
            stop: Vec::new(),
            ignore_end: false,
            unread: Unread::Cancel,
            shape: String::new(),
            client: shoal_actors::request::Client::default(),
            priority: shoal_actors::request::Priority::Normal,
        };
        let open = OpenRequest { number: node.number, life: self.life.life, since: self.stage.cluster.world.now() };
        lock(&self.stage.served).open.insert(id, open);
        self.note(format!("asks {instance:?} for {id:?}"));
        let heard = Mutex::new(Vec::new());
        let result = {
            let reading = Box::pin(self.read(conductor, request, &heard));
            let nap = async {
                match patience {
                    Some(patience) => self.stage.cluster.world.sleep(node.number, patience).await,
                    None => std::future::pending().await,
                }
            };
            match select(reading, Box::pin(nap)).await {
                Either::Left((result, _)) => Some(result),
                Either::Right(_) => None,
            }
        };
        let tokens = std::mem::take(&mut *lock(&heard));
        self.stage.count(|counts| {
            counts.tokens += tokens.len() as u64;
            match &result {
                Some(Ok(())) => counts.whole += 1,
                Some(Err(_)) => counts.broken_off += 1,
                None => counts.cancelled += 1,
            }
        });
        let whole = matches!(result, Some(Ok(())));
        if whole {
            *lock(&self.stage.whole).entry(node.number).or_default() += 1;
        }
        if let Some(Err(error)) = result {
            self.note(format!("gets {} tokens of {id:?} from {instance:?}, and then: {error}", tokens.len()));
        }
        let mut served = lock(&self.stage.served);
        served.open.remove(&id);
        served.heard.push(Heard { request: id, expected, tokens, whole });
    }

    fn reach(&self) -> Reach {
        let node = &self.life.node;
        Reach { services: node.services.clone(), clock: Arc::clone(&node.env.clock), membership: node.membership.clone() }
    }

    async fn read(&self, conductor: NodeId, request: GenerateRequest, heard: &Mutex<Vec<u32>>) -> Result<(), GenerateError> {
        let mut generation = Generation::start(self.reach(), conductor, request).await?;
        while let Some(piece) = generation.next().await {
            match piece? {
                Piece::Token(token) => lock(heard).push(token.token),
                Piece::End { .. } => return Ok(()),
                _ => {}
            }
        }
        Ok(())
    }
}
