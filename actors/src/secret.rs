//! Keys: a node's identity and a cluster's shared secret. Neither is ever printed.

use std::fmt;

use crate::env::{Rng, Storage};
use crate::ids::NodeId;

/// The shared secret of a private cluster.
#[derive(Clone, PartialEq, Eq)]
pub struct ClusterKey([u8; 32]);

/// Why a text is no cluster key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterKeyError {
    /// The text is empty or too short to keep anybody out.
    #[error("a cluster key has at least {min} characters; `shoal key new` makes a good one")]
    TooShort {
        /// The fewest characters that are accepted.
        min: usize,
    },
}

impl ClusterKey {
    /// Fewest characters of a key's text.
    pub const TEXT_MIN: usize = 16;

    /// Derives the key from the text that people pass around.
    ///
    /// # Errors
    /// If the text is shorter than [`ClusterKey::TEXT_MIN`].
    pub fn from_text(text: &str) -> Result<Self, ClusterKeyError> {
        let text = text.trim();
        if text.chars().count() < Self::TEXT_MIN {
            return Err(ClusterKeyError::TooShort { min: Self::TEXT_MIN });
        }
        Ok(Self(blake3::derive_key("shoal 2026-11 cluster key from text", text.as_bytes())))
    }

    /// A fresh key's text: 43 characters without look-alikes' trouble, 32 random bytes in hexadecimal groups.
    pub fn generate(rng: &dyn Rng) -> String {
        let mut bytes = [0; 16];
        rng.fill("cluster key", &mut bytes);
        let digits = hex::encode(bytes);
        let groups: Vec<&str> = (0..8).map(|i| &digits[i * 4..i * 4 + 4]).collect();
        groups.join("-")
    }

    /// A tag over `message` that only holders of the key can make. Compare tags with [`blake3::Hash`]'s `==`, which
    /// takes constant time.
    pub fn tag(&self, context: &'static str, message: &[u8]) -> blake3::Hash {
        let key = blake3::derive_key(context, &self.0);
        blake3::keyed_hash(&key, message)
    }
}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterKey(…)")
    }
}

impl Drop for ClusterKey {
    fn drop(&mut self) {
        zeroize::Zeroize::zeroize(&mut self.0);
    }
}

/// A node's persistent ed25519 key pair.
#[derive(Clone)]
pub struct Identity {
    keypair: libp2p::identity::Keypair,
    node: NodeId,
}

/// Why an identity could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// The file is there but holds no key.
    #[error("the node's identity file `{file}` is damaged; move it away to start with a new identity")]
    Damaged {
        /// Its name in the data folder.
        file: &'static str,
    },
    /// The data folder cannot be read or written.
    #[error("the node's identity file `{file}` cannot be read or written: {source}")]
    Storage {
        /// Its name in the data folder.
        file: &'static str,
        /// The system's words.
        source: std::io::Error,
    },
}

impl Identity {
    /// The file's name in the data folder.
    pub const FILE: &'static str = "identity";

    /// Makes the identity that belongs to 32 secret bytes.
    pub fn from_seed(mut seed: [u8; 32]) -> Self {
        let keypair = libp2p::identity::Keypair::ed25519_from_bytes(&mut seed);
        let Ok(keypair) = keypair else { unreachable!("every 32 bytes are an ed25519 secret key") };
        let Ok(public) = keypair.public().try_into_ed25519() else { unreachable!("made as ed25519 above") };
        Self { node: NodeId(public.to_bytes()), keypair }
    }

    /// Reads the node's identity, or draws one and stores it at the first start.
    ///
    /// # Errors
    /// If the file is damaged or the folder cannot be used.
    pub fn load_or_create(storage: &dyn Storage, rng: &dyn Rng) -> Result<Self, IdentityError> {
        let file = Self::FILE;
        if let Some(content) = storage.read(file).map_err(|source| IdentityError::Storage { file, source })? {
            let seed: [u8; 32] = content.as_slice().try_into().map_err(|_| IdentityError::Damaged { file })?;
            return Ok(Self::from_seed(seed));
        }
        let mut seed = [0; 32];
        rng.fill("identity", &mut seed);
        storage.write(file, &seed, true).map_err(|source| IdentityError::Storage { file, source })?;
        Ok(Self::from_seed(seed))
    }

    /// The public half.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// The pair, for the control network.
    pub fn keypair(&self) -> &libp2p::identity::Keypair {
        &self.keypair
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({:?})", self.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::{MemoryStorage, SystemRng};

    #[test]
    fn an_identity_lasts() {
        let storage = MemoryStorage::default();
        let first = Identity::load_or_create(&storage, &SystemRng).expect("made");
        let second = Identity::load_or_create(&storage, &SystemRng).expect("read");
        assert_eq!(first.node(), second.node());
        storage.write(Identity::FILE, b"short", true).expect("writes");
        assert!(matches!(Identity::load_or_create(&storage, &SystemRng), Err(IdentityError::Damaged { .. })));
    }

    #[test]
    fn secrets_do_not_print() {
        let key = ClusterKey::from_text("correct horse battery staple").expect("long enough");
        assert_eq!(format!("{key:?}"), "ClusterKey(…)");
        assert!(ClusterKey::from_text("short").is_err());
        assert_ne!(key.tag("a", b"x"), key.tag("b", b"x"));
        assert!(ClusterKey::from_text(&ClusterKey::generate(&SystemRng)).is_ok());
    }
}
