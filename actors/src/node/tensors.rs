//! What carries tensors from a node to others: the providers that its machine has.

use std::net::SocketAddr;
use std::sync::Arc;

use shoal_transport::Effects;
#[cfg(target_os = "linux")]
use shoal_transport::provider::shm::{ShmOptions, ShmProvider};
use shoal_transport::provider::tcp::{Encryption, TcpOptions, TcpProvider};
#[cfg(unix)]
use shoal_transport::provider::verbs::{VerbsOptions, VerbsProvider};
use shoal_transport::provider::{Desk, Provider, ProviderKind};

use super::error::StartError;

/// What is asked for.
#[derive(Debug, Clone)]
pub(super) struct TensorSettings {
    pub(super) listen: Vec<SocketAddr>,
    pub(super) encryption: Encryption,
    pub(super) rails: u8,
    /// None: all that there are.
    pub(super) kinds: Option<Vec<ProviderKind>>,
}

impl Default for TensorSettings {
    fn default() -> Self {
        Self { listen: Vec::new(), encryption: Encryption::default(), rails: 1, kinds: None }
    }
}

impl TensorSettings {
    /// The ways to other nodes, best first. What the machine does not have is left out, as long as something is left.
    pub(super) fn providers(&self, effects: &Effects) -> Result<Vec<Arc<dyn Provider>>, StartError> {
        let desk = Desk::new(ProviderKind::Tcp, Arc::clone(&effects.clock));
        let wants = |kind| self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&kind));
        let mut providers: Vec<Arc<dyn Provider>> = Vec::new();
        #[cfg(target_os = "linux")]
        if wants(ProviderKind::Shm) {
            match ShmProvider::with_desk(effects.clone(), ShmOptions::default(), Arc::clone(&desk)) {
                Ok(shm) => providers.push(Arc::new(shm)),
                Err(error) => tracing::warn!(target: "shoal::node", %error, "nodes of this machine are reached over the network"),
            }
        }
        #[cfg(unix)]
        if wants(ProviderKind::Verbs) {
            // The port is the other provider's.
            let listen = self.listen.iter().map(|address| SocketAddr::new(address.ip(), 0)).collect();
            match VerbsProvider::with_desk(effects.clone(), VerbsOptions { listen, ..VerbsOptions::default() }, Arc::clone(&desk)) {
                Ok(verbs) => providers.push(Arc::new(verbs)),
                // Few machines have such a device.
                Err(error) => tracing::debug!(target: "shoal::node", %error, "no links over RDMA adapters"),
            }
        }
        if wants(ProviderKind::Tcp) {
            let options =
                TcpOptions { listen: self.listen.clone(), encryption: self.encryption, rails: self.rails, ..TcpOptions::default() };
            providers.push(Arc::new(TcpProvider::with_desk(effects.clone(), options, desk)?));
        }
        if providers.is_empty() {
            let asked: Vec<String> = self.kinds.iter().flatten().map(ToString::to_string).collect();
            return Err(StartError::NoTensorLinks { asked: asked.join(", ") });
        }
        Ok(providers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::{Spawner, SystemClock, SystemRng, SystemSpawner};
    use crate::ids::NodeId;
    use crate::stage::links::TensorLinks;

    fn settings(kinds: Option<Vec<ProviderKind>>) -> TensorSettings {
        TensorSettings { listen: vec!["127.0.0.1:0".parse().unwrap()], kinds, ..TensorSettings::default() }
    }

    fn effects() -> Effects {
        let spawner: Arc<dyn Spawner> = Arc::new(SystemSpawner::new(tokio::runtime::Handle::current()));
        Effects { clock: Arc::new(SystemClock), rng: Arc::new(SystemRng), spawner }
    }

    /// One ticket is good at every door of a node, and the best one is taken first.
    #[tokio::test]
    async fn nodes_of_one_machine_share_memory_and_fall_back_to_the_network() {
        let effects = effects();
        let links = |node: u8| TensorLinks::new(NodeId([node; 32]), effects.clone(), settings(None).providers(&effects).unwrap());
        let (one, two) = (links(1), links(2));
        let best = if cfg!(target_os = "linux") { ProviderKind::Shm } else { ProviderKind::Tcp };
        for (without, provider) in [(None, best), (Some(ProviderKind::Shm), ProviderKind::Tcp)] {
            let soon = || effects.after(std::time::Duration::from_secs(60));
            let (mut endpoints, ticket, expected) = two.expect_link(NodeId([1; 32]), 4096).unwrap();
            endpoints.retain(|endpoint| Some(endpoint.kind()) != without);
            let near = one.dial_link(NodeId([2; 32]), &endpoints, &ticket, 4096).unwrap();
            let far = expected.accept(soon()).unwrap();
            assert_eq!((near.provider(), far.provider()), (provider, provider));

            let (mut endpoints, secret, expecting) = two.expect(NodeId([1; 32]), 4096).unwrap();
            endpoints.retain(|endpoint| Some(endpoint.kind()) != without);
            let near = one.dial(NodeId([2; 32]), &endpoints, &secret, 4096).unwrap();
            let far = expecting.accept(soon()).unwrap();
            assert_eq!([&near, &far].map(|end| end.health().map(|health| health.provider)), [Some(provider); 2]);
        }
        one.shutdown();
        two.shutdown();
    }

    #[tokio::test]
    async fn what_is_not_asked_for_is_not_used_and_nothing_at_all_is_refused() {
        let effects = effects();
        let kinds = |kinds| -> Vec<ProviderKind> {
            settings(Some(kinds)).providers(&effects).unwrap().iter().map(|provider| provider.kind()).collect()
        };
        assert_eq!(kinds(vec![ProviderKind::Tcp]), [ProviderKind::Tcp]);
        if cfg!(target_os = "linux") {
            assert_eq!(kinds(vec![ProviderKind::Tcp, ProviderKind::Shm]), [ProviderKind::Shm, ProviderKind::Tcp]);
        }
        let refused = settings(Some(vec![ProviderKind::Memory])).providers(&effects).unwrap_err();
        assert!(matches!(&refused, StartError::NoTensorLinks { asked } if asked == "memory"), "{refused}");
    }
}
