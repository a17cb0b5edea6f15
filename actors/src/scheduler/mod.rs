//! The token scheduler of an instance: which rows run in which step, and who is told what came out.

mod actor;
mod answers;
mod find;
mod machine;
mod pages;
mod service;
#[cfg(test)]
mod tests;

pub use actor::{Pipeline, SchedulerActor, SchedulerArguments, SchedulerMsg, SchedulerState};
pub use answers::{Answers, CHUNK_TOKENS_MAX, GRACE, KEEP, Pushed, UNATTENDED_MAX, UNREAD_TIMEOUT};
pub use find::Finding;
pub use machine::{AnswerError, Event, Finish, Scheduler, SchedulerConfig, SubmitError, Timing, Work};
pub use service::{Generate, GenerateCall, GenerateRefusal, GenerateReply};
