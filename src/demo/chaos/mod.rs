//! `shoal demo --chaos`: nodes are killed without warning and started again, over and over, while clients stream answers from them.
//! Each client goes on at another node when its own dies. Every answer has to be, to the letter, the one that an undisturbed cluster
//! gives.

mod client;
mod tally;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use shoal::LocalModel;
use shoal::api::state::{Instance, Plans, State};
use shoal::env::{Rng, SystemRng};

use super::crew::{Crew, CrewPlan};
use super::show::Show;
use crate::cli::{Client, Failure, Signals};
use client::{Asker, Board, Reference, ask_undisturbed};
use tally::Role;
pub(in crate::demo) use tally::Tally;

/// How long nodes may take to find each other, at the start and after one was started again.
const MEET_TIMEOUT: Duration = Duration::from_secs(60);
/// How long it may take until the model answers again, and all know it.
const WHOLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a client may take to end its answer after the last kill.
const LAST_ANSWERS: Duration = Duration::from_secs(180);
/// How long leases may be in force after the model is unloaded.
const LEASES_END: Duration = Duration::from_secs(30);
/// Pause between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longest wait for the moment of a kill, if tokens come slowly.
const MOMENT_MAX: Duration = Duration::from_secs(10);
/// Longest that a node stays down, in milliseconds.
const DOWN_MAX: u64 = 1500;
/// Tokens of the longest conversation.
const CONTEXT_TOKENS: u32 = 512;

/// What to do.
#[derive(Debug)]
pub(super) struct ChaosPlan {
    pub(super) nodes: u32,
    pub(super) kills: u32,
    pub(super) streams: u32,
    pub(super) seed: u64,
    pub(super) max_tokens: u32,
    pub(super) prompt: String,
    pub(super) models: Option<std::path::PathBuf>,
}

/// Numbers that follow from a seed, so that a run can be had again as far as processes allow.
#[derive(Debug)]
struct Chance(u64);

impl Chance {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }
}

/// What a question is asked with: the text, the temperature and the seed.
fn questions(plan: &ChaosPlan) -> Vec<Value> {
    let texts = [plan.prompt.as_str(), "Tell me a story about a herring that learns to fly.", "List ten things that can be made of wood."];
    let ask = |text: &str, temperature: f64, seed: u64| {
        json!({
            "messages": [{"role": "user", "content": text}], "temperature": temperature, "seed": seed, "max_tokens": plan.max_tokens,
            "ignore_eos": true, "return_token_ids": true, "stream": true, "stream_options": {"include_usage": true},
        })
    };
    texts.iter().zip(plan.seed..).flat_map(|(text, seed)| [ask(text, 0.0, seed), ask(text, 1.0, seed)]).collect()
}

/// What each node lends: enough for a good half of the model, so that it is on several nodes at all times and on the rest when one
/// dies.
async fn memory(plan: &ChaosPlan, model: &LocalModel) -> Result<u64, Failure> {
    let mut planner = Crew::new(CrewPlan { nodes: 2, models: plan.models.clone(), memory: None, threads: 1 })?;
    let planned = async {
        planner.start().await?;
        planner.meet(MEET_TIMEOUT, Some(&model.sha256)).await?;
        let plans: Plans = planner.client(0)?.post("/v1/shoal/plan", goal(plan, model)).await?;
        let best = plans.plans.first().ok_or_else(|| Failure::new("there is no plan"))?;
        Ok(best.stages.iter().map(|stage| stage.lease_bytes).max().unwrap_or(0))
    };
    let largest: Result<u64, Failure> = planned.await;
    planner.dismiss(&mut Signals::listen()?).await?;
    let largest = largest?;
    Ok(largest + largest / 4)
}

fn goal(plan: &ChaosPlan, model: &LocalModel) -> Value {
    json!({"model": model.name, "nodes_min": 2, "nodes_max": plan.nodes, "context_tokens": CONTEXT_TOKENS, "sequences": plan.streams})
}

/// The part that a node has in the instance that answers.
fn role(instance: &Instance, id: &str) -> Role {
    if instance.conductor == id {
        Role::Conductor
    } else if instance.stages.iter().any(|stage| stage.node == id) {
        Role::Stage
    } else {
        Role::Bystander
    }
}

/// The one instance that answers, once every node knows it and no other.
async fn whole(crew: &Crew) -> Result<Instance, Failure> {
    let began = Instant::now();
    loop {
        let mut known: Vec<Vec<Instance>> = Vec::new();
        for member in crew.members() {
            let state: State = Client::new(&member.api).get("/v1/shoal/state").await?;
            known.push(state.instances);
        }
        if let Some([instance]) = known.first().map(Vec::as_slice)
            && instance.state == "ready"
            && known.iter().all(|other| other[..] == [instance.clone()])
        {
            return Ok(instance.clone());
        }
        if began.elapsed() > WHOLE_TIMEOUT {
            let told: Vec<String> = known.iter().flatten().map(|one| format!("{} {} by {}", one.id, one.state, one.conductor)).collect();
            let message = format!("after {} s the model does not answer as one instance: {}", WHOLE_TIMEOUT.as_secs(), told.join(", "));
            return Err(Failure::new(message));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Kills and restarts; everything that was started is in `crew`, also if this fails.
pub(super) async fn play(plan: &ChaosPlan, model: &LocalModel, show: &Show, crew: &mut Option<Crew>) -> Result<Tally, Failure> {
    let memory = memory(plan, model).await?;
    show.step(&format!("starting {} node processes that lend {} each", plan.nodes, crate::cli::size_text(memory)));
    let crew = crew.insert(Crew::new(CrewPlan { nodes: plan.nodes, models: plan.models.clone(), memory: Some(memory), threads: 1 })?);
    crew.start().await?;
    show.nodes(crew);
    crew.meet(MEET_TIMEOUT, Some(&model.sha256)).await?;
    let instance: Instance = crew.client(0)?.post("/v1/shoal/load", goal(plan, model)).await?;
    show.stages(&instance);
    whole(crew).await?;

    let mut references = Vec::new();
    for mut question in questions(plan) {
        question["model"] = Value::from(model.name.as_str());
        let reference: Reference = ask_undisturbed(&crew.client(0)?, question).await?;
        references.push(reference);
    }
    show.step(&format!(
        "{} answers of {} tokens without a disturbance are known; now {} kills",
        references.len(),
        plan.max_tokens,
        plan.kills
    ));

    let board = Arc::new(Board::new(crew.members(), plan.streams as usize));
    let references = Arc::new(references);
    let mut chance = Chance(plan.seed);
    let askers: Vec<_> = (0..plan.streams as usize)
        .map(|number| {
            let seed = chance.next();
            tokio::spawn(Asker::new(number, Arc::clone(&board), Arc::clone(&references), seed, SystemRng.next_u64("names")).run())
        })
        .collect();
    let mut tally = Tally::default();
    let killed = kills(plan, show, crew, &board, &mut chance, &mut tally).await;
    board.stop();
    let ending = async {
        for asker in askers {
            match asker.await {
                Ok(result) => tally.add(result),
                Err(error) => tally.fault(format!("a client broke: {error}")),
            }
        }
    };
    if tokio::time::timeout(LAST_ANSWERS, ending).await.is_err() {
        tally.fault(format!("after {} s some answers have no end", LAST_ANSWERS.as_secs()));
    }
    tally.measure(&board);
    let ended = match killed {
        Ok(()) => unload(crew, model, &mut tally).await,
        Err(failure) => Err(failure),
    };
    if let Err(failure) = ended {
        tally.fault(failure.to_string());
    }
    Ok(tally)
}

async fn kills(
    plan: &ChaosPlan,
    show: &Show,
    crew: &mut Crew,
    board: &Arc<Board>,
    chance: &mut Chance,
    tally: &mut Tally,
) -> Result<(), Failure> {
    for kill in 1..=plan.kills {
        let instance = whole(crew).await?;
        // A random number of tokens later.
        let moment = board.events() + 1 + chance.below(u64::from(plan.max_tokens) * u64::from(plan.streams) / 2);
        let began = Instant::now();
        while board.events() < moment && began.elapsed() < MOMENT_MAX {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let victim = usize::try_from(chance.below(plan.nodes.into())).unwrap_or(0);
        let member = crew.members().get(victim).cloned().ok_or_else(|| Failure::new("there is no such node"))?;
        let role = role(&instance, &member.id);
        board.down(victim);
        let at = Instant::now();
        crew.kill(victim).await?;
        tally.kill(role, victim, at);
        tokio::time::sleep(Duration::from_millis(chance.below(DOWN_MAX))).await;
        crew.restart(victim).await?;
        crew.meet(MEET_TIMEOUT, None).await?;
        board.up(victim, &crew.members()[victim]);
        let next = whole(crew).await?;
        let line = format!(
            "kill {kill}: {} ({}), whole after {:.1} s, {} stages",
            member.name,
            role.name(),
            at.elapsed().as_secs_f64(),
            next.stages.len()
        );
        show.step(&line);
    }
    Ok(())
}

/// Takes the model down and looks that no node lends anything any more.
async fn unload(crew: &Crew, model: &LocalModel, tally: &mut Tally) -> Result<(), Failure> {
    crew.client(0)?.post::<Value>("/v1/shoal/unload", json!({"model": model.name})).await?;
    let began = Instant::now();
    loop {
        let mut lent = 0;
        for member in crew.members() {
            let state: State = Client::new(&member.api).get("/v1/shoal/state").await?;
            lent += state.lent.used_bytes;
        }
        if lent == 0 {
            return Ok(());
        }
        if began.elapsed() > LEASES_END {
            tally.fault(format!("{lent} bytes are still lent {} s after the model was unloaded", LEASES_END.as_secs()));
            return Ok(());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
