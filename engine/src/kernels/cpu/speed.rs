//! How fast this processor is at what decoding and prefill consist of: quantised matrix products, by the kernels that
//! will run them.

use std::time::Duration;

use super::multiply::{Finish, Product, multiply};
use super::packed::PackedMatrix;
use super::pool::Parts;
use super::workspace::Workspace;
use crate::quant::BlockType;

/// Columns of the matrix: a usual hidden size.
const COLUMNS: usize = 2048;
/// Rows of the matrix. With its columns it is larger than the caches of most machines, so that it is read from memory.
const ROWS: usize = 24 * 1024;
/// Rows of activations for the product that shows arithmetic.
const BATCH: usize = 16;
/// How often each product is taken; the fastest counts, because whatever disturbs it makes it slower.
const TIMES: usize = 3;

/// How fast a device is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Speed {
    /// Bytes of 4-bit weights read and multiplied with one row in a second.
    pub read_bytes_per_second: f64,
    /// Multiply-adds in a second where many rows share the weights.
    pub multiply_adds_per_second: f64,
}

/// Measures with `threads` threads. Takes about a tenth of a second of full load. `now` tells the time since any
/// moment.
///
/// # Errors
/// If the system gives no threads.
pub fn measure(threads: usize, now: &dyn Fn() -> Duration) -> std::io::Result<Speed> {
    let mut workspace = Workspace::new(threads)?;
    let bytes = BlockType::Q4_0.row_bytes(ROWS * COLUMNS).unwrap_or_default();
    // Scales of one and a pattern of digits: the time does not depend on the values.
    let block = [&[0x00, 0x3c][..], &[0x5a; 16][..]].concat();
    let weights: Vec<u8> = block.iter().copied().cycle().take(bytes).collect();
    let Ok(matrix) = PackedMatrix::pack(&mut workspace.memory, BlockType::Q4_0, ROWS, COLUMNS, &weights) else {
        unreachable!("the shape is a constant that fits")
    };
    drop(weights);
    let mut best = [f64::MAX; 2];
    for (best, rows) in best.iter_mut().zip([1, BATCH]) {
        let x = vec![0.5; rows * COLUMNS];
        let mut out = vec![0.0; rows * ROWS];
        for _ in 0..TIMES {
            let begin = now();
            workspace.prepare(&x, None, &[&matrix]);
            let product = Product { matrix: &matrix, bias: None, finish: Finish::Set, rows: None, out: Parts::new(&mut out) };
            multiply(&mut workspace.pool, workspace.isa, &workspace.prepared, &[product]);
            *best = best.min(now().saturating_sub(begin).as_secs_f64().max(1e-9));
        }
        std::hint::black_box(&out);
    }
    Ok(Speed {
        read_bytes_per_second: matrix.bytes() as f64 / best[0],
        multiply_adds_per_second: (BATCH * ROWS * COLUMNS) as f64 / best[1],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_of_known_pace_gives_known_speeds() {
        // Every look at this clock is a millisecond later, so each product "takes" one.
        let looks = std::cell::Cell::new(0);
        let now = || {
            looks.set(looks.get() + 1);
            Duration::from_millis(looks.get())
        };
        let speed = measure(1, &now).expect("there is a thread");
        assert!((speed.multiply_adds_per_second / ((BATCH * ROWS * COLUMNS) as f64 * 1e3) - 1.0).abs() < 1e-6);
        assert!(speed.read_bytes_per_second > (ROWS * COLUMNS / 2) as f64 * 1e3);
    }
}
