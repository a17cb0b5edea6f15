//! How two ends of a fresh connection prove to each other that they hold the same ticket.
//!
//! ```text
//! dialler                                     acceptor
//!   hello: magic 8, ticket id 16,
//!          nonce 32, longest message 4,
//!          flags 1, further rails 1, zero 2  →
//!                                         ←   challenge: nonce 32
//!   proof: tag 32                         →
//!                                         ←   verdict: what 1, flags 1, further rails 1, zero 1,
//!                                                      longest message 4, tag 32     (or zeros: refused)
//! ```
//!
//! A tag is blake3 keyed with a key that is derived from the secret for the one direction, over everything that was said
//! before. Both nonces are fresh, so nothing that was recorded helps a second time, and neither tag can be turned
//! around. The dialler proves itself first: a stranger gets the same challenge and the same refusal whether or not it
//! guessed a ticket's id. Everything has a fixed length, so nothing is allocated on a stranger's word.
//!
//! Whether the link is sealed is decided by the flags of both ends, which the tags cover: whoever changes one on the way
//! ends the handshake. Keys for the records of a sealed link are drawn from the same secret and the same words.

use zeroize::Zeroize;

use crate::link::LinkOptions;
use crate::provider::Ticket;

pub(in crate::provider) const HELLO_BYTES: usize = 64;
pub(in crate::provider) const CHALLENGE_BYTES: usize = 32;
pub(in crate::provider) const PROOF_BYTES: usize = 32;
pub(in crate::provider) const VERDICT_BYTES: usize = 40;

const MAGIC: [u8; 8] = *b"shoalTL2";
const DIALLER: &str = "shoal 2026 tensor link v2: dialler's proof";
const ACCEPTOR: &str = "shoal 2026 tensor link v2: acceptor's proof";

/// Flags: this end does not make a link that is not sealed.
const DEMANDS: u8 = 1;
/// Flags: this end does not make a link that is sealed.
const FORBIDS: u8 = 2;
/// Flags: this end has no instructions for AES.
const SLOW_AES: u8 = 4;

/// Verdicts.
const REFUSED: u8 = 0;
const WELCOME: u8 = 1;
const DISAGREED: u8 = 2;

pub(in crate::provider) type Nonce = [u8; 32];

/// What an end wants of sealing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::provider) enum Wish {
    /// As the other end likes.
    #[default]
    Either,
    /// It must be.
    Demands,
    /// It must not be.
    Forbids,
}

/// What an end says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::provider) struct Offer {
    pub(in crate::provider) options: LinkOptions,
    pub(in crate::provider) sealing: Wish,
    /// Whether AES costs this end more than ChaCha20 does.
    pub(in crate::provider) slow_aes: bool,
    /// Connections besides the first that it would like the link to have.
    pub(in crate::provider) further_rails: u8,
}

impl From<LinkOptions> for Offer {
    fn from(options: LinkOptions) -> Self {
        Self { options, sealing: Wish::Either, slow_aes: false, further_rails: 0 }
    }
}

impl Offer {
    fn flags(&self) -> u8 {
        let wish = match self.sealing {
            Wish::Either => 0,
            Wish::Demands => DEMANDS,
            Wish::Forbids => FORBIDS,
        };
        wish | if self.slow_aes { SLOW_AES } else { 0 }
    }

    /// Reads flags, further rails and options; none if they mean nothing to this version.
    fn read(flags: u8, further_rails: u8, options: &[u8]) -> Option<Self> {
        let sealing = match flags & (DEMANDS | FORBIDS) {
            0 => Wish::Either,
            DEMANDS => Wish::Demands,
            FORBIDS => Wish::Forbids,
            _ => return None,
        };
        let options = LinkOptions { message_bytes_max: u32::from_le_bytes(options.try_into().ok()?) };
        (flags & !(DEMANDS | FORBIDS | SLOW_AES) == 0).then_some(Self { options, sealing, slow_aes: flags & SLOW_AES != 0, further_rails })
    }

    /// Whether a link of two such ends is sealed: if either demands it. None if the other one forbids it.
    pub(in crate::provider) fn agree(&self, other: &Self) -> Option<bool> {
        let wishes = [self.sealing, other.sealing];
        let sealed = wishes.contains(&Wish::Demands);
        (!sealed || !wishes.contains(&Wish::Forbids)).then_some(sealed)
    }
}

/// The dialler's first words.
pub(in crate::provider) fn hello(ticket: &Ticket, nonce: &Nonce, offer: impl Into<Offer>) -> [u8; HELLO_BYTES] {
    let offer = offer.into();
    let mut out = [0; HELLO_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..24].copy_from_slice(&ticket.id().to_le_bytes());
    out[24..56].copy_from_slice(nonce);
    out[56..60].copy_from_slice(&offer.options.message_bytes_max.to_le_bytes());
    out[60] = offer.flags();
    out[61] = offer.further_rails;
    out
}

/// The ticket's id and what the dialler says of itself, if this is a hello of this version.
pub(in crate::provider) fn read_offer(hello: &[u8; HELLO_BYTES]) -> Option<(u128, Offer)> {
    let id = <[u8; 16]>::try_from(&hello[8..24]).ok()?;
    let offer = Offer::read(hello[60], hello[61], &hello[56..60])?;
    (hello[..8] == MAGIC && hello[62..] == [0; 2]).then_some((u128::from_le_bytes(id), offer))
}

/// [`read_offer`] where links are neither sealed nor have rails.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "for links inside one machine"))]
pub(in crate::provider) fn read_hello(hello: &[u8; HELLO_BYTES]) -> Option<(u128, LinkOptions)> {
    read_offer(hello).map(|(id, offer)| (id, offer.options))
}

fn tag(ticket: &Ticket, context: &'static str, said: &[&[u8]]) -> blake3::Hash {
    let mut key = ticket.key(context);
    let mut hasher = blake3::Hasher::new_keyed(&key);
    for part in said {
        hasher.update(part);
    }
    key.zeroize();
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

/// A key for one direction of a link whose dialler said these words, by the name of the purpose.
pub(in crate::provider) fn session_key(
    ticket: &Ticket,
    context: &'static str,
    hello: &[u8; HELLO_BYTES],
    challenge: &Nonce,
    proof: &[u8; PROOF_BYTES],
) -> [u8; 32] {
    tag(ticket, context, &[hello, challenge, proof]).into()
}

fn verdict(what: u8, ticket: &Ticket, [hello, challenge, proof]: [&[u8]; 3], offer: Offer) -> [u8; VERDICT_BYTES] {
    let mut out = [0; VERDICT_BYTES];
    out[0] = what;
    out[1] = offer.flags();
    out[2] = offer.further_rails;
    out[4..8].copy_from_slice(&offer.options.message_bytes_max.to_le_bytes());
    let tag = tag(ticket, ACCEPTOR, &[hello, challenge, proof, &out[..8]]);
    out[8..].copy_from_slice(tag.as_bytes());
    out
}

/// The acceptor's welcome, with what it says of itself and its own proof.
pub(in crate::provider) fn welcome(
    ticket: &Ticket,
    hello: &[u8; HELLO_BYTES],
    challenge: &Nonce,
    proof: &[u8; PROOF_BYTES],
    offer: impl Into<Offer>,
) -> [u8; VERDICT_BYTES] {
    verdict(WELCOME, ticket, [hello, challenge, proof], offer.into())
}

/// The acceptor's word that one end demands what the other forbids, with its own proof.
pub(in crate::provider) fn disagreed(
    ticket: &Ticket,
    hello: &[u8; HELLO_BYTES],
    challenge: &Nonce,
    proof: &[u8; PROOF_BYTES],
    offer: Offer,
) -> [u8; VERDICT_BYTES] {
    verdict(DISAGREED, ticket, [hello, challenge, proof], offer)
}

/// The acceptor's refusal: the same for every reason.
pub(in crate::provider) const REFUSAL: [u8; VERDICT_BYTES] = [REFUSED; VERDICT_BYTES];

/// What a verdict says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::provider) enum Answer {
    /// The acceptor holds the secret too; this is what it says of itself.
    Welcome(Offer),
    /// It holds the secret, and one end demands what the other forbids.
    Disagreed(Offer),
    /// It refused.
    Refused,
    /// It says something and cannot prove that it may.
    Impostor,
}

/// Reads the acceptor's verdict.
pub(in crate::provider) fn read_answer(
    ticket: &Ticket,
    hello: &[u8; HELLO_BYTES],
    challenge: &Nonce,
    proof: &[u8; PROOF_BYTES],
    verdict: &[u8; VERDICT_BYTES],
) -> Answer {
    let mut theirs = [0; 32];
    theirs.copy_from_slice(&verdict[8..]);
    if verdict[0] == REFUSED {
        return Answer::Refused;
    }
    if tag(ticket, ACCEPTOR, &[hello, challenge, proof, &verdict[..8]]) != blake3::Hash::from_bytes(theirs) {
        return Answer::Impostor;
    }
    match (verdict[0], Offer::read(verdict[1], verdict[2], &verdict[4..8])) {
        (WELCOME, Some(offer)) if verdict[3] == 0 => Answer::Welcome(offer),
        (DISAGREED, Some(offer)) if verdict[3] == 0 => Answer::Disagreed(offer),
        _ => Answer::Impostor,
    }
}

/// [`Answer`] where links are neither sealed nor have rails.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "for links inside one machine"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::provider) enum Verdict {
    /// The acceptor holds the secret too; these are its options.
    Welcome(LinkOptions),
    /// It refused.
    Refused,
    /// It says welcome and cannot prove that it may.
    Impostor,
}

/// [`read_answer`] where links are neither sealed nor have rails.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "for links inside one machine"))]
pub(in crate::provider) fn read_verdict(
    ticket: &Ticket,
    hello: &[u8; HELLO_BYTES],
    challenge: &Nonce,
    proof: &[u8; PROOF_BYTES],
    verdict: &[u8; VERDICT_BYTES],
) -> Verdict {
    match read_answer(ticket, hello, challenge, proof, verdict) {
        Answer::Welcome(offer) => Verdict::Welcome(offer.options),
        Answer::Disagreed(_) | Answer::Refused => Verdict::Refused,
        Answer::Impostor => Verdict::Impostor,
    }
}

/// A hello is refused, or is exactly what would be written for what was read; what follows it is never taken for a verdict.
#[cfg(any(test, fuzzing))]
pub fn fuzz(bytes: &[u8]) {
    let Some((hello, rest)) = bytes.split_first_chunk::<HELLO_BYTES>() else { return };
    if let Some((id, offer)) = read_offer(hello) {
        let mut nonce = [0; 32];
        nonce.copy_from_slice(&hello[24..56]);
        assert_eq!(self::hello(&Ticket::new(id, [0; 32]), &nonce, offer), *hello);
    }
    if let Some((verdict, _)) = rest.split_first_chunk::<VERDICT_BYTES>() {
        let ticket = Ticket::new(1, [0x5a; 32]);
        let answer = read_answer(&ticket, hello, &[1; CHALLENGE_BYTES], &[2; PROOF_BYTES], verdict);
        assert!(matches!(answer, Answer::Refused | Answer::Impostor));
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
        assert_eq!(&hello[..12], b"shoalTL2\x02\x01\0\0");
        assert_eq!(&hello[52..], [0xaa, 0xaa, 0xaa, 0xaa, 4, 3, 2, 1, 0, 0, 0, 0]);
        assert_eq!(read_hello(&hello), Some((0x0102, OPTIONS)));
        let welcome = welcome(&Ticket::new(0x0102, [9; 32]), &hello, &[0xbb; 32], &[0xcc; 32], OPTIONS);
        assert_eq!(&welcome[..8], [1, 0, 0, 0, 4, 3, 2, 1]);
    }

    #[test]
    fn every_word_is_what_another_implementation_says() {
        use crate::provider::golden::{golden, ticket};
        let ticket = ticket();
        let options = |message_bytes_max| Offer::from(LinkOptions { message_bytes_max });
        let dialler = Offer { sealing: Wish::Demands, further_rails: 2, ..options(4160) };
        let acceptor = Offer { slow_aes: true, further_rails: 2, ..options(8256) };
        let hello = hello(&ticket, &[0xaa; 32], dialler);
        assert_eq!(hello[..], golden("hello"));
        assert_eq!(read_offer(&hello), Some((ticket.id(), dialler)));
        let challenge = [0xbb; 32];
        assert_eq!(challenge[..], golden("challenge"));
        let proof = proof(&ticket, &hello, &challenge);
        assert_eq!(proof[..], golden("proof"));
        let verdict = welcome(&ticket, &hello, &challenge, &proof, acceptor);
        assert_eq!(verdict[..], golden("verdict"));
        assert_eq!(read_answer(&ticket, &hello, &challenge, &proof, &verdict), Answer::Welcome(acceptor));
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
        let offer = Offer { sealing: Wish::Demands, slow_aes: true, further_rails: 3, ..Offer::from(OPTIONS) };
        let disagreed = disagreed(&ticket, &hello, &challenge, &proof, offer);
        assert_eq!(read_answer(&ticket, &hello, &challenge, &proof, &disagreed), Answer::Disagreed(offer));
        for place in 0..8 {
            for bit in 0..8 {
                let mut other = disagreed;
                other[place] ^= 1u8 << bit;
                let answer = read_answer(&ticket, &hello, &challenge, &proof, &other);
                // A verdict that says no needs no proof.
                assert!(matches!(answer, Answer::Impostor | Answer::Refused), "byte {place}, bit {bit}");
            }
        }
        let mut reflected = [1; VERDICT_BYTES];
        reflected[8..].copy_from_slice(&proof);
        assert_eq!(read_verdict(&ticket, &hello, &challenge, &proof, &reflected), Verdict::Impostor);
    }

    #[test]
    fn either_end_can_demand_sealing_and_none_gets_what_it_forbids() {
        let agree = |one, other| {
            let offer = |sealing| Offer { sealing, ..Offer::from(OPTIONS) };
            assert_eq!(offer(one).agree(&offer(other)), offer(other).agree(&offer(one)));
            offer(one).agree(&offer(other))
        };
        assert_eq!(agree(Wish::Either, Wish::Either), Some(false));
        assert_eq!(agree(Wish::Either, Wish::Demands), Some(true));
        assert_eq!(agree(Wish::Demands, Wish::Demands), Some(true));
        assert_eq!(agree(Wish::Either, Wish::Forbids), Some(false));
        assert_eq!(agree(Wish::Forbids, Wish::Forbids), Some(false));
        assert_eq!(agree(Wish::Demands, Wish::Forbids), None);
    }

    #[test]
    fn flags_that_mean_nothing_are_no_hello() {
        for flags in 0..=255u8 {
            let mut bytes = hello(&Ticket::new(1, [1; 32]), &[2; 32], OPTIONS);
            bytes[60] = flags;
            assert_eq!(read_offer(&bytes).is_some(), matches!(flags, 0..=2 | 4..=6), "{flags}");
        }
        for place in [0, 7, 62, 63] {
            let mut bytes = hello(&Ticket::new(1, [1; 32]), &[2; 32], OPTIONS);
            bytes[place] ^= 1;
            assert_eq!(read_offer(&bytes), None);
        }
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
