//! Text from an instance, wherever it runs, as a stream at this node.

use std::sync::Arc;
use std::time::Duration;

use crate::conductor::instance::{InstanceState, InstanceSummary};
use crate::env::Clock;
use crate::ids::{InstanceId, NodeId, RequestId};
use crate::membership::Membership;
use crate::request::{Chunk, End, Finish, GenerateRequest, READ_WAIT, Timing, TokenEvent, Unread};
use crate::scheduler::{CHUNK_TOKENS_MAX, Generate, GenerateCall, GenerateRefusal, GenerateReply};
use crate::service::{CallError, Services};

/// How long a conductor may take to accept a request: it reads the prompt and has another member remember it.
const SUBMIT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an answer to a read may be under way, beyond what the conductor waits for tokens.
const READ_SLACK: Duration = Duration::from_millis(1500);

/// How long an instance that nobody seems to conduct may take to be taken over by another member.
const SUCCESSION: Duration = Duration::from_secs(10);
/// How long one that somebody conducts may take to answer again: it loads what was lost.
const RECOVERY: Duration = Duration::from_secs(30);
/// How often it is looked for.
const LOOK: Duration = Duration::from_millis(100);
/// How long a node may take to say whether it knows a request.
const FIND_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a request is looked for while nodes do not answer: those that are gone are noticed by then.
const FIND: Duration = Duration::from_secs(6);
/// How long nobody has to know it before it counts as unknown: a node that has just started finds the others by then.
const SETTLED: Duration = Duration::from_secs(1);

/// Finds who conducts an instance on the cards of the nodes that are there: of several nodes that say they do, the one with the
/// highest term.
pub(super) fn locate(membership: Membership) -> impl Fn(InstanceId) -> Option<NodeId> {
    move |instance| {
        let view = membership.view();
        let known = view.present().flat_map(|(node, member)| member.card.instances.iter().map(move |known| (node, known)));
        // What waits for room is conducted by nobody.
        let conducted = |known: &InstanceSummary| !matches!(known.state, InstanceState::Waiting(_));
        let here = known.filter(|(node, known)| known.instance == instance && known.term.node == *node && conducted(known));
        here.max_by_key(|(_, known)| known.term).map(|(node, _)| node)
    }
}

/// What a generation needs of its node.
#[derive(Clone)]
pub struct Reach {
    /// Peers.
    pub services: Services,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Who is there, and what they conduct.
    pub membership: Membership,
}

impl Reach {
    /// Calls a conductor. One that is gone is not waited for.
    async fn call(&self, conductor: NodeId, call: GenerateCall, patience: Duration) -> Result<GenerateReply, GenerateError> {
        let remote = self.services.remote::<Generate>(conductor);
        match self.membership.while_present(conductor, remote.call(call, patience)).await {
            Some(Ok(answer)) => Ok(answer?),
            Some(Err(error)) => Err(GenerateError::Unreachable(error)),
            None => Err(GenerateError::Unreachable(CallError::NotConnected { node: conductor })),
        }
    }
}

/// What the nodes that are there say of a request.
#[derive(Debug, PartialEq)]
enum Seen {
    /// Its instance is conducted there; so many tokens has its prompt.
    Conducted(NodeId, Box<GenerateRequest>, u32),
    /// Its instance has no conductor that answers, but members who remember it.
    Remembered(Box<GenerateRequest>),
    /// Nobody knows it.
    Nowhere,
    /// Nobody knows it, but not everybody answered.
    Unclear,
}

fn seen(answers: impl IntoIterator<Item = (NodeId, Result<GenerateReply, GenerateError>)>) -> Seen {
    let mut best = Seen::Nowhere;
    for (node, answer) in answers {
        best = match (answer, best) {
            (Ok(GenerateReply::Found { request, prompt_tokens: Some(tokens) }), _) => return Seen::Conducted(node, request, tokens),
            (Ok(GenerateReply::Found { request, prompt_tokens: None }), _) => Seen::Remembered(request),
            (Err(GenerateError::Unreachable(_)), Seen::Nowhere) => Seen::Unclear,
            (_, best) => best,
        };
    }
    best
}

impl Reach {
    /// Asks everybody who is there for a request.
    async fn ask_all(&self, request: RequestId) -> Seen {
        let nodes: Vec<NodeId> = self.membership.view().present().map(|(node, _)| node).collect();
        let asked = nodes.into_iter().map(|node| async move { (node, self.call(node, GenerateCall::Find(request), FIND_TIMEOUT).await) });
        seen(futures::future::join_all(asked).await)
    }
}

impl std::fmt::Debug for Reach {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Reach")
    }
}

/// Why a request gave no text, or no more of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The conductor turned it away.
    #[error(transparent)]
    Refused(#[from] GenerateRefusal),
    /// The conductor cannot be reached.
    #[error("the node that conducts the model does not answer: {0}; send the request again to place the model on the nodes that are left")]
    Unreachable(CallError),
    /// The instance broke in the middle.
    #[error("{0}")]
    Broken(String),
    /// Nobody knows the request, but not everybody could be asked.
    #[error("request {0} was not found, and a node that may know it does not answer; try again")]
    NotFoundYet(RequestId),
}

fn other_question() -> GenerateError {
    GenerateError::Broken("the conductor gave an answer to another question".to_owned())
}

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Piece {
    /// One more token.
    Token(TokenEvent),
    /// The end, with text that was held back until it was known.
    End {
        /// Why.
        reason: Finish,
        /// The last text.
        text: String,
        /// How long the parts took, as the conductor measured.
        timing: Timing,
    },
}

/// An answer as it is made. Dropping it before its end cancels the request, unless that says otherwise ([`Unread`]).
///
/// It goes on when another node takes the instance over: the request is submitted there again, which is the same request, and read
/// from where it was.
pub struct Generation {
    reach: Reach,
    conductor: NodeId,
    instance: InstanceId,
    request: RequestId,
    submitted: GenerateRequest,
    prompt_tokens: u32,
    after: u32,
    pending: std::collections::VecDeque<TokenEvent>,
    end: Option<End>,
    ended: bool,
}

impl std::fmt::Debug for Generation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generation").field("request", &self.request).field("after", &self.after).finish_non_exhaustive()
    }
}

impl Generation {
    /// Submits a request to the conductor of its instance.
    pub async fn start(reach: Reach, conductor: NodeId, request: GenerateRequest) -> Result<Self, GenerateError> {
        let submit = GenerateCall::Submit(Box::new(request.clone()));
        // It is there before it is submitted: whoever goes in the meantime takes it back.
        let mut generation = Self::unsubmitted(reach, conductor, request);
        let answer = generation.reach.call(conductor, submit, SUBMIT_TIMEOUT).await;
        match answer {
            Ok(GenerateReply::Accepted { prompt_tokens }) => {
                generation.prompt_tokens = prompt_tokens;
                Ok(generation)
            }
            Ok(_) => Err(generation.broken(other_question())),
            Err(error) => Err(generation.broken(error)),
        }
    }

    /// Goes on with a request that some node knows, from the answer's beginning. `None` if nobody knows it; what `at_once` says of a
    /// request that may be new.
    pub(super) async fn find(reach: Reach, request: RequestId, at_once: bool) -> Result<Option<Self>, GenerateError> {
        let began = reach.clock.now();
        loop {
            let seen = reach.ask_all(request).await;
            let took = reach.clock.now().since(began);
            match seen {
                Seen::Conducted(conductor, request, prompt_tokens) => {
                    let mut generation = Self::unsubmitted(reach, conductor, *request);
                    generation.prompt_tokens = prompt_tokens;
                    return Ok(Some(generation));
                }
                Seen::Remembered(request) => {
                    let error = GenerateError::Refused(GenerateRefusal::UnknownInstance(request.instance));
                    let nobody = reach.membership.me();
                    return Self::elsewhere(reach, nobody, *request, error).await.map(Some);
                }
                Seen::Nowhere if at_once || took >= SETTLED => return Ok(None),
                Seen::Unclear if took >= FIND => return Err(GenerateError::NotFoundYet(request)),
                Seen::Nowhere | Seen::Unclear => {}
            }
            reach.clock.sleep_until(reach.clock.now() + LOOK).await;
        }
    }

    /// Submits a request to whoever takes the instance over from a conductor that answered with `error`.
    pub(super) async fn elsewhere(
        reach: Reach,
        conductor: NodeId,
        request: GenerateRequest,
        error: GenerateError,
    ) -> Result<Self, GenerateError> {
        let mut generation = Self::unsubmitted(reach, conductor, request);
        match generation.go_on_elsewhere(error).await {
            Ok(()) => Ok(generation),
            Err(error) => Err(generation.broken(error)),
        }
    }

    fn unsubmitted(reach: Reach, conductor: NodeId, request: GenerateRequest) -> Self {
        Self {
            reach,
            conductor,
            instance: request.instance,
            request: request.id,
            submitted: request,
            prompt_tokens: 0,
            after: 0,
            pending: std::collections::VecDeque::new(),
            end: None,
            ended: false,
        }
    }

    /// The request's name.
    pub fn id(&self) -> RequestId {
        self.request
    }

    /// What was asked.
    pub fn request(&self) -> &GenerateRequest {
        &self.submitted
    }

    /// The instance that answers.
    pub fn instance(&self) -> InstanceId {
        self.instance
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Tokens of the answer so far.
    pub fn tokens(&self) -> u32 {
        self.after - u32::try_from(self.pending.len()).unwrap_or(0)
    }

    /// The next piece; `None` after the end or an error.
    pub async fn next(&mut self) -> Option<Result<Piece, GenerateError>> {
        loop {
            if let Some(token) = self.pending.pop_front() {
                return Some(Ok(Piece::Token(token)));
            }
            if self.ended {
                return None;
            }
            if let Some(end) = self.end.take() {
                self.ended = true;
                return Some(match end {
                    End::Finished { reason, text, timing } => Ok(Piece::End { reason, text, timing }),
                    End::Failed(reason) => Err(GenerateError::Broken(reason)),
                });
            }
            if let Err(error) = self.read().await {
                return Some(Err(self.broken(error)));
            }
        }
    }

    /// Reads on, at another node if need be, and gives how many tokens came.
    async fn read(&mut self) -> Result<usize, GenerateError> {
        let chunk: Chunk = loop {
            let read = GenerateCall::Read { instance: self.instance, request: self.request, after: self.after };
            match self.reach.call(self.conductor, read, READ_WAIT + READ_SLACK).await {
                Ok(GenerateReply::Chunk(chunk)) => break chunk,
                Ok(_) => return Err(other_question()),
                Err(error) => self.go_on_elsewhere(error).await?,
            }
        };
        // A chunk that was asked for twice brings tokens that are known.
        let new: Vec<TokenEvent> = chunk.tokens.into_iter().filter(|token| token.index >= self.after).collect();
        let count = new.len();
        self.after += u32::try_from(count).unwrap_or(0);
        self.pending.extend(new);
        self.end = chunk.end;
        Ok(count)
    }

    /// What there is of the answer by now, without waiting for more of it, and its end if it has ended. The request goes on.
    pub async fn so_far(mut self) -> Result<(Vec<TokenEvent>, Option<End>), GenerateError> {
        while self.end.is_none() {
            match self.read().await {
                Ok(count) if count >= CHUNK_TOKENS_MAX => {}
                Ok(_) => break,
                Err(error) => return Err(self.broken(error)),
            }
        }
        // Whoever only looks in does not end it by going.
        self.ended = true;
        Ok((self.pending.drain(..).collect(), self.end.take()))
    }

    /// After `error`: finds who conducts the instance now and submits the request there, as the same request.
    async fn go_on_elsewhere(&mut self, error: GenerateError) -> Result<(), GenerateError> {
        let for_good = GenerateRefusal::OtherRequest(self.request);
        match &error {
            GenerateError::Refused(GenerateRefusal::Invalid(_) | GenerateRefusal::Busy(_)) | GenerateError::Broken(_) => return Err(error),
            GenerateError::Refused(refusal) if *refusal == for_good => return Err(error),
            _ => {}
        }
        let began = self.reach.clock.now();
        let mut seen = false;
        loop {
            if let Some(conductor) = locate(self.reach.membership.clone())(self.instance) {
                seen = true;
                let submit = GenerateCall::Submit(Box::new(self.submitted.clone()));
                match self.reach.call(conductor, submit, SUBMIT_TIMEOUT).await {
                    Ok(GenerateReply::Accepted { prompt_tokens }) => {
                        (self.conductor, self.prompt_tokens) = (conductor, prompt_tokens);
                        return Ok(());
                    }
                    Err(error @ GenerateError::Refused(GenerateRefusal::Invalid(_) | GenerateRefusal::OtherRequest(_))) => {
                        return Err(error);
                    }
                    // Not yet, or not any more.
                    Ok(_) | Err(_) => {}
                }
            }
            if self.reach.clock.now().since(began) >= if seen { RECOVERY } else { SUCCESSION } {
                return Err(error);
            }
            self.reach.clock.sleep_until(self.reach.clock.now() + LOOK).await;
        }
    }

    fn broken(&mut self, error: GenerateError) -> GenerateError {
        self.ended = true;
        error
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if !self.ended && self.end.is_none() {
            let (instance, request) = (self.instance, self.request);
            let last = match self.submitted.unread {
                Unread::Cancel => GenerateCall::Cancel { instance, request },
                Unread::Wait => GenerateCall::Leave { instance, request },
                Unread::GoOn => return,
            };
            // If the conductor cannot be told, it notices after a while that nobody reads.
            let _ = self.reach.services.remote::<Generate>(self.conductor).cast(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_engine::sampler::SamplingParams;

    use super::*;
    use crate::request::Prompt;

    #[test]
    fn a_conductor_knows_better_than_a_journal_and_silence_is_no_answer() {
        let node = |number| NodeId([number; 32]);
        let asked = |text: &str| {
            Box::new(GenerateRequest {
                id: RequestId(1),
                instance: InstanceId(2),
                prompt: Prompt::Text(text.to_owned()),
                sampling: SamplingParams::default(),
                max_tokens: None,
                stop: Vec::new(),
                ignore_end: false,
                unread: Unread::Wait,
                shape: String::new(),
                client: crate::request::Client::default(),
                priority: crate::request::Priority::Normal,
            })
        };
        let unknown = || (node(1), Err(GenerateError::Refused(GenerateRefusal::UnknownRequest(RequestId(1)))));
        let silent = || (node(2), Err(GenerateError::Unreachable(CallError::NotConnected { node: node(2) })));
        let remembered = || (node(3), Ok(GenerateReply::Found { request: asked("x"), prompt_tokens: None }));
        let conducted = || (node(4), Ok(GenerateReply::Found { request: asked("x"), prompt_tokens: Some(5) }));
        assert_eq!(seen([unknown(), unknown()]), Seen::Nowhere);
        assert_eq!(seen([unknown(), silent(), unknown()]), Seen::Unclear);
        assert_eq!(seen([silent(), remembered(), silent()]), Seen::Remembered(asked("x")));
        assert_eq!(seen([silent(), remembered(), conducted(), remembered()]), Seen::Conducted(node(4), asked("x"), 5));
        assert!(asked("x").asks_the_same(&GenerateRequest { instance: InstanceId(9), shape: "y".to_owned(), ..*asked("x") }));
        assert!(!asked("x").asks_the_same(&asked("y")));
    }
}
