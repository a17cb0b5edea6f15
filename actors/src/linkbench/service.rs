//! Measuring links between nodes.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_transport::bench;
use shoal_transport::provider::{AcceptError, Endpoint, ProviderKind, Ticket};
use tokio::sync::mpsc;

use super::{BenchError, BenchOptions, LinkBenchRow, MESSAGE_BYTES_MAX};
use crate::env::Env;
use crate::ids::NodeId;
use crate::places::Places;
use crate::service::{CallError, Inbound, Service, ServiceId, Services};
use crate::service_numbers;
use crate::stage::links::{LinkFailure, TensorLinks};

/// Links that a node answers on at a time.
const LINKS_MAX: usize = 4;
/// How long, and for how many bytes, a node answers on one link.
const ANSWER_TIME: Duration = Duration::from_secs(60);
const ANSWER_BYTES: u64 = 64 << 30;
/// How long a node may take to offer a link.
const OFFER_TIMEOUT: Duration = Duration::from_secs(5);
/// Rows that wait to be read.
const ROWS_WAITING: usize = 64;

/// The service by which a node offers links to be measured.
#[derive(Debug)]
pub enum LinkBench {}

impl Service for LinkBench {
    const ID: ServiceId = service_numbers::LINK_BENCH;
    const NAME: &'static str = "link bench";
    type Request = BenchRequest;
    type Reply = Result<BenchOffer, BenchRefusal>;
}

/// Asks for one link to measure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BenchRequest {
    /// Longest message, in bytes.
    pub slot_bytes: u32,
}

/// Where the link can be had, for a few seconds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BenchOffer {
    /// Where to dial.
    pub endpoints: Vec<Endpoint>,
    /// What to show there.
    pub ticket: Ticket,
}

/// Why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum BenchRefusal {
    /// Others are being measured.
    #[error("it is measuring links already; try again in a minute")]
    Busy,
    /// The messages are too long.
    #[error("it measures messages of 1 byte to 16 MiB")]
    Size,
    /// It cannot expect a link.
    #[error("{0}")]
    Link(String),
}

/// Why links were not measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkBenchError {
    /// The peer was not reached.
    #[error("node {} cannot be asked for a link: {source}", peer.short())]
    Call {
        /// Who.
        peer: NodeId,
        /// Why.
        source: CallError,
    },
    /// The peer refused.
    #[error("node {} offers no link: {refusal}", peer.short())]
    Refused {
        /// Who.
        peer: NodeId,
        /// Why.
        refusal: BenchRefusal,
    },
    /// The link was not made.
    #[error(transparent)]
    Link(#[from] LinkFailure),
    /// It broke, or was not what it should be.
    #[error("the {provider} link cannot be measured: {source}")]
    Measure {
        /// What carried it.
        provider: ProviderKind,
        /// What happened.
        source: BenchError,
    },
    /// The two nodes have no provider in common.
    #[error("node {} has no kind of tensor link that this node has, too", peer.short())]
    Nothing {
        /// Who.
        peer: NodeId,
    },
    /// What was asked for cannot be measured.
    #[error(transparent)]
    Options(BenchError),
    /// A thread could not be had.
    #[error("{0}")]
    Thread(String),
}

/// A node's answering end.
#[derive(Debug)]
pub struct LinkBenchServer {
    links: TensorLinks,
    answering: Places,
}

impl LinkBenchServer {
    /// Answers on `links`.
    pub fn new(links: TensorLinks) -> Self {
        Self { links, answering: Places::new(LINKS_MAX) }
    }

    /// Takes one request. Does not wait.
    pub fn answer(&self, call: Inbound<LinkBench>) {
        let outcome = self.offer(call.from, &call.request);
        if let Some(reply) = call.reply {
            reply.reply(outcome);
        }
    }

    fn offer(&self, from: NodeId, request: &BenchRequest) -> Result<BenchOffer, BenchRefusal> {
        let slot_bytes = request.slot_bytes;
        if !(1..=MESSAGE_BYTES_MAX).contains(&slot_bytes) {
            return Err(BenchRefusal::Size);
        }
        let place = self.answering.take().ok_or(BenchRefusal::Busy)?;
        let effects = self.links.effects().clone();
        let answer = move |link: Result<_, AcceptError>| {
            let _place = place;
            let ended = match link {
                Ok(link) => bench::answer(link, slot_bytes, ANSWER_BYTES, effects.after(ANSWER_TIME), &effects),
                Err(error) => return tracing::debug!(target: "shoal::linkbench", %error, "nobody came to measure"),
            };
            if let Err(error) = ended {
                tracing::debug!(target: "shoal::linkbench", %error, "a measured link ended");
            }
        };
        let (endpoints, ticket) = self.links.serve_link(from, slot_bytes, "shoal-linkbench", answer).map_err(BenchRefusal::Link)?;
        Ok(BenchOffer { endpoints, ticket })
    }
}

/// Measures links to `peer`; see [`Node::bench_links`](crate::node::Node::bench_links).
pub(crate) fn start(
    env: &Env,
    services: &Services,
    links: &TensorLinks,
    peer: NodeId,
    options: BenchOptions,
) -> mpsc::Receiver<Result<LinkBenchRow, LinkBenchError>> {
    let (rows, receive) = mpsc::channel(ROWS_WAITING);
    let measuring = Measuring { env: env.clone(), services: services.clone(), links: links.clone(), peer, options, rows };
    env.spawner.task(
        "linkbench",
        Box::pin(async move {
            if let Err(error) = measuring.run().await {
                let _ = measuring.rows.send(Err(error)).await;
            }
        }),
    );
    receive
}

struct Measuring {
    env: Env,
    services: Services,
    links: TensorLinks,
    peer: NodeId,
    options: BenchOptions,
    rows: mpsc::Sender<Result<LinkBenchRow, LinkBenchError>>,
}

impl Measuring {
    async fn offer(&self, slot_bytes: u32) -> Result<BenchOffer, LinkBenchError> {
        let peer = self.peer;
        match self.services.remote::<LinkBench>(peer).call(BenchRequest { slot_bytes }, OFFER_TIMEOUT).await {
            Ok(Ok(offer)) => Ok(offer),
            Ok(Err(refusal)) => Err(LinkBenchError::Refused { peer, refusal }),
            Err(source) => Err(LinkBenchError::Call { peer, source }),
        }
    }

    async fn run(&self) -> Result<(), LinkBenchError> {
        let slot_bytes = self.options.slot_bytes().map_err(LinkBenchError::Options)?;
        let mut offer = Some(self.offer(slot_bytes).await?);
        let kinds = offer.as_ref().map(|offer| self.links.common(&offer.endpoints)).unwrap_or_default();
        if kinds.is_empty() {
            return Err(LinkBenchError::Nothing { peer: self.peer });
        }
        let mut failure = None;
        let mut measured = false;
        for kind in kinds {
            if self.rows.is_closed() {
                break;
            }
            let BenchOffer { mut endpoints, ticket } = match offer.take() {
                Some(offer) => offer,
                None => self.offer(slot_bytes).await?,
            };
            endpoints.retain(|endpoint| endpoint.kind() == kind);
            let (links, peer, options, rows) = (self.links.clone(), self.peer, self.options.clone(), self.rows.clone());
            let work = move || -> Result<(), LinkBenchError> {
                let link = links.dial_link(peer, &endpoints, &ticket, slot_bytes)?;
                let mut each = |row| rows.blocking_send(Ok(LinkBenchRow::new(kind, &row))).is_ok();
                let measured = bench::measure(link, &options, links.effects(), &mut each);
                measured.map_err(|source| LinkBenchError::Measure { provider: kind, source })
            };
            match self.env.blocking("shoal-linkbench", work).await.map_err(LinkBenchError::Thread)? {
                Ok(()) => measured = true,
                // A peer on another machine has a door for its own processes, too, which does not lead there from here.
                Err(error @ LinkBenchError::Link(_)) => {
                    tracing::debug!(target: "shoal::linkbench", %error, "a kind of link was passed over");
                    failure = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        failure.filter(|_| !measured).map_or(Ok(()), Err)
    }
}
