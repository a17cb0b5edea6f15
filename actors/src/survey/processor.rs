//! The processor: its name, its instruction sets, and how fast it reads and multiplies.

use std::hint::black_box;
use std::sync::Barrier;

use crate::card::{DeviceCard, DeviceKind};
use crate::env::Clock;

/// Bytes that each thread reads once. Together they are more than the caches of a desktop hold.
const READ_BYTES: usize = 16 << 20;
/// The least that all threads read together.
const READ_BYTES_MIN: usize = 48 << 20;
/// Products that each thread adds up: some milliseconds' worth.
const PRODUCTS: usize = 16 << 20;
/// Operands that fit into the first-level cache.
const OPERANDS: usize = 2048;

/// Cores that this process may use.
pub(super) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}

/// The processor's card, measured.
pub(super) fn card(clock: &dyn Clock, threads: u32) -> DeviceCard {
    let threads = threads.clamp(1, 1024);
    let (read_bytes_per_second, multiply_adds_per_second) = measure(clock, threads as usize);
    DeviceCard {
        kind: DeviceKind::Cpu,
        name: name(),
        features: features().into_iter().map(str::to_owned).collect(),
        memory_bytes: 0,
        threads,
        read_bytes_per_second,
        multiply_adds_per_second,
    }
}

fn name() -> String {
    let refresh = sysinfo::RefreshKind::nothing().with_cpu(sysinfo::CpuRefreshKind::nothing());
    let brand = sysinfo::System::new_with_specifics(refresh)
        .ok()
        .and_then(|system| system.cpus().first().map(|cpu| cpu.brand().trim().to_owned()).filter(|brand| !brand.is_empty()));
    brand.unwrap_or_else(|| format!("{} processor", std::env::consts::ARCH))
}

/// Instruction sets that matter to the engine and are there.
#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    macro_rules! present {
        ($($name:tt),*) => { [$(($name, is_x86_feature_detected!($name))),*] };
    }
    let all = present!(
        "sse4.1",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "bmi2",
        "avxvnni",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512vnni",
        "avx512bf16",
        "avx512fp16"
    );
    all.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect()
}

/// Instruction sets that matter to the engine and are there.
#[cfg(target_arch = "aarch64")]
fn features() -> Vec<&'static str> {
    macro_rules! present {
        ($($name:tt),*) => { [$(($name, std::arch::is_aarch64_feature_detected!($name))),*] };
    }
    present!("neon", "dotprod", "fp16", "bf16", "i8mm", "sve", "sve2")
        .into_iter()
        .filter(|(_, there)| *there)
        .map(|(name, _)| name)
        .collect()
}

/// Instruction sets that matter to the engine and are there.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

/// Bytes read and multiply-adds done in a second by all `threads` together, each measured in one pass.
///
/// The products are those of plain `f32` vectors: a figure to compare machines by, not the speed of any kernel.
fn measure(clock: &dyn Clock, threads: usize) -> (f64, f64) {
    let bytes = READ_BYTES.max(READ_BYTES_MIN / threads);
    let start = Barrier::new(threads);
    let between = Barrier::new(threads);
    let work = || {
        // Written first: untouched pages would all be the same page of zeros.
        let buffer = vec![0x5a_u8; bytes];
        let (a, b) = (vec![1.0_f32; OPERANDS], vec![0.5_f32; OPERANDS]);
        start.wait();
        let begin = clock.now();
        black_box(halves_agree(black_box(&buffer)));
        let read = clock.now().since(begin);
        between.wait();
        let begin = clock.now();
        for _ in 0..PRODUCTS / OPERANDS {
            black_box(dot(black_box(&a), black_box(&b)));
        }
        (read, clock.now().since(begin))
    };
    let times = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut times = vec![work()];
        times.extend(others.into_iter().filter_map(|thread| thread.join().ok()));
        times
    });
    // A machine is as fast as its slowest thread: that is whom a split matrix product waits for.
    let read = times.iter().map(|(read, _)| *read).max().unwrap_or_default().as_secs_f64().max(1e-9);
    let multiply = times.iter().map(|(_, multiply)| *multiply).max().unwrap_or_default().as_secs_f64().max(1e-9);
    ((bytes * threads) as f64 / read, (PRODUCTS * threads) as f64 / multiply)
}

/// Reads everything once: comparing memory is what the system's library does as fast as the memory allows, whatever
/// this crate is optimised for.
fn halves_agree(bytes: &[u8]) -> bool {
    let (front, back) = bytes.split_at(bytes.len() / 2);
    front == &back[..front.len()]
}

/// A dot product with as many independent sums as keep wide vector units busy.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 64];
    for (a, b) in a.chunks_exact(64).zip(b.chunks_exact(64)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loops_do_what_they_say() {
        assert!(halves_agree(&[1, 2, 1, 2]) && !halves_agree(&[1, 2, 1, 3]));
        assert_eq!(dot(&[2.0; 128], &[0.5; 128]), 128.0);
    }
}
