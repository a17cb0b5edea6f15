//! A request on its way into a service, and the way back for its answer.

use std::fmt;

use tokio::sync::oneshot;

use super::error::CallError;
use super::frame::{Fault, Header};
use super::id::Service;
use super::router::{Permit, Services};
use crate::env::Instant;
use crate::ids::NodeId;

/// A request, as a service gets it.
pub struct Inbound<S: Service> {
    /// Who asks: a peer that has proved who it is, or this node.
    pub from: NodeId,
    /// What is asked.
    pub request: S::Request,
    /// Where the answer goes; none for a cast.
    pub reply: Option<Replier<S>>,
    /// When the caller stops waiting, on this node's clock; none for a cast.
    pub deadline: Option<Instant>,
}

impl<S: Service> fmt::Debug for Inbound<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbound")
            .field("service", &S::NAME)
            .field("from", &self.from)
            .field("call", &self.reply.is_some())
            .finish_non_exhaustive()
    }
}

/// Sends the answer of one call. Dropped unused, it tells the caller that there will be none.
pub struct Replier<S: Service> {
    way: Option<Way<S>>,
    /// Counts the call as being worked on. Given back before the answer is sent, so that a caller which asks again
    /// at once finds the room.
    permit: Option<Permit>,
}

enum Way<S: Service> {
    Local { node: NodeId, sender: oneshot::Sender<Result<S::Reply, CallError>> },
    Wire(WireWay),
}

/// Back to a peer, for as long as the connection lasts that the call came in on.
pub(super) struct WireWay {
    pub(super) services: Services,
    pub(super) peer: NodeId,
    pub(super) session: u64,
    pub(super) correlation: u64,
}

impl<S: Service> Replier<S> {
    pub(super) fn local(node: NodeId, sender: oneshot::Sender<Result<S::Reply, CallError>>, permit: Permit) -> Self {
        Self { way: Some(Way::Local { node, sender }), permit: Some(permit) }
    }

    pub(super) fn wire(way: WireWay, permit: Permit) -> Self {
        Self { way: Some(Way::Wire(way)), permit: Some(permit) }
    }

    /// Answers.
    pub fn reply(mut self, reply: S::Reply) {
        drop(self.permit.take());
        match self.way.take() {
            Some(Way::Local { sender, .. }) => drop(sender.send(Ok(reply))),
            Some(Way::Wire(way)) => {
                match (Header::Reply { correlation: way.correlation }).encode_with(&reply) {
                    Ok(frame) => way.services.answer(&way, S::NAME, frame),
                    // The answer exists but cannot travel: the caller hears why instead of waiting in vain.
                    Err(error) => way.fault(S::NAME, Fault::Failed(format!("its answer cannot be sent: {error}"))),
                }
            }
            None => {}
        }
    }

    /// Says that there is no answer, and why.
    pub fn fail(mut self, reason: impl Into<String>) {
        self.send_fault(Fault::Failed(reason.into()));
    }

    pub(super) fn fault(mut self, fault: Fault) {
        self.send_fault(fault);
    }

    fn send_fault(&mut self, fault: Fault) {
        drop(self.permit.take());
        match self.way.take() {
            Some(Way::Local { node, sender }) => drop(sender.send(Err(CallError::from_fault(fault, node, S::NAME, S::ID)))),
            Some(Way::Wire(way)) => way.fault(S::NAME, fault),
            None => {}
        }
    }
}

impl WireWay {
    pub(super) fn fault(&self, service: &'static str, fault: Fault) {
        if let Ok(frame) = (Header::Fault { correlation: self.correlation, fault }).encode() {
            self.services.answer(self, service, frame);
        }
    }
}

impl<S: Service> Drop for Replier<S> {
    fn drop(&mut self) {
        if self.way.is_some() {
            self.send_fault(Fault::Failed("the service stopped, or dropped the request without an answer".to_owned()));
        }
    }
}

impl<S: Service> fmt::Debug for Replier<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Replier({})", S::NAME)
    }
}
