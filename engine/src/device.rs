//! Which processor of a machine runs a stage.

use std::fmt;
use std::str::FromStr;

/// Whether this build has the GPU backend: always on macOS and Windows, elsewhere with the feature `gpu`.
pub const GPU_BACKEND: bool = cfg!(gpu);

/// A processor that stages can run on. As text: `cpu`, `gpu:0`, `gpu:1` and so on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Device {
    /// The host's processor.
    #[default]
    Cpu,
    /// A graphics processor, by its place in [`gpus`].
    Gpu(u32),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.pad("cpu"),
            Self::Gpu(index) => write!(f, "gpu:{index}"),
        }
    }
}

/// Text that names no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no device; there are cpu, gpu:0, gpu:1 and so on")]
pub struct DeviceNameError {
    /// The text.
    pub text: String,
}

impl FromStr for Device {
    type Err = DeviceNameError;

    fn from_str(text: &str) -> Result<Self, DeviceNameError> {
        let unknown = || DeviceNameError { text: text.to_owned() };
        match text {
            "cpu" => Ok(Self::Cpu),
            "gpu" => Ok(Self::Gpu(0)),
            _ => text.strip_prefix("gpu:").and_then(|index| index.parse().ok()).map(Self::Gpu).ok_or_else(unknown),
        }
    }
}

/// Where a graphics processor's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuMemory {
    /// It is the host's.
    Shared,
    /// It has so many bytes of its own.
    Own(u64),
    /// It has its own, and the driver does not say how much.
    Unknown,
}

/// A graphics processor, as its driver tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// How it is spoken to: `vulkan`, `metal` or `dx12`.
    pub api: &'static str,
    /// Whether it is a program on the host's processor, for tests.
    pub software: bool,
    /// Whether it computes with half-precision numbers.
    pub half: bool,
    /// Where its memory is.
    pub memory: GpuMemory,
    /// Where it is on the PCI bus, e.g. `0000:01:00.0`, if it is on one and the driver says so.
    pub slot: Option<String>,
}

/// A device that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The build cannot use graphics processors.
    #[error("this build of shoal has no GPU backend; build it with `--features gpu`, or compute on the cpu")]
    NoBackend,
    /// There is none of that number.
    #[error("there is no {device}: {}", there_are(seen))]
    Missing {
        /// What was asked for.
        device: Device,
        /// Names of those that there are.
        seen: Vec<String>,
    },
    /// The driver refuses.
    #[error("{name} cannot be used: {reason}")]
    Refused {
        /// The device.
        name: String,
        /// The driver's words.
        reason: String,
    },
    /// It stopped working.
    #[error("the device failed: {reason}")]
    Failed {
        /// The driver's words.
        reason: String,
    },
}

fn there_are(seen: &[String]) -> String {
    if seen.is_empty() {
        return "no driver on this machine offers a graphics processor".to_owned();
    }
    let named: Vec<String> = seen.iter().enumerate().map(|(index, name)| format!("gpu:{index} is {name}")).collect();
    named.join(", ")
}

/// The graphics processors that this build can use, numbered by their place. Drivers are asked at the first call in a process, which
/// can take a second; later ones give the same.
pub fn gpus() -> Vec<Gpu> {
    crate::kernels::gpu_devices()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        for device in [Device::Cpu, Device::Gpu(0), Device::Gpu(12)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("gpu".parse(), Ok(Device::Gpu(0)));
        for text in ["", "GPU", "gpu:", "gpu:-1", "gpu:x", "cuda:0"] {
            assert_eq!(text.parse::<Device>(), Err(DeviceNameError { text: text.to_owned() }));
        }
    }

    #[test]
    fn what_is_missing_is_said_with_what_there_is() {
        let error = DeviceError::Missing { device: Device::Gpu(1), seen: vec!["Radeon".to_owned()] };
        assert_eq!(error.to_string(), "there is no gpu:1: gpu:0 is Radeon");
        let none = DeviceError::Missing { device: Device::Gpu(0), seen: Vec::new() };
        assert!(none.to_string().ends_with("no driver on this machine offers a graphics processor"));
    }

    #[test]
    fn a_build_without_the_backend_has_no_devices() {
        assert!(GPU_BACKEND || gpus().is_empty());
    }
}
