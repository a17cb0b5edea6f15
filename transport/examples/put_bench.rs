//! How fast `put` and `get` are between two processes of this machine, beside what a bare copy does in the same run.
//!
//! `cargo run --release --example put_bench`
//!
//! The program starts itself a second time. The second process is the holder of a lease of the first one's memory. Each round of
//! each size measures, one after the other: a copy within the process; a copy into memory shared with another process, without any
//! rules; `put` and `get` through a window; and `put` served by the owner's thread. Medians are printed, and their shares of the
//! bare shared copy.
#![allow(clippy::print_stdout)]
// A program of its own, not a part of a node.
#![allow(clippy::disallowed_methods)]

#[cfg(not(target_os = "linux"))]
fn main() {
    println!("only Linux hands memory from process to process yet");
}

#[cfg(target_os = "linux")]
fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    here::main()
}

#[cfg(target_os = "linux")]
mod here {
    use std::error::Error;
    use std::io::{BufRead, Write};
    use std::process::{Command, Stdio};
    use std::sync::Arc;
    use std::time::Duration;

    use shoal_transport::Effects;
    use shoal_transport::access::{AccessTable, Grant, Handle, Rights};
    use shoal_transport::channel::ChannelOptions;
    use shoal_transport::env::{BoxFuture, Clock, Instant, Join, Spawner, SystemRng, system_now};
    use shoal_transport::frame::{Fence, TermTag};
    use shoal_transport::link::LinkOptions;
    use shoal_transport::provider::shm::{ShmOptions, ShmProvider};
    use shoal_transport::provider::{Endpoint, Provider, Ticket};
    use shoal_transport::region::Region;
    use shoal_transport::remote::{RegionLease, RegionServer, RemoteRegion, Way};

    type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

    const LEASE_BYTES: u64 = 32 * 1024 * 1024;
    const OPTIONS: ChannelOptions = ChannelOptions { slot_bytes: 1024 * 1024 + 64, slots: 4 };
    const TERM: TermTag = TermTag { counter: 1, node: 0 };
    const HOLDER: [u8; 32] = [1; 32];

    pub(super) fn main() -> Outcome<()> {
        let effects = Effects { clock: Arc::new(RealClock), rng: Arc::new(SystemRng), spawner: Arc::new(Threads) };
        let words: Vec<String> = std::env::args().skip(1).collect();
        match &words[..] {
            [door, id, handles @ ..] if handles.len() == 2 => {
                holder(&effects, number(door)?, number(id)?, number(&handles[0])?, number(&handles[1])?)
            }
            _ => owner(&effects),
        }
    }

    fn number(text: &str) -> Outcome<u128> {
        Ok(u128::from_str_radix(text, 16)?)
    }

    /// A ticket between a process and its child, which nobody else has to be kept from.
    fn ticket(id: u128) -> Ticket {
        Ticket::new(id, [7; 32])
    }

    fn owner(effects: &Effects) -> Outcome<()> {
        let provider = ShmProvider::new(effects.clone(), ShmOptions::default())?;
        let Some(Endpoint::Shm { door }) = provider.endpoints().first().copied() else { return Err("no door".into()) };
        let table = AccessTable::new(effects.clone(), 2 * LEASE_BYTES);
        let lend = |start| {
            let deadline = effects.after(Duration::from_secs(600));
            table.grant(Grant { holder: HOLDER, start, bytes: LEASE_BYTES, rights: Rights::ALL, term: TERM, deadline })
        };
        let (native, served) = (lend(0)?, lend(LEASE_BYTES)?);
        let options = LinkOptions::for_payload(OPTIONS.slot_bytes);
        let expected = [provider.expect(&ticket(1), options)?, provider.expect(&ticket(2), options)?];
        let mut child = Command::new(std::env::current_exe()?)
            .args([format!("{door:x}"), "1".to_owned(), format!("{:x}", native.0), format!("{:x}", served.0)])
            .stdout(Stdio::piped())
            .spawn()?;
        for expected in expected {
            let link = expected.accept(effects.after(Duration::from_secs(30)))?;
            let server = RegionServer::open(link, Fence::default(), OPTIONS, HOLDER, table.clone(), effects)?;
            std::thread::spawn(move || server.run());
        }
        let said = child.stdout.take().ok_or("no output")?;
        for line in std::io::BufReader::new(said).lines() {
            println!("{}", line?);
        }
        if child.wait()?.success() { Ok(()) } else { Err("the holder failed".into()) }
    }

    fn holder(effects: &Effects, door: u128, id: u128, native: u128, served: u128) -> Outcome<()> {
        let provider = ShmProvider::new(effects.clone(), ShmOptions::default())?;
        let soon = effects.after(Duration::from_secs(500));
        let open = |id, handle| -> Outcome<RemoteRegion> {
            let link = provider.dial(&Endpoint::Shm { door }, &ticket(id), LinkOptions::for_payload(OPTIONS.slot_bytes), soon)?;
            let lease = RegionLease { handle: Handle(handle), bytes: LEASE_BYTES, term: TERM, generation: 0 };
            Ok(RemoteRegion::open(link, Fence::default(), OPTIONS, lease, effects)?)
        };
        let mut native = open(id, native)?;
        let mut served = open(id + 1, served)?.served();
        let all = usize::try_from(LEASE_BYTES)?;
        // All at the same place in a page: processors stall when what is read lies a little behind what was written before, in
        // the lower bits of addresses.
        let (mut source, mut private, mut shared) = (Region::new(all)?.whole(), Region::new(all)?.whole(), Region::new(all)?.whole());
        source.as_mut_slice().fill(7);
        let source = source.as_slice();
        let (private, shared) = (private.as_mut_slice(), shared.as_mut_slice());
        // Every page is touched before anything is measured.
        private.copy_from_slice(source);
        shared.copy_from_slice(source);
        native.put(0, source, soon)?;
        served.put(0, source, soon)?;
        if native.way() != Way::Native {
            return Err("the owner's memory could not be mapped".into());
        }
        let mut out = std::io::stdout().lock();
        writeln!(out, "{:>8} {:>14} {:>14} {:>22} {:>22} {:>14}", "bytes", "own memory", "shared", "put", "get", "put, served")?;
        for (bytes, rounds) in [(4096, 4000), (65_536, 2000), (1 << 20, 400), (16 << 20, 30)] {
            let mut times: [Vec<f64>; 5] = Default::default();
            for round in 0..rounds {
                let at = round * bytes % (all - bytes + 1) / 64 * 64;
                let from = &source[at..at + bytes];
                let clock = &*effects.clock;
                let mut time = |which: usize, begin: Instant| times[which].push(clock.now().since(begin).as_secs_f64());
                let begin = clock.now();
                private[at..at + bytes].copy_from_slice(std::hint::black_box(from));
                time(0, begin);
                let begin = clock.now();
                shared[at..at + bytes].copy_from_slice(std::hint::black_box(from));
                time(1, begin);
                let begin = clock.now();
                native.put(at as u64, from, soon)?;
                time(2, begin);
                let begin = clock.now();
                native.get(at as u64, &mut private[at..at + bytes], soon)?;
                time(3, begin);
                // It takes a hundred times as long as the others where both ends share a core.
                if round % 8 == 0 {
                    let begin = clock.now();
                    served.put(at as u64, from, soon)?;
                    time(4, begin);
                }
            }
            let rate = times.each_mut().map(|times| {
                times.sort_unstable_by(f64::total_cmp);
                bytes as f64 / times[times.len() / 2] / 1e9
            });
            let share = |rate: f64, of: f64| format!("{rate:>7.2} GB/s ({:>4.0} %)", rate / of * 100.0);
            let [own, bare, put, get, slow] = rate;
            writeln!(
                out,
                "{bytes:>8} {own:>9.2} GB/s {bare:>9.2} GB/s {:>22} {:>22} {slow:>9.2} GB/s",
                share(put, bare),
                share(get, bare)
            )?;
        }
        Ok(())
    }

    #[derive(Debug)]
    struct RealClock;

    impl Clock for RealClock {
        fn now(&self) -> Instant {
            system_now()
        }

        fn sleep_until(&self, deadline: Instant) -> BoxFuture<'static, ()> {
            Box::pin(async move { std::thread::sleep(deadline.since(system_now())) })
        }
    }

    #[derive(Debug)]
    struct Threads;

    struct Thread(std::thread::JoinHandle<()>);

    impl Join for Thread {
        fn join(self: Box<Self>) -> bool {
            self.0.join().is_ok()
        }
    }

    impl Spawner for Threads {
        fn task(&self, _name: &'static str, _future: BoxFuture<'static, ()>) {
            // Links and channels start threads only.
        }

        fn thread(&self, name: String, body: Box<dyn FnOnce() + Send>) -> std::io::Result<Box<dyn Join>> {
            Ok(Box::new(Thread(std::thread::Builder::new().name(name).spawn(body)?)))
        }
    }
}
