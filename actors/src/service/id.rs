//! The number and the shape of a service.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The number of a service. It crosses the network, so a service keeps its number for ever.
///
/// There are two ranges that cannot meet: the node's own services, whose numbers only this crate can make, and
/// [user services](ServiceId::user).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ServiceId(u32);

impl ServiceId {
    const USER: u32 = 1 << 16;

    /// The number of one of the node's own services.
    pub(crate) const fn system(number: u16) -> Self {
        Self(number as u32)
    }

    /// The number of a service that a program brings which embeds a node. All programs of one cluster share the
    /// range, so they have to agree who uses which.
    pub const fn user(number: u16) -> Self {
        Self(Self::USER | number as u32)
    }

    /// Whether this is a user service.
    pub const fn is_user(self) -> bool {
        self.0 & Self::USER != 0
    }
}

impl fmt::Display for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_user() { write!(f, "user/{}", self.0 & (Self::USER - 1)) } else { write!(f, "{}", self.0) }
    }
}

impl fmt::Debug for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceId({self})")
    }
}

/// Something that a node does for its peers, addressed by (node, service).
///
/// Requests and replies are encoded with postcard. An enum among them may only grow at its end, and a struct not at
/// all, within one wire version.
pub trait Service: 'static {
    /// Its number, the same in every version of the program.
    const ID: ServiceId;
    /// Its name, for logs and errors.
    const NAME: &'static str;
    /// What is asked.
    type Request: Serialize + DeserializeOwned + Send + 'static;
    /// What is answered.
    type Reply: Serialize + DeserializeOwned + Send + 'static;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranges_do_not_meet() {
        for number in [0, 1, u16::MAX] {
            assert!(ServiceId::user(number).is_user());
            assert!(!ServiceId::system(number).is_user());
            assert_ne!(ServiceId::user(number), ServiceId::system(number));
        }
        assert_eq!(ServiceId::user(7).to_string(), "user/7");
        assert_eq!(ServiceId::system(7).to_string(), "7");
    }
}
