//! Random weights for tests, and a device to run them on.

use crate::quant::BlockType;

/// Every type that there are kernels for.
pub(crate) const TYPES: [BlockType; 25] = [
    BlockType::Q4_0,
    BlockType::Q4_1,
    BlockType::Q5_0,
    BlockType::Q5_1,
    BlockType::Q8_0,
    BlockType::Q4_K,
    BlockType::Q5_K,
    BlockType::Q6_K,
    BlockType::F32,
    BlockType::F16,
    BlockType::BF16,
    BlockType::Q2_K,
    BlockType::Q3_K,
    BlockType::MXFP4,
    BlockType::TQ1_0,
    BlockType::TQ2_0,
    BlockType::IQ1_S,
    BlockType::IQ1_M,
    BlockType::IQ2_XXS,
    BlockType::IQ2_XS,
    BlockType::IQ2_S,
    BlockType::IQ3_XXS,
    BlockType::IQ3_S,
    BlockType::IQ4_NL,
    BlockType::IQ4_XS,
];

/// The graphics processor to test on, if there is one: Mesa's software one will do. Where `SHOAL_TEST_GPU` is set there must be one.
#[cfg(gpu)]
pub(crate) fn gpu() -> Option<cubecl::Device> {
    match super::open_gpu(0) {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(std::env::var_os("SHOAL_TEST_GPU").is_none(), "{error}");
            eprintln!("not tested: {error}");
            None
        }
    }
}

/// A small generator of numbers, the same for the same seed.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// From −1 to 1.
    pub(crate) fn unit(&mut self) -> f32 {
        self.bits() as i32 as f32 / 2_147_483_648.0
    }

    pub(crate) fn units(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.unit()).collect()
    }
}

/// Random blocks that make weights of ordinary size, around a tenth: every bit is random but the exponents of
/// half-precision fields.
pub(crate) fn random_blocks(block: BlockType, elements: usize, seed: u64) -> Vec<u8> {
    let mut numbers = Numbers::new(seed);
    let mut bytes: Vec<u8> = (0..block.row_bytes(elements).unwrap()).map(|_| numbers.bits() as u8).collect();
    // Where a block has half-precision fields, and the upper byte's exponent bits for each.
    let fields: &[(usize, u8)] = match block {
        BlockType::Q4_0 | BlockType::Q5_0 => &[(0, 0x24)],
        BlockType::Q8_0 => &[(0, 0x14)],
        BlockType::Q4_1 | BlockType::Q5_1 => &[(0, 0x20), (2, 0x2c)],
        BlockType::Q4_K | BlockType::Q5_K => &[(0, 0x0c), (2, 0x18)],
        BlockType::Q6_K => &[(208, 0x08)],
        BlockType::Q2_K => &[(80, 0x20), (82, 0x20)],
        BlockType::Q3_K => &[(108, 0x18)],
        BlockType::TQ1_0 => &[(52, 0x2c)],
        BlockType::TQ2_0 => &[(64, 0x2c)],
        BlockType::IQ1_S => &[(0, 0x20)],
        BlockType::IQ2_XXS | BlockType::IQ2_XS | BlockType::IQ2_S | BlockType::IQ4_NL => &[(0, 0x14)],
        BlockType::IQ3_XXS | BlockType::IQ3_S => &[(0, 0x10)],
        BlockType::IQ4_XS => &[(0, 0x04)],
        _ => &[],
    };
    match block {
        BlockType::MXFP4 => bytes.chunks_exact_mut(17).for_each(|b| b[0] = b[0] & 1 | 122),
        // Its scale's upper bits are the upper nibble of the last byte.
        BlockType::IQ1_M => bytes.chunks_exact_mut(56).for_each(|b| (b[53], b[55]) = (b[53] & 0x3f, b[55] & 0x8f | 0x20)),
        BlockType::F32 => bytes.chunks_exact_mut(4).for_each(|b| b.copy_from_slice(&(numbers.unit() * 0.2).to_le_bytes())),
        BlockType::F16 => bytes.chunks_exact_mut(2).for_each(|b| b[1] = b[1] & 0x83 | 0x2c),
        BlockType::BF16 => bytes.chunks_exact_mut(2).for_each(|b| (b[0], b[1]) = (b[0] & 0x7f | 0x80, b[1] & 0x80 | 0x3d)),
        _ => {
            for block in bytes.chunks_exact_mut(block.block_bytes()) {
                fields.iter().for_each(|&(at, exponent)| block[at + 1] = block[at + 1] & 0x83 | exponent);
            }
        }
    }
    bytes
}
