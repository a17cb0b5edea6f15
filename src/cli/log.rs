//! What the program logs, and where.

use tracing_subscriber::EnvFilter;

/// Logs to standard error what SHOAL_LOG says; errors, if it says nothing.
pub(crate) fn start() {
    let text = std::env::var("SHOAL_LOG").unwrap_or_default();
    // Connections of strangers that come to nothing are no errors of this program.
    let quiet = "error,libp2p=off,yamux=off,multistream_select=off";
    let filter = EnvFilter::try_new(if text.trim().is_empty() { quiet } else { &text });
    let filter = filter.unwrap_or_else(|error| {
        super::note!("SHOAL_LOG is not valid ({error}); logging errors only");
        EnvFilter::new(quiet)
    });
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}
