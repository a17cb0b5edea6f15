//! A map from token text to token id that borrows its keys from the vocabulary's one string, so that a vocabulary of
//! a quarter million entries costs two allocations and loads in milliseconds.

/// Marks a slot without an entry.
const EMPTY: u32 = u32::MAX;

/// Most slots in a row that are looked at. Half of the slots are free, so that among millions of texts rows of some ninety are to be
/// expected; in a longer one somebody has put texts with equal hashes, so that every look-up takes long.
const ROW_MAX: usize = 1000;

/// Open addressing with linear probing over token ids. At most half of the slots are taken.
#[derive(Debug)]
pub(crate) struct TextIndex {
    slots: Vec<u32>,
    mask: usize,
}

impl TextIndex {
    /// Indexes the ids `0..count`, whose texts `text_of` gives. Of ids with equal text the lowest is found.
    ///
    /// `count` must be below `u32::MAX`. None if the texts are chosen so that looking them up would take long.
    pub(crate) fn build<'a>(count: u32, text_of: impl Fn(u32) -> &'a str) -> Option<Self> {
        let capacity = (count as usize * 2).next_power_of_two().max(8);
        let mut slots = vec![EMPTY; capacity];
        let mask = capacity - 1;
        for id in 0..count {
            let text = text_of(id);
            let mut at = hash(text.as_bytes()) as usize & mask;
            let mut row = 0;
            while slots[at] != EMPTY && text_of(slots[at]) != text {
                at = (at + 1) & mask;
                row += 1;
                if row > ROW_MAX {
                    return None;
                }
            }
            if slots[at] == EMPTY {
                slots[at] = id;
            }
        }
        let longest_row = slots.split(|&slot| slot == EMPTY).map(<[u32]>::len).max().unwrap_or(0);
        (longest_row <= ROW_MAX).then_some(Self { slots, mask })
    }

    /// The lowest id with this text.
    pub(crate) fn find<'a>(&self, text: &str, text_of: impl Fn(u32) -> &'a str) -> Option<u32> {
        let mut at = hash(text.as_bytes()) as usize & self.mask;
        loop {
            match self.slots[at] {
                EMPTY => return None,
                id if text_of(id) == text => return Some(id),
                _ => at = (at + 1) & self.mask,
            }
        }
    }
}

/// FNV-1a, with a final mix because the low bits choose the slot. Its keys come from the model file, so that nobody
/// who sends text can make it degenerate; a file that tries is refused.
fn hash(bytes: &[u8]) -> u64 {
    let mut state = 0xcbf2_9ce4_8422_2325_u64;
    for &byte in bytes {
        state = (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    state ^ (state >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_each_text_and_nothing_else() {
        let texts: Vec<String> = (0..1000).map(|n| format!("t{n}")).collect();
        let index = TextIndex::build(1000, |id| &texts[id as usize]).unwrap();
        for (id, text) in texts.iter().enumerate() {
            assert_eq!(index.find(text, |id| &texts[id as usize]), Some(id as u32));
        }
        assert_eq!(index.find("t1000", |id| &texts[id as usize]), None);
        assert_eq!(index.find("", |id| &texts[id as usize]), None);
    }

    #[test]
    fn equal_texts_give_the_lowest_id() {
        let texts = ["a", "b", "a"];
        let index = TextIndex::build(3, |id| texts[id as usize]).unwrap();
        assert_eq!(index.find("a", |id| texts[id as usize]), Some(0));
    }

    #[test]
    fn an_empty_index_finds_nothing() {
        assert_eq!(TextIndex::build(0, |_| "").unwrap().find("x", |_| ""), None);
    }

    #[test]
    fn texts_with_equal_hashes_are_refused() {
        // Texts whose place in a table of 8192 slots is one of the first two, and texts that fill one slot after the other.
        let place = |text: &String| hash(text.as_bytes()) as usize & 8191;
        let numbered = || (0_u64..).map(|n| format!("{n:x}"));
        let equal: Vec<String> = numbered().filter(|text| place(text) < 2).take(2100).collect();
        assert!(TextIndex::build(2100, |id| &equal[id as usize]).is_none());
        let mut row: Vec<Option<String>> = vec![None; 2100];
        let mut missing = row.len();
        for text in numbered() {
            if let Some(slot @ None) = row.get_mut(place(&text)) {
                *slot = Some(text);
                missing -= 1;
            }
            if missing == 0 {
                break;
            }
        }
        assert!(TextIndex::build(2100, |id| row[id as usize].as_deref().unwrap()).is_none());
        let any: Vec<String> = numbered().take(100_000).collect();
        assert!(TextIndex::build(100_000, |id| &any[id as usize]).is_some());
    }
}
