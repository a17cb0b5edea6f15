//! The memory of several processes as one: three nodes lend what they have, and one of them stores a gibibyte in it and reads it
//! back. Between machines nothing changes but how the nodes find each other, and on one network even that is not needed.
//! Run it: `cargo run --release --example pooled_memory`.
#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Read;
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use shoal::{Node, NodeBuilder};

/// What each process lends.
const LENT: u64 = 400 << 20;
/// What is stored: more than any one of them has.
const STORED: u64 = 1 << 30;
/// It is leased and written in blocks.
const BLOCK: u64 = 64 << 20;

fn node(name: &str) -> NodeBuilder {
    let local = vec![SocketAddr::from(([127, 0, 0, 1], 0))];
    Node::builder().in_memory().name(name).mdns(false).beacon(false).listen(local.clone()).tensor_listen(local).memory(LENT)
}

/// A process that lends its memory to whoever is at `peer`, until its standard input ends.
async fn lend(name: &str, peer: SocketAddr) -> Result<(), Box<dyn Error>> {
    let node = node(name).peers(vec![peer]).start().await?;
    tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
    node.leave().await;
    Ok(())
}

/// The content of a block: no two words of the whole are alike (splitmix64 of their numbers).
fn content(block: u64) -> Vec<u8> {
    let word = |number: u64| {
        let mut z = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)).to_le_bytes()
    };
    let words = BLOCK / 8;
    (block * words..(block + 1) * words).flat_map(word).collect()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [name, peer] = &arguments[..] {
        return lend(name, peer.parse()?).await;
    }
    let me = node("one").start().await?;
    let peer = me.network().listening()[0].to_string();
    let mut lenders = Vec::new();
    for name in ["two", "three"] {
        lenders.push(Command::new(std::env::current_exe()?).args([name, &peer]).stdin(Stdio::piped()).spawn()?);
    }
    while me.view().alive().filter(|(_, member)| member.card.memory_free_bytes >= BLOCK).count() < 3 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // Each block is leased from whichever node has the most left.
    let pool = me.pool("an archive");
    let (mut leases, mut writing) = (Vec::new(), Duration::ZERO);
    for block in 0..STORED / BLOCK {
        let (lease, bytes) = (pool.lease(BLOCK, None).await?, content(block));
        let began = Instant::now();
        lease.put(0, bytes).await?;
        writing += began.elapsed();
        leases.push(lease);
    }
    let mut held: BTreeMap<String, u64> = BTreeMap::new();
    for lease in &leases {
        let name = me.view().card(lease.owner()).map_or_else(|| "?".to_owned(), |card| card.name.clone());
        *held.entry(name).or_default() += lease.bytes() >> 20;
    }
    println!("1 GiB is stored; MiB by node: {held:?}");

    let mut reading = Duration::ZERO;
    for (block, lease) in (0..).zip(&leases) {
        let began = Instant::now();
        let bytes = lease.get(0, BLOCK as usize).await?;
        reading += began.elapsed();
        if bytes != content(block) {
            return Err(format!("block {block} is not what was written").into());
        }
    }
    println!(
        "all of it is read back: written at {:.1} GiB/s, read at {:.1} GiB/s",
        1.0 / writing.as_secs_f64(),
        1.0 / reading.as_secs_f64()
    );

    for lease in leases {
        lease.release().await;
    }
    for mut lender in lenders {
        drop(lender.stdin.take());
        lender.wait()?;
    }
    me.leave().await;
    Ok(())
}
