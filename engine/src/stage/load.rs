//! Loads a stage from a model file: its own tensors, and no others.

use std::ops::Range;

use burn::backend::tensor::{Device as BurnDevice, FloatTensor};
use burn::tensor::TensorData;
use burn_flex::{Flex, FlexDevice};

use super::decoder::{Decoder, Head, Layer, Part, Projections};
use super::kv::PageBook;
use super::{Stage, StageOptions, StageSpec};
use crate::config::{self, ConfigError, DecoderConfig, DenseTensors, LayerTensors, NormTensors};
use crate::device::{Device, DeviceError};
use crate::gguf::{Gguf, TensorView};
use crate::kernels::{
    AttentionShape, Experts, FeedForward, Gate, HeadWeights, Kernels, KvShape, Latent, LayerError, Linear, Matrix, Norm, PAGE_TOKENS,
    SharedExpert, Workspace,
};

/// Why a stage was not loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file holds no model that can be run.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The stage's layers are not the model's.
    #[error("the model has layers 0 to {layers} (exclusive); a stage of layers {asked:?} cannot be made of it")]
    Layers {
        /// What the stage should hold.
        asked: Range<u32>,
        /// How many there are.
        layers: usize,
    },
    /// Something of the file cannot be held.
    #[error("{file}: {source}")]
    Tensor {
        /// The file.
        file: String,
        /// The tensor, and what is wrong.
        source: LayerError,
    },
    /// The memory for keys and values is too little.
    #[error("{given} bytes for keys and values hold no page of {PAGE_TOKENS} tokens; lease {page} bytes at least")]
    KvMemory {
        /// Bytes given.
        given: u64,
        /// Bytes of one page.
        page: u64,
    },
    /// An option that makes no sense.
    #[error("the stage's {0} must not be zero")]
    Zero(&'static str),
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// No compute threads.
    #[error("the system gives no {threads} compute threads: {source}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// What it said.
        source: std::io::Error,
    },
}

/// Loads the stage `spec` of a model to a device.
///
/// # Errors
/// [`LoadError`].
pub fn load_to(device: Device, gguf: &Gguf, spec: &StageSpec, options: &StageOptions) -> Result<Box<dyn Stage>, LoadError> {
    match device {
        Device::Cpu => load(gguf, spec, options),
        #[cfg(gpu)]
        Device::Gpu(index) => {
            let device = crate::kernels::open_gpu(index)?;
            // The host only hands on.
            let work = Workspace::new(1).map_err(|source| LoadError::Threads { threads: 1, source })?;
            Ok(Box::new(load_on::<burn_wgpu::Wgpu>(gguf, spec, options, device, work)?))
        }
        #[cfg(not(gpu))]
        Device::Gpu(_) => Err(DeviceError::NoBackend.into()),
    }
}

/// Loads the stage `spec` of a model to the CPU.
///
/// # Errors
/// [`LoadError`].
pub fn load(gguf: &Gguf, spec: &StageSpec, options: &StageOptions) -> Result<Box<dyn Stage>, LoadError> {
    let threads = options.threads.max(1);
    let work = Workspace::new(threads).map_err(|source| LoadError::Threads { threads, source })?;
    Ok(Box::new(load_on::<Flex>(gguf, spec, options, FlexDevice, work)?))
}

/// Loads a stage to a device of any backend.
pub(super) fn load_on<B: Kernels>(
    gguf: &Gguf,
    spec: &StageSpec,
    options: &StageOptions,
    device: BurnDevice<B>,
    mut work: Workspace,
) -> Result<Decoder<B>, LoadError> {
    let config = DecoderConfig::from_gguf(gguf)?;
    let layers = spec.layers.start as usize..spec.layers.end as usize;
    if layers.is_empty() || layers.end > config.layers {
        return Err(LoadError::Layers { asked: spec.layers.clone(), layers: config.layers });
    }
    if options.rows_max == 0 {
        return Err(LoadError::Zero("rows of a step"));
    }
    if options.context_tokens == 0 {
        return Err(LoadError::Zero("context"));
    }

    let mut kv_shape = KvShape { kv_heads: config.kv_heads, key_length: config.key_length, value_length: config.value_length, pages: 0 };
    let page = B::kv_page_bytes(&kv_shape) * layers.len() as u64;
    // Pages are numbered with 32 bits.
    kv_shape.pages = (options.kv_bytes / page).min(u64::from(u32::MAX)).min(B::kv_pages_max(&device, &kv_shape)) as usize;
    if kv_shape.pages == 0 {
        return Err(LoadError::KvMemory { given: options.kv_bytes, page });
    }

    let mut loader = Loader { gguf, config: &config, device: &device, work: &mut work, bytes: 0 };
    let first = layers.start == 0;
    let last = layers.end == config.layers;
    let embedding = if first { Some(loader.matrix::<B>(&config::Part::whole(&config.tensors.embedding))?) } else { None };
    let loaded = layers.clone().map(|layer| loader.layer::<B>(layer)).collect::<Result<Vec<_>, _>>()?;
    let head = if last {
        let norm = loader.norm::<B>(&config.tensors.output_norm)?;
        // A stage with both ends holds a shared tensor once.
        let matrix = if first && config.tied_head() { None } else { Some(loader.matrix::<B>(&config::Part::whole(&config.tensors.head))?) };
        Some(Head { norm, matrix })
    } else {
        None
    };
    let weight_bytes = loader.bytes;
    let frequencies = config.ropes.iter().map(|rope| rope.frequencies(options.context_tokens as usize)).collect();
    let kv = layers
        .map(|_| B::kv_layer(&device, kv_shape))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|source| LoadError::Tensor { file: gguf.name().to_owned(), source })?;
    tracing::debug!(
        layers = ?spec.layers, weight_bytes, pages = kv_shape.pages, instruction_set = work.instruction_set(), "stage loaded"
    );
    Ok(Decoder {
        device,
        work,
        embedding,
        layers: loaded,
        head,
        kv,
        book: PageBook::new(kv_shape.pages as u32),
        frequencies,
        rows_max: options.rows_max,
        context: options.context_tokens as usize,
        weight_bytes,
        config,
    })
}

/// A part of a tensor whose presence and shape the configuration's reader has checked. Of a vector it is the whole.
fn view<'a>(gguf: &'a Gguf, part: &config::Part) -> Result<TensorView<'a>, LoadError> {
    let view = gguf.tensor(&part.tensor).ok_or_else(|| missing(gguf, part))?;
    match &part.rows {
        Some(rows) if view.shape.len() > 1 => view.some_rows(rows.clone()).ok_or_else(|| missing(gguf, part)),
        _ => Ok(view),
    }
}

fn missing(gguf: &Gguf, part: &config::Part) -> LoadError {
    ConfigError::MissingTensor { file: gguf.name().to_owned(), tensor: part.tensor.clone() }.into()
}

struct Loader<'a, D> {
    gguf: &'a Gguf,
    config: &'a DecoderConfig,
    device: &'a D,
    work: &'a mut Workspace,
    /// Memory of what was loaded so far.
    bytes: u64,
}

impl<'a, D> Loader<'a, D> {
    fn failed(&self, source: LayerError) -> LoadError {
        LoadError::Tensor { file: self.gguf.name().to_owned(), source }
    }

    fn matrix<B: Kernels<Device = D>>(&mut self, part: &config::Part) -> Result<Matrix<B>, LoadError> {
        let gguf = self.gguf;
        let view = view(gguf, part)?;
        let matrix = B::matrix(self.work, self.device, &view).map_err(|error| self.failed(error))?;
        self.bytes += matrix.bytes();
        if part.rows.is_none() {
            gguf.forget(&view);
        }
        Ok(matrix)
    }

    /// A vector's elements.
    fn numbers(&mut self, part: &config::Part) -> Result<Vec<f32>, LoadError> {
        let values = view(self.gguf, part)?
            .dequantise()
            .map_err(|error| self.failed(LayerError { tensor: part.tensor.clone(), problem: error.to_string() }))?;
        let values = match &part.rows {
            Some(rows) => values.get(rows.clone()).unwrap_or_default().to_vec(),
            None => values,
        };
        self.bytes += size_of_val(values.as_slice()) as u64;
        Ok(values)
    }

    fn tensor<B: Kernels<Device = D>>(&self, values: Vec<f32>) -> FloatTensor<B> {
        let count = values.len();
        B::float_from_data(TensorData::new(values, [count]), self.device)
    }

    fn vector_if<B: Kernels<Device = D>>(&mut self, part: Option<&config::Part>) -> Result<Option<FloatTensor<B>>, LoadError> {
        part.map(|part| self.numbers(part).map(|values| self.tensor::<B>(values))).transpose()
    }

    fn norm<B: Kernels<Device = D>>(&mut self, names: &NormTensors) -> Result<Norm<B>, LoadError> {
        let values = self.numbers(&names.weight)?;
        let (kind, epsilon) = (self.config.norm, self.config.norm_epsilon);
        Ok(Norm { kind, weight: self.tensor::<B>(values), bias: self.vector_if::<B>(names.bias.as_ref())?, epsilon })
    }

    fn norm_if<B: Kernels<Device = D>>(&mut self, names: Option<&NormTensors>) -> Result<Option<Norm<B>>, LoadError> {
        names.map(|names| self.norm::<B>(names)).transpose()
    }

    fn head_norm<B: Kernels<Device = D>>(&mut self, weight: Option<&config::Part>) -> Result<Option<Norm<B>>, LoadError> {
        weight.map(|weight| self.norm::<B>(&NormTensors { weight: weight.clone(), bias: None })).transpose()
    }

    fn linear<B: Kernels<Device = D>>(&mut self, matrix: &config::Part, bias: Option<&config::Part>) -> Result<Linear<B>, LoadError> {
        Ok(Linear { matrix: self.matrix::<B>(matrix)?, bias: self.vector_if::<B>(bias)? })
    }

    fn dense<B: Kernels<Device = D>>(&mut self, names: &DenseTensors) -> Result<FeedForward<B>, LoadError> {
        let gate = names.gate.as_ref().map(|gate| self.linear::<B>(gate, names.gate_bias.as_ref())).transpose()?;
        let up = self.linear::<B>(&names.up, names.up_bias.as_ref())?;
        let down = self.linear::<B>(&names.down, names.down_bias.as_ref())?;
        Ok(FeedForward { gate: Gate { gate, up, activation: self.config.activation }, down })
    }

    /// The matrices of `count` experts or heads, which are one tensor, with their biases, which are another.
    fn stacked<B: Kernels<Device = D>>(
        &mut self,
        matrices: &config::Part,
        biases: Option<&config::Part>,
        count: usize,
    ) -> Result<Vec<Linear<B>>, LoadError> {
        let all = view(self.gguf, matrices)?.rows();
        let rows = all / count;
        let biases = biases.map(|biases| self.numbers(biases)).transpose()?;
        let mut experts = Vec::with_capacity(count);
        for expert in 0..count {
            let range = expert * rows..(expert + 1) * rows;
            let matrix = self.matrix::<B>(&config::Part { tensor: matrices.tensor.clone(), rows: Some(range.clone()) })?;
            let bias = biases.as_ref().and_then(|biases| biases.get(range)).map(|bias| self.tensor::<B>(bias.to_vec()));
            experts.push(Linear { matrix, bias });
        }
        Ok(experts)
    }

    fn experts<B: Kernels<Device = D>>(
        &mut self,
        choice: &config::Experts,
        names: &config::ExpertTensors,
    ) -> Result<Experts<B>, LoadError> {
        let (of, count, activation) = (&names.experts, choice.count, self.config.activation);
        let gates = match &of.gate {
            Some(gate) => self.stacked::<B>(gate, of.gate_bias.as_ref(), count)?.into_iter().map(Some).collect(),
            None => vec![None; count],
        };
        let ups = self.stacked::<B>(&of.up, of.up_bias.as_ref(), count)?;
        let downs = self.stacked::<B>(&of.down, of.down_bias.as_ref(), count)?;
        let gates = gates.into_iter().zip(ups).map(|(gate, up)| Gate { gate, up, activation });
        let shared = match &names.shared {
            Some(shared) => {
                let opening = self.vector_if::<B>(names.shared_gate.as_ref())?;
                Some(SharedExpert { part: self.dense::<B>(shared)?, opening })
            }
            None => None,
        };
        Ok(Experts {
            choice: choice.clone(),
            router: self.linear::<B>(&names.router, names.router_bias.as_ref())?,
            selection_bias: names.selection_bias.as_ref().map(|bias| self.numbers(bias)).transpose()?,
            experts: gates.zip(downs).map(|(gate, down)| FeedForward { gate, down }).collect(),
            shared,
        })
    }

    fn latent<B: Kernels<Device = D>>(&mut self, names: &config::LatentTensors, lengths: config::Latent) -> Result<Latent<B>, LoadError> {
        let heads = self.config.heads;
        let query_down = match &names.query_down {
            Some((down, norm)) => Some((self.linear::<B>(down, None)?, self.norm::<B>(norm)?)),
            None => None,
        };
        let mut ups = |part: &config::Part| -> Result<Vec<Matrix<B>>, LoadError> {
            Ok(self.stacked::<B>(part, None, heads)?.into_iter().map(|linear| linear.matrix).collect())
        };
        let (query_ups, value_ups) = (ups(&names.query_up)?, ups(&names.value_up)?);
        Ok(Latent {
            query_down,
            query: self.linear::<B>(&names.query, None)?,
            down: self.linear::<B>(&names.down, None)?,
            down_norm: self.norm::<B>(&names.down_norm)?,
            query_ups,
            value_ups,
            lengths,
        })
    }

    fn layer<B: Kernels<Device = D>>(&mut self, layer: usize) -> Result<Layer<B>, LoadError> {
        let config = self.config;
        let names: &LayerTensors = &config.layer_tensors[layer];
        let feed_forward = match (&names.feed_forward, &config.experts) {
            (config::FeedForward::Experts(names), Some(choice)) => Part::Experts(self.experts::<B>(choice, names)?),
            (config::FeedForward::Experts(names), None) => Part::Dense(self.dense::<B>(&names.experts)?),
            (config::FeedForward::Dense(names), _) => Part::Dense(self.dense::<B>(names)?),
        };
        let loaded = Layer {
            attention_norm: self.norm_if::<B>(names.attention_norm.as_ref())?,
            projections: match (&names.projections, config.latent) {
                (config::Projections::Heads(of), _) => Projections::Heads([
                    self.linear::<B>(&of.query, of.query_bias.as_ref())?,
                    self.linear::<B>(&of.key, of.key_bias.as_ref())?,
                    self.linear::<B>(&of.value, of.value_bias.as_ref())?,
                ]),
                (config::Projections::Latent(of), Some(lengths)) => Projections::Latent(self.latent::<B>(of, lengths)?),
                // The configuration's reader gives both or none.
                (config::Projections::Latent(of), None) => return Err(missing(self.gguf, &of.query)),
            },
            heads: HeadWeights {
                query_norm: self.head_norm::<B>(names.query_norm.as_ref())?,
                key_norm: self.head_norm::<B>(names.key_norm.as_ref())?,
                sinks: self.vector_if::<B>(names.sinks.as_ref())?,
            },
            attention: AttentionShape {
                heads: config.heads,
                scale: config.attention_scale,
                growth: config.attention_growth,
                softcap: config.attention_softcap,
                window: config.windows[layer],
            },
            rope: config.layer_ropes[layer],
            output: self.linear::<B>(&names.attention_output, names.attention_output_bias.as_ref())?,
            post_attention_norm: self.norm_if::<B>(names.post_attention_norm.as_ref())?,
            feed_forward_norm: self.norm_if::<B>(names.feed_forward_norm.as_ref())?,
            feed_forward,
            post_feed_forward_norm: self.norm_if::<B>(names.post_feed_forward_norm.as_ref())?,
        };
        // What was read in parts is not needed any more.
        for (part, _) in names.parts(config) {
            if let Some(view) = self.gguf.tensor(&part.tensor) {
                self.gguf.forget(&view);
            }
        }
        Ok(loaded)
    }
}
