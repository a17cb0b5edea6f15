use proptest::prelude::*;

use super::*;
use crate::env::InterfaceAddress;

fn at(millis: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(millis)
}

fn node(byte: u8) -> NodeId {
    NodeId([byte; 32])
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn interfaces() -> Vec<Interface> {
    let own = |ip: &str| InterfaceAddress { ip: ip.parse().unwrap(), prefix: 24 };
    vec![Interface { index: 2, name: "eth0".to_owned(), addresses: vec![own("192.168.0.2")], loopback: false, point_to_point: false }]
}

/// A book of node 5.
fn book() -> PeerBook {
    let mut book = PeerBook::new(node(5), 16, 1);
    book.step(at(0), Input::Interfaces(interfaces()));
    book.step(at(0), Input::Listening(address("192.168.0.2:4000")));
    book
}

fn heard(peer: u8, incarnation: u64, addresses: &[&str]) -> Input {
    Input::Heard {
        peer: node(peer),
        incarnation: Some(Incarnation(incarnation)),
        addresses: addresses.iter().map(|text| address(text)).collect(),
        source: Source::Beacon,
    }
}

fn dials(outputs: &[Output]) -> Vec<SocketAddr> {
    outputs.iter().filter_map(|output| if let Output::Dial { address, .. } = output { Some(*address) } else { None }).collect()
}

/// Runs until `end`, failing every dial; says when which was made.
fn run_failing(book: &mut PeerBook, mut now: Instant, end: Instant) -> Vec<(Instant, SocketAddr)> {
    let mut made = Vec::new();
    while now < end {
        for address in dials(&book.step(now, Input::Tick)) {
            made.push((now, address));
            for again in dials(&book.step(now, Input::DialFailed { address, reason: "no".to_owned() })) {
                made.push((now, again));
            }
        }
        now = book.deadline(now).max(now + Duration::from_millis(1));
    }
    made
}

#[test]
fn the_higher_id_is_dialled_at_once_and_the_lower_one_given_time() {
    let mut book = book();
    assert_eq!(dials(&book.step(at(10), heard(9, 1, &["192.168.0.9:1"]))), [address("192.168.0.9:1")]);
    assert!(dials(&book.step(at(10), heard(1, 1, &["192.168.0.1:1"]))).is_empty());
    let due = book.deadline(at(10));
    assert_eq!(due, at(10) + COURTESY);
    assert_eq!(dials(&book.step(due, Input::Tick)), [address("192.168.0.1:1")]);
}

#[test]
fn addresses_are_tried_best_first_with_a_head_start() {
    let mut book = book();
    let first = book.step(at(0), heard(9, 1, &["169.254.9.9:1", "10.7.7.7:1", "192.168.0.9:1"]));
    assert_eq!(dials(&first), [address("192.168.0.9:1")]);
    assert!(dials(&book.step(at(100), Input::Tick)).is_empty());
    assert_eq!(dials(&book.step(at(250), Input::Tick)), [address("10.7.7.7:1")]);
    let failed = Input::DialFailed { address: address("10.7.7.7:1"), reason: "unreachable".to_owned() };
    assert_eq!(dials(&book.step(at(260), failed)), [address("169.254.9.9:1")], "a failure shortens the wait");
    book.step(at(300), Input::Connected { peer: node(9), address: address("192.168.0.9:1"), dialled: true });
    assert!(run_failing(&mut book, at(300), at(60_000)).is_empty(), "nothing is dialled while connected");
}

#[test]
fn it_never_dials_itself() {
    let mut book = book();
    for source in [Source::Mdns, Source::Beacon, Source::Card, Source::Seen] {
        let addresses = vec![address("192.168.0.2:4000"), address("192.168.0.2:4001")];
        let outputs = book.step(at(0), Input::Heard { peer: node(5), incarnation: None, addresses, source });
        assert!(outputs.is_empty());
        let stranger = Input::Heard { peer: node(9), incarnation: None, addresses: vec![address("192.168.0.2:4000")], source };
        assert!(dials(&book.step(at(0), stranger)).is_empty());
    }
    assert!(dials(&book.step(at(0), Input::Ask(address("192.168.0.2:4000")))).is_empty());
    book.step(at(0), Input::Listening(address("0.0.0.0:4444")));
    assert!(dials(&book.step(at(0), Input::Ask(address("127.0.0.1:4444")))).is_empty());
    assert!(dials(&book.step(at(0), Input::Ask(address("192.168.0.2:4444")))).is_empty());
}

#[test]
fn failures_space_dials_out_and_a_beacon_brings_them_back() {
    let mut book = book();
    book.step(at(0), heard(9, 1, &["192.168.0.9:1"]));
    book.step(at(0), Input::DialFailed { address: address("192.168.0.9:1"), reason: "no".to_owned() });
    let made = run_failing(&mut book, at(0), at(120_000));
    let pauses: Vec<Duration> = made.windows(2).map(|pair| pair[1].0.since(pair[0].0)).collect();
    assert!(made.len() >= 6 && made.len() <= 12, "{pauses:?}");
    assert!(pauses.iter().all(|pause| *pause <= BACKOFF_MAX * 5 / 4 + STAGGER));
    assert!(pauses.last() > pauses.first());
    let outputs = book.step(at(120_000), heard(9, 1, &["192.168.0.9:1"]));
    let made = run_failing(&mut book, at(120_000), at(123_000));
    assert!(!made.is_empty() || !dials(&outputs).is_empty(), "what is heard now is tried soon");
}

#[test]
fn a_peer_of_the_same_host_is_reached_by_loopback_and_no_other_is() {
    let mut book = book();
    assert_eq!(dials(&book.step(at(0), heard(8, 1, &["192.168.0.2:77", "127.0.0.1:77"]))), [address("127.0.0.1:77")]);
    let mdns = Input::Heard {
        peer: node(9),
        incarnation: None,
        addresses: vec![address("127.0.0.1:78"), address("192.168.0.9:78")],
        source: Source::Mdns,
    };
    assert_eq!(dials(&book.step(at(0), mdns)), [address("192.168.0.9:78")]);
    assert!(!run_failing(&mut book, at(0), at(30_000)).iter().any(|(_, at)| *at == address("127.0.0.1:78")));
}

#[test]
fn a_refusal_is_told_once_and_ends_with_the_next_life() {
    let mut book = book();
    book.step(at(0), heard(9, 1, &["192.168.0.9:1"]));
    let refused = Input::Refused { peer: Some(node(9)), address: Some(address("192.168.0.9:1")), reason: "needs a key".to_owned() };
    let outputs = book.step(at(1), refused.clone());
    assert!(matches!(outputs.as_slice(), [Output::Refusal(refusal)] if refusal.reason == "needs a key"), "{outputs:?}");
    assert!(book.step(at(2), refused).is_empty());
    assert!(run_failing(&mut book, at(3), at(40_000)).is_empty());
    assert_eq!(book.refusals().len(), 1);
    assert_eq!(dials(&book.step(at(40_000), heard(9, 2, &["192.168.0.9:1"]))), [address("192.168.0.9:1")]);
    book.step(at(40_100), Input::Connected { peer: node(9), address: address("192.168.0.9:1"), dialled: true });
    assert!(book.refusals().is_empty());
}

#[test]
fn a_given_address_is_dialled_until_it_answers_and_again_when_it_is_lost() {
    let mut book = book();
    assert_eq!(dials(&book.step(at(0), Input::Ask(address("10.0.0.9:1")))), [address("10.0.0.9:1")]);
    book.step(at(0), Input::DialFailed { address: address("10.0.0.9:1"), reason: "no".to_owned() });
    let hour = 3_600_000;
    let made = run_failing(&mut book, at(0), at(hour));
    assert!(made.len() > 90, "a given address is not given up: {}", made.len());
    book.step(at(hour), Input::Connected { peer: node(1), address: address("10.0.0.9:1"), dialled: true });
    assert!(run_failing(&mut book, at(hour), at(hour + 60_000)).is_empty());
    book.step(at(hour), Input::Ask(address("10.0.0.10:1")));
    book.step(at(hour), Input::AlreadyConnected { peer: node(1), address: address("10.0.0.10:1") });
    assert!(run_failing(&mut book, at(hour), at(hour + 60_000)).is_empty(), "another address of the same peer");
    book.step(at(hour + 60_000), Input::Disconnected { peer: node(1) });
    assert!(!run_failing(&mut book, at(hour + 60_000), at(hour + 65_000)).is_empty());
}

#[test]
fn beyond_the_target_only_the_wanted_are_dialled() {
    let mut book = PeerBook::new(node(0), 3, 1);
    book.step(at(0), Input::Interfaces(interfaces()));
    for peer in 1..=5 {
        book.step(at(0), heard(peer, 1, &[&format!("192.168.0.{}:1", 10 + peer)]));
    }
    for peer in 1..=3 {
        book.step(at(1), Input::Connected { peer: node(peer), address: address(&format!("192.168.0.{}:1", 10 + peer)), dialled: true });
    }
    assert!(run_failing(&mut book, at(1), at(10_000)).is_empty());
    assert_eq!(dials(&book.step(at(10_000), Input::Want { peer: node(5), wanted: true })), [address("192.168.0.15:1")]);
    book.step(at(10_001), Input::Want { peer: node(5), wanted: false });
    book.step(at(10_001), Input::DialFailed { address: address("192.168.0.15:1"), reason: "no".to_owned() });
    assert!(run_failing(&mut book, at(10_001), at(20_000)).is_empty());
    let outputs = book.step(at(20_000), Input::Disconnected { peer: node(2) });
    assert_eq!(dials(&outputs).len(), 1, "a place is free again");
}

#[test]
fn the_long_silent_are_dropped_and_those_met_are_saved() {
    let mut book = book();
    book.step(at(0), heard(9, 1, &["192.168.0.9:1"]));
    book.step(at(1), heard(8, 1, &["192.168.0.8:1"]));
    let outputs = book.step(at(5000), Input::Connected { peer: node(9), address: address("192.168.0.9:1"), dialled: true });
    let Some(Output::Save(saved)) = outputs.first() else { panic!("no save: {outputs:?}") };
    assert_eq!(saved.as_slice(), [SeenPeer { node: node(9), addresses: vec![address("192.168.0.9:1")], starts: 0 }]);
    book.step(at(3_600_000), Input::Tick);
    assert_eq!(book.peers.keys().copied().collect::<Vec<_>>(), [node(9)]);
    let mut next = PeerBook::new(node(5), 16, 2);
    next.step(at(0), Input::Interfaces(interfaces()));
    assert_eq!(dials(&next.step(at(0), Input::Seen(saved.clone()))), [address("192.168.0.9:1")]);
}

fn any_input() -> impl Strategy<Value = Input> {
    let ip = prop_oneof![Just("192.168.0.9"), Just("10.0.0.1"), Just("127.0.0.1"), Just("169.254.0.1"), Just("192.168.0.2")];
    let spot = (ip, 1u16..5).prop_map(|(ip, port)| address(&format!("{ip}:{port}")));
    let peer = (0u8..12).prop_map(node);
    prop_oneof![
        4 => Just(Input::Tick),
        1 => spot.clone().prop_map(Input::Ask),
        4 => (peer.clone(), 0u64..3, proptest::collection::vec(spot.clone(), 0..4), 0..3).prop_map(|(peer, life, addresses, source)| {
            let source = [Source::Mdns, Source::Beacon, Source::Card][source as usize];
            Input::Heard { peer, incarnation: Some(Incarnation(life)), addresses, source }
        }),
        2 => (peer.clone(), spot.clone(), any::<bool>()).prop_map(|(peer, address, dialled)| Input::Connected { peer, address, dialled }),
        2 => peer.clone().prop_map(|peer| Input::Disconnected { peer }),
        2 => spot.clone().prop_map(|address| Input::DialFailed { address, reason: "no".to_owned() }),
        1 => (proptest::option::of(peer.clone()), proptest::option::of(spot)).prop_map(|(peer, address)| {
            Input::Refused { peer, address, reason: "key".to_owned() }
        }),
        1 => (peer, any::<bool>()).prop_map(|(peer, wanted)| Input::Want { peer, wanted }),
    ]
}

proptest! {
    #[test]
    fn whatever_happens_dials_stay_bounded_and_never_go_to_itself(
        inputs in proptest::collection::vec((any_input(), 0u64..3000), 1..200)
    ) {
        let mut book = PeerBook::new(node(5), 4, 3);
        book.step(at(0), Input::Interfaces(interfaces()));
        book.step(at(0), Input::Listening(address("192.168.0.2:3")));
        let mut now = at(0);
        let mut connected = BTreeSet::new();
        for (input, pause) in inputs {
            now = now + Duration::from_millis(pause);
            match &input {
                Input::Connected { peer, .. } if *peer != node(5) => drop(connected.insert(*peer)),
                Input::Disconnected { peer } => drop(connected.remove(peer)),
                _ => {}
            }
            for output in book.step(now, input) {
                if let Output::Dial { peer, address: to } = output {
                    prop_assert_ne!(to, address("192.168.0.2:3"));
                    prop_assert_ne!(peer, Some(node(5)));
                    prop_assert!(peer.is_none_or(|peer| !connected.contains(&peer)));
                }
            }
            prop_assert!(book.dials() <= DIALS_MAX);
            prop_assert!(book.peers.values().all(|peer| peer.spots.len() <= ADDRESSES_MAX));
            // A machine that is asked again at its deadline always gets further: it never spins.
            let due = book.deadline(now);
            if due <= now {
                book.step(now, Input::Tick);
                prop_assert!(book.deadline(now) > now, "nothing was due after all");
            }
        }
    }
}

/// The troubles that the book shows, as what they are about and what happened.
fn troubles(book: &PeerBook, now: Instant) -> Vec<(String, String)> {
    book.troubles(now).map(|trouble| (trouble.about, trouble.what)).collect()
}

#[test]
fn a_given_address_that_nobody_answers_at_is_a_trouble_until_somebody_does() {
    let mut book = book();
    let given = address("192.168.0.7:4100");
    assert_eq!(dials(&book.step(at(0), Input::Ask(given))), [given]);
    book.step(at(10), Input::DialFailed { address: given, reason: "Connection refused".to_owned() });
    assert!(troubles(&book, at(2_000)).is_empty(), "it may be starting");
    let due = at(10) + TROUBLE_AFTER;
    let mut now = at(10);
    while now < due {
        let next = book.deadline(now);
        assert!(next > now && next <= due, "the book wakes up to tell it");
        now = next;
        for address in dials(&book.step(now, Input::Tick)) {
            book.step(now, Input::DialFailed { address, reason: "Connection refused".to_owned() });
        }
    }
    let shown = [("peer 192.168.0.7:4100".to_owned(), "no node answers there: Connection refused".to_owned())];
    assert_eq!(troubles(&book, now), shown);
    run_failing(&mut book, now, at(60_000));
    assert_eq!(troubles(&book, at(60_000)).len(), 1, "however often it is tried");
    // Somebody who turns us away is shown as such.
    book.step(at(60_000), Input::Refused { peer: None, address: Some(given), reason: "this cluster needs a key".to_owned() });
    assert!(troubles(&book, at(60_000)).is_empty());
    book.step(at(180_000), Input::DialFailed { address: given, reason: "refused a moment ago".to_owned() });
    assert!(troubles(&book, at(190_000)).is_empty());
    book.step(at(190_000), Input::Connected { peer: node(9), address: given, dialled: true });
    assert!(troubles(&book, at(190_000)).is_empty());
    book.step(at(200_000), Input::Disconnected { peer: node(9) });
    assert!(troubles(&book, at(200_000)).is_empty(), "not before it fails anew");
    run_failing(&mut book, at(200_000), at(210_000));
    assert_eq!(troubles(&book, at(210_000)).len(), 1);
    // A connection that the other end made is as good.
    book.step(at(220_000), Input::Connected { peer: node(9), address: address("192.168.0.7:55555"), dialled: false });
    assert!(troubles(&book, at(230_000)).is_empty());
}

#[test]
fn a_given_address_that_is_silent_is_a_trouble() {
    let mut book = book();
    let given = address("192.168.0.7:4100");
    book.step(at(0), Input::Ask(given));
    let mut now = at(0);
    while now < at(20_000) {
        now = book.deadline(now);
        book.step(now, Input::Tick);
    }
    assert_eq!(troubles(&book, now), [("peer 192.168.0.7:4100".to_owned(), "no node answers there: nothing comes back".to_owned())]);
}
