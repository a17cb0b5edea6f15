//! What is left of many measurements.

/// Of values in ascending order the least one that so many in a hundred do not exceed (the nearest rank); none if there are none.
pub(crate) fn percentile<T>(sorted: &[T], percent: usize) -> Option<&T> {
    sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_value_that_was_measured() {
        let values: Vec<u32> = (1..=20).collect();
        assert_eq!([1, 50, 51, 95, 100].map(|percent| percentile(&values, percent)), [&1, &10, &11, &19, &20].map(Some));
        assert_eq!((percentile(&values[..1], 95), percentile::<u32>(&[], 50)), (Some(&1), None));
    }
}
