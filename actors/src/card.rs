//! What a node tells the others about itself, and what a node knows of a model without opening it.

use serde::{Deserialize, Serialize};
pub use shoal_engine::card::ModelCard;

use crate::conductor::instance::InstanceSummary;
use crate::ids::{Incarnation, NodeId};

/// The version of everything that crosses the network. Peers of another one are refused with a message.
pub const WIRE_VERSION: u32 = 2;

/// What kind of processor a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DeviceKind {
    /// The host's processor with its vector units.
    Cpu,
    /// A graphics processor that this build can drive.
    Gpu,
    /// A graphics processor that is there and is not computed on: this build has no backend, or the node was not told to use it.
    UnusedGpu,
}

/// One processor of a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceCard {
    /// What it is.
    pub kind: DeviceKind,
    /// Its name as the operating system or driver gives it.
    pub name: String,
    /// Instruction sets or features that the engine uses on it, e.g. `avx2`.
    pub features: Vec<String>,
    /// Memory of its own, in bytes; zero where it shares the host's.
    pub memory_bytes: u64,
    /// Threads that the engine uses on it (CPU), else zero.
    pub threads: u32,
    /// Measured speed at which it reads weights, in bytes a second.
    pub read_bytes_per_second: f64,
    /// Measured speed of quantised matrix products, in multiply-adds a second.
    pub multiply_adds_per_second: f64,
}

/// A model that a node has on disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelOnDisk {
    /// The name users call it by, e.g. `smollm2:135m`.
    pub name: String,
    /// SHA-256 of the file, in lower-case hexadecimal: nodes with the same one have the same model.
    pub sha256: String,
    /// Size of the file in bytes.
    pub bytes: u64,
}

/// What a node says of itself: gossiped to every member, so it stays small (at most [`NodeCard::BYTES_MAX`] encoded).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeCard {
    /// Who it is.
    pub node: NodeId,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// Raised whenever the node changes its card.
    pub revision: u64,
    /// The host's name, for people.
    pub name: String,
    /// Version of the program, for people.
    pub version: String,
    /// Version of the wire, for machines.
    pub wire_version: u32,
    /// Operating system and architecture, e.g. `linux/x86_64`.
    pub platform: String,
    /// Equal for nodes that run on the same machine.
    pub host: u128,
    /// Cores of the host.
    pub cores: u32,
    /// Memory of the host in bytes, or of the device that computes if that has its own.
    pub memory_total_bytes: u64,
    /// Memory that the node offers for leases, in bytes: part of the above.
    pub memory_offered_bytes: u64,
    /// Memory on offer that is not leased at the moment, in bytes. A hint: only the owner's answer counts.
    pub memory_free_bytes: u64,
    /// Processors, those in use first.
    pub devices: Vec<DeviceCard>,
    /// Models on its disk.
    pub models: Vec<ModelOnDisk>,
    /// Instances that it conducts.
    pub instances: Vec<InstanceSummary>,
    /// Where peers reach its control port, most local last.
    pub addresses: Vec<String>,
    /// Where the node's HTTP interface listens, if it has one.
    pub api: Option<String>,
    /// Whether it is about to leave: it takes nothing new, and what it has moves away.
    pub leaving: bool,
}

impl NodeCard {
    /// Upper limit of an encoded card, in bytes. A longer list of models is cut.
    pub const BYTES_MAX: usize = 32 * 1024;

    /// Whether the node has the file with this hash on its disk.
    pub fn has_model(&self, sha256: &str) -> bool {
        self.models.iter().any(|model| model.sha256 == sha256)
    }
}
