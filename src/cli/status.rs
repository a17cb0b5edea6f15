//! `shoal status`

use clap::Args;
use shoal::api::state::{Instance, NodeState, State};

use super::output::{Names, rate, short, table};
use super::{ApiOption, Failure, say, size_text};

#[derive(Debug, Args)]
pub(crate) struct Status {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    api: ApiOption,
}

impl Status {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let state: State = self.api.client().get("/v1/shoal/state").await?;
        if self.json {
            say!("{}", serde_json::to_string(&state).unwrap_or_default());
            return Ok(());
        }
        let names = Names::new(state.nodes.iter().map(|node| (node.id.clone(), node.name.clone())));
        nodes(&state);
        links(&state, &names);
        for instance in &state.instances {
            self::instance(instance, &names);
        }
        hops(&state, &names);
        leases(&state, &names);
        for refused in &state.refusals {
            let who = refused.node.as_deref().map(|id| names.name(id)).or_else(|| refused.address.clone());
            say!("not talked to: {}: {}", who.unwrap_or_else(|| "somebody".to_owned()), refused.reason);
        }
        for trouble in &state.troubles {
            say!("trouble: {}: {}; {}", trouble.about, trouble.what, trouble.help);
        }
        Ok(())
    }
}

/// The instruction set that says most about a processor's speed.
fn best(features: &[String]) -> &str {
    let known = ["amx", "avx512", "avx2", "avx", "sve", "i8mm", "dotprod", "neon"];
    known.iter().find_map(|wanted| features.iter().find(|feature| feature.starts_with(wanted))).map_or("cpu", String::as_str)
}

fn devices(node: &NodeState) -> String {
    let words = node.devices.iter().map(|device| match device.kind.as_str() {
        "cpu" => format!("{} threads, {}", device.threads, best(&device.features)),
        "gpu" => device.name.clone(),
        _ => format!("({} unused)", device.name),
    });
    words.collect::<Vec<_>>().join(", ")
}

fn nodes(state: &State) {
    let mut rows = table(&["node", "id", "state", "devices", "models", "api", "memory free", "on offer", "round trip"], 6);
    for node in &state.nodes {
        let own = node.id == state.node;
        let models: Vec<&str> = node.models.iter().map(|model| model.name.as_str()).collect();
        rows.add_row([
            if own { format!("{} *", node.name) } else { node.name.clone() },
            short(&node.id).to_owned(),
            node.state.clone(),
            devices(node),
            models.join(", "),
            node.api.clone().unwrap_or_default(),
            size_text(node.memory_free_bytes),
            size_text(node.memory_offered_bytes),
            node.rtt_ms.filter(|_| !own).map(|rtt| format!("{rtt:.2} ms")).unwrap_or_default(),
        ]);
    }
    say!("nodes (* answers)\n{rows}");
}

fn links(state: &State, names: &Names) {
    if state.links.is_empty() {
        return;
    }
    let mut rows = table(&["from", "to", "round trip", "rate"], 2);
    for link in &state.links {
        let speed = link.bytes_per_second.map(|bytes| format!("{}/s", size_text(bytes as u64)));
        rows.add_row([names.name(&link.from), names.name(&link.to), format!("{:.2} ms", link.rtt_ms), speed.unwrap_or_default()]);
    }
    say!("\nlinks\n{rows}");
}

fn instance(instance: &Instance, names: &Names) {
    if instance.state == "waiting" {
        let why = instance.reason.as_deref().unwrap_or("it fits nowhere");
        let (tokens, by) = (instance.context_tokens, names.name(&instance.conductor));
        return say!("\ninstance {} of {} waits for room for {tokens} tokens: {why}; {by} sees to it", short(&instance.id), instance.model);
    }
    let why = instance.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
    say!(
        "\ninstance {} of {} is {}{why}; {} tokens, predicted {}, conducted by {}",
        short(&instance.id),
        instance.model,
        instance.state,
        instance.context_tokens,
        rate(instance.decode_tok_s),
        names.name(&instance.conductor)
    );
    say!("{}", super::stage_table(&instance.stages));
}

/// What carries activations away from this node.
fn hops(state: &State, names: &Names) {
    if state.hops.is_empty() {
        return;
    }
    let mut rows = table(&["hop to", "by", "at", "link", "round trip", "sent"], 3);
    for hop in &state.hops {
        rows.add_row([
            names.name(&hop.to),
            hop.provider.clone(),
            hop.peer.clone(),
            format!("no. {}", hop.link),
            hop.rtt_ms.map(|rtt| format!("{rtt:.3} ms")).unwrap_or_default(),
            size_text(hop.sent_bytes),
        ]);
    }
    say!("\nwhat carries activations from this node\n{rows}");
}

fn leases(state: &State, names: &Names) {
    say!("\nthis node lends {} of {}", size_text(state.lent.used_bytes), size_text(state.lent.offered_bytes));
    if state.lent.leases.is_empty() {
        return;
    }
    say!("{}", super::pool::lease_table(&state.lent, names));
}
