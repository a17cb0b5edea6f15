//! The token scheduler of an instance: which rows run in which step.

mod machine;
#[cfg(test)]
mod tests;

pub use machine::{AnswerError, Event, Finish, Scheduler, SchedulerConfig, SubmitError, Timing, Work};
