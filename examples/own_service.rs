//! Your own actor on Shoal's network: it counts words for whichever node asks, and its caller borrows memory of the node
//! that it runs on. Two nodes in one program; between two machines nothing changes but where `peers` comes from, and on
//! one network even that is not needed. Run it: `cargo run --release --example own_service`.
#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal::ractor::{Actor, ActorProcessingErr, ActorRef};
use shoal::{Inbound, Node, Service, ServiceId};

/// The service: its number, and what is asked and answered. Plain serde types, encoded only between processes.
struct WordCount;

impl Service for WordCount {
    const ID: ServiceId = ServiceId::user(1);
    const NAME: &'static str = "word count";
    type Request = Text;
    type Reply = BTreeMap<String, u32>;
}

#[derive(Serialize, Deserialize)]
struct Text(String);

/// The actor behind it. A request from anywhere in the cluster is an ordinary message.
struct Counter;

enum Message {
    Count(Inbound<WordCount>),
}

impl From<Inbound<WordCount>> for Message {
    fn from(request: Inbound<WordCount>) -> Self {
        Self::Count(request)
    }
}

impl Actor for Counter {
    type Msg = Message;
    type State = BTreeMap<String, u32>;
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<Message>, (): ()) -> Result<Self::State, ActorProcessingErr> {
        Ok(BTreeMap::new())
    }

    async fn handle(&self, _: ActorRef<Message>, Message::Count(asked): Message, seen: &mut Self::State) -> Result<(), ActorProcessingErr> {
        asked.request.0.split_whitespace().for_each(|word| *seen.entry(word.to_lowercase()).or_default() += 1);
        asked.reply.into_iter().for_each(|reply| reply.reply(seen.clone()));
        Ok(())
    }
}

#[tokio::main]
pub(crate) async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let node = || Node::builder().in_memory().mdns(false).beacon(false).listen(vec![SocketAddr::from(([127, 0, 0, 1], 0))]);
    let desk = node().name("desk").memory(64 << 20).start().await?;
    let laptop = node().name("laptop").peers(desk.network().listening()).start().await?;

    let (counter, _) = Actor::spawn(None, Counter, ()).await?;
    desk.serve::<WordCount, Message>(counter.clone())?;
    while laptop.view().card(desk.id()).is_none() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }

    let count = laptop.remote::<WordCount>(desk.id()).call(Text("the sea the shoal".to_owned()), Duration::from_secs(5)).await?;
    println!("desk counted for laptop: {count:?}");
    let lease = laptop.pool("word counts").lease(1 << 20, Some(desk.id())).await?;
    lease.put(0, *b"the sea").await?;
    println!("desk lends laptop {} bytes; they begin with {:?}", lease.bytes(), String::from_utf8(lease.get(0, 7).await?)?);
    lease.release().await;

    laptop.leave().await;
    counter.stop(None);
    desk.leave().await;
    Ok(())
}
