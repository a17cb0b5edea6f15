//! Shoal's actors in virtual time
