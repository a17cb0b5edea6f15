//! Graphics processors that the system lists. On Linux no driver is asked.

use std::fs;
use std::path::Path;

use shoal_engine::device::{Gpu, GpuMemory, gpus};

use super::SeenGpu;
use crate::card::{DeviceCard, DeviceKind};

/// Makers of display adapters of virtual machines and servers' management chips: nothing to compute with.
const DISPLAYS_ONLY: [u32; 8] = [0x1af4, 0x1234, 0x1013, 0x1b36, 0x15ad, 0x1414, 0x1a03, 0x102b];
/// The most that are listed.
const LIST_MAX: usize = 16;

/// The graphics processors of this machine.
pub(super) fn seen() -> Vec<SeenGpu> {
    if cfg!(target_os = "linux") {
        return list(Path::new("/"));
    }
    // Other systems list none in files, but a build for them has the backend.
    let real = gpus().into_iter().filter(|gpu| !gpu.software);
    real.map(|gpu| SeenGpu { card: of_driver(&gpu, DeviceKind::UnusedGpu), slot: gpu.slot }).collect()
}

/// The card of a graphics processor as its driver tells of it, not measured.
pub(super) fn of_driver(gpu: &Gpu, kind: DeviceKind) -> DeviceCard {
    let memory = match gpu.memory {
        GpuMemory::Own(bytes) => bytes,
        GpuMemory::Shared | GpuMemory::Unknown => 0,
    };
    let features = [Some(gpu.api), gpu.half.then_some("f16"), gpu.software.then_some("software")];
    DeviceCard { kind, features: features.into_iter().flatten().map(str::to_owned).collect(), ..card(gpu.name.clone(), memory) }
}

/// The graphics processors below `root`, which is `/` but in tests. Empty where the system has no such files.
fn list(root: &Path) -> Vec<SeenGpu> {
    let mut cards = pci(root);
    cards.extend(on_chip(root));
    cards.truncate(LIST_MAX);
    cards
}

fn card(name: String, memory_bytes: u64) -> DeviceCard {
    DeviceCard {
        kind: DeviceKind::UnusedGpu,
        name,
        features: Vec::new(),
        memory_bytes,
        threads: 0,
        read_bytes_per_second: 0.0,
        multiply_adds_per_second: 0.0,
    }
}

fn sorted(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// A small file as text, without the line's end.
fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
}

fn hexadecimal(path: &Path) -> Option<u32> {
    u32::from_str_radix(text(path)?.trim_start_matches("0x"), 16).ok()
}

/// Adapters on the PCI bus: class 3 (display, which 3D controllers are part of) of the PCI code and ID specification.
fn pci(root: &Path) -> Vec<SeenGpu> {
    let mut cards = Vec::new();
    for device in sorted(&root.join("sys/bus/pci/devices")) {
        let Some(vendor) = hexadecimal(&device.join("vendor")) else { continue };
        let display = hexadecimal(&device.join("class")).is_some_and(|class| class >> 16 == 3);
        if !display || DISPLAYS_ONLY.contains(&vendor) {
            continue;
        }
        let number = hexadecimal(&device.join("device")).unwrap_or(0);
        let maker = match vendor {
            0x10de => "NVIDIA",
            0x1002 => "AMD",
            0x8086 => "Intel",
            _ => "unknown maker's",
        };
        let slot = device.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let name = nvidia_name(root, &slot).or_else(|| text(&device.join("product_name")));
        let name = name.unwrap_or_else(|| format!("{maker} graphics {vendor:04x}:{number:04x}"));
        let memory = text(&device.join("mem_info_vram_total")).and_then(|bytes| bytes.parse().ok());
        cards.push(SeenGpu { slot: Some(slot), card: card(name, memory.unwrap_or(0)) });
    }
    cards
}

/// What NVIDIA's kernel module calls the adapter in `slot`.
fn nvidia_name(root: &Path, slot: &str) -> Option<String> {
    let information = text(&root.join("proc/driver/nvidia/gpus").join(slot).join("information"))?;
    let model = information.lines().find_map(|line| line.strip_prefix("Model:"))?;
    Some(model.trim().to_owned()).filter(|model| !model.is_empty())
}

/// Adapters that are part of a system on a chip, known by the driver of their render node.
fn on_chip(root: &Path) -> Vec<SeenGpu> {
    let mut cards = Vec::new();
    for node in sorted(&root.join("sys/class/drm")) {
        let is_render = node.file_name().is_some_and(|name| name.to_string_lossy().starts_with("renderD"));
        let device = node.join("device");
        if !is_render || device.join("vendor").exists() {
            continue;
        }
        let Some(about) = text(&device.join("uevent")) else { continue };
        let value = |key: &str| about.lines().find_map(|line| line.strip_prefix(key)).map(str::to_owned);
        if let Some(driver) = value("DRIVER=") {
            let chip = value("OF_COMPATIBLE_0=").map(|chip| format!(" ({chip})")).unwrap_or_default();
            cards.push(SeenGpu { slot: None, card: card(format!("{driver}{chip}"), 0) });
        }
    }
    cards
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, path: &str, content: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    #[test]
    fn adapters_are_listed_and_displays_of_virtual_machines_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let device = |slot: &str, vendor: &str, number: &str, class: &str| {
            for (file, content) in [("vendor", vendor), ("device", number), ("class", class)] {
                put(root, &format!("sys/bus/pci/devices/{slot}/{file}"), &format!("{content}\n"));
            }
        };
        device("0000:01:00.0", "0x10de", "0x2335", "0x030200");
        put(root, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 5\n");
        device("0000:02:00.0", "0x1002", "0x744c", "0x030000");
        put(root, "sys/bus/pci/devices/0000:02:00.0/mem_info_vram_total", "25753026560\n");
        device("0000:03:00.0", "0x10de", "0x1234", "0x040300");
        device("0000:04:00.0", "0x1af4", "0x1050", "0x030000");
        put(root, "sys/class/drm/renderD128/device/uevent", "DRIVER=v3d\nOF_COMPATIBLE_0=brcm,2712-v3d\n");
        put(root, "sys/class/drm/renderD129/device/vendor", "0x10de\n");
        let cards = list(root);
        let seen: Vec<(Option<&str>, &str, u64)> =
            cards.iter().map(|gpu| (gpu.slot.as_deref(), gpu.card.name.as_str(), gpu.card.memory_bytes)).collect();
        let expected = [
            (Some("0000:01:00.0"), "NVIDIA H200", 0),
            (Some("0000:02:00.0"), "AMD graphics 1002:744c", 25_753_026_560),
            (None, "v3d (brcm,2712-v3d)", 0),
        ];
        assert_eq!(seen, expected);
        assert!(cards.iter().all(|gpu| gpu.card.kind == DeviceKind::UnusedGpu));
    }

    #[test]
    fn a_system_without_such_files_has_none() {
        assert!(list(Path::new("/nowhere")).is_empty());
    }
}
