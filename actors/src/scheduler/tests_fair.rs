//! What requests may expect of each other, with the real stage machines around a toy (`tests`).

use std::time::Duration;

use proptest::prelude::*;
use shoal_engine::stage::Row;

use super::tests::{World, config, expected, work};
use super::*;
use crate::env::Instant;
use crate::ids::RequestId;
use crate::request::{Client, Priority};

fn asked(id: u128, account: u64, prompt: usize, max_tokens: u32) -> Work {
    // Nothing begins like anything else.
    let prompt = (0..prompt as u32).map(|i| (id as u32 * 7 + i * i) % 63 + 1).collect();
    Work { client: Client { account, user: 0 }, ..work(id, prompt, max_tokens) }
}

proptest! {
    /// However much somebody has queued and has running, the next one's request begins at once, in memory that may have to be taken
    /// from those who have more than their share.
    #[test]
    fn a_flood_does_not_hold_back_a_single_request(
        flood in prop::collection::vec((1usize..24, 1u32..30), 20..60), warm in prop::collection::vec(any::<bool>(), 0..100),
        depth in 1usize..4, pages in 28usize..60, sequences_max in 2usize..8, chunk_rows in 4usize..32, mine in 1usize..30,
    ) {
        let config = SchedulerConfig { depth, pages, sequences_max, chunk_rows, rows_max: 40, requests_max: 100, ..config() };
        let mut world = World::new(config);
        for (id, (prompt, max_tokens)) in flood.iter().enumerate() {
            // None of them is longer than half of the memory.
            let max_tokens = (*max_tokens).min(50 - *prompt as u32);
            world.scheduler.submit(Instant::ZERO, asked(id as u128, 1, *prompt, max_tokens)).expect("fits");
        }
        for send in warm {
            let _ = if send { world.send() } else { world.answer() };
        }
        world.scheduler.submit(Instant::ZERO, asked(1000, 2, mine, 5)).expect("fits");
        let mut steps = 0;
        while !world.has_begun(RequestId(1000)) {
            prop_assert!(steps < 3, "{:?}", world.scheduler);
            while !world.send() {
                prop_assert!(world.answer());
            }
            steps += 1;
        }
        while world.answer() || world.send() {}
        prop_assert!(world.scheduler.requests().is_empty());
        prop_assert_eq!(world.ended.len(), flood.len() + 1);
    }

    /// Whoever owes a row has it in the next step, and beside these there is no more than a chunk of prompts.
    #[test]
    fn no_prompt_stalls_those_who_decode(
        requests in prop::collection::vec((0u64..3, 1usize..50, 1u32..20, 0usize..4), 1..25),
        depth in 1usize..4, chunk_rows in 1usize..24, sequences_max in 1usize..6,
    ) {
        // Memory for everybody, so that nobody is preempted for that.
        let pages = 16 * sequences_max;
        let config = SchedulerConfig { depth, chunk_rows, sequences_max, pages, rows_max: 24, requests_max: 100, ..config() };
        let mut world = World::new(config);
        let mut requests = requests.into_iter().enumerate();
        loop {
            let next = requests.next();
            if let Some((id, (account, prompt, max_tokens, wait))) = next {
                world.scheduler.submit(Instant::ZERO, asked(id as u128, account, prompt, max_tokens)).expect("fits");
                for _ in 0..wait {
                    world.answer();
                }
            }
            let owing = world.owing();
            if let Some(step) = world.scheduler.next_step(Instant::ZERO) {
                let (decoded, prompts): (Vec<&Row>, Vec<&Row>) = step.rows.iter().partition(|row| owing.values().any(|number| *number == row.sequence));
                prop_assert!(prompts.len() <= chunk_rows);
                for (key, number) in owing {
                    // Others may have taken its place, of which it had more than its share.
                    let stays = world.scheduler.sequences.get(&key).is_some_and(|sequence| sequence.number == Some(number));
                    let rows = decoded.iter().filter(|row| row.sequence == number && row.sample).count();
                    prop_assert!(!stays || rows == 1, "{rows}");
                }
                world.run(&step);
            } else if !world.answer() && next.is_none() {
                break;
            }
        }
        prop_assert!(world.scheduler.requests().is_empty());
    }
}

#[test]
fn chunks_are_as_long_as_the_others_can_wait() {
    // A row takes 3 ms, on each of as many stages as there are.
    for (depth, chunk, shortest) in [(1, 33, 16), (2, 16, 16)] {
        let config = SchedulerConfig { depth, chunk_rows: 64, rows_max: 64, context_tokens: 2000, pages: 600, ..config() };
        let mut world = World::new(config);
        let mut now = Instant::ZERO;
        world.scheduler.submit(now, asked(1, 1, 400, 100)).expect("fits");
        let mut step = |world: &mut World, row: Duration| {
            let mut rows = Vec::new();
            while let Some(step) = world.scheduler.next_step(now) {
                rows.push(step.rows.len());
                world.run(&step);
            }
            for count in &rows {
                now = now + row * u32::try_from(*count).expect("few");
                world.answer_at(now);
            }
            rows
        };
        let usual = Duration::from_millis(3);
        // Alone it is as fast as it can be.
        assert_eq!(step(&mut world, usual)[0], 64);
        while world.got.is_empty() {
            step(&mut world, usual);
        }
        world.scheduler.submit(Instant::ZERO, asked(2, 1, 600, 10)).expect("fits");
        let rows = step(&mut world, usual);
        assert_eq!(rows.iter().max(), Some(&(chunk + 1)), "{rows:?}");
        // On a slow machine the chunk is the shortest one that makes sense.
        let mut longest = 0;
        for _ in 0..12 {
            longest = step(&mut world, Duration::from_secs(1)).into_iter().max().expect("one");
        }
        assert_eq!(longest, shortest + 1);
    }
}

#[test]
fn the_urgent_are_first() {
    let mut world = World::new(SchedulerConfig { sequences_max: 1, requests_max: 9, ..config() });
    for (id, priority) in [(1, Priority::Normal), (2, Priority::Low), (3, Priority::High), (4, Priority::High)] {
        world.scheduler.submit(Instant::ZERO, Work { priority, ..asked(id, id as u64, 5, 3) }).expect("fits");
    }
    let mut order = Vec::new();
    while world.send() {
        order.extend((1..5).filter(|id| world.has_begun(RequestId(*id)) && !order.contains(id)).collect::<Vec<_>>());
        world.answer();
    }
    assert_eq!(order, [3, 4, 1, 2]);
}

#[test]
fn a_request_that_nobody_reads_stands_still_and_goes_on_where_it_was() {
    let mut world = World::new(config());
    world.scheduler.submit(Instant::ZERO, asked(1, 1, 9, 20)).expect("fits");
    world.scheduler.submit(Instant::ZERO, asked(2, 1, 9, 20)).expect("fits");
    (0..4).for_each(|_| assert!(world.send() && world.answer()));
    let so_far = world.got[&RequestId(1)].len();
    assert!(so_far >= 2);
    world.scheduler.pause(RequestId(1));
    world.scheduler.pause(RequestId(1));
    // One that waits can stand still, too.
    world.scheduler.submit(Instant::ZERO, asked(3, 1, 9, 20)).expect("fits");
    world.scheduler.pause(RequestId(3));
    while world.send() || world.answer() {}
    assert_eq!((world.got[&RequestId(1)].len(), world.scheduler.free_pages()), (so_far, 64));
    assert!(world.ended.contains_key(&RequestId(2)) && !world.has_begun(RequestId(3)));
    assert_eq!([1, 1, 2, 3].map(|id| world.scheduler.wake(RequestId(id))), [true, false, false, true]);
    world.restart(1);
    while world.send() || world.answer() {}
    for id in [1, 2, 3] {
        let alone = expected(&asked(id, 1, 9, 20).prompt, 20, 64);
        assert_eq!(world.got[&RequestId(id)], alone);
    }
}
