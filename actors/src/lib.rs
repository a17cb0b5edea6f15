//! The node runtime of Shoal
