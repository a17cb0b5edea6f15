//! Matrices that are not quantised: one column of sixteen rows after the other.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

use super::GROUP;
use crate::kernels::cpu::simd::Vector;

/// One column of sixteen rows.
pub(super) trait Float: Pod + Send + Sync {
    /// Sets the value of `row` from its bytes in the file.
    fn put(&mut self, row: usize, bytes: &[u8]);
    /// The value of `row`.
    fn value(&self, row: usize) -> f32;
    /// All values.
    fn load<V: Vector>(&self, v: V) -> V::F;
}

/// IEEE single precision.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Single([f32; GROUP]);

/// IEEE half precision.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Half([u16; GROUP]);

/// bfloat16.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C, align(32))]
pub(super) struct Brain([u16; GROUP]);

impl Float for Single {
    fn put(&mut self, row: usize, bytes: &[u8]) {
        self.0[row] = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }

    fn value(&self, row: usize) -> f32 {
        self.0[row]
    }

    #[inline(always)]
    fn load<V: Vector>(&self, v: V) -> V::F {
        v.load(&self.0)
    }
}

impl Float for Half {
    fn put(&mut self, row: usize, bytes: &[u8]) {
        self.0[row] = u16::from_le_bytes([bytes[0], bytes[1]]);
    }

    fn value(&self, row: usize) -> f32 {
        f16::from_bits(self.0[row]).to_f32()
    }

    #[inline(always)]
    fn load<V: Vector>(&self, v: V) -> V::F {
        v.load_half(&self.0)
    }
}

impl Float for Brain {
    fn put(&mut self, row: usize, bytes: &[u8]) {
        self.0[row] = u16::from_le_bytes([bytes[0], bytes[1]]);
    }

    fn value(&self, row: usize) -> f32 {
        bf16::from_bits(self.0[row]).to_f32()
    }

    #[inline(always)]
    fn load<V: Vector>(&self, v: V) -> V::F {
        v.load_brain(&self.0)
    }
}
