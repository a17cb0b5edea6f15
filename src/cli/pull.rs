//! `shoal pull`

use std::sync::Arc;

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
        let shown = std::sync::Mutex::new(None);
        Arc::new(move |progress: &Progress| show(&bar, &shown, progress))
    };
    let result = catalog.pull(model, sink, cancel).await;
    bar.finish_and_clear();
    Ok(result?)
}

fn show(bar: &ProgressBar, shown: &std::sync::Mutex<Option<Phase>>, progress: &Progress) {
    let mut shown = shown.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if *shown != Some(progress.phase) {
        *shown = Some(progress.phase);
        let text = match progress.total {
            Some(_) => "{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{spinner} {msg}",
        };
        if let Ok(style) = ProgressStyle::with_template(text) {
            bar.set_style(style);
        }
        bar.reset_eta();
        bar.set_message(format!("{} ({})", progress.phase, progress.source));
        if bar.is_hidden() && progress.phase == Phase::Download {
            // Not a terminal: one line says what takes so long.
            let size = progress.total.map(size_text).unwrap_or_else(|| "an unknown size".to_owned());
            note!("fetching {size} from {}", progress.source);
        }
    }
    match progress.total {
        Some(total) => bar.set_length(total),
        None => bar.unset_length(),
    }
    bar.set_position(progress.done);
}
