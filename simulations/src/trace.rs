//! What happened in a run: a hash over everything, and the last words for people.

use std::collections::VecDeque;

/// Lines that are kept for people.
const RECENT_MAX: usize = 400;

/// The story of a run. Two runs with the same hash went through the same events in the same order, byte for byte.
#[derive(Debug)]
pub(crate) struct Trace {
    hasher: blake3::Hasher,
    events: u64,
    recent: VecDeque<String>,
}

impl Trace {
    pub(crate) fn new(seed: u64) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("shoal simulation trace v1");
        hasher.update(&seed.to_le_bytes());
        Self { hasher, events: 0, recent: VecDeque::new() }
    }

    /// One event was taken from the queue.
    pub(crate) fn event(&mut self, at: u64) {
        self.events += 1;
        self.hasher.update(&at.to_le_bytes());
    }

    /// What the event was: a tag, the nodes it is about, its content.
    pub(crate) fn detail(&mut self, tag: u8, from: u16, to: u16, content: &[u8]) {
        let mut head = [tag, 0, 0, 0, 0, 0, 0, 0, 0];
        head[1..3].copy_from_slice(&from.to_le_bytes());
        head[3..5].copy_from_slice(&to.to_le_bytes());
        head[5..].copy_from_slice(&u32::try_from(content.len()).unwrap_or(u32::MAX).to_le_bytes());
        self.hasher.update(&head).update(content);
    }

    /// Something that people want to read if the run fails.
    pub(crate) fn note(&mut self, at: u64, text: &str) {
        self.detail(0xff, 0, 0, text.as_bytes());
        if self.recent.len() >= RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(format!("{:>12.6} {text}", at as f64 / 1e9));
    }

    pub(crate) fn events(&self) -> u64 {
        self.events
    }

    pub(crate) fn hash(&self) -> blake3::Hash {
        self.hasher.finalize()
    }

    pub(crate) fn recent(&self) -> Vec<String> {
        self.recent.iter().cloned().collect()
    }
}
