//! Whose turn it is to take frames off the link.
//!
//! A thread that waits for a message or for credit takes frames off the link itself, if nobody else does: so what it waits
//! for wakes it directly. It has the *turn* while it does so, hands over what is for another waiting thread, and passes the
//! turn on when it leaves. Where no thread of the user has waited for a while, the channel's own thread, the *pump*, takes
//! the turn, so that grants are taken, probes and keep-alives answered and a silent peer noticed; it gives the turn up as
//! soon as a user's thread wants it.
//!
//! [`Turn`] is the machine: it says who has the turn and who is to be woken. [`wait`] and [`pump`] are what the two kinds of
//! threads do, over a [`Shell`] that locks, sleeps and receives: the channel's in the product, and one in which a model
//! checker tries the orders in which threads can run.

#[cfg(test)]
mod model;

/// What a thread of the user waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// A message, in [`Receiver::recv`](super::Receiver::recv).
    Arrived,
    /// Credit or an acknowledgement, in [`Sender::send`](super::Sender::send) or [`Sender::flush`](super::Sender::flush).
    Credited,
}

impl Side {
    const ALL: [Self; 2] = [Self::Arrived, Self::Credited];

    const fn index(self) -> usize {
        match self {
            Self::Arrived => 0,
            Self::Credited => 1,
        }
    }
}

/// Where threads sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bench {
    /// Threads of the user that do not have the turn.
    User(Side),
    /// The pump.
    Pump,
    /// Who replaces the link, until nobody uses the old one.
    Relink,
}

/// Who has the turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holder {
    Nobody,
    User,
    Pump,
}

/// Whether there is a link to take frames from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// The link has ended; another may come.
    Ended,
    /// The link is being replaced.
    Replacing,
    /// Both halves of the channel are gone.
    Over,
}

/// What the pump does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PumpStep {
    /// Receive: it has the turn now.
    Receive,
    /// Sleep a while, and look whether a user was there meanwhile.
    Rest,
    /// Sleep until it is woken.
    Sleep,
    /// End.
    End,
}

/// The machine.
#[derive(Debug)]
pub(super) struct Turn {
    holder: Holder,
    phase: Phase,
    /// Threads of the user that wait for each side without the turn.
    waiting: [u32; 2],
    /// How often users took the turn.
    taken: u64,
    /// The count when the pump last lay down to rest.
    rested_at: Option<u64>,
    /// The pump sleeps until somebody wakes it.
    pump_sleeps: bool,
    /// A sender waits for a peer which may be waiting for this end to receive.
    urgent: bool,
}

impl Turn {
    /// Nobody has it.
    pub(super) const fn new() -> Self {
        Self { holder: Holder::Nobody, phase: Phase::Open, waiting: [0; 2], taken: 0, rested_at: None, pump_sleeps: false, urgent: false }
    }

    /// Takes the turn for a thread of the user, if it can be had.
    fn take(&mut self) -> bool {
        let free = self.holder == Holder::Nobody && self.phase == Phase::Open;
        if free {
            self.holder = Holder::User;
            self.taken = self.taken.wrapping_add(1);
        }
        free
    }

    /// A thread of the user begins to wait without the turn. `true` if the pump has it, and has to be called off.
    fn follow(&mut self, side: Side) -> bool {
        self.waiting[side.index()] += 1;
        self.holder == Holder::Pump
    }

    /// A thread of the user stops waiting without the turn. What [`Turn::next`] says has to be done then.
    fn unfollow(&mut self, side: Side) {
        self.waiting[side.index()] -= 1;
    }

    /// The turn is given up. What [`Turn::next`] says has to be done then.
    fn leave(&mut self) {
        self.holder = Holder::Nobody;
    }

    /// Whom to wake if nobody has the turn.
    fn next(&mut self) -> Option<Bench> {
        if self.holder != Holder::Nobody {
            return None;
        }
        match self.phase {
            Phase::Replacing => return Some(Bench::Relink),
            // Whoever notes the end wakes all.
            Phase::Ended | Phase::Over => return None,
            Phase::Open => {}
        }
        if let Some(side) = Side::ALL.into_iter().find(|side| self.waits(*side)) {
            return Some(Bench::User(side));
        }
        let pump = self.pump_sleeps || self.urgent;
        self.pump_sleeps = false;
        pump.then_some(Bench::Pump)
    }

    /// Whether a thread waits for this side without the turn.
    fn waits(&self, side: Side) -> bool {
        self.waiting[side.index()] > 0
    }

    /// Whether the pump must give the turn up.
    fn is_wanted(&self) -> bool {
        self.phase != Phase::Open || Side::ALL.into_iter().any(|side| self.waits(side))
    }

    /// What the pump does now.
    fn pump_step(&mut self) -> PumpStep {
        self.pump_sleeps = false;
        let rested = self.rested_at.take() == Some(self.taken);
        match (self.phase, self.holder) {
            (Phase::Over, _) => PumpStep::End,
            (Phase::Open, Holder::Nobody) if self.is_wanted() => self.rest(),
            (Phase::Open, Holder::Nobody) if rested || self.urgent => {
                self.holder = Holder::Pump;
                PumpStep::Receive
            }
            (Phase::Open, Holder::Nobody) => self.rest(),
            (Phase::Open, _) | (Phase::Ended | Phase::Replacing, _) => {
                self.pump_sleeps = true;
                PumpStep::Sleep
            }
        }
    }

    fn rest(&mut self) -> PumpStep {
        self.rested_at = Some(self.taken);
        PumpStep::Rest
    }

    /// A sender waits for its peer. `true` if the pump has to be woken, because nobody receives.
    pub(super) fn urge(&mut self) -> bool {
        self.urgent = true;
        let woken = self.holder == Holder::Nobody && self.phase == Phase::Open;
        self.pump_sleeps &= !woken;
        woken
    }

    /// The sender goes on.
    pub(super) fn calm(&mut self) {
        self.urgent = false;
    }

    /// The link has ended. All benches have to be woken.
    pub(super) fn end(&mut self) {
        if self.phase == Phase::Open {
            self.phase = Phase::Ended;
        }
    }

    /// Whether the link is being replaced.
    pub(super) fn is_replacing(&self) -> bool {
        self.phase == Phase::Replacing
    }

    /// The link is about to be replaced: nobody takes the turn from here on.
    pub(super) fn replace(&mut self) {
        if self.phase != Phase::Over {
            self.phase = Phase::Replacing;
        }
    }

    /// Whether somebody has the turn.
    pub(super) fn is_held(&self) -> bool {
        self.holder != Holder::Nobody
    }

    /// There is a new link. All benches have to be woken.
    pub(super) fn reopen(&mut self) {
        if self.phase != Phase::Over {
            self.phase = Phase::Open;
        }
    }

    /// The channel is no more. All benches have to be woken.
    pub(super) fn finish(&mut self) {
        self.phase = Phase::Over;
    }
}

/// What came of receiving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Took {
    /// Something for this side.
    For(Side),
    /// Nothing that anybody waits for.
    Nothing,
    /// Nothing, and the deadline has passed.
    Late,
    /// The link has ended; all have been woken.
    End,
}

/// How long a thread sleeps at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sleep<D> {
    /// Until this deadline.
    Until(D),
    /// As long as the pump rests.
    Rest,
    /// Until it is woken.
    Long,
}

/// What the threads of a channel need: a lock around what they share, benches to sleep on, and a link.
pub(super) trait Shell {
    /// Deadlines of users.
    type Deadline: Copy;
    /// The lock.
    type Guard<'a>
    where
        Self: 'a;

    /// The machine behind the lock.
    fn turn<'g>(guard: &'g mut Self::Guard<'_>) -> &'g mut Turn;

    /// Sleeps on a bench without the lock. `false` if the deadline has passed already.
    fn sleep<'a>(&'a self, guard: Self::Guard<'a>, bench: Bench, sleep: Sleep<Self::Deadline>) -> (Self::Guard<'a>, bool);

    /// Wakes a thread on a bench.
    fn wake(&self, bench: Bench);

    /// Takes one frame off the link, without the lock; as the pump, if there is no deadline.
    fn receive<'a>(&'a self, guard: Self::Guard<'a>, deadline: Option<Self::Deadline>) -> (Self::Guard<'a>, Took);

    /// Gets the pump out of [`Shell::receive`] if the link can do that; else it comes with the next frame or after a while.
    fn call_off<'a>(&'a self, guard: Self::Guard<'a>) -> Self::Guard<'a>;
}

/// Waits, as a thread of the user, for something of `side`. It returns when there may be something; `false` says that the
/// deadline has passed. The caller has seen that there is nothing, under the same lock.
pub(super) fn wait<'a, S: Shell>(shell: &'a S, mut guard: S::Guard<'a>, side: Side, deadline: S::Deadline) -> (S::Guard<'a>, bool) {
    if !S::turn(&mut guard).take() {
        if S::turn(&mut guard).follow(side) {
            guard = shell.call_off(guard);
        }
        let (mut guard, in_time) = shell.sleep(guard, Bench::User(side), Sleep::Until(deadline));
        S::turn(&mut guard).unfollow(side);
        // The turn may have been passed to this thread, which may have no use for it.
        pass_on(shell, &mut guard);
        return (guard, in_time);
    }
    let in_time = loop {
        let (back, took) = shell.receive(guard, Some(deadline));
        guard = back;
        match took {
            Took::For(found) if found == side => break true,
            Took::For(other) => hand_over(shell, &mut guard, other),
            Took::Nothing => {}
            Took::Late => break false,
            Took::End => break true,
        }
        if S::turn(&mut guard).phase != Phase::Open {
            break true;
        }
    };
    S::turn(&mut guard).leave();
    pass_on(shell, &mut guard);
    (guard, in_time)
}

fn hand_over<S: Shell>(shell: &S, guard: &mut S::Guard<'_>, side: Side) {
    if S::turn(guard).waits(side) {
        shell.wake(Bench::User(side));
    }
}

fn pass_on<S: Shell>(shell: &S, guard: &mut S::Guard<'_>) {
    if let Some(bench) = S::turn(guard).next() {
        shell.wake(bench);
    }
}

/// What the pump does, until the channel is no more.
pub(super) fn pump<'a, S: Shell>(shell: &'a S, mut guard: S::Guard<'a>) {
    loop {
        let sleep = match S::turn(&mut guard).pump_step() {
            PumpStep::Receive => {
                guard = pump_frames(shell, guard);
                continue;
            }
            PumpStep::Rest => Sleep::Rest,
            PumpStep::Sleep => Sleep::Long,
            PumpStep::End => return,
        };
        guard = shell.sleep(guard, Bench::Pump, sleep).0;
    }
}

/// Receives until somebody else wants to, or the link ends.
fn pump_frames<'a, S: Shell>(shell: &'a S, mut guard: S::Guard<'a>) -> S::Guard<'a> {
    loop {
        let (back, took) = shell.receive(guard, None);
        guard = back;
        if let Took::For(side) = took {
            hand_over(shell, &mut guard, side);
        }
        if took == Took::End || S::turn(&mut guard).is_wanted() {
            break;
        }
    }
    S::turn(&mut guard).leave();
    pass_on(shell, &mut guard);
    guard
}
