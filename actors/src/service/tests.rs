//! The router by itself: local calls, registration, foreign frames. What crosses a network is tested in `network`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::*;
use ractor::{Actor, ActorProcessingErr, ActorRef};
use serde::{Deserialize, Serialize};

use super::*;
use crate::env::{BoxFuture, Connected, DisconnectReason, Network, NetworkEvent, SendError, SystemClock};
use crate::ids::NodeId;

const ME: NodeId = NodeId([1; 32]);
const PEER: NodeId = NodeId([2; 32]);
const SOON: Duration = Duration::from_secs(10);

struct Doubler;

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    Double(u32),
    Forget,
    Fail,
    Panic,
}

impl Service for Doubler {
    const ID: ServiceId = ServiceId::user(1);
    const NAME: &'static str = "doubler";
    type Request = Ask;
    type Reply = u32;
}

/// Another service that claims the same number.
struct Impostor;

impl Service for Impostor {
    const ID: ServiceId = ServiceId::user(1);
    const NAME: &'static str = "impostor";
    type Request = String;
    type Reply = String;
}

fn answer(inbound: Inbound<Doubler>) {
    match (inbound.request, inbound.reply) {
        (Ask::Double(value), Some(reply)) => reply.reply(value * 2),
        (Ask::Fail, Some(reply)) => reply.fail("no more numbers"),
        (Ask::Panic, _) => panic!("as told"),
        _ => {}
    }
}

fn router() -> Services {
    Services::new(ME, Arc::new(SystemClock), ServicesLimits { calls_per_peer: 3, outstanding_per_peer: 3 })
}

/// A network that keeps what is sent.
#[derive(Debug, Default)]
struct Sent {
    frames: Mutex<Vec<Bytes>>,
    disconnected: Mutex<Vec<NodeId>>,
}

#[derive(Debug, Clone, Default)]
struct FakeNetwork(Arc<Sent>);

impl FakeNetwork {
    fn take(&self) -> Vec<Header> {
        self.0.frames.lock().unwrap().drain(..).map(|frame| Header::decode(&frame).unwrap().0).collect()
    }
}

impl Network for FakeNetwork {
    fn send(&self, _: NodeId, frame: Bytes) -> Result<(), SendError> {
        self.0.frames.lock().unwrap().push(frame);
        Ok(())
    }

    fn dial(&self, _: Option<NodeId>, _: std::net::SocketAddr) {}

    fn disconnect(&self, peer: NodeId) {
        self.0.disconnected.lock().unwrap().push(peer);
    }

    fn shutdown(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::ready(()))
    }
}

fn connected() -> NetworkEvent {
    NetworkEvent::Connected(Connected { peer: PEER, address: ([10, 0, 0, 1], 1).into(), dialled: true })
}

fn frame(frame: Bytes) -> NetworkEvent {
    NetworkEvent::Frame { peer: PEER, frame }
}

#[tokio::test]
async fn a_local_call_ends_in_every_way() {
    let services = router();
    let remote = services.remote::<Doubler>(ME);
    let (node, service) = (ME, Doubler::NAME);
    assert_eq!(remote.call(Ask::Double(1), SOON).await, Err(CallError::UnknownService { node, service, id: Doubler::ID }));
    services.serve::<Doubler>(answer).unwrap();
    assert_eq!(remote.call(Ask::Double(21), SOON).await, Ok(42));
    assert_eq!(remote.call(Ask::Fail, SOON).await, Err(CallError::Fault { node, service, reason: "no more numbers".into() }));
    for ask in [Ask::Forget, Ask::Panic] {
        let error = remote.call(ask, SOON).await.unwrap_err();
        assert!(matches!(&error, CallError::Fault { reason, .. } if reason.contains("without an answer")), "{error}");
    }
    assert_eq!(remote.cast(Ask::Double(1)), Ok(()));
    let other = services.remote::<Impostor>(ME).call("x".into(), SOON).await;
    assert!(matches!(other, Err(CallError::UnknownService { .. })), "a number does not make a service");
}

#[tokio::test]
async fn a_service_has_its_number_to_itself() {
    let services = router();
    services.serve::<Doubler>(answer).unwrap();
    let taken = ServeError::Taken { service: Impostor::NAME, id: Impostor::ID, by: Doubler::NAME };
    assert_eq!(services.serve::<Impostor>(|_| {}), Err(taken));
    assert!(services.withdraw::<Doubler>());
    assert!(!services.withdraw::<Doubler>());
    services.serve::<Impostor>(|_| {}).unwrap();
}

#[tokio::test]
async fn a_call_that_nobody_answers_ends_at_its_deadline_and_holds_its_place() {
    let services = router();
    let held = Arc::new(Mutex::new(vec![]));
    let keep = Arc::clone(&held);
    services.serve::<Doubler>(move |inbound| keep.lock().unwrap().push(inbound)).unwrap();
    let remote = services.remote::<Doubler>(ME);
    for _ in 0..3 {
        let error = remote.call(Ask::Forget, Duration::from_millis(1)).await.unwrap_err();
        assert_eq!(error, CallError::Deadline { node: ME, service: Doubler::NAME, waited: Duration::from_millis(1) });
    }
    assert_eq!(remote.call(Ask::Forget, SOON).await, Err(CallError::Overloaded { node: ME }));
    held.lock().unwrap().clear();
    assert!(matches!(remote.call(Ask::Forget, Duration::from_millis(1)).await, Err(CallError::Deadline { .. })));
}

struct DoublerActor;

enum DoublerMessage {
    Asked(Inbound<Doubler>),
}

impl From<Inbound<Doubler>> for DoublerMessage {
    fn from(inbound: Inbound<Doubler>) -> Self {
        Self::Asked(inbound)
    }
}

impl Actor for DoublerActor {
    type Msg = DoublerMessage;
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<DoublerMessage>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }

    async fn handle(&self, _: ActorRef<DoublerMessage>, message: DoublerMessage, (): &mut ()) -> Result<(), ActorProcessingErr> {
        let DoublerMessage::Asked(inbound) = message;
        answer(inbound);
        Ok(())
    }
}

#[tokio::test]
async fn an_actor_serves_and_its_successor_takes_over() {
    let services = router();
    let (first, done) = Actor::spawn(None, DoublerActor, ()).await.unwrap();
    services.serve_actor::<Doubler, _>(first.clone()).unwrap();
    let remote = services.remote::<Doubler>(ME);
    assert_eq!(remote.call(Ask::Double(4), SOON).await, Ok(8));
    let (second, _) = Actor::spawn(None, DoublerActor, ()).await.unwrap();
    assert!(services.serve_actor::<Doubler, _>(second.clone()).is_err(), "the first still serves");
    first.stop(None);
    done.await.unwrap();
    let error = remote.call(Ask::Double(4), SOON).await.unwrap_err();
    assert!(matches!(error, CallError::Fault { .. }), "{error}");
    services.serve_actor::<Doubler, _>(second).unwrap();
    assert_eq!(remote.call(Ask::Double(4), SOON).await, Ok(8));
}

#[test]
fn an_answer_goes_only_to_the_life_that_asked() {
    let (services, network) = (router(), FakeNetwork::default());
    services.attach(Arc::new(network.clone()));
    let held = Arc::new(Mutex::new(vec![]));
    let keep = Arc::clone(&held);
    services.serve::<Doubler>(move |inbound| keep.lock().unwrap().push(inbound.reply)).unwrap();
    services.on_event(&connected());
    let call = Header::Call { correlation: 9, service: Doubler::ID, deadline_ms: 1000 };
    services.on_event(&frame(call.clone().encode_with(&Ask::Double(1)).unwrap()));
    services.on_event(&NetworkEvent::Disconnected { peer: PEER, reason: DisconnectReason::Closed });
    services.on_event(&connected());
    services.on_event(&frame(call.encode_with(&Ask::Double(2)).unwrap()));
    let mut replies = held.lock().unwrap().drain(..).map(Option::unwrap).collect::<Vec<_>>();
    let (late, present) = (replies.remove(0), replies.remove(0));
    late.reply(2);
    assert_eq!(network.take(), []);
    present.reply(4);
    assert_eq!(network.take(), [Header::Reply { correlation: 9 }]);
}

#[test]
fn too_many_calls_of_a_peer_are_turned_away() {
    let (services, network) = (router(), FakeNetwork::default());
    services.attach(Arc::new(network.clone()));
    let held = Arc::new(Mutex::new(vec![]));
    let keep = Arc::clone(&held);
    services.serve::<Doubler>(move |inbound| keep.lock().unwrap().push(inbound.reply)).unwrap();
    services.on_event(&connected());
    for correlation in 0..4 {
        let call = Header::Call { correlation, service: Doubler::ID, deadline_ms: 1000 };
        services.on_event(&frame(call.encode_with(&Ask::Double(1)).unwrap()));
    }
    assert_eq!(network.take(), [Header::Fault { correlation: 3, fault: Fault::Overloaded }]);
}

#[test]
fn what_cannot_be_read_is_said_or_ends_the_connection() {
    let (services, network) = (router(), FakeNetwork::default());
    services.attach(Arc::new(network.clone()));
    services.serve::<Doubler>(answer).unwrap();
    services.on_event(&connected());
    let call = |service| Header::Call { correlation: 5, service, deadline_ms: 1000 };
    services.on_event(&frame(call(Doubler::ID).encode_with(&77_u8).unwrap()));
    services.on_event(&frame(call(ServiceId::user(9)).encode_with(&77_u8).unwrap()));
    let said = network.take();
    assert!(
        matches!(&said[..], [Header::Fault { fault: Fault::Malformed(_), .. }, Header::Fault { fault: Fault::UnknownService, .. }]),
        "{said:?}"
    );
    assert_eq!(*network.0.disconnected.lock().unwrap(), []);
    services.on_event(&frame(Bytes::from_static(&[200, 1, 2])));
    assert_eq!(*network.0.disconnected.lock().unwrap(), [PEER]);
}

#[tokio::test]
async fn an_answer_that_nobody_can_read_is_the_callers_error() {
    let (services, network) = (router(), FakeNetwork::default());
    services.attach(Arc::new(network.clone()));
    services.on_event(&connected());
    let remote = services.remote::<Doubler>(PEER);
    let call = tokio::spawn(async move { remote.call(Ask::Double(1), SOON).await });
    let correlation = loop {
        match network.take()[..] {
            [Header::Call { correlation, .. }] => break correlation,
            _ => tokio::task::yield_now().await,
        }
    };
    // Not from the one that was asked: ignored.
    let reply = Header::Reply { correlation }.encode_with(&2_u32).unwrap();
    services.on_event(&NetworkEvent::Frame { peer: NodeId([3; 32]), frame: reply });
    services.on_event(&frame(Header::Reply { correlation }.encode_with(&"not a number").unwrap()));
    assert!(matches!(call.await.unwrap(), Err(CallError::Malformed { .. })));
}

proptest! {
    #[test]
    fn no_frame_breaks_the_router(frames in prop::collection::vec(prop::collection::vec(prop_oneof![0..6_u8, any::<u8>()], 0..40), 0..20)) {
        let (services, network) = (router(), FakeNetwork::default());
        services.attach(Arc::new(network));
        services.serve::<Impostor>(|inbound| if let Some(reply) = inbound.reply { reply.reply(inbound.request) }).unwrap();
        services.on_event(&connected());
        for bytes in frames {
            services.on_event(&frame(bytes.into()));
        }
        prop_assert_eq!(services.connected(), [PEER]);
    }
}
