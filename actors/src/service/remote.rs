//! A service on some node, as its callers see it.

use std::fmt;
use std::marker::PhantomData;
use std::sync::mpsc;
use std::time::Duration;

use super::error::CallError;
use super::id::Service;
use super::router::Services;
use crate::env::Spawner;
use crate::ids::NodeId;

/// The service `S` on one node. Cheap to make and to clone; it holds no connection.
pub struct Remote<S: Service> {
    services: Services,
    node: NodeId,
    service: PhantomData<fn() -> S>,
}

impl<S: Service> Remote<S> {
    pub(super) fn new(services: Services, node: NodeId) -> Self {
        Self { services, node, service: PhantomData }
    }

    /// The node.
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// Asks, and waits for the answer for at most `deadline`.
    ///
    /// Dropping the future abandons the call; the peer is not told and its answer is ignored.
    ///
    /// # Errors
    /// [`CallError`], which says whether the peer may have acted.
    pub async fn call(&self, request: S::Request, deadline: Duration) -> Result<S::Reply, CallError> {
        self.services.call::<S>(self.node, request, deadline).await
    }

    /// Asks from a thread that may block until there is an answer, at most for `deadline`. None: this node stops.
    pub(crate) fn call_and_wait(
        self,
        spawner: &dyn Spawner,
        task: &'static str,
        request: S::Request,
        deadline: Duration,
    ) -> Option<Result<S::Reply, CallError>> {
        let (send, answer) = mpsc::channel();
        spawner.task(task, Box::pin(async move { drop(send.send(self.call(request, deadline).await)) }));
        // The call ends by its own deadline.
        answer.recv().ok()
    }

    /// Tells, without an answer. Success means that the message was queued, not that it arrived.
    ///
    /// # Errors
    /// [`CallError`] if the message was not taken.
    pub fn cast(&self, request: S::Request) -> Result<(), CallError> {
        self.services.cast::<S>(self.node, request)
    }
}

impl<S: Service> Clone for Remote<S> {
    fn clone(&self) -> Self {
        Self::new(self.services.clone(), self.node)
    }
}

impl<S: Service> fmt::Debug for Remote<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote({} on {:?})", S::NAME, self.node)
    }
}
