//! Sealing of records: each is encrypted and bound to its place.
//!
//! A direction of a rail has a key of its own, drawn from the ticket's secret and both nonces of the handshake, and a counter that is
//! the nonce; so a record that is changed, cut, repeated, left out or moved does not open. After [`RECORDS_PER_KEY`] records both ends
//! go on to the next key, which cannot be followed back: with pieces of 64 KiB that is at most 2³² blocks of AES under one key, for
//! which the advantage of an attacker is below 2⁻⁶² (the bound of Iwata, Ohashi and Minematsu, as in
//! <https://datatracker.ietf.org/doc/draft-irtf-cfrg-aead-limits/>).

use ring::aead::{AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, Tag, UnboundKey};
use zeroize::{Zeroize, Zeroizing};

use crate::link::CloseReason;

/// Length of the tag behind each sealed piece, in bytes.
pub(super) const TAG_BYTES: usize = 16;

/// How many records are sealed with one key.
pub(super) const RECORDS_PER_KEY: u64 = 1 << 20;

/// The records that the dialler sends.
pub(super) const DIALLER: &str = "shoal 2026 tensor link v2: dialler's records";
/// The records that the acceptor sends.
pub(super) const ACCEPTOR: &str = "shoal 2026 tensor link v2: acceptor's records";
const KEY: &str = "shoal 2026 tensor link v2: record key";
const NEXT: &str = "shoal 2026 tensor link v2: next secret";

/// How records are sealed. Both have keys of 32 bytes, nonces of 12, tags of 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cipher {
    Aes256Gcm,
    ChaCha20Poly1305,
}

/// Whether this machine computes AES in software, where ChaCha20 is faster by far.
pub(super) fn slow_aes() -> bool {
    #[cfg(any(target_arch = "x86", target_arch = "x86_64"))]
    let fast = std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq");
    #[cfg(target_arch = "aarch64")]
    let fast = std::arch::is_aarch64_feature_detected!("aes") && std::arch::is_aarch64_feature_detected!("pmull");
    #[cfg(not(any(target_arch = "x86", target_arch = "x86_64", target_arch = "aarch64")))]
    let fast = false;
    !fast
}

/// One direction of one rail.
pub(super) struct Seal {
    cipher: Cipher,
    /// What this key and all later ones are drawn from.
    secret: Zeroizing<[u8; 32]>,
    key: LessSafeKey,
    /// Records under this key: the next one's nonce.
    used: u64,
    records_per_key: u64,
}

/// A piece did not open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Damaged;

impl Seal {
    pub(super) fn new(cipher: Cipher, secret: [u8; 32]) -> Self {
        Self::with_limit(cipher, secret, RECORDS_PER_KEY)
    }

    pub(super) fn with_limit(cipher: Cipher, secret: [u8; 32], records_per_key: u64) -> Self {
        let secret = Zeroizing::new(secret);
        Self { key: record_key(cipher, &secret), cipher, secret, used: 0, records_per_key }
    }

    fn nonce(&self) -> Nonce {
        let mut nonce = [0; 12];
        nonce[4..].copy_from_slice(&self.used.to_le_bytes());
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts `piece` where it is; `prefix` is bound to it.
    ///
    /// Until [`Seal::advance`] is called the next piece gets the same nonce: a piece of which nothing has left this process was never
    /// sealed.
    ///
    /// # Errors
    /// A reason to end the link, for pieces that are longer than any cipher takes.
    pub(super) fn seal(&self, prefix: &[u8], piece: &mut [u8]) -> Result<[u8; TAG_BYTES], CloseReason> {
        let tag = self.key.seal_in_place_separate_tag(self.nonce(), Aad::from(prefix), piece);
        let tag = tag.map_err(|_| CloseReason::Broken("a record could not be encrypted".to_owned()))?;
        let mut out = [0; TAG_BYTES];
        out.copy_from_slice(tag.as_ref());
        Ok(out)
    }

    /// Goes on to the next record.
    pub(super) fn advance(&mut self) {
        self.used += 1;
        if self.used >= self.records_per_key {
            let mut next = blake3::derive_key(NEXT, &*self.secret);
            self.secret.copy_from_slice(&next);
            next.zeroize();
            self.key = record_key(self.cipher, &self.secret);
            self.used = 0;
        }
    }

    /// Decrypts `piece` where it is, and goes on to the next record.
    pub(super) fn open(&mut self, prefix: &[u8], piece: &mut [u8], tag: [u8; TAG_BYTES]) -> Result<(), Damaged> {
        let opened = self.key.open_in_place_separate_tag(self.nonce(), Aad::from(prefix), Tag::from(tag), piece, 0..);
        opened.map_err(|_| Damaged)?;
        self.advance();
        Ok(())
    }
}

fn record_key(cipher: Cipher, secret: &[u8; 32]) -> LessSafeKey {
    let algorithm = match cipher {
        Cipher::Aes256Gcm => &AES_256_GCM,
        Cipher::ChaCha20Poly1305 => &CHACHA20_POLY1305,
    };
    let key = Zeroizing::new(blake3::derive_key(KEY, secret));
    match UnboundKey::new(algorithm, &*key) {
        Ok(key) => LessSafeKey::new(key),
        Err(_) => unreachable!("both ciphers take keys of 32 bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];

    fn ends(cipher: Cipher, records_per_key: u64) -> [Seal; 2] {
        [7, 7].map(|byte| Seal::with_limit(cipher, [byte; 32], records_per_key))
    }

    fn sealed(seal: &mut Seal, prefix: &[u8], text: &[u8]) -> (Vec<u8>, [u8; TAG_BYTES]) {
        let mut piece = text.to_vec();
        let tag = seal.seal(prefix, &mut piece).unwrap();
        seal.advance();
        (piece, tag)
    }

    #[test]
    fn records_open_in_order_and_once() {
        for cipher in CIPHERS {
            let [mut sender, mut receiver] = ends(cipher, RECORDS_PER_KEY);
            let records: Vec<_> = (0..4u8).map(|i| sealed(&mut sender, b"head", &[i; 100])).collect();
            let mut open = |i: usize| {
                let (mut piece, tag) = records[i].clone();
                receiver.open(b"head", &mut piece, tag).map(|()| piece)
            };
            assert_eq!(open(0), Ok(vec![0; 100]));
            assert_eq!(open(0), Err(Damaged), "repeated");
            assert_eq!(open(2), Err(Damaged), "one was left out");
            assert_eq!(open(1), Ok(vec![1; 100]));
            assert_eq!(open(3), Err(Damaged), "too early");
            assert_eq!(open(2), Ok(vec![2; 100]));
        }
    }

    #[test]
    fn every_bit_counts() {
        for cipher in CIPHERS {
            let [mut sender, mut receiver] = ends(cipher, RECORDS_PER_KEY);
            let (piece, tag) = sealed(&mut sender, b"head", b"some words");
            for bit in 0..(4 + 10 + TAG_BYTES) * 8 {
                let (mut head, mut piece, mut tag) = (*b"head", piece.clone(), tag);
                let flipped = head.iter_mut().chain(&mut piece).chain(&mut tag).nth(bit / 8).unwrap();
                *flipped ^= 1 << (bit % 8);
                assert_eq!(receiver.open(&head, &mut piece, tag), Err(Damaged), "bit {bit}");
            }
            assert_eq!(receiver.open(b"head", &mut piece[..9].to_vec(), tag), Err(Damaged), "cut");
            assert_eq!(receiver.open(b"head", &mut piece.clone(), tag), Ok(()), "nothing was lost by trying");
        }
    }

    #[test]
    fn keys_change_on_both_ends_at_once_and_are_all_different() {
        for cipher in CIPHERS {
            let [mut sender, mut receiver] = ends(cipher, 3);
            let mut seen = std::collections::BTreeSet::new();
            for i in 0..10 {
                let (mut piece, tag) = sealed(&mut sender, b"", &[0; 32]);
                assert!(seen.insert(piece.clone()), "record {i} is sealed as another one is");
                assert_eq!(receiver.open(b"", &mut piece, tag), Ok(()));
                assert_eq!(piece, [0; 32]);
            }
        }
    }

    #[test]
    fn another_secret_or_cipher_opens_nothing() {
        let [mut sender, _] = ends(Cipher::Aes256Gcm, RECORDS_PER_KEY);
        let (piece, tag) = sealed(&mut sender, b"", b"words");
        let mut others = [Seal::new(Cipher::Aes256Gcm, [8; 32]), Seal::new(Cipher::ChaCha20Poly1305, [7; 32])];
        for other in &mut others {
            assert_eq!(other.open(b"", &mut piece.clone(), tag), Err(Damaged));
        }
    }

    #[test]
    fn what_was_not_sent_was_never_sealed() {
        let [mut sender, mut receiver] = ends(Cipher::Aes256Gcm, RECORDS_PER_KEY);
        let mut taken_back = b"taken back".to_vec();
        sender.seal(b"", &mut taken_back).unwrap();
        let (mut piece, tag) = sealed(&mut sender, b"", b"sent");
        assert_eq!(receiver.open(b"", &mut piece, tag), Ok(()));
        assert_eq!(piece, b"sent");
    }
}
