//! Measuring links between two processes of this machine, without a node.
//!
//! The measuring process starts the other one and sends it invitations over its standard input, one a line: where to dial, with
//! what. Nobody else can read them.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_transport::Effects;
use shoal_transport::bench;
use shoal_transport::env::SystemRng;
use shoal_transport::link::LinkOptions;
#[cfg(target_os = "linux")]
use shoal_transport::provider::shm::{ShmOptions, ShmProvider};
use shoal_transport::provider::tcp::{TcpOptions, TcpProvider};
use shoal_transport::provider::{AcceptError, DialError, Endpoint, ExpectError, Provider, ProviderKind, StartError, Ticket};

use super::{BenchError, BenchOptions, LinkBenchRow};
use crate::env::{SystemClock, SystemSpawner};

/// How long the two processes may take to meet.
const MEET_TIMEOUT: Duration = Duration::from_secs(15);
/// How long the other process answers on one link.
const ANSWER_TIME: Duration = Duration::from_secs(600);

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalError {
    /// A provider did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A link could not be expected.
    #[error(transparent)]
    Expect(#[from] ExpectError),
    /// The other process was not told.
    #[error("the other process cannot be told where to dial: {0}")]
    Tell(std::io::Error),
    /// It did not come.
    #[error("the other process made no link: {0}")]
    Accept(#[from] AcceptError),
    /// The invitation makes no sense, or none of this machine's providers can take it up.
    #[error("an invitation that cannot be taken up")]
    Invitation,
    /// The dial went wrong.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The link broke.
    #[error("the {provider} link cannot be measured: {source}")]
    Measure {
        /// What carried it.
        provider: ProviderKind,
        /// What happened.
        source: BenchError,
    },
}

/// Where to dial, with what.
#[derive(Serialize, Deserialize)]
struct Invitation {
    endpoint: Endpoint,
    ticket: Ticket,
    slot_bytes: u32,
}

/// The measuring process.
#[derive(Debug)]
pub struct Local {
    effects: Effects,
    providers: Vec<Arc<dyn Provider>>,
}

impl Local {
    /// Every way between processes that this machine has.
    ///
    /// # Errors
    /// If a provider does not start.
    pub fn new(runtime: tokio::runtime::Handle) -> Result<Self, LocalError> {
        let effects = effects(runtime);
        let providers = providers(&effects)?;
        Ok(Self { effects, providers })
    }

    /// Measures each provider, and calls `each` with every row until that says `false`. `other` is the standard input of a process
    /// that runs [`answer_invitations`]. Blocks.
    ///
    /// # Errors
    /// [`LocalError`].
    pub fn measure(
        &self,
        options: &BenchOptions,
        other: &mut dyn Write,
        each: &mut dyn FnMut(LinkBenchRow) -> bool,
    ) -> Result<(), LocalError> {
        for provider in &self.providers {
            let kind = provider.kind();
            let failed = |source| LocalError::Measure { provider: kind, source };
            let slot_bytes = options.slot_bytes().map_err(failed)?;
            let Some(endpoint) = provider.endpoints().first().copied() else { continue };
            let ticket = Ticket::random(&*self.effects.rng);
            let expected = provider.expect(&ticket, LinkOptions::for_payload(slot_bytes))?;
            let invitation = serde_json::to_string(&Invitation { endpoint, ticket, slot_bytes }).map_err(|_| LocalError::Invitation)?;
            writeln!(other, "{invitation}").and_then(|()| other.flush()).map_err(LocalError::Tell)?;
            let link = expected.accept(self.effects.after(MEET_TIMEOUT))?;
            let mut more = true;
            bench::measure(link, options, &self.effects, &mut |row| {
                more = each(LinkBenchRow::new(kind, &row));
                more
            })
            .map_err(failed)?;
            if !more {
                break;
            }
        }
        Ok(())
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.providers.iter().for_each(|provider| provider.shutdown());
    }
}

/// The other process: takes up each invitation that comes from `from`, until that ends. Blocks.
///
/// # Errors
/// [`LocalError`].
pub fn answer_invitations(runtime: tokio::runtime::Handle, from: &mut dyn BufRead) -> Result<(), LocalError> {
    let effects = effects(runtime);
    let providers = providers(&effects)?;
    let mut line = String::new();
    loop {
        line.clear();
        // The end of the one that measures is the end of this one.
        if !from.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
            return Ok(());
        }
        let Invitation { endpoint, ticket, slot_bytes } = serde_json::from_str(&line).map_err(|_| LocalError::Invitation)?;
        let provider = providers.iter().find(|provider| provider.kind() == endpoint.kind()).ok_or(LocalError::Invitation)?;
        let link = provider.dial(&endpoint, &ticket, LinkOptions::for_payload(slot_bytes), effects.after(MEET_TIMEOUT))?;
        let answered = bench::answer(link, slot_bytes, u64::MAX, effects.after(ANSWER_TIME), &effects);
        answered.map_err(|source| LocalError::Measure { provider: endpoint.kind(), source })?;
    }
}

fn effects(runtime: tokio::runtime::Handle) -> Effects {
    Effects { clock: Arc::new(SystemClock), rng: Arc::new(SystemRng), spawner: Arc::new(SystemSpawner::new(runtime)) }
}

/// Best first.
fn providers(effects: &Effects) -> Result<Vec<Arc<dyn Provider>>, LocalError> {
    let mut providers: Vec<Arc<dyn Provider>> = Vec::new();
    #[cfg(target_os = "linux")]
    providers.push(Arc::new(ShmProvider::new(effects.clone(), ShmOptions::default())?));
    let tcp = TcpOptions { listen: vec![([127, 0, 0, 1], 0).into()], ..TcpOptions::default() };
    providers.push(Arc::new(TcpProvider::new(effects.clone(), tcp)?));
    Ok(providers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn invitations_are_taken_up_and_nonsense_is_refused() {
        let runtime = tokio::runtime::Handle::current();
        let result = answer_invitations(runtime.clone(), &mut &b"{\"endpoint\": 1}\n"[..]);
        assert!(matches!(result, Err(LocalError::Invitation)));
        assert!(answer_invitations(runtime.clone(), &mut &b""[..]).is_ok());
        let (reader, mut writer) = std::io::pipe().unwrap();
        let answering = {
            let runtime = runtime.clone();
            std::thread::spawn(move || answer_invitations(runtime, &mut std::io::BufReader::new(reader)))
        };
        let local = Local::new(runtime).unwrap();
        let options = BenchOptions { sizes: vec![64, 5000], time: Duration::from_millis(1) };
        let mut rows = Vec::new();
        let measuring = std::thread::spawn(move || {
            local.measure(&options, &mut writer, &mut |row| {
                rows.push((row.provider, row.bytes));
                true
            })?;
            Ok::<_, LocalError>(rows)
        });
        let rows = measuring.join().unwrap().unwrap();
        answering.join().unwrap().unwrap();
        let providers = if cfg!(target_os = "linux") { &["shm", "tcp"][..] } else { &["tcp"] };
        let expected: Vec<(String, u32)> = providers.iter().flat_map(|name| [64, 5000].map(|bytes| ((*name).to_owned(), bytes))).collect();
        assert_eq!(rows, expected);
    }
}
