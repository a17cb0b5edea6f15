//! Devices in memory that hold to Apple's contract and to nothing beyond it.
//!
//! What macOS refuses is refused. What it lets pass and punishes, as far as people have found out, is punished: messages for which no
//! receive is posted are lost without a word, as are those whose frames differ from the receive's; posting more frames than a queue has loses
//! or corrupts messages; an eleventh queue pair is refused and every later one, too; a send completes whether or not anything arrives. Every
//! such thing is noted, and a fabric that saw one fails its test when it goes, unless the test asked for it.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use super::device::{
    Ask, Device, Devices, Done, FRAME_BYTES, Gid, Granted, InUse, Init, Pair, Port, ReadyToReceive, ReadyToSend, Spot, VerbsError, Way,
};
use super::profile::Profile;
use super::{VerbsOptions, VerbsProvider};
use crate::Effects;
use crate::link::lock;
use crate::provider::{Desk, ProviderKind, StartError};
use crate::region::{LentPages, Slot};

const MESSAGE_BYTES_MAX: usize = 16_773_120;
const DEPTH_MAX: u32 = 4095;
const PAIRS_MAX: usize = 10;
const REGISTRATIONS_MAX: usize = 100;
const MTU: u8 = 5;

/// Where the port's own address stands in its table: not first, which a hard-coded index would miss.
const GID_INDEX: u8 = 3;

/// What macOS answers to a reliable queue pair.
const NOT_SUPPORTED: i32 = 102;

/// What goes wrong on purpose.
#[derive(Debug, Default, Clone)]
pub(crate) struct Faults {
    /// Loses the message this many from now.
    pub(crate) lose: Option<u64>,
    /// Changes a bit of the message this many from now.
    pub(crate) corrupt: Option<u64>,
    /// Nothing passes any more, and nobody is told.
    pub(crate) dead: bool,
}

#[derive(Debug, Default)]
struct Fabric {
    queues: BTreeMap<u32, Queues>,
    devices: BTreeMap<String, Made>,
    last: u32,
    faults: Faults,
    delivered: u64,
    violations: Vec<String>,
    excused: bool,
}

#[derive(Debug, Default, Clone, Copy)]
struct Made {
    in_use: InUse,
    /// The device has been asked for one too many.
    stuck: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Reset,
    Init,
    Receiving,
    Sending,
}

#[derive(Debug)]
struct Queues {
    state: State,
    peer: u32,
    gid: Gid,
    granted: Granted,
    sends: VecDeque<(Slot, usize, bool)>,
    receives: VecDeque<(Slot, bool)>,
    done: VecDeque<Done>,
}

/// The cables between devices.
#[derive(Debug, Clone, Default)]
pub(crate) struct AppleFabric(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared(Mutex<Fabric>);

impl Drop for Shared {
    fn drop(&mut self) {
        let fabric = self.0.get_mut().unwrap();
        if !std::thread::panicking() {
            assert!(fabric.excused || fabric.violations.is_empty(), "Apple's contract was broken: {:?}", fabric.violations);
            assert!(
                fabric.devices.values().all(|made| made.in_use == InUse::default()),
                "something was not given back: {:?}",
                fabric.devices
            );
        }
    }
}

impl AppleFabric {
    /// One device on this fabric.
    pub(crate) fn device(&self, address: &str) -> AppleDevice {
        let ip: IpAddr = address.parse().unwrap();
        AppleDevice { fabric: self.clone(), name: format!("rdma_en{ip}"), gid: Gid::of(ip) }
    }

    /// A provider whose only device is at this address.
    pub(crate) fn provider(&self, effects: &Effects, address: &str, options: VerbsOptions) -> Result<VerbsProvider, StartError> {
        let options = VerbsOptions { listen: vec![format!("{address}:0").parse().unwrap()], ..options };
        let desk = Desk::new(ProviderKind::Verbs, Arc::clone(&effects.clock));
        let devices: Devices = vec![Arc::new(self.device(address))];
        VerbsProvider::with_devices(effects.clone(), options, desk, devices)
    }

    /// Sets what goes wrong from now on.
    pub(crate) fn fail(&self, faults: Faults) {
        lock(&self.0.0).faults = faults;
    }

    /// This test breaks the contract on purpose.
    pub(crate) fn excuse(&self) -> Vec<String> {
        let mut fabric = lock(&self.0.0);
        fabric.excused = true;
        fabric.violations.clone()
    }

    /// Messages that have arrived.
    pub(crate) fn delivered(&self) -> u64 {
        lock(&self.0.0).delivered
    }

    /// What exists on all devices.
    pub(super) fn in_use(&self) -> InUse {
        lock(&self.0.0).devices.values().map(|made| made.in_use).sum()
    }
}

/// Frames that a message takes.
fn frames(bytes: usize) -> u32 {
    bytes.div_ceil(FRAME_BYTES).max(1) as u32
}

/// Counts down to a fault.
fn now(counter: &mut Option<u64>) -> bool {
    match counter {
        Some(0) => {
            *counter = None;
            true
        }
        Some(left) => {
            *left -= 1;
            false
        }
        None => false,
    }
}

impl Fabric {
    fn violation(&mut self, what: String) {
        if self.violations.len() < 20 {
            self.violations.push(what);
        }
    }

    /// Moves up to `most` messages off a queue.
    fn deliver(&mut self, from: u32, most: usize) {
        for _ in 0..most {
            let Some(sender) = self.queues.get_mut(&from) else { return };
            let Some((slot, bytes, doomed)) = sender.sends.pop_front() else { return };
            let (to, gid) = (sender.peer, sender.gid);
            let lost = now(&mut self.faults.lose) | doomed | self.faults.dead;
            let corrupted = now(&mut self.faults.corrupt);
            let mut noted = None;
            if !lost
                && let Some(receiver) = self.queues.get_mut(&to).filter(|queues| queues.state >= State::Receiving && queues.peer == from)
            {
                match receiver.receives.pop_front() {
                    None => noted = Some(format!("a message from {gid:?} found no receive")),
                    Some((mut into, spoiled)) if frames(into.len()) == frames(bytes) => {
                        into.as_mut_slice()[..bytes].copy_from_slice(&slot.as_slice()[..bytes]);
                        if spoiled || corrupted {
                            into.as_mut_slice()[bytes / 2] ^= 0x40;
                        }
                        receiver.done.push_back(Done { way: Way::Received, slot: into, bytes, failed: None });
                        self.delivered += 1;
                    }
                    Some((into, spoiled)) => {
                        noted = Some(format!("a message of {} frames met a receive of {}", frames(bytes), frames(into.len())));
                        receiver.receives.push_front((into, spoiled));
                    }
                }
            }
            if let Some(noted) = noted {
                self.violation(noted);
            }
            // Whether or not it arrived.
            if let Some(sender) = self.queues.get_mut(&from) {
                sender.done.push_back(Done { way: Way::Sent, slot, bytes, failed: None });
            }
        }
    }
}

impl PartialOrd for State {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        (*self as u8).partial_cmp(&(*other as u8))
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct AppleDevice {
    fabric: AppleFabric,
    name: String,
    gid: Gid,
}

impl AppleDevice {
    fn refused(&self, call: &'static str, errno: rustix::io::Errno) -> VerbsError {
        VerbsError::Call { call, device: self.name.clone(), code: errno.raw_os_error(), hint: "" }
    }
}

impl Device for AppleDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn port(&self) -> Result<Port, VerbsError> {
        // The first entry is one that no network interface has any more.
        let stale = Gid::of("169.254.7.7".parse().unwrap());
        Ok(Port { number: 1, active: true, mtu: MTU, gids: vec![(0, stale), (GID_INDEX, self.gid)] })
    }

    fn create(&self, ask: &Ask) -> Result<Box<dyn Pair>, VerbsError> {
        const CALL: &str = "ibv_create_qp";
        if ask.profile != Profile::Uc {
            return Err(VerbsError::Call { call: CALL, device: self.name.clone(), code: NOT_SUPPORTED, hint: "" });
        }
        if ask.send_depth > DEPTH_MAX || ask.receive_depth > DEPTH_MAX || ask.inline_bytes > 0 {
            return Err(self.refused(CALL, rustix::io::Errno::INVAL));
        }
        let mut fabric = lock(&self.fabric.0.0);
        let made = fabric.devices.entry(self.name.clone()).or_default();
        if made.stuck || made.in_use.pairs >= PAIRS_MAX {
            made.stuck = true;
            fabric.violation("an eleventh queue pair was asked for".to_owned());
            return Err(self.refused(CALL, rustix::io::Errno::BUSY));
        }
        made.in_use.pairs += 1;
        made.in_use.completion_queues += 1;
        fabric.last += 1;
        let number = fabric.last;
        let granted = Granted { send_depth: ask.send_depth, receive_depth: ask.receive_depth };
        let queues = Queues {
            state: State::Reset,
            peer: 0,
            gid: self.gid,
            granted,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            done: VecDeque::new(),
        };
        fabric.queues.insert(number, queues);
        let device = Self { fabric: self.fabric.clone(), name: self.name.clone(), gid: self.gid };
        Ok(Box::new(ApplePair { device, number, granted, registered: None }))
    }

    fn in_use(&self) -> InUse {
        lock(&self.fabric.0.0).devices.get(&self.name).map_or(InUse::default(), |made| made.in_use)
    }
}

struct ApplePair {
    device: AppleDevice,
    number: u32,
    granted: Granted,
    /// The registered range.
    registered: Option<(usize, usize)>,
}

impl ApplePair {
    /// Moves to the next state, if that is allowed and `right` is.
    fn step(&self, from: State, to: State, right: bool, change: impl FnOnce(&mut Queues)) -> Result<(), VerbsError> {
        let mut fabric = lock(&self.device.fabric.0.0);
        match fabric.queues.get_mut(&self.number) {
            Some(queues) if queues.state == from && right => {
                queues.state = to;
                change(queues);
                Ok(())
            }
            _ => Err(self.device.refused("ibv_modify_qp", rustix::io::Errno::INVAL)),
        }
    }

    fn knows(&self, slot: &Slot, bytes: usize) -> bool {
        let start = slot.as_slice().as_ptr() as usize;
        bytes <= slot.len() && self.registered.is_some_and(|(from, to)| start >= from && start + bytes <= to)
    }
}

impl Pair for ApplePair {
    fn number(&self) -> u32 {
        self.number
    }

    fn granted(&self) -> Granted {
        self.granted
    }

    fn register(&mut self, slots: &[Slot]) -> Result<(), VerbsError> {
        let start = slots.iter().map(|slot| slot.as_slice().as_ptr() as usize).min().unwrap();
        let bytes: usize = slots.iter().map(Slot::len).sum();
        let refused = |errno| Err(self.device.refused("ibv_reg_mr", errno));
        if !start.is_multiple_of(FRAME_BYTES) || !bytes.is_multiple_of(FRAME_BYTES) || bytes > 1 << 30 {
            return refused(rustix::io::Errno::INVAL);
        }
        let mut fabric = lock(&self.device.fabric.0.0);
        let made = fabric.devices.get_mut(&self.device.name).unwrap();
        if made.in_use.registrations >= REGISTRATIONS_MAX || self.registered.is_some() {
            return refused(rustix::io::Errno::NOMEM);
        }
        made.in_use.registrations += 1;
        self.registered = Some((start, start + bytes));
        Ok(())
    }

    fn init(&mut self, step: &Init) -> Result<(), VerbsError> {
        self.step(State::Reset, State::Init, step.port == 1 && step.access == 1 | 2 | 4, |_| {})
    }

    fn ready_to_receive(&mut self, step: &ReadyToReceive) -> Result<(), VerbsError> {
        let right = step.mtu == MTU && step.hop_limit == 1 && step.port == 1 && step.reliable.is_none() && step.gid_index == GID_INDEX;
        self.step(State::Init, State::Receiving, right, |queues| queues.peer = step.peer_number)
    }

    fn ready_to_send(&mut self, step: &ReadyToSend) -> Result<(), VerbsError> {
        self.step(State::Receiving, State::Sending, step.reliable.is_none(), |_| {})
    }

    fn post_receive(&mut self, slot: Slot) -> Result<(), VerbsError> {
        if !self.knows(&slot, slot.len()) {
            return Err(self.device.refused("ibv_post_recv", rustix::io::Errno::INVAL));
        }
        let mut fabric = lock(&self.device.fabric.0.0);
        let queues = fabric.queues.get_mut(&self.number).unwrap();
        let posted: u32 = queues.receives.iter().map(|(slot, _)| frames(slot.len())).sum();
        let spoiled = posted + frames(slot.len()) > queues.granted.receive_depth;
        queues.receives.push_back((slot, spoiled));
        if spoiled {
            fabric.violation("the receive queue was over-posted".to_owned());
        }
        Ok(())
    }

    fn post_send(&mut self, slot: Slot, bytes: usize) -> Result<(), VerbsError> {
        let refused = || Err(self.device.refused("ibv_post_send", rustix::io::Errno::INVAL));
        if !self.knows(&slot, bytes) || bytes > MESSAGE_BYTES_MAX {
            return refused();
        }
        let mut fabric = lock(&self.device.fabric.0.0);
        let queues = fabric.queues.get_mut(&self.number).unwrap();
        if queues.state != State::Sending {
            return refused();
        }
        let posted: u32 = queues.sends.iter().map(|(_, bytes, _)| frames(*bytes)).sum();
        let doomed = posted + frames(bytes) > queues.granted.send_depth;
        queues.sends.push_back((slot, bytes, doomed));
        if doomed {
            fabric.violation("the send queue was over-posted".to_owned());
        }
        Ok(())
    }

    fn post_write(&mut self, _: Slot, _: usize, _: Spot) -> Result<(), VerbsError> {
        Err(self.device.refused("ibv_post_send", rustix::io::Errno::INVAL))
    }

    fn post_read(&mut self, _: Slot, _: usize, _: Spot) -> Result<(), VerbsError> {
        Err(self.device.refused("ibv_post_send", rustix::io::Errno::INVAL))
    }

    fn expose(&mut self, _: &LentPages, _: usize, _: u32) -> Result<u32, VerbsError> {
        Err(self.device.refused("ibv_reg_mr", rustix::io::Errno::INVAL))
    }

    fn destroy(&mut self) -> bool {
        // Only dropping it does.
        false
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), VerbsError> {
        let mut fabric = lock(&self.device.fabric.0.0);
        let peer = fabric.queues.get(&self.number).unwrap().peer;
        // A few at a time, so that queues fill.
        fabric.deliver(self.number, 3);
        fabric.deliver(peer, 3);
        done.extend(fabric.queues.get_mut(&self.number).unwrap().done.drain(..));
        Ok(())
    }

    fn arm(&mut self) -> Result<(), VerbsError> {
        Ok(())
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn take_events(&mut self) {}
}

impl Drop for ApplePair {
    fn drop(&mut self) {
        let mut fabric = lock(&self.device.fabric.0.0);
        fabric.queues.remove(&self.number);
        let made = fabric.devices.get_mut(&self.device.name).unwrap();
        made.in_use.pairs -= 1;
        made.in_use.completion_queues -= 1;
        made.in_use.registrations -= usize::from(self.registered.is_some());
    }
}
