//! The token scheduler of an instance: which rows run in which step, and who is told what came out.

mod actor;
mod answers;
mod fair;
mod find;
mod machine;
mod pages;
mod room;
mod service;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_fair;

pub use actor::{Pipeline, SchedulerActor, SchedulerArguments, SchedulerMsg, SchedulerState};
pub use answers::{Answers, CHUNK_TOKENS_MAX, GRACE, KEEP, Pushed, UNATTENDED_MAX, UNREAD_TIMEOUT};
pub use find::Finding;
pub use machine::{AnswerError, CHUNK_LEAST, Event, Finish, GAP, Scheduler, SchedulerConfig, SubmitError, Timing, Work};
pub use service::{Generate, GenerateCall, GenerateRefusal, GenerateReply};
