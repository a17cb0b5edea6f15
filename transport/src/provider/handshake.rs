//! How two ends of a fresh connection prove to each other that they hold the same ticket.
//!
//! ```text
//! dialler                                     acceptor
//!   hello: magic 8, ticket id 16,
//!          nonce 32, longest message 4, zero 4  →
//!                                         ←   challenge: nonce 32
//!   proof: tag 32                         →
//!                                         ←   verdict: 1, longest message 4, tag 32     (or zeros: refused)
//! ```
//!
//! A tag is blake3 keyed with a key that is derived from the secret for the one direction, over everything that was said
//! before. Both nonces are fresh, so nothing that was recorded helps a second time, and neither tag can be turned
//! around. The dialler proves itself first: a stranger gets the same challenge and the same refusal whether or not it
//! guessed a ticket's id. Everything has a fixed length, so nothing is allocated on a stranger's word.

use crate::link::LinkOptions;
use crate::provider::Ticket;

pub(in crate::provider) const HELLO_BYTES: usize = 64;
pub(in crate::provider) const CHALLENGE_BYTES: usize = 32;
pub(in crate::provider) const PROOF_BYTES: usize = 32;
pub(in crate::provider) const VERDICT_BYTES: usize = 37;

const MAGIC: [u8; 8] = *b"shoalTL1";
const DIALLER: &str = "shoal 2026 tensor link v1: dialler's proof";
const ACCEPTOR: &str = "shoal 2026 tensor link v1: acceptor's proof";

pub(in crate::provider) type Nonce = [u8; 32];

/// The dialler's first words.
pub(in crate::provider) fn hello(ticket: &Ticket, nonce: &Nonce, options: LinkOptions) -> [u8; HELLO_BYTES] {
    let mut out = [0; HELLO_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..24].copy_from_slice(&ticket.id().to_le_bytes());
    out[24..56].copy_from_slice(nonce);
    out[56..60].copy_from_slice(&options.message_bytes_max.to_le_bytes());
    out
}

/// The ticket's id and the dialler's options, if this is a hello of this version.
pub(in crate::provider) fn read_hello(hello: &[u8; HELLO_BYTES]) -> Option<(u128, LinkOptions)> {
    let id = <[u8; 16]>::try_from(&hello[8..24]).ok()?;
    (hello[..8] == MAGIC && hello[60..] == [0; 4]).then(|| (u128::from_le_bytes(id), options(&hello[56..60])))
}

fn options(bytes: &[u8]) -> LinkOptions {
    let mut word = [0; 4];
    word.copy_from_slice(bytes);
    LinkOptions { message_bytes_max: u32::from_le_bytes(word) }
}

fn tag(ticket: &Ticket, context: &'static str, said: &[&[u8]]) -> blake3::Hash {
    let mut key = ticket.key(context);
    let mut hasher = blake3::Hasher::new_keyed(&key);
    for part in said {
        hasher.update(part);
    }
    zeroize::Zeroize::zeroize(&mut key);
    hasher.finalize()
}

/// What the dialler proves itself with.
pub(in crate::provider) fn proof(ticket: &Ticket, hello: &[u8; HELLO_BYTES], challenge: &Nonce) -> [u8; PROOF_BYTES] {
    tag(ticket, DIALLER, &[hello, challenge]).into()
}

/// Whether the dialler proved itself. Takes the same time wherever the proof is wrong.
pub(in crate::provider) fn proved(ticket: &Ticket, hello: &[u8; HELLO_BYTES], challenge: &Nonce, proof: &[u8; PROOF_BYTES]) -> bool {
    tag(ticket, DIALLER, &[hello, challenge]) == blake3::Hash::from_bytes(*proof)
}

/// The acceptor's welcome, with its options and its own proof.
pub(in crate::provider) fn welcome(
    ticket: &Ticket,
    hello: &[u8; HELLO_BYTES],
    challenge: &Nonce,
    proof: &[u8; PROOF_BYTES],
    options: LinkOptions,
) -> [u8; VERDICT_BYTES] {
    let mut out = [1; VERDICT_BYTES];
    out[1..5].copy_from_slice(&options.message_bytes_max.to_le_bytes());
    let tag = tag(ticket, ACCEPTOR, &[hello, challenge, proof, &out[..5]]);
    out[5..].copy_from_slice(tag.as_bytes());
    out
}

/// The acceptor's refusal: the same for every reason.
pub(in crate::provider) const REFUSAL: [u8; VERDICT_BYTES] = [0; VERDICT_BYTES];

/// What a verdict says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::provider) enum Verdict {
    /// The acceptor holds the secret too; these are its options.
    Welcome(LinkOptions),
    /// It refused.
    Refused,
    /// It says welcome and cannot prove that it may.
    Impostor,
}

/// Reads the acceptor's verdict.
pub(in crate::provider) fn read_verdict(
    ticket: &Ticket,
    hello: &[u8; HELLO_BYTES],
    challenge: &Nonce,
    proof: &[u8; PROOF_BYTES],
    verdict: &[u8; VERDICT_BYTES],
) -> Verdict {
    let mut theirs = [0; 32];
    theirs.copy_from_slice(&verdict[5..]);
    match verdict[0] {
        0 => Verdict::Refused,
        1 if tag(ticket, ACCEPTOR, &[hello, challenge, proof, &verdict[..5]]) == blake3::Hash::from_bytes(theirs) => {
            Verdict::Welcome(options(&verdict[1..5]))
        }
        _ => Verdict::Impostor,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OPTIONS: LinkOptions = LinkOptions { message_bytes_max: 0x0102_0304 };

    #[test]
    fn the_first_words_are_pinned() {
        let hello = hello(&Ticket::new(0x0102, [9; 32]), &[0xaa; 32], OPTIONS);
        assert_eq!(&hello[..12], b"shoalTL1\x02\x01\0\0");
        assert_eq!(&hello[52..], [0xaa, 0xaa, 0xaa, 0xaa, 4, 3, 2, 1, 0, 0, 0, 0]);
        assert_eq!(read_hello(&hello), Some((0x0102, OPTIONS)));
        let welcome = welcome(&Ticket::new(0x0102, [9; 32]), &hello, &[0xbb; 32], &[0xcc; 32], OPTIONS);
        assert_eq!(&welcome[..5], [1, 4, 3, 2, 1]);
    }

    #[test]
    fn both_ends_prove_themselves_and_neither_proof_serves_the_other() {
        let ticket = Ticket::new(1, [1; 32]);
        let hello = hello(&ticket, &[2; 32], OPTIONS);
        let challenge = [3; 32];
        let proof = proof(&ticket, &hello, &challenge);
        assert!(proved(&ticket, &hello, &challenge, &proof));
        let welcome = welcome(&ticket, &hello, &challenge, &proof, OPTIONS);
        assert_eq!(read_verdict(&ticket, &hello, &challenge, &proof, &welcome), Verdict::Welcome(OPTIONS));
        let mut other = welcome;
        other[1] ^= 1;
        assert_eq!(read_verdict(&ticket, &hello, &challenge, &proof, &other), Verdict::Impostor, "its options are proved too");
        assert_eq!(read_verdict(&ticket, &hello, &challenge, &proof, &REFUSAL), Verdict::Refused);
        let mut reflected = [1; VERDICT_BYTES];
        reflected[5..].copy_from_slice(&proof);
        assert_eq!(read_verdict(&ticket, &hello, &challenge, &proof, &reflected), Verdict::Impostor);
    }

    proptest! {
        #[test]
        fn a_proof_holds_for_its_own_secret_and_words_only(
            secret in any::<[u8; 32]>(), nonces in any::<[[u8; 32]; 2]>(), byte in 0..HELLO_BYTES + CHALLENGE_BYTES + PROOF_BYTES, bit in 0u8..8,
        ) {
            let ticket = Ticket::new(7, secret);
            let mut hello = hello(&ticket, &nonces[0], OPTIONS);
            let mut challenge = nonces[1];
            let mut proof = proof(&ticket, &hello, &challenge);
            let mut other = secret;
            other[byte % 32] ^= 1u8 << bit;
            prop_assert!(!proved(&Ticket::new(7, other), &hello, &challenge, &proof));
            let flipped = match byte {
                _ if byte < HELLO_BYTES => &mut hello[byte],
                _ if byte < HELLO_BYTES + CHALLENGE_BYTES => &mut challenge[byte - HELLO_BYTES],
                _ => &mut proof[byte - HELLO_BYTES - CHALLENGE_BYTES],
            };
            *flipped ^= 1u8 << bit;
            prop_assert!(!proved(&ticket, &hello, &challenge, &proof));
        }
    }
}
