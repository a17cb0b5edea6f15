//! Looking for a request by its id alone: it may be answered by any instance that a node conducts, or only be remembered there for
//! another conductor.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::service::{Generate, GenerateRefusal, GenerateReply};
use crate::conductor::journal::JournalStore;
use crate::ids::RequestId;
use crate::request::GenerateRequest;
use crate::service::Replier;

/// A question that every scheduler of a node gets a copy of. Whoever knows the request answers; when the last copy is dropped and
/// nobody has, the journal does.
#[derive(Clone)]
pub struct Finding(Arc<Search>);

impl fmt::Debug for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Finding({:?})", self.0.request)
    }
}

struct Search {
    request: RequestId,
    journal: Arc<Mutex<JournalStore>>,
    reply: Mutex<Option<Replier<Generate>>>,
}

impl Finding {
    /// Answers a call through `reply`.
    pub fn new(request: RequestId, journal: Arc<Mutex<JournalStore>>, reply: Option<Replier<Generate>>) -> Self {
        Self(Arc::new(Search { request, journal, reply: Mutex::new(reply) }))
    }

    /// It is this one; `prompt_tokens` if whoever says so conducts its instance.
    pub fn found(&self, request: &GenerateRequest, prompt_tokens: Option<u32>) {
        if let Some(reply) = self.0.reply.lock().unwrap_or_else(PoisonError::into_inner).take() {
            reply.reply(Ok(GenerateReply::Found { request: Box::new(request.clone()), prompt_tokens }));
        }
    }
}

impl Drop for Search {
    fn drop(&mut self) {
        let Some(reply) = self.reply.get_mut().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let remembered = self.journal.lock().unwrap_or_else(PoisonError::into_inner).find(self.request).cloned();
        reply.reply(match remembered {
            Some(request) => Ok(GenerateReply::Found { request: Box::new(request), prompt_tokens: None }),
            None => Err(GenerateRefusal::UnknownRequest(self.request)),
        });
    }
}
