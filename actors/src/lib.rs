//! The node runtime of Shoal: the actors that find peers, lend memory, place models and make tokens.

pub mod card;
mod dice;
pub mod discovery;
pub mod env;
pub mod ids;
pub mod membership;
pub mod network;
pub mod secret;
pub mod service;
mod service_numbers;
pub mod survey;
pub mod topology;
mod wake;
