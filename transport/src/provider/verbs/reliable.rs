//! Reliable devices in memory, which write and read lent memory by themselves, as far as that can be played.
//!
//! Messages arrive in order and wait for a receive. One-sided operations are checked as an adapter does: key, domain, bounds and rights; what
//! fails breaks both queue pairs. What goes to a queue pair that is gone is never answered, and given back as failed after many looks.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use super::device::{
    Ask, Device, Devices, Done, Gid, Granted, InUse, Init, Pair, Port, ReadyToReceive, ReadyToSend, Spot, VerbsError, Way, access,
};
use super::profile::Profile;
use super::{VerbsOptions, VerbsProvider};
use crate::Effects;
use crate::link::lock;
use crate::provider::{Desk, ProviderKind};
use crate::region::{LentPages, Slot};

/// Looks after which an operation that nobody answers has failed.
const PATIENCE: u32 = 100_000;

/// `IBV_WC_REM_ACCESS_ERR` and `IBV_WC_RETRY_EXC_ERR`.
const REMOTE_ACCESS: u32 = 10;
const RETRIES_EXCEEDED: u32 = 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Reset,
    Init,
    Receiving,
    Sending,
    Broken,
}

enum Work {
    Send,
    Write(Spot),
    Read(Spot),
}

struct Lent {
    pages: LentPages,
    bytes: usize,
    access: u32,
    key: u32,
}

struct Queues {
    state: State,
    peer: u32,
    access: u32,
    granted: Granted,
    work: VecDeque<(Work, Slot, usize)>,
    receives: VecDeque<Slot>,
    done: VecDeque<Done>,
    unanswered: u32,
    lent: Option<Lent>,
}

#[derive(Default)]
struct Fabric {
    queues: BTreeMap<u32, Queues>,
    in_use: BTreeMap<String, InUse>,
    last: u32,
    /// Devices refuse to destroy anything.
    stubborn: bool,
    /// Devices let no WRITE or READ through.
    narrow: bool,
}

/// The cables between devices.
#[derive(Clone, Default)]
pub(crate) struct ReliableFabric(Arc<Mutex<Fabric>>);

impl Fabric {
    /// Does the next thing that a queue pair was asked for; `false` if there is nothing to do now.
    fn work(&mut self, from: u32) -> bool {
        let Some(ours) = self.queues.get_mut(&from) else { return false };
        let to = ours.peer;
        if ours.state != State::Sending {
            return false;
        }
        let Some((work, mut slot, bytes)) = ours.work.pop_front() else { return false };
        let narrow = self.narrow;
        let theirs =
            self.queues.get_mut(&to).filter(|theirs| theirs.peer == from && matches!(theirs.state, State::Receiving | State::Sending));
        let Some(theirs) = theirs else { return self.unanswered(from, work, slot, bytes) };
        let outcome = match work {
            Work::Send => match theirs.receives.pop_front() {
                Some(mut into) => {
                    into.as_mut_slice()[..bytes].copy_from_slice(&slot.as_slice()[..bytes]);
                    theirs.done.push_back(Done { way: Way::Received, slot: into, bytes, failed: None });
                    true
                }
                None => return self.unanswered(from, work, slot, bytes),
            },
            Work::Write(_) | Work::Read(_) if narrow => false,
            Work::Write(spot) => theirs.place(spot, bytes, access::REMOTE_WRITE).is_some_and(|(pages, at)| {
                pages.place(at, &slot.as_slice()[..bytes]);
                true
            }),
            Work::Read(spot) => theirs.place(spot, bytes, access::REMOTE_READ).is_some_and(|(pages, at)| {
                pages.fetch(at, &mut slot.as_mut_slice()[..bytes]);
                true
            }),
        };
        if !outcome {
            theirs.state = State::Broken;
        }
        self.complete(from, slot, (!outcome).then_some(REMOTE_ACCESS));
        true
    }

    fn unanswered(&mut self, from: u32, work: Work, slot: Slot, bytes: usize) -> bool {
        let Some(ours) = self.queues.get_mut(&from) else { return false };
        ours.unanswered += 1;
        if ours.unanswered > PATIENCE {
            self.complete(from, slot, Some(RETRIES_EXCEEDED));
        } else {
            ours.work.push_front((work, slot, bytes));
        }
        false
    }

    fn complete(&mut self, from: u32, slot: Slot, failed: Option<u32>) {
        let Some(ours) = self.queues.get_mut(&from) else { return };
        ours.unanswered = 0;
        if failed.is_some() {
            ours.state = State::Broken;
        }
        ours.done.push_back(Done { way: Way::Sent, slot, bytes: 0, failed });
    }
}

impl Queues {
    /// Where in lent memory an operation goes, if it may.
    fn place(&self, spot: Spot, bytes: usize, right: u32) -> Option<(&LentPages, usize)> {
        let lent = self.lent.as_ref().filter(|lent| lent.key == spot.key && lent.access & self.access & right != 0)?;
        let at = usize::try_from(spot.address.checked_sub(lent.pages.start() as u64)?).ok()?;
        at.checked_add(bytes).is_some_and(|end| end <= lent.bytes).then_some((&lent.pages, at))
    }
}

impl ReliableFabric {
    /// A provider whose only device is at this address.
    pub(crate) fn provider(&self, effects: &Effects, address: &str, options: VerbsOptions) -> VerbsProvider {
        let ip: IpAddr = address.parse().unwrap();
        let options = VerbsOptions { listen: vec![format!("{address}:0").parse().unwrap()], profile: Profile::Rc, ..options };
        let desk = Desk::new(ProviderKind::Verbs, Arc::clone(&effects.clock));
        let device = ReliableDevice { fabric: self.clone(), name: format!("sim_{ip}"), gid: Gid::of(ip) };
        let devices: Devices = vec![Arc::new(device)];
        VerbsProvider::with_devices(effects.clone(), options, desk, devices).unwrap()
    }

    /// From now on devices let no WRITE or READ through.
    pub(crate) fn let_nothing_through(&self) {
        lock(&self.0).narrow = true;
    }

    /// Queue pairs that were ever made.
    pub(crate) fn made(&self) -> u32 {
        lock(&self.0).last
    }

    /// From now on, whether devices refuse to destroy what is on them.
    pub(crate) fn refuse_to_destroy(&self, stubborn: bool) {
        lock(&self.0).stubborn = stubborn;
    }
}

struct ReliableDevice {
    fabric: ReliableFabric,
    name: String,
    gid: Gid,
}

impl std::fmt::Debug for ReliableDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReliableDevice({})", self.name)
    }
}

impl Device for ReliableDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn port(&self) -> Result<Port, VerbsError> {
        Ok(Port { number: 1, active: true, mtu: 5, gids: vec![(0, self.gid)] })
    }

    fn create(&self, ask: &Ask) -> Result<Box<dyn Pair>, VerbsError> {
        assert_eq!(ask.profile, Profile::Rc);
        let mut fabric = lock(&self.fabric.0);
        let made = fabric.in_use.entry(self.name.clone()).or_default();
        made.pairs += 1;
        made.completion_queues += 1;
        fabric.last += 1;
        let number = fabric.last;
        let granted = Granted { send_depth: ask.send_depth, receive_depth: ask.receive_depth };
        let queues = Queues {
            state: State::Reset,
            peer: 0,
            access: 0,
            granted,
            work: VecDeque::new(),
            receives: VecDeque::new(),
            done: VecDeque::new(),
            unanswered: 0,
            lent: None,
        };
        fabric.queues.insert(number, queues);
        Ok(Box::new(ReliablePair { fabric: self.fabric.clone(), name: self.name.clone(), number, granted, registered: None, gone: false }))
    }

    fn in_use(&self) -> InUse {
        lock(&self.fabric.0).in_use.get(&self.name).copied().unwrap_or_default()
    }
}

struct ReliablePair {
    fabric: ReliableFabric,
    name: String,
    number: u32,
    granted: Granted,
    /// The registered range of slots.
    registered: Option<(usize, usize)>,
    gone: bool,
}

impl ReliablePair {
    fn refused(&self, call: &'static str) -> VerbsError {
        VerbsError::Call { call, device: self.name.clone(), code: rustix::io::Errno::INVAL.raw_os_error(), hint: "" }
    }

    fn with<T>(&self, call: &'static str, change: impl FnOnce(&mut Queues) -> Option<T>) -> Result<T, VerbsError> {
        lock(&self.fabric.0).queues.get_mut(&self.number).and_then(change).ok_or_else(|| self.refused(call))
    }

    fn step(&self, from: State, to: State, change: impl FnOnce(&mut Queues)) -> Result<(), VerbsError> {
        self.with("ibv_modify_qp", |queues| {
            (queues.state == from).then(|| {
                queues.state = to;
                change(queues);
            })
        })
    }

    fn knows(&self, slot: &Slot, bytes: usize) -> bool {
        let start = slot.as_slice().as_ptr() as usize;
        bytes <= slot.len() && self.registered.is_some_and(|(from, to)| start >= from && start + bytes <= to)
    }

    fn post(&self, work: Work, slot: Slot, bytes: usize) -> Result<(), VerbsError> {
        let known = self.knows(&slot, bytes);
        self.with("ibv_post_send", |queues| {
            let room = known && queues.work.len() < queues.granted.send_depth as usize;
            (room && matches!(queues.state, State::Sending | State::Broken)).then(|| queues.work.push_back((work, slot, bytes)))
        })
    }

    fn registrations(&self, by: isize) {
        let mut fabric = lock(&self.fabric.0);
        let made = fabric.in_use.entry(self.name.clone()).or_default();
        made.registrations = made.registrations.checked_add_signed(by).unwrap();
    }
}

impl Pair for ReliablePair {
    fn number(&self) -> u32 {
        self.number
    }

    fn granted(&self) -> Granted {
        self.granted
    }

    fn register(&mut self, slots: &[Slot]) -> Result<(), VerbsError> {
        let start = slots.iter().map(|slot| slot.as_slice().as_ptr() as usize).min().unwrap();
        self.registered = Some((start, start + slots.iter().map(Slot::len).sum::<usize>()));
        self.registrations(1);
        Ok(())
    }

    fn init(&mut self, step: &Init) -> Result<(), VerbsError> {
        self.step(State::Reset, State::Init, |queues| queues.access = step.access)
    }

    fn ready_to_receive(&mut self, step: &ReadyToReceive) -> Result<(), VerbsError> {
        assert!(step.reliable.is_some());
        self.step(State::Init, State::Receiving, |queues| queues.peer = step.peer_number)
    }

    fn ready_to_send(&mut self, step: &ReadyToSend) -> Result<(), VerbsError> {
        assert!(step.reliable.is_some());
        self.step(State::Receiving, State::Sending, |_| {})
    }

    fn post_receive(&mut self, slot: Slot) -> Result<(), VerbsError> {
        let known = self.knows(&slot, slot.len());
        self.with("ibv_post_recv", |queues| {
            (known && queues.receives.len() < queues.granted.receive_depth as usize).then(|| queues.receives.push_back(slot))
        })
    }

    fn post_send(&mut self, slot: Slot, bytes: usize) -> Result<(), VerbsError> {
        self.post(Work::Send, slot, bytes)
    }

    fn post_write(&mut self, slot: Slot, bytes: usize, to: Spot) -> Result<(), VerbsError> {
        self.post(Work::Write(to), slot, bytes)
    }

    fn post_read(&mut self, slot: Slot, bytes: usize, from: Spot) -> Result<(), VerbsError> {
        self.post(Work::Read(from), slot, bytes)
    }

    fn expose(&mut self, memory: &LentPages, bytes: usize, access: u32) -> Result<u32, VerbsError> {
        // Keys that are near each other, so that who guesses finds those of others.
        let (key, pages) = (self.number + 1000, memory.clone());
        self.with("ibv_reg_mr", |queues| {
            queues.lent = Some(Lent { pages, bytes, access, key });
            Some(())
        })?;
        self.registrations(1);
        Ok(key)
    }

    fn destroy(&mut self) -> bool {
        let mut fabric = lock(&self.fabric.0);
        if !self.gone && !fabric.stubborn {
            self.gone = true;
            let lent = fabric.queues.remove(&self.number).is_some_and(|queues| queues.lent.is_some());
            let made = fabric.in_use.entry(self.name.clone()).or_default();
            made.pairs -= 1;
            made.completion_queues -= 1;
            made.registrations -= usize::from(self.registered.is_some()) + usize::from(lent);
        }
        self.gone
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), VerbsError> {
        let mut fabric = lock(&self.fabric.0);
        let Some(peer) = fabric.queues.get(&self.number).map(|queues| queues.peer) else { return Ok(()) };
        // A few at a time, so that queues fill.
        for queue in [self.number, peer] {
            for _ in 0..3 {
                fabric.work(queue);
            }
        }
        if let Some(queues) = fabric.queues.get_mut(&self.number) {
            done.extend(queues.done.drain(..));
        }
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

impl Drop for ReliablePair {
    fn drop(&mut self) {
        self.destroy();
    }
}
