//! The turn under a model checker, which tries the orders in which threads can run.
//!
//! Here nothing ends a sleep but a wake-up, except the pump's rest, which may end at any time: so a wake-up that is lost is a
//! deadlock, which the checker reports.

use std::collections::VecDeque;

use loom::sync::{Arc, Condvar, Mutex, MutexGuard};
use loom::thread;

use super::*;

#[derive(Default)]
struct Link {
    frames: VecDeque<Side>,
    called_off: bool,
    closed: bool,
    receiving: bool,
}

struct State {
    turn: Turn,
    /// What was taken off the link and not picked up.
    ready: [u32; 2],
    ended: bool,
}

struct Toy {
    state: Mutex<State>,
    benches: [Condvar; 4],
    link: Mutex<Link>,
    changed: Condvar,
    /// Users are not woken: to see that the checker finds out.
    forgetful: bool,
}

fn place(bench: Bench) -> usize {
    match bench {
        Bench::User(side) => side.index(),
        Bench::Pump => 2,
        Bench::Relink => 3,
    }
}

impl Toy {
    fn new() -> Self {
        Self {
            state: Mutex::new(State { turn: Turn::new(), ready: [0; 2], ended: false }),
            benches: [Condvar::new(), Condvar::new(), Condvar::new(), Condvar::new()],
            link: Mutex::new(Link::default()),
            changed: Condvar::new(),
            forgetful: false,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn wake_all(&self) {
        self.benches.iter().for_each(Condvar::notify_all);
    }

    fn link(&self, change: impl FnOnce(&mut Link)) {
        change(&mut self.link.lock().unwrap());
        self.changed.notify_all();
    }

    fn user(&self, side: Side) {
        let mut state = self.state();
        while state.ready[side.index()] == 0 {
            assert!(!state.ended);
            state = wait(self, state, side, ()).0;
        }
        state.ready[side.index()] -= 1;
    }

    /// As `Shared::relink`, onto a link on which one message waits.
    fn relink(&self, frame: Side) {
        self.state().turn.replace();
        self.link(|link| link.closed = true);
        let mut state = self.state();
        while state.turn.is_held() {
            state = self.benches[3].wait(state).unwrap();
        }
        self.link(|link| *link = Link { frames: [frame].into(), ..Link::default() });
        state.ended = false;
        state.turn.reopen();
        drop(state);
        self.wake_all();
    }

    fn finish(&self) {
        self.state().turn.finish();
        self.link(|link| link.closed = true);
        self.wake_all();
    }
}

impl Shell for Toy {
    type Deadline = ();
    type Guard<'a> = MutexGuard<'a, State>;

    fn turn<'g>(guard: &'g mut Self::Guard<'_>) -> &'g mut Turn {
        &mut guard.turn
    }

    fn sleep<'a>(&'a self, state: Self::Guard<'a>, bench: Bench, sleep: Sleep<()>) -> (Self::Guard<'a>, bool) {
        if sleep == Sleep::Rest {
            drop(state);
            thread::yield_now();
            return (self.state(), true);
        }
        (self.benches[place(bench)].wait(state).unwrap(), true)
    }

    fn wake(&self, bench: Bench) {
        if !(self.forgetful && matches!(bench, Bench::User(_))) {
            self.benches[place(bench)].notify_one();
        }
    }

    fn receive<'a>(&'a self, state: Self::Guard<'a>, _: Option<()>) -> (Self::Guard<'a>, Took) {
        drop(state);
        let mut link = self.link.lock().unwrap();
        assert!(!std::mem::replace(&mut link.receiving, true), "two threads receive at once");
        let took = loop {
            if let Some(side) = link.frames.pop_front() {
                break Took::For(side);
            }
            if link.closed {
                break Took::End;
            }
            if std::mem::take(&mut link.called_off) {
                break Took::Nothing;
            }
            link = self.changed.wait(link).unwrap();
        };
        link.receiving = false;
        drop(link);
        let mut state = self.state();
        match took {
            _ if state.turn.is_replacing() => return (state, Took::Nothing),
            Took::For(side) => {
                state.ready[side.index()] += 1;
                // For a sender that waits for something else than the turn.
                self.wake(Bench::Relink);
            }
            Took::End => {
                state.turn.end();
                state.ended = true;
                self.wake_all();
            }
            _ => {}
        }
        (state, took)
    }

    fn call_off<'a>(&'a self, state: Self::Guard<'a>) -> Self::Guard<'a> {
        self.link(|link| link.called_off = true);
        state
    }
}

fn check(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(body);
}

#[test]
fn one_user_and_the_pump_hand_the_turn_to_and_fro() {
    check(|| {
        let toy = Arc::new(Toy::new());
        let pumping = {
            let toy = Arc::clone(&toy);
            thread::spawn(move || pump(&*toy, toy.state()))
        };
        let user = {
            let toy = Arc::clone(&toy);
            thread::spawn(move || {
                toy.user(Side::Arrived);
                toy.user(Side::Arrived);
            })
        };
        toy.link(|link| link.frames.push_back(Side::Arrived));
        toy.link(|link| link.frames.push_back(Side::Arrived));
        user.join().unwrap();
        toy.finish();
        pumping.join().unwrap();
    });
}

fn two_users(forgetful: bool) {
    check(move || {
        let toy = Arc::new(Toy { forgetful, ..Toy::new() });
        let receiving = {
            let toy = Arc::clone(&toy);
            thread::spawn(move || toy.user(Side::Arrived))
        };
        toy.link(|link| link.frames.extend([Side::Credited, Side::Arrived]));
        toy.user(Side::Credited);
        receiving.join().unwrap();
    });
}

#[test]
fn two_users_take_for_each_other() {
    two_users(false);
}

#[test]
#[ignore = "the checker ends the process: started by another test, in a process of its own"]
fn alone_without_wake_ups() {
    two_users(true);
}

#[test]
fn without_wake_ups_one_waits_for_ever() {
    crate::testing::finds("channel::turn::model::alone_without_wake_ups", "deadlock");
}

#[test]
fn a_blocked_sender_gets_the_pump_to_receive() {
    check(|| {
        let toy = Arc::new(Toy::new());
        let pumping = {
            let toy = Arc::clone(&toy);
            thread::spawn(move || pump(&*toy, toy.state()))
        };
        let user = {
            let toy = Arc::clone(&toy);
            thread::spawn(move || toy.user(Side::Arrived))
        };
        // The user's frame, and one on which this thread depends.
        toy.link(|link| link.frames.extend([Side::Arrived, Side::Credited]));
        if toy.state().turn.urge() {
            toy.wake(Bench::Pump);
        }
        let mut state = toy.state();
        while state.ready[Side::Credited.index()] == 0 {
            state = toy.benches[3].wait(state).unwrap();
        }
        state.turn.calm();
        drop(state);
        user.join().unwrap();
        toy.finish();
        pumping.join().unwrap();
    });
}

#[test]
fn who_waits_moves_along_to_another_link() {
    check(|| {
        let toy = Arc::new(Toy::new());
        let user = {
            let toy = Arc::clone(&toy);
            thread::spawn(move || toy.user(Side::Arrived))
        };
        toy.relink(Side::Arrived);
        user.join().unwrap();
    });
}
