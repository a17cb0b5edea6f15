//! Models on Burn: formats, kernels, KV cache, tokenizer and sampling. The engine knows tensors, not networks.

pub mod bench;
pub mod card;
pub mod chat;
pub mod config;
pub mod device;
pub mod gguf;
pub mod kernels;
pub mod quant;
pub mod sampler;
mod shown;
pub mod stage;
pub mod tokenizer;
