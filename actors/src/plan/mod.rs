//! The planner: which nodes hold which layers of a model, decided by measurement and said before it happens.
//!
//! [`plan`] is a pure function of the nodes' cards, the links, the model's card and the goal. It weighs single nodes
//! and pipelines by the time that a reference job takes (a prompt of [`PROMPT_TOKENS`] and an answer of
//! [`ANSWER_TOKENS`] for each sequence), under the memory that each node has free, and says for each plan what it
//! will do and what slows it down.

mod arrange;
mod cost;
mod error;
mod links;
mod predict;
mod repair;
mod split;
#[cfg(test)]
pub(crate) mod tests;
mod types;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

pub use cost::least;
pub use error::{PlanError, Shortage};
pub use links::{Link, LinkEntry, LinkMatrix};
pub use repair::{Repair, repair};
pub use types::{Arrangement, Goal, Plan, PlanRequest, Prediction, Prefer, Shard, StageMemory, StagePlan};

use crate::card::{ModelCard, NodeCard};
use crate::ids::NodeId;
use arrange::Candidate;
use cost::{Picos, Work};
use split::{Seat, Split};

/// Tokens of the prompt that predictions are made for.
pub const PROMPT_TOKENS: u64 = 512;

/// Tokens of the answer that plans are weighed by.
pub const ANSWER_TOKENS: u64 = 128;

/// Most nodes of a plan.
pub const NODES_MAX: u32 = 64;

/// Most plans that are returned.
pub const PLANS_MAX: usize = 16;

/// Up to so many nodes every choice in every order is looked at.
pub const EXACT_NODES_MAX: usize = 4;

/// Most layers of a model.
pub const LAYERS_MAX: usize = 1024;

/// Most sequences of a goal.
pub const SEQUENCES_MAX: u32 = 4096;

/// Most rows of a step.
pub const ROWS_MAX: u32 = 65_536;

/// Most prefixes that the split keeps for one place (see [`split`](self)); small clusters never need as many.
const LABELS_MAX: usize = 64;

/// The same for plans of more than [`EXACT_NODES_MAX`] nodes, where time counts.
const LABELS_MAX_LARGE: usize = 4;

/// The ways to place a model, best first: of each set of nodes the best order and split.
///
/// Equal requests give equal plans; where plans are equally good, those whose nodes have the model on disk come first,
/// then those with fewer nodes, then those with the lower node ids.
///
/// # Errors
/// [`PlanError`] says what is missing and what would help.
pub fn plan(request: &PlanRequest<'_>) -> Result<Vec<Plan>, PlanError> {
    let PlanRequest { links, model, goal, .. } = *request;
    check_model(model)?;
    check_goal(goal, model)?;
    let nodes = candidates(request)?;
    let there = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
    if there < goal.nodes_min {
        let allowed: BTreeSet<NodeId> = request.cards.iter().map(|card| card.node).filter(|node| !goal.excluded.contains(node)).collect();
        let lacking = u32::try_from(allowed.len()).unwrap_or(u32::MAX).saturating_sub(there);
        return Err(PlanError::TooFewNodes { asked: goal.nodes_min, there, lacking });
    }
    let found = search(&nodes, links, model, goal);
    if found.is_empty() {
        return Err(shortage(&nodes, links, model, goal));
    }
    let work = Work::new(model, goal);
    Ok(found.into_iter().take(PLANS_MAX).map(|found| build(&nodes, links, &work, &found)).collect())
}

/// The best order and split of one set of nodes.
#[derive(Debug)]
struct Found {
    order: Vec<usize>,
    split: Split,
    /// The time of the reference job, links included.
    score: Picos,
}

/// The scores of the sets so far. What is worse than the last plan that would be returned need not be looked at.
#[derive(Debug, Default)]
struct Scores(BTreeMap<Picos, usize>);

impl Scores {
    fn replace(&mut self, old: Option<Picos>, new: Picos) {
        if let Some(old) = old
            && let Some(count) = self.0.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&old);
            }
        }
        *self.0.entry(new).or_default() += 1;
    }

    /// The score of the last plan that would be returned, if there are that many.
    fn bound(&self) -> Picos {
        let mut seen = 0;
        for (&score, &count) in &self.0 {
            seen += count;
            if seen >= PLANS_MAX {
                return score;
            }
        }
        Picos::MAX
    }
}

/// Looks at every order that is worth it and keeps the best of each set, best set first.
fn search(nodes: &[Candidate], links: &LinkMatrix, model: &ModelCard, goal: &Goal) -> Vec<Found> {
    let work = Work::new(model, goal);
    let max = (goal.nodes_max as usize).min(work.layers());
    let mut best: BTreeMap<Vec<usize>, Found> = BTreeMap::new();
    let mut scores = Scores::default();
    let mut orders = arrange::orders(nodes, links, &work, goal.nodes_min as usize, max);
    // Few nodes first: they are quick to look at, and what they achieve rules much of the rest out.
    orders.sort_by_key(Vec::len);
    // Prices depend on the node and on how many groups of sequences are under way, not on the place in the order.
    let mut prices: BTreeMap<(usize, u64), Rc<split::Prices>> = BTreeMap::new();
    let mut longest = 0;
    for order in orders {
        // Where few nodes come first, longer orders are of use only while the shorter ones do not fill the list.
        if goal.prefer == Prefer::FewestNodes && order.len() > longest && best.len() >= PLANS_MAX {
            break;
        }
        longest = order.len();
        let mut seats: Vec<Seat> = Vec::with_capacity(order.len());
        for (i, &n) in order.iter().enumerate() {
            let known = prices.entry((n, work.groups(order.len()).0));
            seats.push(Seat {
                prices: Rc::clone(known.or_insert_with(|| Rc::new(split::prices(&work, nodes[n].speed, order.len())))),
                free: nodes[n].free,
                same_host_as_before: i > 0 && nodes[order[i - 1]].host == nodes[n].host,
            });
        }
        let members: Vec<&Candidate> = order.iter().map(|&n| &nodes[n]).collect();
        let link_score = predict::link_score(&work, links, &members);
        let bound = if goal.prefer == Prefer::Speed { scores.bound().saturating_sub(link_score) } else { Picos::MAX };
        let Some(split) = split::split(&work, &seats, bound) else { continue };
        let score = split.score.saturating_add(link_score);
        let mut set = order.clone();
        set.sort_unstable();
        let key = |found: &Found| (found.score, found.split.busiest, found.order.clone());
        let found = Found { order, split, score };
        match best.get(&set) {
            Some(known) if key(known) <= key(&found) => {}
            known => {
                scores.replace(known.map(|known| known.score), score);
                best.insert(set, found);
            }
        }
    }
    let mut found: Vec<Found> = best.into_values().collect();
    // Indices follow node ids, so comparing orders compares ids.
    found.sort_by_cached_key(|found| {
        let missing = found.order.iter().filter(|&&n| !nodes[n].on_disk).count();
        let stages = found.order.len();
        let first = match goal.prefer {
            Prefer::Speed => 0,
            Prefer::FewestNodes => stages,
        };
        (first, found.score, missing, stages, found.split.busiest, found.order.clone())
    });
    found
}

fn build(nodes: &[Candidate], links: &LinkMatrix, work: &Work<'_>, found: &Found) -> Plan {
    let order: Vec<&Candidate> = found.order.iter().map(|&n| &nodes[n]).collect();
    let mut from = 0;
    let mut stages = Vec::with_capacity(order.len());
    for (node, &to) in order.iter().zip(&found.split.ends) {
        stages.push(StagePlan {
            node: node.node,
            name: node.name.clone(),
            layers: from as u32..to as u32,
            shard: Shard { index: 0, of: 1 },
            memory: work.memory(from, to),
            on_disk: node.on_disk,
        });
        from = to;
    }
    Plan {
        arrangement: if stages.len() == 1 { Arrangement::SingleNode } else { Arrangement::Pipeline },
        predicted: predict::predict(work, links, &order, &found.split.ends),
        stages,
        context_tokens: work.goal.context_tokens,
        sequences: work.goal.sequences,
        rows_max: work.goal.rows_max,
    }
}

fn has_file(card: &NodeCard, goal: &Goal) -> bool {
    goal.sha256.as_ref().is_none_or(|sha256| card.models.iter().any(|model| model.sha256.eq_ignore_ascii_case(sha256)))
}

/// The nodes that may take part, by id.
fn candidates(request: &PlanRequest<'_>) -> Result<Vec<Candidate>, PlanError> {
    let goal = request.goal;
    let mut cards: BTreeMap<NodeId, &NodeCard> = BTreeMap::new();
    for card in request.cards {
        cards.entry(card.node).or_insert(card);
    }
    let allowed: Vec<&NodeCard> = cards.values().copied().filter(|card| !goal.excluded.contains(&card.node)).collect();
    let usable: Vec<&NodeCard> = allowed.iter().copied().filter(|card| !goal.only_on_disk || has_file(card, goal)).collect();
    if let Some(&node) = goal.pinned.iter().find(|node| !usable.iter().any(|card| card.node == **node)) {
        let reason = if cards.contains_key(&node) {
            "it does not have the model on disk; pull the model there first".to_owned()
        } else {
            "it is not in the cluster; start it or leave it out".to_owned()
        };
        return Err(PlanError::PinnedMissing { node, reason });
    }
    if usable.is_empty() {
        let reason = if cards.is_empty() {
            "none is known; start one with `shoal up`".to_owned()
        } else if allowed.is_empty() {
            "all of them are excluded; allow at least one".to_owned()
        } else {
            "none of those allowed has the model on disk; pull it first".to_owned()
        };
        return Err(PlanError::NoNodes { reason });
    }
    // Speeds are averaged over all nodes of a machine, whether they take part or not.
    let all: Vec<&NodeCard> = cards.values().copied().collect();
    let speeds = cost::speeds(&all);
    Ok(usable
        .into_iter()
        .filter_map(|card| {
            Some(Candidate {
                node: card.node,
                name: if card.name.is_empty() { card.node.short() } else { card.name.clone() },
                host: card.host,
                free: card.memory_free_bytes.min(card.memory_offered_bytes),
                speed: *speeds.get(&card.node)?,
                on_disk: has_file(card, goal),
                pinned: goal.pinned.contains(&card.node),
            })
        })
        .collect())
}

fn check_model(model: &ModelCard) -> Result<(), PlanError> {
    let bad = |reason: String| Err(PlanError::BadModel { name: model.name.clone(), reason });
    if model.layer_bytes.is_empty() || model.layer_bytes.len() > LAYERS_MAX {
        return bad(format!("it lists {} layers; 1 to {LAYERS_MAX} are possible", model.layer_bytes.len()));
    }
    if model.layer_bytes.len() != model.layers as usize {
        return bad(format!("it claims {} layers and lists the sizes of {}", model.layers, model.layer_bytes.len()));
    }
    if model.hidden == 0 {
        return bad("its activations have no elements".to_owned());
    }
    Ok(())
}

fn check_goal(goal: &Goal, model: &ModelCard) -> Result<(), PlanError> {
    let bad = |reason: String| Err(PlanError::BadGoal(reason));
    if goal.context_tokens == 0 {
        return bad("a context of no tokens".to_owned());
    }
    if model.context_tokens > 0 && goal.context_tokens > model.context_tokens {
        return bad(format!(
            "a context of {} tokens, while {} was trained for {}; ask for at most that many",
            goal.context_tokens, model.name, model.context_tokens
        ));
    }
    if !(1..=SEQUENCES_MAX).contains(&goal.sequences) {
        return bad(format!("{} sequences at once; 1 to {SEQUENCES_MAX} are possible", goal.sequences));
    }
    if !(1..=ROWS_MAX).contains(&goal.rows_max) {
        return bad(format!("steps of {} rows; 1 to {ROWS_MAX} are possible", goal.rows_max));
    }
    if goal.nodes_min > goal.nodes_max || goal.nodes_max == 0 || goal.nodes_max > NODES_MAX {
        return bad(format!("{} to {} nodes; 1 to {NODES_MAX} are possible", goal.nodes_min, goal.nodes_max));
    }
    if goal.nodes_min > model.layers {
        return bad(format!("{} nodes for a model of {} layers; each node holds at least one", goal.nodes_min, model.layers));
    }
    if goal.pinned.len() > goal.nodes_max as usize {
        return bad(format!("{} nodes must take part and at most {} may", goal.pinned.len(), goal.nodes_max));
    }
    if let Some(node) = goal.pinned.intersection(&goal.excluded).next() {
        return bad(format!("node {node:?} must take part and is excluded"));
    }
    Ok(())
}

/// Why nothing was found.
fn shortage(nodes: &[Candidate], links: &LinkMatrix, model: &ModelCard, goal: &Goal) -> PlanError {
    let work = Work::new(model, goal);
    let layers = work.layers();
    let whole = work.memory(0, layers);
    let mut context_that_fits = None;
    let mut shorter = goal.context_tokens / 2;
    while shorter >= 64 && context_that_fits.is_none() {
        let smaller = Goal { context_tokens: shorter, ..goal.clone() };
        if !search(nodes, links, model, &smaller).is_empty() {
            context_that_fits = Some(shorter);
        }
        shorter /= 2;
    }
    let free = nodes.iter().fold(0_u64, |sum, node| sum.saturating_add(node.free));
    let shortage = Shortage {
        model: model.name.clone(),
        weights: whole.weights,
        kv: whole.kv,
        activations: whole.activations,
        context_tokens: goal.context_tokens,
        sequences: goal.sequences,
        nodes: u32::try_from(nodes.len()).unwrap_or(u32::MAX),
        free,
        largest: nodes.iter().map(|node| node.free).max().unwrap_or(0),
        piece: (0..layers).map(|layer| work.memory(layer, layer + 1).total()).max().unwrap_or(0),
        context_that_fits,
    };
    if whole.total() > free { PlanError::NotEnoughMemory(shortage) } else { PlanError::NoSplit(shortage) }
}
