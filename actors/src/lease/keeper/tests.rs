use super::*;
use crate::ids::{Incarnation, Term};
use crate::lease::types::{EndReason, LeaseToken, TokenSeed};

fn node(n: u8) -> NodeId {
    NodeId([n; 32])
}

fn at(seconds: f64) -> Instant {
    Instant::from_nanos((seconds * 1e9).round() as u64)
}

fn spec(id: u128, bytes: u64) -> LeaseSpec {
    LeaseSpec::user(LeaseId(id), node(9), "test", bytes)
}

fn grant(spec: &LeaseSpec, owner: NodeId) -> Grant {
    Grant {
        lease: spec.id,
        owner,
        incarnation: Incarnation(1),
        token: LeaseToken::derive(&TokenSeed([1; 32]), spec.id),
        term: spec.term,
        bytes: spec.bytes,
        ttl: timing::TTL,
    }
}

fn sends(out: &[Output]) -> Vec<(CallKey, NodeId, LeaseRequest)> {
    out.iter()
        .filter_map(|o| match o {
            Output::Send { call, to, request } => Some((*call, *to, request.clone())),
            _ => None,
        })
        .collect()
}

fn answer(keeper: &mut Keeper, now: Instant, call: CallKey, owner: NodeId, reply: LeaseReply) -> Vec<Output> {
    keeper.step(now, Input::Answer { call, owner, result: Ok(reply) })
}

fn fail(keeper: &mut Keeper, now: Instant, call: CallKey, owner: NodeId) -> Vec<Output> {
    let failure = CallFailure { reason: "no answer".to_owned(), retry: true };
    keeper.step(now, Input::Answer { call, owner, result: Err(failure) })
}

/// A keeper that holds lease 1 of node 1, acquired at zero.
fn holding_one() -> Keeper {
    let mut keeper = Keeper::new();
    let out = keeper.step(at(0.0), Input::AcquireAll { batch: BatchKey(1), wanted: vec![(node(1), spec(1, 10))] });
    let out = answer(&mut keeper, at(0.2), sends(&out)[0].0, node(1), LeaseReply::Granted(grant(&spec(1, 10), node(1))));
    assert!(matches!(&out[..], [Output::Right { until: Some(_), .. }, Output::Batch { result: Ok(_), .. }]));
    keeper
}

#[test]
fn owners_are_asked_in_order_and_grants_come_back_as_asked() {
    let mut keeper = Keeper::new();
    let wanted = vec![(node(3), spec(1, 10)), (node(1), spec(2, 20)), (node(3), spec(3, 30))];
    let mut out = keeper.step(at(0.0), Input::AcquireAll { batch: BatchKey(1), wanted: wanted.clone() });
    let mut order = Vec::new();
    while let [(call, owner, LeaseRequest::Acquire(asked))] = &sends(&out)[..] {
        order.push((*owner, asked.id.0));
        out = answer(&mut keeper, at(0.1), *call, *owner, LeaseReply::Granted(grant(asked, *owner)));
    }
    assert_eq!(order, [(node(1), 2), (node(3), 1), (node(3), 3)]);
    let Some(Output::Batch { result: Ok(grants), .. }) = out.last() else { panic!("{out:?}") };
    assert_eq!(grants.iter().map(|g| g.lease.0).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(keeper.held().count(), 3);
}

#[test]
fn a_refusal_gives_the_others_back_and_says_who_and_why() {
    let mut keeper = Keeper::new();
    let wanted = vec![(node(1), spec(1, 10)), (node(2), spec(2, 20_000_000)), (node(3), spec(3, 30))];
    let out = keeper.step(at(0.0), Input::AcquireAll { batch: BatchKey(1), wanted });
    let out = answer(&mut keeper, at(0.1), sends(&out)[0].0, node(1), LeaseReply::Granted(grant(&spec(1, 10), node(1))));
    let why = LeaseError::TooMany { what: "leases on this node".to_owned(), limit: 4096 };
    let out = answer(&mut keeper, at(0.2), sends(&out)[0].0, node(2), LeaseReply::Refused(why));
    let [(call, to, LeaseRequest::Release { lease, .. })] = &sends(&out)[..] else { panic!("{out:?}") };
    assert_eq!((*to, *lease), (node(1), LeaseId(1)));
    let error = out.iter().find_map(|o| match o {
        Output::Batch { result: Err(error), .. } => Some(error.to_string()),
        _ => None,
    });
    assert_eq!(
        error.as_deref(),
        Some("node 0202020202 does not lend 20.0 MB for a user's data: too many leases on this node: the limit is 4096")
    );
    assert!(!keeper.may_use(at(0.2), LeaseId(1)));
    answer(&mut keeper, at(0.3), *call, node(1), LeaseReply::Released { lease: LeaseId(1) });
    assert!(keeper.is_empty());
}

#[test]
fn an_owner_that_does_not_answer_is_given_up_and_told_so() {
    let mut keeper = Keeper::new();
    let mut out = keeper.step(at(0.0), Input::AcquireAll { batch: BatchKey(1), wanted: vec![(node(1), spec(1, 10))] });
    let mut tries = 0;
    let mut now = at(0.0);
    let error = loop {
        if let Some(Output::Batch { result: Err(error), .. }) = out.iter().find(|o| matches!(o, Output::Batch { .. })) {
            break error.clone();
        }
        if let Some((call, owner, LeaseRequest::Acquire(_))) = sends(&out).first() {
            tries += 1;
            now = now + Duration::from_secs(1);
            out = fail(&mut keeper, now, *call, *owner);
        } else {
            now = keeper.next_wake().expect("a retry is planned");
            out = keeper.step(now, Input::Tick);
        }
    };
    assert!(tries > 1);
    assert!(matches!(error, AcquireError::Unreachable { .. }), "{error}");
    assert!(matches!(sends(&out)[..], [(_, _, LeaseRequest::Abandon { lease: LeaseId(1) })]));
    // A grant that comes now is too late.
    let late = CallKey { lease: LeaseId(1), kind: CallKind::Acquire, sent: at(0.0) };
    answer(&mut keeper, now, late, node(1), LeaseReply::Granted(grant(&spec(1, 10), node(1))));
    assert!(!keeper.may_use(now, LeaseId(1)));
}

#[test]
fn the_right_counts_from_the_sending_and_ends_early() {
    let mut keeper = holding_one();
    let end = at(0.0) + timing::TTL - timing::USE_MARGIN;
    assert!(keeper.may_use(at(9.4), LeaseId(1)));
    assert!(!keeper.may_use(end, LeaseId(1)));
    let renew_at = at(10.0 / 3.0);
    let wake = keeper.next_wake().expect("a renewal");
    assert!(wake.as_nanos().abs_diff(renew_at.as_nanos()) < 10);
    let out = keeper.step(wake, Input::Tick);
    let (call, _, _) = sends(&out)[0].clone();
    // Answered two seconds later: the right still counts from the sending.
    let renewed = LeaseReply::Renewed { lease: LeaseId(1), ttl: timing::TTL };
    let out = answer(&mut keeper, wake + Duration::from_secs(2), call, node(1), renewed);
    let until = wake + timing::TTL - timing::USE_MARGIN;
    assert_eq!(out[0], Output::Right { lease: LeaseId(1), until: Some(until) });
    assert!(!keeper.may_use(until, LeaseId(1)));
}

#[test]
fn without_an_answer_the_lease_is_lost_in_time_and_handed_back() {
    let mut keeper = holding_one();
    let end = at(0.0) + timing::TTL - timing::USE_MARGIN;
    let mut renewals = 0;
    let out = loop {
        let now = keeper.next_wake().expect("something is due");
        let out = keeper.step(now, Input::Tick);
        if now >= end {
            break out;
        }
        for (call, owner, _) in sends(&out) {
            renewals += 1;
            let later = now + Duration::from_secs(1);
            if later < end {
                assert!(fail(&mut keeper, later, call, owner).is_empty());
            }
        }
    };
    assert!(renewals >= 3, "{renewals}");
    assert!(out.iter().any(|o| matches!(o, Output::Lost(LostLease { reason: LostReason::TimedOut, .. }))));
    assert!(out.contains(&Output::Right { lease: LeaseId(1), until: None }));
    assert!(matches!(sends(&out)[..], [(_, _, LeaseRequest::Release { .. })]));
}

#[test]
fn an_answer_after_the_end_does_not_bring_the_lease_back() {
    let mut keeper = holding_one();
    let wake = keeper.next_wake().expect("a renewal");
    let call = sends(&keeper.step(wake, Input::Tick))[0].0;
    // The machine slept: no tick came in between.
    let out = answer(&mut keeper, at(60.0), call, node(1), LeaseReply::Renewed { lease: LeaseId(1), ttl: timing::TTL });
    assert!(out.iter().any(|o| matches!(o, Output::Lost(_))));
    assert!(!keeper.may_use(at(60.0), LeaseId(1)));
}

#[test]
fn a_notice_counts_only_from_the_owner_in_its_life() {
    let notice = |life: u64| LeaseNotice::Ended { lease: LeaseId(1), incarnation: Incarnation(life), reason: EndReason::Expired };
    let mut keeper = holding_one();
    keeper.step(at(1.0), Input::Notice { from: node(2), notice: notice(1) });
    keeper.step(at(1.0), Input::Notice { from: node(1), notice: notice(2) });
    assert!(keeper.may_use(at(1.0), LeaseId(1)));
    let out = keeper.step(at(1.0), Input::Notice { from: node(1), notice: notice(1) });
    assert!(matches!(&out[..], [Output::Right { until: None, .. }, Output::Lost(_)]));
    assert!(keeper.is_empty());
}

#[test]
fn an_owner_cannot_promise_for_ever_or_something_else() {
    let mut keeper = Keeper::new();
    let wanted = vec![(node(1), spec(1, 10))];
    let out = keeper.step(at(0.0), Input::AcquireAll { batch: BatchKey(1), wanted: wanted.clone() });
    let call = sends(&out)[0].0;
    let other = Grant { bytes: 9, ..grant(&spec(1, 10), node(1)) };
    let out = answer(&mut keeper, at(0.1), call, node(1), LeaseReply::Granted(other));
    assert!(out.iter().any(|o| matches!(o, Output::Batch { result: Err(AcquireError::Unreachable { .. }), .. })));

    let mut keeper = Keeper::new();
    let out = keeper.step(at(0.0), Input::AcquireAll { batch: BatchKey(1), wanted });
    let endless = Grant { ttl: Duration::MAX, ..grant(&spec(1, 10), node(1)) };
    answer(&mut keeper, at(0.1), sends(&out)[0].0, node(1), LeaseReply::Granted(endless));
    assert!(!keeper.may_use(at(0.0) + timing::TTL_MAX, LeaseId(1)));
}

#[test]
fn sets_that_make_no_sense_are_refused() {
    let mut keeper = holding_one();
    let bad: [Vec<(NodeId, LeaseSpec)>; 3] = [
        vec![(node(1), spec(1, 10))],
        vec![(node(1), spec(2, 10)), (node(2), spec(2, 10))],
        (0..=timing::BATCH_MAX as u128).map(|id| (node(1), spec(100 + id, 1))).collect(),
    ];
    for (n, wanted) in bad.into_iter().enumerate() {
        let out = keeper.step(at(1.0), Input::AcquireAll { batch: BatchKey(10 + n as u64), wanted });
        assert!(matches!(&out[..], [Output::Batch { result: Err(AcquireError::Malformed(_)), .. }]), "{n}: {out:?}");
    }
    let out = keeper.step(at(1.0), Input::AcquireAll { batch: BatchKey(20), wanted: vec![] });
    assert_eq!(out, [Output::Batch { batch: BatchKey(20), result: Ok(vec![]) }]);
}

#[test]
fn a_stopped_keeper_gives_everything_back() {
    let mut keeper = holding_one();
    let out = keeper.step(at(1.0), Input::AcquireAll { batch: BatchKey(2), wanted: vec![(node(2), spec(2, 10))] });
    assert_eq!(sends(&out).len(), 1);
    let out = keeper.step(at(1.1), Input::Stop);
    assert!(out.iter().any(|o| matches!(o, Output::Batch { result: Err(AcquireError::Stopped), .. })));
    assert_eq!(sends(&out).len(), 2);
    let out = keeper.step(at(1.2), Input::AcquireAll { batch: BatchKey(3), wanted: vec![(node(2), spec(3, 10))] });
    assert!(matches!(&out[..], [Output::Batch { result: Err(AcquireError::Stopped), .. }]));
    let claimed = LeaseSpec { term: Term { counter: 2, node: node(9) }, ..spec(4, 10) };
    let out = keeper.step(at(1.2), Input::Adopt { grant: grant(&claimed, node(1)), spec: claimed, sent: at(1.0) });
    assert!(matches!(sends(&out)[..], [(_, _, LeaseRequest::Release { .. })]));
}

#[test]
fn a_claim_that_is_answered_late_does_not_bring_back_what_was_given_up() {
    let mut keeper = Keeper::new();
    let claimed = LeaseSpec { term: Term { counter: 2, node: node(9) }, ..spec(4, 10) };
    let adopt = |sent| Input::Adopt { grant: grant(&claimed, node(1)), spec: claimed.clone(), sent: at(sent) };
    keeper.step(at(1.1), adopt(1.0));
    assert!(keeper.may_use(at(1.2), claimed.id));
    let out = keeper.step(at(1.3), Input::Release(vec![claimed.id]));
    let asked = sends(&out);
    let [(call, _, LeaseRequest::Release { .. })] = &asked[..] else { panic!("{out:?}") };
    // The answer came twice, or the same was claimed again while it is given back.
    for sent in [1.0, 1.35] {
        keeper.step(at(1.4), adopt(sent));
        assert!(!keeper.may_use(at(1.4), claimed.id));
    }
    keeper.step(at(1.5), Input::Answer { call: *call, owner: node(1), result: Ok(LeaseReply::Released { lease: claimed.id }) });
    keeper.step(at(1.6), adopt(1.45));
    assert!(!keeper.may_use(at(1.6), claimed.id));
    // What is claimed after that is another matter.
    keeper.step(at(1.8), adopt(1.7));
    assert!(keeper.may_use(at(1.8), claimed.id));
}
