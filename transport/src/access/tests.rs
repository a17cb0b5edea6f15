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
    let mut table = AccessMachine::new(1000, 1);
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
    assert_eq!((table.lent_bytes(), table.retired_bytes()), (0, 0));
    assert_ne!(table.grant(grant).unwrap(), handle);
    assert_eq!(table.revoke(handle, soon(&effects)), Err(RevokeError::Unknown { handle }));
}

#[test]
fn leases_take_whole_pages_and_begin_at_one() {
    let mut table = AccessMachine::new(10_000, 4096);
    assert_eq!(table.grant(Handle(1), lease(100, 1)), Err(GrantError::Unaligned { start: 100, unit: 4096 }));
    table.grant(Handle(1), lease(0, 4097)).unwrap();
    assert_eq!(table.lent_bytes(), 8192);
    assert!(matches!(table.grant(Handle(2), lease(4096, 1)), Err(GrantError::Taken { end: 8192, .. })));
    table.grant(Handle(2), lease(8192, 10_000 - 8192)).unwrap();
    assert!(matches!(table.grant(Handle(3), lease(8192, 1809)), Err(GrantError::Bounds { .. })));
    for absurd in [(0, u64::MAX), (u64::MAX - 4095, 4096), (u64::MAX - 4095, u64::MAX)] {
        let huge = AccessMachine::new(u64::MAX, 4096).grant(Handle(1), lease(absurd.0, absurd.1));
        assert!(matches!(huge, Err(GrantError::Bounds { .. })));
    }
}

#[test]
fn new_leases_are_zeroed_and_memory_is_the_owners_to_read() {
    let effects = effects();
    let table = AccessTable::new(effects.clone(), 8192);
    let grant = Grant { deadline: soon(&effects), ..lease(4096, 100) };
    for _ in 0..2 {
        let handle = table.grant(grant).unwrap();
        let mut got = [9; 4];
        assert!(table.read(handle, 96, &mut got) && got == [0; 4]);
        let write = Operation { write: Some(0), ..read(handle, 96, 4) };
        table.admit(write).unwrap().write(b"here").unwrap();
        assert!(table.read(handle, 96, &mut got) && &got == b"here");
        assert!(table.write(handle, 0, b"mine") && !table.write(handle, 4095, b"past") && !table.read(Handle(3), 0, &mut got));
        let pass = table.admit(read(handle, 0, 4)).unwrap();
        assert_eq!(pass.read(&mut [0; 5]), Err(Denied::Bounds));
        assert_eq!(pass.write(b"x"), Err(Denied::Rights));
        drop(pass);
        // What was let in and comes too late.
        let (old, late) = (table.admit(write).unwrap(), table.admit(write).unwrap());
        drop(table.admit(Operation { write: Some(1), ..write }).unwrap());
        assert_eq!(old.write(b"late"), Err(Denied::Generation));
        table.raise_term(handle, term(6)).unwrap();
        assert_eq!(late.write(b"late"), Err(Denied::Term));
        drop((old, late));
        table.revoke(handle, soon(&effects)).unwrap();
        assert!(!table.read(handle, 0, &mut got));
    }
}

#[derive(Debug, Clone)]
enum Step {
    Grant { handle: u128, start: u64, bytes: u64 },
    Admit { handle: u128, offset: u64, bytes: u64, write: Option<u64>, term: u64, peer: u8 },
    Finish(usize),
    Fence(u128),
    Settle(u128),
    Forget(usize),
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
        3 => handle.clone().prop_map(Step::Settle), 1 => (0usize..9).prop_map(Step::Forget), 2 => handle.prop_map(Step::Renew), 2 => (1u64..30).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 0..150)
}

proptest! {
    /// Whatever is asked for: no two leases share a byte, what is let in lies inside its lease, and a byte is not lent
    /// again while anything that was let in before is still inside.
    #[test]
    fn no_byte_is_ever_in_two_hands(steps in steps()) {
        const SLAB: u64 = 40;
        let mut table = AccessMachine::new(SLAB, 1);
        let mut now = Instant::ZERO;
        // The model: which lease has which range, and which operations are inside.
        let mut leases: std::collections::BTreeMap<Handle, Grant> = Default::default();
        let mut inside: Vec<(Handle, std::ops::Range<u64>)> = Vec::new();
        // Every third lease that ends is still mapped by somebody.
        let mut retired: Vec<(u64, u64)> = Vec::new();
        let mut ended = 0;
        for step in steps {
            match step {
                Step::Grant { handle, start, bytes } => {
                    let (handle, grant) = (Handle(handle), Grant { deadline: now + Duration::from_nanos(50), ..lease(start, bytes) });
                    let overlaps = leases.values().any(|other| start < other.start + other.bytes && other.start < start + bytes);
                    let charged = leases.values().map(|grant| grant.bytes).sum::<u64>() + retired.iter().map(|(_, bytes)| bytes).sum::<u64>();
                    let possible = (retired.is_empty() || charged + bytes <= SLAB) && bytes > 0 && start + bytes <= SLAB && !overlaps && !leases.contains_key(&handle);
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
                            let bytes = leases.remove(&handle).unwrap().bytes;
                            ended += 1;
                            if ended % 3 == 0 {
                                retired.push((table.retire(bytes), bytes));
                            }
                        }
                        Settled::Unknown => prop_assert!(!leases.contains_key(&handle)),
                        Settled::InFlight(count) => {
                            prop_assert_eq!(count as usize, inside.iter().filter(|(other, _)| *other == handle).count());
                        }
                    }
                }
                Step::Forget(which) => {
                    if !retired.is_empty() {
                        table.forget(retired.remove(which % retired.len()).0);
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
            prop_assert_eq!(table.retired_bytes(), retired.iter().map(|(_, bytes)| bytes).sum::<u64>());
            prop_assert_eq!(table.lent_bytes(), leases.values().map(|grant| grant.bytes).sum::<u64>());
        }
    }
}
