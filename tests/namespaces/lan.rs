//! A local network on one machine: hosts that are network namespaces, each with a cable to a bridge in one more.
//!
//! Nothing of it touches the machine's own network: both ends of each cable are made inside namespaces. Names tell the
//! process that made them, so that what a killed run left behind is known to be nobody's and is removed by the next.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Where `ip netns` keeps its namespaces.
const NAMESPACES: &str = "/run/netns";
const PREFIX: &str = "shoal-";
/// Address of the router of [`Addresses::Home`].
const ROUTER: &str = "192.168.77.254";
/// How long the system may take to find out that nobody else has the hosts' IPv6 addresses.
const ADDRESSES_PATIENCE: Duration = Duration::from_secs(10);

/// Which addresses the hosts have, besides the link-local ones of IPv6 that the system gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Addresses {
    /// 10.77.N.1, 10.77.N.2 and so on, with a prefix of 24 bits; this is the N.
    V4(u8),
    /// 192.168.77.1, 192.168.77.2 and so on, and a router at 192.168.77.254 that drops, without a word, what is for other
    /// networks, as those of homes do with private addresses.
    Home,
    /// Two cables for each host, to two bridges: 10.77.N.1 and so on by the first, 10.76.N.1 and so on by the second.
    Two(u8),
    /// None.
    LinkLocal,
}

/// The network. It is gone when this is dropped.
#[derive(Debug)]
pub(crate) struct Lan {
    name: String,
    hosts: Vec<String>,
}

impl Lan {
    /// Lays cables to hosts of these names. The error says what this machine, or this user, lacks.
    pub(crate) fn lay(tag: &str, hosts: &[&str], addresses: Addresses) -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("only root can make network namespaces".to_owned());
        }
        sweep();
        let lan =
            Self { name: format!("{PREFIX}{}-{tag}", std::process::id()), hosts: hosts.iter().map(|host| (*host).to_owned()).collect() };
        lan.build(addresses)?;
        Ok(lan)
    }

    fn build(&self, addresses: Addresses) -> Result<(), String> {
        let hub = self.hub();
        ip(&["netns", "add", &hub])?;
        ip(&["-n", &hub, "link", "set", "lo", "up"])?;
        ip(&["-n", &hub, "link", "add", "lan", "type", "bridge"])?;
        ip(&["-n", &hub, "link", "set", "lan", "up"])?;
        if matches!(addresses, Addresses::Two(_)) {
            ip(&["-n", &hub, "link", "add", "lan2", "type", "bridge"])?;
            ip(&["-n", &hub, "link", "set", "lan2", "up"])?;
        }
        if addresses == Addresses::Home {
            // A namespace passes nothing on unless it is told to.
            ip(&["-n", &hub, "address", "add", &format!("{ROUTER}/24"), "dev", "lan"])?;
        }
        for (number, host) in (1..).zip(&self.hosts) {
            let (namespace, port) = (self.namespace(host), port(host));
            ip(&["netns", "add", &namespace])?;
            ip(&["-n", &namespace, "link", "set", "lo", "up"])?;
            ip(&["link", "add", &port, "netns", &hub, "type", "veth", "peer", "name", "eth0", "netns", &namespace])?;
            ip(&["-n", &hub, "link", "set", &port, "master", "lan"])?;
            ip(&["-n", &hub, "link", "set", &port, "up"])?;
            ip(&["-n", &namespace, "link", "set", "eth0", "up"])?;
            if let Addresses::Two(net) = addresses {
                let port = nth_port(host, 1);
                ip(&["link", "add", &port, "netns", &hub, "type", "veth", "peer", "name", "eth1", "netns", &namespace])?;
                ip(&["-n", &hub, "link", "set", &port, "master", "lan2"])?;
                ip(&["-n", &hub, "link", "set", &port, "up"])?;
                ip(&["-n", &namespace, "link", "set", "eth1", "up"])?;
                ip(&["-n", &namespace, "address", "add", &format!("10.76.{net}.{number}/24"), "dev", "eth1"])?;
            }
            let (address, route) = match addresses {
                Addresses::V4(net) | Addresses::Two(net) => (format!("10.77.{net}.{number}/24"), ["224.0.0.0/4", "dev", "eth0"]),
                Addresses::Home => (format!("192.168.77.{number}/24"), ["default", "via", ROUTER]),
                Addresses::LinkLocal => continue,
            };
            ip(&["-n", &namespace, "address", "add", &address, "dev", "eth0"])?;
            ip(&[&["-n", &namespace, "route", "add"], &route[..]].concat())?;
        }
        // A host that people switch on has its addresses long before anybody starts a program.
        let deadline = Instant::now() + ADDRESSES_PATIENCE;
        for host in &self.hosts {
            let namespace = self.namespace(host);
            while !ip(&["-n", &namespace, "-6", "address", "show", "tentative"])?.trim().is_empty() {
                if Instant::now() > deadline {
                    return Err(format!("{namespace} gets no IPv6 address"));
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let v6 = ip(&["-n", &namespace, "-6", "address", "show", "dev", "eth0"])?;
            if addresses == Addresses::LinkLocal && !v6.contains("fe80:") {
                return Err("this machine has no IPv6".to_owned());
            }
        }
        Ok(())
    }

    fn hub(&self) -> String {
        self.namespace("hub")
    }

    /// The namespace of a host.
    pub(crate) fn namespace(&self, host: &str) -> String {
        format!("{}-{host}", self.name)
    }

    /// Gets ready to pull a host's cable in an instant: it takes no program that would have to be started first.
    pub(crate) fn hand_on(&self, host: &str) -> Cable {
        self.hand_on_nth(host, 0)
    }

    /// The same for its cable of this number, 0 or 1.
    pub(crate) fn hand_on_nth(&self, host: &str, nth: usize) -> Cable {
        let mut command = Command::new("ip");
        command.args(["-n", &self.hub(), "-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null());
        Cable { port: nth_port(host, nth), ip: command.spawn().expect("ip runs") }
    }

    /// Gives a host what a container engine does: a bridge with the usual address, and a container on it.
    pub(crate) fn run_a_container(&self, host: &str) -> Result<(), String> {
        let namespace = self.namespace(host);
        for line in [
            "link add docker0 type bridge",
            "address add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
            "link add veth0 type veth peer name inner",
            "link set veth0 master docker0",
            "link set veth0 up",
            "link set inner up",
        ] {
            let words: Vec<&str> = ["-n", &namespace].into_iter().chain(line.split(' ')).collect();
            ip(&words)?;
        }
        Ok(())
    }

    /// Plugs a host's cable in again.
    pub(crate) fn plug_in(&self, host: &str) {
        self.plug_in_nth(host, 0);
    }

    /// Plugs its cable of this number in again.
    pub(crate) fn plug_in_nth(&self, host: &str, nth: usize) {
        ip(&["-n", &self.hub(), "link", "set", &nth_port(host, nth), "up"]).expect("plugged in");
    }
}

impl Drop for Lan {
    fn drop(&mut self) {
        for namespace in self.hosts.iter().map(|host| self.namespace(host)).chain([self.hub()]) {
            // It may not have been made. With the last name of a namespace its cables go, too.
            let _ = ip(&["netns", "delete", &namespace]);
        }
    }
}

/// A hand on a host's cable.
#[derive(Debug)]
pub(crate) struct Cable {
    port: String,
    ip: Child,
}

impl Cable {
    /// Pulls it out of the bridge.
    pub(crate) fn pull(&mut self) {
        let mut input = self.ip.stdin.take().expect("pulled once");
        writeln!(input, "link set {} down", self.port).expect("told");
        drop(input);
        assert!(self.ip.wait().expect("ends").success(), "the cable was not pulled");
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        drop(self.ip.stdin.take());
        let _ = self.ip.wait();
    }
}

/// The bridge's end of a host's cable. Names of interfaces have at most 15 letters.
fn port(host: &str) -> String {
    nth_port(host, 0)
}

fn nth_port(host: &str, nth: usize) -> String {
    if nth == 0 { format!("to-{host}") } else { format!("also-{host}") }
}

/// Does something in a namespace: sockets that are opened and processes that are started there belong to it.
pub(crate) fn inside<T: Send>(namespace: &str, work: impl FnOnce() -> T + Send) -> T {
    // The thread ends in the namespace, so that no other work can find itself there.
    let done = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let file = File::open(Path::new(NAMESPACES).join(namespace)).expect("the namespace is there");
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).expect("entered");
            work()
        });
        thread.join()
    });
    done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Removes what runs that have died left behind.
fn sweep() {
    let Ok(names) = std::fs::read_dir(NAMESPACES) else { return };
    for name in names.filter_map(Result::ok).filter_map(|entry| entry.file_name().into_string().ok()) {
        let maker = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-')).and_then(|(maker, _)| maker.parse::<u32>().ok());
        if maker.is_some_and(|maker| !Path::new("/proc").join(maker.to_string()).exists()) {
            let _ = ip(&["netns", "delete", &name]);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("ip").args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("the program `ip` does not run: {error}"))?;
    if !output.status.success() {
        return Err(format!("`ip {}`: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
