//! Hops over real providers, whose links are killed, cut and mended under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::*;
use crate::Effects;
use crate::env::SystemRng;
use crate::link::{CloseReason, Link, LinkOptions};
use crate::path::estimate::Estimate;
use crate::provider::memory::{MemoryFabric, MemoryProvider, Shape};
#[cfg(target_os = "linux")]
use crate::provider::shm::{ShmOptions, ShmProvider};
use crate::provider::tcp::{TcpOptions, TcpProvider};
use crate::provider::{Desk, Endpoint, Provider, ProviderKind, Ticket};
use crate::testing::{effects, soon};

const CHANNEL: ChannelOptions = ChannelOptions { slot_bytes: 4096, slots: 4 };

fn fence() -> Fence {
    Fence { instance: 77, ..Fence::default() }
}

fn quick() -> PathOptions {
    PathOptions {
        patience: Duration::from_secs(30),
        dial_max: Duration::from_secs(10),
        take_max: Duration::from_secs(10),
        stagger: Duration::from_millis(20),
        probe_interval: Duration::from_millis(100),
        retry_interval: Duration::from_millis(20),
        margin_percent: 25,
        settle: Duration::from_millis(50),
    }
}

/// A way with a switch: while it is off nobody can be reached and its links are dead, without a word to either end.
#[derive(Debug)]
struct Switched {
    inner: Direct,
    on: AtomicBool,
    links: Mutex<Vec<std::sync::Weak<dyn Link>>>,
    made: AtomicU64,
    /// How its links call the other end.
    peer: Mutex<String>,
}

impl Switched {
    fn new(inner: Direct) -> Arc<Self> {
        Arc::new(Self { inner, on: AtomicBool::new(true), links: Mutex::default(), made: AtomicU64::new(0), peer: Mutex::default() })
    }

    fn kill(&self) {
        for link in lock(&self.links).drain(..).filter_map(|link| link.upgrade()) {
            link.close(CloseReason::Broken("killed by a test".to_owned()));
        }
    }

    fn turn(&self, on: bool) {
        self.on.store(on, Ordering::Release);
        if !on {
            self.kill();
        }
    }
}

impl Route for Switched {
    fn dial(&self, ticket: &Ticket, options: LinkOptions, deadline: Instant) -> Result<Arc<dyn Link>, RouteError> {
        let off = || RouteError { failure: Failure::Unreached, reason: "it is off".to_owned() };
        if !self.on.load(Ordering::Acquire) {
            return Err(off());
        }
        let link = self.inner.dial(ticket, options, deadline)?;
        lock(&self.links).push(Arc::downgrade(&link));
        *lock(&self.peer) = link.peer();
        self.made.fetch_add(1, Ordering::Relaxed);
        if !self.on.load(Ordering::Acquire) {
            self.kill();
            return Err(off());
        }
        Ok(link)
    }

    fn guess(&self) -> Estimate {
        self.inner.guess()
    }

    fn label(&self) -> String {
        self.inner.label()
    }
}

/// Both nodes' providers, each node with one desk.
struct Place {
    effects: Effects,
    near: Vec<Arc<dyn Provider>>,
    far: Vec<Arc<dyn Provider>>,
}

impl Place {
    fn new(make: impl Fn(&Effects, Arc<Desk>) -> Vec<Arc<dyn Provider>>) -> Self {
        let effects = effects();
        let node = || make(&effects, Desk::new(ProviderKind::Tcp, Arc::clone(&effects.clock)));
        Self { near: node(), far: node(), effects }
    }

    /// Two fabrics, of which the first is faster.
    fn memory() -> Self {
        let fast = MemoryFabric::new(&SystemRng, Shape::default());
        let slow = MemoryFabric::new(&SystemRng, Shape { latency: Duration::from_millis(2), bytes_per_second: None });
        // So that ends have different names on the two.
        let _other = MemoryProvider::new(effects(), &slow);
        Self::new(|effects, desk| {
            let join = |fabric| -> Arc<dyn Provider> { Arc::new(MemoryProvider::with_desk(effects.clone(), fabric, Arc::clone(&desk))) };
            vec![join(&fast), join(&slow)]
        })
    }

    fn tcp_provider(effects: &Effects, desk: &Arc<Desk>) -> Arc<dyn Provider> {
        let silence_max = Duration::from_secs(60);
        let options = TcpOptions { listen: vec!["127.0.0.1:0".parse().unwrap()], silence_max, ..TcpOptions::default() };
        Arc::new(TcpProvider::with_desk(effects.clone(), options, Arc::clone(desk)).unwrap())
    }

    fn tcp() -> Self {
        Self::new(|effects, desk| vec![Self::tcp_provider(effects, &desk), Self::tcp_provider(effects, &desk)])
    }

    #[cfg(target_os = "linux")]
    fn shm() -> Self {
        Self::new(|effects, desk| {
            let patience = Duration::from_secs(60);
            let options = ShmOptions { silence_max: patience, handshake_max: patience, ..ShmOptions::default() };
            let shm = ShmProvider::with_desk(effects.clone(), options, Arc::clone(&desk)).unwrap();
            vec![Arc::new(shm), Self::tcp_provider(effects, &desk)]
        })
    }

    fn routes(&self) -> Vec<Arc<Switched>> {
        let pairs = self.near.iter().zip(&self.far);
        pairs.map(|(near, far)| Switched::new(Direct::new(Arc::clone(near), far.endpoints()[0]))).collect()
    }

    /// Both ends of a hop over these ways.
    fn open(&self, routes: &[Arc<Switched>], options: PathOptions) -> (Opening, Opening) {
        let secret = Ticket::random(&SystemRng);
        let link = LinkOptions::for_payload(CHANNEL.slot_bytes);
        let expecting = expect(&self.far[0], &secret, link, options, &self.effects).unwrap();
        let routes: Vec<Arc<dyn Route>> = routes.iter().map(|route| -> Arc<dyn Route> { Arc::<Switched>::clone(route) }).collect();
        let near = dial(routes, &secret, link, options, &self.effects, soon(&self.effects)).unwrap();
        (near, expecting.accept(soon(&self.effects)).unwrap())
    }

    fn soon(&self) -> Instant {
        soon(&self.effects)
    }
}

/// A message that says which it is, with a length of its own; the channel checks its bytes.
fn message(number: u64) -> Vec<u8> {
    let bytes = 8 + (number.wrapping_mul(2_654_435_761) % 2000) as usize;
    let mut message = vec![number as u8; bytes];
    message[..8].copy_from_slice(&number.to_le_bytes());
    message
}

fn send_all(mut sender: PathSender, count: u64, place: &Place) {
    for number in 0..count {
        sender.send(3, &[&message(number)], place.soon()).unwrap();
    }
    sender.flush(place.soon()).unwrap();
}

fn receive_all(receiver: &mut PathReceiver, count: u64, place: &Place, seen: &AtomicU64) {
    for number in 0..count {
        let received = receiver.recv(place.soon()).unwrap();
        assert_eq!(received.payload(), &message(number)[..], "message {number}");
        seen.store(number, Ordering::Relaxed);
    }
}

/// Thousands of messages both ways, while `trouble` does what it does; it is handed how far the messages have come.
fn under_load(place: &Place, routes: &[Arc<Switched>], count: u64, trouble: impl Fn(&AtomicU64, &AtomicBool) + Send + Sync) {
    let (near, far) = place.open(routes, quick());
    let near = near.duplex(fence(), CHANNEL).unwrap();
    let far = far.duplex(fence(), CHANNEL).unwrap();
    let (seen, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (mut sending, mut receiving) = (Vec::new(), Vec::new());
        for (sender, mut receiver) in [near, far] {
            let seen = &seen;
            sending.push(scope.spawn(move || send_all(sender, count, place)));
            receiving.push(scope.spawn(move || {
                receive_all(&mut receiver, count, place, seen);
                receiver
            }));
        }
        let troubling = scope.spawn(|| trouble(&seen, &done));
        let receivers: Vec<PathReceiver> = receiving.into_iter().map(|thread| thread.join().unwrap()).collect();
        done.store(true, Ordering::Release);
        // Whoever sent waits for the acknowledgement, and the receiving ends give it as long as they are there.
        sending.into_iter().for_each(|thread| thread.join().unwrap());
        troubling.join().unwrap();
        drop(receivers);
    });
}

fn random(seed: &mut u64, below: u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed % below
}

fn sleep_ms(ms: u64) {
    std::thread::sleep(Duration::from_millis(ms));
}

const MANY: u64 = 4000;

fn links_that_are_killed_lose_nothing(place: &Place) {
    let routes = place.routes();
    let killed = AtomicU64::new(0);
    under_load(place, &routes, MANY, |seen, done| {
        let mut seed = 0x9e37_79b9;
        let mut next = 100;
        while !done.load(Ordering::Acquire) {
            if seen.load(Ordering::Relaxed) >= next {
                next += 200 + random(&mut seed, 200);
                routes[random(&mut seed, 2) as usize].kill();
                killed.fetch_add(1, Ordering::Relaxed);
            }
            std::thread::yield_now();
        }
    });
    assert!(killed.load(Ordering::Relaxed) >= 5);
    assert!(routes.iter().map(|route| route.made.load(Ordering::Relaxed)).sum::<u64>() >= 5);
}

fn ways_that_flap_lose_nothing(place: &Place) {
    let routes = place.routes();
    under_load(place, &routes, MANY / 2, |_, done| {
        let mut seed = 0x1234_5677;
        while !done.load(Ordering::Acquire) {
            // At times both are off.
            routes[random(&mut seed, 2) as usize].turn(random(&mut seed, 3) != 0);
            sleep_ms(random(&mut seed, 20));
        }
        routes.iter().for_each(|route| route.turn(true));
    });
}

/// Waits until the hop is carried by this way.
fn wait_for(place: &Place, sender: &PathSender, way: &Switched) {
    let deadline = place.soon();
    loop {
        let health = sender.health().unwrap();
        if health.peer == *lock(&way.peer) {
            return;
        }
        assert!(place.effects.clock.now() < deadline, "it is carried by {health:?}");
        sleep_ms(2);
    }
}

fn the_better_way_is_left_and_taken_back(place: &Place) {
    let routes = place.routes();
    let (near, far) = place.open(&routes, quick());
    let mut sender = near.sender(fence(), CHANNEL).unwrap();
    let mut receiver = far.receiver(fence(), CHANNEL).unwrap();
    // On a busy machine the other one may be there first.
    wait_for(place, &sender, &routes[0]);
    let first = sender.health().unwrap();
    let mut number = 0;
    let mut exchange = |sender: &mut PathSender, receiver: &mut PathReceiver| {
        std::thread::scope(|scope| {
            let (from, to) = (number, number + 50);
            scope.spawn(move || {
                for number in from..to {
                    sender.send(3, &[&message(number)], place.soon()).unwrap();
                }
            });
            for number in from..to {
                assert_eq!(receiver.recv(place.soon()).unwrap().payload(), &message(number)[..]);
            }
            number = to;
        });
    };
    exchange(&mut sender, &mut receiver);
    routes[0].turn(false);
    exchange(&mut sender, &mut receiver);
    let second = sender.health().unwrap();
    assert!(second.epoch > first.epoch);
    assert_eq!(second.peer, *lock(&routes[1].peer));
    routes[0].turn(true);
    // A switch asks nothing of the sending thread, and the receiving one is in the midst of something else.
    wait_for(place, &sender, &routes[0]);
    exchange(&mut sender, &mut receiver);
    assert_eq!(receiver.health().unwrap().epoch, sender.health().unwrap().epoch);
}

fn a_hop_without_a_way_goes_down_with_reasons(place: &Place) {
    let routes = place.routes();
    let options = PathOptions { patience: Duration::from_millis(100), ..quick() };
    let (near, far) = place.open(&routes, options);
    let mut sender = near.sender(fence(), CHANNEL).unwrap();
    let mut receiver = far.receiver(fence(), CHANNEL).unwrap();
    sender.send(3, &[&message(0)], place.soon()).unwrap();
    assert_eq!(receiver.recv(place.soon()).unwrap().payload(), &message(0)[..]);
    routes.iter().for_each(|route| route.turn(false));
    let SendError::Down(down) = (loop {
        if let Err(error) = sender.send(3, &[&message(1)], place.soon()) {
            break error;
        }
    }) else {
        panic!("it is not down")
    };
    let Down::NoWay { lost: Some(_), ways } = &down else { panic!("{down:?}") };
    for route in &routes {
        assert!(ways.contains(&route.label()) && ways.contains("it is off"), "{ways}");
    }
    let error = loop {
        if let Err(error) = receiver.recv(place.soon()) {
            break error;
        }
    };
    assert!(matches!(error, RecvError::Down(Down::NoPeer { .. })), "{error:?}");
}

fn whoever_ends_a_hop_is_not_waited_for(place: &Place) {
    // An hour of patience, which nobody has.
    let options = PathOptions { patience: Duration::from_secs(3600), ..quick() };
    let (near, far) = place.open(&place.routes(), options);
    let (mut sender, mut receiver) = (near.sender(fence(), CHANNEL).unwrap(), far.receiver(fence(), CHANNEL).unwrap());
    sender.send(3, &[&message(0)], place.soon()).unwrap();
    sender.flush(place.soon()).unwrap();
    drop(sender);
    assert_eq!(receiver.recv(place.soon()).unwrap().payload(), &message(0)[..]);
    assert_eq!(receiver.recv(place.soon()).unwrap_err(), RecvError::Down(Down::Ended));

    let (near, far) = place.open(&place.routes(), options);
    let (mut sender, receiver) = (near.sender(fence(), CHANNEL).unwrap(), far.receiver(fence(), CHANNEL).unwrap());
    drop(receiver);
    let error = loop {
        if let Err(error) = sender.send(3, &[&message(0)], place.soon()) {
            break error;
        }
    };
    assert!(matches!(error, SendError::Down(Down::NoWay { .. })), "{error:?}");

    let (near, far) = place.open(&place.routes(), options);
    let (sender, mut receiver) = (near.sender(fence(), CHANNEL).unwrap(), far.receiver(fence(), CHANNEL).unwrap());
    let closer = receiver.closer();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| receiver.recv(place.soon()).map(|_| ()));
        closer.close();
        assert_eq!(waiting.join().unwrap(), Err(RecvError::Down(Down::Local)));
    });
    drop(sender);
}

macro_rules! places {
    ($($name:ident = $place:expr;)*) => {
        $(places!(@one $name $place; links_that_are_killed_lose_nothing ways_that_flap_lose_nothing
            the_better_way_is_left_and_taken_back a_hop_without_a_way_goes_down_with_reasons whoever_ends_a_hop_is_not_waited_for);)*
    };
    (@one $name:ident $place:expr; $($test:ident)*) => {
        mod $name {
            use super::*;
            $(#[test] fn $test() { super::$test(&$place); })*
        }
    };
}

places! {
    memory = Place::memory();
}

#[cfg(target_os = "linux")]
places! {
    shared_memory_and_tcp = Place::shm();
}

mod tcp {
    use super::*;

    // Two addresses of one host are equally good, so there is no better one.
    #[test]
    fn links_that_are_killed_lose_nothing() {
        super::links_that_are_killed_lose_nothing(&Place::tcp());
    }

    #[test]
    fn ways_that_flap_lose_nothing() {
        super::ways_that_flap_lose_nothing(&Place::tcp());
    }

    #[test]
    fn a_hop_without_a_way_goes_down_with_reasons() {
        super::a_hop_without_a_way_goes_down_with_reasons(&Place::tcp());
    }

    #[test]
    fn whoever_ends_a_hop_is_not_waited_for() {
        super::whoever_ends_a_hop_is_not_waited_for(&Place::tcp());
    }
}

#[test]
fn a_secret_opens_nothing_but_its_own_hop() {
    let place = Place::memory();
    let secret = Ticket::random(&SystemRng);
    let link = LinkOptions::for_payload(CHANNEL.slot_bytes);
    let options = quick();
    let expecting = expect(&place.far[0], &secret, link, options, &place.effects).unwrap();
    let routes = || -> Vec<Arc<dyn Route>> { place.routes().into_iter().map(|route| -> Arc<dyn Route> { route }).collect() };
    let error = dial(routes(), &Ticket::random(&SystemRng), link, options, &place.effects, place.soon()).unwrap_err();
    assert!(error.to_string().contains("refused"), "{error}");
    // The secret itself is no ticket.
    place.near[0].dial(&place.far[0].endpoints()[0], &secret, link, place.soon()).unwrap_err();
    let near = dial(routes(), &secret, link, options, &place.effects, place.soon()).unwrap();
    drop((near, expecting.accept(place.soon()).unwrap()));
}

#[test]
fn a_hop_with_no_way_says_so_at_once() {
    let effects = effects();
    let secret = Ticket::random(&SystemRng);
    let error = dial(Vec::new(), &secret, LinkOptions::default(), quick(), &effects, soon(&effects)).unwrap_err();
    assert!(matches!(error, PathError::Down(Down::NoWay { lost: None, .. })), "{error:?}");
}

/// A node in the middle, which two others reach that do not reach each other.
struct Between {
    place: Place,
    middle: Vec<Arc<dyn Provider>>,
    detours: Mutex<Vec<forward::Detour>>,
    accepting: Endpoint,
}

impl Between {
    fn new() -> Arc<Self> {
        let effects = effects();
        let shape = Shape::default();
        let [left, right] = [MemoryFabric::new(&SystemRng, shape), MemoryFabric::new(&SystemRng, shape)];
        let node = |fabrics: &[&MemoryFabric]| -> Vec<Arc<dyn Provider>> {
            let desk = Desk::new(ProviderKind::Memory, Arc::clone(&effects.clock));
            let join = |fabric: &&MemoryFabric| -> Arc<dyn Provider> {
                Arc::new(MemoryProvider::with_desk(effects.clone(), fabric, Arc::clone(&desk)))
            };
            fabrics.iter().map(join).collect()
        };
        let (near, far, middle) = (node(&[&left]), node(&[&right]), node(&[&left, &right]));
        let accepting = far[0].endpoints()[0];
        Arc::new(Self { place: Place { near, far, effects }, middle, detours: Mutex::default(), accepting })
    }
}

impl std::fmt::Debug for Between {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Between")
    }
}

/// Stands for the control stream.
impl forward::Ask for Between {
    fn ask(&self, ticket: &Ticket, link: LinkOptions, deadline: Instant) -> Result<(Vec<Endpoint>, Ticket), RouteError> {
        let onward: Vec<Arc<dyn Route>> = vec![Arc::new(Direct::new(Arc::clone(&self.middle[1]), self.accepting))];
        match forward::forward(&self.middle[0], &onward, ticket, link, &self.place.effects, deadline) {
            Ok((own, detour)) => {
                let mut detours = lock(&self.detours);
                detours.retain(|detour| !detour.has_ended());
                detours.push(detour);
                Ok((self.middle[0].endpoints(), own))
            }
            Err(forward::ForwardError::Onward(error)) => Err(error),
            Err(error) => Err(RouteError { failure: Failure::Unknown, reason: error.to_string() }),
        }
    }

    fn label(&self) -> String {
        "the one between".to_owned()
    }
}

#[test]
fn a_node_in_the_middle_passes_messages_on() {
    let between = Between::new();
    let place = &between.place;
    let secret = Ticket::random(&SystemRng);
    let link = LinkOptions::for_payload(CHANNEL.slot_bytes);
    let expecting = expect(&place.far[0], &secret, link, quick(), &place.effects).unwrap();
    let ask: Arc<dyn forward::Ask> = Arc::<Between>::clone(&between);
    let routes: Vec<Arc<dyn Route>> = vec![
        Arc::new(Direct::new(Arc::clone(&place.near[0]), between.accepting)),
        Arc::new(forward::Around::new(ask, place.near.clone(), place.effects.clone())),
    ];
    let near = dial(routes, &secret, link, quick(), &place.effects, place.soon()).unwrap();
    let far = expecting.accept(place.soon()).unwrap();
    let (sender, mut receiver) = (near.sender(fence(), CHANNEL).unwrap(), far.receiver(fence(), CHANNEL).unwrap());
    let seen = AtomicU64::new(0);
    let count = 2000;
    std::thread::scope(|scope| {
        scope.spawn(|| send_all(sender, count, place));
        // The middle breaks down twice on the way, and is asked again.
        scope.spawn(|| {
            for at in [500, 1200] {
                while seen.load(Ordering::Relaxed) < at {
                    std::thread::yield_now();
                }
                lock(&between.detours).clear();
            }
        });
        receive_all(&mut receiver, count, place, &seen);
        let passed: Vec<_> = lock(&between.detours).iter().map(forward::Detour::passed).collect();
        assert!(passed.iter().any(|passed| passed.messages_out > 0 && passed.bytes_out > 64 * passed.messages_out), "{passed:?}");
        assert!(passed.iter().any(|passed| passed.messages_back > 0), "{passed:?}");
    });
    drop(receiver);
    // Detours end with the links that they were made for.
    let deadline = place.soon();
    while !lock(&between.detours).iter().all(forward::Detour::has_ended) {
        assert!(place.effects.clock.now() < deadline);
        sleep_ms(2);
    }
}

#[test]
fn a_detour_takes_nobody_without_its_ticket() {
    use forward::Ask;

    let between = Between::new();
    let place = &between.place;
    let ticket = Ticket::random(&SystemRng);
    let link = LinkOptions::default();
    // Nobody at the far end expects it: there is nothing to pass on.
    let error = between.ask(&ticket, link, place.soon()).unwrap_err();
    assert_eq!(error.failure, Failure::Refused);
    let expected = place.far[0].expect(&ticket, link).unwrap();
    let (endpoints, own) = between.ask(&ticket, link, place.soon()).unwrap();
    for stranger in [ticket, Ticket::random(&SystemRng), Ticket::new(own.id(), [1; 32])] {
        place.near[0].dial(&endpoints[0], &stranger, link, place.soon()).unwrap_err();
    }
    let near = place.near[0].dial(&endpoints[0], &own, link, place.soon()).unwrap();
    place.near[0].dial(&endpoints[0], &own, link, place.soon()).unwrap_err();
    let far = expected.accept(place.soon()).unwrap();
    let mut buffer = [0; 64];
    for (from, to) in [(&near, &far), (&far, &near)] {
        from.send(&[b"whole ", b"message"], place.soon()).unwrap();
        assert_eq!(to.recv(&mut buffer, place.soon()), Ok(13));
        assert_eq!(&buffer[..13], b"whole message");
    }
    // A message is counted when it has been passed on.
    let expected = forward::Passed { messages_out: 1, bytes_out: 13, messages_back: 1, bytes_back: 13 };
    let deadline = place.soon();
    while lock(&between.detours)[0].passed() != expected {
        assert!(place.effects.clock.now() < deadline, "{:?}", lock(&between.detours));
        sleep_ms(1);
    }
    // When one end leaves, the other one notices.
    far.close(CloseReason::Local);
    assert!(near.recv(&mut buffer, place.soon()).is_err());
}

#[cfg(target_os = "linux")]
#[test]
fn nothing_is_left_behind() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("tensor hop") || name.starts_with("tensor dial")).count()
    };
    // Other tests of this process open and close their own, so it is enough that the numbers do not grow with the hops.
    let place = Place::shm();
    let before = (descriptors(), threads());
    let rounds = 40;
    for _ in 0..rounds {
        let routes = place.routes();
        let (near, far) = place.open(&routes, quick());
        let mut sender = near.sender(fence(), CHANNEL).unwrap();
        let mut receiver = far.receiver(fence(), CHANNEL).unwrap();
        sender.send(3, &[&message(0)], place.soon()).unwrap();
        receiver.recv(place.soon()).unwrap();
        routes[0].kill();
        sender.send(3, &[&message(1)], place.soon()).unwrap();
        receiver.recv(place.soon()).unwrap();
    }
    let deadline = place.soon();
    loop {
        let now = (descriptors(), threads());
        // One that each hop leaves behind would show.
        if now.0 < before.0 + rounds / 2 && now.1 < before.1 + rounds / 2 {
            break;
        }
        assert!(place.effects.clock.now() < deadline, "{before:?} before, {now:?} after");
        sleep_ms(10);
    }
}
