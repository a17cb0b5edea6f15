use proptest::prelude::*;

use super::*;
use crate::card::{DeviceCard, DeviceKind, ModelOnDisk};
use crate::ids::Incarnation;

const MB: u64 = 1_000_000;

pub(crate) fn id(n: usize) -> NodeId {
    NodeId([n as u8; 32])
}

pub(crate) fn card(n: usize, host: u128, free: u64, read: f64, multiply_adds: f64) -> NodeCard {
    NodeCard {
        node: id(n),
        incarnation: Incarnation(1),
        revision: 1,
        name: format!("node-{n}"),
        version: "0".to_owned(),
        wire_version: 1,
        platform: "linux/x86_64".to_owned(),
        host,
        cores: 2,
        memory_total_bytes: free * 2,
        memory_offered_bytes: free,
        memory_free_bytes: free,
        devices: vec![DeviceCard {
            kind: DeviceKind::Cpu,
            name: "processor".to_owned(),
            features: vec![],
            memory_bytes: 0,
            threads: 1,
            read_bytes_per_second: read,
            multiply_adds_per_second: multiply_adds,
        }],
        models: vec![],
        instances: vec![],
        addresses: vec![],
        api: None,
        leaving: false,
    }
}

/// The shape of a model of 135 million parameters in four and a half bits.
pub(crate) fn smollm2() -> ModelCard {
    ModelCard {
        architecture: "llama".to_owned(),
        name: "smollm2".to_owned(),
        quantisation: "Q4_1".to_owned(),
        parameters: 134_515_008,
        layers: 30,
        hidden: 576,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        feed_forward: 1536,
        vocabulary: 49_152,
        context_tokens: 8192,
        embedding_bytes: 30 * MB,
        head_bytes: 30 * MB,
        tied_head: true,
        layer_bytes: vec![2_212_000; 30],
        kv_bytes_per_token: 768,
        file_bytes: 97 * MB,
    }
}

pub(super) fn model(layer_bytes: Vec<u64>) -> ModelCard {
    ModelCard { layers: layer_bytes.len() as u32, layer_bytes, ..smollm2() }
}

pub(super) fn run(cards: &[NodeCard], model: &ModelCard, goal: &Goal) -> Result<Vec<Plan>, PlanError> {
    plan(&PlanRequest { cards, links: &LinkMatrix::new(), model, goal })
}

fn sound(plan: &Plan, cards: &[NodeCard], model: &ModelCard) {
    let mut next = 0;
    for stage in &plan.stages {
        assert_eq!(stage.layers.start, next, "stages are contiguous");
        assert!(stage.layers.end > stage.layers.start, "each has layers");
        next = stage.layers.end;
        let card = cards.iter().find(|c| c.node == stage.node).expect("a known node");
        assert!(stage.memory.total() <= card.memory_free_bytes, "fits");
    }
    assert_eq!(next, model.layers, "every layer is covered");
    let mut nodes: Vec<NodeId> = plan.nodes().collect();
    nodes.sort_unstable();
    nodes.dedup();
    assert_eq!(nodes.len(), plan.stages.len(), "each node once");
    let p = &plan.predicted;
    for number in [p.prefill_tok_s, p.decode_tok_s, p.decode_total_tok_s, p.first_token_seconds] {
        assert!(number.is_finite() && number > 0.0, "{p:?}");
    }
}

#[test]
fn one_fast_node_wins_over_a_pipeline_and_both_are_offered() {
    let cards = [card(1, 1, 1000 * MB, 10e9, 100e9), card(2, 2, 1000 * MB, 10e9, 100e9), card(3, 3, 1000 * MB, 20e9, 200e9)];
    let plans = run(&cards, &smollm2(), &Goal::default()).expect("fits");
    assert_eq!(plans[0].arrangement, Arrangement::SingleNode);
    assert_eq!(plans[0].stages[0].node, id(3));
    assert_eq!(plans.len(), 7, "every set of nodes");
    for plan in &plans {
        sound(plan, &cards, &smollm2());
    }
    assert!(plans[0].predicted.bottleneck.contains("node-3"), "{}", plans[0].predicted.bottleneck);
}

#[test]
fn three_processes_on_one_machine_share_evenly() {
    // Noise in the measurements of one and the same processor must not tilt the split.
    let cards = [card(1, 7, 1000 * MB, 9.1e9, 100e9), card(2, 7, 1000 * MB, 10e9, 90e9), card(3, 7, 1000 * MB, 10.4e9, 104e9)];
    let goal = Goal { nodes_min: 3, ..Goal::default() };
    let plans = run(&cards, &smollm2(), &goal).expect("fits");
    let sizes: Vec<u32> = plans[0].stages.iter().map(|s| s.layers.end - s.layers.start).collect();
    // The last stage has the output head as well, which weighs as much as many layers.
    assert_eq!(sizes.iter().sum::<u32>(), 30);
    assert!(sizes[0].abs_diff(sizes[1]) <= 1, "{sizes:?}");
    assert!(sizes[2] < sizes[0] && sizes[2] >= 1, "{sizes:?}");
    // Sharing a machine speeds nothing up.
    let alone = run(&cards, &smollm2(), &Goal::default()).expect("fits")[0].clone();
    assert_eq!(alone.arrangement, Arrangement::SingleNode);
    assert!(plans[0].predicted.decode_total_tok_s < alone.predicted.decode_total_tok_s);
    assert!(plans[0].predicted.prefill_tok_s < alone.predicted.prefill_tok_s);
}

#[test]
fn machines_of_their_own_overlap() {
    let cards: Vec<NodeCard> = (1..=3).map(|n| card(n, n as u128, 2000 * MB, 10e9, 100e9)).collect();
    let model = ModelCard { embedding_bytes: MB, head_bytes: MB, ..model(vec![30 * MB; 30]) };
    let goal = Goal { nodes_min: 3, sequences: 3, ..Goal::default() };
    let three = run(&cards, &model, &goal).expect("fits")[0].clone();
    let one = run(&cards, &model, &Goal { nodes_max: 1, sequences: 3, ..Goal::default() }).expect("fits")[0].clone();
    assert!(three.predicted.prefill_tok_s > one.predicted.prefill_tok_s * 1.5);
    let sizes: Vec<u32> = three.stages.iter().map(|s| s.layers.end - s.layers.start).collect();
    assert_eq!(sizes, [10, 10, 10]);
    // One node reads the weights once for three sequences; three nodes read a third each, three times in turn.
    assert!(three.predicted.decode_total_tok_s > one.predicted.decode_tok_s);
}

#[test]
fn a_faster_machine_gets_more_layers() {
    let cards = [card(1, 1, 1000 * MB, 10e9, 50e9), card(2, 2, 1000 * MB, 30e9, 150e9)];
    let goal = Goal { nodes_min: 2, sequences: 4, ..Goal::default() };
    let plan = run(&cards, &model(vec![20 * MB; 32]), &goal).expect("fits")[0].clone();
    let layers = |n: usize| plan.stages.iter().find(|s| s.node == id(n)).map(|s| s.layers.len()).expect("takes part");
    assert!(layers(2) > 2 * layers(1), "{plan:?}");
}

#[test]
fn memory_is_counted_by_purpose() {
    let cards = [card(1, 1, 1000 * MB, 10e9, 100e9), card(2, 2, 1000 * MB, 10e9, 100e9)];
    let goal = Goal { context_tokens: 2048, ..Goal::default() };
    let model = smollm2();
    let plans = run(&cards, &model, &goal).expect("fits");
    let single = plans.iter().find(|p| p.stages.len() == 1).expect("offered").stages[0].memory;
    // The head is the embedding: one node holds it once, two hold it twice.
    assert_eq!(single.weights, 30 * 2_212_000 + 30 * MB);
    assert_eq!(single.kv, 30 * 2048 * 768);
    assert!(single.activations > 128 * 576 * 4);
    let pair = plans.iter().find(|p| p.stages.len() == 2).expect("offered");
    assert_eq!(pair.stages.iter().map(|s| s.memory.weights).sum::<u64>(), 30 * 2_212_000 + 60 * MB);
    let purposes: Vec<_> = single.by_purpose().map(|(p, _)| p.to_string()).collect();
    assert_eq!(purposes, ["weights", "keys and values", "activations"]);
    let untied = ModelCard { tied_head: false, ..model };
    let single = run(&cards[..1], &untied, &goal).expect("fits")[0].stages[0].memory;
    assert_eq!(single.weights, 30 * 2_212_000 + 60 * MB);
    let four = run(&cards[..1], &untied, &Goal { sequences: 4, context_tokens: 2000, ..goal }).expect("fits")[0].stages[0].memory;
    assert_eq!(four.kv, 4 * 30 * 2048 * 768, "whole pages");
}

#[test]
fn what_is_missing_is_said_in_words() {
    let cards: Vec<NodeCard> = (1..=3).map(|n| card(n, 1, 20 * MB, 10e9, 100e9)).collect();
    let error = run(&cards, &smollm2(), &Goal::default()).expect_err("too small");
    assert_eq!(
        error.to_string(),
        "smollm2 needs 96.4 MB for weights, 47.2 MB for 2048 tokens and 7.32 MB for buffers; the 3 nodes together have 60.0 MB free: \
         start another node, raise --memory or take a smaller model"
    );
    let cards: Vec<NodeCard> = (1..=3).map(|n| card(n, 1, 60 * MB, 10e9, 100e9)).collect();
    let error = run(&cards, &smollm2(), &Goal { context_tokens: 8192, ..Goal::default() }).expect_err("too long");
    assert!(error.to_string().ends_with("raise --memory or ask for at most 1024 tokens"), "{error}");
    let cards: Vec<NodeCard> = (1..=30).map(|n| card(n, 1, 8 * MB, 10e9, 100e9)).collect();
    let error = run(&cards, &smollm2(), &Goal::default()).expect_err("too small each");
    assert!(matches!(error, PlanError::NoSplit(_)), "{error}");
    assert!(error.to_string().contains("the largest node has 8.00 MB"), "{error}");
}

#[test]
fn goals_are_kept() {
    let cards: Vec<NodeCard> = (1..=6).map(|n| card(n, n as u128, 1000 * MB, 10e9 * n as f64, 100e9)).collect();
    let pinned = Goal { pinned: [id(1), id(3)].into(), excluded: [id(6)].into(), ..Goal::default() };
    for plan in run(&cards, &smollm2(), &pinned).expect("fits") {
        let nodes: Vec<NodeId> = plan.nodes().collect();
        assert!(nodes.contains(&id(1)) && nodes.contains(&id(3)) && !nodes.contains(&id(6)), "{nodes:?}");
        sound(&plan, &cards, &smollm2());
    }
    for (min, max) in [(1, 1), (2, 3), (5, 6)] {
        let goal = Goal { nodes_min: min, nodes_max: max, ..Goal::default() };
        for plan in run(&cards, &smollm2(), &goal).expect("fits") {
            assert!((min..=max).contains(&(plan.stages.len() as u32)));
        }
    }
    let few = Goal { prefer: Prefer::FewestNodes, nodes_min: 2, ..Goal::default() };
    assert_eq!(run(&cards, &smollm2(), &few).expect("fits")[0].stages.len(), 2);
    let seven = Goal { nodes_min: 7, ..Goal::default() };
    assert_eq!(run(&cards, &smollm2(), &seven), Err(PlanError::TooFewNodes { asked: 7, there: 6, lacking: 0 }));
    let stranger = Goal { pinned: [id(9)].into(), ..Goal::default() };
    assert!(matches!(run(&cards, &smollm2(), &stranger), Err(PlanError::PinnedMissing { .. })));
    assert!(matches!(run(&[], &smollm2(), &Goal::default()), Err(PlanError::NoNodes { .. })));
    for bad in [
        Goal { context_tokens: 0, ..Goal::default() },
        Goal { context_tokens: 9000, ..Goal::default() },
        Goal { sequences: 0, ..Goal::default() },
        Goal { rows_max: u32::MAX, ..Goal::default() },
        Goal { nodes_min: 3, nodes_max: 2, ..Goal::default() },
        Goal { nodes_min: 31, ..Goal::default() },
        Goal { pinned: [id(1)].into(), excluded: [id(1)].into(), ..Goal::default() },
    ] {
        assert!(matches!(run(&cards, &smollm2(), &bad), Err(PlanError::BadGoal(_))), "{bad:?}");
    }
    let broken = ModelCard { layers: 29, ..smollm2() };
    assert!(matches!(run(&cards, &broken, &Goal::default()), Err(PlanError::BadModel { .. })));
}

#[test]
fn a_node_with_the_file_goes_first_where_all_else_is_equal() {
    let mut cards: Vec<NodeCard> = (1..=3).map(|n| card(n, n as u128, 1000 * MB, 10e9, 100e9)).collect();
    cards[1].models.push(ModelOnDisk { name: "smollm2:135m".to_owned(), sha256: "ab".repeat(32), bytes: 97 * MB });
    let goal = Goal { sha256: Some("AB".repeat(32)), nodes_max: 1, ..Goal::default() };
    let plans = run(&cards, &smollm2(), &goal).expect("fits");
    assert_eq!(plans[0].stages[0].node, id(2));
    assert!(plans[0].stages[0].on_disk && !plans[1].stages[0].on_disk);
    let strict = Goal { only_on_disk: true, ..goal.clone() };
    assert_eq!(run(&cards, &smollm2(), &strict).expect("fits").len(), 1);
    let three = Goal { nodes_min: 3, nodes_max: 3, excluded: [id(9)].into(), ..strict };
    let error = run(&cards, &smollm2(), &three).expect_err("the others lack the file");
    assert_eq!(error, PlanError::TooFewNodes { asked: 3, there: 1, lacking: 2 });
    let text = error.to_string();
    assert!(text.contains("2 more are there but do not have the model on disk: pull the model there or ask"), "{text}");
    let error = run(&cards, &smollm2(), &Goal { excluded: [id(1)].into(), ..three }).expect_err("one is left out");
    let text = error.to_string();
    assert!(text.contains("1 more is there but does not have the model on disk: pull the model there, start more nodes or ask"), "{text}");
    let pinned = Goal { only_on_disk: true, pinned: [id(1)].into(), ..goal };
    let error = run(&cards, &smollm2(), &pinned).expect_err("does not have it");
    assert!(error.to_string().contains("does not have the model on disk"), "{error}");
}

#[test]
fn short_links_are_preferred() {
    let cards: Vec<NodeCard> = (1..=3).map(|n| card(n, n as u128, 80 * MB, 10e9, 100e9)).collect();
    let mut links = LinkMatrix::new();
    let slow = Link { rtt_seconds: 0.02, bytes_per_second: 10e6 };
    links.set_both(id(1), id(2), slow);
    links.set_both(id(1), id(3), slow);
    links.set_both(id(2), id(3), Link { rtt_seconds: 20e-6, bytes_per_second: 5e9 });
    let model = smollm2();
    let goal = Goal { context_tokens: 512, ..Goal::default() };
    let plans = plan(&PlanRequest { cards: &cards, links: &links, model: &model, goal: &goal }).expect("fits");
    let mut nodes: Vec<NodeId> = plans[0].nodes().collect();
    nodes.sort_unstable();
    assert_eq!(nodes, [id(2), id(3)]);
    let worst = plans.last().expect("some");
    assert!(worst.predicted.bottleneck.contains("links"), "{}", worst.predicted.bottleneck);
}

#[test]
fn absurd_cards_give_plans_or_errors_but_no_panic() {
    let mut cards = vec![card(1, 1, u64::MAX / 2, f64::NAN, -1.0), card(2, 2, 0, f64::INFINITY, 0.0), card(1, 9, 5, 1.0, 1.0)];
    cards[1].devices.clear();
    let huge = ModelCard {
        layer_bytes: vec![u64::MAX; 30],
        kv_bytes_per_token: u64::MAX,
        embedding_bytes: u64::MAX,
        head_bytes: u64::MAX,
        hidden: u32::MAX,
        feed_forward: u32::MAX,
        heads: u32::MAX,
        head_dim: u32::MAX,
        kv_heads: u32::MAX,
        vocabulary: u32::MAX,
        tied_head: false,
        ..smollm2()
    };
    let goal = Goal { sequences: SEQUENCES_MAX, rows_max: ROWS_MAX, ..Goal::default() };
    assert!(run(&cards, &huge, &goal).is_err());
    let plans = run(&cards, &smollm2(), &Goal::default()).expect("the first card counts");
    assert_eq!(plans[0].stages[0].node, id(1));
}

#[test]
fn a_plan_survives_json() {
    let cards = [card(1, 1, 1000 * MB, 10e9, 100e9), card(2, 2, 1000 * MB, 10e9, 100e9)];
    let plan = run(&cards, &smollm2(), &Goal { nodes_min: 2, ..Goal::default() }).expect("fits")[0].clone();
    let text = serde_json::to_string(&plan).expect("encodes");
    let back: Plan = serde_json::from_str(&text).expect("decodes");
    assert_eq!(back.stages, plan.stages);
    let bytes = postcard::to_stdvec(&plan).expect("encodes");
    assert_eq!(postcard::from_bytes::<Plan>(&bytes).expect("decodes"), plan);
}

#[test]
fn a_large_cluster_gets_a_plan() {
    let cards: Vec<NodeCard> = (1..=64)
        .map(|n| card(n, (n / 2) as u128, 2000 * MB + n as u64 * 50 * MB, 8e9 + 1e9 * (n % 7) as f64, 80e9 + 1e9 * (n % 5) as f64))
        .collect();
    let model = model(vec![400 * MB; 96]);
    let plans = run(&cards, &model, &Goal { sequences: 8, ..Goal::default() }).expect("fits");
    for plan in &plans {
        sound(plan, &cards, &model);
        assert!(plan.stages.len() >= 20);
    }
}

/// Every order and every split, priced without any of the planner's shortcuts.
fn brute_force(nodes: &[Candidate], links: &LinkMatrix, work: &Work<'_>, min: usize, max: usize) -> Option<Picos> {
    fn splits(layers: usize, stages: usize, from: usize, prefix: &mut Vec<usize>, all: &mut Vec<Vec<usize>>) {
        if stages == 1 {
            let mut ends = prefix.clone();
            ends.push(layers);
            all.push(ends);
            return;
        }
        for to in from + 1..layers {
            prefix.push(to);
            splits(layers, stages - 1, to, prefix, all);
            prefix.pop();
        }
    }
    let mut best = None;
    let mut stack: Vec<Vec<usize>> = vec![vec![]];
    while let Some(order) = stack.pop() {
        for n in 0..nodes.len() {
            if !order.contains(&n) && order.len() < max {
                stack.push([order.clone(), vec![n]].concat());
            }
        }
        if order.len() < min.max(1) || !arrange::hosts_are_together(nodes, &order) {
            continue;
        }
        let mut all = Vec::new();
        splits(work.layers(), order.len(), 0, &mut Vec::new(), &mut all);
        for ends in all {
            if let Some(score) = price(nodes, links, work, &order, &ends) {
                best = Some(best.map_or(score, |known: Picos| known.min(score)));
            }
        }
    }
    best
}

fn price(nodes: &[Candidate], links: &LinkMatrix, work: &Work<'_>, order: &[usize], ends: &[usize]) -> Option<Picos> {
    let (chunks, _) = work.chunks();
    let (groups, rows) = work.groups(order.len());
    let mut way = 0;
    let mut load: BTreeMap<u128, Picos> = BTreeMap::new();
    let mut from = 0;
    for (&n, &to) in order.iter().zip(ends) {
        let node = &nodes[n];
        if to <= from || work.memory(from, to).total() > node.free {
            return None;
        }
        let mut chunk = work.overhead_picos();
        let mut token = work.overhead_picos();
        for layer in from..to {
            chunk += work.chunk_picos(layer, node.speed);
            token += work.token_picos(layer, node.speed, rows);
        }
        let mut last_chunk = chunk;
        if to == work.layers() {
            token += work.head_picos(node.speed, rows);
            last_chunk += work.head_picos(node.speed, 1);
        }
        way += last_chunk + token * ANSWER_TOKENS;
        *load.entry(node.host).or_default() += chunk * (chunks - 1) + token * ANSWER_TOKENS * (groups - 1);
        from = to;
    }
    let members: Vec<&Candidate> = order.iter().map(|&n| &nodes[n]).collect();
    Some(way + load.values().max()? + predict::link_score(work, links, &members))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn small_clusters_get_the_best_plan_there_is(
        layers in proptest::collection::vec(1..40_u64, 1..9),
        nodes in proptest::collection::vec((0..3_u128, 5..250_u64, 1..40_u64, 1..40_u64), 1..5),
        link in proptest::collection::vec((1..2000_u64, 1..2000_u64), 16),
        (sequences, rows_max, context_tokens) in (1..6_u32, 16..600_u32, 64..2048_u32),
        (min, tied) in (1..3_u32, any::<bool>()),
    ) {
        let model = ModelCard {
            embedding_bytes: 7 * MB,
            head_bytes: 9 * MB,
            tied_head: tied,
            ..model(layers.iter().map(|l| l * MB).collect())
        };
        let cards: Vec<NodeCard> = nodes
            .iter()
            .enumerate()
            .map(|(n, &(host, free, read, macs))| {
                let mut card = card(n + 1, host, free * MB, read as f64 * 1e9, macs as f64 * 5e9);
                // Devices of one machine may differ.
                card.devices[0].name = format!("device {n}");
                card
            })
            .collect();
        let mut links = LinkMatrix::new();
        for (n, (rtt, bandwidth)) in link.into_iter().enumerate() {
            let measured = Link { rtt_seconds: rtt as f64 * 1e-6, bytes_per_second: bandwidth as f64 * 1e6 };
            links.set(id(n / 4 + 1), id(n % 4 + 1), measured);
        }
        let goal = Goal { sequences, rows_max, context_tokens, nodes_min: min, ..Goal::default() };
        let request = PlanRequest { cards: &cards, links: &links, model: &model, goal: &goal };
        if min as usize > cards.len() || min > model.layers {
            prop_assert!(plan(&request).is_err());
            return Ok(());
        }
        let candidates = candidates(&request).expect("some");
        let work = Work::new(&model, &goal);
        let best = brute_force(&candidates, &links, &work, min as usize, cards.len().min(model.layers as usize));
        match plan(&request) {
            Ok(plans) => {
                for plan in &plans {
                    sound(plan, &cards, &model);
                }
                let found = search(&candidates, &links, &model, &goal);
                prop_assert_eq!(Some(found[0].score), best);
                // What is reported is what was found, and asking again gives the same.
                prop_assert_eq!(plans[0].nodes().collect::<Vec<_>>(), found[0].order.iter().map(|&n| candidates[n].node).collect::<Vec<_>>());
                prop_assert_eq!(plan(&request).expect("as before"), plans);
            }
            Err(PlanError::NotEnoughMemory(_) | PlanError::NoSplit(_)) => prop_assert_eq!(best, None),
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}

#[test]
fn a_large_cluster_with_room_gets_a_plan_too() {
    // Everything fits everywhere, so nothing is ruled out by memory.
    let cards: Vec<NodeCard> =
        (1..=64).map(|n| card(n, n as u128, 100_000 * MB, 8e9 + 1e9 * (n % 7) as f64, 80e9 + 1e9 * (n % 5) as f64)).collect();
    let model = model(vec![100 * MB; 96]);
    for goal in [Goal::default(), Goal { sequences: 8, ..Goal::default() }, Goal { prefer: Prefer::FewestNodes, ..Goal::default() }] {
        for plan in &run(&cards, &model, &goal).expect("fits") {
            sound(plan, &cards, &model);
        }
    }
}
