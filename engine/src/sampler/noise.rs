//! Chance as a function: the same seed and position give the same number wherever and whenever it is asked for, so
//! that a request that moves to another node, or is replayed, goes on as it would have.

/// A number in `[0, 1)`, uniform, for a request's seed and the position of the token in its sequence.
///
/// SplitMix64's output function (Steele, Lea and Flood, 2014) over a counter whose stride and start depend on the
/// seed; two rounds, so that neighbouring seeds and positions have nothing in common. 53 random bits.
pub fn noise(seed: u64, position: u32) -> f64 {
    let key = mix(seed ^ 0x5368_6f61_6c00_0001);
    let word = mix(mix(key.wrapping_add(u64::from(position).wrapping_mul(0x9e37_79b9_7f4a_7c15))) ^ seed);
    (word >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}

fn mix(mut word: u64) -> u64 {
    word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pinned: running clusters of mixed versions must agree.
    #[test]
    fn values_are_pinned() {
        let bits = [(0, 0), (0, 1), (1, 0), (u64::MAX, u32::MAX)].map(|(seed, position)| noise(seed, position).to_bits());
        assert_eq!(bits, [4606995699830054199, 4590717683401419424, 4598006231221613792, 4606038954962654396]);
    }

    #[test]
    fn uniform_over_positions_and_over_seeds() {
        for along_seeds in [false, true] {
            let mut bins = [0_u32; 64];
            let mut sum = 0.0;
            let mut product = 0.0;
            let mut before = 0.5;
            for n in 0..64_000_u32 {
                let value = if along_seeds { noise(u64::from(n), 7) } else { noise(42, n) };
                assert!((0.0..1.0).contains(&value));
                bins[(value * 64.0) as usize] += 1;
                sum += value;
                product += (value - 0.5) * (before - 0.5);
                before = value;
            }
            assert!((sum / 64_000.0 - 0.5).abs() < 0.01, "mean");
            assert!((product / 64_000.0).abs() < 0.002, "neighbours are not correlated");
            let chi: f64 = bins.iter().map(|&count| (f64::from(count) - 1000.0).powi(2) / 1000.0).sum();
            assert!(chi < 120.0, "chi squared over 63 degrees of freedom: {chi}");
        }
    }
}
