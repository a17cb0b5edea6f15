//! Owners and holders in a small world of virtual time, with clocks that disagree, messages that get lost, come twice
//! and overtake each other, fences that take their time, crashes and restarts. Checked after every single step.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::keeper::{self, BatchKey, CallFailure, CallKey, Keeper};
use super::owner::{self, Owner, OwnerConfig, RequestKey};
use super::types::{Beneficiary, EndReason, LeaseSpec, LeaseUse, Purpose, TokenSeed};
use super::wire::{LeaseNotice, LeaseReply, LeaseRequest};
use super::{LeaseError, timing};
use crate::env::Instant;
use crate::ids::{Incarnation, InstanceId, LeaseId, NodeId, Term};

const OWNERS: usize = 2;
const HOLDERS: usize = 3;
const OFFERED: u64 = 100;
const DELAY_MAX: Duration = Duration::from_millis(2500);
const FENCE_MAX: Duration = Duration::from_millis(2500);

#[derive(Debug, Clone)]
enum Op {
    Advance { millis: u64 },
    Place { holder: usize, sizes: Vec<(usize, u64)> },
    GiveBack { holder: usize, nth: usize },
    CancelAll { holder: usize },
    CrashHolder { holder: usize },
    RestartOwner { owner: usize },
    Offer { owner: usize, bytes: u64 },
    Revoke { owner: usize, nth: usize },
    Claim { holder: usize, nth: usize },
    Cut { holder: usize, cut: bool },
}

fn op() -> impl Strategy<Value = Op> {
    let sizes = proptest::collection::vec((0..OWNERS, 1..70_u64), 1..4);
    prop_oneof![
        8 => (1..6000_u64).prop_map(|millis| Op::Advance { millis }),
        5 => (0..HOLDERS, sizes).prop_map(|(holder, sizes)| Op::Place { holder, sizes }),
        2 => (0..HOLDERS, 0..4_usize).prop_map(|(holder, nth)| Op::GiveBack { holder, nth }),
        1 => (0..HOLDERS).prop_map(|holder| Op::CancelAll { holder }),
        1 => (0..HOLDERS).prop_map(|holder| Op::CrashHolder { holder }),
        1 => (0..OWNERS).prop_map(|owner| Op::RestartOwner { owner }),
        1 => (0..OWNERS, 0..150_u64).prop_map(|(owner, bytes)| Op::Offer { owner, bytes }),
        1 => (0..OWNERS, 0..4_usize).prop_map(|(owner, nth)| Op::Revoke { owner, nth }),
        2 => (0..HOLDERS, 0..4_usize).prop_map(|(holder, nth)| Op::Claim { holder, nth }),
        1 => (0..HOLDERS, any::<bool>()).prop_map(|(holder, cut)| Op::Cut { holder, cut }),
    ]
}

enum Event {
    ToOwner { owner: usize, from: usize, from_life: u64, call: Option<CallKey>, claim_sent: Instant, request: LeaseRequest },
    ToHolder { holder: usize, life: u64, from: usize, call: Option<CallKey>, claim_sent: Instant, reply: LeaseReply },
    TimeOut { holder: usize, life: u64, owner: usize, call: CallKey },
    Notice { holder: usize, from: usize, notice: LeaseNotice },
    FenceHolds { owner: usize, life: u64, lease: LeaseId },
}

/// A node's clock: it started at another moment and runs up to one per cent off.
#[derive(Clone, Copy)]
struct Offbeat {
    offset: u64,
    permyriad: u64,
}

impl Offbeat {
    fn local(self, real: u64) -> Instant {
        Instant::from_nanos(self.offset + (u128::from(real) * u128::from(self.permyriad) / 10_000) as u64)
    }

    /// The first real moment at which the clock shows `local`.
    fn real(self, local: Instant) -> u64 {
        let passed = u128::from(local.as_nanos().saturating_sub(self.offset));
        (passed * 10_000).div_ceil(u128::from(self.permyriad)) as u64
    }
}

/// Who asked, in which life, about which call, since when, for which lease.
type Pending = (usize, u64, Option<CallKey>, Instant, Option<LeaseId>);

struct OwnerNode {
    machine: Owner,
    clock: Offbeat,
    life: u64,
    offered: u64,
    /// What is written to: from the grant until the fence holds.
    occupied: BTreeMap<LeaseId, u64>,
    pending: BTreeMap<u64, Pending>,
}

struct HolderNode {
    machine: Keeper,
    clock: Offbeat,
    life: u64,
    cut: bool,
    batches: BTreeMap<u64, Vec<LeaseId>>,
}

struct World {
    now: u64,
    seed: u64,
    counter: u64,
    lossless: bool,
    owners: Vec<OwnerNode>,
    holders: Vec<HolderNode>,
    events: BTreeMap<(u64, u64), Event>,
    /// Which life of which holder a lease was last granted to.
    lives: BTreeMap<LeaseId, (usize, u64)>,
    deaths: BTreeMap<(usize, u64), u64>,
    granted_batches: usize,
    claims: usize,
}

fn owner_id(n: usize) -> NodeId {
    NodeId([0x10 + n as u8; 32])
}

fn holder_id(n: usize) -> NodeId {
    NodeId([0x50 + n as u8; 32])
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            now: 0,
            seed,
            counter: 0,
            lossless: false,
            owners: vec![],
            holders: vec![],
            events: BTreeMap::new(),
            lives: BTreeMap::new(),
            deaths: BTreeMap::new(),
            granted_batches: 0,
            claims: 0,
        };
        for n in 0..OWNERS {
            let clock = world.clock();
            world.owners.push(OwnerNode {
                machine: new_owner(n, 0, OFFERED),
                clock,
                life: 0,
                offered: OFFERED,
                occupied: BTreeMap::new(),
                pending: BTreeMap::new(),
            });
        }
        for _ in 0..HOLDERS {
            let clock = world.clock();
            world.holders.push(HolderNode { machine: Keeper::new(), clock, life: 0, cut: false, batches: BTreeMap::new() });
        }
        world
    }

    fn clock(&mut self) -> Offbeat {
        Offbeat { offset: self.draw(1 << 50), permyriad: 9_900 + self.draw(201) }
    }

    /// splitmix64.
    fn draw(&mut self, below: u64) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    fn fresh(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    fn schedule(&mut self, delay: u64, event: Event) {
        let order = self.fresh();
        self.events.insert((self.now + delay, order), event);
    }

    /// How late a message comes, each time that it does.
    fn fate(&mut self, holder: usize) -> Vec<u64> {
        if self.lossless {
            return vec![1_000_000];
        }
        let copies = match self.draw(20) {
            _ if self.holders[holder].cut => 0,
            0 | 1 => 0,
            2 => 2,
            _ => 1,
        };
        let slow = self.draw(4) == 0;
        let most = if slow { DELAY_MAX } else { Duration::from_millis(5) };
        (0..copies).map(|_| self.draw(most.as_nanos() as u64)).collect()
    }

    fn step_owner(&mut self, n: usize, input: owner::Input) {
        let now = self.owners[n].clock.local(self.now);
        let used_before = self.owners[n].machine.totals().used;
        let outputs = self.owners[n].machine.step(now, input);
        let totals = self.owners[n].machine.totals();
        if totals.used > used_before {
            assert!(totals.used <= totals.offered, "granted beyond the offer: {totals:?}");
        }
        for output in outputs {
            match output {
                owner::Output::Reply { key, reply } => {
                    let Some((to, life, call, claim_sent, lease)) = self.owners[n].pending.remove(&key.0) else {
                        panic!("an answer to a question that nobody asked")
                    };
                    if let (LeaseReply::Granted(grant), Some(lease)) = (&reply, lease) {
                        assert_eq!(grant.lease, lease);
                        self.owners[n].occupied.insert(lease, grant.bytes);
                        self.lives.insert(lease, (to, life));
                    }
                    if let LeaseReply::Claimed { leases } = &reply {
                        for (spec, _) in leases {
                            self.lives.insert(spec.id, (to, life));
                        }
                    }
                    for delay in self.fate(to) {
                        let reply = reply.clone();
                        self.schedule(delay, Event::ToHolder { holder: to, life, from: n, call, claim_sent, reply });
                    }
                }
                owner::Output::Fence(lease) => {
                    assert!(self.owners[n].occupied.contains_key(&lease), "a fence for memory that nobody has");
                    let life = self.owners[n].life;
                    let delay = self.draw(FENCE_MAX.as_nanos() as u64);
                    self.schedule(delay, Event::FenceHolds { owner: n, life, lease });
                }
                owner::Output::Notify { to, notice } => {
                    let holder = (0..HOLDERS).find(|&h| holder_id(h) == to).expect("a holder");
                    for delay in self.fate(holder) {
                        self.schedule(delay, Event::Notice { holder, from: n, notice: notice.clone() });
                    }
                }
                owner::Output::TermRaised { .. } | owner::Output::OverCommitted { .. } => {}
            }
        }
        self.check();
    }

    fn step_holder(&mut self, n: usize, input: keeper::Input) {
        let now = self.holders[n].clock.local(self.now);
        let outputs = self.holders[n].machine.step(now, input);
        let life = self.holders[n].life;
        for output in outputs {
            match output {
                keeper::Output::Send { call, to, request } => {
                    let owner = (0..OWNERS).find(|&o| owner_id(o) == to).expect("an owner");
                    assert_eq!(call.sent, now);
                    for delay in self.fate(n) {
                        let request = request.clone();
                        self.schedule(
                            delay,
                            Event::ToOwner { owner, from: n, from_life: life, call: Some(call), claim_sent: now, request },
                        );
                    }
                    self.schedule(timing::CALL_DEADLINE.as_nanos() as u64, Event::TimeOut { holder: n, life, owner, call });
                }
                keeper::Output::Batch { batch, result } => {
                    let asked = self.holders[n].batches.remove(&batch.0).expect("one answer for each set");
                    match result {
                        Ok(grants) => {
                            self.granted_batches += 1;
                            assert_eq!(grants.iter().map(|g| g.lease).collect::<Vec<_>>(), asked);
                            assert!(asked.iter().all(|&lease| self.holders[n].machine.may_use(now, lease)), "all");
                        }
                        Err(_) => assert!(!asked.iter().any(|&lease| self.holders[n].machine.may_use(now, lease)), "nothing"),
                    }
                }
                keeper::Output::Right { .. } | keeper::Output::Lost(_) => {}
            }
        }
        self.check();
    }

    fn check(&self) {
        for owner in &self.owners {
            assert_eq!(owner.machine.totals().used, owner.occupied.values().sum::<u64>(), "charged is what is occupied");
            let now = owner.clock.local(self.now);
            for lease in owner.machine.view(now).leases {
                // Nothing of a dead holder stays longer than one time to live and the sweep after its last message.
                let Some(death) = self.lives.get(&lease.id).and_then(|life| self.deaths.get(life)) else { continue };
                let limit = (timing::TTL + timing::SWEEP) * 102 / 100 + DELAY_MAX + FENCE_MAX;
                let dead_for = Duration::from_nanos(self.now - death);
                assert!(dead_for <= limit, "{lease:?} of a holder that is dead for {dead_for:?}");
            }
        }
        for (n, holder) in self.holders.iter().enumerate() {
            let now = holder.clock.local(self.now);
            for held in holder.machine.held() {
                if !holder.machine.may_use(now, held.spec.id) {
                    continue;
                }
                let owner = self.owners.iter().enumerate().find(|(o, _)| owner_id(*o) == held.grant.owner).expect("an owner").1;
                let verdict = owner.machine.check(owner.clock.local(self.now), holder_id(n), &LeaseUse::from(&held.grant));
                // A holder is right, or the owner knows that it has been overruled and refuses it in so many words.
                let taken_over = self.lives.get(&held.spec.id) != Some(&(n, holder.life));
                match verdict {
                    Ok(info) => assert_eq!(info.bytes, held.spec.bytes),
                    Err(
                        LeaseError::WrongIncarnation { .. }
                        | LeaseError::StaleTerm { .. }
                        | LeaseError::Fenced { reason: EndReason::Revoked(_), .. }
                        | LeaseError::Ended { reason: EndReason::Revoked(_), .. },
                    ) => {}
                    // Whoever took it over has given it back since.
                    Err(LeaseError::Ended { .. }) if taken_over => {}
                    Err(error) => panic!("holder {n} believes in {held:?}, but: {error}"),
                }
            }
        }
    }

    /// Lets time pass, one event after the other.
    fn run(&mut self, nanos: u64) {
        let end = self.now + nanos;
        loop {
            let event = self.events.keys().next().copied();
            let owners = self.owners.iter().enumerate().filter_map(|(n, o)| Some((o.clock.real(o.machine.next_wake()?), n)));
            let owner = owners.min();
            let holders = self.holders.iter().enumerate().filter_map(|(n, h)| Some((h.clock.real(h.machine.next_wake()?), n)));
            let holder = holders.min();
            let next = [event.map(|(at, _)| at), owner.map(|(at, _)| at), holder.map(|(at, _)| at)].into_iter().flatten().min();
            let Some(at) = next.filter(|&at| at <= end) else { break };
            self.now = self.now.max(at);
            if event.is_some_and(|(t, _)| t == at) {
                let (_, event) = self.events.pop_first().expect("seen above");
                self.deliver(event);
            } else if let Some((_, n)) = owner.filter(|(t, _)| *t == at) {
                self.step_owner(n, owner::Input::Tick);
            } else if let Some((_, n)) = holder {
                self.step_holder(n, keeper::Input::Tick);
            }
        }
        self.now = end;
        self.check();
    }

    fn deliver(&mut self, event: Event) {
        match event {
            Event::ToOwner { owner, from, from_life, call, claim_sent, request } => {
                let key = self.fresh();
                let lease = match &request {
                    LeaseRequest::Acquire(spec) => Some(spec.id),
                    _ => None,
                };
                self.owners[owner].pending.insert(key, (from, from_life, call, claim_sent, lease));
                let mut seed = [0; 32];
                seed[..8].copy_from_slice(&self.draw(u64::MAX).to_le_bytes());
                let from = holder_id(from);
                self.step_owner(owner, owner::Input::Request { from, key: RequestKey(key), request, seed: TokenSeed(seed) });
            }
            Event::ToHolder { holder, life, from, call, claim_sent, reply } => {
                if self.holders[holder].life != life {
                    return;
                }
                match (call, reply) {
                    (Some(call), reply) => {
                        self.step_holder(holder, keeper::Input::Answer { call, owner: owner_id(from), result: Ok(reply) })
                    }
                    (None, LeaseReply::Claimed { leases }) => {
                        self.claims += leases.len();
                        for (spec, grant) in leases {
                            self.step_holder(holder, keeper::Input::Adopt { spec, grant, sent: claim_sent });
                        }
                    }
                    (None, _) => {}
                }
            }
            Event::TimeOut { holder, life, owner, call } => {
                if self.holders[holder].life == life {
                    let failure = CallFailure { reason: "no answer in time".to_owned(), retry: true };
                    self.step_holder(holder, keeper::Input::Answer { call, owner: owner_id(owner), result: Err(failure) });
                }
            }
            Event::Notice { holder, from, notice } => self.step_holder(holder, keeper::Input::Notice { from: owner_id(from), notice }),
            Event::FenceHolds { owner, life, lease } => {
                if self.owners[owner].life == life {
                    self.owners[owner].occupied.remove(&lease).expect("was occupied until now");
                    self.step_owner(owner, owner::Input::Fenced(lease));
                }
            }
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Advance { millis } => self.run(millis * 1_000_000),
            Op::Place { holder, sizes } => {
                let batch = self.fresh();
                let instance = InstanceId(u128::from(self.fresh()));
                let members: Vec<NodeId> = (0..HOLDERS).map(holder_id).collect();
                let wanted: Vec<(NodeId, LeaseSpec)> = sizes
                    .into_iter()
                    .map(|(owner, bytes)| {
                        let spec = LeaseSpec {
                            id: LeaseId(u128::from(self.fresh())),
                            beneficiary: Beneficiary::Instance(instance),
                            purpose: Purpose::Weights,
                            bytes,
                            term: Term { counter: 1, node: holder_id(holder) },
                            members: members.clone(),
                            stage: None,
                        };
                        (owner_id(owner), spec)
                    })
                    .collect();
                self.holders[holder].batches.insert(batch, wanted.iter().map(|(_, s)| s.id).collect());
                self.step_holder(holder, keeper::Input::AcquireAll { batch: BatchKey(batch), wanted });
            }
            Op::GiveBack { holder, nth } => {
                let held = self.holders[holder].machine.held().nth(nth);
                if let Some(held) = held {
                    self.step_holder(holder, keeper::Input::Release(vec![held.spec.id]));
                }
            }
            Op::CancelAll { holder } => {
                for batch in self.holders[holder].batches.keys().copied().collect::<Vec<_>>() {
                    self.step_holder(holder, keeper::Input::Cancel(BatchKey(batch)));
                }
            }
            Op::CrashHolder { holder } => {
                let node = &mut self.holders[holder];
                self.deaths.insert((holder, node.life), self.now);
                node.life += 1;
                node.machine = Keeper::new();
                node.batches.clear();
                // Its memory of terms and ids is gone, its clock goes on.
            }
            Op::RestartOwner { owner } => {
                let node = &mut self.owners[owner];
                node.life += 1;
                node.machine = new_owner(owner, node.life, node.offered);
                node.occupied.clear();
                node.pending.clear();
            }
            Op::Offer { owner, bytes } => {
                self.owners[owner].offered = bytes;
                self.step_owner(owner, owner::Input::Offer(bytes));
            }
            Op::Revoke { owner, nth } => {
                let now = self.owners[owner].clock.local(self.now);
                if let Some(lease) = self.owners[owner].machine.view(now).leases.get(nth).map(|l| l.id) {
                    self.step_owner(owner, owner::Input::Revoke { lease, why: "a test wants it".to_owned() });
                }
            }
            Op::Claim { holder, nth } => {
                // Takes over what another holder has, at the owners of its leases.
                let held = self.holders.iter().enumerate().filter(|(n, _)| *n != holder).flat_map(|(_, h)| h.machine.held()).nth(nth);
                let Some(held) = held else { return };
                let Beneficiary::Instance(instance) = held.spec.beneficiary else { return };
                let term = Term { counter: held.spec.term.counter + 1, node: holder_id(holder) };
                let members: Vec<NodeId> = (0..HOLDERS).map(holder_id).collect();
                let from_life = self.holders[holder].life;
                let claim_sent = self.holders[holder].clock.local(self.now);
                for owner in 0..OWNERS {
                    let request = LeaseRequest::Claim { instance, term, members: members.clone() };
                    for delay in self.fate(holder) {
                        let request = request.clone();
                        self.schedule(delay, Event::ToOwner { owner, from: holder, from_life, call: None, claim_sent, request });
                    }
                }
            }
            Op::Cut { holder, cut } => self.holders[holder].cut = cut,
        }
    }

    /// Everybody stops, the network works again: in the end all memory is free.
    fn wind_down(&mut self) {
        self.lossless = true;
        for holder in 0..HOLDERS {
            self.step_holder(holder, keeper::Input::Stop);
        }
        self.run(60_000_000_000);
        for owner in &self.owners {
            assert_eq!(owner.machine.totals().used, 0, "all memory is free in the end");
            assert!(owner.pending.is_empty(), "every question was answered");
        }
        for holder in &self.holders {
            assert!(holder.machine.is_empty(), "nothing is held in the end: {:?}", holder.machine);
            assert!(holder.batches.is_empty(), "every set was answered");
        }
    }
}

fn new_owner(n: usize, life: u64, offered_bytes: u64) -> Owner {
    Owner::new(OwnerConfig { node: owner_id(n), incarnation: Incarnation(life), offered_bytes, ttl: timing::TTL })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn memory_is_never_lent_twice_and_holders_are_right(seed: u64, ops in proptest::collection::vec(op(), 1..70)) {
        let mut world = World::new(seed);
        for op in ops {
            world.apply(op);
        }
        world.wind_down();
    }
}

#[test]
fn the_world_is_eventful() {
    // The property would hold in a world where nothing is ever granted. It is not such a world.
    let (mut granted, mut claims, mut ids) = (0, 0, BTreeSet::new());
    for seed in 0..20 {
        let mut world = World::new(seed);
        for n in 0..30 {
            world.apply(Op::Place { holder: n % HOLDERS, sizes: vec![(0, 20), (1, 10)] });
            world.apply(Op::Advance { millis: 2000 });
            world.apply(Op::Claim { holder: (n + 1) % HOLDERS, nth: 0 });
            world.apply(Op::Advance { millis: 1000 });
            world.apply(Op::GiveBack { holder: n % HOLDERS, nth: 0 });
        }
        world.wind_down();
        granted += world.granted_batches;
        claims += world.claims;
        ids.extend(world.lives.keys().copied());
    }
    assert!(granted > 100, "{granted}");
    assert!(claims > 50, "{claims}");
    assert!(ids.len() > 200, "{}", ids.len());
}
