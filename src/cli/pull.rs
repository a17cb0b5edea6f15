//! `shoal pull`

use std::sync::{Arc, Mutex, PoisonError};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use shoal::env::{SystemClock, SystemRng, SystemSpawner};
use shoal::{Cancel, Catalog, CatalogEffects, CatalogSettings, LocalModel, Phase, Progress};

use super::{Failure, ModelsOption, Signals, note, say, size_text};

#[derive(Debug, Args)]
#[command(after_help = "Ctrl-C keeps what has come; the next pull goes on from there.\n\n\
    Examples:\n  shoal pull smollm2:135m\n  shoal pull owner/name:Q4_K_M\n  HF_TOKEN=… shoal pull owner/gated-model")]
pub(crate) struct Pull {
    /// A name of the catalogue, or a repository on the hub
    model: String,
    /// Print what was fetched as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    models: ModelsOption,
}

impl Pull {
    pub(crate) async fn run(self) -> Result<(), Failure> {
        let catalog = open_catalog(&self.models).await?;
        let mut signals = Signals::listen()?;
        let cancel = Cancel::new();
        let model = {
            let pulled = fetch(&catalog, &self.model, &cancel);
            tokio::pin!(pulled);
            loop {
                tokio::select! {
                    biased;
                    result = &mut pulled => break result,
                    () = signals.next() => {
                        if cancel.is_cancelled() {
                            return Err(Failure::interrupted());
                        }
                        cancel.cancel();
                    }
                }
            }
        };
        catalog.stop().await;
        let model = match model {
            Err(failure) if cancel.is_cancelled() => {
                note!("{failure}");
                return Err(Failure::interrupted());
            }
            model => model?,
        };
        if self.json {
            say!("{}", serde_json::to_string(&model).unwrap_or_default());
        } else {
            say!("{} is on disk: {}, {}", model.name, size_text(model.bytes), model.path.display());
            say!("licence: {}", model.licence.as_deref().unwrap_or("unknown"));
        }
        Ok(())
    }
}

/// The settings of the models folder.
pub(crate) fn catalog_settings(option: &ModelsOption) -> Result<CatalogSettings, Failure> {
    let mut settings = CatalogSettings::from_process()?;
    if let Some(folder) = &option.models_dir {
        settings.root = std::path::absolute(folder)?;
    }
    Ok(settings)
}

/// The models folder, without a node.
pub(crate) async fn open_catalog(option: &ModelsOption) -> Result<Catalog, Failure> {
    let mut settings = catalog_settings(option)?;
    // Nobody watches it here.
    settings.refresh = None;
    let http = Arc::new(settings.http(&|name| std::env::var(name).ok()));
    let spawner = Arc::new(SystemSpawner::new(tokio::runtime::Handle::current()));
    let effects = CatalogEffects { http, clock: Arc::new(SystemClock), rng: Arc::new(SystemRng), spawner };
    Ok(Catalog::start(settings, effects).await?)
}

/// Fetches a model unless it is on disk, with a progress bar on standard error if that is a terminal.
pub(crate) async fn fetch(catalog: &Catalog, model: &str, cancel: &Cancel) -> Result<LocalModel, Failure> {
    let bar = ProgressBar::no_length();
    let sink = {
        let bar = bar.clone();
        let shown = Mutex::new(Shown::default());
        Arc::new(move |progress: &Progress| shown.lock().unwrap_or_else(PoisonError::into_inner).update(&bar, progress))
    };
    let result = catalog.pull(model, sink, cancel).await;
    bar.finish_and_clear();
    Ok(result?)
}

/// What stands there at the moment.
#[derive(Debug, Default)]
struct Shown {
    /// The phase, and whether its end is known.
    style: Option<(Phase, bool)>,
    /// Where the line that stands in for a bar said that the model comes from.
    told: Option<Arc<str>>,
}

impl Shown {
    fn update(&mut self, bar: &ProgressBar, progress: &Progress) {
        let style = (progress.phase, progress.total.is_some());
        if self.style != Some(style) {
            self.style = Some(style);
            let text = match progress.total {
                Some(_) => "{msg} {bar:30} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}",
                None => "{spinner} {msg}",
            };
            if let Ok(style) = ProgressStyle::with_template(text) {
                bar.set_style(style);
            }
            bar.reset_eta();
            bar.set_message(format!("{} ({})", progress.phase, progress.source));
        }
        // Not a terminal: one line for each source says what takes so long.
        if bar.is_hidden() && progress.phase == Phase::Download && self.told.as_ref() != Some(&progress.source) {
            self.told = Some(Arc::clone(&progress.source));
            let size = progress.total.map(size_text).unwrap_or_else(|| "an unknown size".to_owned());
            note!("fetching {size} from {}", progress.source);
        }
        match progress.total {
            Some(total) => bar.set_length(total),
            None => bar.unset_length(),
        }
        bar.set_position(progress.done);
    }
}
