//! Which pages belong to which sequence. Knows nothing of what is in them.
//!
//! Sequences that begin alike may share the pages of what they have in common: whole ones, which nobody writes to any more. A page
//! is free when the last sequence that holds it has given it back.

use std::collections::{BTreeMap, HashMap};

use super::{Row, SequenceId, StepError};
use crate::kernels::{Batch, PAGE_TOKENS};

/// A sequence's pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Held {
    /// In order of position.
    pages: Vec<u32>,
    /// Positions that are cached.
    tokens: usize,
}

/// What the rows of one sequence will do.
#[derive(Debug, Clone, PartialEq, Eq)]
struct PlannedRun {
    sequence: SequenceId,
    /// Places in the step.
    rows: Vec<usize>,
    /// Position of the first.
    start: usize,
}

/// A step that was checked and will fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan(Vec<PlannedRun>);

/// The page tables of a stage: one table serves all its layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PageBook {
    /// How many sequences hold each page.
    holders: Vec<u32>,
    /// Taken from the end.
    free: Vec<u32>,
    sequences: BTreeMap<SequenceId, Held>,
}

fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

impl PageBook {
    /// A book of `total` free pages.
    pub(super) fn new(total: u32) -> Self {
        Self { holders: vec![0; total as usize], free: (0..total).rev().collect(), sequences: BTreeMap::new() }
    }

    /// Pages in all, and pages that are free.
    pub(super) fn pages(&self) -> (usize, usize) {
        (self.holders.len(), self.free.len())
    }

    fn is_shared(&self, page: u32) -> bool {
        self.holders.get(page as usize).is_some_and(|holders| *holders > 1)
    }

    fn give_back(&mut self, page: u32) {
        let Some(holders) = self.holders.get_mut(page as usize) else { return };
        *holders = holders.saturating_sub(1);
        if *holders == 0 {
            self.free.push(page);
        }
    }

    /// Checks that rows continue their sequences, stay below `context` positions, and find pages. Changes nothing.
    pub(super) fn plan(&self, rows: &[Row], context: usize) -> Result<Plan, StepError> {
        let mut runs: Vec<PlannedRun> = Vec::new();
        let mut known: HashMap<SequenceId, usize> = HashMap::new();
        for (place, row) in rows.iter().enumerate() {
            let SequenceId(sequence) = row.sequence;
            let position = row.position as usize;
            if position >= context {
                return Err(StepError::Malformed(format!(
                    "row {place} of sequence {sequence} is at position {position}, but the context ends after {context} tokens"
                )));
            }
            match known.get(&row.sequence) {
                None => {
                    let cached = self.sequences.get(&row.sequence).map_or(0, |held| held.tokens);
                    if position > cached {
                        return Err(StepError::Malformed(format!(
                            "row {place} of sequence {sequence} is at position {position}, but only {cached} positions are cached"
                        )));
                    }
                    let held = self.sequences.get(&row.sequence).and_then(|held| held.pages.get(position / PAGE_TOKENS));
                    if !position.is_multiple_of(PAGE_TOKENS) && held.is_some_and(|page| self.is_shared(*page)) {
                        return Err(StepError::Malformed(format!(
                            "row {place} of sequence {sequence} is at position {position}, in a page that other sequences hold, too"
                        )));
                    }
                    known.insert(row.sequence, runs.len());
                    runs.push(PlannedRun { sequence: row.sequence, rows: vec![place], start: position });
                }
                Some(&index) => {
                    let run = &mut runs[index];
                    let expected = run.start + run.rows.len();
                    if position != expected {
                        return Err(StepError::Malformed(format!(
                            "row {place} of sequence {sequence} is at position {position} and should be at {expected}, after the row before it"
                        )));
                    }
                    run.rows.push(place);
                }
            }
        }
        // What is given back by sequences that go back to an earlier position can be taken by others in the same step.
        let (mut needed, mut returned) = (0, 0);
        for run in &runs {
            let held = self.sequences.get(&run.sequence).map_or(&[][..], |held| &held.pages);
            let kept = held.len().min(pages_for(run.start));
            returned += held[kept..].iter().filter(|page| !self.is_shared(**page)).count();
            needed += pages_for(run.start + run.rows.len()) - kept;
        }
        let free = self.free.len() + returned;
        if needed > free {
            return Err(StepError::KvFull { needed, free });
        }
        Ok(Plan(runs))
    }

    /// Does what was planned, and gives the rows' places.
    pub(super) fn apply(&mut self, Plan(runs): Plan) -> Batch {
        for run in &runs {
            let held = self.sequences.entry(run.sequence).or_default();
            let kept = held.pages.len().min(pages_for(run.start));
            for page in held.pages.split_off(kept).into_iter().rev() {
                self.give_back(page);
            }
        }
        let mut batch = Batch::new();
        for run in runs {
            let held = self.sequences.entry(run.sequence).or_default();
            let end = run.start + run.rows.len();
            let missing = pages_for(end) - held.pages.len();
            let at = self.free.len().saturating_sub(missing);
            for page in self.free.drain(at..).rev() {
                if let Some(holders) = self.holders.get_mut(page as usize) {
                    *holders = 1;
                }
                held.pages.push(page);
            }
            held.tokens = end;
            batch.push(run.rows, run.start, held.pages.clone());
        }
        batch
    }

    /// Lets a new sequence begin with the first `tokens` positions of another one, in the same pages.
    pub(super) fn share(&mut self, from: SequenceId, to: SequenceId, tokens: usize) -> Result<(), StepError> {
        let malformed = |why: String| Err(StepError::Malformed(format!("sequence {} cannot begin as {} does: {why}", to.0, from.0)));
        let Some(held) = self.sequences.get(&from) else { return malformed("that is not known".to_owned()) };
        if tokens > held.tokens {
            return malformed(format!("{tokens} positions are more than the {} that are cached", held.tokens));
        }
        if tokens == 0 || !tokens.is_multiple_of(PAGE_TOKENS) {
            return malformed(format!("{tokens} positions are no whole pages"));
        }
        if self.sequences.contains_key(&to) {
            return malformed("it has begun already".to_owned());
        }
        let pages = held.pages[..pages_for(tokens)].to_vec();
        for page in &pages {
            if let Some(holders) = self.holders.get_mut(*page as usize) {
                *holders = holders.saturating_add(1);
            }
        }
        self.sequences.insert(to, Held { pages, tokens });
        Ok(())
    }

    /// Gives a sequence's pages back.
    pub(super) fn free(&mut self, sequence: SequenceId) {
        if let Some(held) = self.sequences.remove(&sequence) {
            for page in held.pages.into_iter().rev() {
                self.give_back(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rows(sequence: u32, positions: std::ops::Range<usize>) -> Vec<Row> {
        positions.map(|p| Row { sequence: SequenceId(sequence), position: p as u32, token: 0, sample: false }).collect()
    }

    fn step(book: &mut PageBook, rows: &[Row]) -> Result<Batch, StepError> {
        let before = book.clone();
        match book.plan(rows, 1000) {
            Ok(plan) => Ok(book.apply(plan)),
            Err(error) => {
                assert_eq!(before, *book);
                Err(error)
            }
        }
    }

    /// Every page is free or has as many holders as it says, and none is lost.
    fn check(book: &PageBook) {
        let mut counted = vec![0; book.holders.len()];
        book.sequences.values().flat_map(|held| &held.pages).for_each(|page| counted[*page as usize] += 1);
        assert_eq!(counted, book.holders);
        let mut free = book.free.clone();
        free.sort_unstable();
        let unheld = (0..).zip(&counted).filter(|(_, holders)| **holders == 0).map(|(page, _)| page);
        assert_eq!(free, unheld.collect::<Vec<u32>>());
        for held in book.sequences.values() {
            assert_eq!(held.pages.len(), pages_for(held.tokens));
        }
    }

    #[test]
    fn sequences_grow_fork_back_and_are_freed() {
        let mut book = PageBook::new(4);
        let batch = step(&mut book, &rows(7, 0..40)).unwrap();
        assert_eq!((batch.runs()[0].start(), batch.runs()[0].end()), (0, 40));
        assert_eq!(book.pages(), (4, 2));
        // Both in one step, interleaved.
        let mixed: Vec<Row> = rows(7, 40..42).into_iter().zip(rows(8, 0..2)).flat_map(|(a, b)| [a, b]).collect();
        let batch = step(&mut book, &mixed).unwrap();
        assert_eq!(batch.runs()[0].rows(), [0, 2]);
        assert_eq!(batch.runs()[1].rows(), [1, 3]);
        assert_eq!(batch.positions(), [40, 0, 41, 1]);
        assert_ne!(batch.runs()[0].page(41), batch.runs()[1].page(0));
        assert_eq!(book.pages(), (4, 1));
        // Back to an earlier position: the second page is not needed any more.
        step(&mut book, &rows(7, 5..6)).unwrap();
        assert_eq!(book.pages(), (4, 2));
        assert!(matches!(step(&mut book, &rows(7, 7..8)), Err(StepError::Malformed(_))));
        book.free(SequenceId(7));
        book.free(SequenceId(7));
        assert_eq!(book.pages(), (4, 3));
        check(&book);
    }

    #[test]
    fn a_full_book_refuses_and_stays_as_it_was() {
        let mut book = PageBook::new(2);
        step(&mut book, &rows(1, 0..33)).unwrap();
        assert_eq!(step(&mut book, &rows(2, 0..1)), Err(StepError::KvFull { needed: 1, free: 0 }));
        assert_eq!(step(&mut book, &rows(1, 33..97)), Err(StepError::KvFull { needed: 2, free: 0 }));
        // Going back makes room within the same step.
        let both: Vec<Row> = rows(2, 0..1).into_iter().chain(rows(1, 3..4)).collect();
        step(&mut book, &both).unwrap();
        check(&book);
        assert_eq!(book.pages(), (2, 0));
    }

    #[test]
    fn shared_pages_are_held_until_the_last_one_goes_and_never_written() {
        let mut book = PageBook::new(5);
        let first = step(&mut book, &rows(1, 0..70)).unwrap();
        book.share(SequenceId(1), SequenceId(2), 64).unwrap();
        assert_eq!(book.pages(), (5, 2));
        let second = step(&mut book, &rows(2, 64..66)).unwrap();
        let pages = |batch: &Batch| [0, 32, 64].map(|position| batch.runs()[0].page(position));
        assert_eq!(pages(&first)[..2], pages(&second)[..2]);
        assert_ne!(pages(&first)[2], pages(&second)[2]);
        // In the middle of a page that another one holds nothing can be written; at its beginning it is left to the other one.
        assert!(matches!(step(&mut book, &rows(2, 40..41)), Err(StepError::Malformed(_))));
        step(&mut book, &rows(2, 32..33)).unwrap();
        assert_eq!(book.pages(), (5, 1));
        check(&book);
        book.free(SequenceId(1));
        assert_eq!(book.pages(), (5, 3));
        // Now it is alone.
        step(&mut book, &rows(2, 5..6)).unwrap();
        book.free(SequenceId(2));
        assert_eq!(book.pages(), (5, 5));
        check(&book);
    }

    #[test]
    fn only_whole_pages_that_are_there_are_shared() {
        let mut book = PageBook::new(4);
        step(&mut book, &rows(1, 0..40)).unwrap();
        step(&mut book, &rows(2, 0..1)).unwrap();
        let before = book.clone();
        for (from, to, tokens) in [(1, 3, 64), (1, 3, 40), (1, 3, 0), (1, 2, 32), (1, 1, 32), (9, 3, 32), (3, 4, 32)] {
            assert!(matches!(book.share(SequenceId(from), SequenceId(to), tokens), Err(StepError::Malformed(_))), "{from} {to} {tokens}");
        }
        assert_eq!(book, before);
    }

    #[test]
    fn gaps_and_ends_are_refused() {
        let mut book = PageBook::new(100);
        assert!(matches!(step(&mut book, &rows(1, 1..2)), Err(StepError::Malformed(_))));
        assert!(matches!(step(&mut book, &rows(1, 0..1001)), Err(StepError::Malformed(_))));
        let gap: Vec<Row> = rows(1, 0..2).into_iter().chain(rows(1, 3..4)).collect();
        assert!(matches!(step(&mut book, &gap), Err(StepError::Malformed(_))));
        let twice: Vec<Row> = rows(1, 0..2).into_iter().chain(rows(1, 1..2)).collect();
        assert!(matches!(step(&mut book, &twice), Err(StepError::Malformed(_))));
        let far = Row { sequence: SequenceId(1), position: u32::MAX, token: 0, sample: false };
        assert!(matches!(step(&mut book, &[far]), Err(StepError::Malformed(_))));
        check(&book);
    }

    proptest! {
        #[test]
        fn pages_are_never_lost(operations in proptest::collection::vec((0..4u32, 0..120usize, 0..70usize, any::<bool>()), 1..60)) {
            let mut book = PageBook::new(9);
            for (sequence, start, count, free) in operations {
                if free && count < 10 {
                    book.free(SequenceId(sequence));
                } else if free && count < 30 {
                    let _ = book.share(SequenceId(sequence), SequenceId(count as u32 % 4), start / PAGE_TOKENS * PAGE_TOKENS);
                } else {
                    let cached = book.sequences.get(&SequenceId(sequence)).map_or(0, |held| held.tokens);
                    let start = start.min(cached);
                    if let Ok(batch) = step(&mut book, &rows(sequence, start..start + count)) {
                        for run in batch.runs() {
                            for position in 0..run.end() {
                                prop_assert!((run.page(position) as usize) < 9);
                            }
                        }
                    }
                }
                check(&book);
            }
        }
    }
}
