//! Names of a decoder's tensors.

use std::ops::Range;

use super::DecoderConfig;
use crate::gguf::Gguf;

/// A tensor, or some of its rows: queries, keys and values may be one matrix in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The tensor's name.
    pub tensor: String,
    /// Its rows, or for a vector its elements; all if not given.
    pub rows: Option<Range<usize>>,
}

impl Part {
    /// All of a tensor.
    pub fn whole(tensor: impl Into<String>) -> Part {
        Part { tensor: tensor.into(), rows: None }
    }

    fn of(tensor: &str, rows: Range<usize>) -> Part {
        Part { tensor: tensor.to_owned(), rows: Some(rows) }
    }
}

/// Tensors outside of the layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelTensors {
    /// `[hidden, vocabulary]`: a row for each token.
    pub embedding: String,
    /// The last norm.
    pub output_norm: NormTensors,
    /// `[hidden, vocabulary]`: a row for each logit. The embedding's name where the two are one.
    pub head: String,
}

impl ModelTensors {
    /// The usual names; a file without a head of its own uses the embedding.
    pub(super) fn usual(gguf: &Gguf) -> ModelTensors {
        let embedding = "token_embd.weight";
        let head = if gguf.tensor("output.weight").is_some() { "output.weight" } else { embedding };
        ModelTensors { embedding: embedding.to_owned(), output_norm: NormTensors::named(gguf, "output_norm"), head: head.to_owned() }
    }
}

/// Vectors of a norm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NormTensors {
    /// What normalised elements are multiplied with.
    pub weight: Part,
    /// What is added then.
    pub bias: Option<Part>,
}

impl NormTensors {
    /// `NAME.weight`, and `NAME.bias` where there is one.
    pub(super) fn named(gguf: &Gguf, name: &str) -> NormTensors {
        NormTensors { weight: Part::whole(format!("{name}.weight")), bias: there(gguf, format!("{name}.bias")) }
    }
}

/// The name, if the file has the tensor.
fn there(gguf: &Gguf, name: String) -> Option<Part> {
    gguf.tensor(&name).is_some().then(|| Part::whole(name))
}

/// Tensors of one layer. Shapes are in ggml's order, row length first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerTensors {
    /// `[hidden]`: norm before attention.
    pub attention_norm: Option<NormTensors>,
    /// What makes queries, keys and values.
    pub projections: Projections,
    /// `[heads · value_length, hidden]`; of latent values, `value_length` is that of the values that they become.
    pub attention_output: Part,
    /// `[hidden]`: added to what attention puts out.
    pub attention_output_bias: Option<Part>,
    /// Norm of queries before the rotary embedding: `[key_length]` of each head, or `[heads · key_length]` of all together.
    pub query_norm: Option<Part>,
    /// Norm of keys before the rotary embedding: `[key_length]` of each head, or `[kv_heads · key_length]` of all together.
    pub key_norm: Option<Part>,
    /// `[heads]`: a score of each head that takes its share of the softmax and gives nothing.
    pub sinks: Option<Part>,
    /// `[hidden]`: norm of what attention puts out, before it is added to the row.
    pub post_attention_norm: Option<NormTensors>,
    /// `[hidden]`: norm before the feed-forward part.
    pub feed_forward_norm: Option<NormTensors>,
    /// The feed-forward part.
    pub feed_forward: FeedForward,
    /// `[hidden]`: norm of what the feed-forward part puts out, before it is added to the row.
    pub post_feed_forward_norm: Option<NormTensors>,
}

/// What makes queries, keys and values of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "there is one to a layer")]
pub enum Projections {
    /// A matrix for each.
    Heads(HeadTensors),
    /// Keys and values of all heads are made of one short vector, which is what is kept.
    Latent(LatentTensors),
}

/// Matrices of queries, keys and values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadTensors {
    /// `[hidden, heads · key_length]`.
    pub query: Part,
    /// `[hidden, kv_heads · key_length]`.
    pub key: Part,
    /// `[hidden, kv_heads · value_length]`.
    pub value: Part,
    /// `[heads · key_length]`: added to queries.
    pub query_bias: Option<Part>,
    /// `[kv_heads · key_length]`: added to keys.
    pub key_bias: Option<Part>,
    /// `[kv_heads · value_length]`: added to values.
    pub value_bias: Option<Part>,
}

/// Matrices of latent attention: see [`Latent`](super::Latent) for the lengths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LatentTensors {
    /// `[hidden, query_rank]` and its norm: queries are made of a short vector, too.
    pub query_down: Option<(Part, NormTensors)>,
    /// `[hidden or query_rank, heads · (fixed + turned)]`.
    pub query: Part,
    /// `[hidden, rank + turned]`: the short vector, and what is turned, which all heads share.
    pub down: Part,
    /// `[rank]`: norm of the short vector.
    pub down_norm: NormTensors,
    /// `[fixed, rank, heads]`: brings each head's queries to the short vector's space.
    pub query_up: Part,
    /// `[rank, value_length, heads]`: makes each head's values.
    pub value_up: Part,
}

/// A feed-forward part.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "there is one to a layer")]
pub enum FeedForward {
    /// The same for all tokens.
    Dense(DenseTensors),
    /// A choice of experts for each token.
    Experts(ExpertTensors),
}

/// Tensors of a feed-forward part of some width; of experts, their shapes have the experts as a further dimension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DenseTensors {
    /// `[hidden, width]`: what goes through the activation. Without it `up` does.
    pub gate: Option<Part>,
    /// `[hidden, width]`.
    pub up: Part,
    /// `[width, hidden]`.
    pub down: Part,
    /// `[width]`.
    pub gate_bias: Option<Part>,
    /// `[width]`.
    pub up_bias: Option<Part>,
    /// `[hidden]`.
    pub down_bias: Option<Part>,
}

/// Tensors of a mixture of experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertTensors {
    /// `[hidden, experts]`: a row for each expert's score.
    pub router: Part,
    /// `[experts]`: added to scores.
    pub router_bias: Option<Part>,
    /// `[experts]`: added to weights when experts are chosen, and not when they are mixed.
    pub selection_bias: Option<Part>,
    /// The experts, one behind the other.
    pub experts: DenseTensors,
    /// What all tokens go through besides.
    pub shared: Option<DenseTensors>,
    /// `[hidden]`: how far each token opens the shared part, through a sigmoid.
    pub shared_gate: Option<Part>,
}

/// What a part of a tensor is, and so the shape that it must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// So many numbers.
    Vector(usize),
    /// Columns and rows.
    Matrix(usize, usize),
    /// So many vectors: length, count.
    Vectors(usize, usize),
    /// So many matrices: columns, rows, count.
    Matrices(usize, usize, usize),
}

impl LayerTensors {
    /// The usual names, with biases where the file has them. Queries, keys and values, and gate and up, may be one matrix each.
    ///
    /// `config` has the widths already.
    pub(super) fn usual(gguf: &Gguf, config: &DecoderConfig, layer: usize) -> LayerTensors {
        let named = |part: &str| format!("blk.{layer}.{part}");
        let weight = |part: &str| Part::whole(named(part) + ".weight");
        let bias = |part: &str| there(gguf, named(part) + ".bias");
        LayerTensors {
            attention_norm: Some(NormTensors::named(gguf, &named("attn_norm"))),
            projections: Projections::Heads(HeadTensors::usual(gguf, config, layer)),
            attention_output: weight("attn_output"),
            attention_output_bias: bias("attn_output"),
            query_norm: None,
            key_norm: None,
            sinks: None,
            post_attention_norm: None,
            feed_forward_norm: Some(NormTensors::named(gguf, &named("ffn_norm"))),
            feed_forward: FeedForward::Dense(DenseTensors::named(gguf, &named("ffn"), "")),
            post_feed_forward_norm: None,
        }
    }

    /// Latent attention.
    pub(super) fn with_latent(self, gguf: &Gguf, layer: usize) -> LayerTensors {
        let named = |part: &str| format!("blk.{layer}.{part}");
        let weight = |part: &str| Part::whole(named(part) + ".weight");
        let short = gguf.tensor(&named("attn_q_a.weight")).is_some();
        let latent = LatentTensors {
            query_down: short.then(|| (weight("attn_q_a"), NormTensors::named(gguf, &named("attn_q_a_norm")))),
            query: weight(if short { "attn_q_b" } else { "attn_q" }),
            down: weight("attn_kv_a_mqa"),
            down_norm: NormTensors::named(gguf, &named("attn_kv_a_norm")),
            query_up: weight("attn_k_b"),
            value_up: weight("attn_v_b"),
        };
        LayerTensors { projections: Projections::Latent(latent), ..self }
    }

    /// Norms of the heads of queries and keys.
    pub(super) fn with_head_norms(self, layer: usize) -> LayerTensors {
        let name = |part: &str| Some(Part::whole(format!("blk.{layer}.{part}.weight")));
        LayerTensors { query_norm: name("attn_q_norm"), key_norm: name("attn_k_norm"), ..self }
    }

    /// Norms after attention and after the feed-forward part.
    pub(super) fn with_post_norms(self, gguf: &Gguf, layer: usize) -> LayerTensors {
        let name = |part: &str| Some(NormTensors::named(gguf, &format!("blk.{layer}.{part}")));
        LayerTensors { post_attention_norm: name("post_attention_norm"), post_feed_forward_norm: name("post_ffw_norm"), ..self }
    }

    /// No norms before attention and the feed-forward part.
    pub(super) fn without_norms(self) -> LayerTensors {
        LayerTensors { attention_norm: None, feed_forward_norm: None, ..self }
    }

    /// A feed-forward part without a gate.
    pub(super) fn ungated(mut self) -> LayerTensors {
        if let FeedForward::Dense(dense) = &mut self.feed_forward {
            (dense.gate, dense.gate_bias) = (None, None);
        }
        self
    }

    /// Attention and the feed-forward part take the same normalised row.
    pub(super) fn with_one_norm(self) -> LayerTensors {
        LayerTensors { feed_forward_norm: self.attention_norm.clone(), ..self }
    }

    /// Gate and up as one matrix, the gate first, where the file has none of its own.
    pub(super) fn with_fused_gate(mut self, gguf: &Gguf, width: usize) -> LayerTensors {
        if let FeedForward::Dense(dense) = &mut self.feed_forward
            && dense.gate.as_ref().is_some_and(|gate| gguf.tensor(&gate.tensor).is_none())
        {
            let up = dense.up.tensor.clone();
            (dense.gate, dense.up) = (Some(Part::of(&up, 0..width)), Part::of(&up, width..2 * width));
        }
        self
    }

    /// A mixture of experts instead of the dense part, if the layer has one.
    pub(super) fn with_experts(self, gguf: &Gguf, layer: usize) -> LayerTensors {
        let named = |part: &str| format!("blk.{layer}.{part}");
        let router = named("ffn_gate_inp.weight");
        if gguf.tensor(&router).is_none() {
            return self;
        }
        let shared = gguf.tensor(&named("ffn_up_shexp.weight")).is_some();
        let experts = ExpertTensors {
            router: Part::whole(router),
            router_bias: there(gguf, named("ffn_gate_inp.bias")),
            selection_bias: there(gguf, named("exp_probs_b.bias")),
            experts: DenseTensors::named(gguf, &named("ffn"), "_exps"),
            shared: shared.then(|| DenseTensors::named(gguf, &named("ffn"), "_shexp")),
            shared_gate: there(gguf, named("ffn_gate_inp_shexp.weight")),
        };
        LayerTensors { feed_forward: FeedForward::Experts(experts), ..self }
    }

    /// All that there are, with what they are.
    pub(crate) fn parts(&self, config: &DecoderConfig) -> Vec<(&Part, Kind)> {
        let DecoderConfig { hidden, heads, kv_heads, key_length, value_length, .. } = *config;
        let (queries, keys, values) = (heads * key_length, kv_heads * key_length, kv_heads * value_length);
        let attended = config.latent.as_ref().map_or(value_length, |latent| latent.value_length);
        let mut parts = vec![(&self.attention_output, Kind::Matrix(heads * attended, hidden))];
        match &self.projections {
            Projections::Heads(of) => {
                let all = [(&of.query, &of.query_bias, queries), (&of.key, &of.key_bias, keys), (&of.value, &of.value_bias, values)];
                for (matrix, bias, rows) in all {
                    parts.push((matrix, Kind::Matrix(hidden, rows)));
                    parts.extend(bias.iter().map(|bias| (bias, Kind::Vector(rows))));
                }
            }
            Projections::Latent(of) => of.parts(config, &mut parts),
        }
        let perhaps = [
            (&self.attention_output_bias, hidden),
            (&self.query_norm, if config.whole_row_norms { queries } else { key_length }),
            (&self.key_norm, if config.whole_row_norms { keys } else { key_length }),
            (&self.sinks, heads),
        ];
        parts.extend(perhaps.into_iter().filter_map(|(part, length)| Some((part.as_ref()?, Kind::Vector(length)))));
        for norm in [&self.attention_norm, &self.post_attention_norm, &self.feed_forward_norm, &self.post_feed_forward_norm] {
            parts.extend(norm.iter().flat_map(|norm| norm.parts(hidden)));
        }
        match &self.feed_forward {
            FeedForward::Dense(dense) => dense.parts(hidden, config.feed_forward, None, &mut parts),
            FeedForward::Experts(tensors) => {
                let (count, width, shared) =
                    config.experts.as_ref().map_or((0, 0, 0), |e| (e.count, e.feed_forward, e.shared_feed_forward));
                parts.push((&tensors.router, Kind::Matrix(hidden, count)));
                let perhaps = [(&tensors.router_bias, count), (&tensors.selection_bias, count), (&tensors.shared_gate, hidden)];
                parts.extend(perhaps.into_iter().filter_map(|(part, length)| Some((part.as_ref()?, Kind::Vector(length)))));
                tensors.experts.parts(hidden, width, Some(count), &mut parts);
                if let Some(dense) = &tensors.shared {
                    dense.parts(hidden, shared, None, &mut parts);
                }
            }
        }
        parts
    }
}

impl HeadTensors {
    /// The usual names, or all in one matrix, with biases where the file has them.
    fn usual(gguf: &Gguf, config: &DecoderConfig, layer: usize) -> HeadTensors {
        let named = |part: &str| format!("blk.{layer}.{part}");
        let weight = |part: &str| Part::whole(named(part) + ".weight");
        let bias = |part: &str| there(gguf, named(part) + ".bias");
        let (queries, keys, values) =
            (config.heads * config.key_length, config.kv_heads * config.key_length, config.kv_heads * config.value_length);
        let mut heads = HeadTensors {
            query: weight("attn_q"),
            key: weight("attn_k"),
            value: weight("attn_v"),
            query_bias: bias("attn_q"),
            key_bias: bias("attn_k"),
            value_bias: bias("attn_v"),
        };
        let three = [0..queries, queries..queries + keys, queries + keys..queries + keys + values];
        let fused = named("attn_qkv.weight");
        if gguf.tensor(&fused).is_some() {
            [heads.query, heads.key, heads.value] = three.clone().map(|rows| Part::of(&fused, rows));
        }
        let fused = named("attn_qkv.bias");
        if gguf.tensor(&fused).is_some() {
            [heads.query_bias, heads.key_bias, heads.value_bias] = three.map(|rows| Some(Part::of(&fused, rows)));
        }
        heads
    }
}

impl LatentTensors {
    fn parts<'a>(&'a self, config: &DecoderConfig, parts: &mut Vec<(&'a Part, Kind)>) {
        let Some(latent) = &config.latent else { return };
        let (hidden, heads) = (config.hidden, config.heads);
        let mut from = hidden;
        if let Some((down, norm)) = &self.query_down {
            from = latent.query_rank;
            parts.push((down, Kind::Matrix(hidden, from)));
            parts.extend(norm.parts(from));
        }
        parts.extend([
            (&self.query, Kind::Matrix(from, heads * (latent.fixed + latent.turned))),
            (&self.down, Kind::Matrix(hidden, latent.rank + latent.turned)),
            (&self.query_up, Kind::Matrices(latent.fixed, latent.rank, heads)),
            (&self.value_up, Kind::Matrices(latent.rank, latent.value_length, heads)),
        ]);
        parts.extend(self.down_norm.parts(latent.rank));
    }
}

impl NormTensors {
    /// All that there are, with what they are.
    pub(super) fn parts(&self, length: usize) -> impl Iterator<Item = (&Part, Kind)> {
        [Some(&self.weight), self.bias.as_ref()].into_iter().flatten().map(move |part| (part, Kind::Vector(length)))
    }
}

impl DenseTensors {
    /// `PREFIX_gateSUFFIX.weight` and so on, with biases where the file has them.
    fn named(gguf: &Gguf, prefix: &str, suffix: &str) -> DenseTensors {
        let weight = |part: &str| Part::whole(format!("{prefix}_{part}{suffix}.weight"));
        let bias = |part: &str| there(gguf, format!("{prefix}_{part}{suffix}.bias"));
        DenseTensors {
            gate: Some(weight("gate")),
            up: weight("up"),
            down: weight("down"),
            gate_bias: bias("gate"),
            up_bias: bias("up"),
            down_bias: bias("down"),
        }
    }

    fn parts<'a>(&'a self, hidden: usize, width: usize, experts: Option<usize>, parts: &mut Vec<(&'a Part, Kind)>) {
        let matrix = |columns, rows| match experts {
            Some(count) => Kind::Matrices(columns, rows, count),
            None => Kind::Matrix(columns, rows),
        };
        let vector = |length| match experts {
            Some(count) => Kind::Vectors(length, count),
            None => Kind::Vector(length),
        };
        parts.extend(self.gate.iter().map(|gate| (gate, matrix(hidden, width))));
        parts.extend([(&self.up, matrix(hidden, width)), (&self.down, matrix(width, hidden))]);
        let biases = [(&self.gate_bias, width), (&self.up_bias, width), (&self.down_bias, hidden)];
        parts.extend(biases.into_iter().filter_map(|(bias, length)| Some((bias.as_ref()?, vector(length)))));
    }
}
