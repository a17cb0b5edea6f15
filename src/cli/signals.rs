//! Ctrl-C, and what service managers send.

use std::io;

use shoal::Cancel;

use super::Failure;

/// Requests to end this program. While it exists they do not end the process by themselves.
#[derive(Debug)]
pub(crate) struct Signals {
    #[cfg(unix)]
    streams: [tokio::signal::unix::Signal; 2],
}

impl Signals {
    #[cfg(unix)]
    pub(crate) fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        // Not the end of the terminal: whoever starts a program with nohup wants it to be ignored.
        Ok(Self { streams: [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?] })
    }

    #[cfg(not(unix))]
    pub(crate) fn listen() -> io::Result<Self> {
        Ok(Self {})
    }

    /// What `work` comes to. At the next signal it is dropped, what it cancels is cancelled, and that is said.
    pub(crate) async fn unless_told<T>(&mut self, cancel: &Cancel, work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        tokio::select! {
            biased;
            () = self.next() => {
                cancel.cancel();
                Err(Failure::interrupted())
            }
            result = work => result,
        }
    }

    /// Resolves at the next one.
    #[cfg(unix)]
    pub(crate) async fn next(&mut self) {
        let [interrupt, terminate] = &mut self.streams;
        tokio::select! {
            biased;
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    }

    /// Resolves at the next one.
    #[cfg(not(unix))]
    pub(crate) async fn next(&mut self) {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::new(format!("the operating system refuses: {error}"))
    }
}
