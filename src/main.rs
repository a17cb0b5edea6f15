//! The shoal program.
fn main() {}
