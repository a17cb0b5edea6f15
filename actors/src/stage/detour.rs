//! Detours: a node that two others reach passes the messages of a hop on where the two do not reach each other.
//!
//! The dialling end of the hop asks those that it is connected to. Whoever is asked dials the hop's accepting end, with one ticket
//! that the asking end hands over, and tells where it expects the asking end itself (`shoal_transport::path::forward`). A detour
//! ends with its links.

use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_transport::Effects;
use shoal_transport::env::Instant;
use shoal_transport::link::LinkOptions;
use shoal_transport::path::forward::{Ask, Detour, ForwardError};
use shoal_transport::path::{Failure, RouteError};
use shoal_transport::provider::{Endpoint, Ticket};

use super::links::TensorLinks;
use crate::env::Env;
use crate::ids::NodeId;
use crate::service::{Inbound, Service, ServiceId, Services};
use crate::service_numbers as ids;

/// Detours that a node lets others have at a time.
const DETOURS_MAX: usize = 64;
/// Longest message that it passes on, in bytes: as much as a stage takes, and a frame's header.
const MESSAGE_BYTES_MAX: u32 = 256 * 1024 * 1024 + 64;
/// How long it tries to reach the far end.
const ONWARD_MAX: Duration = Duration::from_millis(1200);

/// A detour over the node that is asked.
#[derive(Debug)]
pub(crate) struct Detours;

impl Service for Detours {
    const ID: ServiceId = ids::DETOURS;
    const NAME: &'static str = "detours";
    type Request = DetourRequest;
    type Reply = Result<DetourOffer, DetourRefusal>;
}

/// Please dial the accepting end of a hop.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct DetourRequest {
    /// The accepting end.
    peer: NodeId,
    /// Where it takes links.
    endpoints: Vec<Endpoint>,
    /// What it expects for this one.
    ticket: Ticket,
    /// Longest message, in bytes, frame header included.
    message_bytes_max: u32,
}

/// A detour is there.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct DetourOffer {
    /// Where the node in the middle takes the asking end's link.
    endpoints: Vec<Endpoint>,
    /// What has to be shown there.
    ticket: Ticket,
}

/// There is none.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct DetourRefusal {
    /// The accepting end was reached and does not expect the ticket.
    refused: bool,
    /// For people.
    reason: String,
}

/// The detours over this node.
#[derive(Clone)]
pub(crate) struct DetourServer {
    env: Env,
    links: TensorLinks,
    open: Arc<Mutex<Vec<Detour>>>,
}

impl DetourServer {
    pub(crate) fn new(env: Env, links: TensorLinks) -> Self {
        Self { env, links, open: Arc::default() }
    }

    /// Answers a node that asks for one. Does not block.
    pub(crate) fn answer(&self, call: Inbound<Detours>) {
        let Some(reply) = call.reply else { return };
        let (server, asking, request) = (self.clone(), call.from, call.request);
        let work = self.env.blocking("shoal-detour", move || server.open(asking, &request));
        self.env.spawner.task(
            "detour",
            Box::pin(async move {
                reply.reply(work.await.unwrap_or_else(|reason| Err(DetourRefusal { refused: false, reason })));
            }),
        );
    }

    fn open(&self, asking: NodeId, request: &DetourRequest) -> Result<DetourOffer, DetourRefusal> {
        let refuse = |reason: String| DetourRefusal { refused: false, reason };
        if request.message_bytes_max > MESSAGE_BYTES_MAX {
            return Err(refuse(format!("messages of {} bytes are more than this node passes on", request.message_bytes_max)));
        }
        {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            let ended: Vec<Detour> = open.extract_if(.., |detour| detour.has_ended()).collect();
            if open.len() >= DETOURS_MAX {
                return Err(refuse(format!("this node passes messages on for {DETOURS_MAX} hops already")));
            }
            drop(open);
            drop(ended);
        }
        let link = LinkOptions { message_bytes_max: request.message_bytes_max };
        let until = self.links.effects().after(ONWARD_MAX);
        let (endpoints, ticket, detour) =
            self.links.forward(&request.endpoints, &request.ticket, link, until).map_err(|error| DetourRefusal {
                refused: matches!(&error, ForwardError::Onward(onward) if onward.failure == Failure::Refused),
                reason: error.to_string(),
            })?;
        tracing::info!(target: "shoal::stage", from = ?asking, to = ?request.peer, "passing the messages of a hop on");
        self.open.lock().unwrap_or_else(PoisonError::into_inner).push(detour);
        Ok(DetourOffer { endpoints, ticket })
    }

    /// Ends all of them.
    pub(crate) fn end(&self) {
        let all = std::mem::take(&mut *self.open.lock().unwrap_or_else(PoisonError::into_inner));
        drop(all);
    }
}

impl std::fmt::Debug for DetourServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("DetourServer")
    }
}

/// Asks one node for detours to one peer.
#[derive(Debug)]
pub(super) struct Neighbour {
    services: Services,
    effects: Effects,
    node: NodeId,
    peer: NodeId,
    endpoints: Vec<Endpoint>,
}

impl Neighbour {
    pub(super) fn new(services: Services, effects: Effects, node: NodeId, peer: NodeId, endpoints: Vec<Endpoint>) -> Self {
        Self { services, effects, node, peer, endpoints }
    }
}

impl Ask for Neighbour {
    fn ask(&self, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<(Vec<Endpoint>, Ticket), RouteError> {
        let request = DetourRequest {
            peer: self.peer,
            // Another machine's memory is not this one's.
            endpoints: self.endpoints.iter().filter(|endpoint| !matches!(endpoint, Endpoint::Memory { .. })).copied().collect(),
            ticket: ticket.clone(),
            message_bytes_max: options.message_bytes_max,
        };
        let wait = deadline.since(self.effects.clock.now());
        let remote = self.services.remote::<Detours>(self.node);
        let (send, answer) = mpsc::channel();
        self.effects.spawner.task("detour", Box::pin(async move { drop(send.send(remote.call(request, wait).await)) }));
        let unknown = |reason: String| RouteError { failure: Failure::Unknown, reason };
        match answer.recv_timeout(wait) {
            Ok(Ok(Ok(offer))) => Ok((offer.endpoints, offer.ticket)),
            Ok(Ok(Err(DetourRefusal { refused, reason }))) => {
                Err(RouteError { failure: if refused { Failure::Refused } else { Failure::Unknown }, reason })
            }
            Ok(Err(error)) => Err(unknown(error.to_string())),
            Err(_) => Err(unknown("it did not answer in time".to_owned())),
        }
    }

    fn label(&self) -> String {
        format!("node {:?}", self.node)
    }
}
