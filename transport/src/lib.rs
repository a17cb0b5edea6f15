//! Tensor links between Shoal nodes
