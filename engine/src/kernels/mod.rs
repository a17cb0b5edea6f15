//! The steps of a decoder layer, as a backend extension: each is one call, with a default in plain Burn operations.
//!
//! A layer is five calls: norm and projections ([`Kernels::project`]), rotary embedding, cache and attention
//! ([`Kernels::attend`]), projection and sum ([`Kernels::project_add`]), norm and gated product ([`Kernels::gated`]),
//! projection and sum again; or, for a mixture of experts, one call for the latter two ([`Kernels::experts`]). Fewer and larger calls are where the speed is: on a CPU a token takes some hundred of them, and
//! weights can stay quantised because nothing outside of a call sees them.
//!
//! The defaults run on every backend that Burn has, with weights as `f32` tensors. They are what the overrides are
//! tested against; [`Dispatch`] uses them as they are. [`Flex`](burn_flex::Flex), the CPU backend, overrides all
//! of them (see `cpu`), and the GPU backend, where it is built, those of most models (see `gpu`).

mod batch;
mod cpu;
#[cfg(gpu)]
mod gpu;
mod parts;
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
pub use parts::{
    AttentionShape, Experts, FeedForward, Gate, HeadWeights, KvShape, Latent, Linear, LogitsFinish, Norm, Residual, SharedExpert,
};
pub use rotation::Rotation;

use burn::backend::tensor::{Device, FloatTensor};
use burn::backend::{Backend, Dispatch};

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

/// Opens a graphics processor, to see whether it can be used.
///
/// # Errors
/// [`DeviceError`] if there is no such device, or it cannot be used.
pub fn try_gpu(index: u32) -> Result<(), DeviceError> {
    #[cfg(gpu)]
    {
        gpu::open(index).map(drop)
    }
    #[cfg(not(gpu))]
    {
        let _ = index;
        Err(DeviceError::NoBackend)
    }
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
    fn matrix(work: &mut Workspace, device: &Device<Self>, view: &TensorView<'_>) -> Result<Matrix<Self>, LayerError> {
        let _ = work;
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

    /// The product of rows and a matrix: what the defaults of the steps below multiply with.
    fn multiply(x: FloatTensor<Self>, matrix: &Matrix<Self>) -> FloatTensor<Self> {
        plain::multiply::<Self>(x, matrix)
    }

    /// The tokens' rows of the embedding, times `scale`.
    fn embed(work: &mut Workspace, device: &Device<Self>, table: &Matrix<Self>, tokens: &[u32], scale: f32) -> FloatTensor<Self> {
        let _ = work;
        plain::embed::<Self>(device, table, tokens, scale)
    }

    /// `x`, normalised if there is a norm, and its products with the matrices of queries, keys and values.
    fn project(
        work: &mut Workspace,
        x: &FloatTensor<Self>,
        norm: Option<&Norm<Self>>,
        queries_keys_values: [&Linear<Self>; 3],
    ) -> [FloatTensor<Self>; 3] {
        let _ = work;
        plain::project::<Self>(x, norm, queries_keys_values)
    }

    /// The same for latent attention: queries of each head, and the key and value that all heads share. What is turned comes first.
    fn project_latent(
        work: &mut Workspace,
        x: &FloatTensor<Self>,
        norm: Option<&Norm<Self>>,
        latent: &Latent<Self>,
    ) -> [FloatTensor<Self>; 3] {
        let _ = work;
        plain::project_latent::<Self>(x, norm, latent)
    }

    /// The heads' values, of the latent ones that [`attend`](Self::attend) gives.
    fn expand_latent(work: &mut Workspace, attended: &FloatTensor<Self>, latent: &Latent<Self>) -> FloatTensor<Self> {
        let _ = work;
        plain::expand_latent::<Self>(attended, latent)
    }

    /// Normalises queries and keys if there are norms for them, turns them by their positions' angles, stores keys and
    /// values, and gives what each row's heads attend to: `[rows, heads · value_length]`.
    fn attend(
        work: &mut Workspace,
        queries_keys_values: [&FloatTensor<Self>; 3],
        shape: &AttentionShape,
        weights: &HeadWeights<Self>,
        rotation: &Rotation,
        batch: &Batch,
        kv: &mut KvLayer<Self>,
    ) -> FloatTensor<Self> {
        let _ = work;
        plain::attend::<Self>(queries_keys_values, shape, weights, rotation, batch, kv)
    }

    /// The residual's row plus the product of `input` and the matrix, normalised and scaled as the residual says.
    fn project_add(
        work: &mut Workspace,
        input: &FloatTensor<Self>,
        linear: &Linear<Self>,
        residual: Residual<'_, Self>,
    ) -> FloatTensor<Self> {
        let _ = work;
        plain::project_add::<Self>(input, linear, residual)
    }

    /// `x`, normalised if there is a norm, through the gated part.
    fn gated(work: &mut Workspace, x: &FloatTensor<Self>, norm: Option<&Norm<Self>>, gate: &Gate<Self>) -> FloatTensor<Self> {
        let _ = work;
        plain::gated::<Self>(x, norm, gate)
    }

    /// The residual's rows plus what the experts chosen for each row of `x`, normalised if there is a norm, make of it.
    ///
    /// A row's experts are added in order of their numbers, the shared part last.
    fn experts(
        work: &mut Workspace,
        x: &FloatTensor<Self>,
        norm: Option<&Norm<Self>>,
        experts: &Experts<Self>,
        residual: Residual<'_, Self>,
    ) -> FloatTensor<Self> {
        let _ = work;
        plain::experts::<Self>(x, norm, experts, residual)
    }

    /// Rows `sampled` of `x`, normalised and multiplied with the output head, and finished; written to `out`, row after row.
    ///
    /// # Errors
    /// [`DeviceError`] when the device has failed, perhaps long before.
    fn logits(
        work: &mut Workspace,
        x: &FloatTensor<Self>,
        sampled: &[usize],
        norm: &Norm<Self>,
        head: &Matrix<Self>,
        finish: &LogitsFinish,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let _ = work;
        plain::logits::<Self>(x, sampled, norm, head, finish, out)
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
