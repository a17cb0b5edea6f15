//! Devices that run stages: the engine in a real node, a cost model in a simulated one.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use shoal_engine::card::ModelCard;
use shoal_engine::stage::{Stage, StageOptions, StageSpec};

use super::TextModel;
use crate::card::DeviceCard;

/// Why a stage could not be loaded or a model not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct ComputeError {
    /// What happened, to what, and what to do.
    pub reason: String,
}

/// Loads stages of models onto the node's devices.
pub trait Compute: Send + Sync + fmt::Debug + 'static {
    /// The node's devices, best first. Their speeds may be zero, which means that they are not known yet.
    fn devices(&self) -> Vec<DeviceCard>;

    /// The same with their speeds measured. May take a second, at full load.
    fn measure(&self) -> Vec<DeviceCard> {
        self.devices()
    }

    /// What the planner needs to know of a model on disk.
    ///
    /// # Errors
    /// If the file is no model that the engine can run.
    fn model_card(&self, path: &Path) -> Result<ModelCard, ComputeError>;

    /// The model's tokenizer and chat template.
    ///
    /// # Errors
    /// If the file has none that the engine knows.
    fn text(&self, path: &Path) -> Result<Arc<dyn TextModel>, ComputeError>;

    /// Loads the tensors of one stage, and no others. Blocks for as long as that takes.
    ///
    /// # Errors
    /// If the file cannot be read or the engine cannot run it.
    fn load(&self, path: &Path, spec: &StageSpec, options: &StageOptions) -> Result<Box<dyn Stage>, ComputeError>;
}
