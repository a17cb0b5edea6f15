//! What went wrong on a connection, in words for people.

use libp2p::swarm::DialError;

use super::address::node_id;
use super::control::Denied;

/// An error and what caused it, without saying the same thing twice.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        source = cause.source();
    }
    text
}

/// Why a dial failed, for people.
pub(super) fn dial_error(error: &DialError) -> String {
    match error {
        // The swarm takes the addresses that it listens at itself out of a dial.
        DialError::LocalPeerId { .. } | DialError::NoAddresses => "it is this node itself".to_owned(),
        DialError::WrongPeerId { obtained, .. } => {
            let who = node_id(obtained).map_or_else(|| obtained.to_string(), |node| node.short());
            format!("another node answers there: {who}")
        }
        DialError::Denied { cause } => match cause.downcast_ref::<Denied>() {
            Some(denied) => denied.to_string(),
            None => chain(cause),
        },
        DialError::Transport(errors) => match errors.first() {
            Some((_, error)) => root(error),
            None => "no way to reach it".to_owned(),
        },
        other => chain(other),
    }
}

/// The innermost cause: what the system said.
fn root(error: &dyn std::error::Error) -> String {
    let mut innermost: &dyn std::error::Error = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost.to_string()
}
