//! The task of one connection: the handshake, then frames in both directions.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::io::{ReadHalf, WriteHalf};
use futures::{AsyncReadExt, AsyncWriteExt};
use libp2p::Stream;
use libp2p::swarm::ConnectionId;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::wire::{FrameReader, WireError, put_frame};
use crate::env::{Clock, FRAME_BYTES_MAX, Instant, NetworkEvent, NetworkSink};
use crate::ids::NodeId;
use crate::network::hello::{HELLO_BYTES_MAX, Handshake, Hello, Output, Refusal};
use crate::network::queue::FrameQueue;

/// How long a peer has for the handshake.
const HELLO_TIME: Duration = Duration::from_secs(5);

/// How long the last words of a connection have to arrive.
const LAST_WORDS_TIME: Duration = Duration::from_secs(1);

/// What a peer may say between its proof and the decision about the connection.
const WORDS_MAX: usize = 8;

/// Frames are written together up to about this many bytes.
const BATCH_BYTES: usize = 64 * 1024;

/// Bytes of frames from one peer that may be received and not yet dropped by their readers. Beyond it the connection
/// is not read, and TCP slows the peer down.
const UNREAD_BYTES_MAX: usize = 2 * FRAME_BYTES_MAX;

/// A connection that carries frames.
pub(super) struct Link {
    pub(super) queue: FrameQueue,
    /// Whether frames are delivered. Held while one is, so that none comes after the peer was reported as gone.
    open: Mutex<bool>,
    unread: Arc<Semaphore>,
    /// When something was heard last, in nanoseconds of the node's clock.
    heard: AtomicU64,
}

impl Link {
    pub(super) fn new(now: Instant) -> Self {
        let unread = Arc::new(Semaphore::new(UNREAD_BYTES_MAX));
        Self { queue: FrameQueue::new(), open: Mutex::new(true), unread, heard: AtomicU64::new(now.as_nanos()) }
    }

    /// When something was heard last.
    pub(super) fn heard(&self) -> Instant {
        Instant::from_nanos(self.heard.load(Ordering::Relaxed))
    }

    /// Delivers and takes nothing any more. What is queued may still be sent.
    pub(super) fn shut(&self) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.queue.close();
    }

    fn deliver(&self, sink: &NetworkSink, event: NetworkEvent) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if *open {
            sink(event);
        }
    }
}

/// A frame that counts as unread until it is dropped.
struct Unread {
    frame: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Unread {
    fn as_ref(&self) -> &[u8] {
        &self.frame
    }
}

/// What the driver wants of a connection.
pub(super) enum Order {
    /// Send this.
    Tell(Hello),
    /// Carry frames from now on; say so first if `accept`.
    Adopt { accept: bool, link: Arc<Link> },
    /// End; after what is queued was sent, if `drain`.
    Close { drain: bool },
}

/// What a connection tells the driver.
#[derive(Debug)]
pub(super) enum Report {
    Greeted {
        session: u128,
    },
    Verified {
        boot: u64,
        session: u128,
    },
    Said(Hello),
    Refused {
        by_us: bool,
        refusal: Refusal,
    },
    /// It is over; with what the peer did wrong, if it did.
    Ended {
        misbehaved: Option<String>,
    },
}

pub(super) struct Connection {
    pub(super) id: ConnectionId,
    pub(super) peer: NodeId,
    pub(super) stream: Stream,
    pub(super) handshake: Handshake,
    pub(super) first: Vec<Output>,
    pub(super) reports: UnboundedSender<(ConnectionId, Report)>,
    pub(super) orders: UnboundedReceiver<Order>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) sink: NetworkSink,
}

/// How a connection ends.
enum End {
    Quiet,
    Misbehaved(String),
}

impl From<WireError> for End {
    fn from(error: WireError) -> Self {
        match error {
            WireError::Ended | WireError::Io(_) => Self::Quiet,
            WireError::TooLong { .. } => Self::Misbehaved(error.to_string()),
        }
    }
}

impl From<std::io::Error> for End {
    fn from(_: std::io::Error) -> Self {
        Self::Quiet
    }
}

/// Runs a connection to its end.
pub(super) async fn run(connection: Connection) {
    let Connection { id, peer, stream, handshake, first, reports, orders, clock, sink } = connection;
    let (read, write) = stream.split();
    let mut talk = Talk { id, reader: FrameReader::new(read), write, handshake, reports, orders, clock };
    let deadline = talk.clock.sleep_until(talk.clock.now() + HELLO_TIME);
    let agreed = tokio::select! {
        biased;
        agreed = talk.agree(first) => agreed,
        () = deadline => Err(End::Misbehaved("it did not finish the handshake in time".to_owned())),
    };
    let end = match agreed {
        Ok(link) => talk.carry(&link, peer, &sink).await,
        Err(end) => end,
    };
    let misbehaved = match end {
        End::Quiet => None,
        End::Misbehaved(text) => Some(text),
    };
    talk.report(Report::Ended { misbehaved });
}

struct Talk {
    id: ConnectionId,
    reader: FrameReader<ReadHalf<Stream>>,
    write: WriteHalf<Stream>,
    handshake: Handshake,
    reports: UnboundedSender<(ConnectionId, Report)>,
    orders: UnboundedReceiver<Order>,
    clock: Arc<dyn Clock>,
}

impl Talk {
    fn report(&self, report: Report) {
        // The driver is gone only when the network has stopped.
        let _ = self.reports.send((self.id, report));
    }

    async fn tell(&mut self, hello: &Hello) -> Result<(), End> {
        let mut buffer = vec![];
        put_frame(&mut buffer, &hello.encode());
        self.write.write_all(&buffer).await?;
        self.write.flush().await?;
        Ok(())
    }

    async fn hear(&mut self) -> Result<Hello, End> {
        let frame = self.reader.next(HELLO_BYTES_MAX).await?;
        Hello::decode(&frame).ok_or_else(|| End::Misbehaved("it said something that is no part of the handshake".to_owned()))
    }

    /// Lets the last words arrive: closes our direction and waits for the peer to close its own.
    async fn part(&mut self) -> End {
        let deadline = self.clock.sleep_until(self.clock.now() + LAST_WORDS_TIME);
        let goodbye = async {
            if self.write.close().await.is_ok() {
                self.reader.drain().await;
            }
        };
        tokio::select! {
            biased;
            () = goodbye => {}
            () = deadline => {}
        }
        End::Quiet
    }

    /// The handshake, and waiting for the word that this connection is the one.
    async fn agree(&mut self, mut outputs: Vec<Output>) -> Result<Arc<Link>, End> {
        let mut verified = false;
        loop {
            for output in std::mem::take(&mut outputs) {
                match output {
                    Output::Send(hello) => self.tell(&hello).await?,
                    Output::Greeted { session } => self.report(Report::Greeted { session }),
                    Output::Verified { boot, session } => {
                        verified = true;
                        self.report(Report::Verified { boot, session });
                    }
                    Output::Refused { by_us, refusal } => {
                        self.report(Report::Refused { by_us, refusal });
                        return Err(if by_us { self.part().await } else { End::Quiet });
                    }
                    Output::Broken(text) => return Err(End::Misbehaved(text.to_owned())),
                }
            }
            if verified {
                break;
            }
            let hello = self.hear().await?;
            outputs = self.handshake.step(hello);
        }
        // After its last word the peer sends frames, which are not for here.
        let mut last_word = false;
        let mut words_left = WORDS_MAX;
        loop {
            tokio::select! {
                biased;
                order = self.orders.recv() => match order {
                    Some(Order::Tell(hello)) => self.tell(&hello).await?,
                    Some(Order::Adopt { accept, link }) => {
                        if accept {
                            self.tell(&Hello::Accept).await?;
                        }
                        return Ok(link);
                    }
                    Some(Order::Close { .. }) => return Err(self.part().await),
                    None => return Err(End::Quiet),
                },
                frame = self.reader.next(HELLO_BYTES_MAX), if !last_word => {
                    match Hello::decode(&frame?) {
                        Some(Hello::Refusal(refusal)) => {
                            self.report(Report::Refused { by_us: false, refusal });
                            return Err(End::Quiet);
                        }
                        Some(_) if words_left == 0 => return Err(End::Misbehaved("it does not come to an end with the handshake".to_owned())),
                        Some(hello) => {
                            words_left -= 1;
                            last_word = matches!(hello, Hello::Accept | Hello::Duplicate);
                            self.report(Report::Said(hello));
                        }
                        None => return Err(End::Misbehaved("it said something that is no part of the handshake".to_owned())),
                    }
                }
            }
        }
    }

    /// Frames in both directions.
    async fn carry(&mut self, link: &Link, peer: NodeId, sink: &NetworkSink) -> End {
        let Self { reader, write, orders, .. } = self;
        let mut reading = pin!(receive(reader, link, peer, sink, &*self.clock));
        let mut writing = pin!(transmit(write, link));
        loop {
            tokio::select! {
                biased;
                order = orders.recv() => match order {
                    // The queue was closed before the order was given, so the writer ends by itself.
                    Some(Order::Close { drain: true }) => {}
                    Some(Order::Close { drain: false }) | None => return End::Quiet,
                    Some(Order::Tell(_) | Order::Adopt { .. }) => {}
                },
                end = &mut reading => return end,
                () = &mut writing => return End::Quiet,
            }
        }
    }
}

async fn receive(reader: &mut FrameReader<ReadHalf<Stream>>, link: &Link, peer: NodeId, sink: &NetworkSink, clock: &dyn Clock) -> End {
    loop {
        let frame = match reader.next(FRAME_BYTES_MAX).await {
            Ok(frame) => frame,
            Err(error) => return error.into(),
        };
        link.heard.store(clock.now().as_nanos(), Ordering::Relaxed);
        let counted = u32::try_from(frame.len().max(1)).unwrap_or(u32::MAX);
        let Ok(permit) = Arc::clone(&link.unread).acquire_many_owned(counted).await else { return End::Quiet };
        let frame = Bytes::from_owner(Unread { frame, _permit: permit });
        link.deliver(sink, NetworkEvent::Frame { peer, frame });
    }
}

async fn transmit(write: &mut WriteHalf<Stream>, link: &Link) {
    let mut batch = Vec::with_capacity(BATCH_BYTES);
    while let Some(frame) = link.queue.pop().await {
        batch.clear();
        batch.shrink_to(BATCH_BYTES);
        put_frame(&mut batch, &frame);
        while batch.len() < BATCH_BYTES
            && let Some(frame) = link.queue.try_pop()
        {
            put_frame(&mut batch, &frame);
        }
        if write.write_all(&batch).await.is_err() || write.flush().await.is_err() {
            return;
        }
    }
    let _ = write.close().await;
}
