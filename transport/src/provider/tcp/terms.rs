//! What this end of a link wants, and what both ends have made of it.

use std::net::IpAddr;

use super::rails::{self, Further, RAILS_MAX};
use super::seal::{ACCEPTOR, Cipher, DIALLER, Seal, slow_aes};
use crate::link::LinkOptions;
use crate::provider::Ticket;
use crate::provider::handshake::{self, CHALLENGE_BYTES, HELLO_BYTES, Offer, PROOF_BYTES, Wish};

/// Whether links are encrypted. Where one end demands it and the other one forbids it, there is no link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encryption {
    /// Never: for networks that nobody else has a cable to.
    Never,
    /// Whatever leaves this machine, and if the peer demands it.
    ///
    /// Activations can be turned back into the text that they come from, and people's networks have guests, so this is the
    /// default. With AES instructions it costs each end about a third of a nanosecond of a core for each byte, and a short message nothing
    /// that can be measured: a network of 1 Gbit/s is filled as before (0.117 GB/s instead of 0.119, measured), one of 10 Gbit/s
    /// takes half a core for it.
    #[default]
    Auto,
    /// Always.
    Always,
}

/// What the provider was told about links.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    pub(super) encryption: Encryption,
    pub(super) rails: u8,
}

impl Terms {
    /// What to say to a peer; `local` is this end's address of the connection.
    pub(super) fn offer(&self, options: LinkOptions, local: IpAddr, peer: IpAddr) -> Offer {
        let here = peer.to_canonical().is_loopback() || peer.to_canonical() == local.to_canonical();
        let sealing = match self.encryption {
            Encryption::Never => Wish::Forbids,
            Encryption::Auto if here => Wish::Either,
            Encryption::Auto | Encryption::Always => Wish::Demands,
        };
        Offer { options, sealing, slow_aes: slow_aes(), further_rails: self.rails.clamp(1, RAILS_MAX) - 1 }
    }
}

/// The words of a handshake that both ends know, from which keys are drawn.
pub(super) struct Said<'a> {
    pub(super) ticket: &'a Ticket,
    pub(super) hello: &'a [u8; HELLO_BYTES],
    pub(super) challenge: &'a [u8; CHALLENGE_BYTES],
    pub(super) proof: &'a [u8; PROOF_BYTES],
}

impl Said<'_> {
    fn key(&self, context: &'static str) -> [u8; 32] {
        handshake::session_key(self.ticket, context, self.hello, self.challenge, self.proof)
    }

    /// What seals the records of this connection: those that the dialler sends, those that the acceptor sends.
    pub(super) fn seals(&self, cipher: Cipher) -> [Seal; 2] {
        [DIALLER, ACCEPTOR].map(|context| Seal::new(cipher, self.key(context)))
    }

    /// What concerns the link's other connections, if this is its first.
    pub(super) fn further(&self, count: u8) -> Further {
        Further::new(self.key(rails::CONTEXT), count)
    }
}

/// How two such ends seal: none if they do not.
///
/// # Errors
/// [`Disagree`] if one end demands what the other forbids.
pub(super) fn cipher(ours: &Offer, theirs: &Offer) -> Result<Option<Cipher>, Disagree> {
    let sealed = ours.agree(theirs).ok_or(Disagree)?;
    let cipher = if ours.slow_aes || theirs.slow_aes { Cipher::ChaCha20Poly1305 } else { Cipher::Aes256Gcm };
    Ok(sealed.then_some(cipher))
}

/// One end demands what the other forbids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Disagree;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_the_machine_is_encrypted_unless_told_otherwise() {
        let wish = |encryption, local: &str, peer: &str| {
            let terms = Terms { encryption, rails: 0 };
            terms.offer(LinkOptions::default(), local.parse().unwrap(), peer.parse().unwrap()).sealing
        };
        assert_eq!(wish(Encryption::default(), "127.0.0.1", "127.0.0.1"), Wish::Either);
        assert_eq!(wish(Encryption::Auto, "::ffff:10.0.0.1", "10.0.0.1"), Wish::Either);
        assert_eq!(wish(Encryption::Auto, "10.0.0.1", "10.0.0.2"), Wish::Demands);
        assert_eq!(wish(Encryption::Auto, "fe80::1", "fe80::2"), Wish::Demands);
        assert_eq!(wish(Encryption::Always, "127.0.0.1", "127.0.0.1"), Wish::Demands);
        assert_eq!(wish(Encryption::Never, "10.0.0.1", "10.0.0.2"), Wish::Forbids);
    }

    #[test]
    fn rails_are_what_another_implementation_says() {
        use crate::provider::golden::{golden, ticket};
        let (ticket, exact) = (ticket(), |name| <Vec<u8>>::leak(golden(name)));
        let said = Said {
            ticket: &ticket,
            hello: (&*exact("hello")).try_into().unwrap(),
            challenge: (&*exact("challenge")).try_into().unwrap(),
            proof: (&*exact("proof")).try_into().unwrap(),
        };
        let further = said.further(2);
        for (i, ticket) in further.tickets().iter().enumerate() {
            assert_eq!(ticket.id().to_le_bytes()[..], golden(&format!("rail_{}_id", i + 1)));
            let secret: [u8; 32] = golden(&format!("rail_{}_secret", i + 1)).try_into().unwrap();
            assert_eq!(ticket.key("any purpose"), Ticket::new(0, secret).key("any purpose"));
        }
        let addresses = ["10.0.1.1:4000".parse().unwrap(), "10.0.2.1:4000".parse().unwrap()];
        assert_eq!(further.list(&addresses), golden("list"));
    }

    #[test]
    fn records_are_what_another_implementation_says() {
        use crate::provider::golden::{golden, ticket};
        let words = ["hello", "challenge", "proof"].map(golden);
        let key = handshake::session_key(
            &ticket(),
            DIALLER,
            words[0][..].try_into().unwrap(),
            words[1][..].try_into().unwrap(),
            words[2][..].try_into().unwrap(),
        );
        for (cipher, name) in [(Cipher::Aes256Gcm, "aes"), (Cipher::ChaCha20Poly1305, "chacha")] {
            let mut seal = Seal::with_limit(cipher, key, 2);
            for (generation, record) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let prefix = super::super::record::Prefix { bytes: 5, kind: super::super::record::MESSAGE }.encode();
                let mut piece = *b"hello";
                let tag = seal.seal(&prefix, &mut piece).unwrap();
                seal.advance();
                let record_bytes = [&prefix[..], &piece, &tag].concat();
                assert_eq!(record_bytes, golden(&format!("{name}_{generation}_{record}")));
            }
        }
    }

    #[test]
    fn the_cipher_is_one_that_neither_end_is_slow_at() {
        let offer = |slow_aes| Offer { sealing: Wish::Demands, slow_aes, ..Offer::from(LinkOptions::default()) };
        assert_eq!(cipher(&offer(false), &offer(false)), Ok(Some(Cipher::Aes256Gcm)));
        assert_eq!(cipher(&offer(true), &offer(false)), Ok(Some(Cipher::ChaCha20Poly1305)));
        assert_eq!(cipher(&offer(false), &offer(true)), Ok(Some(Cipher::ChaCha20Poly1305)));
        let never = Offer { sealing: Wish::Forbids, ..offer(false) };
        assert_eq!(cipher(&never, &offer(false)), Err(Disagree));
        assert_eq!(cipher(&never, &never), Ok(None));
    }
}
