//! Which of this machine's processors a node computes on.

use std::fmt;
use std::str::FromStr;

use shoal_engine::device::{Device, DeviceError, DeviceNameError, Gpu, GpuMemory, gpus};

use shoal_engine::kernels::{measure_gpu, try_gpu};

use super::{gpu, measured_processor, processor};
use crate::card::{DeviceCard, DeviceKind};
use crate::env::Clock;

/// What the user asks a node to compute on. As text: `cpu`, `auto`, `gpu:0` and so on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The first graphics processor that can be used, else the host's processor.
    Auto,
    /// This one, or none.
    Only(Device),
}

impl Default for DeviceChoice {
    /// The host's processor.
    fn default() -> Self {
        Self::Only(Device::Cpu)
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad("auto"),
            Self::Only(device) => device.fmt(f),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = DeviceNameError;

    fn from_str(text: &str) -> Result<Self, DeviceNameError> {
        if text == "auto" { Ok(Self::Auto) } else { text.parse().map(Self::Only) }
    }
}

/// A device that a node computes on.
#[derive(Debug, Clone, PartialEq)]
pub struct Chosen {
    /// Which.
    pub device: Device,
    /// Its card, its speed not yet measured.
    pub card: DeviceCard,
    /// Where it is on the PCI bus, if it is on one.
    pub slot: Option<String>,
    /// Memory of its own, in bytes; `None` where it uses the host's.
    pub own_memory_bytes: Option<u64>,
}

impl Chosen {
    /// What a node offers of the device's own memory if its user says nothing: what drivers and screens need stays free.
    pub fn default_offer(&self) -> Option<u64> {
        const RESERVE: u64 = 512 << 20;
        self.own_memory_bytes.map(|bytes| (bytes / 10 * 9).saturating_sub(RESERVE))
    }
}

/// Finds and opens the device of a node that uses `threads` threads of the host's processor.
///
/// # Errors
/// [`DeviceError`] if a graphics processor was asked for by its number and cannot be used.
pub fn choose(choice: DeviceChoice, threads: u32) -> Result<Chosen, DeviceError> {
    match choice {
        DeviceChoice::Only(Device::Cpu) => Ok(host(threads)),
        DeviceChoice::Only(Device::Gpu(index)) => {
            try_gpu(index)?;
            let gpu = gpus().into_iter().nth(index as usize);
            gpu.map(|gpu| on(index, &gpu)).ok_or(DeviceError::Missing { device: Device::Gpu(index), seen: Vec::new() })
        }
        DeviceChoice::Auto => {
            for (index, gpu) in (0..).zip(gpus()) {
                if gpu.software || gpu.memory == GpuMemory::Unknown {
                    continue;
                }
                match try_gpu(index) {
                    Ok(()) => return Ok(on(index, &gpu)),
                    Err(error) => tracing::warn!(%error, "a graphics processor is passed over"),
                }
            }
            Ok(host(threads))
        }
    }
}

fn host(threads: u32) -> Chosen {
    Chosen { device: Device::Cpu, card: processor(threads), slot: None, own_memory_bytes: None }
}

fn on(index: u32, gpu: &Gpu) -> Chosen {
    let own_memory_bytes = match gpu.memory {
        GpuMemory::Own(bytes) => Some(bytes),
        // Nothing is offered of what nobody knows; the user can say how much.
        GpuMemory::Unknown => Some(0),
        GpuMemory::Shared => None,
    };
    Chosen { device: Device::Gpu(index), card: gpu::of_driver(gpu, DeviceKind::Gpu), slot: gpu.slot.clone(), own_memory_bytes }
}

/// A device's card with its speed measured. Takes some tenths of a second, at full load; a device that fails keeps the card that it
/// has, and says what is wrong when it is used.
pub fn measured(device: Device, card: &DeviceCard, clock: &dyn Clock) -> DeviceCard {
    let index = match device {
        Device::Cpu => return measured_processor(clock, card.threads),
        Device::Gpu(index) => index,
    };
    let begin = clock.now();
    match measure_gpu(index, &|| clock.now().since(begin)) {
        Ok(speed) => DeviceCard {
            read_bytes_per_second: speed.read_bytes_per_second,
            multiply_adds_per_second: speed.multiply_adds_per_second,
            ..card.clone()
        },
        Err(error) => {
            tracing::warn!(%error, "a graphics processor was not measured");
            card.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::SystemClock;

    #[test]
    fn the_hosts_processor_is_measured() {
        let chosen = choose(DeviceChoice::default(), 1).unwrap();
        assert_eq!(chosen.card.read_bytes_per_second, 0.0);
        assert!(measured(chosen.device, &chosen.card, &SystemClock).read_bytes_per_second > 0.0);
    }

    #[test]
    fn choices_are_read_and_written() {
        for text in ["auto", "cpu", "gpu:0", "gpu:3"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert_eq!("gpu".parse(), Ok(DeviceChoice::Only(Device::Gpu(0))));
        assert!("fastest".parse::<DeviceChoice>().unwrap_err().to_string().contains("`fastest`"));
        assert_eq!(DeviceChoice::default(), DeviceChoice::Only(Device::Cpu));
    }

    #[test]
    fn whoever_has_no_graphics_processor_computes_on_the_host() {
        let real = gpus().iter().any(|gpu| !gpu.software);
        let chosen = choose(DeviceChoice::Auto, 1).unwrap();
        assert!(real || (chosen.device == Device::Cpu && chosen.own_memory_bytes.is_none() && chosen.default_offer().is_none()));
        let error = choose(DeviceChoice::Only(Device::Gpu(99)), 1).unwrap_err().to_string();
        assert!(error.contains("gpu:99") || error.contains("--features gpu"), "{error}");
    }

    #[test]
    fn a_devices_own_memory_is_not_offered_to_the_last_byte() {
        let chosen = |own_memory_bytes| Chosen { own_memory_bytes, ..host(1) };
        assert_eq!(chosen(None).default_offer(), None);
        assert_eq!(chosen(Some(0)).default_offer(), Some(0));
        assert_eq!(chosen(Some(10 << 30)).default_offer(), Some((9 << 30) - (512 << 20)));
    }
}
