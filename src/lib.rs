//! Shoal.
