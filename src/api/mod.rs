//! The HTTP interface of a node: OpenAI's chat completions, and the cluster's state.
//!
//! | path | what |
//! |---|---|
//! | `GET /health`, `/health/live`, `/health/ready` | whether the node runs, and takes requests |
//! | `GET /v1/models`, `/v1/models/{model}` | models on any node's disk, and those that are placed |
//! | `POST /v1/chat/completions` | an answer, whole or as a stream of events |
//! | `POST /v1/completions` | the same for plain text |
//! | `GET /v1/shoal/requests/{id}` | how far an answer is; with `?after=N` or `Last-Event-ID` the rest of its stream, at any node |
//! | `GET /v1/shoal/state` | nodes, links, instances and leases ([`state::State`]) |
//! | `GET /v1/shoal/pool` | the memory of the whole cluster: who lends what to whom and for what ([`state::PoolState`]) |
//! | `POST /v1/shoal/plan`, `load`, `unload` | placing of models; a load with `wait` is kept until there is room (status 202) |
//! | `POST /v1/shoal/bench/link` | how fast tensor links to another node are, as a stream of events |
//! | `POST /v1/shoal/leave` | ends the node, which gives away what it has first, in at most `drain_seconds`; from the same machine only |
//!
//! Every answer has an id, which the header `x-shoal-request` says. A client may choose it, with the same header; sending the same id
//! again is the same request, at whichever node. The events of a stream are numbered (`told`), and after the node that was
//! asked is gone the rest of it can be had from any other. What was shown is never contradicted: that would be status 409.
//!
//! Every documented parameter of OpenAI's chat completions is honoured, or refused with status 400 and its name; none is
//! passed over in silence. Beyond them there are `top_k`, `min_p`, `repetition_penalty`, `ignore_eos`,
//! `return_token_ids`, `background` and `priority` (a whole number: 0 as usual, less to go first, more to wait; `service_tier` says the
//! same with `priority` and `flex`). What a node can do is shared out evenly among clients, told apart by the key in `Authorization` or
//! else by their address, and what a client has evenly among its users, as `user` names them. Errors have OpenAI's shape. A client that goes away stops its generation, which ends unless it comes back
//! within ten seconds or has said `background`; one whose node dies does not.
//!
//! It speaks to whoever reaches it, so it listens on the loopback interface unless told otherwise. There it also
//! refuses requests that a web page made: those whose `Host` or `Origin` is not this machine.

mod answer;
mod bench;
mod chat;
mod cluster;
mod error;
mod fields;
mod guard;
mod messages;
mod models;
mod parameters;
mod requests;
mod speed;
pub mod state;
mod told;

use std::fmt;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::Node;
use error::ApiError;

/// Longest body of a request, in bytes. What is asked travels to the conductor in one control frame.
pub const BODY_BYTES_MAX: usize = 3 * 1024 * 1024;

/// How long open connections get when the interface closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why the interface cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen for HTTP at {address}: {source}")]
pub struct BindError {
    /// Where.
    pub address: SocketAddr,
    /// The system's words.
    pub source: std::io::Error,
}

/// An HTTP interface that has its port and does not answer yet. So a node can announce the address before it starts.
#[derive(Debug)]
pub struct Api {
    listener: TcpListener,
    address: SocketAddr,
}

/// What happens when somebody asks the node to leave, and perhaps says how long that may take at most; gives how long it may.
type OnLeave = Arc<dyn Fn(Option<Duration>) -> Duration + Send + Sync>;

/// What handlers work with.
#[derive(Clone)]
struct Shared {
    node: Node,
    address: SocketAddr,
    on_leave: OnLeave,
    phase: watch::Receiver<Phase>,
    running: Arc<watch::Sender<usize>>,
}

/// Counts an answer as running for as long as it is there.
#[derive(Debug)]
struct Running(Arc<watch::Sender<usize>>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count = count.saturating_sub(1));
    }
}

/// How far an interface is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// It answers.
    Open,
    /// It answers, but takes no new work.
    Leaving,
    /// It is over.
    Closed,
}

impl Shared {
    /// Whether only this machine can reach the interface.
    fn is_local(&self) -> bool {
        self.address.ip().is_loopback()
    }

    /// Whether the node is on its way out.
    fn is_leaving(&self) -> bool {
        *self.phase.borrow() != Phase::Open
    }

    /// A node on its way out takes no new work. What it takes it waits for.
    fn not_leaving(&self) -> Result<Running, ApiError> {
        self.running.send_modify(|count| *count += 1);
        let running = Running(Arc::clone(&self.running));
        if !self.is_leaving() {
            return Ok(running);
        }
        let error = ApiError::new(axum::http::StatusCode::SERVICE_UNAVAILABLE, "this node is leaving the cluster; ask another one");
        Err(ApiError { code: Some("leaving"), ..error })
    }

    fn unix_seconds(&self) -> u64 {
        self.node.env().clock.unix_time().as_secs()
    }
}

impl Api {
    /// Takes a port; port 0 takes a free one.
    ///
    /// # Errors
    /// If the port is taken or the address is not this machine's.
    pub async fn bind(address: SocketAddr) -> Result<Self, BindError> {
        let failed = |source| BindError { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers for `node` from now on. `on_leave` is called when a program on this machine asks the node to leave, with how long that
    /// may take at most if it says so, and gives how long it may.
    pub fn serve(self, node: Node, on_leave: impl Fn(Option<Duration>) -> Duration + Send + Sync + 'static) -> Serving {
        let (phases, phase) = watch::channel(Phase::Open);
        let running = Arc::new(watch::Sender::new(0));
        let shared =
            Shared { node, address: self.address, on_leave: Arc::new(on_leave), phase: phase.clone(), running: Arc::clone(&running) };
        let service = router(shared).into_make_service_with_connect_info::<SocketAddr>();
        let listener = self.listener.tap_io(|stream| {
            // A stream of tokens is a stream of small packets.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(target: "shoal::api", %error, "a connection keeps its delay");
            }
        });
        let mut closed = phase;
        let closed = async move {
            let _ = closed.wait_for(|phase| *phase == Phase::Closed).await;
        };
        let server = axum::serve(listener, service).with_graceful_shutdown(closed);
        let task = tokio::spawn(async move {
            if let Err(error) = server.into_future().await {
                tracing::error!(target: "shoal::api", %error, "the HTTP interface stopped");
            }
        });
        Serving { address: self.address, phases, running, task }
    }
}

/// An HTTP interface at work. Dropping it closes it.
pub struct Serving {
    address: SocketAddr,
    phases: watch::Sender<Phase>,
    running: Arc<watch::Sender<usize>>,
    task: tokio::task::JoinHandle<()>,
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Serving({})", self.address)
    }
}

impl Serving {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn advance(&self, to: Phase) {
        self.phases.send_modify(|phase| *phase = (*phase).max(to));
    }

    /// Says that the node leaves: no new text is begun and its health is told as such, but whoever asks gets an answer.
    pub fn announce_leaving(&self) {
        self.advance(Phase::Leaving);
    }

    /// Resolves when no answer is running.
    pub async fn idle(&self) {
        // The sender is here, so this ends in no other way.
        let _ = self.running.subscribe().wait_for(|running| *running == 0).await;
    }

    /// Closes, and waits a moment for what is still at work. The port is free afterwards.
    pub async fn stop(mut self) {
        self.advance(Phase::Closed);
        if tokio::time::timeout(CLOSE_TIMEOUT, &mut self.task).await.is_err() {
            self.task.abort();
            let _ = (&mut self.task).await;
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.advance(Phase::Closed);
    }
}

fn router(shared: Shared) -> Router {
    Router::new()
        .route("/health", get(cluster::health))
        .route("/health/live", get(cluster::live))
        .route("/health/ready", get(cluster::health))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::one))
        .route("/v1/chat/completions", post(chat::chat))
        .route("/v1/completions", post(chat::text))
        .route("/v1/shoal/requests/{id}", get(requests::request))
        .route("/v1/shoal/state", get(cluster::state))
        .route("/v1/shoal/pool", get(cluster::pool))
        .route("/v1/shoal/plan", post(cluster::plan))
        .route("/v1/shoal/load", post(cluster::load))
        .route("/v1/shoal/unload", post(cluster::unload))
        .route("/v1/shoal/bench/link", post(bench::link))
        .route("/v1/shoal/leave", post(cluster::leave))
        .fallback(nothing_here)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(axum::middleware::from_fn_with_state(shared.clone(), guard::check))
        .with_state(shared)
}

async fn nothing_here(uri: axum::http::Uri) -> ApiError {
    ApiError::not_found(format!("there is nothing at {}", uri.path()))
}

async fn wrong_method(method: axum::http::Method, uri: axum::http::Uri) -> ApiError {
    ApiError::new(axum::http::StatusCode::METHOD_NOT_ALLOWED, format!("{method} is not possible at {}", uri.path()))
}
