//! How fast an answer came, in figures for people.

use std::time::Duration;

use serde_json::{Value, json};

use crate::Timing;

/// Things in a second; nothing where there is nothing to divide.
fn rate(count: u32, time: Duration) -> Option<f64> {
    let seconds = time.as_secs_f64();
    (count > 0 && seconds > 0.0).then(|| f64::from(count) / seconds)
}

fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

/// The `timings` of an answer. The first token belongs to the prefill, so decoding is measured over the others; tokens of the prompt
/// that were there already are not counted as prefill.
pub(super) fn timings(prompt_tokens: u32, completion_tokens: u32, timing: Timing) -> Value {
    json!({
        "queued_ms": milliseconds(timing.queued),
        "prefill_ms": milliseconds(timing.prefill),
        "decode_ms": milliseconds(timing.decode),
        "cached_tokens": timing.cached,
        "prefill_tok_s": rate(prompt_tokens.saturating_sub(timing.cached), timing.prefill),
        "decode_tok_s": rate(completion_tokens.saturating_sub(1), timing.decode),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_leave_out_what_was_not_measured() {
        let timing = Timing { queued: Duration::ZERO, prefill: Duration::from_millis(500), decode: Duration::from_secs(2), cached: 0 };
        let value = timings(50, 5, timing);
        assert_eq!((&value["prefill_tok_s"], &value["decode_tok_s"]), (&json!(100.0), &json!(2.0)));
        assert_eq!(value["prefill_ms"], json!(500.0));
        let spared = timings(50, 5, Timing { cached: 30, ..timing });
        assert_eq!((&spared["prefill_tok_s"], &spared["cached_tokens"]), (&json!(40.0), &json!(30)));
        let single = timings(50, 1, Timing::default());
        assert!(single["decode_tok_s"].is_null() && single["prefill_tok_s"].is_null());
    }
}
