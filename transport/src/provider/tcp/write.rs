//! Putting records into the byte streams of a link: how much of a record the system has taken, and what is still owed to it.

use std::io::IoSlice;
use std::ops::Range;

use super::record::{PIECE_BYTES, PREFIX_BYTES};
use super::seal::{Seal, TAG_BYTES};

/// A record this short may be left half-written for the next sender to finish.
pub(super) const TAIL_BYTES: usize = 256;

/// A record this short is put together before it is written: the system takes one piece much faster than several.
pub(super) const FLAT_BYTES: usize = 4096;

/// Parts of a message that go into one system call.
pub(super) const PARTS_AT_ONCE: usize = 16;

/// The sending half of a link.
pub(super) struct Writer {
    /// The end of a short record that the system did not take yet. It is the first rail's.
    pub(super) tail: Tail,
    /// The keys of the rails; empty if the link is not sealed.
    pub(super) seals: Vec<Seal>,
    /// Where a piece is sealed: prefix, piece, tag; or where a short record is put together. Nothing is allocated for a message.
    pub(super) scratch: Box<[u8]>,
}

impl Writer {
    pub(super) fn new(seals: Vec<Seal>) -> Self {
        let scratch = if seals.is_empty() { FLAT_BYTES } else { PREFIX_BYTES + PIECE_BYTES + TAG_BYTES };
        Self { tail: Tail { bytes: [0; TAIL_BYTES], start: 0, end: 0 }, seals, scratch: vec![0; scratch].into_boxed_slice() }
    }
}

/// Bytes that are owed to the socket before anything else.
pub(super) struct Tail {
    bytes: [u8; TAIL_BYTES],
    start: usize,
    end: usize,
}

impl Tail {
    pub(super) fn owed(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// The system has taken so many.
    pub(super) fn taken(&mut self, bytes: usize) {
        self.start = self.end.min(self.start + bytes);
    }

    /// Leaves the rest of a record for the next sender; it is at most [`TAIL_BYTES`] long, and nothing else is owed.
    pub(super) fn keep<'a>(&mut self, rest: impl Iterator<Item = &'a [u8]>) {
        self.start = 0;
        self.end = 0;
        for part in rest {
            self.bytes[self.end..self.end + part.len()].copy_from_slice(part);
            self.end += part.len();
        }
    }
}

/// What is still to be written of a stretch of a message.
pub(super) struct Outgoing<'a> {
    /// Goes before the parts.
    head: &'a [u8],
    parts: &'a [&'a [u8]],
    /// Where of the parts together.
    place: Range<usize>,
    done: usize,
}

impl<'a> Outgoing<'a> {
    pub(super) fn new(head: &'a [u8], parts: &'a [&'a [u8]], place: Range<usize>) -> Self {
        Self { head, parts, place, done: 0 }
    }

    /// Bytes in all.
    pub(super) fn bytes(&self) -> usize {
        self.head.len() + self.place.len()
    }

    /// Whether the system has taken any of it.
    pub(super) fn has_begun(&self) -> bool {
        self.done > 0
    }

    pub(super) fn is_done(&self) -> bool {
        self.done >= self.bytes()
    }

    /// The system has taken so many bytes more.
    pub(super) fn taken(&mut self, bytes: usize) {
        self.done += bytes;
    }

    /// What is left, without empty parts.
    pub(super) fn rest(&self) -> impl Iterator<Item = &'a [u8]> {
        let head = &self.head[self.done.min(self.head.len())..];
        let after_head = self.done.saturating_sub(self.head.len());
        let stretch = stretch(self.parts, self.place.start + after_head..self.place.end);
        std::iter::once(head).chain(stretch).filter(|part| !part.is_empty())
    }

    /// What goes into the next system call, and how many slices that are.
    pub(super) fn slices(&self) -> ([IoSlice<'a>; PARTS_AT_ONCE], usize) {
        let mut slices = [IoSlice::new(&[]); PARTS_AT_ONCE];
        let mut count = 0;
        for part in self.rest().take(PARTS_AT_ONCE) {
            slices[count] = IoSlice::new(part);
            count += 1;
        }
        (slices, count)
    }
}

/// A stretch of what `parts` are together, as slices of them.
pub(super) fn stretch<'a>(parts: &'a [&'a [u8]], place: Range<usize>) -> impl Iterator<Item = &'a [u8]> {
    parts.iter().scan(0, move |before, part| {
        let from = place.start.saturating_sub(*before).min(part.len());
        let to = place.end.saturating_sub(*before).min(part.len());
        *before += part.len();
        Some(part.get(from..to).unwrap_or(&[]))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// However little the system takes at a time, it is given every byte once.
        #[test]
        fn every_byte_goes_out_once(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..30), head in prop::collection::vec(any::<u8>(), 0..9),
            from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>(), steps in prop::collection::vec(1usize..40, 1..20),
        ) {
            let whole: Vec<u8> = parts.concat();
            let (from, to) = (from.index(whole.len() + 1), to.index(whole.len() + 1));
            let place = from.min(to)..from.max(to);
            let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
            let mut outgoing = Outgoing::new(&head, &parts, place.clone());
            let mut written = Vec::new();
            for step in steps.iter().cycle() {
                if outgoing.is_done() {
                    break;
                }
                let (slices, count) = outgoing.slices();
                let given: Vec<u8> = slices[..count].iter().flat_map(|slice| slice.to_vec()).collect();
                prop_assert!(!given.is_empty());
                let taken = given.len().min(*step);
                written.extend_from_slice(&given[..taken]);
                outgoing.taken(taken);
            }
            prop_assert_eq!(written, [&head[..], &whole[place]].concat());
        }
    }
}
