//! What `shoal up` says while it runs: who comes and goes, who is not talked to, and what does not work.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use shoal::env::Trouble;
use shoal::{MemberEvent, Node, NodeId};

use super::{say, size_text};

/// Refusals that are remembered, so that none is announced over and over.
const REFUSALS_MAX: usize = 1000;

/// What has been said, so that nothing is said twice.
#[derive(Debug)]
pub(super) struct News {
    json: bool,
    joined: BTreeSet<NodeId>,
    refused: BTreeSet<(Option<NodeId>, String)>,
    troubles: BTreeMap<String, Trouble>,
}

impl News {
    pub(super) fn new(json: bool) -> Self {
        Self { json, joined: BTreeSet::new(), refused: BTreeSet::new(), troubles: BTreeMap::new() }
    }

    /// Says who is there already: they joined before anybody listened for events.
    pub(super) fn present(&mut self, node: &Node) {
        let there: Vec<NodeId> = node.view().present().map(|(id, _)| id).filter(|id| *id != node.id()).collect();
        for who in there {
            self.joined(node, who);
        }
    }

    fn joined(&mut self, node: &Node, who: NodeId) {
        if !self.joined.insert(who) {
            return;
        }
        let view = node.view();
        let card = view.get(who).map(|member| &member.card);
        let name = card.map_or("a node", |card| card.name.as_str());
        if self.json {
            say!("{}", json!({"event": "joined", "node": who.to_string(), "name": name}));
        } else {
            let memory = card.map_or(0, |card| card.memory_offered_bytes);
            let platform = card.map_or("", |card| card.platform.as_str());
            say!("+ {name} ({}) joined: {platform}, {} on offer", who.short(), size_text(memory));
        }
    }

    pub(super) fn member(&mut self, node: &Node, event: MemberEvent) {
        let who = event.node();
        if who == node.id() {
            return;
        }
        let (word, line) = match event {
            MemberEvent::Joined { .. } => return self.joined(node, who),
            MemberEvent::Left { .. } => ("left", "left"),
            MemberEvent::Dead { .. } => ("dead", "is gone: it does not answer any more"),
            MemberEvent::Suspect { .. } => ("suspect", "does not answer"),
            MemberEvent::Alive { .. } => ("alive", "answers again"),
            _ => return,
        };
        if matches!(event, MemberEvent::Left { .. } | MemberEvent::Dead { .. }) {
            self.joined.remove(&who);
        }
        let view = node.view();
        let name = view.get(who).map_or("a node", |member| member.card.name.as_str());
        if self.json {
            say!("{}", json!({"event": word, "node": who.to_string(), "name": name}));
            return;
        }
        let sign = match event {
            MemberEvent::Suspect { .. } => '?',
            MemberEvent::Alive { .. } => '+',
            _ => '-',
        };
        say!("{sign} {name} ({}) {line}", who.short());
    }

    /// Says who cannot be talked to, and what has begun or ceased not to work.
    pub(super) fn look(&mut self, node: &Node) {
        self.refusals(node);
        let now: BTreeMap<String, Trouble> = node.troubles().into_iter().map(|trouble| (trouble.about.clone(), trouble)).collect();
        for trouble in now.values().filter(|trouble| !self.troubles.contains_key(&trouble.about)) {
            let Trouble { about, what, help } = trouble;
            if self.json {
                say!("{}", json!({"event": "trouble", "about": about, "what": what, "help": help}));
            } else {
                say!("! {about}: {what}; {help}");
            }
        }
        for about in self.troubles.keys().filter(|about| !now.contains_key(*about)) {
            if self.json {
                say!("{}", json!({"event": "trouble_over", "about": about}));
            } else {
                say!("+ {about}: works now");
            }
        }
        self.troubles = now;
    }

    fn refusals(&mut self, node: &Node) {
        for refusal in node.discovery().refusals() {
            if self.refused.len() >= REFUSALS_MAX {
                self.refused.clear();
            }
            if !self.refused.insert((refusal.peer, refusal.reason.clone())) {
                continue;
            }
            let address = refusal.address.map(|address| address.to_string());
            if self.json {
                let peer = refusal.peer.map(|peer| peer.to_string());
                say!("{}", json!({"event": "refused", "node": peer, "address": address, "reason": refusal.reason}));
            } else {
                let who = refusal.peer.map(|peer| peer.short()).or(address).unwrap_or_else(|| "somebody".to_owned());
                say!("! {who} is not talked to: {}", refusal.reason);
            }
        }
    }
}
