//! Talks to a node's HTTP interface.

use std::io::{BufRead, BufReader};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use super::failure::{Exit, Failure};

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a question about state may take.
const ASK_TIMEOUT: Duration = Duration::from_secs(30);
/// How long placing a model may take.
const WORK_TIMEOUT: Duration = Duration::from_secs(900);
/// Events of a stream that wait to be read.
const EVENTS_MAX: usize = 256;

/// Why a node's answer was not had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ClientError {
    /// Nobody answers.
    #[error("no node answers at {address}: {reason}")]
    NoNode { address: String, reason: String },
    /// The node refuses.
    #[error("{message}")]
    Refused { status: u16, code: String, message: String },
    /// The answer broke off or makes no sense.
    #[error("the answer of the node at {address} cannot be used: {reason}")]
    Broken { address: String, reason: String },
}

impl ClientError {
    /// Whether the node says that nobody has the model.
    pub(crate) fn is_no_model(&self) -> bool {
        matches!(self, Self::Refused { code, .. } if code == "model_not_found")
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        let failure = Self::new(error.to_string());
        match &error {
            ClientError::NoNode { .. } => failure.exit(Exit::NoNode).help("start one with `shoal up`, or name another with --api ADDR"),
            ClientError::Refused { code, status, .. } => match code.as_str() {
                "model_not_found" | "instance_not_found" => failure.exit(Exit::NoModel),
                "not_placed" => failure.exit(Exit::NotPlaced),
                "invalid_model" => failure,
                // What was written on the command line and cannot be used.
                _ if *status == 400 => failure.exit(Exit::Usage),
                _ => failure,
            },
            ClientError::Broken { .. } => failure,
        }
    }
}

/// What to ask a stream for.
#[derive(Debug, Clone)]
pub(crate) struct Exchange {
    /// The path, with the query.
    pub(crate) path: String,
    /// What is sent; none: nothing, by GET.
    pub(crate) body: Option<Value>,
    /// Headers beside the usual ones.
    pub(crate) headers: Vec<(&'static str, String)>,
}

/// An event of a stream.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Told {
    /// Its id, if it has one.
    pub(crate) id: Option<String>,
    /// What it says.
    pub(crate) data: Value,
}

/// A node's HTTP interface.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    address: String,
    agent: ureq::Agent,
}

impl Client {
    /// `address` is host and port, with or without `http://`.
    pub(crate) fn new(address: &str) -> Self {
        let address = address.trim().trim_start_matches("http://").trim_end_matches('/').trim_end_matches("/v1").to_owned();
        // A proxy cannot reach what is on this machine or its network.
        let config = ureq::Agent::config_builder().proxy(None).http_status_as_error(false).timeout_connect(Some(CONNECT_TIMEOUT));
        Self { address, agent: config.build().new_agent() }
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    fn no_node(&self, error: &ureq::Error) -> ClientError {
        ClientError::NoNode { address: self.address.clone(), reason: error.to_string() }
    }

    fn broken(&self, reason: impl ToString) -> ClientError {
        ClientError::Broken { address: self.address.clone(), reason: reason.to_string() }
    }

    /// Runs a blocking exchange on a thread of its own.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, ClientError> + Send + 'static,
    ) -> Result<T, ClientError> {
        let client = self.clone();
        let (send, receive) = oneshot::channel();
        let thread = std::thread::Builder::new().name("shoal-client".to_owned()).spawn(move || drop(send.send(work(&client))));
        thread.map_err(|error| self.broken(format!("cannot start a thread: {error}")))?;
        receive.await.map_err(|_| self.broken("the exchange was broken off"))?
    }

    fn refusal(&self, response: &mut ureq::http::Response<ureq::Body>) -> ClientError {
        let status = response.status().as_u16();
        let body = response.body_mut().read_to_string().unwrap_or_default();
        let value: Value = serde_json::from_str(&body).unwrap_or_default();
        let text = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
        match text("/error/message") {
            Some(message) => ClientError::Refused { status, code: text("/error/code").unwrap_or_default(), message },
            None => self.broken(format!("HTTP status {status}; is this a shoal node?")),
        }
    }

    fn read<T: DeserializeOwned>(&self, mut response: ureq::http::Response<ureq::Body>) -> Result<T, ClientError> {
        if !response.status().is_success() {
            return Err(self.refusal(&mut response));
        }
        let body = response.body_mut().read_to_string().map_err(|error| self.broken(error))?;
        serde_json::from_str(&body).map_err(|error| self.broken(error))
    }

    /// Asks for something.
    pub(crate) async fn get<T: DeserializeOwned + Send + 'static>(&self, path: &'static str) -> Result<T, ClientError> {
        self.blocking(move |client| {
            let request = client.agent.get(client.url(path)).config().timeout_global(Some(ASK_TIMEOUT)).build();
            client.read(request.call().map_err(|error| client.no_node(&error))?)
        })
        .await
    }

    /// Asks for something to be done.
    pub(crate) async fn post<T: DeserializeOwned + Send + 'static>(&self, path: &'static str, body: Value) -> Result<T, ClientError> {
        self.blocking(move |client| {
            let request = client.agent.post(client.url(path)).config().timeout_global(Some(WORK_TIMEOUT)).build();
            client.read(request.send_json(&body).map_err(|error| client.no_node(&error))?)
        })
        .await
    }

    /// Asks for a stream of events. Its end without an error means that it was told to its end.
    pub(crate) async fn events(&self, asked: Exchange) -> Result<mpsc::Receiver<Result<Told, ClientError>>, ClientError> {
        let (events, receive) = mpsc::channel(EVENTS_MAX);
        let (opened, open) = oneshot::channel();
        let client = self.clone();
        let work = move || {
            let url = client.url(&asked.path);
            let sent = match &asked.body {
                Some(body) => {
                    let request = client.agent.post(url);
                    asked.headers.iter().fold(request, |request, (name, value)| request.header(*name, value)).send_json(body)
                }
                None => {
                    let request = client.agent.get(url);
                    asked.headers.iter().fold(request, |request, (name, value)| request.header(*name, value)).call()
                }
            };
            let mut response = match sent {
                Ok(response) if response.status().is_success() => response,
                Ok(mut response) => return drop(opened.send(Err(client.refusal(&mut response)))),
                Err(error) => return drop(opened.send(Err(client.no_node(&error)))),
            };
            if opened.send(Ok(())).is_err() {
                return;
            }
            let mut done = false;
            let mut id = None;
            for line in BufReader::new(response.body_mut().as_reader()).lines() {
                let event = match line {
                    Ok(line) => match line.strip_prefix("data:").map(str::trim) {
                        None => {
                            id = line.strip_prefix("id:").map(|text| text.trim().to_owned()).or(id);
                            continue;
                        }
                        Some("[DONE]") => {
                            done = true;
                            break;
                        }
                        Some(data) => serde_json::from_str(data).map_err(|error| client.broken(error)),
                    },
                    Err(error) => Err(client.broken(error)),
                };
                let event = event.and_then(|value: Value| match value.pointer("/error/message").and_then(Value::as_str) {
                    None => Ok(Told { id: id.take(), data: value }),
                    Some(message) => {
                        let code = value.pointer("/error/code").and_then(Value::as_str).unwrap_or_default().to_owned();
                        Err(ClientError::Refused { status: 500, code, message: message.to_owned() })
                    }
                });
                let last = event.is_err();
                // If nobody listens any more, closing the connection tells the node.
                if events.blocking_send(event).is_err() || last {
                    return;
                }
            }
            if !done {
                let _ = events.blocking_send(Err(client.broken("it ends in the middle")));
            }
        };
        let thread = std::thread::Builder::new().name("shoal-client".to_owned()).spawn(work);
        thread.map_err(|error| self.broken(format!("cannot start a thread: {error}")))?;
        open.await.map_err(|_| self.broken("the exchange was broken off"))??;
        Ok(receive)
    }
}
