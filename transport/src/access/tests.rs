use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::testing::{effects, soon};

const HOLDER: [u8; 32] = [1; 32];

fn term(counter: u64) -> TermTag {
    TermTag { counter, node: 0 }
}

fn lease(start: u64, bytes: u64) -> Grant {
    Grant { holder: HOLDER, start, bytes, rights: Rights::ALL, term: term(5), deadline: Instant::from_nanos(100) }
}

fn read(handle: Handle, offset: u64, bytes: u64) -> Operation {
    Operation { handle, peer: HOLDER, term: term(5), write: None, offset, bytes }
}

#[test]
fn every_check_denies_what_it_is_for() {
    let mut table = AccessMachine::new(1000);
    let (handle, read_only, now) = (Handle(7), Handle(8), Instant::from_nanos(99));
    table.grant(handle, lease(100, 50)).unwrap();
    table.grant(read_only, Grant { rights: Rights { read: true, write: false }, ..lease(0, 10) }).unwrap();
    let good = read(handle, 10, 40);
    assert_eq!(table.admit(now, good), Ok(110));
    let cases = [
        (Operation { handle: Handle(6), ..good }, Denied::Unknown),
        (Operation { peer: [2; 32], ..good }, Denied::Holder),
        (Operation { term: term(4), ..good }, Denied::Term),
        (Operation { handle: read_only, write: Some(0), ..read(handle, 0, 1) }, Denied::Rights),
        (Operation { bytes: 41, ..good }, Denied::Bounds),
        (Operation { offset: u64::MAX, ..good }, Denied::Bounds),
        (Operation { offset: 51, bytes: 0, ..good }, Denied::Bounds),
    ];
    for (operation, denied) in cases {
        assert_eq!(table.admit(now, operation), Err(denied));
    }
    assert_eq!(table.admit(Instant::from_nanos(100), good), Err(Denied::Expired));
    assert!(table.renew(handle, Instant::from_nanos(200)));
    assert_eq!(table.admit(Instant::from_nanos(100), good), Ok(110));
    let write = |generation| Operation { write: Some(generation), ..good };
    assert_eq!(table.admit(now, write(3)), Ok(110));
    assert_eq!(table.admit(now, write(2)), Err(Denied::Generation));
    assert_eq!(table.admit(now, write(3)), Ok(110));
    assert!(table.raise_term(handle, term(6)) && table.raise_term(handle, term(2)));
    assert_eq!(table.admit(now, good), Err(Denied::Term));
    table.fence(handle);
    assert_eq!(table.admit(now, Operation { term: term(6), ..good }), Err(Denied::Fenced));
    assert!(!table.renew(handle, Instant::from_nanos(300)));
}

#[test]
fn revoking_waits_for_what_is_inside_and_lets_nothing_in() {
    let effects = effects();
    let table = AccessTable::new(effects.clone(), 100);
    let grant = Grant { deadline: soon(&effects), ..lease(0, 100) };
    let handle = table.grant(grant).unwrap();
    let pass = table.admit(read(handle, 0, 10)).unwrap();
    let error = table.revoke(handle, effects.after(Duration::from_millis(5))).unwrap_err();
    assert_eq!(error, RevokeError::InFlight { handle, in_flight: 1 });
    assert_eq!(table.admit(read(handle, 0, 10)).unwrap_err(), Denied::Fenced);
    assert!(matches!(table.grant(grant), Err(GrantError::Taken { .. })), "the fence does not hold yet");
    std::thread::scope(|scope| {
        let revoking = scope.spawn(|| table.revoke(handle, soon(&effects)));
        drop(pass);
        assert_eq!(revoking.join().unwrap(), Ok(()));
    });
    assert_eq!(table.lent_bytes(), 0);
    assert_ne!(table.grant(grant).unwrap(), handle);
    assert_eq!(table.revoke(handle, soon(&effects)), Err(RevokeError::Unknown { handle }));
}

#[derive(Debug, Clone)]
enum Step {
    Grant { handle: u128, start: u64, bytes: u64 },
    Admit { handle: u128, offset: u64, bytes: u64, write: Option<u64>, term: u64, peer: u8 },
    Finish(usize),
    Fence(u128),
    Settle(u128),
    Renew(u128),
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let handle = 0u128..6;
    let grant = (handle.clone(), 0u64..40, 0u64..20).prop_map(|(handle, start, bytes)| Step::Grant { handle, start, bytes });
    let admit = (handle.clone(), 0u64..20, 0u64..20, prop::option::of(0u64..4), 3u64..7, 1u8..3)
        .prop_map(|(handle, offset, bytes, write, term, peer)| Step::Admit { handle, offset, bytes, write, term, peer });
    let step = prop_oneof![
        4 => grant, 10 => admit, 4 => (0usize..9).prop_map(Step::Finish), 1 => handle.clone().prop_map(Step::Fence),
        3 => handle.clone().prop_map(Step::Settle), 2 => handle.prop_map(Step::Renew), 2 => (1u64..30).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 0..150)
}

proptest! {
    /// Whatever is asked for: no two leases share a byte, what is let in lies inside its lease, and a byte is not lent
    /// again while anything that was let in before is still inside.
    #[test]
    fn no_byte_is_ever_in_two_hands(steps in steps()) {
        const SLAB: u64 = 40;
        let mut table = AccessMachine::new(SLAB);
        let mut now = Instant::ZERO;
        // The model: which lease has which range, and which operations are inside.
        let mut leases: std::collections::BTreeMap<Handle, Grant> = Default::default();
        let mut inside: Vec<(Handle, std::ops::Range<u64>)> = Vec::new();
        for step in steps {
            match step {
                Step::Grant { handle, start, bytes } => {
                    let (handle, grant) = (Handle(handle), Grant { deadline: now + Duration::from_nanos(50), ..lease(start, bytes) });
                    let overlaps = leases.values().any(|other| start < other.start + other.bytes && other.start < start + bytes);
                    let possible = bytes > 0 && start + bytes <= SLAB && !overlaps && !leases.contains_key(&handle);
                    prop_assert_eq!(table.grant(handle, grant).is_ok(), possible);
                    if possible {
                        let range = start..start + bytes;
                        prop_assert!(!inside.iter().any(|(_, op)| op.start < range.end && range.start < op.end));
                        leases.insert(handle, grant);
                    }
                }
                Step::Admit { handle, offset, bytes, write, term: counter, peer } => {
                    let handle = Handle(handle);
                    let operation = Operation { handle, peer: [peer; 32], term: term(counter), write, offset, bytes };
                    if let Ok(start) = table.admit(now, operation) {
                        let grant = leases[&handle];
                        prop_assert!(start == grant.start + offset && start + bytes <= grant.start + grant.bytes);
                        prop_assert!(now < grant.deadline && peer == 1 && counter >= 5);
                        inside.push((handle, start..start + bytes));
                    }
                }
                Step::Finish(which) => {
                    if !inside.is_empty() {
                        let (handle, _) = inside.remove(which % inside.len());
                        table.finish(handle);
                    }
                }
                Step::Fence(handle) => table.fence(Handle(handle)),
                Step::Settle(handle) => {
                    let handle = Handle(handle);
                    match table.settle(handle) {
                        Settled::Freed => {
                            prop_assert!(!inside.iter().any(|(other, _)| *other == handle));
                            leases.remove(&handle);
                        }
                        Settled::Unknown => prop_assert!(!leases.contains_key(&handle)),
                        Settled::InFlight(count) => {
                            prop_assert_eq!(count as usize, inside.iter().filter(|(other, _)| *other == handle).count());
                        }
                    }
                }
                Step::Renew(handle) => {
                    let handle = Handle(handle);
                    let deadline = now + Duration::from_nanos(50);
                    if table.renew(handle, deadline) {
                        leases.get_mut(&handle).unwrap().deadline = deadline;
                    }
                }
                Step::Pass(nanos) => now = now + Duration::from_nanos(nanos),
            }
            prop_assert_eq!(table.lent_bytes(), leases.values().map(|grant| grant.bytes).sum::<u64>());
        }
    }
}
