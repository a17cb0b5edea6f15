//! Short, fixed-length speech over a fresh connection, with one deadline for all of it.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::env::{Clock, Instant};
use crate::link::NAP;

/// A connection whose waits can be bounded.
pub(super) trait Connection {
    /// Bounds the next reads.
    fn bound_reads(&self, wait: Duration) -> std::io::Result<()>;
    /// Bounds the next writes.
    fn bound_writes(&self, wait: Duration) -> std::io::Result<()>;
}

impl Connection for TcpStream {
    fn bound_reads(&self, wait: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(wait))
    }

    fn bound_writes(&self, wait: Duration) -> std::io::Result<()> {
        self.set_write_timeout(Some(wait))
    }
}

#[cfg(target_os = "linux")]
impl Connection for std::os::unix::net::UnixStream {
    fn bound_reads(&self, wait: Duration) -> std::io::Result<()> {
        self.set_read_timeout(Some(wait))
    }

    fn bound_writes(&self, wait: Duration) -> std::io::Result<()> {
        self.set_write_timeout(Some(wait))
    }
}

/// Says and hears words on a connection.
pub(super) struct Words<'a, S> {
    pub(super) stream: &'a S,
    pub(super) clock: &'a dyn Clock,
    pub(super) deadline: Instant,
}

impl<'a, S: Connection> Words<'a, S>
where
    &'a S: Read + Write,
{
    fn left(&self) -> std::io::Result<Duration> {
        let left = self.deadline.since(self.clock.now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left.clamp(Duration::from_millis(1), NAP)) }
    }

    /// Bounds the next read by the deadline, for callers who read by themselves.
    ///
    /// # Errors
    /// `TimedOut` at the deadline.
    #[cfg(target_os = "linux")]
    pub(super) fn bound(&self) -> std::io::Result<()> {
        self.stream.bound_reads(self.left()?)
    }

    /// Says `words`. The first bytes of a fresh connection fit its buffer, so this does not wait.
    pub(super) fn say(&self, words: &[u8]) -> std::io::Result<()> {
        self.stream.bound_writes(self.left()?)?;
        let mut stream = self.stream;
        stream.write_all(words)
    }

    /// Hears exactly as much as `words` holds.
    ///
    /// # Errors
    /// `TimedOut` at the deadline, `UnexpectedEof` if the other end went.
    pub(super) fn hear(&self, words: &mut [u8]) -> std::io::Result<()> {
        let mut heard = 0;
        while heard < words.len() {
            self.stream.bound_reads(self.left()?)?;
            let mut stream = self.stream;
            match stream.read(&mut words[heard..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => heard += bytes,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
