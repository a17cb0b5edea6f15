//! The node runtime of Shoal: the actors that find peers, lend memory, place models and make tokens.

pub mod card;
pub mod env;
pub mod ids;
pub mod network;
pub mod secret;
pub mod service;
pub mod supervise;
