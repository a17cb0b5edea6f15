//! Deliberate faults in the system itself, to prove that the invariants find them.

use clap::ValueEnum;

use crate::scenario::Scenario;

/// What is wrong in a run that has to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Broken {
    /// Owners offer twice the memory that they have.
    TwiceOffered,
    /// Owners free memory without waiting for its writers.
    FencesSkipped,
    /// Writers never say that they have stopped.
    FencesNeverHold,
    /// Clocks are up to a tenth fast or slow, which is more than the lease protocol allows for.
    WildClocks,
    /// A node stays cut off after the last fault.
    CutStays,
    /// Nobody gives back what it has in the end.
    KeptForEver,
    /// Stages stay in memory when their leases end.
    StagesStay,
    /// A plan gives one layer to two stages.
    LayerTwice,
    /// Stages keep the keys of sequences that are over.
    StaleKeys,
    /// Now and then an answer of the last stage gets lost.
    AnswersSwallowed,
}

impl Broken {
    /// The name of the invariant that finds it.
    pub fn finder(self) -> &'static str {
        match self {
            Self::TwiceOffered | Self::FencesSkipped => "memory fits",
            Self::FencesNeverHold => "dead holders lose their leases",
            Self::WildClocks => "one holder",
            Self::CutStays => "views agree",
            Self::KeptForEver => "memory comes back",
            Self::StagesStay => "stages are paid for",
            Self::LayerTwice => "plans cover every layer once",
            Self::StaleKeys => "tokens are exact",
            Self::AnswersSwallowed => "requests end",
        }
    }

    /// The scenario in which it shows.
    pub fn scenario(self) -> Scenario {
        match self {
            Self::StagesStay | Self::LayerTwice | Self::StaleKeys | Self::AnswersSwallowed => Scenario::PlaceAndAnswer,
            _ => Scenario::JoinAndLend,
        }
    }

    /// The name by which the command line knows it.
    pub fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}
