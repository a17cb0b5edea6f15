//! What must hold at every moment of every run, one file each.
//!
//! An invariant looks at a [`Scene`]: plain data, so that a test can make one up that breaks it. [`Checks`] makes the
//! scene of a running cluster and looks again only at nodes that an event has touched.

mod checks;
mod dead_holders_lose;
mod memory_comes_back;
mod memory_fits;
mod one_conductor;
mod one_holder;
mod past;
mod plans_cover;
mod requests_end;
mod scene;
mod served;
mod stages_are_paid_for;
mod tokens_are_exact;
mod views_agree;

pub use checks::Checks;
pub use dead_holders_lose::DeadHoldersLose;
pub use memory_comes_back::MemoryComesBack;
pub use memory_fits::MemoryFits;
pub use one_conductor::OneConductor;
pub use one_holder::OneHolder;
pub use past::{Past, Rightful};
pub use plans_cover::PlansCover;
pub use requests_end::RequestsEnd;
pub use scene::{Belief, Lent, NodeScene, Orphan, Phases, Scene};
pub use served::{Heard, OpenRequest, Placed, Served};
pub use stages_are_paid_for::StagesArePaidFor;
pub use tokens_are_exact::TokensAreExact;
pub use views_agree::ViewsAgree;

/// Something that must hold.
pub trait Invariant: Send {
    /// Its name, for people.
    fn name(&self) -> &'static str;

    /// Looks at the world between two events.
    ///
    /// # Errors
    /// What is wrong, with the nodes and numbers that show it.
    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String>;
}
