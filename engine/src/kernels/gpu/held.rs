//! What stays on the device from step to step: weights, pages of keys and values, and what all layers of one step share.

use burn::tensor::{DType, Shape};
use burn_wgpu::CubeTensor;
use cubecl::Device;
use cubecl::client::Client;
use cubecl::future::block_on;
use cubecl::server::Handle;

use super::attention::ROW_WORDS;
use super::layout::{Layout, values as values_of};
use crate::gguf::TensorView;
use crate::kernels::{Batch, KvShape, LayerError, PAGE_TOKENS, Rotation};

/// A tensor of one dimension over memory of the device.
fn tensor(device: &Device, client: &Client, handle: Handle, elements: usize, kind: DType) -> CubeTensor {
    CubeTensor::new_contiguous(client.clone(), device.clone(), Shape::new([elements]), handle, kind)
}

/// Copies words to the device.
pub(super) fn upload(device: &Device, words: Vec<u32>) -> CubeTensor {
    let (client, count) = (device.client(), words.len());
    let handle = client.create(cubecl::bytes::Bytes::from_elems(words));
    tensor(device, &client, handle, count, DType::U32)
}

/// Copies rows of `columns` numbers to the device.
pub(super) fn upload_rows(device: &Device, values: Vec<f32>, columns: usize) -> CubeTensor {
    let shape = Shape::new([values.len() / columns, columns]);
    let floats = upload_floats(device, values);
    CubeTensor::new_contiguous(floats.client, floats.device, shape, floats.handle, DType::F32)
}

fn upload_floats(device: &Device, values: Vec<f32>) -> CubeTensor {
    let (client, count) = (device.client(), values.len());
    let handle = client.create(cubecl::bytes::Bytes::from_elems(values));
    tensor(device, &client, handle, count, DType::F32)
}

/// Whether the device has really made room for all of these.
fn check(client: &Client, tensors: &[&CubeTensor], name: &str) -> Result<(), LayerError> {
    let done = block_on(client.sync_buffers(tensors.iter().map(|tensor| &tensor.handle)));
    done.map_err(|error| LayerError { tensor: name.to_owned(), problem: format!("the device has no room for it: {error}") })
}

/// Some rows of a matrix, in one buffer.
#[derive(Debug, Clone)]
pub(super) struct Part {
    /// The first of them.
    pub(super) first: usize,
    /// How many.
    pub(super) rows: usize,
    pub(super) words: CubeTensor,
}

/// A matrix on a device. Devices limit what a kernel can see of one buffer, so a very large matrix is in several.
#[derive(Debug, Clone)]
pub(crate) struct DeviceMatrix {
    pub(super) layout: Layout,
    pub(super) rows: usize,
    pub(super) parts: Vec<Part>,
}

impl DeviceMatrix {
    /// Packs a matrix of a file and copies it to the device.
    pub(super) fn load(device: &Device, view: &TensorView<'_>) -> Result<Self, LayerError> {
        let limit = device.client().properties().memory.max_page_size;
        Self::load_in_parts(device, view, limit)
    }

    /// The same, in buffers of at most so many bytes.
    pub(super) fn load_in_parts(device: &Device, view: &TensorView<'_>, limit: u64) -> Result<Self, LayerError> {
        let failed = |problem: String| LayerError { tensor: view.name.to_owned(), problem };
        let (rows, columns) = (view.rows(), view.row_len());
        let unsupported = || failed(format!("weights of type {} cannot be computed with on this backend", view.block));
        let layout = Layout::new(view.block, columns).ok_or_else(unsupported)?;
        let row_bytes = view.block.row_bytes(columns).filter(|bytes| bytes.checked_mul(rows) == Some(view.bytes.len()));
        let row_bytes = row_bytes.ok_or_else(|| failed(format!("{} bytes are no {rows} rows of {columns} weights", view.bytes.len())))?;
        let per_part = usize::try_from(limit / 4).unwrap_or(usize::MAX) / layout.words();
        if per_part == 0 {
            return Err(failed(format!("a row of {columns} weights is more than the device's {limit} bytes for one buffer")));
        }
        let client = device.client();
        let mut parts = Vec::new();
        for (i, bytes) in view.bytes.chunks(row_bytes * per_part).enumerate() {
            let rows = bytes.len() / row_bytes;
            let mut words = Vec::new();
            let room = words.try_reserve_exact(rows * layout.words());
            room.map_err(|error| failed(format!("no memory to pack it: {error}")))?;
            words.resize(rows * layout.words(), 0);
            for (row, words) in bytes.chunks_exact(row_bytes).zip(words.chunks_exact_mut(layout.words())) {
                layout.pack(view.block, row, words);
            }
            let words = client.memory_persistent_allocation((), |()| upload(device, words));
            parts.push(Part { first: i * per_part, rows, words });
        }
        check(&client, &parts.iter().map(|part| &part.words).collect::<Vec<_>>(), view.name)?;
        Ok(Self { layout, rows, parts })
    }

    /// Rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub(crate) fn columns(&self) -> usize {
        self.layout.columns
    }

    /// The weights, row after row, copied back; not numbers where the device has failed.
    pub(crate) fn values(&self) -> Vec<f32> {
        let mut values = Vec::with_capacity(self.rows * self.layout.columns);
        for part in &self.parts {
            let bytes = part.words.client.read_one(part.words.handle.clone()).map(|bytes| bytes.to_vec()).unwrap_or_default();
            let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
            words.chunks_exact(self.layout.words()).for_each(|row| values.extend(values_of(&self.layout, row)));
        }
        values.resize(self.rows * self.layout.columns, f32::NAN);
        values
    }

    /// Memory, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        (self.rows * self.layout.words() * size_of::<u32>()) as u64
    }
}

/// One layer's keys and values on a device.
#[derive(Debug)]
pub(crate) struct DevicePages {
    pub(super) shape: KvShape,
    pub(super) keys: CubeTensor,
    pub(super) values: CubeTensor,
}

/// Words of all keys and of all values of a page.
fn page_words(shape: &KvShape) -> [usize; 2] {
    [shape.key_length, shape.value_length].map(|length| shape.kv_heads * length.div_ceil(2) * PAGE_TOKENS)
}

impl DevicePages {
    /// Memory of a page, in bytes.
    pub(super) fn page_bytes(shape: &KvShape) -> u64 {
        (page_words(shape).iter().sum::<usize>() * size_of::<u32>()) as u64
    }

    /// How many pages the device lets a kernel see.
    pub(super) fn pages_max(device: &Device, shape: &KvShape) -> u64 {
        let largest = page_words(shape).into_iter().max().unwrap_or(1) * size_of::<u32>();
        device.client().properties().memory.max_page_size / largest.max(1) as u64
    }

    /// Makes room for `shape.pages` pages.
    pub(super) fn new(device: &Device, shape: KvShape) -> Result<Self, LayerError> {
        let client = device.client();
        let room = |words: usize| {
            let words = words * shape.pages;
            let handle = client.memory_persistent_allocation((), |()| client.empty(words * size_of::<u32>()));
            tensor(device, &client, handle, words, DType::U32)
        };
        let [keys, values] = page_words(&shape).map(room);
        check(&client, &[&keys, &values], "keys and values")?;
        Ok(Self { shape, keys, values })
    }

    /// Memory, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.shape.pages as u64 * Self::page_bytes(&self.shape)
    }
}

/// What all layers of a step share, copied to the device once.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    rows: Option<(Batch, CubeTensor)>,
    /// Layers with a window may have angles of their own.
    angles: Vec<(Rotation, CubeTensor)>,
}

impl Steps {
    /// The table of rows, and after it the pages of their sequences.
    pub(super) fn rows(&mut self, device: &Device, batch: &Batch) -> CubeTensor {
        match &self.rows {
            Some((known, table)) if known == batch && table.device == *device => table.clone(),
            _ => {
                let table = upload(device, table(batch));
                self.rows = Some((batch.clone(), table.clone()));
                table
            }
        }
    }

    /// For each row its cosines, then its sines.
    pub(super) fn angles(&mut self, device: &Device, rotation: &Rotation) -> CubeTensor {
        if let Some((_, angles)) = self.angles.iter().find(|(known, angles)| known == rotation && angles.device == *device) {
            return angles.clone();
        }
        let rows = rotation.all().0.len() / rotation.pairs().max(1);
        let parts = (0..rows).flat_map(|row| <[&[f32]; 2]>::from(rotation.row(row)));
        let values: Vec<f32> = parts.flatten().copied().collect();
        // Heads of which nothing is turned have no angles, and no buffer is empty.
        let angles = upload_floats(device, if values.is_empty() { vec![0.0] } else { values });
        if self.angles.len() == 2 {
            self.angles.remove(0);
        }
        self.angles.push((rotation.clone(), angles.clone()));
        angles
    }
}

fn table(batch: &Batch) -> Vec<u32> {
    let mut table = vec![0; batch.positions().len() * ROW_WORDS];
    for run in batch.runs() {
        let pages = table.len() as u32;
        table.extend((0..run.end()).step_by(PAGE_TOKENS).map(|position| run.page(position)));
        for (i, &row) in run.rows().iter().enumerate() {
            let position = run.start() + i;
            let place = run.page(position) * PAGE_TOKENS as u32 + (position % PAGE_TOKENS) as u32;
            table[row * ROW_WORDS..][..ROW_WORDS].copy_from_slice(&[position as u32, pages, place]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_where_rows_and_pages_are() {
        let mut batch = Batch::new();
        batch.push(vec![1], 40, vec![7, 5]);
        batch.push(vec![0, 2], 0, vec![3]);
        let rows = [[0, 11, 96], [40, 9, 168], [1, 11, 97]];
        assert_eq!(table(&batch), [rows.as_flattened(), &[7, 5, 3]].concat());
    }
}
