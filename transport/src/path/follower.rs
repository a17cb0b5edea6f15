//! The accepting end of a hop: it follows the dialling end's choice of links, and says when there has been none for too
//! long. It has no I/O and no clock.

use std::time::Duration;

use super::tickets::Window;
use crate::env::Instant;

/// What to do about a link that is to carry the hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// End the link before it, if there is one, so that nothing more can arrive on it; then say yes and use the new one.
    Take,
    /// Say no: a later one is in use, or has been.
    Stale,
}

/// The accepting end.
#[derive(Debug, Clone)]
pub struct Follower {
    patience: Duration,
    /// The newest epoch that was taken.
    epoch: u64,
    /// Whether its link is still good.
    carried: bool,
    /// Since when there is no link, and why.
    lost: Option<(Instant, String)>,
    /// Which tickets are expected.
    pub window: Window,
}

impl Follower {
    /// Nothing has come yet. A hop that had a link may be without one for `patience`.
    pub fn new(patience: Duration) -> Self {
        Self { patience, epoch: 0, carried: false, lost: None, window: Window::default() }
    }

    /// The dialling end says that from now on this link carries the hop, under this epoch.
    pub fn take(&mut self, epoch: u64) -> Verdict {
        if epoch <= self.epoch {
            return Verdict::Stale;
        }
        self.epoch = epoch;
        self.carried = true;
        self.lost = None;
        Verdict::Take
    }

    /// The link of this epoch ended.
    pub fn lost(&mut self, now: Instant, epoch: u64, reason: String) {
        if epoch == self.epoch && self.carried {
            self.carried = false;
            self.lost = Some((now, reason));
        }
    }

    /// The epoch that was taken last; 0 before the first.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether the newest epoch's link is still good.
    pub fn is_carried(&self) -> bool {
        self.carried
    }

    /// When the hop will be given up, if nothing comes.
    pub fn limit(&self) -> Option<Instant> {
        self.lost.as_ref().map(|(since, _)| *since + self.patience)
    }

    /// Why the hop is given up now.
    pub fn down(&self, now: Instant) -> Option<&str> {
        self.lost.as_ref().filter(|(since, _)| now >= *since + self.patience).map(|(_, reason)| reason.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn only_newer_epochs_are_taken() {
        let mut follower = Follower::new(Duration::from_millis(10));
        let verdicts = [2, 2, 1, 5, 4].map(|epoch| follower.take(epoch));
        assert_eq!(verdicts, [Verdict::Take, Verdict::Stale, Verdict::Stale, Verdict::Take, Verdict::Stale]);
        assert_eq!(follower.epoch(), 5);
    }

    #[test]
    fn patience_counts_from_the_loss_of_the_link_in_use() {
        let mut follower = Follower::new(Duration::from_millis(10));
        assert_eq!(follower.down(at(1000)), None, "the first link may take as long as it takes");
        follower.take(1);
        follower.take(2);
        follower.lost(at(1000), 1, "of one before".to_owned());
        assert_eq!((follower.limit(), follower.is_carried()), (None, true));
        follower.lost(at(1000), 2, "cut".to_owned());
        follower.lost(at(1005), 2, "said again".to_owned());
        assert_eq!(follower.limit(), Some(at(1010)));
        assert_eq!((follower.down(at(1009)), follower.down(at(1010))), (None, Some("cut")));
        follower.take(3);
        assert_eq!(follower.down(at(2000)), None);
    }
}
