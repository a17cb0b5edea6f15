//! The cluster's state and plans as they are told over HTTP. What is here stays; fields are only added.

use serde::{Deserialize, Serialize};

use crate::card::{DeviceCard, DeviceKind, ModelOnDisk};
use crate::env::Trouble;
use crate::lease::{Beneficiary, LeaseState, LeaseView};
use crate::{InstanceState, InstanceSummary, MemberState, Node, NodeId, PathHealth, Plan};

/// What one node knows of its cluster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The id of the node that says so.
    pub node: String,
    /// Where its control network listens.
    pub listening: Vec<String>,
    /// Everybody known, in order of ids; those who are gone stay for some minutes.
    pub nodes: Vec<NodeState>,
    /// Measured links.
    pub links: Vec<LinkLine>,
    /// What carries each hop of a pipeline that leads away from this node.
    #[serde(default)]
    pub hops: Vec<HopLine>,
    /// Placed models.
    pub instances: Vec<Instance>,
    /// What this node lends.
    pub lent: Lending,
    /// What this node holds, its own memory included.
    pub held: Vec<Holding>,
    /// Peers that are there and cannot be talked to.
    pub refusals: Vec<RefusedPeer>,
    /// What keeps this node from finding others, or others from finding it, at the moment.
    #[serde(default)]
    pub troubles: Vec<TroubleLine>,
    /// Where this node keeps models; told to programs of its own machine only.
    #[serde(default)]
    pub models_folder: Option<String>,
}

/// Something that does not work at the moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TroubleLine {
    /// What it is about, e.g. `mDNS` or `peer 10.0.0.7:4100`.
    pub about: String,
    /// What happened.
    pub what: String,
    /// What to do.
    pub help: String,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeState {
    /// Its id: 64 hexadecimal digits.
    pub id: String,
    /// Its name, for people.
    pub name: String,
    /// `alive`, `suspect`, `dead` or `left`.
    pub state: String,
    /// Whether the node that answers is connected to it, or is it.
    pub connected: bool,
    /// There and back for a small message, in milliseconds.
    pub rtt_ms: Option<f64>,
    /// The program's version.
    pub version: String,
    /// Operating system and architecture.
    pub platform: String,
    /// Cores of its host.
    pub cores: u32,
    /// Memory of its host, in bytes.
    pub memory_total_bytes: u64,
    /// Memory that it lends, in bytes.
    pub memory_offered_bytes: u64,
    /// What of that is free, in bytes.
    pub memory_free_bytes: u64,
    /// Its processors.
    pub devices: Vec<Device>,
    /// Models on its disk.
    pub models: Vec<ModelOnDisk>,
    /// Where peers reach it.
    pub addresses: Vec<String>,
    /// Where its HTTP interface is.
    pub api: Option<String>,
}

/// A processor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// `cpu`, `gpu` or `unused gpu`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Instruction sets in use.
    pub features: Vec<String>,
    /// Threads in use.
    pub threads: u32,
    /// Memory of its own, in bytes.
    pub memory_bytes: u64,
}

/// A hop of a pipeline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HopLine {
    /// The id of the node that it leads to.
    pub to: String,
    /// What carries it now: `memory`, `shm`, `verbs`, `tcp`.
    pub provider: String,
    /// Where that leads.
    pub peer: String,
    /// How many links have carried it, this one included.
    pub link: u64,
    /// There and back on the link, in milliseconds, once it is known.
    pub rtt_ms: Option<f64>,
    /// Bytes that were sent on the link.
    pub sent_bytes: u64,
}

impl HopLine {
    fn of((to, hop): (NodeId, PathHealth)) -> Self {
        Self {
            to: to.to_string(),
            provider: hop.provider.to_string(),
            peer: hop.peer,
            link: hop.epoch,
            rtt_ms: hop.link.rtt.map(milliseconds),
            sent_bytes: hop.link.sent_bytes,
        }
    }
}

/// A measured link.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkLine {
    /// Who measured.
    pub from: String,
    /// To whom.
    pub to: String,
    /// There and back for a small message, in milliseconds.
    pub rtt_ms: f64,
    /// Bytes a second, if measured.
    pub bytes_per_second: Option<f64>,
}

/// A stage of a plan or an instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// The id of its node.
    pub node: String,
    /// The node's name, if known.
    pub name: String,
    /// Its layers: the first, and the first that is not its own any more.
    pub layers: [u32; 2],
    /// Memory leased for it, in bytes.
    pub lease_bytes: u64,
}

/// A placed model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Instance {
    /// Its id.
    pub id: String,
    /// The model.
    pub model: String,
    /// SHA-256 of the model's file.
    pub sha256: String,
    /// `leasing`, `loading`, `ready`, `recovering`, `stopping`, `failed`, or `waiting` for room.
    pub state: String,
    /// Why, if it is going down or does not answer.
    pub reason: Option<String>,
    /// The id of the node that conducts it.
    pub conductor: String,
    /// How often it was claimed, by that node and those before it.
    #[serde(default)]
    pub term: u64,
    /// Longest sequence, in tokens.
    pub context_tokens: u32,
    /// Its stages, in the order in which a token passes them.
    pub stages: Vec<Stage>,
    /// Predicted speed of prefill, in tokens a second.
    pub prefill_tok_s: f64,
    /// Predicted speed of decoding one stream, in tokens a second.
    pub decode_tok_s: f64,
}

/// A node's lending.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lending {
    /// Bytes on offer.
    pub offered_bytes: u64,
    /// Bytes lent.
    pub used_bytes: u64,
    /// The part of them that has ended and is not safe to lend again yet.
    pub fenced_bytes: u64,
    /// The leases.
    pub leases: Vec<Lease>,
}

/// A lease, as its owner tells of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// Its id.
    pub id: String,
    /// The id of the node that holds it.
    pub holder: String,
    /// For whom.
    pub beneficiary: String,
    /// The instance it is for, if it is for one.
    pub instance: Option<String>,
    /// For what.
    pub purpose: String,
    /// How much, in bytes.
    pub bytes: u64,
    /// Layers of the stage it belongs to.
    pub layers: Option<[u32; 2]>,
    /// `granted`, `reclaimable` or `fenced`.
    pub state: String,
    /// Seconds until its deadline.
    pub remaining_seconds: f64,
}

/// A lease, as its holder tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// Its id.
    pub id: String,
    /// The id of the node whose memory it is.
    pub owner: String,
    /// For whom.
    pub beneficiary: String,
    /// For what.
    pub purpose: String,
    /// How much, in bytes.
    pub bytes: u64,
}

/// The memory of the whole cluster: who lends what to whom, and for what.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PoolState {
    /// Bytes on offer, of the nodes that told.
    pub offered_bytes: u64,
    /// Bytes lent.
    pub used_bytes: u64,
    /// The part of them that has ended and is not safe to lend again yet.
    pub fenced_bytes: u64,
    /// The nodes, in order of their ids.
    pub nodes: Vec<PoolNode>,
}

/// What a node lends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PoolNode {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// What it says; none if it did not.
    pub lent: Option<Lending>,
    /// Why it did not.
    pub failure: Option<String>,
}

impl PoolState {
    /// As the nodes of the cluster tell it now.
    pub async fn of(node: &Node) -> Self {
        let view = node.view();
        let name = |id| view.get(id).map(|member| member.card.name.clone()).unwrap_or_default();
        let nodes = node.lending().await.into_iter().map(|(id, told)| {
            let (lent, failure) = match told {
                Ok(view) => (Some(Lending::of(&view)), None),
                Err(failure) => (None, Some(failure)),
            };
            PoolNode { id: id.to_string(), name: name(id), lent, failure }
        });
        let nodes: Vec<PoolNode> = nodes.collect();
        let sum = |of: fn(&Lending) -> u64| nodes.iter().filter_map(|node| node.lent.as_ref()).map(of).sum();
        Self {
            offered_bytes: sum(|lent| lent.offered_bytes),
            used_bytes: sum(|lent| lent.used_bytes),
            fenced_bytes: sum(|lent| lent.fenced_bytes),
            nodes,
        }
    }
}

/// A peer that cannot be talked to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedPeer {
    /// Its id, if known.
    pub node: Option<String>,
    /// Where it is, if known.
    pub address: Option<String>,
    /// Why.
    pub reason: String,
}

/// A way to place a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlanLine {
    /// `single node` or `pipeline`.
    pub arrangement: String,
    /// The stages, in the order in which a token passes them.
    pub stages: Vec<Stage>,
    /// Longest sequence, in tokens.
    pub context_tokens: u32,
    /// Sequences at the same time.
    pub sequences: u32,
    /// Predicted speed of prefill, in tokens a second.
    pub prefill_tok_s: f64,
    /// Predicted speed of decoding one stream, in tokens a second.
    pub decode_tok_s: f64,
    /// Predicted time to the first token of a prompt of 512 tokens, in seconds.
    pub first_token_seconds: f64,
    /// What most of a token's time goes into.
    pub bottleneck: String,
}

/// The answer to a request for plans.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plans {
    /// The model.
    pub model: String,
    /// Ways to place it, best first.
    pub plans: Vec<PlanLine>,
}

fn milliseconds(time: std::time::Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

impl State {
    /// What a node knows now.
    pub fn of(node: &Node) -> Self {
        let view = node.view();
        let nodes = view.members.iter().map(|(id, member)| {
            let card = &member.card;
            NodeState {
                id: id.to_string(),
                name: card.name.clone(),
                state: match member.state {
                    MemberState::Alive => "alive",
                    MemberState::Suspect => "suspect",
                    MemberState::Dead => "dead",
                    MemberState::Left => "left",
                }
                .to_owned(),
                connected: member.connected,
                rtt_ms: member.rtt.map(milliseconds),
                version: card.version.clone(),
                platform: card.platform.clone(),
                cores: card.cores,
                memory_total_bytes: card.memory_total_bytes,
                memory_offered_bytes: card.memory_offered_bytes,
                memory_free_bytes: card.memory_free_bytes,
                devices: card.devices.iter().map(Device::of).collect(),
                models: card.models.clone(),
                addresses: card.addresses.clone(),
                api: card.api.clone(),
            }
        });
        let links = node.links();
        let links = links.iter().map(|(from, to, link)| LinkLine {
            from: from.to_string(),
            to: to.to_string(),
            rtt_ms: milliseconds(link.rtt),
            bytes_per_second: link.bytes_per_second,
        });
        let held = node.held();
        let held = held.iter().map(|held| Holding {
            id: held.spec.id.to_string(),
            owner: held.grant.owner.to_string(),
            beneficiary: held.spec.beneficiary.to_string(),
            purpose: held.spec.purpose.to_string(),
            bytes: held.grant.bytes,
        });
        let refusals = node.discovery().refusals();
        Self {
            node: node.id().to_string(),
            listening: node.network().listening().iter().map(ToString::to_string).collect(),
            nodes: nodes.collect(),
            links: links.collect(),
            instances: node.instances().iter().map(|summary| Instance::of(node, summary)).collect(),
            hops: node.hops().into_iter().map(HopLine::of).collect(),
            lent: Lending::of(&node.leases()),
            held: held.collect(),
            refusals: refusals
                .into_iter()
                .map(|refusal| RefusedPeer {
                    node: refusal.peer.map(|peer| peer.to_string()),
                    address: refusal.address.map(|address| address.to_string()),
                    reason: refusal.reason,
                })
                .collect(),
            troubles: node.troubles().into_iter().map(|Trouble { about, what, help }| TroubleLine { about, what, help }).collect(),
            models_folder: None,
        }
    }
}

impl Device {
    fn of(device: &DeviceCard) -> Self {
        let kind = match device.kind {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Gpu => "gpu",
            _ => "unused gpu",
        };
        Self {
            kind: kind.to_owned(),
            name: device.name.clone(),
            features: device.features.clone(),
            threads: device.threads,
            memory_bytes: device.memory_bytes,
        }
    }
}

impl Instance {
    /// A placed model as a node knows it.
    pub fn of(node: &Node, summary: &InstanceSummary) -> Self {
        let (state, reason) = match &summary.state {
            InstanceState::Leasing => ("leasing", None),
            InstanceState::Loading => ("loading", None),
            InstanceState::Ready => ("ready", None),
            InstanceState::Recovering(reason) => ("recovering", Some(reason.clone())),
            InstanceState::Stopping(reason) => ("stopping", Some(reason.clone())),
            InstanceState::Failed(reason) => ("failed", Some(reason.clone())),
            InstanceState::Waiting(reason) => ("waiting", Some(reason.clone())),
            _ => ("unknown", None),
        };
        let view = node.view();
        let stages = summary.stages.iter().map(|stage| Stage {
            node: stage.node.to_string(),
            name: view.get(stage.node).map(|member| member.card.name.clone()).unwrap_or_default(),
            layers: [stage.layers.start, stage.layers.end],
            lease_bytes: stage.lease_bytes,
        });
        Self {
            id: summary.instance.to_string(),
            model: summary.model.clone(),
            sha256: summary.sha256.clone(),
            state: state.to_owned(),
            reason,
            conductor: summary.term.node.to_string(),
            term: summary.term.counter,
            context_tokens: summary.context_tokens,
            stages: stages.collect(),
            prefill_tok_s: summary.prefill_tok_s,
            decode_tok_s: summary.decode_tok_s,
        }
    }
}

impl Lending {
    fn of(view: &LeaseView) -> Self {
        let leases = view.leases.iter().map(|lease| Lease {
            id: lease.id.to_string(),
            holder: lease.holder.to_string(),
            beneficiary: lease.beneficiary.to_string(),
            instance: match &lease.beneficiary {
                Beneficiary::Instance(instance) => Some(instance.to_string()),
                Beneficiary::User(_) => None,
            },
            purpose: lease.purpose.to_string(),
            bytes: lease.bytes,
            layers: lease.stage.as_ref().map(|layers| [layers.start, layers.end]),
            state: match &lease.state {
                LeaseState::Granted => "granted",
                LeaseState::Reclaimable => "reclaimable",
                _ => "fenced",
            }
            .to_owned(),
            remaining_seconds: milliseconds(lease.remaining) / 1e3,
        });
        Self {
            offered_bytes: view.totals.offered,
            used_bytes: view.totals.used,
            fenced_bytes: view.totals.fenced,
            leases: leases.collect(),
        }
    }
}

impl PlanLine {
    /// A plan of the planner.
    pub fn of(plan: &Plan) -> Self {
        let stages = plan.stages.iter().map(|stage| Stage {
            node: stage.node.to_string(),
            name: stage.name.clone(),
            layers: [stage.layers.start, stage.layers.end],
            lease_bytes: stage.memory.total(),
        });
        Self {
            arrangement: match plan.stages.len() {
                1 => "single node",
                _ => "pipeline",
            }
            .to_owned(),
            stages: stages.collect(),
            context_tokens: plan.context_tokens,
            sequences: plan.sequences,
            prefill_tok_s: plan.predicted.prefill_tok_s,
            decode_tok_s: plan.predicted.decode_tok_s,
            first_token_seconds: plan.predicted.first_token_seconds,
            bottleneck: plan.predicted.bottleneck.clone(),
        }
    }
}
