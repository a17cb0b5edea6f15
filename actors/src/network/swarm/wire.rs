//! Frames on a byte stream: four bytes of length, little-endian, then so many bytes.

use std::io;

use bytes::{Buf, Bytes, BytesMut};
use futures::{AsyncRead, AsyncReadExt};

/// Bytes of the length before a frame.
const LENGTH_BYTES: usize = 4;

/// How much is read at once. Also how far memory for a frame runs ahead of the bytes that have arrived of it, so a
/// peer that only announces long frames costs nothing.
const CHUNK_BYTES: usize = 32 * 1024;

/// Why there is no next frame.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    /// The stream ended, between two frames or within one.
    #[error("the stream ended")]
    Ended,
    /// The peer announces a frame that is longer than it may be.
    #[error("it announced a frame of {bytes} bytes, more than the {limit} allowed")]
    TooLong {
        /// What it announced.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The stream broke.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Takes frames off a stream. Dropping a [`FrameReader::next`] loses nothing.
pub(super) struct FrameReader<R> {
    stream: R,
    arrived: BytesMut,
    chunk: Box<[u8]>,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub(super) fn new(stream: R) -> Self {
        Self { stream, arrived: BytesMut::new(), chunk: vec![0; CHUNK_BYTES].into_boxed_slice() }
    }

    /// The next frame, of at most `limit` bytes.
    pub(super) async fn next(&mut self, limit: usize) -> Result<Bytes, WireError> {
        loop {
            if let Some(length) = self.arrived.first_chunk::<LENGTH_BYTES>() {
                let bytes = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
                if bytes > limit {
                    return Err(WireError::TooLong { bytes, limit });
                }
                if self.arrived.len() >= LENGTH_BYTES + bytes {
                    self.arrived.advance(LENGTH_BYTES);
                    return Ok(self.arrived.split_to(bytes).freeze());
                }
            }
            let count = self.stream.read(&mut self.chunk).await?;
            if count == 0 {
                return Err(WireError::Ended);
            }
            self.arrived.extend_from_slice(&self.chunk[..count]);
        }
    }

    /// Waits until the stream ends, and ignores what comes. For the refusing end, whose refusal must arrive.
    pub(super) async fn drain(&mut self) {
        while matches!(self.stream.read(&mut self.chunk).await, Ok(count) if count > 0) {}
    }
}

/// Appends a frame to what will be written.
pub(super) fn put_frame(buffer: &mut Vec<u8>, frame: &[u8]) {
    // No frame is longer than `FRAME_BYTES_MAX`, which fits.
    let length = u32::try_from(frame.len()).unwrap_or(u32::MAX);
    buffer.extend_from_slice(&length.to_le_bytes());
    buffer.extend_from_slice(frame);
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::io::Cursor;
    use proptest::prelude::*;

    use super::*;

    fn read_all(bytes: &[u8], limit: usize) -> (Vec<Bytes>, WireError) {
        let mut reader = FrameReader::new(Cursor::new(bytes));
        let mut frames = vec![];
        loop {
            match reader.next(limit).now_or_never().expect("the whole stream is there") {
                Ok(frame) => frames.push(frame),
                Err(error) => return (frames, error),
            }
        }
    }

    #[test]
    fn golden_bytes() {
        let mut buffer = vec![];
        put_frame(&mut buffer, b"abc");
        put_frame(&mut buffer, b"");
        assert_eq!(buffer, [3, 0, 0, 0, b'a', b'b', b'c', 0, 0, 0, 0]);
    }

    #[test]
    fn a_long_length_is_refused_before_anything_is_kept() {
        let (frames, error) = read_all(&[0xff, 0xff, 0xff, 0xff, 1, 2, 3], 100);
        assert!(frames.is_empty());
        assert!(matches!(error, WireError::TooLong { bytes: 0xffff_ffff, limit: 100 }));
        let mut reader = FrameReader::new(Cursor::new(&[0, 0, 64, 0, 1][..]));
        assert!(matches!(reader.next(1 << 23).now_or_never(), Some(Err(WireError::Ended))));
        assert!(reader.arrived.capacity() < 2 * CHUNK_BYTES, "memory follows what arrives");
    }

    proptest! {
        #[test]
        fn frames_read_back(frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..20), cut in 0..5_usize) {
            let mut buffer = vec![];
            for frame in &frames {
                put_frame(&mut buffer, frame);
            }
            let whole = buffer.len().saturating_sub(cut);
            let (read, error) = read_all(&buffer[..whole], 200);
            prop_assert!(matches!(error, WireError::Ended));
            let complete = if cut == 0 || frames.is_empty() { frames.len() } else { read.len() };
            prop_assert_eq!(read.len(), complete);
            prop_assert!(read.iter().zip(&frames).all(|(read, frame)| read == frame));
        }

        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let (frames, _) = read_all(&bytes, 64);
            prop_assert!(frames.iter().all(|frame| frame.len() <= 64));
        }
    }
}
