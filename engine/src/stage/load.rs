//! Loads a stage from a model file: its own tensors, and no others.

use std::ops::Range;

use burn::backend::tensor::{Device as BurnDevice, FloatTensor};
use burn::tensor::TensorData;
use burn_flex::{Flex, FlexDevice};

use super::decoder::{Decoder, Head, Layer};
use super::kv::PageBook;
use super::{Stage, StageOptions, StageSpec};
use crate::config::{ConfigError, DecoderConfig, LayerTensors};
use crate::device::{Device, DeviceError};
use crate::gguf::{Gguf, TensorView};
use crate::kernels::{AttentionShape, Gate, Kernels, KvShape, LayerError, Linear, Matrix, Norm, PAGE_TOKENS, Workspace};

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
    work: Workspace,
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

    let mut loader = Loader { gguf, config: &config, device: &device, bytes: 0 };
    let first = layers.start == 0;
    let last = layers.end == config.layers;
    let embedding = if first { Some(loader.matrix::<B>(&config.tensors.embedding)?) } else { None };
    let loaded = layers.clone().map(|layer| loader.layer::<B>(layer)).collect::<Result<Vec<_>, _>>()?;
    let head = if last {
        let norm = loader.norm::<B>(&config.tensors.output_norm)?;
        // A stage with both ends holds a shared tensor once.
        let matrix = if first && config.tied_head() { None } else { Some(loader.matrix::<B>(&config.tensors.head)?) };
        Some(Head { norm, matrix })
    } else {
        None
    };
    let weight_bytes = loader.bytes;
    let window_frequencies = config.windows[layers.clone()].iter().any(Option::is_some).then(|| config.window_rope.frequencies());
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
        frequencies: config.rope.frequencies(),
        window_frequencies,
        rows_max: options.rows_max,
        context: options.context_tokens as usize,
        weight_bytes,
        config,
    })
}

struct Loader<'a, D> {
    gguf: &'a Gguf,
    config: &'a DecoderConfig,
    device: &'a D,
    /// Memory of what was loaded so far.
    bytes: u64,
}

impl<D> Loader<'_, D> {
    fn failed(&self, source: LayerError) -> LoadError {
        LoadError::Tensor { file: self.gguf.name().to_owned(), source }
    }

    /// A tensor whose presence and shape the configuration's reader has checked.
    fn view(&self, name: &str) -> Result<TensorView<'_>, LoadError> {
        self.gguf
            .tensor(name)
            .ok_or_else(|| ConfigError::MissingTensor { file: self.gguf.name().to_owned(), tensor: name.to_owned() }.into())
    }

    fn matrix<B: Kernels<Device = D>>(&mut self, name: &str) -> Result<Matrix<B>, LoadError> {
        let view = self.view(name)?;
        let matrix = B::matrix(self.device, &view).map_err(|error| self.failed(error))?;
        self.gguf.forget(&view);
        self.bytes += matrix.bytes();
        Ok(matrix)
    }

    fn vector<B: Kernels<Device = D>>(&mut self, name: &str) -> Result<FloatTensor<B>, LoadError> {
        let values = self
            .view(name)?
            .dequantise()
            .map_err(|error| self.failed(LayerError { tensor: name.to_owned(), problem: error.to_string() }))?;
        self.bytes += size_of_val(values.as_slice()) as u64;
        let count = values.len();
        Ok(B::float_from_data(TensorData::new(values, [count]), self.device))
    }

    fn norm<B: Kernels<Device = D>>(&mut self, name: &str) -> Result<Norm<B>, LoadError> {
        Ok(Norm { weight: self.vector::<B>(name)?, epsilon: self.config.norm_epsilon })
    }

    fn norm_if<B: Kernels<Device = D>>(&mut self, name: Option<&String>) -> Result<Option<Norm<B>>, LoadError> {
        name.map(|name| self.norm::<B>(name)).transpose()
    }

    fn linear<B: Kernels<Device = D>>(&mut self, matrix: &str, bias: Option<&String>) -> Result<Linear<B>, LoadError> {
        Ok(Linear { matrix: self.matrix::<B>(matrix)?, bias: bias.map(|bias| self.vector::<B>(bias)).transpose()? })
    }

    fn layer<B: Kernels<Device = D>>(&mut self, layer: usize) -> Result<Layer<B>, LoadError> {
        let config = self.config;
        let names: &LayerTensors = &config.layer_tensors[layer];
        let window = config.windows[layer];
        Ok(Layer {
            attention_norm: self.norm::<B>(&names.attention_norm)?,
            query: self.linear::<B>(&names.query, names.query_bias.as_ref())?,
            key: self.linear::<B>(&names.key, names.key_bias.as_ref())?,
            value: self.linear::<B>(&names.value, names.value_bias.as_ref())?,
            query_norm: self.norm_if::<B>(names.query_norm.as_ref())?,
            key_norm: self.norm_if::<B>(names.key_norm.as_ref())?,
            attention: AttentionShape { heads: config.heads, scale: config.attention_scale, window },
            output: self.linear::<B>(&names.attention_output, names.attention_output_bias.as_ref())?,
            post_attention_norm: self.norm_if::<B>(names.post_attention_norm.as_ref())?,
            feed_forward_norm: self.norm::<B>(&names.feed_forward_norm)?,
            gate: Gate { gate: self.matrix::<B>(&names.gate)?, up: self.matrix::<B>(&names.up)?, activation: config.activation },
            down: self.linear::<B>(&names.down, None)?,
            post_feed_forward_norm: self.norm_if::<B>(names.post_feed_forward_norm.as_ref())?,
        })
    }
}
