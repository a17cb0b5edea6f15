//! The node runtime of Shoal: the actors that find peers, lend memory, place models and make tokens.

// Tests wait for real machines and start what they need; the list in `clippy.toml` is for what runs in a node.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod card;
pub mod catalog;
pub mod compute;
pub mod conductor;
mod countdown;
mod dice;
pub mod discovery;
pub mod env;
pub mod ids;
pub mod lease;
pub mod linkbench;
pub mod membership;
pub mod network;
pub mod node;
mod places;
pub mod plan;
pub mod pressure;
pub mod region;
pub mod request;
pub mod scheduler;
pub mod secret;
pub mod service;
mod service_numbers;
pub mod stage;
pub mod supervise;
pub mod survey;
pub mod topology;
mod wake;
#[cfg(test)]
mod wire_tests;

pub use shoal_engine::bench;
pub use shoal_engine::device::{Device, GPU_BACKEND};
pub use shoal_engine::sampler::SamplingParams;
pub use shoal_transport::path::PathHealth;
pub use shoal_transport::provider::ProviderKind;
pub use shoal_transport::provider::tcp::Encryption;
