//! What does not work at the moment, for people.

/// The most troubles of one kind that are told at a time.
pub const TROUBLES_MAX: usize = 64;

/// Something that keeps a node from finding others, or others from finding it, for as long as it does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Trouble {
    /// What it is about, e.g. `mDNS` or `peer 10.0.0.7:4100`. There is at most one trouble about a thing.
    pub about: String,
    /// What happened.
    pub what: String,
    /// What to do.
    pub help: String,
}
