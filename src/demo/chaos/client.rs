//! The clients of a disturbed cluster: each asks one question after the other and goes on at another node when its own dies.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Chance;
use crate::cli::{Client, ClientError, Exchange, Failure};
use crate::demo::crew::Member;

/// How long an answer may stand still before it counts as lost.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause before the next node is asked.
const PAUSE: Duration = Duration::from_millis(20);

/// A question, and its answer without a disturbance.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Reference {
    question: Value,
    heard: Heard,
}

/// An answer as far as it was heard.
#[derive(Debug, Clone, PartialEq, Default)]
struct Heard {
    text: String,
    tokens: Vec<u64>,
    finish: String,
    usage: Value,
    /// Events, and the id of the last one.
    events: u64,
    last: Option<String>,
}

impl Heard {
    /// Takes an event.
    ///
    /// # Errors
    /// If it does not follow on the one before.
    fn take(&mut self, id: Option<String>, data: &Value) -> Result<(), String> {
        self.events += 1;
        let number = id.as_deref().and_then(|id| id.split('-').next()).and_then(|number| number.parse::<u64>().ok());
        if number != Some(self.events) {
            return Err(format!("event {} came as {id:?}", self.events));
        }
        self.last = id;
        if let Some(usage) = data.get("usage").filter(|usage| usage.is_object()) {
            self.usage = usage.clone();
            // How much of a prompt was there already depends on what ran before.
            self.usage.as_object_mut().and_then(|usage| usage.remove("prompt_tokens_details"));
        }
        let Some(choice) = data.pointer("/choices/0") else { return Ok(()) };
        self.text.push_str(choice.pointer("/delta/content").and_then(Value::as_str).unwrap_or_default());
        self.tokens.extend(choice.get("token_ids").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_u64));
        if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
            self.finish = reason.to_owned();
        }
        Ok(())
    }
}

/// Asks a question and hears the answer to its end.
pub(super) async fn ask_undisturbed(client: &Client, question: Value) -> Result<Reference, Failure> {
    let mut heard = Heard::default();
    let mut events = client.events(Exchange { path: PATH.to_owned(), body: Some(question.clone()), headers: Vec::new() }).await?;
    while let Some(event) = events.recv().await {
        let event = event?;
        heard.take(event.id, &event.data).map_err(Failure::new)?;
    }
    Ok(Reference { question, heard })
}

const PATH: &str = "/v1/chat/completions";

/// What the killer and the clients know of each other.
#[derive(Debug)]
pub(super) struct Board {
    /// The HTTP interfaces of the nodes; none while one is down.
    apis: Mutex<Vec<Option<String>>>,
    events: AtomicU64,
    stop: AtomicBool,
    /// The node and the moment of every event of a client.
    streams: Vec<Mutex<Vec<(usize, Instant)>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Board {
    pub(super) fn new(members: &[Member], streams: usize) -> Self {
        Self {
            apis: Mutex::new(members.iter().map(|member| Some(member.api.clone())).collect()),
            events: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            streams: (0..streams).map(|_| Mutex::default()).collect(),
        }
    }

    /// A node is about to be killed. Who talks to it finds out by itself; nobody else begins to.
    pub(super) fn down(&self, index: usize) {
        if let Some(api) = lock(&self.apis).get_mut(index) {
            *api = None;
        }
    }

    pub(super) fn up(&self, index: usize, member: &Member) {
        if let Some(api) = lock(&self.apis).get_mut(index) {
            *api = Some(member.api.clone());
        }
    }

    /// No question is begun any more.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Events of all streams so far.
    pub(super) fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// Some node that is up.
    fn any(&self, chance: &mut Chance) -> Option<(usize, String)> {
        let apis = lock(&self.apis);
        let up: Vec<(usize, &String)> = apis.iter().enumerate().filter_map(|(index, api)| Some((index, api.as_ref()?))).collect();
        let (index, api) = up.get(usize::try_from(chance.below(up.len() as u64)).unwrap_or(0))?;
        Some((*index, (*api).clone()))
    }

    fn heard(&self, stream: usize, node: usize) {
        self.events.fetch_add(1, Ordering::Relaxed);
        lock(&self.streams[stream]).push((node, Instant::now()));
    }

    /// What came of each stream: from which node, and when.
    pub(super) fn all_heard(&self) -> Vec<Vec<(usize, Instant)>> {
        self.streams.iter().map(|stream| lock(stream).clone()).collect()
    }
}

/// What came of a client's answers.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) streams: u32,
    /// How often it went on at another node.
    pub(super) resumed: u32,
    pub(super) failed: Vec<String>,
    pub(super) different: Vec<String>,
}

/// A client.
#[derive(Debug)]
pub(super) struct Asker {
    number: usize,
    board: std::sync::Arc<Board>,
    references: std::sync::Arc<Vec<Reference>>,
    chance: Chance,
    /// What its requests are called by, beside their numbers.
    name: u64,
    outcome: Outcome,
}

/// How it went with one connection.
enum Went {
    /// The answer has ended.
    Done,
    /// The node went away.
    Lost,
    /// The answer is lost.
    Failed(String),
    Different(String),
}

impl Asker {
    pub(super) fn new(
        number: usize,
        board: std::sync::Arc<Board>,
        references: std::sync::Arc<Vec<Reference>>,
        seed: u64,
        name: u64,
    ) -> Self {
        Self { number, board, references, chance: Chance(seed), name, outcome: Outcome::default() }
    }

    /// Asks until it is told to stop.
    pub(super) async fn run(mut self) -> Outcome {
        while !self.board.stop.load(Ordering::Relaxed) {
            let place = usize::try_from(self.chance.below(self.references.len() as u64)).unwrap_or(0);
            let reference = self.references[place].clone();
            self.outcome.streams += 1;
            let name = format!("{:016x}{:016x}", self.name, ((self.number as u64) << 32) | u64::from(self.outcome.streams));
            let what = format!("stream {}.{} (question {place}, request {name})", self.number, self.outcome.streams);
            match self.ask(&reference, &name).await {
                Went::Failed(why) => self.outcome.failed.push(format!("{what}: {why}")),
                Went::Different(why) => self.outcome.different.push(format!("{what}: {why}")),
                Went::Done | Went::Lost => {}
            }
        }
        self.outcome
    }

    async fn ask(&mut self, reference: &Reference, name: &str) -> Went {
        let mut heard = Heard::default();
        let mut last = Instant::now();
        let mut begun = false;
        loop {
            if last.elapsed() > PATIENCE {
                return Went::Failed(format!("nothing came for {} s after {} events", PATIENCE.as_secs(), heard.events));
            }
            let before = heard.events;
            if let Some((node, api)) = self.board.any(&mut self.chance) {
                if begun {
                    self.outcome.resumed += 1;
                }
                begun = true;
                match self.listen(reference, name, (node, &Client::new(&api)), &mut heard).await {
                    Went::Lost => {}
                    Went::Done if heard == (Heard { last: heard.last.clone(), ..reference.heard.clone() }) => return Went::Done,
                    Went::Done => return Went::Different(difference(&reference.heard, &heard)),
                    other => return other,
                }
            }
            if heard.events > before {
                last = Instant::now();
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Hears the answer, or the rest of it, from a node, as long as that is there.
    async fn listen(&self, reference: &Reference, name: &str, (node, client): (usize, &Client), heard: &mut Heard) -> Went {
        let exchange = match &heard.last {
            None => Exchange {
                path: PATH.to_owned(),
                body: Some(reference.question.clone()),
                headers: vec![("x-shoal-request", name.to_owned())],
            },
            Some(last) => {
                Exchange { path: format!("/v1/shoal/requests/{name}"), body: None, headers: vec![("last-event-id", last.clone())] }
            }
        };
        let lost = |error: ClientError| match error {
            // A node that is killed while it answers may have begun to say something.
            ClientError::NoNode { .. } | ClientError::Broken { .. } => Went::Lost,
            ClientError::Refused { status: 409, message, .. } => Went::Different(message),
            ClientError::Refused { status, code, message } => Went::Failed(format!("{status} {code}: {message}")),
        };
        let opened = tokio::time::timeout(PATIENCE, client.events(exchange)).await;
        let mut events = match opened {
            Ok(Ok(events)) => events,
            Ok(Err(error)) => return lost(error),
            Err(_) => return Went::Failed(format!("no answer for {} s", PATIENCE.as_secs())),
        };
        loop {
            match tokio::time::timeout(PATIENCE, events.recv()).await {
                Ok(Some(Ok(event))) => {
                    if let Err(why) = heard.take(event.id, &event.data) {
                        return Went::Different(why);
                    }
                    self.board.heard(self.number, node);
                }
                Ok(Some(Err(error))) => return lost(error),
                Ok(None) => return Went::Done,
                Err(_) => return Went::Failed(format!("nothing came for {} s after {} events", PATIENCE.as_secs(), heard.events)),
            }
        }
    }
}

fn difference(expected: &Heard, heard: &Heard) -> String {
    let same = expected.tokens.iter().zip(&heard.tokens).take_while(|(one, other)| one == other).count();
    format!(
        "{} tokens and not {}, the first {same} alike; {} events and not {}; `{}` and not `{}`; {} and not {}",
        heard.tokens.len(),
        expected.tokens.len(),
        heard.events,
        expected.events,
        heard.finish,
        expected.finish,
        heard.usage,
        expected.usage,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_that_is_missing_or_comes_twice_is_noticed() {
        let event = |text: &str| json!({"choices": [{"delta": {"content": text}, "token_ids": [1]}]});
        let id = |text: &str| Some(text.to_owned());
        let mut heard = Heard::default();
        heard.take(id("1-00"), &event("a")).unwrap();
        heard.take(id("2-00"), &event("b")).unwrap();
        assert_eq!((heard.text.as_str(), heard.tokens.len(), heard.last.as_deref()), ("ab", 2, Some("2-00")));
        for wrong in [id("2-00"), id("4-00"), None, id("x")] {
            assert!(heard.clone().take(wrong, &event("c")).is_err());
        }
    }
}
