//! How fast a graphics processor is at what decoding and prefill consist of, by the kernels that will run them.

use std::time::Duration;

use cubecl::Device;
use cubecl::future::block_on;

use super::held::{DeviceMatrix, upload_rows};
use super::{Finish, Product, open};
use crate::device::DeviceError;
use crate::gguf::TensorView;
use crate::kernels::Speed;
use crate::quant::BlockType;

/// Columns of the matrix: a usual hidden size.
const COLUMNS: usize = 2048;
/// Rows of the matrix. With its columns it is larger than the caches of most devices.
const ROWS: usize = 24 * 1024;
/// Rows of activations for the product that shows arithmetic.
const BATCH: usize = 16;
/// How often each product is taken; the fastest counts. The first one waits for the kernel to be compiled.
const TIMES: usize = 3;

/// Measures device `index`. `now` tells the time since any moment.
///
/// # Errors
/// [`DeviceError`] if it cannot be used.
pub(crate) fn measure(index: u32, now: &dyn Fn() -> Duration) -> Result<Speed, DeviceError> {
    measure_rows(&open(index)?, ROWS, now)
}

/// Measures with a matrix of so many rows.
pub(super) fn measure_rows(device: &Device, matrix_rows: usize, now: &dyn Fn() -> Duration) -> Result<Speed, DeviceError> {
    let failed = |reason: String| DeviceError::Failed { reason };
    let bytes = BlockType::Q4_0.row_bytes(matrix_rows * COLUMNS).unwrap_or_default();
    // Scales of one and a pattern of digits: the time does not depend on the values.
    let block = [&[0x00, 0x3c][..], &[0x5a; 16][..]].concat();
    let weights: Vec<u8> = block.iter().copied().cycle().take(bytes).collect();
    let shape = [COLUMNS as u64, matrix_rows as u64];
    let view = TensorView { name: "a measure", shape: &shape, block: BlockType::Q4_0, offset: 0, bytes: &weights };
    let matrix = DeviceMatrix::load(device, &view).map_err(|error| failed(error.to_string()))?;
    let wait = || block_on(device.client().sync()).map_err(|error| failed(error.to_string()));
    let mut best = [f64::MAX; 2];
    for (best, rows) in best.iter_mut().zip([1, BATCH]) {
        let x = upload_rows(device, vec![0.5; rows * COLUMNS], COLUMNS);
        for _ in 0..TIMES {
            wait()?;
            let begin = now();
            Product { x: &x, norm: None, matrix: &matrix, bias: None, finish: Finish::Nothing }.run();
            wait()?;
            *best = best.min(now().saturating_sub(begin).as_secs_f64().max(1e-9));
        }
    }
    Ok(Speed {
        read_bytes_per_second: matrix.bytes() as f64 / best[0],
        multiply_adds_per_second: (BATCH * matrix_rows * COLUMNS) as f64 / best[1],
    })
}
