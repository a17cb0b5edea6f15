//! The largest of many numbers, in a total order: larger first, and of equal ones the lower id.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// A token with its logit; the worse one is the greater, so that a heap shows its worst.
#[derive(Debug, Clone, Copy)]
struct Entry {
    logit: f32,
    id: u32,
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Entry {}

/// The ids of the `count` largest `logits`, the largest first, into `out`. No logit may be NaN or −0.
pub(crate) fn largest(logits: &[f32], count: usize, out: &mut Vec<u32>) {
    out.clear();
    let count = count.min(logits.len());
    let entry = |id: usize| Entry { logit: logits[id], id: id as u32 };
    if count == 0 {
        return;
    }
    if count * 16 > logits.len() {
        let mut entries: Vec<Entry> = (0..logits.len()).map(entry).collect();
        if count < entries.len() {
            entries.select_nth_unstable(count - 1);
            entries.truncate(count);
        }
        entries.sort_unstable();
        out.extend(entries.iter().map(|entry| entry.id));
        return;
    }
    let mut heap: BinaryHeap<Entry> = (0..count).map(entry).collect();
    let mut worst = heap.peek().map_or(f32::NEG_INFINITY, |entry| entry.logit);
    for (id, &logit) in logits.iter().enumerate().skip(count) {
        // An equal logit with a higher id is worse.
        if logit > worst {
            heap.pop();
            heap.push(entry(id));
            worst = heap.peek().map_or(worst, |entry| entry.logit);
        }
    }
    out.extend(heap.into_sorted_vec().iter().map(|entry| entry.id));
}

/// The id of the largest logit, the lowest of equal ones.
pub(crate) fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (id, &logit) in logits.iter().enumerate() {
        if best.is_none_or(|(_, top)| logit > top) {
            best = Some((id as u32, logit));
        }
    }
    best.map(|(id, _)| id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ties_go_to_the_lowest_id() {
        let logits = [1.0, 3.0, 3.0, 2.0, 3.0];
        assert_eq!(argmax(&logits), Some(1));
        let mut out = Vec::new();
        largest(&logits, 3, &mut out);
        assert_eq!(out, [1, 2, 4]);
        assert_eq!(argmax(&[]), None);
    }

    proptest! {
        /// Small whole numbers make ties; both ways of selecting must agree with sorting.
        #[test]
        fn equals_a_full_sort(values in proptest::collection::vec(0_u8..20, 1..400), count in 0_usize..40) {
            let logits: Vec<f32> = values.iter().map(|&v| f32::from(v)).collect();
            let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
            ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
            ids.truncate(count);
            let mut out = Vec::new();
            largest(&logits, count, &mut out);
            prop_assert_eq!(&out, &ids);
            if count > 0 {
                prop_assert_eq!(argmax(&logits), Some(ids[0]));
            }
        }
    }
}
