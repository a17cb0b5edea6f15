use super::*;
use crate::lease::types::{HolderUse, Purpose};

const MB: u64 = 1_000_000;
const OWNER: NodeId = NodeId([0xee; 32]);
const LIFE: Incarnation = Incarnation(5);

fn node(n: u8) -> NodeId {
    NodeId([n; 32])
}

fn at(seconds: f64) -> Instant {
    Instant::from_nanos((seconds * 1e9) as u64)
}

struct Bench {
    owner: Owner,
    key: u64,
    /// Fences that were asked for and do not hold yet.
    fencing: Vec<LeaseId>,
    notices: Vec<(NodeId, LeaseNotice)>,
    raised: Vec<Term>,
    replies: BTreeMap<u64, LeaseReply>,
}

impl Bench {
    fn new(offered: u64) -> Self {
        let config = OwnerConfig { node: OWNER, incarnation: LIFE, offered_bytes: offered, ttl: timing::TTL };
        let owner = Owner::new(config);
        Self { owner, key: 0, fencing: vec![], notices: vec![], raised: vec![], replies: BTreeMap::new() }
    }

    fn step(&mut self, now: Instant, input: Input) {
        for output in self.owner.step(now, input) {
            match output {
                Output::Reply { key, reply } => assert!(self.replies.insert(key.0, reply).is_none(), "answered once"),
                Output::Fence(lease) => self.fencing.push(lease),
                Output::Notify { to, notice } => self.notices.push((to, notice)),
                Output::TermRaised { term, .. } => self.raised.push(term),
                Output::OverCommitted { .. } => {}
            }
        }
    }

    fn send(&mut self, now: Instant, from: NodeId, request: LeaseRequest) -> u64 {
        self.key += 1;
        let key = self.key;
        self.step(now, Input::Request { from, key: RequestKey(key), request, seed: TokenSeed([key as u8; 32]) });
        key
    }

    fn ask(&mut self, now: Instant, from: NodeId, request: LeaseRequest) -> LeaseReply {
        let key = self.send(now, from, request);
        self.replies.remove(&key).expect("answered at once")
    }

    fn grant(&mut self, now: Instant, from: NodeId, spec: &LeaseSpec) -> Grant {
        match self.ask(now, from, LeaseRequest::Acquire(spec.clone())) {
            LeaseReply::Granted(grant) => grant,
            other => panic!("not granted: {other:?}"),
        }
    }

    fn refusal(&mut self, now: Instant, from: NodeId, request: LeaseRequest) -> LeaseError {
        match self.ask(now, from, request) {
            LeaseReply::Refused(error) => error,
            other => panic!("not refused: {other:?}"),
        }
    }

    fn fences_hold(&mut self, now: Instant) {
        for lease in std::mem::take(&mut self.fencing) {
            self.step(now, Input::Fenced(lease));
        }
    }
}

fn spec(id: u128, instance: u128, bytes: u64, term: Term) -> LeaseSpec {
    LeaseSpec {
        id: LeaseId(id),
        beneficiary: Beneficiary::Instance(InstanceId(instance)),
        purpose: Purpose::Weights,
        bytes,
        term,
        members: vec![node(1), node(2), node(3)],
        stage: Some(0..4),
    }
}

fn term(counter: u64, n: u8) -> Term {
    Term { counter, node: node(n) }
}

fn renew(grant: &Grant) -> LeaseRequest {
    LeaseRequest::Renew { lease: grant.lease, token: grant.token, incarnation: grant.incarnation, term: grant.term, idle: Duration::ZERO }
}

fn release(grant: &Grant) -> LeaseRequest {
    LeaseRequest::Release { lease: grant.lease, token: grant.token, incarnation: grant.incarnation, term: grant.term }
}

#[test]
fn asking_twice_gives_one_lease() {
    let mut bench = Bench::new(100 * MB);
    let wanted = spec(1, 1, 60 * MB, term(1, 1));
    let first = bench.grant(at(0.0), node(1), &wanted);
    assert_eq!(bench.grant(at(1.0), node(1), &wanted), first);
    assert_eq!(bench.owner.totals().used, 60 * MB);
    let other = LeaseSpec { bytes: 61 * MB, ..wanted.clone() };
    let error = bench.refusal(at(1.0), node(1), LeaseRequest::Acquire(other));
    assert_eq!(error, LeaseError::DifferentTerms { lease: LeaseId(1) });
    let stranger = LeaseSpec { term: term(1, 2), ..LeaseSpec::user(LeaseId(1), node(2), "x", MB) };
    assert!(matches!(bench.refusal(at(1.0), node(2), LeaseRequest::Acquire(stranger)), LeaseError::WrongHolder { .. }));
}

#[test]
fn what_does_not_fit_is_refused_in_words() {
    let mut bench = Bench::new(100 * MB);
    bench.grant(at(0.0), node(1), &spec(1, 1, 60 * MB, term(1, 1)));
    bench.grant(at(0.0), node(2), &LeaseSpec::user(LeaseId(2), node(2), "cache", 10 * MB));
    let error = bench.refusal(at(1.0), node(3), LeaseRequest::Acquire(spec(3, 3, 31 * MB, term(1, 3))));
    let LeaseError::OutOfMemory { asked, free, offered, fenced, largest } = error else { panic!("{error}") };
    assert_eq!((asked, free, offered, fenced), (31 * MB, 30 * MB, 100 * MB, 0));
    let beneficiary = Beneficiary::Instance(InstanceId(1));
    assert_eq!(largest[0], HolderUse { holder: node(1), beneficiary, bytes: 60 * MB });
    assert_eq!(largest.len(), 2);
    let huge = LeaseSpec { bytes: u64::MAX, ..spec(4, 4, 1, term(1, 3)) };
    assert!(matches!(bench.refusal(at(1.0), node(3), LeaseRequest::Acquire(huge)), LeaseError::OutOfMemory { .. }));
}

#[test]
fn released_memory_is_lent_again_only_behind_its_fence() {
    let mut bench = Bench::new(100 * MB);
    let grant = bench.grant(at(0.0), node(1), &spec(1, 1, 80 * MB, term(1, 1)));
    assert_eq!(bench.ask(at(1.0), node(1), release(&grant)), LeaseReply::Released { lease: LeaseId(1) });
    assert_eq!(bench.fencing, [LeaseId(1)]);
    assert_eq!(bench.owner.totals().fenced, 80 * MB);
    let waiting = bench.send(at(1.1), node(2), LeaseRequest::Acquire(spec(2, 2, 50 * MB, term(1, 2))));
    assert!(!bench.replies.contains_key(&waiting), "waits for the fence");
    bench.fences_hold(at(1.5));
    assert!(matches!(bench.replies.get(&waiting), Some(LeaseReply::Granted(_))));
    assert_eq!(bench.owner.totals(), Totals { offered: 100 * MB, used: 50 * MB, fenced: 0, leases: 1 });
    // Again is fine, and the id is used up.
    assert_eq!(bench.ask(at(2.0), node(1), release(&grant)), LeaseReply::Released { lease: LeaseId(1) });
    let again = LeaseRequest::Acquire(spec(1, 1, 10 * MB, term(1, 1)));
    assert!(matches!(bench.refusal(at(2.0), node(1), again), LeaseError::Ended { .. }));
}

#[test]
fn a_fence_that_never_holds_keeps_its_memory_charged() {
    let mut bench = Bench::new(100 * MB);
    let grant = bench.grant(at(0.0), node(1), &spec(1, 1, 80 * MB, term(1, 1)));
    bench.ask(at(1.0), node(1), release(&grant));
    let waiting = bench.send(at(1.0), node(2), LeaseRequest::Acquire(spec(2, 2, 50 * MB, term(1, 2))));
    assert_eq!(bench.owner.next_wake(), Some(at(1.0) + timing::FENCE_PATIENCE));
    bench.step(at(1.0) + timing::FENCE_PATIENCE, Input::Tick);
    let Some(LeaseReply::Refused(LeaseError::OutOfMemory { fenced, .. })) = bench.replies.get(&waiting) else { panic!() };
    assert_eq!(*fenced, 80 * MB);
    bench.step(at(1000.0), Input::Tick);
    assert_eq!(bench.owner.totals().used, 80 * MB);
    // A fence that nobody asked for frees nothing.
    bench.step(at(1000.0), Input::Fenced(LeaseId(77)));
    let small = bench.grant(at(1000.0), node(3), &spec(3, 3, 20 * MB, term(1, 3)));
    bench.step(at(1000.0), Input::Fenced(small.lease));
    assert_eq!(bench.owner.totals().used, 100 * MB);
}

#[test]
fn an_expired_lease_gives_way_when_needed_and_goes_by_itself_at_the_sweep() {
    let mut bench = Bench::new(100 * MB);
    let first = bench.grant(at(0.0), node(1), &spec(1, 1, 60 * MB, term(1, 1)));
    let second = bench.grant(at(0.5), node(1), &spec(2, 1, 40 * MB, term(1, 1)));
    // Late, but nobody needed it.
    assert_eq!(bench.ask(at(11.0), node(1), renew(&second)), LeaseReply::Renewed { lease: LeaseId(2), ttl: timing::TTL });
    let state = |bench: &Bench, n: usize| bench.owner.view(at(11.0)).leases[n].state.clone();
    assert_eq!((state(&bench, 0), state(&bench, 1)), (LeaseState::Reclaimable, LeaseState::Granted));
    let right = LeaseUse::from(&first);
    assert_eq!(bench.owner.check(at(11.0), node(1), &right), Err(LeaseError::Expired { lease: LeaseId(1) }));
    let waiting = bench.send(at(11.0), node(2), LeaseRequest::Acquire(spec(3, 3, 50 * MB, term(1, 2))));
    assert_eq!(bench.fencing, [LeaseId(1)]);
    assert!(matches!(bench.refusal(at(11.1), node(1), renew(&first)), LeaseError::Fenced { .. }));
    bench.fences_hold(at(11.2));
    assert!(matches!(bench.replies.get(&waiting), Some(LeaseReply::Granted(_))));
    assert_eq!(bench.owner.next_wake(), Some(at(21.0) + timing::SWEEP));
    bench.step(at(21.0) + timing::SWEEP, Input::Tick);
    assert_eq!(bench.fencing, [LeaseId(2)]);
    assert_eq!(bench.notices.len(), 2);
}

#[test]
fn only_the_holder_with_its_token_in_this_life_is_heard() {
    let mut bench = Bench::new(100 * MB);
    let grant = bench.grant(at(0.0), node(1), &spec(1, 1, 60 * MB, term(1, 1)));
    let other = bench.grant(at(0.0), node(1), &spec(2, 1, 10 * MB, term(1, 1)));
    let stolen = Grant { token: other.token, ..grant.clone() };
    assert!(matches!(bench.refusal(at(1.0), node(1), renew(&stolen)), LeaseError::WrongToken { .. }));
    assert!(matches!(bench.refusal(at(1.0), node(1), release(&stolen)), LeaseError::WrongToken { .. }));
    assert!(matches!(bench.refusal(at(1.0), node(2), release(&grant)), LeaseError::WrongHolder { .. }));
    assert!(matches!(bench.refusal(at(1.0), node(2), LeaseRequest::Abandon { lease: LeaseId(1) }), LeaseError::WrongHolder { .. }));
    let past = Grant { incarnation: Incarnation(4), ..grant.clone() };
    let error = bench.refusal(at(1.0), node(1), renew(&past));
    assert_eq!(error, LeaseError::WrongIncarnation { yours: Incarnation(4), current: LIFE });
    let unknown = Grant { lease: LeaseId(9), ..grant.clone() };
    assert!(matches!(bench.refusal(at(1.0), node(1), renew(&unknown)), LeaseError::UnknownLease { .. }));
    assert!(bench.owner.check(at(1.0), node(1), &LeaseUse::from(&grant)).is_ok());
    assert!(bench.owner.check(at(1.0), node(2), &LeaseUse::from(&grant)).is_err());
    assert_eq!(bench.owner.totals().used, 70 * MB);
}

#[test]
fn a_higher_term_takes_the_instance_and_the_lower_one_is_refused() {
    let mut bench = Bench::new(100 * MB);
    let old = bench.grant(at(0.0), node(1), &spec(1, 7, 60 * MB, term(1, 1)));
    let user = bench.grant(at(0.0), node(1), &LeaseSpec::user(LeaseId(2), node(1), "mine", MB));
    let instance = InstanceId(7);
    let claim = |t: Term| LeaseRequest::Claim { instance, term: t, members: vec![node(2), node(3)] };
    assert!(matches!(bench.refusal(at(1.0), node(2), claim(term(1, 2))), LeaseError::TermTaken { .. }));
    assert!(matches!(bench.refusal(at(1.0), node(9), claim(term(2, 9))), LeaseError::NotAMember { .. }));
    assert!(matches!(bench.refusal(at(1.0), node(2), claim(term(2, 3))), LeaseError::ForeignTerm { .. }));
    assert!(bench.raised.is_empty());
    let LeaseReply::Claimed { leases } = bench.ask(at(1.0), node(2), claim(term(2, 2))) else { panic!() };
    assert_eq!(bench.raised, [term(2, 2)]);
    assert_eq!(leases.len(), 1);
    let (new_spec, new) = leases[0].clone();
    assert_eq!(new_spec.members, [node(2), node(3)]);
    assert_ne!(new.token, old.token);
    // Claiming again under the same term is the same claim.
    assert_eq!(bench.ask(at(1.1), node(2), claim(term(2, 2))), LeaseReply::Claimed { leases });
    for request in [renew(&old), release(&old), LeaseRequest::Acquire(spec(3, 7, MB, term(1, 1)))] {
        let error = bench.refusal(at(2.0), node(1), request);
        assert_eq!(error, LeaseError::StaleTerm { instance, yours: term(1, 1), current: term(2, 2) });
    }
    assert!(matches!(bench.owner.check(at(2.0), node(1), &LeaseUse::from(&old)), Err(LeaseError::StaleTerm { .. })));
    assert!(bench.owner.check(at(2.0), node(2), &LeaseUse::from(&new)).is_ok());
    assert!(matches!(bench.ask(at(2.0), node(1), renew(&user)), LeaseReply::Renewed { .. }), "users' leases have no contest");
    // The claimant's member list counts from now on: node 1 is out.
    assert!(matches!(bench.refusal(at(3.0), node(1), claim(term(3, 1))), LeaseError::NotAMember { .. }));
}

#[test]
fn an_acquire_that_waits_is_refused_if_its_term_is_superseded_meanwhile() {
    let mut bench = Bench::new(100 * MB);
    let held = bench.grant(at(0.0), node(1), &spec(1, 7, 80 * MB, term(1, 1)));
    bench.ask(at(1.0), node(1), release(&held));
    let waiting = bench.send(at(1.0), node(1), LeaseRequest::Acquire(spec(2, 7, 80 * MB, term(1, 1))));
    let claim = LeaseRequest::Claim { instance: InstanceId(7), term: term(2, 2), members: vec![node(2)] };
    assert_eq!(bench.ask(at(1.1), node(2), claim), LeaseReply::Claimed { leases: vec![] });
    bench.fences_hold(at(1.2));
    assert!(matches!(bench.replies.get(&waiting), Some(LeaseReply::Refused(LeaseError::StaleTerm { .. }))));
    assert_eq!(bench.owner.totals().used, 0);
}

#[test]
fn a_lower_offer_ends_users_first_and_then_the_idlest_instance_as_a_whole() {
    let mut bench = Bench::new(100 * MB);
    let busy = bench.grant(at(0.0), node(1), &spec(1, 1, 20 * MB, term(1, 1)));
    let idle = bench.grant(at(0.0), node(2), &spec(2, 2, 20 * MB, term(1, 2)));
    let idle_kv = bench.grant(at(0.0), node(2), &spec(3, 2, 20 * MB, term(1, 2)));
    bench.grant(at(0.0), node(3), &LeaseSpec::user(LeaseId(4), node(3), "x", 20 * MB));
    for grant in [&idle, &idle_kv] {
        let LeaseRequest::Renew { lease, token, incarnation, term, .. } = renew(grant) else { panic!() };
        bench.ask(at(1.0), node(2), LeaseRequest::Renew { lease, token, incarnation, term, idle: Duration::from_secs(1) });
    }
    bench.step(at(2.0), Input::Offer(80 * MB));
    assert!(bench.fencing.is_empty());
    bench.step(at(2.0), Input::Offer(65 * MB));
    assert_eq!(std::mem::take(&mut bench.fencing), [LeaseId(4)]);
    assert_eq!(bench.owner.totals().over_committed(), 15 * MB);
    // Nothing is granted while more is lent than offered.
    assert!(matches!(
        bench.refusal(at(2.0), node(3), LeaseRequest::Acquire(spec(9, 9, 70 * MB, term(1, 3)))),
        LeaseError::OutOfMemory { .. }
    ));
    bench.step(at(2.1), Input::Fenced(LeaseId(4)));
    bench.step(at(2.2), Input::Offer(50 * MB));
    assert_eq!(bench.fencing, [LeaseId(2), LeaseId(3)]);
    bench.fences_hold(at(2.3));
    assert_eq!(bench.owner.totals(), Totals { offered: 50 * MB, used: 20 * MB, fenced: 0, leases: 1 });
    let error = bench.refusal(at(2.4), node(2), renew(&idle));
    assert!(error.to_string().contains("the node now offers only 50.0 MB"), "{error}");
    assert!(matches!(bench.ask(at(2.4), node(1), renew(&busy)), LeaseReply::Renewed { .. }));
}

#[test]
fn an_abandoned_lease_cannot_come_into_being_later() {
    let mut bench = Bench::new(100 * MB);
    assert!(matches!(bench.ask(at(0.0), node(1), LeaseRequest::Abandon { lease: LeaseId(1) }), LeaseReply::Released { .. }));
    let error = bench.refusal(at(0.1), node(1), LeaseRequest::Acquire(spec(1, 1, MB, term(1, 1))));
    assert!(matches!(error, LeaseError::Ended { .. }));
    // Also while it waits for a fence.
    let held = bench.grant(at(0.0), node(1), &spec(2, 1, 80 * MB, term(1, 1)));
    bench.ask(at(1.0), node(1), release(&held));
    let waiting = bench.send(at(1.0), node(1), LeaseRequest::Acquire(spec(3, 1, 80 * MB, term(1, 1))));
    let twice = bench.send(at(1.1), node(1), LeaseRequest::Acquire(spec(3, 1, 80 * MB, term(1, 1))));
    bench.ask(at(1.2), node(1), LeaseRequest::Abandon { lease: LeaseId(3) });
    for key in [waiting, twice] {
        assert!(matches!(bench.replies.get(&key), Some(LeaseReply::Refused(LeaseError::Ended { .. }))));
    }
    bench.fences_hold(at(1.3));
    assert_eq!(bench.owner.totals().used, 0);
}

#[test]
fn limits_hold() {
    let mut bench = Bench::new(u64::MAX);
    let bad = [
        LeaseSpec { bytes: 0, ..spec(1, 1, 1, term(1, 1)) },
        LeaseSpec { stage: Some(4..4), ..spec(1, 1, 1, term(1, 1)) },
        LeaseSpec::user(LeaseId(1), node(1), "x".repeat(65), 1),
        LeaseSpec::user(LeaseId(1), node(1), "a\u{1b}[2J", 1),
    ];
    for wanted in bad {
        assert!(matches!(bench.refusal(at(0.0), node(1), LeaseRequest::Acquire(wanted)), LeaseError::Malformed(_)));
    }
    let crowd = LeaseSpec { members: vec![node(1); 65], ..spec(1, 1, 1, term(1, 1)) };
    assert!(matches!(bench.refusal(at(0.0), node(1), LeaseRequest::Acquire(crowd)), LeaseError::TooMany { .. }));
    for id in 0..timing::LEASES_PER_INSTANCE_MAX as u128 {
        bench.grant(at(0.0), node(1), &spec(id, 1, 1, term(1, 1)));
    }
    let error = bench.refusal(at(0.0), node(1), LeaseRequest::Acquire(spec(5000, 1, 1, term(1, 1))));
    assert_eq!(error.to_string(), "too many leases of one instance on this node: the limit is 256");
    for id in 256..timing::LEASES_PER_HOLDER_MAX as u128 {
        bench.grant(at(0.0), node(1), &LeaseSpec::user(LeaseId(id), node(1), "x", 1));
    }
    let one_more = LeaseSpec::user(LeaseId(9999), node(1), "x", 1);
    assert!(matches!(bench.refusal(at(0.0), node(1), LeaseRequest::Acquire(one_more)), LeaseError::TooMany { .. }));
}

#[test]
fn a_whole_view_fits_a_control_frame() {
    let leases = (0..timing::LEASES_MAX as u128)
        .map(|id| LeaseInfo {
            id: LeaseId(u128::MAX - id),
            holder: node(255),
            beneficiary: Beneficiary::User("x".repeat(timing::LABEL_BYTES_MAX)),
            purpose: Purpose::User,
            bytes: u64::MAX,
            term: term(u64::MAX, 255),
            stage: Some(u32::MAX - 1..u32::MAX),
            state: LeaseState::Fenced(EndReason::Revoked("x".repeat(timing::REASON_BYTES_MAX))),
            remaining: Duration::MAX,
        })
        .collect();
    let totals = Totals { offered: u64::MAX, used: u64::MAX, fenced: u64::MAX, leases: u32::MAX };
    let view = LeaseView { owner: node(255), incarnation: Incarnation(u64::MAX), totals, leases };
    let bytes = postcard::to_stdvec(&LeaseReply::View(view)).expect("encodes");
    assert!(bytes.len() < 4 * 1024 * 1024 / 2, "{} bytes", bytes.len());
}
