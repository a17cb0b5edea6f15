//! Which graphics processors there are, and how one is opened.
//!
//! wgpu and CubeCL keep devices for the whole process, and loading Vulkan's driver on two threads at once can crash it. So this is the
//! one place with state of its own: a list of adapters, asked for once, and a lock under which devices are opened.

use std::collections::BTreeSet;
use std::sync::{Mutex, OnceLock, PoisonError};

use burn_wgpu::graphics::AutoGraphicsApi;
use burn_wgpu::wgpu::{self, Backend, DeviceType};
use burn_wgpu::{RuntimeOptions, WgpuBackend, WgpuDevice, WgpuInitError, try_init_setup};
use cubecl::device::WgpuDeviceKind;
use cubecl::future::block_on;

use crate::device::{Device, DeviceError, Gpu, GpuMemory};

/// Interfaces to drivers, best first.
const APIS: [(Backend, WgpuBackend, &str); 3] = [
    (Backend::Metal, WgpuBackend::Metal, "metal"),
    (Backend::Vulkan, WgpuBackend::Vulkan, "vulkan"),
    (Backend::Dx12, WgpuBackend::Dx12, "dx12"),
];

/// An adapter, and what CubeCL calls it.
#[derive(Debug, Clone)]
struct Adapter {
    gpu: Gpu,
    device: WgpuDevice,
}

/// All adapters of the first interface that offers a real one; else of the first that offers any.
fn adapters() -> &'static [Adapter] {
    static ADAPTERS: OnceLock<Vec<Adapter>> = OnceLock::new();
    ADAPTERS.get_or_init(|| {
        let mut all: Vec<Vec<Adapter>> = APIS.iter().map(|api| ask(*api)).filter(|adapters| !adapters.is_empty()).collect();
        let real = all.iter().position(|adapters| adapters.iter().any(|adapter| !adapter.gpu.software));
        if all.is_empty() { Vec::new() } else { all.swap_remove(real.unwrap_or(0)) }
    })
}

fn ask((backend, pinned, name): (Backend, WgpuBackend, &'static str)) -> Vec<Adapter> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: backend.into(),
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    // Adapters of each type are numbered by themselves.
    let [mut discrete, mut integrated, mut virtuals, mut others] = [0, 0, 0, 0];
    let next = |counter: &mut usize| {
        *counter += 1;
        *counter - 1
    };
    let mut adapters = Vec::new();
    for adapter in block_on(instance.enumerate_adapters(backend.into())) {
        let info = adapter.get_info();
        let kind = match info.device_type {
            DeviceType::DiscreteGpu => WgpuDeviceKind::DiscreteGpu(next(&mut discrete)),
            DeviceType::IntegratedGpu => WgpuDeviceKind::IntegratedGpu(next(&mut integrated)),
            DeviceType::VirtualGpu => WgpuDeviceKind::VirtualGpu(next(&mut virtuals)),
            DeviceType::Other => WgpuDeviceKind::Other(next(&mut others)),
            DeviceType::Cpu => WgpuDeviceKind::Cpu,
        };
        let shared = matches!(info.device_type, DeviceType::IntegratedGpu | DeviceType::Cpu);
        let own = || own_memory(&adapter).map_or(GpuMemory::Unknown, GpuMemory::Own);
        let gpu = Gpu {
            name: info.name,
            api: name,
            software: info.device_type == DeviceType::Cpu,
            half: adapter.features().contains(wgpu::Features::SHADER_F16),
            memory: if shared { GpuMemory::Shared } else { own() },
            slot: Some(info.device_pci_bus_id).filter(|slot| !slot.is_empty()),
        };
        adapters.push(Adapter { gpu, device: WgpuDevice::new(kind).on(pinned) });
    }
    adapters
}

/// Memory of the adapter itself, in bytes, where the driver says how much: wgpu has no question for it, but Vulkan has.
#[cfg(not(target_vendor = "apple"))]
fn own_memory(adapter: &wgpu::Adapter) -> Option<u64> {
    const DEVICE_LOCAL: u32 = 1;
    // SAFETY: nothing of what is behind the guard is destroyed; it is asked a question, and the guard lives as long as that takes.
    let vulkan = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let instance = vulkan.shared_instance().raw_instance();
    // SAFETY: the physical device is one of this instance's, and both live as long as the guard.
    let properties = unsafe { instance.get_physical_device_memory_properties(vulkan.raw_physical_device()) };
    let heaps = properties.memory_heaps.iter().take(properties.memory_heap_count as usize);
    heaps.filter(|heap| heap.flags.as_raw() & DEVICE_LOCAL != 0).map(|heap| heap.size).max()
}

#[cfg(target_vendor = "apple")]
fn own_memory(_adapter: &wgpu::Adapter) -> Option<u64> {
    None
}

/// All graphics processors.
pub(crate) fn devices() -> Vec<Gpu> {
    adapters().iter().map(|adapter| adapter.gpu.clone()).collect()
}

/// Opens a graphics processor; again, if it was opened before.
pub(crate) fn open(index: u32) -> Result<cubecl::Device, DeviceError> {
    static OPENED: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
    let missing = || {
        let seen = adapters().iter().map(|adapter| adapter.gpu.name.clone()).collect();
        DeviceError::Missing { device: Device::Gpu(index), seen }
    };
    let adapter = adapters().get(index as usize).ok_or_else(missing)?;
    let refused = |error: WgpuInitError| DeviceError::Refused { name: adapter.gpu.name.clone(), reason: error.to_string() };
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if !opened.contains(&index) {
        let options = RuntimeOptions::try_default().map_err(refused)?;
        match try_init_setup::<AutoGraphicsApi>(&adapter.device, options) {
            // Whoever embeds the engine may have opened it.
            Ok(_) | Err(WgpuInitError::Registration { .. }) => {}
            Err(error) => return Err(refused(error)),
        }
        opened.insert(index);
    }
    Ok(cubecl::Device::Wgpu(adapter.device.clone()))
}
