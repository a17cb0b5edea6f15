//! Who is in the cluster: members, their health and their cards.
//!
//! `swim` is the protocol as a machine, `actor` runs it, `view` is what others see of it.

mod actor;
mod cards;
#[cfg(test)]
mod cluster_tests;
mod gossip;
mod life;
mod message;
mod probing;
#[cfg(test)]
mod simulated_tests;
mod swim;
mod view;

pub use actor::{Membership, MembershipActor, MembershipArguments, MembershipError, MembershipMessage, MembershipService, Subscription};
pub use life::{LifeError, next_incarnation};
pub use message::Message;
#[cfg(test)]
pub(crate) use message::test_card;
pub use swim::Timing;
pub use view::{ClusterView, MemberEvent, MemberState, MemberView};
