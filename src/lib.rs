//! Shoal turns the machines you already own into one machine for running language models.
//!
//! Every machine runs the same program. Nodes find each other, lend each other memory, split a model's layers between
//! them and stream tokens. There is no leader: what holds a placed model together are the leases on the memory that its
//! stages lie in, and each node is the only authority over its own.
//!
//! This crate is what programs embed; the command `shoal` is built on nothing else.
//!
//! # A node in your program
//!
//! ```no_run
//! use shoal::{GenerateOptions, Node, Piece};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! // Joins whatever nodes it finds on the local network. Nothing has to be configured.
//! let node = Node::builder().name("desk").start().await?;
//!
//! // The model is placed on the cluster's memory if it is not yet, and its answer comes as a stream.
//! let mut answer = node.generate("smollm2:135m", GenerateOptions::chat("Why is the sky blue?")).await?;
//! while let Some(piece) = answer.next().await {
//!     if let Piece::Token(token) = piece? {
//!         print!("{}", token.text);
//!     }
//! }
//!
//! // Says good-bye, gives back what it borrowed, stops every thread and frees every port.
//! node.leave().await;
//! # Ok(()) }
//! ```
//!
//! # Your own actors on the same network
//!
//! A [`Service`] is a typed request and reply under a number. Serve it with a [`ractor`] actor, to which a request is
//! one of its messages ([`Node::serve`]), and call it on any node ([`Node::remote`]). Peers have proved who they are
//! before a request arrives, queues are bounded, and a call to the own node is not serialised. `examples/own_service.rs`
//! is a whole program.
//!
//! # Memory of other machines
//!
//! [`Node::pool`] leases memory anywhere in the cluster, under the same accounting as models: an owner never lends more
//! than it offers, and a lease that is not renewed goes back. [`UserLease::put`] and [`UserLease::get`] write and read it, through
//! shared memory on one machine and over the network between two.
//!
//! # HTTP
//!
//! [`api::Api`] serves OpenAI's chat completions, and the cluster's state, for any node: the one endpoint that every
//! `shoal up` has.

pub mod api;

pub use ractor;
pub use shoal_actors::catalog::{Cancel, Catalog, CatalogEffects, CatalogError, CatalogSettings, LocalModel, Phase, Progress};
pub use shoal_actors::conductor::Undrained;
pub use shoal_actors::conductor::instance::{InstanceState, InstanceSummary, StageSummary};
pub use shoal_actors::ids::{InstanceId, LeaseId, NodeId, RequestId};
pub use shoal_actors::membership::{ClusterView, MemberEvent, MemberState, MemberView};
pub use shoal_actors::node::{
    GenerateError, GenerateOptions, Generation, LeaseFailure, Node, NodeBuilder, NodeError, Piece, Pool, StartError, UserLease,
    default_goal,
};
pub use shoal_actors::plan::{Goal, Plan, Prefer};
pub use shoal_actors::region::{REGION_UNIT, RegionError};
pub use shoal_actors::request::{ChatMessage, Client, End, Finish, GenerateRequest, Priority, Prompt, Timing, TokenEvent, Unread};
pub use shoal_actors::secret::ClusterKey;
pub use shoal_actors::service::{CallError, Inbound, Remote, Replier, Service, ServiceId};
pub use shoal_actors::{Device, Encryption, GPU_BACKEND, PathHealth, ProviderKind, SamplingParams, card, env, lease, pressure, survey};
