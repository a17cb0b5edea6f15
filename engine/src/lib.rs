//! Models on Burn
