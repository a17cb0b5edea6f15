//! Tensor links between nodes.

pub mod env;
