//! What a plan will do, from the same costs that it was chosen by.

use super::arrange::Candidate;
use super::cost::{Bound, Picos, Work, picos};
use super::links::LinkMatrix;
use super::types::Prediction;
use super::{ANSWER_TOKENS, PROMPT_TOKENS};

/// A sum that stays at its limit instead of wrapping: times on absurd cards are as good as for ever.
fn sum(times: impl IntoIterator<Item = Picos>) -> Picos {
    times.into_iter().fold(0, Picos::saturating_add)
}

fn link_picos(work: &Work<'_>, links: &LinkMatrix, from: &Candidate, to: &Candidate, rows: u64) -> Picos {
    picos(links.get(from.node, to.node, from.host == to.host).seconds(work.activation_bytes(rows)))
}

/// The way of a sampled token from the last stage back to the first.
fn return_picos(links: &LinkMatrix, last: &Candidate, first: &Candidate) -> Picos {
    picos(links.get(last.node, first.node, last.host == first.host).seconds(64.0))
}

/// What the links add to the reference job. It depends on the order of the nodes alone, not on the split.
pub(super) fn link_score(work: &Work<'_>, links: &LinkMatrix, order: &[&Candidate]) -> Picos {
    let (_, chunk_rows) = work.chunks();
    let (_, token_rows) = work.groups(order.len());
    let mut score: Picos = 0;
    for pair in order.windows(2) {
        let token = link_picos(work, links, pair[0], pair[1], token_rows);
        score = score.saturating_add(link_picos(work, links, pair[0], pair[1], chunk_rows));
        score = score.saturating_add(token.saturating_mul(ANSWER_TOKENS));
    }
    if let [first, .., last] = order {
        score = score.saturating_add(return_picos(links, last, first).saturating_mul(ANSWER_TOKENS + 1));
    }
    score
}

/// Stage by stage for `rows` sequences, or for a chunk of a prompt without its sampling.
fn stage_picos(work: &Work<'_>, order: &[&Candidate], ends: &[usize], of_layer: impl Fn(usize, &Candidate) -> Picos) -> Vec<Picos> {
    let mut from = 0;
    order
        .iter()
        .zip(ends)
        .map(|(node, &to)| {
            let layers = sum((from..to).map(|layer| of_layer(layer, node)));
            from = to;
            layers.saturating_add(work.overhead_picos())
        })
        .collect()
}

/// Load of the busiest machine: stages of one machine share its memory and cores.
fn busiest_host(order: &[&Candidate], stages: &[Picos]) -> Picos {
    let mut most = 0;
    for node in order {
        let here = order.iter().zip(stages).filter(|(other, _)| other.host == node.host);
        most = most.max(sum(here.map(|(_, &time)| time)));
    }
    most
}

pub(super) fn predict(work: &Work<'_>, links: &LinkMatrix, order: &[&Candidate], ends: &[usize]) -> Prediction {
    let seconds = |picos: Picos| picos as f64 / 1e12;
    let Some((first, last)) = order.first().zip(order.last()) else {
        return Prediction {
            prefill_tok_s: 0.0,
            decode_tok_s: 0.0,
            decode_total_tok_s: 0.0,
            first_token_seconds: 0.0,
            bottleneck: String::new(),
        };
    };
    let back = if order.len() > 1 { return_picos(links, last, first) } else { 0 };
    let hops = |rows: u64| -> Vec<Picos> { order.windows(2).map(|p| link_picos(work, links, p[0], p[1], rows)).collect() };

    // Chunks of the prompt follow one another through the pipeline; the last one samples.
    let (chunks, chunk_rows) = work.chunks();
    let chunk = stage_picos(work, order, ends, |layer, node| work.chunk_picos(layer, node.speed));
    let fill = sum(chunk.iter().copied().chain(hops(chunk_rows)));
    let overlap = busiest_host(order, &chunk).saturating_mul(chunks - 1);
    let first_token = sum([fill, overlap, work.head_picos(last.speed, 1), back]);

    let token = |rows: u64| {
        let mut stages = stage_picos(work, order, ends, |layer, node| work.token_picos(layer, node.speed, rows));
        if let Some(stage) = stages.last_mut() {
            *stage = stage.saturating_add(work.head_picos(last.speed, rows));
        }
        stages
    };
    let alone = token(1);
    let alone_hops = hops(1);
    let one = sum(alone.iter().chain(&alone_hops).copied().chain([back]));

    let (groups, rows) = work.groups(order.len());
    let shared = token(rows);
    let way = sum(shared.iter().copied().chain(hops(rows)).chain([back]));
    let round = way.max(busiest_host(order, &shared).saturating_mul(groups));
    let sequences = f64::from(work.goal.sequences.max(1));

    Prediction {
        prefill_tok_s: PROMPT_TOKENS as f64 / seconds(first_token),
        decode_tok_s: 1.0 / seconds(one),
        decode_total_tok_s: sequences / seconds(round),
        first_token_seconds: seconds(first_token),
        bottleneck: bottleneck(work, order, &alone, &alone_hops, back, one),
    }
}

fn bottleneck(work: &Work<'_>, order: &[&Candidate], stages: &[Picos], hops: &[Picos], back: Picos, all: Picos) -> String {
    let percent = |part: Picos| (part as f64 / all.max(1) as f64 * 100.0).round();
    let network = sum(hops.iter().copied().chain([back]));
    let slowest = stages.iter().zip(order).max_by_key(|(time, node)| (**time, std::cmp::Reverse(node.node)));
    match slowest {
        Some((&time, _)) if network > time => {
            format!("the links between the nodes: {} % of a token's time", percent(network))
        }
        Some((&time, node)) => {
            let what = match work.token_bound(node.speed) {
                Bound::Reading => "reading weights",
                Bound::Arithmetic => "arithmetic",
            };
            format!("{what} on {}: {} % of a token's time", node.name, percent(time))
        }
        None => String::new(),
    }
}
