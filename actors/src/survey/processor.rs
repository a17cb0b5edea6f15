//! The processor: its name, its instruction sets, and how fast it reads and multiplies.

use crate::card::{DeviceCard, DeviceKind};
use crate::env::Clock;

/// Cores that this process may use.
pub(super) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX))
}

fn used(threads: u32) -> u32 {
    threads.clamp(1, 1024)
}

/// The processor's card, without its speed.
pub(super) fn card(threads: u32) -> DeviceCard {
    DeviceCard {
        kind: DeviceKind::Cpu,
        name: name(),
        features: features().into_iter().map(str::to_owned).collect(),
        memory_bytes: 0,
        threads: used(threads),
        read_bytes_per_second: 0.0,
        multiply_adds_per_second: 0.0,
    }
}

/// The processor's card, measured.
pub(super) fn measured(clock: &dyn Clock, threads: u32) -> DeviceCard {
    let begin = clock.now();
    // A machine that gives no threads will say so where it matters; the planner has its own guess for unknown speeds.
    let Ok(speed) = shoal_engine::kernels::measure(used(threads) as usize, &|| clock.now().since(begin)) else { return card(threads) };
    DeviceCard {
        read_bytes_per_second: speed.read_bytes_per_second,
        multiply_adds_per_second: speed.multiply_adds_per_second,
        ..card(threads)
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
