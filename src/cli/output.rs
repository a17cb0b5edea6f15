//! What commands print. Whoever closes the other end of a pipe has read enough, so that is no error.

use std::collections::BTreeMap;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use shoal::api::state::{PlanLine, Stage};

use super::size::size_text;

/// A line on standard output.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stdout().lock(), $($text)*);
    }};
}

/// A line on standard error.
macro_rules! note {
    ($($text:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr().lock(), $($text)*);
    }};
}

pub(crate) use {note, say};

/// A table with these columns; those after `left` are numbers.
pub(crate) fn table(columns: &[&str], left: usize) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Dynamic).set_header(columns.to_vec());
    for column in table.column_iter_mut().skip(left) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// Tokens a second, in words.
pub(crate) fn rate(tokens_per_second: f64) -> String {
    if tokens_per_second < 10.0 { format!("{tokens_per_second:.2} tok/s") } else { format!("{tokens_per_second:.1} tok/s") }
}

/// The first digits of an id.
pub(crate) fn short(id: &str) -> &str {
    id.get(..10).unwrap_or(id)
}

/// Layers as people count them: the last one is part of it.
pub(crate) fn layers([start, end]: [u32; 2]) -> String {
    match end.saturating_sub(start) {
        0 => "none".to_owned(),
        1 => format!("{start}"),
        _ => format!("{start}–{}", end - 1),
    }
}

/// The stages of a plan or an instance.
pub(crate) fn stage_table(stages: &[Stage]) -> Table {
    let mut table = table(&["stage", "node", "id", "layers", "memory leased"], 3);
    for (index, stage) in stages.iter().enumerate() {
        table.add_row([
            index.to_string(),
            stage.name.clone(),
            short(&stage.node).to_owned(),
            layers(stage.layers),
            size_text(stage.lease_bytes),
        ]);
    }
    table
}

/// A plan, with what it is expected to do.
pub(crate) fn plan_table(plan: &PlanLine) -> String {
    format!(
        "{}\npredicted: prefill {}, decode {}, first token after {:.2} s (512-token prompt)\nbottleneck: {}",
        stage_table(&plan.stages),
        rate(plan.prefill_tok_s),
        rate(plan.decode_tok_s),
        plan.first_token_seconds,
        plan.bottleneck
    )
}

/// Names of nodes by their ids.
#[derive(Debug, Default)]
pub(crate) struct Names(BTreeMap<String, String>);

impl Names {
    pub(crate) fn new(nodes: impl Iterator<Item = (String, String)>) -> Self {
        Self(nodes.collect())
    }

    pub(crate) fn name(&self, id: &str) -> String {
        match self.0.get(id) {
            Some(name) => format!("{name} ({})", short(id)),
            None => short(id).to_owned(),
        }
    }
}
