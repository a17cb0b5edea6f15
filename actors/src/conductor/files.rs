//! Models' files by their hash.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use crate::catalog::{Catalog, LocalModel};

/// Files that were placed from outside the models folder, where the catalogue does not list them.
#[derive(Debug, Clone, Default)]
pub struct LocalFiles(Arc<RwLock<BTreeMap<String, LocalModel>>>);

impl LocalFiles {
    /// Remembers where a model is, if the catalogue would not find it.
    pub(super) fn note(&self, models: &Path, model: &LocalModel) {
        if !model.path.starts_with(models) {
            self.0.write().unwrap_or_else(PoisonError::into_inner).insert(model.sha256.clone(), model.clone());
        }
    }

    /// The model with this hash, if it is on this machine.
    pub(crate) fn model(&self, catalog: &Catalog, sha256: &str) -> Option<LocalModel> {
        let noted = self.0.read().unwrap_or_else(PoisonError::into_inner).get(sha256).cloned();
        noted.or_else(|| catalog.with_hash(sha256))
    }

    /// The file with this hash, if it is on this machine.
    pub(crate) fn path(&self, catalog: &Catalog, sha256: &str) -> Option<PathBuf> {
        self.model(catalog, sha256).map(|model| model.path)
    }
}
