//! Links and channels against what the machine can do: how near they are to the limits, measured between two processes.
//!
//! Each thing is measured in many short rounds that alternate with its limit, because other programs disturb both: what is
//! printed is the best tenth of the rounds, and the ratio of the two.
//!
//! Shared memory has two limits for a short message: `word` is the ping-pong of one atomic word, which is all that two processors can
//! do, and `word+64` that of a word with 64 bytes behind it, always in the same place.
//!
//! ```sh
//! cargo bench --bench limits               # a table
//! cargo bench --bench limits -- --json     # {"rows": [{"provider", "what", "bytes", "value", "unit", "limit", "ratio"}]}
//! ```
#![allow(clippy::print_stdout)]
// A program of its own, not a part of a node.
#![allow(clippy::disallowed_methods)]

#[cfg(target_os = "linux")]
mod bare;
#[cfg(target_os = "linux")]
mod both;
#[cfg(target_os = "linux")]
mod table;
#[cfg(target_os = "linux")]
mod world;

#[cfg(target_os = "linux")]
fn main() -> world::Outcome<()> {
    let has = |word: &str| std::env::args().any(|argument| argument == word);
    if has("--peer") {
        return both::peer();
    }
    let rows = both::measure(if has("--quick") { 3 } else { 30 })?;
    table::print(&rows, has("--json"));
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("this needs memory files, which this system does not have");
}
