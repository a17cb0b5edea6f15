//! Detours: a node that two others reach passes the messages of a hop on where the two do not reach each other.
//!
//! The dialling end of the hop asks those that it is connected to. Whoever is asked dials the hop's accepting end, with one ticket
//! that the asking end hands over, and tells where it expects the asking end itself (`shoal_transport::path::forward`). A detour
//! ends with its links.

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
    links: TensorLinks,
    open: Arc<Mutex<Vec<Detour>>>,
}

impl DetourServer {
    pub(crate) fn new(links: TensorLinks) -> Self {
        Self { links, open: Arc::default() }
    }

    /// Answers a node that asks for one. Does not block.
    pub(crate) fn answer(&self, call: Inbound<Detours>) {
        let Some(reply) = call.reply else { return };
        let (server, asking, request) = (self.clone(), call.from, call.request);
        let body = move || reply.reply(server.open(asking, &request));
        // Whoever asks hears of a thread that does not start by hearing nothing.
        if let Err(error) = self.links.effects().spawner.thread("shoal-detour".to_owned(), Box::new(body)) {
            tracing::warn!(target: "shoal::stage", %error, "cannot start a thread for a detour");
        }
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
            endpoints: self.endpoints.clone(),
            ticket: ticket.clone(),
            message_bytes_max: options.message_bytes_max,
        };
        let wait = deadline.since(self.effects.clock.now());
        let remote = self.services.remote::<Detours>(self.node);
        let unknown = |reason: String| RouteError { failure: Failure::Unknown, reason };
        match remote.call_and_wait(&*self.effects.spawner, "detour", request, wait) {
            Some(Ok(Ok(offer))) => Ok((offer.endpoints, offer.ticket)),
            Some(Ok(Err(DetourRefusal { refused, reason }))) => {
                Err(RouteError { failure: if refused { Failure::Refused } else { Failure::Unknown }, reason })
            }
            Some(Err(error)) => Err(unknown(error.to_string())),
            None => Err(unknown("this node stops".to_owned())),
        }
    }

    fn label(&self) -> String {
        format!("node {:?}", self.node)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use shoal_transport::frame::Fence;
    use shoal_transport::provider::memory::{MemoryFabric, MemoryProvider, Shape};
    use shoal_transport::provider::{Desk, Provider, ProviderKind};

    use super::*;
    use crate::env::{BoxFuture, Connected, Network, NetworkEvent, SendError, Spawner, SystemClock, SystemRng, SystemSpawner};
    use crate::service::ServicesLimits;

    /// What one end of a control stream says, the other one hears.
    #[derive(Debug)]
    struct Wire {
        from: NodeId,
        to: Services,
    }

    impl Network for Wire {
        fn send(&self, _: NodeId, frame: Bytes) -> Result<(), SendError> {
            self.to.on_event(&NetworkEvent::Frame { peer: self.from, frame });
            Ok(())
        }

        fn dial(&self, _: Option<NodeId>, _: std::net::SocketAddr) {}

        fn disconnect(&self, _: NodeId) {}

        fn shutdown(&self) -> BoxFuture<'static, ()> {
            Box::pin(std::future::ready(()))
        }
    }

    #[test]
    fn the_messages_are_pinned() {
        let endpoints = vec![Endpoint::Shm { door: 200 }];
        let request =
            DetourRequest { peer: NodeId([7; 32]), endpoints: endpoints.clone(), ticket: Ticket::new(6, [8; 32]), message_bytes_max: 4096 };
        let bytes = [&[7; 32][..], &[1, 2, 0xc8, 1, 6], &[8; 32], &[0x80, 0x20]].concat();
        assert_eq!(postcard::to_stdvec(&request).unwrap(), bytes);
        assert_eq!(postcard::from_bytes::<DetourRequest>(&bytes).unwrap().message_bytes_max, 4096);
        let reply = |reply: Result<DetourOffer, DetourRefusal>| postcard::to_stdvec(&reply).unwrap();
        let offer = DetourOffer { endpoints, ticket: Ticket::new(6, [8; 32]) };
        assert_eq!(reply(Ok(offer)), [&[0, 1, 2, 0xc8, 1, 6][..], &[8; 32]].concat());
        assert_eq!(reply(Err(DetourRefusal { refused: true, reason: "no".to_owned() })), [1, 1, 2, b'n', b'o']);
    }

    #[tokio::test]
    async fn a_node_that_two_others_reach_passes_their_hop_on() {
        let spawner: Arc<dyn Spawner> = Arc::new(SystemSpawner::new(tokio::runtime::Handle::current()));
        let effects = Effects { clock: Arc::new(SystemClock), rng: Arc::new(SystemRng), spawner };
        let [left, right] = [0, 1].map(|_| MemoryFabric::new(&SystemRng, Shape::default()));
        let [one, middle, other] = [1, 2, 3].map(|node| NodeId([node; 32]));
        let links = |node, fabrics: &[&MemoryFabric]| {
            let desk = Desk::new(ProviderKind::Memory, Arc::clone(&effects.clock));
            let join = |fabric: &&MemoryFabric| -> Arc<dyn Provider> {
                Arc::new(MemoryProvider::with_desk(effects.clone(), fabric, Arc::clone(&desk)))
            };
            TensorLinks::new(node, effects.clone(), fabrics.iter().map(join).collect())
        };
        let [asking, asked] = [one, middle].map(|node| Services::new(node, Arc::new(SystemClock), ServicesLimits::default()));
        for (services, peer, to) in [(&asking, middle, &asked), (&asked, one, &asking)] {
            services.attach(Arc::new(Wire { from: services.node(), to: to.clone() }));
            services.on_event(&NetworkEvent::Connected(Connected { peer, address: ([10, 0, 0, 1], 1).into(), dialled: true }));
        }
        let server = DetourServer::new(links(middle, &[&left, &right]));
        let passing = server.clone();
        asked.serve::<Detours>(move |call| passing.answer(call)).unwrap();

        let (near, far) = (links(one, &[&left]), links(other, &[&right]));
        let (endpoints, secret, expecting) = far.expect(one, 64).unwrap();
        let failure = near.dial(other, &endpoints, &Ticket::random(&SystemRng), 64);
        assert!(failure.is_err(), "without the one in the middle there is no way");
        let near = near.with_detours(asking);
        let work = tokio::task::spawn_blocking(move || {
            let soon = || effects.after(Duration::from_secs(60));
            let mut sender = near.dial(other, &endpoints, &secret, 64).unwrap().sender(Fence::default(), TensorLinks::options(64)).unwrap();
            let mut receiver = expecting.accept(soon()).unwrap().receiver(Fence::default(), TensorLinks::options(64)).unwrap();
            for number in 0..20_u8 {
                sender.send(1, &[&[number]], soon()).unwrap();
                assert_eq!(receiver.recv(soon()).unwrap().payload(), [number]);
            }
        });
        work.await.unwrap();
        let passed = server.open.lock().unwrap().iter().map(|detour| detour.passed().messages_out).max();
        assert!(passed >= Some(20), "{passed:?}");
        server.end();
    }
}
