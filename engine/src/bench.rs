//! How fast a model runs on this machine: what `shoal bench` shows.
//!
//! The figures mean what those of llama.cpp's `llama-bench` mean, so that the two can be set side by side. Prefill is a prompt in an
//! empty context, of which only the last token gets logits, in steps of 512 rows. Decoding starts from an empty context,
//! too, one token a step. Tokens are any: nothing depends on which, and nothing is sampled. One round of each runs before the clock
//! does.

use std::path::Path;
use std::time::Duration;

use crate::config::{ConfigError, DecoderConfig};
use crate::gguf::{Gguf, GgufError};
use crate::kernels::{Kernels, KvShape, PAGE_TOKENS};
use crate::stage::{Input, LoadError, Row, SequenceId, Stage, StageOptions, StageSpec, StepError, load};

/// Rows of one step of a prompt, as llama.cpp's default.
const STEP: usize = 512;
const SEQUENCE: SequenceId = SequenceId(0);

/// What to measure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BenchOptions {
    /// Tokens of the prompt; none to leave prefill out.
    pub prompt: usize,
    /// Tokens that are decoded; none to leave decoding out.
    pub decoded: usize,
    /// Compute threads.
    pub threads: usize,
    /// How often each is measured.
    pub repeat: usize,
}

/// What was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct BenchReport {
    /// The model's architecture.
    pub architecture: String,
    /// Memory of its weights, in bytes.
    pub weight_bytes: u64,
    /// From opening the file to the weights being ready.
    pub load: Duration,
    /// From opening the file to the logits of a first token.
    pub first_token: Duration,
    /// Tokens a second of prefill, each time.
    pub prefill: Vec<f64>,
    /// Tokens a second of decoding, each time.
    pub decode: Vec<f64>,
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// Nothing was asked for.
    #[error("there is nothing to measure: neither a prompt nor tokens to decode, or not even once")]
    Nothing,
    /// More was asked for than the model can see.
    #[error("the model sees {context} tokens, and {asked} were asked for")]
    Context {
        /// Tokens that it sees.
        context: usize,
        /// Tokens asked for.
        asked: usize,
    },
    /// The file is none.
    #[error(transparent)]
    File(#[from] GgufError),
    /// The file holds no model that can be run.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model was not loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A step failed.
    #[error(transparent)]
    Step(#[from] StepError),
}

/// Loads the model in `path` to the CPU and measures it. `now` tells the time since any moment.
///
/// # Errors
/// [`BenchError`].
pub fn measure(path: &Path, options: &BenchOptions, now: &dyn Fn() -> Duration) -> Result<BenchReport, BenchError> {
    let longest = options.prompt.max(options.decoded);
    if longest == 0 || options.repeat == 0 {
        return Err(BenchError::Nothing);
    }
    let begin = now();
    let gguf = Gguf::open(path)?;
    let config = DecoderConfig::from_gguf(&gguf)?;
    if longest > config.context_tokens {
        return Err(BenchError::Context { context: config.context_tokens, asked: longest });
    }
    let kv = KvShape { kv_heads: config.kv_heads, key_length: config.key_length, value_length: config.value_length, pages: 0 };
    let page_bytes = <burn_flex::Flex as Kernels>::kv_page_bytes(&kv) * config.layers as u64;
    let stage_options = StageOptions {
        threads: options.threads,
        kv_bytes: page_bytes * longest.div_ceil(PAGE_TOKENS) as u64,
        rows_max: options.prompt.clamp(1, STEP),
        context_tokens: longest as u32,
    };
    let stage = load(&gguf, &StageSpec { layers: 0..config.layers as u32 }, &stage_options)?;
    let loaded = now();
    let mut model = Model { logits: vec![0.0; stage.vocabulary()], stage };
    model.run(0, 1)?;
    let first_token = now().saturating_sub(begin);
    model.forget();

    let mut report = BenchReport {
        architecture: config.architecture,
        weight_bytes: model.stage.weight_bytes(),
        load: loaded.saturating_sub(begin),
        first_token,
        prefill: Vec::new(),
        decode: Vec::new(),
    };
    let rate = |tokens: usize, begin: Duration| tokens as f64 / now().saturating_sub(begin).as_secs_f64().max(1e-9);
    for round in 0..=options.repeat {
        if options.prompt > 0 {
            let begin = now();
            for first in (0..options.prompt).step_by(STEP) {
                model.run(first, STEP.min(options.prompt - first))?;
            }
            if round > 0 {
                report.prefill.push(rate(options.prompt, begin));
            }
            model.forget();
        }
        // To warm up, a token or two are enough.
        let count = if round > 0 { options.decoded } else { options.decoded.min(2) };
        let begin = now();
        for position in 0..count {
            model.run(position, 1)?;
        }
        if round > 0 && count > 0 {
            report.decode.push(rate(count, begin));
        }
        model.forget();
    }
    Ok(report)
}

struct Model {
    stage: Box<dyn Stage>,
    logits: Vec<f32>,
}

impl Model {
    /// Runs `count` tokens from `position` on, with logits of the last.
    fn run(&mut self, position: usize, count: usize) -> Result<(), StepError> {
        let (vocabulary, last) = (self.logits.len(), position + count - 1);
        let rows: Vec<Row> = (position..position + count)
            .map(|position| Row {
                sequence: SEQUENCE,
                position: position as u32,
                token: (position * 7919 % vocabulary) as u32,
                sample: position == last,
            })
            .collect();
        self.stage.step(&rows, Input::Tokens, &mut self.logits)
    }

    fn forget(&mut self) {
        self.stage.free(SEQUENCE);
    }
}

/// The middle one of some figures, or the mean of the two middle ones; `None` of none.
pub fn median(figures: &[f64]) -> Option<f64> {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len().is_multiple_of(2) { (sorted[middle - 1] + upper) / 2.0 } else { upper })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::PathBuf;

    use super::*;

    fn tiny() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-llama.gguf")
    }

    fn options() -> BenchOptions {
        BenchOptions { prompt: 20, decoded: 10, threads: 1, repeat: 3 }
    }

    /// Each look at the clock is a second later than the one before.
    fn ticking() -> impl Fn() -> Duration {
        let looks = Cell::new(0);
        move || {
            looks.set(looks.get() + 1);
            Duration::from_secs(looks.get())
        }
    }

    #[test]
    fn a_clock_of_known_pace_gives_known_figures() {
        let report = measure(&tiny(), &options(), &ticking()).unwrap();
        assert_eq!((report.load, report.first_token), (Duration::from_secs(1), Duration::from_secs(2)));
        assert_eq!((report.prefill, report.decode), (vec![20.0; 3], vec![10.0; 3]));
        assert_eq!(report.architecture, "llama");
        assert!(report.weight_bytes > 0);
    }

    #[test]
    fn parts_can_be_left_out() {
        let report = measure(&tiny(), &BenchOptions { prompt: 0, ..options() }, &ticking()).unwrap();
        assert_eq!((report.prefill.len(), report.decode.len()), (0, 3));
        let report = measure(&tiny(), &BenchOptions { decoded: 0, ..options() }, &ticking()).unwrap();
        assert_eq!((report.prefill.len(), report.decode.len()), (3, 0));
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        let refused = |options| measure(&tiny(), &options, &ticking()).unwrap_err();
        assert!(matches!(refused(BenchOptions { repeat: 0, ..options() }), BenchError::Nothing));
        assert!(matches!(refused(BenchOptions { prompt: 0, decoded: 0, ..options() }), BenchError::Nothing));
        let error = refused(BenchOptions { prompt: 1 << 40, ..options() });
        assert!(matches!(error, BenchError::Context { asked, .. } if asked == 1 << 40), "{error}");
        let absent = measure(Path::new("/no/such.gguf"), &options(), &ticking()).unwrap_err();
        assert!(absent.to_string().contains("/no/such.gguf"), "{absent}");
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[9.0, 1.0, 2.0, 4.0]), Some(3.0));
    }
}
