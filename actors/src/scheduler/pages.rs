//! KV pages as the scheduler counts them, and the prefixes that are kept in them.
//!
//! Every stage makes the same of its pages, because it is told the same changes in the same order; so the scheduler needs no word of
//! theirs to know which pages are free, which ones several sequences share, and what is in them. A page that is full is known by a
//! hash over its tokens and all before them. When a sequence ends, its full pages are kept as a *prefix*, which costs nothing that
//! anybody misses: as soon as a page is needed, the prefix that was used longest ago is cut back from its end.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::stage::message::{Change, KEPT_MAX, Open, Shared};

/// Prefixes that are kept at once. When one is replaced or cut, both are there for a moment.
const PREFIXES_MAX: usize = KEPT_MAX - 1;

/// What a full page holds: a hash over its tokens and those before them.
pub(super) type Chain = [u8; 32];

/// The chain that goes on from `before` with the tokens of a page.
pub(super) fn chain(before: Option<&Chain>, tokens: &[u32]) -> Chain {
    let mut hasher = blake3::Hasher::new();
    hasher.update(before.unwrap_or(&[0; 32]));
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// How many hold a page.
#[derive(Debug, Clone, Copy, Default)]
struct Page {
    running: u32,
    kept: u32,
}

/// A running sequence or a prefix.
#[derive(Debug, Default)]
struct Holder {
    pages: Vec<u32>,
    /// What is in the first of them, as far as it is known to be there.
    chains: Vec<Chain>,
    /// Of prefixes: when it was used last.
    kept: Option<u64>,
}

/// Pages that a new sequence can begin with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// Who holds them.
    from: u32,
    /// How many.
    pub(super) pages: usize,
}

/// The pages of a pipeline.
#[derive(Debug)]
pub(super) struct Pages {
    page_tokens: usize,
    /// Whether prefixes are kept and pages are shared.
    sharing: bool,
    pages: Vec<Page>,
    free: Vec<u32>,
    /// Pages that running sequences hold.
    held: usize,
    /// By number. Prefixes have numbers from `first_prefix` on.
    holders: BTreeMap<u32, Holder>,
    first_prefix: u32,
    kept: usize,
    /// Who holds what.
    known: HashMap<Chain, BTreeSet<u32>>,
    clock: u64,
    changes: Vec<Change>,
}

impl Pages {
    /// So many free pages, for at most `sequences_max` running sequences with numbers from zero on.
    pub(super) fn new(pages: usize, page_tokens: usize, sequences_max: usize, sharing: bool) -> Self {
        let count = u32::try_from(pages).unwrap_or(u32::MAX);
        Self {
            page_tokens,
            sharing,
            pages: vec![Page::default(); count as usize],
            free: (0..count).rev().collect(),
            held: 0,
            holders: BTreeMap::new(),
            first_prefix: u32::try_from(sequences_max).unwrap_or(u32::MAX - KEPT_MAX as u32),
            kept: 0,
            known: HashMap::new(),
            clock: 0,
            changes: Vec::new(),
        }
    }

    /// Pages that are free, or will be as soon as they are needed.
    pub(super) fn available(&self) -> usize {
        self.pages.len() - self.held
    }

    /// Pages in which nothing is kept.
    pub(super) fn empty(&self) -> usize {
        self.free.len()
    }

    /// Pages of a running sequence.
    pub(super) fn of(&self, number: u32) -> usize {
        self.holders.get(&number).map_or(0, |holder| holder.pages.len())
    }

    /// What happened since it was asked last, for the stages.
    pub(super) fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// The most of a sequence with these full pages that is there already.
    pub(super) fn find(&self, chains: &[Chain]) -> Option<Found> {
        if !self.sharing {
            return None;
        }
        let holder = |chain: &Chain| self.known.get(chain)?.first().copied();
        // Who holds a page holds all before it.
        let there = chains.iter().map_while(holder);
        there.enumerate().last().map(|(index, from)| Found { from, pages: index + 1 })
    }

    /// How many pages fewer are available when a sequence begins with these.
    pub(super) fn cost(&self, found: Found) -> usize {
        let pages = self.holders.get(&found.from).map_or(&[][..], |holder| &holder.pages[..found.pages]);
        pages.iter().filter(|page| self.pages[**page as usize].running == 0).count()
    }

    /// A sequence begins, perhaps with pages that were found.
    pub(super) fn open(&mut self, open: Open, found: Option<Found>) {
        let number = open.sequence;
        let mut holder = Holder::default();
        if let Some((found, source)) = found.and_then(|found| Some((found, self.holders.get_mut(&found.from)?))) {
            holder.pages = source.pages[..found.pages].to_vec();
            holder.chains = source.chains[..found.pages].to_vec();
            if let Some(used) = &mut source.kept {
                self.clock += 1;
                *used = self.clock;
            }
        }
        holder.pages.iter().for_each(|page| {
            let page = &mut self.pages[*page as usize];
            self.held += usize::from(page.running == 0);
            page.running += 1;
        });
        let shared = found.map(|found| Shared { from: found.from, tokens: self.tokens(found.pages) });
        self.changes.push(Change::Open(Open { shared, ..open }));
        self.insert(number, holder);
    }

    fn tokens(&self, pages: usize) -> u32 {
        u32::try_from(pages * self.page_tokens).unwrap_or(u32::MAX)
    }

    fn insert(&mut self, number: u32, holder: Holder) {
        for chain in &holder.chains {
            self.known.entry(*chain).or_default().insert(number);
        }
        self.holders.insert(number, holder);
    }

    /// Gives a running sequence pages for so many tokens. There must be enough that are [`available`](Self::available).
    pub(super) fn grow(&mut self, number: u32, tokens: usize) {
        let missing = tokens.div_ceil(self.page_tokens).saturating_sub(self.of(number));
        self.evict(missing);
        let at = self.free.len().saturating_sub(missing);
        let taken = self.free.split_off(at);
        let Some(holder) = self.holders.get_mut(&number) else { return };
        for page in taken.into_iter().rev() {
            self.pages[page as usize].running = 1;
            self.held += 1;
            holder.pages.push(page);
        }
    }

    /// A running sequence's first pages hold this. Only what earlier steps have run may be told.
    pub(super) fn note(&mut self, number: u32, chains: &[Chain]) {
        let Some(holder) = self.holders.get_mut(&number).filter(|_| self.sharing) else { return };
        for chain in chains.iter().skip(holder.chains.len()) {
            self.known.entry(*chain).or_default().insert(number);
            holder.chains.push(*chain);
        }
    }

    /// A running sequence ends. What is known of its pages is kept.
    pub(super) fn close(&mut self, number: u32) {
        self.keep(number);
        let Some(holder) = self.remove(number) else { return };
        for page in holder.pages.into_iter().rev() {
            let held = &mut self.pages[page as usize];
            held.running -= 1;
            if held.running == 0 {
                self.held -= 1;
                if held.kept == 0 {
                    self.free.push(page);
                }
            }
        }
    }

    /// Forgets who holds what, and tells the stages.
    fn remove(&mut self, number: u32) -> Option<Holder> {
        let holder = self.holders.remove(&number)?;
        for chain in &holder.chains {
            if let Some(holders) = self.known.get_mut(chain) {
                holders.remove(&number);
                if holders.is_empty() {
                    self.known.remove(chain);
                }
            }
        }
        self.changes.push(Change::Free(number));
        Some(holder)
    }

    fn keep(&mut self, number: u32) {
        let Some(holder) = self.holders.get(&number) else { return };
        let (chains, pages) = (holder.chains.clone(), holder.pages[..holder.chains.len()].to_vec());
        let Some(last) = chains.last() else { return };
        self.clock += 1;
        let prefixes = self.known.get(last).into_iter().flatten().copied().filter(|other| *other >= self.first_prefix);
        if let Some(same) = prefixes.min() {
            // There is one that goes as far, or farther.
            if let Some(same) = self.holders.get_mut(&same) {
                same.kept = Some(self.clock);
            }
            return;
        }
        // Prefixes that this one goes on from add nothing to it.
        let begins = |holder: &Holder| holder.kept.is_some() && holder.chains.last() == chains.get(holder.chains.len().wrapping_sub(1));
        let covered: Vec<u32> =
            self.holders.range(self.first_prefix..).filter(|(_, holder)| begins(holder)).map(|(number, _)| *number).collect();
        while self.kept >= PREFIXES_MAX {
            let Some(oldest) = self.oldest() else { return };
            self.drop_prefix(oldest);
        }
        self.add_prefix(number, Holder { pages, chains, kept: Some(self.clock) });
        covered.into_iter().for_each(|covered| self.drop_prefix(covered));
    }

    /// Keeps the first pages of `from`.
    fn add_prefix(&mut self, from: u32, holder: Holder) {
        let free = (self.first_prefix..=u32::MAX).find(|number| !self.holders.contains_key(number));
        let Some(prefix) = free else { return };
        holder.pages.iter().for_each(|page| self.pages[*page as usize].kept += 1);
        let shared = Shared { from, tokens: self.tokens(holder.pages.len()) };
        self.changes.push(Change::Keep { shared, prefix });
        self.kept += 1;
        self.insert(prefix, holder);
    }

    /// The prefix that was used longest ago.
    fn oldest(&self) -> Option<u32> {
        self.holders.range(self.first_prefix..).min_by_key(|(_, holder)| holder.kept).map(|(number, _)| *number)
    }

    fn drop_prefix(&mut self, number: u32) {
        let Some(holder) = self.remove(number) else { return };
        self.kept -= 1;
        for page in holder.pages.into_iter().rev() {
            let held = &mut self.pages[page as usize];
            held.kept -= 1;
            if held.kept == 0 && held.running == 0 {
                self.free.push(page);
            }
        }
    }

    /// Cuts prefixes back until so many pages are free.
    fn evict(&mut self, wanted: usize) {
        while self.free.len() < wanted {
            let Some(oldest) = self.oldest() else { return };
            let Some(holder) = self.holders.get(&oldest) else { return };
            let (mut left, mut missing) = (holder.pages.len(), wanted - self.free.len());
            while left > 0 && missing > 0 {
                left -= 1;
                let Page { running, kept } = self.pages[holder.pages[left] as usize];
                missing -= usize::from(running == 0 && kept == 1);
            }
            if left > 0 {
                let (pages, chains) = (holder.pages[..left].to_vec(), holder.chains[..left].to_vec());
                let kept = holder.kept;
                self.add_prefix(oldest, Holder { pages, chains, kept });
            }
            self.drop_prefix(oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_engine::sampler::SamplingParams;

    use super::*;

    const PAGE: usize = 4;

    fn chains(tokens: &[u32]) -> Vec<Chain> {
        tokens.chunks_exact(PAGE).fold(Vec::new(), |mut chains, page| {
            let next = chain(chains.last(), page);
            chains.push(next);
            chains
        })
    }

    fn open(pages: &mut Pages, sequence: u32, tokens: &[u32]) -> usize {
        let found = pages.find(&chains(tokens));
        pages.open(Open { sequence, prompt_tokens: 1, sampling: SamplingParams::default(), shared: None }, found);
        pages.grow(sequence, tokens.len());
        found.map_or(0, |found| found.pages)
    }

    fn run(pages: &mut Pages, sequence: u32, tokens: &[u32]) -> usize {
        let found = open(pages, sequence, tokens);
        pages.note(sequence, &chains(tokens));
        pages.close(sequence);
        found
    }

    #[test]
    fn a_chain_tells_pages_apart_by_all_that_came_before() {
        let (a, b) = (chains(&[1, 2, 3, 4, 5, 6, 7, 8]), chains(&[9, 2, 3, 4, 5, 6, 7, 8]));
        assert!(a[0] != b[0] && a[1] != b[1]);
        assert_eq!(chains(&[1, 2, 3, 4, 0])[..], a[..1]);
    }

    #[test]
    fn what_ended_is_found_and_its_pages_count_as_available() {
        let mut pages = Pages::new(8, PAGE, 4, true);
        let long: Vec<u32> = (0..14).collect();
        assert_eq!(run(&mut pages, 0, &long), 0);
        // Three full pages are kept, the fourth one is not.
        assert_eq!((pages.available(), pages.empty()), (8, 5));
        let fork = [&long[..9], &[50, 51, 52]].concat();
        assert_eq!(open(&mut pages, 1, &fork), 2);
        assert_eq!((pages.available(), pages.empty()), (5, 4));
        // What still runs can be shared, too, and costs nothing more.
        pages.note(1, &chains(&fork));
        let found = pages.find(&chains(&fork)).expect("is there");
        assert_eq!((found, pages.cost(found)), (Found { from: 1, pages: 3 }, 0));
        pages.close(1);
        assert_eq!((pages.available(), pages.empty()), (8, 4));
        let whole = pages.find(&chains(&long)).expect("is there");
        assert_eq!((whole.pages, pages.cost(whole)), (3, 3));
    }

    #[test]
    fn a_conversation_that_goes_on_is_kept_once() {
        let mut pages = Pages::new(8, PAGE, 4, true);
        let all: Vec<u32> = (0..20).collect();
        for (turn, expected) in [(9, 0), (17, 2), (17, 4), (20, 4)] {
            assert_eq!(run(&mut pages, 0, &all[..turn]), expected);
            assert_eq!(pages.kept, 1);
        }
        assert_eq!((pages.available(), pages.empty()), (8, 3));
    }

    #[test]
    fn the_prefix_that_was_used_longest_ago_is_cut_from_its_end() {
        let mut pages = Pages::new(8, PAGE, 4, true);
        let prompt = |first: u32| (first..first + 16).collect::<Vec<u32>>();
        run(&mut pages, 0, &prompt(0));
        run(&mut pages, 0, &prompt(100));
        assert_eq!(pages.empty(), 0);
        // The first one is used again, so the second one is the older one.
        run(&mut pages, 0, &prompt(0));
        pages.take_changes();
        open(&mut pages, 1, &(200..208).collect::<Vec<u32>>());
        let found = |pages: &Pages, first| pages.find(&chains(&prompt(first))).map_or(0, |found| found.pages);
        assert_eq!((found(&pages, 0), found(&pages, 100)), (4, 2));
        let changes = pages.take_changes();
        assert!(matches!(changes[1..], [Change::Keep { shared: Shared { tokens: 8, .. }, .. }, Change::Free(_)]), "{changes:?}");
        open(&mut pages, 2, &(300..320).collect::<Vec<u32>>());
        assert_eq!((found(&pages, 0), found(&pages, 100), pages.available()), (1, 0, 1));
        [1, 2].into_iter().for_each(|number| pages.close(number));
        assert_eq!(pages.available(), 8);
    }

    #[test]
    fn only_so_many_prefixes_are_kept() {
        let mut pages = Pages::new(2 * KEPT_MAX, PAGE, 4, true);
        for first in 0..KEPT_MAX as u32 + 5 {
            run(&mut pages, 0, &[first, 1, 2, 3, 4]);
        }
        assert_eq!((pages.kept, pages.holders.len(), pages.known.len()), (PREFIXES_MAX, PREFIXES_MAX, PREFIXES_MAX));
        assert_eq!(pages.find(&chains(&[0, 1, 2, 3])), None);
        let mut without = Pages::new(8, PAGE, 4, false);
        assert_eq!((run(&mut without, 0, &[1; 8]), run(&mut without, 0, &[1; 8]), without.empty()), (0, 0, 8));
    }
}
