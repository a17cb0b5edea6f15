use std::time::Duration;

use half::{bf16, f16};

use super::*;
use crate::Effects;
use crate::channel::{self, ChannelOptions};
use crate::env::SystemRng;
use crate::frame::{Fence, TermTag};
use crate::link::LinkOptions;
use crate::provider::memory::{MemoryFabric, MemoryProvider, Shape};
use crate::provider::tcp::{TcpOptions, TcpProvider};
use crate::provider::{Provider, Ticket};
use crate::testing::{effects, soon};

const MESSAGE: usize = 256;

type Pair = (Box<dyn Provider>, Box<dyn Provider>);

/// A group whose pair of ranks `(i, j)` is linked by what `provider(i, j)` gives, if anything.
fn group(effects: &Effects, ranks: usize, provider: impl Fn(usize, usize) -> Option<Pair>) -> Vec<Group> {
    let options = ChannelOptions { slot_bytes: MESSAGE as u32, slots: IN_FLIGHT };
    let mut ends: Vec<Vec<Option<(Sender, Receiver)>>> = (0..ranks).map(|_| (0..ranks).map(|_| None).collect()).collect();
    for one in 0..ranks {
        for two in one + 1..ranks {
            let Some((near, far)) = provider(one, two) else { continue };
            let ticket = Ticket::random(&SystemRng);
            let link_options = LinkOptions::for_payload(options.slot_bytes);
            let expected = far.expect(&ticket, link_options).unwrap();
            let dialled = near.dial(&far.endpoints()[0], &ticket, link_options, soon(effects)).unwrap();
            let accepted = expected.accept(soon(effects)).unwrap();
            let fence = Fence { instance: 5, term: TermTag { counter: 1, node: 1 }, epoch: 0 };
            ends[one][two] = Some(channel::duplex(dialled, fence, options, effects).unwrap());
            ends[two][one] = Some(channel::duplex(accepted, fence, options, effects).unwrap());
            // Links end with their providers, and these tests end with the links.
            Box::leak(Box::new((near, far)));
        }
    }
    ends.into_iter().enumerate().map(|(rank, peers)| Group::new(rank, peers, MESSAGE).unwrap()).collect()
}

fn memory(effects: &Effects) -> Pair {
    let fabric = MemoryFabric::new(&SystemRng, Shape::default());
    (Box::new(MemoryProvider::new(effects.clone(), &fabric)), Box::new(MemoryProvider::new(effects.clone(), &fabric)))
}

fn tcp(effects: &Effects) -> Pair {
    let start = || {
        let options =
            TcpOptions { listen: vec!["127.0.0.1:0".parse().unwrap()], silence_max: Duration::from_secs(60), ..TcpOptions::default() };
        Box::new(TcpProvider::new(effects.clone(), options).unwrap()) as Box<dyn Provider>
    };
    (start(), start())
}

/// Every rank does `work` on its own thread.
fn all<T: Send>(groups: &mut [Group], work: impl Fn(&mut Group) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = groups.iter_mut().map(|group| scope.spawn(|| work(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn value(rank: usize, i: usize) -> f32 {
    ((rank * 7919 + i * 104_729) % 1000) as f32 * [1e-3, 1.0, 1e2][(rank + i) % 3] - 300.0
}

fn sums<E: Element>(groups: &mut [Group], schedule: Schedule, elements: usize, soon: Instant) {
    let ranks = groups.len();
    let own = |rank: usize| -> Vec<E> { (0..elements).map(|i| E::from_f32(value(rank, i))).collect() };
    let expected: Vec<u32> = (0..elements)
        .map(|i| {
            let sum = (1..ranks).fold(own(0)[i].to_f32(), |sum, rank| sum + own(rank)[i].to_f32());
            E::from_f32(sum).to_f32().to_bits()
        })
        .collect();
    let got = all(groups, |group| {
        let mut vector = own(group.rank());
        group.all_reduce(&mut vector, schedule, soon).unwrap();
        vector.into_iter().map(|element| element.to_f32().to_bits()).collect::<Vec<_>>()
    });
    for got in got {
        assert!(got == expected, "{schedule:?} over {ranks} ranks, {elements} elements");
    }
}

#[test]
fn every_schedule_and_number_gives_the_same_bits_on_any_mix_of_links() {
    let effects = effects();
    let mixed = |one: usize, two: usize| Some(if (one + two).is_multiple_of(2) { memory(&effects) } else { tcp(&effects) });
    for ranks in [1, 2, 3, 5] {
        let mut groups = group(&effects, ranks, mixed);
        for schedule in [Schedule::Exchange, Schedule::Scatter, Schedule::Chain] {
            for elements in [0, 1, 63, 64, 65, 700] {
                sums::<f32>(&mut groups, schedule, elements, soon(&effects));
            }
            sums::<f16>(&mut groups, schedule, 130, soon(&effects));
            sums::<bf16>(&mut groups, schedule, 130, soon(&effects));
            all(&mut groups, |group| group.barrier(schedule, soon(&effects)).unwrap());
        }
    }
}

#[test]
fn sixteen_ranks_along_a_chain_of_cables() {
    let effects = effects();
    let mut groups = group(&effects, 16, |one, two| (two == one + 1).then(|| memory(&effects)));
    sums::<f32>(&mut groups, Schedule::Chain, 300, soon(&effects));
    let errors = all(&mut groups, |group| group.all_reduce(&mut [1f32], Schedule::Exchange, soon(&effects)).unwrap_err());
    assert!(errors.iter().any(|error| matches!(error, CollectiveError::NotConnected { .. })), "{errors:?}");
}

#[test]
fn parts_are_scattered_gathered_and_spread() {
    let effects = effects();
    let mut groups = group(&effects, 3, |_, _| Some(memory(&effects)));
    let vectors = all(&mut groups, |group| {
        let mut vector: Vec<f32> = (0..200).map(|i| value(group.rank(), i)).collect();
        let mine = group.reduce_scatter(&mut vector, soon(&effects)).unwrap();
        // Scatter and gather make an all-reduce.
        group.all_gather(&mut vector, |rank| schedule::part(&(0..200), rank, 3), soon(&effects)).unwrap();
        assert_eq!(mine, schedule::part(&(0..200), group.rank(), 3));
        group.broadcast(&mut vector, 1, soon(&effects)).unwrap();
        vector
    });
    for vector in &vectors {
        for (i, got) in vector.iter().enumerate() {
            assert_eq!(got.to_bits(), (value(0, i) + value(1, i) + value(2, i)).to_bits());
        }
    }
}

#[test]
fn a_rank_that_goes_takes_all_with_it_at_once() {
    let effects = effects();
    for schedule in [Schedule::Exchange, Schedule::Scatter, Schedule::Chain] {
        let mut groups = group(&effects, 4, |_, _| Some(memory(&effects)));
        all(&mut groups, |group| group.barrier(schedule, soon(&effects)).unwrap());
        let gone = groups.remove(2);
        drop(gone);
        // Their deadline is far: they hear of it by their links.
        let errors = all(&mut groups, |group| {
            loop {
                if let Err(error) = group.all_reduce(&mut [1f32; 100], schedule, soon(&effects)) {
                    return error;
                }
            }
        });
        for error in errors {
            let lost = matches!(
                error,
                CollectiveError::Send { source: SendError::Broken(_), .. } | CollectiveError::Recv { source: RecvError::Broken(_), .. }
            );
            assert!(lost, "{schedule:?}: {error}");
        }
        let again = groups[0].barrier(schedule, soon(&effects)).unwrap_err();
        assert!(matches!(again, CollectiveError::Failed(_)), "{again}");
    }
}

#[test]
fn a_rank_that_does_not_come_ends_the_wait_by_the_deadline() {
    let effects = effects();
    let short = || effects.after(Duration::from_millis(200));
    let mut groups = group(&effects, 3, |_, _| Some(memory(&effects)));
    let late = groups.pop();
    let errors = all(&mut groups, |group| group.barrier(Schedule::Exchange, short()).unwrap_err());
    // On a busy machine one of the two may have given up on the other one before that has begun.
    let in_time = |error: &CollectiveError| {
        matches!(
            error,
            CollectiveError::Recv { source: RecvError::Deadline, .. } | CollectiveError::Send { source: SendError::Deadline, .. }
        )
    };
    assert!(errors.iter().any(in_time), "{errors:?}");
    // Who comes late finds the group gone.
    let error = late.unwrap().barrier(Schedule::Exchange, soon(&effects)).unwrap_err();
    assert!(!matches!(error, CollectiveError::Failed(_)), "{error}");
    // With nobody else there, the error names who is missing.
    let mut groups = group(&effects, 2, |_, _| Some(memory(&effects)));
    let error = groups[0].barrier(Schedule::Exchange, short()).unwrap_err();
    let missing = matches!(error, CollectiveError::Recv { rank: 1, .. } | CollectiveError::Send { rank: 1, .. });
    assert!(missing && in_time(&error), "{error:?}");
}

#[test]
fn vectors_of_other_lengths_are_found_out() {
    let effects = effects();
    let mut groups = group(&effects, 2, |_, _| Some(memory(&effects)));
    let errors = all(&mut groups, |group| {
        let mut vector = vec![1f32; 3 + group.rank()];
        group.all_reduce(&mut vector, Schedule::Exchange, soon(&effects)).unwrap_err()
    });
    assert!(errors.iter().any(|error| matches!(error, CollectiveError::Mismatch { .. })), "{errors:?}");
}

#[test]
fn groups_that_cannot_be_are_refused() {
    let none = |ranks: usize| (0..ranks).map(|_| None).collect::<Vec<_>>();
    assert_eq!(Group::new(0, none(0), 64).unwrap_err(), GroupError::Ranks(0));
    assert_eq!(Group::new(0, none(17), 64).unwrap_err(), GroupError::Ranks(17));
    assert_eq!(Group::new(3, none(3), 64).unwrap_err(), GroupError::Rank { rank: 3, ranks: 3 });
    assert_eq!(Group::new(0, none(2), 3).unwrap_err(), GroupError::Slot(3));
}
