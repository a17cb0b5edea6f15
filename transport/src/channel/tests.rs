//! The two machines against each other, over a wire that a test plays.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::machine::*;
use super::{GRANT_BYTES, Grant};
use crate::frame::{Fence, FrameClass, FrameHeader, HEADER_BYTES, TermTag};

fn fence(epoch: u32) -> Fence {
    Fence { instance: 5, term: TermTag { counter: 1, node: 2 }, epoch }
}

fn deliver(receiver: &mut ReceiverMachine, header: &FrameHeader) -> Result<Arrival, Violation> {
    let arrival = receiver.arrive(header)?;
    if arrival == Arrival::Expected {
        assert!(receiver.accept(header));
    }
    Ok(arrival)
}

#[test]
fn nothing_is_sent_before_a_grant_nor_beyond_it() {
    let mut sender = SenderMachine::new(fence(1), 8, 100);
    let mut receiver = ReceiverMachine::new(fence(1), 2, 50);
    assert_eq!(sender.admit(10), Admission::Wait);
    let (header, payload) = receiver.grant();
    assert_eq!(sender.granted(&header, &payload), Ok(Granted::Taken));
    // The smaller of both ends' slots counts.
    assert_eq!(sender.admit(51), Admission::TooLong { limit: 50 });
    for _ in 0..2 {
        assert_eq!(sender.admit(50), Admission::Now);
        let header = sender.commit(0, 0, 0, 0);
        assert_eq!(deliver(&mut receiver, &header), Ok(Arrival::Expected));
    }
    assert_eq!(sender.admit(1), Admission::Wait);
    receiver.release();
    assert!(receiver.grant_due());
    let (header, payload) = receiver.grant();
    sender.granted(&header, &payload).unwrap();
    assert_eq!(sender.unacked(), 2..2);
    assert_eq!(sender.admit(1), Admission::Now);
}

#[test]
fn a_message_that_did_not_go_out_keeps_its_number() {
    let mut sender = SenderMachine::new(fence(1), 8, 100);
    let (header, payload) = ReceiverMachine::new(fence(1), 2, 50).grant();
    sender.granted(&header, &payload).unwrap();
    assert_eq!(sender.commit(0, 0, 0, 0).sequence, 0);
    sender.abort();
    assert_eq!(sender.commit(0, 0, 0, 0).sequence, 0);
}

#[test]
fn grants_that_make_no_sense_are_violations() {
    let mut sender = SenderMachine::new(fence(1), 8, 100);
    let frame = |acked, limit| {
        let payload = Grant { acked, limit, slot_bytes: 9 }.encode();
        (FrameHeader { class: FrameClass::Grant, kind: 0, flags: 0, length: 24, sequence: 0, fence: fence(1), crc32c: 0 }, payload)
    };
    let (header, payload) = frame(1, 4);
    assert!(matches!(sender.granted(&header, &payload), Err(Violation::Grant { .. })), "nothing was sent yet");
    let (header, payload) = frame(0, 4);
    sender.granted(&header, &payload).unwrap();
    let (header, payload) = frame(0, 3);
    assert!(matches!(sender.granted(&header, &payload), Err(Violation::Grant { .. })), "a grant is not taken back");
    assert_eq!(sender.granted(&header, &[0; 3]), Err(Violation::GrantMalformed { bytes: 3 }));
}

#[test]
fn a_grant_of_a_newer_fence_is_kept_for_it() {
    let mut sender = SenderMachine::new(fence(1), 8, 100);
    let (header, payload) = ReceiverMachine::new(fence(3), 2, 50).grant();
    assert_eq!(sender.granted(&header, &payload), Ok(Granted::Ahead(fence(3))));
    assert_eq!(sender.admit(1), Admission::Ahead(fence(3)));
    assert!(sender.rearm(fence(1)).is_err());
    sender.rearm(fence(2)).unwrap();
    assert_eq!(sender.admit(1), Admission::Ahead(fence(3)), "the receiver is further still");
    sender.rearm(fence(3)).unwrap();
    assert_eq!(sender.admit(1), Admission::Now);
}

#[test]
fn the_layout_of_grants_is_pinned() {
    let grant = Grant { acked: 0x0102, limit: 0x0304, slot_bytes: 0x0506 };
    let bytes = grant.encode();
    assert_eq!(bytes, [2, 1, 0, 0, 0, 0, 0, 0, 4, 3, 0, 0, 0, 0, 0, 0, 6, 5, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Grant::decode(&bytes), Some(grant));
    assert_eq!(bytes.len(), GRANT_BYTES);
    assert_eq!(HEADER_BYTES % 64, 0);
}

/// What may happen to a channel, in any order.
#[derive(Debug, Clone, Copy)]
enum Event {
    Send,
    DeliverData,
    DeliverGrant,
    Receive,
    Grant,
    /// The link dies with all that is on it, and another one takes its place.
    Relink,
    RearmSender,
    RearmReceiver,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    use Event::*;
    let event = prop_oneof![
        8 => Just(Send), 8 => Just(DeliverData), 4 => Just(DeliverGrant), 6 => Just(Receive), 4 => Just(Grant),
        1 => Just(Relink), 1 => Just(RearmSender), 1 => Just(RearmReceiver),
    ];
    prop::collection::vec(event, 0..400)
}

/// Both machines and the wire between them, as the shells would drive them.
struct World {
    sender: SenderMachine,
    receiver: ReceiverMachine,
    data: VecDeque<FrameHeader>,
    grants: VecDeque<(FrameHeader, [u8; GRANT_BYTES])>,
    /// What is repeated on a new link, once the receiver has said how far it got.
    repeat: bool,
    /// What the user of the receiving end was handed and looks at.
    ready: VecDeque<(u32, u64)>,
    received: Vec<(u32, u64)>,
    slots: u64,
}

impl World {
    fn new(window: u16, slots: u16) -> Self {
        Self {
            sender: SenderMachine::new(fence(1), window, 10),
            receiver: ReceiverMachine::new(fence(1), slots, 10),
            data: VecDeque::new(),
            grants: VecDeque::new(),
            repeat: false,
            ready: VecDeque::new(),
            received: Vec::new(),
            slots: u64::from(slots),
        }
    }

    fn send(&mut self) -> bool {
        let header = match self.sender.admit(1) {
            _ if self.repeat => return false,
            Admission::Now => self.sender.commit(0, 0, 1, 0),
            Admission::Probe => self.sender.probe(),
            _ => return false,
        };
        self.data.push_back(header);
        true
    }

    fn deliver_data(&mut self) -> bool {
        let Some(header) = self.data.pop_front() else { return false };
        if deliver(&mut self.receiver, &header).expect("correct ends break no rule") == Arrival::Expected {
            self.ready.push_back((header.fence.epoch, header.sequence));
        }
        true
    }

    fn deliver_grant(&mut self) -> bool {
        let Some((header, payload)) = self.grants.pop_front() else { return false };
        self.sender.granted(&header, &payload).expect("correct ends break no rule");
        if self.repeat && !self.sender.is_relinking() {
            self.repeat = false;
            let fence = self.sender.fence();
            let again = |sequence| FrameHeader { class: FrameClass::Data, kind: 0, flags: 0, length: 1, sequence, fence, crc32c: 0 };
            self.data.extend(self.sender.unacked().map(again));
        }
        true
    }

    fn receive(&mut self) -> bool {
        let Some(message) = self.ready.pop_front() else { return false };
        self.received.push(message);
        self.receiver.release();
        true
    }

    fn grant(&mut self) -> bool {
        let due = self.receiver.grant_due();
        if due {
            let grant = self.receiver.grant();
            self.grants.push_back(grant);
        }
        due
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Send => drop(self.send()),
            Event::DeliverData => drop(self.deliver_data()),
            Event::DeliverGrant => drop(self.deliver_grant()),
            Event::Receive => drop(self.receive()),
            Event::Grant => drop(self.grant()),
            Event::Relink => {
                self.data.clear();
                self.grants.clear();
                self.sender.relink();
                self.receiver.relink();
                self.repeat = true;
            }
            Event::RearmSender => {
                let next = Fence { epoch: self.sender.fence().epoch + 1, ..fence(1) };
                self.sender.rearm(next).unwrap();
                self.repeat = false;
            }
            Event::RearmReceiver => {
                let next = Fence { epoch: self.receiver.fence().epoch + 1, ..fence(1) };
                self.receiver.rearm(next).unwrap();
                self.ready.clear();
            }
        }
    }

    fn check(&self) {
        assert!(self.receiver.held() <= self.slots, "more is held than there are slots");
        assert_eq!(self.receiver.held(), self.ready.len() as u64);
        for pair in self.received.windows(2) {
            let next = if pair[0].0 == pair[1].0 { pair[0].1 + 1 } else { 0 };
            assert_eq!(pair[1].1, next, "out of order: {pair:?}");
            assert!(pair[1].0 >= pair[0].0, "an old epoch after a new one: {pair:?}");
        }
    }
}

proptest! {
    #[test]
    fn order_holds_and_nothing_is_lost_whatever_happens(window in 1u16..6, slots in 1u16..6, events in events()) {
        let mut world = World::new(window, slots);
        for event in events {
            world.apply(event);
            world.check();
        }
        // Once nothing bad happens any more, both ends meet in one epoch and everything gets through.
        let newest = world.sender.fence().epoch.max(world.receiver.fence().epoch);
        if world.sender.fence().epoch < newest {
            world.sender.rearm(Fence { epoch: newest, ..fence(1) }).unwrap();
            world.repeat = false;
        }
        if world.receiver.fence().epoch < newest {
            world.receiver.rearm(Fence { epoch: newest, ..fence(1) }).unwrap();
            world.ready.clear();
        }
        let target = world.sender.unacked().end + 20;
        let mut steps = 0;
        while world.receiver.held() > 0 || world.sender.unacked().end < target || !world.data.is_empty() {
            let sent = world.sender.unacked().end < target && world.send();
            let moved = [sent, world.deliver_data(), world.receive(), world.grant(), world.deliver_grant()];
            world.check();
            prop_assert!(moved.contains(&true), "stuck: {:?} {:?}", world.sender, world.receiver);
            steps += 1;
            prop_assert!(steps < 10_000);
        }
        prop_assert_eq!(world.received.last(), Some(&(newest, target - 1)));
    }

    #[test]
    fn no_frame_makes_a_receiver_panic(frames in prop::collection::vec((any::<bool>(), 0u64..6, 0u32..3, any::<bool>()), 0..60)) {
        let mut receiver = ReceiverMachine::new(fence(1), 2, 10);
        for (probe, sequence, epoch, release) in frames {
            let class = if probe { FrameClass::Probe } else { FrameClass::Data };
            let header = FrameHeader { class, kind: 0, flags: 0, length: 0, sequence, fence: fence(epoch), crc32c: 0 };
            if receiver.arrive(&header) == Ok(Arrival::Expected) {
                receiver.accept(&header);
            }
            if release {
                receiver.release();
            }
            prop_assert!(receiver.held() <= 2);
        }
    }

    #[test]
    fn no_grant_makes_a_sender_panic(
        grants in prop::collection::vec((prop::collection::vec(0u8..4, 0..30), 0u32..3, any::<bool>()), 0..60),
    ) {
        let mut sender = SenderMachine::new(fence(1), 2, 10);
        for (payload, epoch, send) in grants {
            let header = FrameHeader { class: FrameClass::Grant, kind: 0, flags: 0, length: 0, sequence: 0, fence: fence(epoch), crc32c: 0 };
            drop(sender.granted(&header, &payload));
            if send && sender.admit(1) == Admission::Now {
                sender.commit(0, 0, 1, 0);
            }
            let unacked = sender.unacked();
            prop_assert!(unacked.end - unacked.start <= 2);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whole shells against a peer that says anything: nothing but good frames is received, and the channel ends well.
    #[test]
    fn no_message_makes_a_channel_panic(
        messages in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..120), any::<bool>(), 0u8..4, 0u64..3), 0..10),
    ) {
        use crate::env::SystemRng;
        use crate::link::LinkOptions;
        use crate::provider::memory::{MemoryFabric, MemoryProvider, Shape};
        use crate::provider::{Provider, Ticket};
        use crate::testing::{effects, soon};

        let effects = effects();
        let fabric = MemoryFabric::new(&SystemRng, Shape::default());
        let provider = MemoryProvider::new(effects.clone(), &fabric);
        let ticket = Ticket::random(&SystemRng);
        let expected = provider.expect(&ticket, LinkOptions::default()).unwrap();
        let bare = provider.dial(&provider.endpoints()[0], &ticket, LinkOptions::default(), soon(&effects)).unwrap();
        let link = expected.accept(soon(&effects)).unwrap();
        let options = super::ChannelOptions { slot_bytes: 32, slots: 2 };
        let (_sender, mut receiver) = super::duplex(link, fence(1), options, &effects).unwrap();
        for (bytes, sealed, class, sequence) in messages {
            let class = match class {
                0 | 1 => FrameClass::Data,
                2 => FrameClass::Grant,
                _ => FrameClass::Probe,
            };
            let crc32c = crate::frame::payload_crc(&[&bytes]);
            let header = FrameHeader { class, kind: 9, flags: 0, length: bytes.len() as u32, sequence, fence: fence(1), crc32c };
            let parts: &[&[u8]] = if sealed { &[&header.encode(), &bytes] } else { &[&bytes] };
            drop(bare.send(parts, soon(&effects)));
        }
        drop(bare);
        let mut next = 0;
        while let Ok(received) = receiver.recv(soon(&effects)) {
            prop_assert!(received.kind() == 9 && received.payload().len() <= 32 && received.sequence() == next);
            next += 1;
        }
        prop_assert!(receiver.health().closed.is_some());
    }
}
