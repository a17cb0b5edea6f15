//! Bytes of control messages that `docs/wire.md` describes, spelled out by hand.

use serde::Serialize;
use serde::de::DeserializeOwned;
use shoal_engine::stage::SequenceId;
use shoal_transport::access::Handle;
use shoal_transport::provider::{Endpoint, Ticket};

use crate::SamplingParams;
use crate::conductor::journal::{Ended, JournalEntry, JournalRefusal, JournalReply, JournalRequest};
use crate::ids::{Incarnation, InstanceId, LeaseId, NodeId, PlanEpoch, RequestId, Term};
use crate::lease::LeaseUse;
use crate::region::{RegionOffer, RegionRefusal, RegionRequest};
use crate::request::{Finish, GenerateRequest, Prompt, Timing, Unread};
use crate::stage::message::{Token, Tokens};
use crate::stage::{LinkStage, StageKey, StageReply, StageRequest};

/// The message has these bytes, and they are read as what has them again.
#[track_caller]
fn pinned<T: Serialize + DeserializeOwned>(message: &T, parts: &[&[u8]]) {
    let bytes = parts.concat();
    assert_eq!(postcard::to_stdvec(message).unwrap(), bytes);
    let again: T = postcard::from_bytes(&bytes).unwrap();
    assert_eq!(postcard::to_stdvec(&again).unwrap(), bytes);
}

const NODE: [u8; 32] = [7; 32];

fn term() -> Term {
    Term { counter: 300, node: NodeId(NODE) }
}

/// The same in bytes.
const TERM: [&[u8]; 2] = [&[0xac, 2], &NODE];

#[test]
fn journal_messages_are_pinned() {
    let (instance, request) = (InstanceId(2), RequestId(5));
    let entry = JournalEntry {
        request: GenerateRequest {
            id: request,
            instance,
            prompt: Prompt::Text("ab".to_owned()),
            sampling: SamplingParams {
                temperature: 0.5,
                top_k: 40,
                logit_bias: [(300, -1.0)].into(),
                seed: 128,
                logprobs: Some(3),
                ..SamplingParams::default()
            },
            max_tokens: Some(10),
            stop: vec!["x".to_owned()],
            ignore_end: true,
            unread: Unread::Wait,
            shape: "{}".to_owned(),
            client: crate::request::Client { account: 300, user: 0 },
            priority: crate::request::Priority::High,
        },
        prompt: vec![1, 128],
        emitted: vec![9],
        ended: None,
    };
    let sampling: &[u8] = &[
        0, 0, 0, 0x3f, 40, 0, 0, 0x80, 0x3f, 0, 0, 0, 0, // temperature, top_k, top_p, min_p
        0, 0, 0x80, 0x3f, 0, 0, 0, 0, 0, 0, 0, 0, // repetition, presence, frequency
        1, 0xac, 2, 0, 0, 0x80, 0xbf, // one bias
        0x80, 1, 1, 3, // seed, log probabilities
    ];
    let entry_bytes =
        [&[5, 2, 1, 2, b'a', b'b'], sampling, &[1, 10, 1, 1, b'x', 1, 1, 2, b'{', b'}', 0xac, 2, 0, 2, 2, 1, 0x80, 1, 1, 9, 0]].concat();
    let store = JournalRequest::Store { instance, term: term(), entry: Box::new(entry.clone()) };
    pinned(&store, &[&[0, 2], TERM[0], TERM[1], &entry_bytes]);
    let append = JournalRequest::Append { instance, term: term(), request, from: 1, tokens: vec![128] };
    pinned(&append, &[&[1, 2], TERM[0], TERM[1], &[5, 1, 1, 0x80, 1]]);
    pinned(&JournalRequest::Finish { instance, term: term(), request, ended: None }, &[&[2, 2], TERM[0], TERM[1], &[5, 0]]);
    let time = std::time::Duration::from_nanos;
    let timing = Timing { queued: time(1), prefill: time(2_000_000_003), decode: time(4), cached: 300 };
    let ended = Some(Ended { reason: Finish::Length, timing, tokens: 200 });
    let ended_bytes: &[u8] = &[5, 1, 1, 0, 1, 2, 3, 0, 4, 0xac, 2, 0xc8, 1];
    pinned(&JournalRequest::Finish { instance, term: term(), request, ended }, &[&[2, 2], TERM[0], TERM[1], ended_bytes]);
    pinned(&JournalRequest::Collect { instance, term: term(), after: None }, &[&[3, 2], TERM[0], TERM[1], &[0]]);
    pinned(&JournalRequest::Collect { instance, term: term(), after: Some(request) }, &[&[3, 2], TERM[0], TERM[1], &[1, 5]]);
    pinned(&JournalRequest::Forget { instance, term: term() }, &[&[4, 2], TERM[0], TERM[1]]);

    type Reply = Result<JournalReply, JournalRefusal>;
    pinned::<Reply>(&Ok(JournalReply::Done), &[&[0, 0]]);
    pinned::<Reply>(&Ok(JournalReply::Entries { entries: vec![entry], more: true }), &[&[0, 1, 1], &entry_bytes, &[1]]);
    pinned::<Reply>(&Err(JournalRefusal::StaleTerm { instance, current: term() }), &[&[1, 0, 2], TERM[0], TERM[1]]);
    pinned::<Reply>(&Err(JournalRefusal::Gap { request, known: 3, from: 200 }), &[&[1, 1, 5, 3, 0xc8, 1]]);
    pinned::<Reply>(&Err(JournalRefusal::Full { limit: 4 }), &[&[1, 2, 4]]);
}

#[test]
fn stage_messages_are_pinned() {
    let key = StageKey { instance: InstanceId(2), term: term(), epoch: PlanEpoch(4), stage: 1 };
    let key_bytes = [&[2], TERM[0], TERM[1], &[4, 1]].concat();
    pinned(&StageRequest::Unload(key), &[&[2], &key_bytes]);
    let link = LinkStage {
        key,
        to: NodeId(NODE),
        endpoints: vec![
            Endpoint::Tcp("10.0.0.1:4000".parse().unwrap()),
            Endpoint::Tcp("[::1]:5".parse().unwrap()),
            Endpoint::Memory { fabric: 3, port: 4 },
            Endpoint::Shm { door: 200 },
        ],
        ticket: Ticket::new(6, [8; 32]),
        slot_bytes: 4096,
    };
    let endpoints: &[u8] = &[
        4, // of them
        0, 0, 10, 0, 0, 1, 0xa0, 0x1f, // IPv4
        0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 5, // IPv6
        1, 3, 4, // memory
        2, 0xc8, 1, // shared memory
    ];
    pinned(&StageRequest::Link(Box::new(link)), &[&[1], &key_bytes, &NODE, endpoints, &[6], &[8; 32], &[0x80, 0x20]]);
    pinned(&StageReply::Done, &[&[1]]);
}

#[test]
fn leased_memory_messages_are_pinned() {
    let token = postcard::from_bytes(&[9; 16]).unwrap();
    let right = LeaseUse { lease: LeaseId(200), token, incarnation: Incarnation(3), term: term() };
    let request = RegionRequest { right, slot_bytes: 4096 };
    pinned(&request, &[&[0xc8, 1], &[9; 16], &[3], TERM[0], TERM[1], &[0x80, 0x20]]);
    type Reply = Result<RegionOffer, RegionRefusal>;
    let offer = RegionOffer {
        endpoints: vec![Endpoint::Verbs { address: "10.0.0.1:4000".parse().unwrap() }],
        ticket: Ticket::new(6, [8; 32]),
        handle: Handle(300),
    };
    pinned::<Reply>(&Ok(offer), &[&[0, 1, 3, 0, 10, 0, 0, 1, 0xa0, 0x1f, 6], &[8; 32], &[0xac, 2]]);
    pinned::<Reply>(&Err(RegionRefusal::Purpose), &[&[1, 1]]);
    pinned::<Reply>(&Err(RegionRefusal::Unit), &[&[1, 2]]);
    pinned::<Reply>(&Err(RegionRefusal::Slot { least: 1, most: 128 }), &[&[1, 3, 1, 0x80, 1]]);
    pinned::<Reply>(&Err(RegionRefusal::Busy(256)), &[&[1, 4, 0x80, 2]]);
    pinned::<Reply>(&Err(RegionRefusal::Failed("no".to_owned())), &[&[1, 5, 2, b'n', b'o']]);
}

#[test]
fn tokens_are_pinned() {
    let token = |logprob, top| Token { sequence: SequenceId(1), position: 2, token: 3, logprob, top };
    let tokens = Tokens { step: 0x0102, tokens: vec![token(None, vec![]), token(Some(-1.0), vec![(4, -0.5)])] };
    let mut bytes = Vec::new();
    tokens.encode(&mut bytes);
    let plain: &[u8] = &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let likely: &[u8] = &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0x80, 0xbf, 1, 0, 0, 0x80, 4, 0, 0, 0, 0, 0, 0, 0xbf];
    assert_eq!(bytes, [&[2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0], plain, likely].concat());
    assert_eq!(Tokens::decode(&bytes, 2).unwrap(), tokens);
}
