//! What the dialling end's machine is given, what it is told, and what it says.

use std::time::Duration;

use super::estimate::{Estimate, Sample};
use crate::env::Instant;

/// How patient and how eager a hop is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathOptions {
    /// How long a hop that had a link may be without one before it is given up.
    pub patience: Duration,
    /// How long making one link may take.
    pub dial_max: Duration,
    /// How long the accepting end may take to say yes to a link.
    pub take_max: Duration,
    /// While there is no link: after how long the next way is tried beside those that have not answered.
    pub stagger: Duration,
    /// How often each way is measured.
    pub probe_interval: Duration,
    /// How soon a way that failed is looked at again; doubled each time, up to `probe_interval`, or to six times that if
    /// it has never been there: many addresses that a peer tells lead nowhere from here.
    pub retry_interval: Duration,
    /// By how much a way must be better than the one in use to take its place, in percent of that one's cost.
    pub margin_percent: u8,
    /// For how long it must have been better.
    pub settle: Duration,
}

impl Default for PathOptions {
    /// A hop is given up a second after its last link was; a dead peer is told within three seconds of its last word.
    fn default() -> Self {
        Self {
            patience: Duration::from_secs(1),
            dial_max: Duration::from_secs(2),
            take_max: Duration::from_millis(700),
            stagger: Duration::from_millis(50),
            probe_interval: Duration::from_secs(10),
            retry_interval: Duration::from_millis(500),
            margin_percent: 25,
            settle: Duration::from_secs(3),
        }
    }
}

/// A way to the peer, before it is tried.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prospect {
    /// What it is thought to be like.
    pub estimate: Estimate,
    /// Whether it costs others something: it is neither measured nor taken while another way works.
    pub spare: bool,
}

/// How a dial failed, as far as its ticket is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The peer does not expect it.
    Refused,
    /// Nobody was reached.
    Unreached,
    /// The host was reached, and nobody listens there.
    Gone,
    /// Anything may have become of it at the other end.
    Unknown,
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A link was made. One that is to be measured is measured next.
    Made {
        /// Of which dial.
        attempt: u64,
    },
    /// A link was measured, and has been closed.
    Measured {
        /// Of which dial.
        attempt: u64,
        /// What came out.
        sample: Sample,
    },
    /// The accepting end goes on with this link.
    Taken {
        /// Of which dial.
        attempt: u64,
    },
    /// A dial, a measurement or a take failed; its link, if there was one, is closed.
    Failed {
        /// Which.
        attempt: u64,
        /// What that says of the ticket.
        failure: Failure,
        /// In words.
        reason: String,
    },
    /// The link in use ended.
    Lost {
        /// Under which epoch.
        epoch: u64,
        /// Why.
        reason: String,
    },
    /// The link in use carried something.
    Traffic {
        /// How much.
        bytes: u64,
        /// In which time.
        over: Duration,
    },
    /// What the usual message is like now.
    Message {
        /// Its length.
        bytes: u64,
    },
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Make a link. Ends in [`Event::Made`] or [`Event::Failed`] by `until`.
    Dial {
        /// Names it from now on.
        attempt: u64,
        /// Which way.
        way: usize,
        /// With the ticket of this number.
        number: u64,
        /// Whether it is to be measured and closed. Else it is kept until [`Action::Take`] or [`Action::Drop`].
        measure: bool,
        /// By when.
        until: Instant,
    },
    /// Ask the accepting end to go on with this link. Ends in [`Event::Taken`] or [`Event::Failed`] by `until`.
    Take {
        /// Which.
        attempt: u64,
        /// Under which epoch.
        epoch: u64,
        /// By when.
        until: Instant,
    },
    /// Close a link that is not needed.
    Drop {
        /// Which.
        attempt: u64,
    },
    /// This link carries the hop now.
    Carry {
        /// Which.
        attempt: u64,
        /// Under which epoch.
        epoch: u64,
    },
    /// There is no link and will be none. For each way, why not. Nothing comes after this.
    Down {
        /// By number of the way.
        reasons: Vec<(usize, String)>,
    },
}
