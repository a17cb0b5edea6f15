//! Why a node did not start, or did not do what it was asked.

use super::generation::GenerateError;
use crate::catalog::CatalogError;
use crate::env::NetworkError;
use crate::lease::size;
use crate::service::CallError;

/// Why a node did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The data folder cannot be used.
    #[error("the data folder {folder} cannot be used: {reason}; choose another with --data-dir")]
    DataFolder {
        /// Which.
        folder: String,
        /// The system's words.
        reason: String,
    },
    /// Another node uses the data folder.
    #[error("another node already runs in the data folder {folder}; stop it (`shoal leave`), or choose another with --data-dir")]
    InUse {
        /// Which.
        folder: String,
    },
    /// Nothing can carry tensors to other nodes.
    #[error("this machine has none of the tensor links that were asked for ({asked}); leave them to the node, or add tcp")]
    NoTensorLinks {
        /// Their names.
        asked: String,
    },
    /// The identity.
    #[error(transparent)]
    Identity(#[from] crate::secret::IdentityError),
    /// The count of the node's lives.
    #[error(transparent)]
    Life(#[from] crate::membership::LifeError),
    /// The models folder.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The models folder's settings.
    #[error(transparent)]
    Models(#[from] crate::catalog::StoreError),
    /// The control network.
    #[error(transparent)]
    Network(#[from] NetworkError),
    /// Tensor links.
    #[error(transparent)]
    Tensors(#[from] shoal_transport::provider::StartError),
    /// The device to compute on.
    #[error(transparent)]
    Device(#[from] shoal_engine::device::DeviceError),
    /// A device that does not say how much memory it has.
    #[error("{device} has memory of its own and its driver does not say how much; say with --memory how much of it to lend")]
    DeviceMemory {
        /// Its name.
        device: String,
    },
    /// More memory is to be lent than there is.
    #[error("{} of memory cannot be lent, because {of} has {}; say at most that with --memory, or leave it out", size(*asked), size(*there))]
    TooMuchMemory {
        /// What was asked for, in bytes.
        asked: u64,
        /// What there is, in bytes.
        there: u64,
        /// Whose memory it is.
        of: String,
    },
    /// One of the node's actors.
    #[error("{what} did not start: {reason}")]
    Part {
        /// Which.
        what: &'static str,
        /// Why.
        reason: String,
    },
}

impl StartError {
    /// Whether another program has what the node wants for itself: its data folder, or a port.
    pub fn is_in_use(&self) -> bool {
        match self {
            Self::InUse { .. } => true,
            Self::Network(NetworkError::Listen { in_use, .. }) => *in_use,
            Self::Tensors(shoal_transport::provider::StartError::Listen { source, .. }) => source.kind() == std::io::ErrorKind::AddrInUse,
            _ => false,
        }
    }
}

/// Why a node did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// No node of the cluster has the model.
    #[error("no node has the model `{model}` on disk; fetch it with `shoal pull {model}`{}", here(on_disk))]
    UnknownModel {
        /// What was asked for.
        model: String,
        /// Names of the models that are on disk somewhere.
        on_disk: Vec<String>,
    },
    /// The text names no model at all.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// The model could not be placed; the text says what is missing.
    #[error("{0}")]
    NotPlaced(String),
    /// The node that places the model cannot be reached.
    #[error("the node that places the model does not answer: {0}")]
    Unreachable(CallError),
    /// There is no such instance.
    #[error("there is no instance {0:?}")]
    UnknownInstance(crate::ids::InstanceId),
    /// No text, or no more of it.
    #[error(transparent)]
    Generate(#[from] GenerateError),
}

fn here(on_disk: &[String]) -> String {
    if on_disk.is_empty() { String::new() } else { format!(", or use one that is there: {}", on_disk.join(", ")) }
}
