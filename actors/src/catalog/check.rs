//! Whether a file is a model at all.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

type Check = dyn Fn(&Path) -> Result<(), String> + Send + Sync;

/// Says what is wrong with a file that is to be a model. Cheap to clone.
#[derive(Clone)]
pub struct ModelCheck(Arc<Check>);

impl ModelCheck {
    /// Uses `check`, which gives a reason for people.
    pub fn new(check: impl Fn(&Path) -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(check))
    }

    /// Checks one file.
    ///
    /// # Errors
    /// The reason why it is no model.
    pub fn check(&self, path: &Path) -> Result<(), String> {
        (self.0)(path)
    }
}

impl Default for ModelCheck {
    /// Reads the header as the engine will: a file that is cut short, damaged or no GGUF is refused.
    fn default() -> Self {
        Self::new(|path| match shoal_engine::gguf::Gguf::open(path) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.fault.to_string()),
        })
    }
}

impl fmt::Debug for ModelCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ModelCheck")
    }
}
