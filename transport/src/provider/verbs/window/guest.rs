//! Windows over the devices of the machine that `.ci/verbs` boots, also of a process that is killed, stopped, or takes no notice.

use std::io::{BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal};

use super::tests::{World, a_window_is_closed_when_its_lease_runs_out, a_window_that_has_ended_lets_nothing_through, until};
use crate::Effects;
use crate::access::{AccessTable, Grant, Handle, Rights};
use crate::channel::{Broken, ChannelOptions};
use crate::frame::{Fence, TermTag};
use crate::link::LinkOptions;
use crate::provider::verbs::guest::{addresses, provider, providers};
use crate::provider::verbs::{InUse, Profile, VerbsProvider};
use crate::provider::{Endpoint, Provider, Ticket};
use crate::remote::{Denial, RegionLease, RegionServer, RemoteRegion, TransferError, Way};
use crate::testing::{effects, said, soon};

const HOLDER: [u8; 32] = [1; 32];
const OPTIONS: ChannelOptions = ChannelOptions { slot_bytes: 64 * 1024, slots: 3 };
const LEASE_BYTES: u64 = 1024 * 1024;
const TERM: TermTag = TermTag { counter: 1, node: 2 };
const LONG: Duration = Duration::from_secs(60);

fn on_devices() -> World {
    let effects = effects();
    let both = providers(&effects, Profile::Rc);
    World::new(effects, both)
}

#[test]
#[ignore = "needs devices: run by .ci/verbs"]
fn what_is_forged_reaches_nothing() {
    super::tests::what_is_forged_reaches_nothing(&on_devices());
}

#[test]
#[ignore = "needs devices: run by .ci/verbs"]
fn windows_end() {
    a_window_that_has_ended_lets_nothing_through(&on_devices());
    a_window_is_closed_when_its_lease_runs_out(&on_devices(), Duration::from_secs(3));
}

/// The owner, and a holder in another process with what it says.
struct Owner {
    effects: Effects,
    provider: VerbsProvider,
    table: AccessTable,
}

struct Holder {
    child: Child,
    says: BufReader<ChildStdout>,
    serving: JoinHandle<Broken>,
}

impl Owner {
    fn new() -> Self {
        let effects = effects();
        let provider = provider(&effects, Profile::Rc, &addresses()[1], LONG);
        Self { provider, table: AccessTable::new(effects.clone(), 2 * LEASE_BYTES), effects }
    }

    fn lend(&self) -> Handle {
        let deadline = soon(&self.effects);
        self.table.grant(Grant { holder: HOLDER, start: 0, bytes: LEASE_BYTES, rights: Rights::ALL, term: TERM, deadline }).unwrap()
    }

    fn all(&self, handle: Handle) -> Vec<u8> {
        let mut all = vec![0xdd; LEASE_BYTES as usize];
        assert!(self.table.read(handle, 0, &mut all));
        all
    }

    /// Starts a process that holds a lease, and serves it, until it has put something natively.
    fn start(&self, lease: Handle, what: &str) -> Holder {
        let Endpoint::Verbs { address } = self.provider.endpoints()[0] else { panic!() };
        let expected = self.provider.expect(&Ticket::new(lease.0, [5; 32]), LinkOptions::for_payload(OPTIONS.slot_bytes)).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["provider::verbs::window::guest::holder", "--exact", "--ignored", "--nocapture", "--quiet"])
            .env("SHOAL_TEST_HOLDER", format!("{what} {address} {}", lease.0))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let far = expected.accept(soon(&self.effects)).unwrap();
        let server = RegionServer::open(far, Fence::default(), OPTIONS, HOLDER, self.table.clone(), &self.effects).unwrap();
        let serving = std::thread::spawn(move || server.run());
        let says = BufReader::new(child.stdout.take().unwrap());
        let mut holder = Holder { child, says, serving };
        assert_eq!(holder.hear(), "ready");
        assert_eq!(self.provider.in_use(), InUse { pairs: 2, completion_queues: 2, registrations: 2 }, "a link and a window");
        holder
    }
}

impl Holder {
    fn hear(&mut self) -> String {
        said(&mut self.says, "holder")
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Kills it, and waits until nothing of it is left.
    fn kill(mut self, owner: &Owner) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        assert!(matches!(self.serving.join().unwrap(), Broken::Link(_)));
        until(|| owner.provider.in_use() == InUse::default());
    }
}

/// The process of a [`Holder`].
#[test]
#[ignore = "started by other tests, in a process of its own"]
fn holder() {
    let effects = effects();
    let words = std::env::var("SHOAL_TEST_HOLDER").unwrap();
    let [what, address, lease] = words.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let handle = Handle(lease.parse().unwrap());
    let provider = provider(&effects, Profile::Rc, &addresses()[0], LONG);
    let endpoint = Endpoint::Verbs { address: address.parse().unwrap() };
    let ticket = Ticket::new(handle.0, [5; 32]);
    let link = provider.dial(&endpoint, &ticket, LinkOptions::for_payload(OPTIONS.slot_bytes), soon(&effects)).unwrap();
    let lease = RegionLease { handle, bytes: LEASE_BYTES, term: TERM, generation: 0 };
    let mut region = RemoteRegion::open(link, Fence::default(), OPTIONS, lease, &effects).unwrap();
    let message = vec![0xee; LEASE_BYTES as usize];
    region.put(0, &message, soon(&effects)).unwrap();
    assert_eq!(region.way(), Way::Native);
    println!("holder: ready");
    match what {
        "put" => {
            let end = loop {
                if let Err(end) = region.put(0, &message, soon(&effects)) {
                    break end;
                }
            };
            println!("holder: {end:?}");
        }
        "scribble" => {
            let reach = region.reach().unwrap();
            while reach.write_blindly(0, &message[..200_000], &*effects.clock, soon(&effects)) {}
            println!("holder: cut off");
        }
        other => panic!("{other}"),
    }
    // Whoever started it has to have looked.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

#[test]
#[ignore = "needs devices: run by .ci/verbs"]
fn a_holder_that_is_killed_in_the_middle_leaves_nothing() {
    let owner = Owner::new();
    for round in 0..3 {
        let lease = owner.lend();
        assert!(owner.all(lease).iter().all(|byte| *byte == 0));
        let holder = owner.start(lease, "put");
        std::thread::sleep(Duration::from_millis(round * 7));
        holder.kill(&owner);
        assert!(owner.all(lease).iter().all(|byte| *byte == 0xee));
        owner.table.revoke(lease, soon(&owner.effects)).unwrap();
        assert_eq!((owner.table.lent_bytes(), owner.table.retired_bytes()), (0, 0));
    }
}

#[test]
#[ignore = "needs devices: run by .ci/verbs"]
fn a_holder_that_is_stopped_in_the_middle_is_not_waited_for() {
    let owner = Owner::new();
    let lease = owner.lend();
    let mut holder = owner.start(lease, "put");
    holder.signal(Signal::STOP);
    // What it has posted its adapter sends all the same.
    owner.table.revoke(lease, soon(&owner.effects)).unwrap();
    assert_eq!((owner.table.lent_bytes(), owner.table.retired_bytes()), (0, 0));
    let next = owner.lend();
    holder.signal(Signal::CONT);
    assert_eq!(holder.hear(), format!("{:?}", TransferError::Denied(Denial::NoLease)));
    assert!(owner.all(next).iter().all(|byte| *byte == 0), "the next holder sees what the last one wrote");
    holder.kill(&owner);
}

#[test]
#[ignore = "needs devices: run by .ci/verbs"]
fn a_holder_that_takes_no_notice_is_cut_off() {
    let owner = Owner::new();
    for what in ["expired", "superseded"] {
        let lease = owner.lend();
        let mut holder = owner.start(lease, "scribble");
        if what == "expired" {
            owner.table.renew(lease, owner.effects.after(Duration::from_millis(30))).unwrap();
            std::thread::sleep(Duration::from_millis(31));
        } else {
            owner.table.raise_term(lease, TermTag { counter: 2, node: 0 }).unwrap();
        }
        // It still writes, for all that it knows.
        assert!(owner.table.write(lease, 0, &vec![5; LEASE_BYTES as usize]));
        assert!(owner.all(lease).iter().all(|byte| *byte == 5), "{what}, and written");
        assert_eq!(holder.hear(), "cut off");
        assert!(owner.all(lease).iter().all(|byte| *byte == 5), "{what}, and written later");
        holder.kill(&owner);
        owner.table.revoke(lease, soon(&owner.effects)).unwrap();
    }
}

/// Prints how long a put and a get of 64 bytes take, in microseconds, and how many MiB a second long ones move. `.ci/verbs` prints it beside
/// perftest's.
#[test]
#[ignore = "a measurement: run by .ci/verbs"]
fn pace() {
    const ROUNDS: usize = 1500;
    let effects = effects();
    let [near, far] = providers(&effects, Profile::Rc);
    let table = AccessTable::new(effects.clone(), LEASE_BYTES);
    let grant = Grant { holder: HOLDER, start: 0, bytes: LEASE_BYTES, rights: Rights::ALL, term: TERM, deadline: soon(&effects) };
    let lease = RegionLease { handle: table.grant(grant).unwrap(), bytes: LEASE_BYTES, term: TERM, generation: 0 };
    let ticket = Ticket::new(1, [5; 32]);
    let options = LinkOptions::for_payload(OPTIONS.slot_bytes);
    let expected = far.expect(&ticket, options).unwrap();
    let link = near.dial(&far.endpoints()[0], &ticket, options, soon(&effects)).unwrap();
    let server =
        RegionServer::open(expected.accept(soon(&effects)).unwrap(), Fence::default(), OPTIONS, HOLDER, table.clone(), &effects).unwrap();
    let mut region = RemoteRegion::open(link, Fence::default(), OPTIONS, lease, &effects).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let mut median = |name: &str, bytes: usize, rounds: usize, put: bool| {
            let mut buffer = vec![3; bytes];
            let mut times = Vec::new();
            // A machine that is busy with other things gets fewer rounds.
            let until = std::time::Instant::now() + Duration::from_secs(4);
            while times.len() < rounds && std::time::Instant::now() < until {
                let began = std::time::Instant::now();
                if put { region.put(0, &buffer, soon(&effects)) } else { region.get(0, &mut buffer, soon(&effects)) }.unwrap();
                times.push(began.elapsed());
            }
            assert_eq!(region.way(), Way::Native);
            times.sort_unstable();
            let median = times[times.len() / 2].as_secs_f64();
            match bytes {
                64 => println!("pace {name}-us {:.2}", median * 1e6),
                _ => println!("pace {name}-mib {:.1}", bytes as f64 / median / f64::from(1 << 20)),
            }
        };
        median("put", 64, ROUNDS, true);
        median("get", 64, ROUNDS, false);
        median("put", LEASE_BYTES as usize, 60, true);
        median("get", LEASE_BYTES as usize, 60, false);
        drop(region);
    });
}
