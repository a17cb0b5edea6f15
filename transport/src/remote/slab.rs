//! Memory that several leases and several threads share.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use crate::region::{Region, RegionError, Slot};

/// Each stripe has a lock of its own, so operations on different leases seldom meet.
const STRIPE_BYTES: usize = 1024 * 1024;

/// A slab of zeroed memory that is read and written by copying. Cheap to clone.
///
/// Any number of threads may use it. What one call copies within one mebibyte-aligned stripe is seen whole or not at all
/// by others; across stripes, concurrent calls may interleave.
#[derive(Clone)]
pub struct Slab(Arc<Stripes>);

struct Stripes {
    bytes: u64,
    stripes: Vec<RwLock<Slot>>,
}

impl Slab {
    /// A slab of `bytes`, taken from the machine page by page as it is first touched.
    ///
    /// # Errors
    /// [`RegionError`].
    pub fn new(bytes: u64) -> Result<Self, RegionError> {
        let size = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0);
        let size = size.ok_or(RegionError::Size { count: 1, bytes: usize::try_from(bytes).unwrap_or(usize::MAX) })?;
        let count = size.div_ceil(STRIPE_BYTES);
        let whole = count.checked_mul(STRIPE_BYTES).ok_or(RegionError::Size { count, bytes: STRIPE_BYTES })?;
        let stripes = Region::new(whole)?.carve(count, STRIPE_BYTES).into_iter().map(RwLock::new).collect();
        Ok(Self(Arc::new(Stripes { bytes, stripes })))
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }

    /// Copies out of the slab; `false`, and nothing copied, if that reaches past its end.
    #[must_use]
    pub fn read(&self, start: u64, into: &mut [u8]) -> bool {
        self.pieces(start, into.len(), |stripe, at, done, count| {
            let stripe = stripe.read().unwrap_or_else(PoisonError::into_inner);
            into[done..done + count].copy_from_slice(&stripe.as_slice()[at..at + count]);
        })
    }

    /// Copies into the slab; `false`, and nothing copied, if that reaches past its end.
    #[must_use]
    pub fn write(&self, start: u64, from: &[u8]) -> bool {
        self.pieces(start, from.len(), |stripe, at, done, count| {
            let mut stripe = stripe.write().unwrap_or_else(PoisonError::into_inner);
            stripe.as_mut_slice()[at..at + count].copy_from_slice(&from[done..done + count]);
        })
    }

    /// Zeroes a range, so that the next holder of a lease does not read what the last one wrote; `false`, and nothing
    /// done, if that reaches past the end.
    #[must_use]
    pub fn zero(&self, start: u64, bytes: u64) -> bool {
        let Ok(bytes) = usize::try_from(bytes) else { return false };
        self.pieces(start, bytes, |stripe, at, _, count| {
            stripe.write().unwrap_or_else(PoisonError::into_inner).as_mut_slice()[at..at + count].fill(0);
        })
    }

    /// Calls `each` with every stripe that a range touches: the place in it, the bytes done before, and how many.
    fn pieces(&self, start: u64, bytes: usize, mut each: impl FnMut(&RwLock<Slot>, usize, usize, usize)) -> bool {
        let end = u64::try_from(bytes).ok().and_then(|bytes| start.checked_add(bytes));
        if end.is_none_or(|end| end > self.0.bytes) {
            return false;
        }
        // The slab's length came from a usize, and the range lies inside.
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        let mut done = 0;
        while done < bytes {
            let at = (start + done) % STRIPE_BYTES;
            let count = (STRIPE_BYTES - at).min(bytes - done);
            each(&self.0.stripes[(start + done) / STRIPE_BYTES], at, done, count);
            done += count;
        }
        true
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slab").field("bytes", &self.0.bytes).finish()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn absurd_sizes_are_refused() {
        assert!(Slab::new(0).is_err());
        assert!(Slab::new(u64::MAX).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_slab_is_one_run_of_bytes(
            bytes in 1u64..3_000_000,
            writes in prop::collection::vec((0u64..3_200_000, 0usize..1_500_000, any::<u8>(), any::<bool>()), 0..8),
        ) {
            let slab = Slab::new(bytes).unwrap();
            let mut model = vec![0u8; bytes as usize];
            for (start, count, value, zero) in writes {
                let inside = start + count as u64 <= bytes;
                let done = if zero { slab.zero(start, count as u64) } else { slab.write(start, &vec![value; count]) };
                prop_assert_eq!(done, inside);
                if inside {
                    model[start as usize..start as usize + count].fill(if zero { 0 } else { value });
                }
            }
            let mut all = vec![1; bytes as usize];
            prop_assert!(slab.read(0, &mut all));
            prop_assert!(all == model);
            prop_assert!(!slab.read(1, &mut all));
        }
    }
}
