//! What others have of a model that this node is asked to place. The node that places a model is not always the one that conducts it:
//! another one may have taken it over. Placing it beside that one would use the memory twice, or find none.

use std::sync::PoisonError;
use std::time::Duration;

use futures::future::join_all;

use super::assemble::Ground;
use super::instance::{InstanceState, InstanceSummary};
use super::journal::InstanceRecord;
use super::placement::{Placement, PlacementReply, PlacementRequest, Reuse};
use super::succession::is_back;
use crate::env::Instant;
use crate::ids::{InstanceId, NodeId, Term};
use crate::membership::{ClusterView, MemberState, MemberView};
use crate::plan::Goal;

/// How long a conductor may take to say whether it has an instance.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long after its conductor's death an instance may come up under another one.
const TAKEN_OVER: Duration = Duration::from_secs(6);

/// What others have.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Elsewhere {
    /// Nothing of use.
    Nothing,
    /// An instance that answers.
    Ready(Box<InstanceSummary>),
    /// One that may answer soon: it is being made, made whole, or taken over.
    Soon,
}

/// The instances of other conductors that would do, as their cards say.
fn told<'a>(view: &'a ClusterView, sha256: &'a str, reuse: Reuse, goal: &'a Goal) -> impl Iterator<Item = &'a InstanceSummary> {
    let me = view.me;
    let of = move |(node, member): (NodeId, &'a MemberView)| {
        member.card.instances.iter().filter(move |known| node != me && known.term.node == node)
    };
    view.present().flat_map(of).filter(move |known| !known.state.is_gone() && known.sha256 == sha256 && reuse.allows(known, goal))
}

/// Whether an instance of the model has lost its conductor so lately that another member may be about to take it over. `records` are
/// those that this node remembers; a node was lost lately if `lately` says so.
fn orphaned(view: &ClusterView, now: Instant, sha256: &str, records: &[(InstanceId, Term, InstanceRecord)], lately: bool) -> bool {
    let dead = view.members.values().filter(|member| member.state == MemberState::Dead && now.since(member.since) < TAKEN_OVER);
    let conducted = dead.flat_map(|member| &member.card.instances).any(|known| known.sha256 == sha256);
    let missed = |(instance, term, _): &(InstanceId, Term, InstanceRecord)| !is_back(view, *instance, *term);
    conducted || (lately && records.iter().any(missed))
}

/// Looks what others have of a model. `gone` says when a node was last lost.
pub(super) async fn elsewhere(ground: &Ground, sha256: &str, reuse: Reuse, goal: &Goal, gone: Option<Instant>) -> Elsewhere {
    if reuse == Reuse::Never {
        return Elsewhere::Nothing;
    }
    let (view, now) = (ground.membership.view(), ground.env.clock.now());
    let asked = told(&view, sha256, reuse, goal).map(|known| async move {
        let remote = ground.services.remote::<Placement>(known.term.node);
        let call = remote.call(PlacementRequest::Has(known.instance), ASK_TIMEOUT);
        (known, ground.membership.while_present(known.term.node, call).await)
    });
    let mut soon = false;
    for (known, answer) in join_all(asked).await {
        match answer {
            Some(Ok(Ok(PlacementReply::Done))) if known.state == InstanceState::Ready => return Elsewhere::Ready(Box::new(known.clone())),
            // Its card was old news.
            Some(Ok(Ok(PlacementReply::NoInstance))) => {}
            _ => soon = true,
        }
    }
    let records = ground.journal.lock().unwrap_or_else(PoisonError::into_inner).of_model(sha256);
    let lately = gone.is_some_and(|gone| now.since(gone) < TAKEN_OVER);
    match soon || orphaned(&view, now, sha256, &records, lately) {
        true => Elsewhere::Soon,
        false => Elsewhere::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;

    const NODE: fn(u8) -> NodeId = |number| NodeId([number; 32]);

    fn summary(conductor: u8, state: InstanceState) -> InstanceSummary {
        InstanceSummary {
            instance: InstanceId(1),
            model: "m".to_owned(),
            sha256: "aa".to_owned(),
            term: Term { counter: 1, node: NODE(conductor) },
            state,
            context_tokens: 128,
            stages: Vec::new(),
            decode_tok_s: 1.0,
            prefill_tok_s: 1.0,
            forked: false,
        }
    }

    /// Node 1 looks at a cluster in which node 2 conducts something.
    fn view(state: MemberState, instances: Vec<InstanceSummary>) -> ClusterView {
        let member = |node, state, instances| {
            let mut card = crate::membership::test_card(node, 1);
            card.instances = instances;
            let since = Instant::ZERO + Duration::from_secs(100);
            (node, MemberView { card: Arc::new(card), state, since, connected: true, rtt: None })
        };
        let members = [member(NODE(1), MemberState::Alive, Vec::new()), member(NODE(2), state, instances)];
        ClusterView { me: NODE(1), members: BTreeMap::from(members) }
    }

    #[test]
    fn an_instance_that_another_node_makes_whole_is_waited_for() {
        let told = |state| {
            let view = view(MemberState::Alive, vec![summary(2, state)]);
            told(&view, "aa", Reuse::Any, &Goal { nodes_min: 0, ..Goal::default() }).count()
        };
        assert_eq!(told(InstanceState::Ready), 1);
        assert_eq!(told(InstanceState::Recovering("x".to_owned())), 1);
        assert_eq!(told(InstanceState::Stopping("x".to_owned())), 0);
        let view = view(MemberState::Alive, vec![summary(2, InstanceState::Ready)]);
        assert_eq!(super::told(&view, "bb", Reuse::Any, &Goal::default()).count(), 0);
        assert_eq!(super::told(&view, "aa", Reuse::Never, &Goal::default()).count(), 0);
    }

    #[test]
    fn one_whose_conductor_has_just_died_may_have_an_heir() {
        let at = |seconds| Instant::ZERO + Duration::from_secs(seconds);
        let dead = view(MemberState::Dead, vec![summary(2, InstanceState::Ready)]);
        assert!(orphaned(&dead, at(101), "aa", &[], false));
        assert!(!orphaned(&dead, at(107), "aa", &[], false), "nobody took it over in time");
        assert!(!orphaned(&dead, at(101), "bb", &[], false));
        let left = view(MemberState::Left, vec![summary(2, InstanceState::Ready)]);
        assert!(!orphaned(&left, at(101), "aa", &[], false), "who leaves takes down what it conducts");
        assert!(!orphaned(&view(MemberState::Alive, Vec::new()), at(101), "aa", &[], true));
    }
}
