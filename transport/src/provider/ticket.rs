//! What two ends of a future link have in common.

use std::fmt;

use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

use crate::env::Rng;

/// A one-time secret for one link, handed to both ends over the encrypted control stream.
///
/// It is wiped from memory when dropped and never printed. Serialising it writes the secret: only ever onto the
/// control stream.
#[derive(Clone, Serialize, Deserialize)]
pub struct Ticket {
    id: u128,
    secret: [u8; 32],
}

impl Ticket {
    /// A fresh ticket that nobody can guess.
    pub fn random(rng: &dyn Rng) -> Self {
        let mut id = [0; 16];
        rng.fill("ticket id", &mut id);
        let mut ticket = Self { id: u128::from_le_bytes(id), secret: [0; 32] };
        rng.fill("ticket secret", &mut ticket.secret);
        ticket
    }

    /// A ticket from its parts.
    pub const fn new(id: u128, secret: [u8; 32]) -> Self {
        Self { id, secret }
    }

    /// Its name, which is no secret.
    pub const fn id(&self) -> u128 {
        self.id
    }

    /// A key for one purpose, drawn from the secret.
    pub(crate) fn key(&self, context: &'static str) -> [u8; 32] {
        blake3::derive_key(context, &self.secret)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.secret.zeroize();
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Ticket({:08x}…)", (self.id >> 96) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::SystemRng;

    #[test]
    fn secrets_do_not_print_and_purposes_have_their_own_keys() {
        let ticket = Ticket::new(0xabcd_ef01 << 96, [0x5a; 32]);
        assert_eq!(format!("{ticket:?}"), "Ticket(abcdef01…)");
        assert_ne!(ticket.key("one"), ticket.key("two"));
        let other = Ticket::random(&SystemRng);
        assert_ne!(ticket.key("one"), other.key("one"));
        assert_ne!(other.id(), Ticket::random(&SystemRng).id());
    }
}
