//! The frame accountant: what may be posted now, on either end of a link.
//!
//! Every chunk takes as much of a queue as any other (its cost: frames on Apple's devices, one request elsewhere), so that a message takes
//! as many frames from the sender's queue as from the receiver's. A receive that is not posted when a chunk comes loses the
//! chunk, and one that is posted beyond a queue's depth has silently corrupted others; so nothing is sent without a credit, which is a
//! receive that the peer says it has posted, and nothing is posted beyond the depth that the device granted.
//!
//! Credits are told in every chunk, as the number of receives that were posted since the link began. Where there is nothing to send,
//! a note tells them, which itself costs a credit. That this never comes to a standstill: the last credits are not for data, and the very
//! last one only for a chunk that tells new credits. Whichever end sends such a chunk last, the other end has a credit afterwards.

/// Fewest receives that an end may have.
pub(super) const RECEIVES_MIN: u32 = 16;

/// Credits that data leaves over.
const KEPT_BACK: u64 = 4;

/// Requests of the send queue that data leaves over.
pub(super) const SENDS_KEPT_BACK: u32 = 3;

/// What a chunk is sent for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A piece of a message.
    Data,
    /// To tell credits.
    Note,
    /// To say that this end lives, or that it heard so.
    Beat,
}

/// What a peer did that a peer cannot do, or the fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    /// Chunks were lost, repeated or overtaken.
    #[error("chunk {found} came where chunk {expected} was due: the fabric lost or changed what is between")]
    Gap { expected: u64, found: u64 },
    /// A count went back.
    #[error("it takes credits back")]
    Backwards,
    /// More receives than it has.
    #[error("it grants more than it has")]
    TooMuch,
    /// A chunk for which no receive was posted.
    #[error("it sent a chunk for which there was no room")]
    Unposted,
}

/// Depths and windows of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    /// What a chunk takes of a queue.
    pub(super) cost: u32,
    /// Depth of the send queue, as the device granted it.
    pub(super) send_depth: u32,
    /// Depth of the receive queue, likewise.
    pub(super) receive_depth: u32,
    /// Receives that this end has.
    pub(super) receives: u32,
    /// Receives that the peer has.
    pub(super) peer_receives: u32,
}

/// The books of one end. All counts run from the link's beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Accounts {
    limits: Limits,
    sent: u64,
    completed: u64,
    /// Receives that the peer has told of.
    granted: u64,
    posted: u64,
    received: u64,
    /// Receives that the peer was told of.
    told: u64,
}

impl Accounts {
    pub(super) fn new(limits: Limits) -> Self {
        // Each end knows from the other's card what it posts before the link is used.
        let (granted, told) = (limits.peer_receives.into(), limits.receives.into());
        Self { limits, sent: 0, completed: 0, granted, posted: 0, received: 0, told }
    }

    /// Whether another receive may be posted.
    pub(super) fn may_post_receive(&self) -> bool {
        let outstanding = self.posted - self.received;
        outstanding < self.limits.receives.into() && (outstanding + 1) * u64::from(self.limits.cost) <= self.limits.receive_depth.into()
    }

    /// A receive was posted.
    pub(super) fn receive_posted(&mut self) {
        debug_assert!(self.may_post_receive(), "posted beyond the queue's depth");
        self.posted += 1;
    }

    /// How many chunks may be sent now.
    pub(super) fn sendable(&self, purpose: Purpose) -> u64 {
        let credits = self.granted - self.sent;
        let depth = u64::from(self.limits.send_depth / self.limits.cost.max(1));
        let room = depth.saturating_sub(self.sent - self.completed);
        let (credits_kept, room_kept) = match purpose {
            Purpose::Data => (KEPT_BACK, u64::from(SENDS_KEPT_BACK)),
            Purpose::Note if self.lag() > 0 => (0, 0),
            Purpose::Note => return 0,
            // A beat that tells nothing new leaves the last credit to a note.
            Purpose::Beat => (if self.lag() > 0 { 0 } else { 1 }, 0),
        };
        credits.saturating_sub(credits_kept).min(room.saturating_sub(room_kept))
    }

    /// Credits that data may ever have at once.
    pub(super) fn window(&self) -> u64 {
        let depth = self.limits.send_depth / self.limits.cost.max(1);
        let credits = u64::from(self.limits.peer_receives).saturating_sub(KEPT_BACK);
        credits.min(u64::from(depth.saturating_sub(SENDS_KEPT_BACK))).max(1)
    }

    /// A chunk goes out: its sequence, and the count of receives that it tells.
    pub(super) fn sending(&mut self) -> (u64, u64) {
        debug_assert!(self.sent < self.granted, "sent without a credit");
        let sequence = self.sent;
        self.sent += 1;
        // The first receives are told by the card, possibly before they are all posted.
        self.told = self.told.max(self.posted);
        (sequence, self.told)
    }

    /// A chunk has left. It says nothing of whether it arrived.
    pub(super) fn send_completed(&mut self) {
        self.completed += 1;
        debug_assert!(self.completed <= self.sent, "more completions than chunks");
    }

    /// A chunk came, and says this of itself.
    ///
    /// # Errors
    /// [`Fault`]: the link must be made anew.
    pub(super) fn heard(&mut self, sequence: u64, posted: u64) -> Result<(), Fault> {
        if self.received == self.posted {
            return Err(Fault::Unposted);
        }
        if sequence != self.received {
            return Err(Fault::Gap { expected: self.received, found: sequence });
        }
        if posted < self.granted {
            return Err(Fault::Backwards);
        }
        if posted > self.sent + u64::from(self.limits.peer_receives) {
            return Err(Fault::TooMuch);
        }
        self.received += 1;
        self.granted = posted;
        Ok(())
    }

    /// Receives that the peer does not know of.
    fn lag(&self) -> u64 {
        self.posted.saturating_sub(self.told)
    }

    /// Whether it is time to tell credits although there is nothing to send.
    pub(super) fn note_due(&self) -> bool {
        let left = self.told - self.received.min(self.told);
        self.lag() >= u64::from(self.limits.receives / 4) || (left <= 1 && self.lag() >= 2)
    }

    /// Chunks sent so far.
    pub(super) fn sent(&self) -> u64 {
        self.sent
    }

    /// Chunks received so far.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Chunks that have not left yet.
    pub(super) fn leaving(&self) -> u64 {
        self.sent - self.completed
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Two ends and what is between them, in which receives are real: a chunk that finds none is an error.
    struct World {
        ends: [End; 2],
        /// What is on its way to each end: sequence, posted, whether it is data.
        wires: [VecDeque<(u64, u64, bool)>; 2],
    }

    struct End {
        books: Accounts,
        limits: Limits,
        /// Receives in the queue.
        ready: u32,
        /// Data that the application has not taken.
        waiting: u32,
        /// Data that it wants to send, and has taken in all.
        to_send: u32,
        taken: u32,
        /// Chunks in the send queue.
        leaving: u32,
    }

    impl End {
        fn new(limits: Limits, to_send: u32) -> Self {
            let mut end = Self { books: Accounts::new(limits), limits, ready: 0, waiting: 0, to_send, taken: 0, leaving: 0 };
            while end.books.may_post_receive() {
                end.post();
            }
            assert_eq!(end.ready, limits.receives);
            end
        }

        fn post(&mut self) {
            self.books.receive_posted();
            self.ready += 1;
            assert!(self.ready * self.limits.cost <= self.limits.receive_depth, "the receive queue is over-posted");
        }
    }

    impl World {
        fn new(limits: [Limits; 2], to_send: [u32; 2]) -> Self {
            Self { ends: [End::new(limits[0], to_send[0]), End::new(limits[1], to_send[1])], wires: Default::default() }
        }

        fn send(&mut self, side: usize, data: bool) {
            let end = &mut self.ends[side];
            let (sequence, posted) = end.books.sending();
            end.leaving += 1;
            assert!(end.leaving * end.limits.cost <= end.limits.send_depth, "the send queue is over-posted");
            self.wires[1 - side].push_back((sequence, posted, data));
        }

        /// What a shell does whenever it looks: takes one arrival, and tells credits if that is due.
        fn progress(&mut self, side: usize) -> bool {
            let arrived = self.wires[side].pop_front();
            let end = &mut self.ends[side];
            if let Some((sequence, posted, data)) = arrived {
                assert!(end.ready > 0, "a chunk came for which no receive was posted");
                end.ready -= 1;
                end.books.heard(sequence, posted).unwrap();
                if data {
                    end.waiting += 1;
                } else {
                    end.post();
                }
            }
            let note = self.ends[side].books.note_due() && self.ends[side].books.sendable(Purpose::Note) > 0;
            if note {
                self.send(side, false);
            }
            arrived.is_some() || note
        }

        fn take(&mut self, side: usize) -> bool {
            let end = &mut self.ends[side];
            let some = end.waiting > 0;
            if some {
                end.waiting -= 1;
                end.taken += 1;
                end.post();
            }
            some
        }

        fn complete(&mut self, side: usize) -> bool {
            let end = &mut self.ends[side];
            let some = end.leaving > 0;
            if some {
                end.leaving -= 1;
                end.books.send_completed();
            }
            some
        }

        fn offer(&mut self, side: usize) -> bool {
            let end = &mut self.ends[side];
            let some = end.to_send > 0 && end.books.sendable(Purpose::Data) > 0;
            if some {
                end.to_send -= 1;
                self.send(side, true);
            }
            some
        }

        /// A keep-alive, as the shell's timer sends it.
        fn beat(&mut self, side: usize) {
            if self.ends[side].books.sendable(Purpose::Beat) > 0 {
                self.send(side, false);
            }
        }

        fn step(&mut self, side: usize, what: u8) -> bool {
            match what {
                0 => self.offer(side),
                1 | 2 => self.progress(side),
                3 => self.take(side),
                _ => self.complete(side),
            }
        }
    }

    fn limits() -> impl Strategy<Value = [Limits; 2]> {
        ((1u32..5, 8u32..40, 16u32..70), (8u32..40, 16u32..70)).prop_map(|((cost, send_a, receives_a), (send_b, receives_b))| {
            let one = |send: u32, receives: u32, peer_receives: u32| Limits {
                cost,
                send_depth: send * cost,
                receive_depth: receives * cost + cost - 1,
                receives,
                peer_receives,
            };
            [one(send_a, receives_a, receives_b), one(send_b, receives_b, receives_a)]
        })
    }

    proptest! {
        /// Whatever happens in whatever order, no queue is ever over-posted and no chunk finds no receive; and when both ends go on,
        /// everything arrives, without keep-alives having to help.
        #[test]
        fn nothing_is_over_posted_and_nothing_stands_still(
            limits in limits(), to_send in [0u32..400, 0u32..400],
            steps in proptest::collection::vec((0usize..2, 0u8..6), 0..1500), beats in proptest::collection::vec(0usize..2, 0..20),
        ) {
            let mut world = World::new(limits, to_send);
            let every = steps.len() / (beats.len() + 1) + 1;
            let mut beats = beats.into_iter();
            for (i, (side, what)) in steps.into_iter().enumerate() {
                world.step(side, what);
                if i % every == 0 && let Some(side) = beats.next() {
                    world.beat(side);
                }
            }
            // From here on both do what they can.
            loop {
                let mut moved = false;
                for side in [0, 1] {
                    for what in [0, 1, 3, 4] {
                        moved |= world.step(side, what);
                    }
                }
                if !moved {
                    break;
                }
            }
            prop_assert_eq!([world.ends[0].to_send, world.ends[1].to_send], [0, 0]);
            prop_assert_eq!([world.ends[0].taken, world.ends[1].taken], [to_send[1], to_send[0]]);
        }

        /// An end that takes nothing stops its peer, and can still send itself.
        #[test]
        fn an_end_that_takes_nothing_bounds_its_peer(limits in limits()) {
            let mut world = World::new(limits, [10_000, 500]);
            loop {
                let mut moved = world.offer(0) | world.complete(0) | world.progress(0) | world.take(0);
                moved |= world.offer(1) | world.complete(1) | world.progress(1);
                if !moved {
                    break;
                }
            }
            prop_assert!(world.ends[1].waiting <= limits[1].receives);
            prop_assert_eq!(world.ends[0].taken, 500, "the other direction is not held up");
            // Beats still pass, however often.
            for _ in 0..100 {
                for side in [0, 1] {
                    let before = world.ends[side].books.sent();
                    world.beat(side);
                    prop_assert!(world.ends[side].books.sent() > before, "an end cannot say that it lives");
                    world.complete(side);
                    while world.progress(1 - side) | world.progress(side) | world.complete(1 - side) | world.complete(side) {}
                }
            }
        }
    }

    const LIMITS: Limits = Limits { cost: 4, send_depth: 40, receive_depth: 64, receives: 16, peer_receives: 16 };

    #[test]
    fn data_leaves_credits_and_room_for_notes() {
        let mut books = Accounts::new(LIMITS);
        // Ten chunks fit the send queue, of which three are kept; twelve credits of sixteen are for data.
        assert_eq!(books.sendable(Purpose::Data), 7);
        for _ in 0..7 {
            books.sending();
        }
        assert_eq!((books.sendable(Purpose::Data), books.sendable(Purpose::Beat)), (0, 3));
        for _ in 0..7 {
            books.send_completed();
        }
        assert_eq!(books.sendable(Purpose::Data), 5);
        assert_eq!(books.sendable(Purpose::Note), 0, "there is nothing to tell");
    }

    #[test]
    fn what_a_peer_cannot_do_is_seen() {
        let mut books = Accounts::new(LIMITS);
        assert_eq!(books.clone().heard(0, 16), Err(Fault::Unposted));
        books.receive_posted();
        assert_eq!(books.clone().heard(1, 16), Err(Fault::Gap { expected: 0, found: 1 }));
        assert_eq!(books.clone().heard(0, 15), Err(Fault::Backwards));
        assert_eq!(books.clone().heard(0, 17), Err(Fault::TooMuch), "nothing was sent that it could have received");
        books.sending();
        assert_eq!(books.heard(0, 17), Ok(()));
    }
}
