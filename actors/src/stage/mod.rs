//! Stages of an instance: the messages between them, the machine that runs a step, the device thread around it, and
//! the actor that loads and unloads them under leases.

mod detour;
mod device;
pub mod links;
pub mod machine;
pub mod message;
mod paid;
pub mod pipes;
pub mod port;
mod reach;
mod service;
mod workers;

pub(crate) use detour::{DetourServer, Detours};
pub use service::{LinkStage, LoadStage, LoadedStage, StageKey, StageNotice, StageNotices, StageRefusal, StageReply, StageRequest, Stages};
pub use workers::{DeviceReport, LeaseCheck, ModelPath, Workers, WorkersArguments, WorkersMsg, WorkersState};
