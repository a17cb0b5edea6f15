//! The bounded queue of frames to one peer.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use bytes::Bytes;

use crate::env::FRAME_BYTES_MAX;

/// Why a frame was not queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PushError {
    /// There is no room.
    Full,
    /// The queue takes nothing any more.
    Closed,
}

/// Frames to a peer: many push, one takes. Bounded in frames and in bytes.
#[derive(Debug)]
pub(super) struct FrameQueue {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    frames: VecDeque<Bytes>,
    bytes: usize,
    closed: bool,
    taker: Option<Waker>,
}

impl FrameQueue {
    /// Most frames in a queue.
    pub(super) const FRAMES_MAX: usize = 4096;
    /// Most bytes in a queue.
    pub(super) const BYTES_MAX: usize = 2 * FRAME_BYTES_MAX;

    pub(super) fn new() -> Self {
        Self { state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a frame, or says at once that it cannot.
    pub(super) fn push(&self, frame: Bytes) -> Result<(), PushError> {
        let mut state = self.state();
        if state.closed {
            return Err(PushError::Closed);
        }
        if state.frames.len() >= Self::FRAMES_MAX || state.bytes + frame.len() > Self::BYTES_MAX {
            return Err(PushError::Full);
        }
        state.bytes += frame.len();
        state.frames.push_back(frame);
        let taker = state.taker.take();
        drop(state);
        if let Some(taker) = taker {
            taker.wake();
        }
        Ok(())
    }

    /// Takes nothing any more; what is queued can still be taken.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        let taker = state.taker.take();
        drop(state);
        if let Some(taker) = taker {
            taker.wake();
        }
    }

    /// The oldest frame, if there is one now.
    pub(super) fn try_pop(&self) -> Option<Bytes> {
        let mut state = self.state();
        let frame = state.frames.pop_front()?;
        state.bytes -= frame.len();
        Some(frame)
    }

    /// The oldest frame, as soon as there is one; `None` once the queue is closed and empty.
    pub(super) async fn pop(&self) -> Option<Bytes> {
        std::future::poll_fn(|context| {
            let mut state = self.state();
            if let Some(frame) = state.frames.pop_front() {
                state.bytes -= frame.len();
                return Poll::Ready(Some(frame));
            }
            if state.closed {
                return Poll::Ready(None);
            }
            state.taker = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn it_is_bounded_in_frames_and_in_bytes() {
        let queue = FrameQueue::new();
        for _ in 0..FrameQueue::FRAMES_MAX {
            queue.push(Bytes::from_static(b"x")).unwrap();
        }
        assert_eq!(queue.push(Bytes::new()), Err(PushError::Full));
        let queue = FrameQueue::new();
        let large = Bytes::from(vec![0; FRAME_BYTES_MAX]);
        queue.push(large.clone()).unwrap();
        queue.push(large.clone()).unwrap();
        assert_eq!(queue.push(Bytes::from_static(b"x")), Err(PushError::Full));
        assert_eq!(queue.try_pop(), Some(large));
        queue.push(Bytes::from_static(b"x")).unwrap();
    }

    #[test]
    fn a_closed_queue_gives_what_it_has() {
        let queue = FrameQueue::new();
        queue.push(Bytes::from_static(b"a")).unwrap();
        queue.close();
        assert_eq!(queue.push(Bytes::from_static(b"b")), Err(PushError::Closed));
        assert_eq!(queue.pop().now_or_never().unwrap(), Some(Bytes::from_static(b"a")));
        assert_eq!(queue.pop().now_or_never().unwrap(), None);
    }
}
