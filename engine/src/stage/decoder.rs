//! The decoder: one for all architectures, on any backend that has the [`Kernels`].

use burn::backend::tensor::{Device, FloatTensor};
use burn::tensor::TensorData;

use super::kv::PageBook;
use super::{Input, Row, SequenceId, Stage, StepError};
use crate::config::DecoderConfig;
use crate::kernels::{
    AttentionShape, Batch, Experts, FeedForward, HeadWeights, Kernels, KvLayer, Latent, Linear, LogitsFinish, Matrix, Norm, PAGE_TOKENS,
    Residual, Rotation, Workspace,
};

/// One layer's weights.
pub(super) struct Layer<B: Kernels> {
    pub(super) attention_norm: Option<Norm<B>>,
    pub(super) projections: Projections<B>,
    pub(super) heads: HeadWeights<B>,
    pub(super) attention: AttentionShape,
    /// A place among the decoder's frequencies.
    pub(super) rope: Option<usize>,
    pub(super) output: Linear<B>,
    pub(super) post_attention_norm: Option<Norm<B>>,
    pub(super) feed_forward_norm: Option<Norm<B>>,
    pub(super) feed_forward: Part<B>,
    pub(super) post_feed_forward_norm: Option<Norm<B>>,
}

/// What makes queries, keys and values.
#[allow(clippy::large_enum_variant, reason = "there is one to a layer")]
pub(super) enum Projections<B: Kernels> {
    /// A matrix for each, in that order.
    Heads([Linear<B>; 3]),
    Latent(Latent<B>),
}

/// A layer's feed-forward part.
#[allow(clippy::large_enum_variant, reason = "there is one to a layer")]
pub(super) enum Part<B: Kernels> {
    Dense(FeedForward<B>),
    Experts(Experts<B>),
}

/// What the last stage has besides layers.
pub(super) struct Head<B: Kernels> {
    pub(super) norm: Norm<B>,
    /// The embedding's, if not given.
    pub(super) matrix: Option<Matrix<B>>,
}

/// A stage of decoder layers.
pub(super) struct Decoder<B: Kernels> {
    pub(super) config: DecoderConfig,
    pub(super) device: Device<B>,
    pub(super) work: Workspace,
    pub(super) embedding: Option<Matrix<B>>,
    pub(super) layers: Vec<Layer<B>>,
    pub(super) head: Option<Head<B>>,
    /// One for each layer.
    pub(super) kv: Vec<KvLayer<B>>,
    pub(super) book: PageBook,
    /// Of each rotary embedding.
    pub(super) frequencies: Vec<Vec<f32>>,
    pub(super) rows_max: usize,
    pub(super) context: usize,
    pub(super) weight_bytes: u64,
}

impl<B: Kernels> Decoder<B> {
    /// Checks all but the places of rows.
    fn check(&self, rows: &[Row], input: Input<'_>, output: &[f32]) -> Result<(), StepError> {
        let malformed = |text: String| Err(StepError::Malformed(text));
        if rows.len() > self.rows_max {
            return malformed(format!("{} rows, and {} at most are taken", rows.len(), self.rows_max));
        }
        match (input, self.is_first()) {
            (Input::Tokens, true) => {
                if let Some(row) = rows.iter().find(|row| row.token as usize >= self.config.vocabulary) {
                    return malformed(format!("token {} is not among the vocabulary's {}", row.token, self.config.vocabulary));
                }
            }
            (Input::Activations(x), false) => {
                let expected = rows.len() * self.config.hidden;
                if x.len() != expected {
                    return malformed(format!("{} rows need an input of {expected} elements, {} came", rows.len(), x.len()));
                }
            }
            (Input::Tokens, false) => return malformed("it embeds no tokens: activations are needed".to_owned()),
            (Input::Activations(_), true) => return malformed("it is the first and takes tokens, not activations".to_owned()),
        }
        let (kind, expected) = if self.is_last() {
            ("logits of the sampled rows", rows.iter().filter(|row| row.sample).count() * self.config.vocabulary)
        } else {
            ("activations of all rows", rows.len() * self.config.hidden)
        };
        if output.len() != expected {
            return malformed(format!("{kind} need an output of {expected} elements, {} were given", output.len()));
        }
        Ok(())
    }

    /// Runs the layers over rows of activations.
    fn run_layers(&mut self, mut x: FloatTensor<B>, batch: &Batch) -> FloatTensor<B> {
        let ropes = self.config.ropes.iter().zip(&self.frequencies);
        let rotations: Vec<Rotation> = ropes.map(|(rope, frequencies)| Rotation::new(rope, frequencies, batch.positions())).collect();
        let none = Rotation::none();
        let (work, scale, parallel) = (&mut self.work, self.config.residual_scale, self.config.parallel);
        for (layer, kv) in self.layers.iter().zip(&mut self.kv) {
            let rotation = layer.rope.and_then(|rope| rotations.get(rope)).unwrap_or(&none);
            let before = layer.attention_norm.as_ref();
            let [queries, keys, values] = match &layer.projections {
                Projections::Heads(heads) => B::project(work, &x, before, heads.each_ref()),
                Projections::Latent(latent) => B::project_latent(work, &x, before, latent),
            };
            let mut attended = B::attend(work, [&queries, &keys, &values], &layer.attention, &layer.heads, rotation, batch, kv);
            if let Projections::Latent(latent) = &layer.projections {
                attended = B::expand_latent(work, &attended, latent);
            }
            // What the feed-forward part takes, if that is not what attention puts out.
            let input = parallel.then(|| x.clone());
            let rows = Residual { rows: x, norm: layer.post_attention_norm.as_ref(), scale };
            x = B::project_add(work, &attended, &layer.output, rows);
            let input = input.unwrap_or_else(|| x.clone());
            let (before, norm) = (layer.feed_forward_norm.as_ref(), layer.post_feed_forward_norm.as_ref());
            x = match &layer.feed_forward {
                Part::Dense(part) => {
                    let gated = B::gated(work, &input, before, &part.gate);
                    drop(input);
                    B::project_add(work, &gated, &part.down, Residual { rows: x, norm, scale })
                }
                Part::Experts(experts) => B::experts(work, &input, before, experts, Residual { rows: x, norm, scale }),
            };
        }
        x
    }
}

impl<B: Kernels> Stage for Decoder<B>
where
    Layer<B>: Send,
    Head<B>: Send,
    KvLayer<B>: Send,
    Matrix<B>: Send,
    Device<B>: Send,
{
    fn hidden(&self) -> usize {
        self.config.hidden
    }

    fn vocabulary(&self) -> usize {
        self.config.vocabulary
    }

    fn is_first(&self) -> bool {
        self.embedding.is_some()
    }

    fn is_last(&self) -> bool {
        self.head.is_some()
    }

    fn step(&mut self, rows: &[Row], input: Input<'_>, output: &mut [f32]) -> Result<(), StepError> {
        self.check(rows, input, output)?;
        let plan = self.book.plan(rows, self.context)?;
        if rows.is_empty() {
            return Ok(());
        }
        // From here on nothing can fail but the device.
        let batch = self.book.apply(plan);
        let x = match (input, &self.embedding) {
            (Input::Tokens, Some(embedding)) => {
                let tokens: Vec<u32> = rows.iter().map(|row| row.token).collect();
                B::embed(&mut self.work, &self.device, embedding, &tokens, self.config.embedding_scale)
            }
            (Input::Activations(x), _) => B::float_from_data(TensorData::new(x.to_vec(), [rows.len(), self.config.hidden]), &self.device),
            (Input::Tokens, None) => return Err(StepError::Malformed("it embeds no tokens: activations are needed".to_owned())),
        };
        let x = self.run_layers(x, &batch);
        match &self.head {
            None => B::read(x, output)?,
            Some(head) => {
                let sampled: Vec<usize> = (0..rows.len()).filter(|&row| rows[row].sample).collect();
                if let (Some(matrix), false) = (head.matrix.as_ref().or(self.embedding.as_ref()), sampled.is_empty()) {
                    let finish = LogitsFinish { scale: self.config.logit_scale, softcap: self.config.logit_softcap };
                    B::logits(&mut self.work, &x, &sampled, &head.norm, matrix, &finish, output)?;
                }
            }
        }
        Ok(())
    }

    fn share(&mut self, from: SequenceId, to: SequenceId, tokens: usize) -> Result<(), StepError> {
        self.book.share(from, to, tokens)
    }

    fn free(&mut self, sequence: SequenceId) {
        self.book.free(sequence);
    }

    fn page_tokens(&self) -> usize {
        PAGE_TOKENS
    }

    fn pages(&self) -> (usize, usize) {
        self.book.pages()
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }
}
