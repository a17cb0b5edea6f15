//! The steps of a decoder layer, as a backend extension: each is one call, with a default in plain Burn operations.
//!
//! A layer is five calls: norm and projections ([`Kernels::project`]), rotary embedding, cache and attention
//! ([`Kernels::attend`]), projection and sum ([`Kernels::project_add`]), norm and gated product ([`Kernels::gated`]),
//! projection and sum again. Fewer and larger calls are where the speed is: on a CPU a token takes some hundred of them, and
//! weights can stay quantised because nothing outside of a call sees them.
//!
//! The defaults run on every backend that Burn has, with weights as `f32` tensors. They are what the overrides are
//! tested against; [`Dispatch`] uses them as they are. [`Flex`](burn_flex::Flex), the CPU backend, overrides all
//! of them (see `cpu`), and so does the GPU backend where it is built (see `gpu`).

mod batch;
mod cpu;
#[cfg(gpu)]
mod gpu;
mod plain;
mod rotation;
#[cfg(test)]
pub(crate) mod testing;

pub use batch::{Batch, Run};
#[cfg(test)]
pub(crate) use cpu::Isa;
pub use cpu::{Speed, Workspace, measure};
#[cfg(gpu)]
pub(crate) use gpu::open as open_gpu;
pub use rotation::Rotation;

use burn::backend::tensor::{Device, FloatTensor};
use burn::backend::{Backend, Dispatch};

use crate::config::Activation;
use crate::device::{DeviceError, Gpu};
use crate::gguf::TensorView;
use crate::quant::BlockType;
use cpu::{PackedMatrix, Pages};

/// Tokens of one KV page.
pub const PAGE_TOKENS: usize = 32;

/// The graphics processors that this build can use.
pub(crate) fn gpu_devices() -> Vec<Gpu> {
    #[cfg(gpu)]
    {
        gpu::devices()
    }
    #[cfg(not(gpu))]
    Vec::new()
}

/// Measures a graphics processor: some tenths of a second of full load, after its kernels were compiled. `now` tells the time since
/// any moment.
///
/// # Errors
/// [`DeviceError`] if there is no such device, or it cannot be used.
pub fn measure_gpu(index: u32, now: &dyn Fn() -> std::time::Duration) -> Result<Speed, DeviceError> {
    #[cfg(gpu)]
    {
        gpu::measure(index, now)
    }
    #[cfg(not(gpu))]
    {
        let _ = (index, now);
        Err(DeviceError::NoBackend)
    }
}

/// Memory that a matrix takes on the CPU backend, in bytes; `None` for types that it cannot compute with.
pub fn matrix_bytes(block: BlockType, rows: usize, columns: usize) -> Option<u64> {
    PackedMatrix::bytes_for(block, rows, columns)
}

/// Why a part of a layer cannot be held.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{tensor}: {problem}")]
pub struct LayerError {
    /// The tensor.
    pub tensor: String,
    /// What is wrong with it.
    pub problem: String,
}

/// A weight matrix as a backend holds it: as many rows as it puts out elements, as many columns as it takes.
#[derive(Debug, Clone)]
pub struct Matrix<B: Backend>(Held<B>);

#[derive(Debug, Clone)]
enum Held<B: Backend> {
    /// `[rows, columns]`.
    Plain { tensor: FloatTensor<B>, bytes: u64 },
    /// On the host, as the CPU kernels read it.
    Packed(PackedMatrix),
    /// On a graphics processor, as its kernels read it.
    #[cfg(gpu)]
    Device(gpu::DeviceMatrix),
}

impl<B: Backend> Matrix<B> {
    fn packed(matrix: PackedMatrix) -> Self {
        Self(Held::Packed(matrix))
    }

    fn as_packed(&self) -> Option<&PackedMatrix> {
        match &self.0 {
            Held::Packed(matrix) => Some(matrix),
            _ => None,
        }
    }

    /// Memory, in bytes.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            Held::Packed(matrix) => matrix.bytes() as u64,
            #[cfg(gpu)]
            Held::Device(matrix) => matrix.bytes(),
            Held::Plain { bytes, .. } => *bytes,
        }
    }
}

/// A root-mean-square norm.
#[derive(Debug, Clone)]
pub struct Norm<B: Backend> {
    /// What normalised elements are multiplied with, one for each element.
    pub weight: FloatTensor<B>,
    /// What is added to the mean of squares.
    pub epsilon: f32,
}

/// A matrix and perhaps a bias.
#[derive(Debug, Clone)]
pub struct Linear<B: Backend> {
    /// The matrix.
    pub matrix: Matrix<B>,
    /// Added to the product; one element for each row of the matrix.
    pub bias: Option<FloatTensor<B>>,
}

/// The first half of a gated feed-forward part: `activation(gate · x) × (up · x)`.
#[derive(Debug, Clone)]
pub struct Gate<B: Backend> {
    /// What goes through the activation.
    pub gate: Matrix<B>,
    /// What it is multiplied with.
    pub up: Matrix<B>,
    /// The activation.
    pub activation: Activation,
}

/// Sizes of a layer's keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a key.
    pub key_length: usize,
    /// Elements of a value.
    pub value_length: usize,
    /// Pages of [`PAGE_TOKENS`] positions.
    pub pages: usize,
}

/// How a layer attends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads; each `heads / kv_heads` of them share a key head.
    pub heads: usize,
    /// What scores are multiplied with before the softmax.
    pub scale: f32,
    /// How many positions a row sees, itself included; all before it if not given.
    pub window: Option<usize>,
}

/// One layer's keys and values, in pages.
#[derive(Debug)]
pub struct KvLayer<B: Backend>(HeldKv<B>);

#[derive(Debug)]
enum HeldKv<B: Backend> {
    /// `[pages · PAGE_TOKENS, kv_heads · length]`, rounded to half precision.
    Plain { shape: KvShape, keys: FloatTensor<B>, values: FloatTensor<B> },
    /// On the host.
    Paged(Pages),
    /// On a graphics processor.
    #[cfg(gpu)]
    Device(gpu::DevicePages),
}

impl<B: Backend> KvLayer<B> {
    fn paged(pages: Pages) -> Self {
        Self(HeldKv::Paged(pages))
    }

    fn as_paged(&mut self) -> Option<&mut Pages> {
        match &mut self.0 {
            HeldKv::Paged(pages) => Some(pages),
            _ => None,
        }
    }

    /// Memory, in bytes.
    pub fn bytes(&self) -> u64 {
        match &self.0 {
            HeldKv::Paged(pages) => pages.bytes() as u64,
            #[cfg(gpu)]
            HeldKv::Device(pages) => pages.bytes(),
            HeldKv::Plain { shape, .. } => {
                (shape.pages * PAGE_TOKENS * shape.kv_heads * (shape.key_length + shape.value_length) * 4) as u64
            }
        }
    }
}

/// A Burn backend that runs decoder layers. Rows of activations are tensors of shape `[rows, elements]`.
///
/// Arguments fit each other: whoever loads a decoder checks that shapes agree, and whoever makes a [`Batch`] that pages
/// exist.
pub trait Kernels: Backend {
    /// Holds a matrix of a model file.
    ///
    /// # Errors
    /// [`LayerError`] for types that cannot be computed with, and when there is no memory.
    fn matrix(device: &Device<Self>, view: &TensorView<'_>) -> Result<Matrix<Self>, LayerError> {
        plain::matrix::<Self>(device, view)
    }

    /// Memory of one page of one layer, in bytes.
    fn kv_page_bytes(shape: &KvShape) -> u64 {
        (PAGE_TOKENS * shape.kv_heads * (shape.key_length + shape.value_length) * size_of::<f32>()) as u64
    }

    /// How many pages of one layer the device can hold in one piece.
    fn kv_pages_max(device: &Device<Self>, shape: &KvShape) -> u64 {
        let _ = (device, shape);
        u64::MAX
    }

    /// Makes room for a layer's keys and values.
    ///
    /// # Errors
    /// [`LayerError`] when there is no memory.
    fn kv_layer(device: &Device<Self>, shape: KvShape) -> Result<KvLayer<Self>, LayerError> {
        Ok(plain::kv_layer::<Self>(device, shape))
    }

    /// The tokens' rows of the embedding, times `scale`.
    fn embed(work: &mut Workspace, device: &Device<Self>, table: &Matrix<Self>, tokens: &[u32], scale: f32) -> FloatTensor<Self> {
        let _ = work;
        plain::embed::<Self>(device, table, tokens, scale)
    }

    /// `x` normalised, and its products with the matrices of queries, keys and values.
    fn project(
        work: &mut Workspace,
        x: &FloatTensor<Self>,
        norm: &Norm<Self>,
        queries_keys_values: [&Linear<Self>; 3],
    ) -> [FloatTensor<Self>; 3] {
        let _ = work;
        plain::project::<Self>(x, norm, queries_keys_values)
    }

    /// Normalises heads of queries and keys if there are `norms` for them, turns them by their positions' angles, stores keys and
    /// values, and gives what each row's heads attend to: `[rows, heads · value_length]`.
    fn attend(
        work: &mut Workspace,
        queries_keys_values: [&FloatTensor<Self>; 3],
        shape: &AttentionShape,
        norms: [Option<&Norm<Self>>; 2],
        rotation: &Rotation,
        batch: &Batch,
        kv: &mut KvLayer<Self>,
    ) -> FloatTensor<Self> {
        let _ = work;
        plain::attend::<Self>(queries_keys_values, shape, norms, rotation, batch, kv)
    }

    /// `residual` plus the product of `input` and the matrix, normalised with `post` if given.
    fn project_add(
        work: &mut Workspace,
        input: &FloatTensor<Self>,
        linear: &Linear<Self>,
        post: Option<&Norm<Self>>,
        residual: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let _ = work;
        plain::project_add::<Self>(input, linear, post, residual)
    }

    /// `x` normalised, through the gated part.
    fn gated(work: &mut Workspace, x: &FloatTensor<Self>, norm: &Norm<Self>, gate: &Gate<Self>) -> FloatTensor<Self> {
        let _ = work;
        plain::gated::<Self>(x, norm, gate)
    }

    /// Rows `sampled` of `x`, normalised and multiplied with the output head, then `cap · tanh(· / cap)` if there is a
    /// `softcap`; written to `out`, row after row.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has failed, perhaps long before.
    fn logits(
        work: &mut Workspace,
        x: &FloatTensor<Self>,
        sampled: &[usize],
        norm: &Norm<Self>,
        head: &Matrix<Self>,
        softcap: Option<f32>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let _ = work;
        plain::logits::<Self>(x, sampled, norm, head, softcap, out)
    }

    /// Writes a tensor's elements to `out`, which has as many.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has failed, perhaps long before.
    fn read(x: FloatTensor<Self>, out: &mut [f32]) -> Result<(), DeviceError> {
        plain::read::<Self>(x, out)
    }
}

/// All of Burn's backends, by the defaults.
impl Kernels for Dispatch {}
