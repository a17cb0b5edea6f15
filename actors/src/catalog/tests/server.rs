//! A small HTTP server, real down to the socket, that can be told to misbehave.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A request as it came.
#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// What is sent back.
#[derive(Debug, Clone, Default)]
pub(super) struct Response {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
    /// Close the connection after that many bytes of the body, though all were promised.
    pub(super) cut_after: Option<usize>,
    /// Wait after that many bytes of the body until the server stops.
    pub(super) stall_after: Option<usize>,
    /// Do not say how long the body is.
    pub(super) no_length: bool,
}

impl Response {
    pub(super) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, body: body.into(), ..Self::default() }
    }

    pub(super) fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    pub(super) fn cut(mut self, after: usize) -> Self {
        self.cut_after = Some(after);
        self
    }

    pub(super) fn stall(mut self, after: usize) -> Self {
        self.stall_after = Some(after);
        self
    }

    /// A file as a storage service serves it: with a validator and byte ranges.
    pub(super) fn file(request: &Request, body: &[u8], etag: &str) -> Self {
        let first = request.header("range").and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
        let same = request.header("if-range").is_none_or(|wanted| wanted == etag);
        match first {
            Some(first) if same && first >= body.len() => Self::new(416, "").with("content-range", format!("bytes */{}", body.len())),
            Some(first) if same => Self::new(206, &body[first..])
                .with("content-range", format!("bytes {first}-{}/{}", body.len() - 1, body.len()))
                .with("etag", etag),
            _ => Self::new(200, body).with("etag", etag),
        }
    }
}

type Handler = dyn Fn(&Request) -> Response + Send + Sync;

/// Listens on a port of this machine until it is dropped.
pub(super) struct Server {
    pub(super) address: String,
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub(super) fn start(handler: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
        let address = listener.local_addr().expect("has an address").to_string();
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let handler: Arc<Handler> = Arc::new(handler);
        let (stopped, log) = (Arc::clone(&stop), Arc::clone(&seen));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                let (handler, log, stopped) = (Arc::clone(&handler), Arc::clone(&log), Arc::clone(&stopped));
                if let Ok(stream) = stream {
                    std::thread::spawn(move || serve(stream, &*handler, &log, &stopped));
                }
            }
        });
        Self { address, stop, seen }
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub(super) fn seen(&self) -> Vec<Request> {
        self.seen.lock().expect("not poisoned").clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(&self.address);
    }
}

fn serve(mut stream: TcpStream, handler: &Handler, log: &Mutex<Vec<Request>>, stop: &AtomicBool) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let path = line.split(' ').nth(1)?.to_owned();
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    let request = Request { path, headers };
    let response = handler(&request);
    log.lock().expect("not poisoned").push(request);
    let mut head = format!("HTTP/1.1 {} x\r\nconnection: close\r\n", response.status);
    if !response.no_length {
        head += &format!("content-length: {}\r\n", response.body.len());
    }
    for (name, value) in &response.headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += "\r\n";
    stream.write_all(head.as_bytes()).ok()?;
    let end = response.cut_after.or(response.stall_after).unwrap_or(response.body.len()).min(response.body.len());
    stream.write_all(&response.body[..end]).ok()?;
    while response.stall_after.is_some() && !stop.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(10));
    }
    Some(())
}
