//! Why a command failed, for people and for scripts.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use shoal::{CatalogError, NodeError, StartError};
use shoal_actors::catalog::{FetchError, StoreError};

/// Exit codes. They are documented in the program's help and stay as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    Failed = 1,
    Usage = 2,
    NoModel = 3,
    NoNode = 4,
    NotPlaced = 5,
    InUse = 6,
    NotFetched = 7,
    Interrupted = 130,
}

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    help: Option<String>,
    exit: Exit,
}

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), help: None, exit: Exit::Failed }
    }

    pub(crate) fn exit(self, exit: Exit) -> Self {
        Self { exit, ..self }
    }

    pub(crate) fn help(self, help: impl Into<String>) -> Self {
        Self { help: Some(help.into()), ..self }
    }

    pub(crate) fn interrupted() -> Self {
        Self::new("interrupted").exit(Exit::Interrupted)
    }

    pub(crate) fn is_interruption(&self) -> bool {
        self.exit == Exit::Interrupted
    }

    /// Tells the user, and gives the program's exit code.
    pub(crate) fn report(self) -> ExitCode {
        let code = ExitCode::from(self.exit as u8);
        let mut stderr = std::io::stderr().lock();
        let _ = match (self.exit, stderr.is_terminal()) {
            // The user knows.
            (Exit::Interrupted, _) => Ok(()),
            (_, true) => writeln!(stderr, "{:?}", miette::Report::new(self)),
            (_, false) => match &self.help {
                Some(help) => writeln!(stderr, "error: {self}\n  help: {help}"),
                None => writeln!(stderr, "error: {self}"),
            },
        };
        code
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl miette::Diagnostic for Failure {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.help.as_ref().map(|help| Box::new(help) as Box<dyn fmt::Display>)
    }
}

impl From<CatalogError> for Failure {
    fn from(error: CatalogError) -> Self {
        let exit = match &error {
            CatalogError::Reference(_) | CatalogError::NotHere { .. } => Exit::NoModel,
            CatalogError::Store(StoreError::Absent { .. } | StoreError::Disk { doing: "open", .. }) => Exit::NoModel,
            CatalogError::Fetch(FetchError::Cancelled) => Exit::Interrupted,
            CatalogError::Fetch(_) => Exit::NotFetched,
            _ => Exit::Failed,
        };
        Self::new(error.to_string()).exit(exit)
    }
}

impl From<StartError> for Failure {
    fn from(error: StartError) -> Self {
        let exit = match &error {
            error if error.is_in_use() => Exit::InUse,
            StartError::TooMuchMemory { .. } => Exit::Usage,
            _ => Exit::Failed,
        };
        Self::new(error.to_string()).exit(exit)
    }
}

impl From<NodeError> for Failure {
    fn from(error: NodeError) -> Self {
        let exit = match &error {
            NodeError::UnknownModel { .. } => Exit::NoModel,
            NodeError::NotPlaced(_) => Exit::NotPlaced,
            _ => Exit::Failed,
        };
        Self::new(error.to_string()).exit(exit)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        CatalogError::Store(error).into()
    }
}
