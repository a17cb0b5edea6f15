//! What this machine is: the facts of a node's card, read from the operating system and measured.
//!
//! This is the edge of the node where the real machine is looked at. A simulated node is given its facts instead.

mod device;
mod gpu;
mod host;
mod memory;
mod processor;

pub use device::{Chosen, DeviceChoice, choose, measured};
pub use memory::{Memory, default_offer};

use crate::card::{DeviceCard, NodeCard, WIRE_VERSION};
use crate::env::Clock;
use crate::ids::{Incarnation, NodeId};

/// What a machine is.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// The host's name, for people.
    pub name: String,
    /// Operating system and architecture, e.g. `linux/x86_64`.
    pub platform: String,
    /// Equal for processes that share a machine, its boot and its network.
    pub host: u128,
    /// Cores that this process may use.
    pub cores: u32,
    /// Memory of the machine, within the limits of this process.
    pub memory: Memory,
    /// Graphics processors that the system lists. On Linux no driver is asked, so nothing can hang or fail here.
    pub gpus: Vec<SeenGpu>,
}

/// A graphics processor that the system lists.
#[derive(Debug, Clone, PartialEq)]
pub struct SeenGpu {
    /// Where it is on the PCI bus, e.g. `0000:01:00.0`, if it is on one.
    pub slot: Option<String>,
    /// Its card, as one that is not used.
    pub card: DeviceCard,
}

impl Facts {
    /// Reads them from the operating system. Takes some milliseconds.
    pub fn read() -> Self {
        Self {
            name: host::name(),
            platform: format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH),
            host: host::id(),
            cores: processor::cores(),
            memory: Memory::read(),
            gpus: gpu::seen(),
        }
    }

    /// Forgets the graphics processor in a slot: it is used, and its driver has another name for it than the system.
    pub fn uses(&mut self, slot: &str) {
        self.gpus.retain(|gpu| gpu.slot.as_deref() != Some(slot));
    }

    /// The devices in use, and the machine's other graphics processors as unused.
    pub fn devices(&self, used: Vec<DeviceCard>) -> Vec<DeviceCard> {
        let others = self.gpus.iter().map(|gpu| &gpu.card).filter(|gpu| !used.iter().any(|device| device.name == gpu.name));
        let unused: Vec<DeviceCard> = others.cloned().collect();
        used.into_iter().chain(unused).collect()
    }

    /// The first card of a node of this machine that offers `memory_offered_bytes` and uses these devices.
    pub fn card(&self, node: NodeId, incarnation: Incarnation, memory_offered_bytes: u64, used: Vec<DeviceCard>) -> NodeCard {
        NodeCard {
            node,
            incarnation,
            revision: 1,
            name: self.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            wire_version: WIRE_VERSION,
            platform: self.platform.clone(),
            host: self.host,
            cores: self.cores,
            memory_total_bytes: self.memory.total_bytes,
            memory_offered_bytes,
            memory_free_bytes: memory_offered_bytes,
            devices: self.devices(used),
            models: Vec::new(),
            instances: Vec::new(),
            addresses: Vec::new(),
            api: None,
            leaving: false,
        }
    }
}

/// The card of this machine's processor as `threads` threads use it, its speed not yet measured.
pub fn processor(threads: u32) -> DeviceCard {
    processor::card(threads)
}

/// The same with its speed measured. Takes less than a tenth of a second, all of it at full load.
pub fn measured_processor(clock: &dyn Clock, threads: u32) -> DeviceCard {
    processor::measured(clock, threads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::DeviceKind;
    use crate::env::SystemClock;

    #[test]
    fn this_machine_has_a_name_a_core_and_memory() {
        let facts = Facts::read();
        assert!(!facts.name.is_empty() && facts.cores >= 1 && facts.host != 0);
        assert!(facts.platform.contains('/'));
        assert!(facts.memory.total_bytes > 0 && facts.memory.available_bytes <= facts.memory.total_bytes);
        assert_eq!(facts.host, Facts::read().host, "two nodes of one machine say the same");
        let offer = default_offer(&facts.memory);
        assert!(offer < facts.memory.available_bytes);
    }

    #[test]
    fn a_card_lists_what_is_in_use_first() {
        let gpu = DeviceCard {
            kind: DeviceKind::UnusedGpu,
            name: "NVIDIA H200".to_owned(),
            features: Vec::new(),
            memory_bytes: 0,
            threads: 0,
            read_bytes_per_second: 0.0,
            multiply_adds_per_second: 0.0,
        };
        let mut facts = Facts::read();
        let seen =
            |slot: &str, name: &str| SeenGpu { slot: Some(slot.to_owned()), card: DeviceCard { name: name.to_owned(), ..gpu.clone() } };
        facts.gpus =
            vec![seen("0000:01:00.0", "NVIDIA H200"), seen("0000:02:00.0", "Radeon"), seen("0000:03:00.0", "AMD graphics 1002:744c")];
        facts.uses("0000:03:00.0");
        let used = DeviceCard { kind: DeviceKind::Gpu, ..gpu };
        let card = facts.card(NodeId([1; 32]), Incarnation(1), 5, vec![used]);
        let kinds: Vec<(DeviceKind, &str)> = card.devices.iter().map(|device| (device.kind, device.name.as_str())).collect();
        assert_eq!(kinds, [(DeviceKind::Gpu, "NVIDIA H200"), (DeviceKind::UnusedGpu, "Radeon")]);
        assert_eq!((card.memory_offered_bytes, card.memory_free_bytes), (5, 5));
    }

    #[test]
    fn the_processor_has_a_speed() {
        let card = measured_processor(&SystemClock, 1);
        println!("{card:?}");
        assert!(card.read_bytes_per_second > 1e7 && card.read_bytes_per_second.is_finite());
        assert!(card.multiply_adds_per_second > 1e7 && card.multiply_adds_per_second.is_finite());
        assert!(!card.name.is_empty() && card.threads == 1);
        let unmeasured = DeviceCard { read_bytes_per_second: 0.0, multiply_adds_per_second: 0.0, ..card };
        assert_eq!(processor(1), unmeasured);
    }
}
