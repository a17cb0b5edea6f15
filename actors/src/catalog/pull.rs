//! From a reference to a model on disk: what one pull does, on a thread of its own.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use super::cancel::Cancel;
use super::digest::Sha256;
use super::fetch::{self, FetchError, Job, Phase, Progress, Tools};
use super::known::{HubFile, KnownModel, Source};
use super::reference::{HubReference, Reference, ends_in_gguf};
use super::store::{LocalModel, Manifest, Store};
use super::{CatalogError, CatalogSettings};
use crate::env::{Clock, Http, Rng};

/// What all operations share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) settings: Arc<CatalogSettings>,
    pub(crate) store: Store,
    pub(crate) http: Arc<dyn Http>,
    pub(crate) rng: Arc<dyn Rng>,
    pub(crate) clock: Arc<dyn Clock>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("store", &self.store).finish_non_exhaustive()
    }
}

impl Shared {
    /// Reads what a user wrote.
    pub(crate) fn parse(&self, text: &str) -> Result<Reference, CatalogError> {
        let home = self.settings.home.as_deref();
        Ok(Reference::parse(text, &self.settings.known, home)?)
    }

    fn known(&self, name: &str) -> Option<&KnownModel> {
        self.settings.known.iter().find(|model| model.name() == name)
    }

    /// A model that is on disk already.
    pub(crate) fn resolve(&self, reference: &Reference) -> Result<LocalModel, CatalogError> {
        let found = match reference {
            Reference::Known(name) => self.store.find(name),
            Reference::File(path) => return Ok(self.store.file(path, &|path| self.settings.check.check(path))?),
            Reference::Hub(hub) => self.resolve_hub(hub)?,
        };
        let model = found.ok_or_else(|| CatalogError::NotHere { name: reference.to_string() })?;
        self.settings.check.check(&model.path).map_err(|reason| super::StoreError::NotAModel { path: model.path.clone(), reason })?;
        Ok(model)
    }

    /// The file of a repository that fits, among those on disk, chosen as it would be on the hub.
    fn resolve_hub(&self, hub: &HubReference) -> Result<Option<LocalModel>, CatalogError> {
        if let Some(exact) = self.store.find(&hub.to_string()) {
            return Ok(Some(exact));
        }
        if hub.choice.as_deref().is_some_and(ends_in_gguf) {
            return Ok(None);
        }
        let prefix = format!("{}:", HubReference { choice: None, ..hub.clone() });
        let models = self.store.list()?.models;
        let files: Vec<&str> = models.iter().filter_map(|model| model.name.strip_prefix(&prefix)).collect();
        if files.is_empty() {
            return Ok(None);
        }
        match fetch::pick(&hub.repository, &files, hub.choice.as_deref()) {
            Ok(file) => Ok(models.into_iter().find(|model| model.name == format!("{prefix}{file}"))),
            Err(FetchError::Choice { choice: Some(_), files, .. }) if files.len() == models.len() => Ok(None),
            Err(_) => Ok(None),
        }
    }

    /// Fetches a model unless it is on disk.
    pub(crate) fn pull(&self, reference: &Reference, cancel: &Cancel, sink: &dyn Fn(&Progress)) -> Result<LocalModel, CatalogError> {
        let tools = Tools::new(&*self.http, &*self.rng, &*self.settings.space, cancel, self.settings.retry, sink);
        match reference {
            Reference::File(_) => self.resolve(reference),
            Reference::Known(name) => {
                let Some(known) = self.known(name) else { return Err(CatalogError::NotHere { name: name.clone() }) };
                let sought = Sought {
                    name,
                    file: &known.file,
                    sha256: Some(known.sha256),
                    bytes: Some(known.bytes),
                    sources: &known.sources,
                    licence: Some(&known.licence),
                };
                self.pull_one(&tools, &sought)
            }
            Reference::Hub(hub) => {
                if let Some(model) = self.resolve_hub(hub)? {
                    return Ok(model);
                }
                let chosen = fetch::choose(&tools, &self.settings.sources.hub, hub)?;
                let HubFile { repository, file, .. } = &chosen.file;
                let name = HubReference { repository: repository.clone(), revision: hub.revision.clone(), choice: Some(file.clone()) };
                let sought = Sought {
                    name: &name.to_string(),
                    file: &plain_name(file),
                    sha256: chosen.sha256,
                    bytes: chosen.bytes,
                    sources: &[Source::Hub(chosen.file.clone())],
                    licence: chosen.licence.as_deref(),
                };
                self.pull_one(&tools, &sought)
            }
        }
    }

    fn pull_one(&self, tools: &Tools<'_>, sought: &Sought<'_>) -> Result<LocalModel, CatalogError> {
        if let Some(model) = self.have(sought) {
            return Ok(model);
        }
        tools.set_source("models folder");
        let waiting = || tools.report(Phase::Wait, 0, sought.bytes);
        let Some(_lock) = self.store.lock(sought.name, tools.cancel, &waiting)? else {
            return Err(FetchError::Cancelled.into());
        };
        // Whoever had the lock may have fetched it.
        if let Some(model) = self.have(sought) {
            return Ok(model);
        }
        let staging = self.store.staging(sought.name)?;
        if let Some(orphan) = sought.bytes.and_then(|bytes| self.store.orphan(sought.name, sought.file, bytes)) {
            let _ = std::fs::rename(orphan, staging.join(sought.file));
        }
        let check = |path: &Path| self.settings.check.check(path);
        let job = Job {
            model: sought.name,
            file: sought.file,
            sha256: sought.sha256,
            bytes: sought.bytes,
            sources: sought.sources,
            staging: &staging,
            check: &check,
        };
        let fetched = fetch::fetch(tools, &self.settings.sources, &job)?;
        let now = self.clock.unix_time();
        let manifest = Manifest::new(sought.name, sought.file, fetched.sha256, fetched.bytes, &fetched.source, sought.licence, now);
        let model = self.store.commit(&fetched.path, &manifest)?;
        tracing::info!(target: "shoal::catalog", model = sought.name, source = fetched.source, bytes = fetched.bytes, "model fetched");
        Ok(model)
    }

    /// The model, if it is on disk and still the one that is meant.
    fn have(&self, sought: &Sought<'_>) -> Option<LocalModel> {
        let model = self.store.find(sought.name)?;
        let right = sought.sha256.is_none_or(|sha256| sha256.to_string() == model.sha256);
        (right && self.settings.check.check(&model.path).is_ok()).then_some(model)
    }
}

/// A model that is to be on disk.
struct Sought<'a> {
    name: &'a str,
    file: &'a str,
    sha256: Option<Sha256>,
    bytes: Option<u64>,
    sources: &'a [Source],
    licence: Option<&'a str>,
}

/// A repository's path as the name of a file in a folder of its own.
fn plain_name(path: &str) -> String {
    let last = path.rsplit(['/', '\\']).next().unwrap_or(path);
    let name: String = last.chars().filter(|c| !c.is_control()).take(200).collect();
    let name = name.trim_start_matches('.');
    if ends_in_gguf(name) { name.to_owned() } else { "model.gguf".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_stay_in_their_folder() {
        assert_eq!(plain_name("Q4/m-Q4.gguf"), "m-Q4.gguf");
        assert_eq!(plain_name("x/..gguf"), "model.gguf");
        assert_eq!(plain_name("../.gguf"), "model.gguf");
        assert_eq!(plain_name(&format!("{}.gguf", "x".repeat(300))), "model.gguf");
    }
}
