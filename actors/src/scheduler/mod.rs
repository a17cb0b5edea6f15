//! The token scheduler of an instance: which rows run in which step, and who is told what came out.

mod actor;
mod answers;
mod machine;
mod service;
#[cfg(test)]
mod tests;

pub use actor::{Pipeline, SchedulerActor, SchedulerArguments, SchedulerMsg, SchedulerState};
pub use answers::{Answers, KEEP, Pushed, UNREAD_TIMEOUT};
pub use machine::{AnswerError, Event, Finish, Scheduler, SchedulerConfig, SubmitError, Timing, Work};
pub use service::{Generate, GenerateCall, GenerateRefusal, GenerateReply};
