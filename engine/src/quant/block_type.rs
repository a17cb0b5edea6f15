//! Every element type that ggml has given a number, with its name and size.

use std::fmt;

/// The element type of a tensor, as ggml numbers it.
///
/// All that are in use can be named and sized, so a file that holds an unusual one can be read and the tensor refused
/// by its name; [`BlockType::is_supported`] says which can be turned into numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[allow(non_camel_case_types, reason = "the names under which everybody knows these formats")]
#[allow(missing_docs, reason = "the table below says all there is to say of each")]
#[non_exhaustive]
pub enum BlockType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
}

/// A row of the table: type, ggml's number, name, elements of a block, bytes of a block.
type Entry = (BlockType, u32, &'static str, usize, usize);

/// In order of the enum, so that a type indexes its own row.
const TABLE: [Entry; 34] = [
    (BlockType::F32, 0, "F32", 1, 4),
    (BlockType::F16, 1, "F16", 1, 2),
    (BlockType::Q4_0, 2, "Q4_0", 32, 18),
    (BlockType::Q4_1, 3, "Q4_1", 32, 20),
    (BlockType::Q5_0, 6, "Q5_0", 32, 22),
    (BlockType::Q5_1, 7, "Q5_1", 32, 24),
    (BlockType::Q8_0, 8, "Q8_0", 32, 34),
    // A scale and a sum as f16, then 32 quants.
    (BlockType::Q8_1, 9, "Q8_1", 32, 36),
    (BlockType::Q2_K, 10, "Q2_K", 256, 84),
    (BlockType::Q3_K, 11, "Q3_K", 256, 110),
    (BlockType::Q4_K, 12, "Q4_K", 256, 144),
    (BlockType::Q5_K, 13, "Q5_K", 256, 176),
    (BlockType::Q6_K, 14, "Q6_K", 256, 210),
    (BlockType::Q8_K, 15, "Q8_K", 256, 292),
    (BlockType::IQ2_XXS, 16, "IQ2_XXS", 256, 66),
    (BlockType::IQ2_XS, 17, "IQ2_XS", 256, 74),
    (BlockType::IQ3_XXS, 18, "IQ3_XXS", 256, 98),
    (BlockType::IQ1_S, 19, "IQ1_S", 256, 50),
    (BlockType::IQ4_NL, 20, "IQ4_NL", 32, 18),
    (BlockType::IQ3_S, 21, "IQ3_S", 256, 110),
    (BlockType::IQ2_S, 22, "IQ2_S", 256, 82),
    (BlockType::IQ4_XS, 23, "IQ4_XS", 256, 136),
    (BlockType::I8, 24, "I8", 1, 1),
    (BlockType::I16, 25, "I16", 1, 2),
    (BlockType::I32, 26, "I32", 1, 4),
    (BlockType::I64, 27, "I64", 1, 8),
    (BlockType::F64, 28, "F64", 1, 8),
    (BlockType::IQ1_M, 29, "IQ1_M", 256, 56),
    (BlockType::BF16, 30, "BF16", 1, 2),
    (BlockType::TQ1_0, 34, "TQ1_0", 256, 54),
    (BlockType::TQ2_0, 35, "TQ2_0", 256, 66),
    (BlockType::MXFP4, 39, "MXFP4", 32, 17),
    (BlockType::NVFP4, 40, "NVFP4", 64, 36),
    (BlockType::Q1_0, 41, "Q1_0", 128, 18),
];

/// Numbers that ggml once used and gave up; files with them exist.
const REMOVED: [(u32, &str); 8] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

impl BlockType {
    /// Every type, in ggml's order.
    pub fn all() -> impl Iterator<Item = BlockType> {
        TABLE.iter().map(|row| row.0)
    }

    /// The type with this number in a file, if ggml has one.
    pub fn from_id(id: u32) -> Option<BlockType> {
        TABLE.iter().find(|row| row.1 == id).map(|row| row.0)
    }

    /// The name of a type that ggml has withdrawn, by its number.
    pub fn removed_name(id: u32) -> Option<&'static str> {
        REMOVED.iter().find(|row| row.0 == id).map(|row| row.1)
    }

    fn row(self) -> &'static Entry {
        &TABLE[self as usize]
    }

    /// Its number in files.
    pub fn id(self) -> u32 {
        self.row().1
    }

    /// Its name, e.g. `Q4_1`.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// Elements of a block; 1 for plain numbers.
    pub fn block_len(self) -> usize {
        self.row().3
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.row().4
    }

    /// Bytes of a row of that many elements; `None` where they are no whole number of blocks, or the size is beyond
    /// what the machine can address.
    pub fn row_bytes(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_len()) {
            return None;
        }
        (elements / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether [`dequantise`](fn@super::dequantise) knows it.
    pub fn is_supported(self) -> bool {
        matches!(
            self,
            BlockType::F32
                | BlockType::F16
                | BlockType::BF16
                | BlockType::Q4_0
                | BlockType::Q4_1
                | BlockType::Q5_0
                | BlockType::Q5_1
                | BlockType::Q8_0
                | BlockType::Q2_K
                | BlockType::Q4_K
                | BlockType::Q5_K
                | BlockType::Q6_K
        ) || super::levels(self).is_some()
    }

    /// Whether its elements are plain numbers, one a block.
    pub fn is_plain(self) -> bool {
        self.block_len() == 1
    }
}

impl fmt::Display for BlockType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_indexes_its_own_row() {
        for (place, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, place, "{}", row.2);
            assert_eq!(row.0.name(), format!("{:?}", row.0));
            assert_eq!(BlockType::from_id(row.0.id()), Some(row.0));
            assert_eq!(BlockType::removed_name(row.0.id()), None);
        }
    }

    #[test]
    fn numbers_are_distinct() {
        let mut ids: Vec<u32> = TABLE.iter().map(|row| row.1).chain(REMOVED.iter().map(|row| row.0)).collect();
        ids.sort_unstable();
        let count = ids.len();
        ids.dedup();
        assert_eq!(ids.len(), count);
        assert_eq!(BlockType::from_id(4), None);
        assert_eq!(BlockType::from_id(u32::MAX), None);
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(BlockType::Q4_1.row_bytes(64), Some(40));
        assert_eq!(BlockType::Q4_1.row_bytes(63), None);
        assert_eq!(BlockType::Q6_K.row_bytes(512), Some(420));
        assert_eq!(BlockType::F64.row_bytes(usize::MAX), None);
        assert_eq!(BlockType::F32.row_bytes(0), Some(0));
    }
}
