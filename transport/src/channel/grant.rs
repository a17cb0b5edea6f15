//! What the receiving end tells the sending end.

/// Length of an encoded [`Grant`] in bytes.
pub const GRANT_BYTES: usize = 24;

/// The state of a receiving end. Every grant says all of it, so a lost or repeated one does no harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// Every message before this sequence number has arrived whole: the sender may reuse their slots.
    pub acked: u64,
    /// Messages before this sequence number may be sent.
    pub limit: u64,
    /// Longest payload that the receiver's slots hold, in bytes.
    pub slot_bytes: u32,
}

impl Grant {
    /// Writes it: two u64, a u32 and four zero bytes, little-endian.
    pub fn encode(&self) -> [u8; GRANT_BYTES] {
        let mut out = [0; GRANT_BYTES];
        out[..8].copy_from_slice(&self.acked.to_le_bytes());
        out[8..16].copy_from_slice(&self.limit.to_le_bytes());
        out[16..20].copy_from_slice(&self.slot_bytes.to_le_bytes());
        out
    }

    /// Reads it; none if the bytes are no grant.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; GRANT_BYTES] = bytes.try_into().ok()?;
        let (first, rest) = bytes.split_first_chunk::<8>()?;
        let (second, rest) = rest.split_first_chunk::<8>()?;
        let (third, rest) = rest.split_first_chunk::<4>()?;
        let grant = Self { acked: u64::from_le_bytes(*first), limit: u64::from_le_bytes(*second), slot_bytes: u32::from_le_bytes(*third) };
        (rest == [0; 4] && grant.acked <= grant.limit).then_some(grant)
    }
}
