//! Stages of an instance: the messages between them, the machine that runs a step, the device thread around it, and
//! the actor that loads and unloads them under leases.

pub mod machine;
pub mod message;
