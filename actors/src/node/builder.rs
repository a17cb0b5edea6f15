//! How a node is made.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use shoal_transport::Effects;
use shoal_transport::provider::ProviderKind;
use shoal_transport::provider::tcp::Encryption;

use super::error::StartError;
use super::lock::FolderLock;
use super::tensors::TensorSettings;
use super::{Node, parts};
use crate::catalog::CatalogSettings;
use crate::compute::EngineCompute;
use crate::discovery::beacon::SystemBeacon;
use crate::env::{
    Beacon, BoxFuture, Clock, Compute, DirectoryStorage, Env, MemoryStorage, NetworkFactory, Rng, Spawner, Storage, SystemClock, SystemRng,
    SystemSpawner,
};
use crate::membership;
use crate::network::Libp2pNetwork;
use crate::pressure::{MemoryGauge, SystemGauge};
use crate::secret::{ClusterKey, Identity};
use crate::stage::links::TensorLinks;
use crate::survey::{self, DeviceChoice, Facts};

/// How long pipelines stand before they go over to a better plan. Going over costs a running answer the time that its tokens so far take
/// to be run again.
const REPLAN_AFTER: Duration = Duration::from_secs(30);

/// Sets a node up. Every setting has a default with which the node joins whatever it finds on the local network.
#[derive(Debug, Default)]
pub struct NodeBuilder {
    folder: Folder,
    name: Option<String>,
    listen: Vec<SocketAddr>,
    tensors: TensorSettings,
    peers: Vec<SocketAddr>,
    cluster: Option<ClusterKey>,
    quiet: bool,
    no_mdns: bool,
    memory: Option<u64>,
    threads: Option<u32>,
    device: DeviceChoice,
    models: Option<CatalogSettings>,
    api: Option<String>,
    network: Option<Arc<dyn NetworkFactory>>,
    compute: Option<Arc<dyn Compute>>,
    gauge: Option<Arc<dyn MemoryGauge>>,
    beacon: Option<Arc<dyn Beacon>>,
    replan_after: Option<Duration>,
}

#[derive(Debug, Default)]
enum Folder {
    #[default]
    Default,
    At(PathBuf),
    Memory,
}

impl NodeBuilder {
    /// Where the node keeps its identity and what it knows of peers. One node at a time can use a folder. Default: the
    /// user's data folder, `shoal` in it.
    #[must_use]
    pub fn data_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Folder::At(folder.into());
        self
    }

    /// Keeps nothing on disk: the node has a new identity at every start.
    #[must_use]
    pub fn in_memory(mut self) -> Self {
        self.folder = Folder::Memory;
        self
    }

    /// The node's name, for people. Default: the host's.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Where to listen for control connections. Default: every interface, a port that the system chooses.
    #[must_use]
    pub fn listen(mut self, addresses: Vec<SocketAddr>) -> Self {
        self.listen = addresses;
        self
    }

    /// Where to listen for tensor links. Default: every interface, a port that the system chooses.
    #[must_use]
    pub fn tensor_listen(mut self, addresses: Vec<SocketAddr>) -> Self {
        self.tensors.listen = addresses;
        self
    }

    /// Whether tensor links are encrypted. Default: those that leave the machine, and those of peers that demand it.
    #[must_use]
    pub fn tensor_encryption(mut self, encryption: Encryption) -> Self {
        self.tensors.encryption = encryption;
        self
    }

    /// Connections of a TCP tensor link, 1 to 16, of which there are as many as both ends want: more than one pays where two machines have
    /// several cables. Default: 1.
    #[must_use]
    pub fn tensor_rails(mut self, rails: u8) -> Self {
        self.tensors.rails = rails;
        self
    }

    /// What may carry tensors to other nodes. Default: whatever the machine has.
    #[must_use]
    pub fn tensor_links(mut self, kinds: Vec<ProviderKind>) -> Self {
        self.tensors.kinds = Some(kinds);
        self
    }

    /// Peers to connect to, beside those that are found.
    #[must_use]
    pub fn peers(mut self, peers: Vec<SocketAddr>) -> Self {
        self.peers = peers;
        self
    }

    /// Makes the node part of the private cluster that shares this key.
    #[must_use]
    pub fn cluster_key(mut self, key: ClusterKey) -> Self {
        self.cluster = Some(key);
        self
    }

    /// Whether to find peers by mDNS. Default: yes.
    #[must_use]
    pub fn mdns(mut self, on: bool) -> Self {
        self.no_mdns = !on;
        self
    }

    /// Whether to find peers by multicast hellos. Default: yes.
    #[must_use]
    pub fn beacon(mut self, on: bool) -> Self {
        self.quiet = !on;
        self
    }

    /// Memory that the node lends, in bytes: of the device that it computes on, if that has its own. Default: a good part of what is
    /// available.
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// Compute threads. Default: the host's cores.
    #[must_use]
    pub fn threads(mut self, threads: u32) -> Self {
        self.threads = Some(threads.max(1));
        self
    }

    /// What the node computes on. Default: the host's processor.
    #[must_use]
    pub fn device(mut self, device: DeviceChoice) -> Self {
        self.device = device;
        self
    }

    /// Where models are kept and come from. Default: what the environment says.
    #[must_use]
    pub fn models(mut self, settings: CatalogSettings) -> Self {
        self.models = Some(settings);
        self
    }

    /// Where the node's HTTP interface will listen, to tell the others.
    #[must_use]
    pub fn api_address(mut self, address: impl Into<String>) -> Self {
        self.api = Some(address.into());
        self
    }

    /// Another gauge of the machine's memory than the machine's own word. What is offered follows it ([`crate::pressure`]), unless the device
    /// that the node computes on has memory of its own.
    #[must_use]
    pub fn memory_gauge(mut self, gauge: Arc<dyn MemoryGauge>) -> Self {
        self.gauge = Some(gauge);
        self
    }

    /// Another control network than libp2p, e.g. [`crate::network::MemoryNetwork`].
    #[must_use]
    pub fn network(mut self, factory: Arc<dyn NetworkFactory>) -> Self {
        self.network = Some(factory);
        self
    }

    /// Another compute than the engine.
    #[must_use]
    pub fn compute(mut self, compute: Arc<dyn Compute>) -> Self {
        self.compute = Some(compute);
        self
    }

    /// How long the pipelines that this node conducts stand at least before they go over to a plan that is predicted to be a quarter
    /// faster. Default: 30 seconds.
    #[must_use]
    pub fn replan_after(mut self, time: Duration) -> Self {
        self.replan_after = Some(time);
        self
    }

    /// Starts the node on the current tokio runtime.
    ///
    /// # Errors
    /// [`StartError`]; whatever had started is stopped again.
    pub fn start(self) -> BoxFuture<'static, Result<Node, StartError>> {
        // Boxed here, so that every part of a node is compiled once, in this crate, and not again in each program that starts one.
        Box::pin(self.run())
    }

    #[expect(clippy::disallowed_methods, reason = "the edge at which a node of a real machine is made")]
    async fn run(self) -> Result<Node, StartError> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let rng: Arc<dyn Rng> = Arc::new(SystemRng);
        let spawner: Arc<dyn Spawner> = Arc::new(SystemSpawner::new(tokio::runtime::Handle::current()));
        let (storage, lock) = self.folder.open()?;
        let identity = Identity::load_or_create(&*storage, &*rng)?;
        let settings = match self.models {
            Some(settings) => settings,
            None => CatalogSettings::from_process()?,
        };

        let http = Arc::new(settings.http(&|name| std::env::var(name).ok()));

        let mut facts = Facts::read();
        let threads = self.threads.unwrap_or_else(|| facts.cores.max(1));
        let mut hosts = true;
        let (compute, device_offer) = match self.compute {
            Some(compute) => (compute, None),
            None => {
                let choice = self.device;
                // Drivers of graphics processors take their time.
                let chosen = tokio::task::spawn_blocking(move || survey::choose(choice, threads)).await;
                let chosen = chosen.map_err(|error| StartError::Part { what: "the device", reason: error.to_string() })??;
                let (of, there) = match chosen.own_memory_bytes {
                    Some(bytes) => (chosen.card.name.as_str(), bytes),
                    None => ("this machine", facts.memory.total_bytes),
                };
                // Where nobody says how much there is, the user knows better.
                if let Some(asked) = self.memory.filter(|asked| there > 0 && *asked > there) {
                    return Err(StartError::TooMuchMemory { asked, there, of: of.to_owned() });
                }
                let offer = chosen.default_offer();
                if offer == Some(0) && self.memory.is_none() {
                    return Err(StartError::DeviceMemory { device: chosen.card.name });
                }
                if let Some(slot) = &chosen.slot {
                    facts.uses(slot);
                }
                if let Some(bytes) = chosen.own_memory_bytes {
                    facts.memory.total_bytes = bytes;
                    hosts = false;
                }
                let compute: Arc<dyn Compute> = Arc::new(EngineCompute::new(chosen.device, chosen.card, Arc::clone(&clock)));
                (compute, offer)
            }
        };
        let offered = self.memory.or(device_offer).unwrap_or_else(|| survey::default_offer(&facts.memory));
        let incarnation = membership::next_incarnation(&*storage, &*rng)?;
        let mut card = facts.card(identity.node(), incarnation, offered, compute.devices());
        if let Some(name) = self.name {
            card.name = name;
        }
        card.api = self.api;

        let effects = Effects { clock: Arc::clone(&clock), rng: Arc::clone(&rng), spawner: Arc::clone(&spawner) };
        let links = TensorLinks::new(identity.node(), effects.clone(), self.tensors.providers(&effects)?);
        let network = self.network.unwrap_or_else(|| Arc::new(Libp2pNetwork::default()));
        let beacon = (!self.quiet).then(|| self.beacon.unwrap_or_else(|| Arc::new(SystemBeacon::default())));
        let env = Env { clock, rng, spawner, network, storage, compute };
        // Finding the others does not wait for it.
        let measure = Arc::clone(&env.compute);
        let measured = env.blocking("shoal-measure", move || measure.measure());
        let node = parts::start(parts::Settings {
            env,
            identity,
            incarnation,
            card,
            offered,
            gauge: hosts.then(|| self.gauge.unwrap_or_else(|| Arc::new(SystemGauge))),
            threads: threads as usize,
            links,
            cluster: self.cluster,
            listen: self.listen,
            peers: self.peers,
            mdns: !self.no_mdns,
            beacon,
            catalog: settings,
            http,
            replan_after: self.replan_after.unwrap_or(REPLAN_AFTER),
            lock,
        })
        .await?;
        match measured.await {
            Ok(used) => node.membership().update_card(|card| card.devices = facts.devices(used)),
            Err(reason) => tracing::warn!(target: "shoal::node", %reason, "the devices were not measured: plans assume ordinary ones"),
        }
        Ok(node)
    }
}

impl Folder {
    fn open(self) -> Result<(Arc<dyn Storage>, Option<FolderLock>), StartError> {
        let path = match self {
            Self::Memory => return Ok((Arc::new(MemoryStorage::default()), None)),
            Self::At(path) => path,
            Self::Default => {
                directories::ProjectDirs::from("", "", "shoal").map(|folders| folders.data_dir().to_owned()).ok_or_else(|| {
                    StartError::DataFolder { folder: "of the user".to_owned(), reason: "this user has no home folder".to_owned() }
                })?
            }
        };
        let unusable = |error: std::io::Error| StartError::DataFolder { folder: path.display().to_string(), reason: error.to_string() };
        let storage = DirectoryStorage::open(&path).map_err(unusable)?;
        let lock = FolderLock::take(&path).map_err(unusable)?.ok_or_else(|| StartError::InUse { folder: path.display().to_string() })?;
        Ok((Arc::new(storage), Some(lock)))
    }
}
