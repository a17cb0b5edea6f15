//! One direction of a link: what is on its way, in order.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;

use crate::chance::Chance;

/// How long packets take, in every direction alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkModel {
    /// The least.
    pub latency_min: Duration,
    /// The most, as a rule.
    pub latency_max: Duration,
    /// How many packets in a hundred take longer: they were lost and sent again.
    pub slow_percent: u64,
    /// The most that those take.
    pub slow_max: Duration,
}

impl Default for LinkModel {
    /// A LAN with some wireless in it.
    fn default() -> Self {
        Self {
            latency_min: Duration::from_micros(50),
            latency_max: Duration::from_millis(2),
            slow_percent: 2,
            slow_max: Duration::from_millis(150),
        }
    }
}

impl LinkModel {
    /// How long one packet takes.
    pub(crate) fn latency(&self, chance: &mut Chance) -> Duration {
        let most = if chance.percent(self.slow_percent) { self.slow_max } else { self.latency_max };
        chance.duration(self.latency_min, most)
    }
}

/// What a packet carries.
#[derive(Debug, Clone)]
pub(super) enum Load {
    /// A frame.
    Frame(Bytes),
    /// The other end has given the connection up, or never knew it.
    End,
}

/// One packet of a connection.
#[derive(Debug, Clone)]
pub(super) struct Packet {
    pub(super) session: u64,
    /// The life of the sender.
    pub(super) life: u64,
    pub(super) load: Load,
}

/// Packets from one host to another.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) packets: VecDeque<Packet>,
    /// Raised by a cut: arrivals that were on their way then do not happen.
    pub(super) epoch: u64,
    /// When the packet before the next arrives: none overtakes another.
    pub(super) last: u64,
    pub(super) bytes: usize,
    pub(super) chance: Chance,
}

impl Wire {
    /// Most packets under way, as of a real node's queue to one peer.
    pub(super) const PACKETS_MAX: usize = 4096;
    /// Most bytes under way.
    pub(super) const BYTES_MAX: usize = 8 * 1024 * 1024;

    pub(super) fn new(chance: Chance) -> Self {
        Self { packets: VecDeque::new(), epoch: 0, last: 0, bytes: 0, chance }
    }

    /// When a packet that is sent now arrives, in nanoseconds.
    pub(super) fn arrival(&mut self, now: u64, model: &LinkModel) -> u64 {
        let latency = crate::world::nanos(model.latency(&mut self.chance));
        self.last = (now + latency).max(self.last + 1);
        self.last
    }

    pub(super) fn push(&mut self, packet: Packet) {
        if let Load::Frame(frame) = &packet.load {
            self.bytes += frame.len();
        }
        self.packets.push_back(packet);
    }

    pub(super) fn pop(&mut self) -> Option<Packet> {
        let packet = self.packets.pop_front()?;
        if let Load::Frame(frame) = &packet.load {
            self.bytes = self.bytes.saturating_sub(frame.len());
        }
        Some(packet)
    }

    /// What was sent is lost, not to be sent again.
    pub(super) fn clear(&mut self) {
        self.epoch += 1;
        self.packets.clear();
        self.bytes = 0;
    }
}
