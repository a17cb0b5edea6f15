//! The catalogue against a real HTTP server on this machine.

mod hub;
mod index;
mod server;
mod sharing;

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::digest::Hasher;
use super::*;
use crate::env::{SystemClock, SystemRng, SystemSpawner};
use server::{Request, Response, Server};
use shoal_engine::gguf::{Value, Writer};
use shoal_engine::quant::BlockType;

/// A catalogue in a folder of its own, with what it needs.
struct Fixture {
    folder: tempfile::TempDir,
    settings: CatalogSettings,
    progress: Arc<Mutex<Vec<Progress>>>,
}

impl Fixture {
    fn new(hub: &str, index: &str, known: Vec<KnownModel>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let quick = RetryPolicy { attempts: 4, delay_first: Duration::ZERO, delay_max: Duration::ZERO, progress_bytes: 1 };
        let settings = CatalogSettings {
            root: folder.path().join("models"),
            home: None,
            known,
            sources: Sources { hub: HubSettings::new(hub).expect("an address"), index: IndexSettings::new([index]).expect("an address") },
            retry: quick,
            refresh: None,
            check: ModelCheck::default(),
            space: Arc::new(SystemSpace),
        };
        Self { folder, settings, progress: Arc::default() }
    }

    async fn start(&self) -> Catalog {
        let http = Arc::new(SystemHttp::new(ProxyRules::default(), &TlsRoots::default()));
        let spawner = Arc::new(SystemSpawner::new(tokio::runtime::Handle::current()));
        let effects = CatalogEffects { http, clock: Arc::new(SystemClock), rng: Arc::new(SystemRng), spawner };
        Catalog::start(self.settings.clone(), effects).await.expect("starts")
    }

    fn sink(&self) -> ProgressSink {
        let progress = Arc::clone(&self.progress);
        Arc::new(move |step| progress.lock().expect("not poisoned").push(step.clone()))
    }

    async fn pull(&self, model: &str) -> Result<LocalModel, CatalogError> {
        let catalog = self.start().await;
        let pulled = catalog.pull(model, self.sink(), &Cancel::new()).await;
        catalog.stop().await;
        pulled
    }

    fn phases(&self) -> Vec<Phase> {
        let mut phases: Vec<Phase> = self.progress.lock().expect("not poisoned").iter().map(|step| step.phase).collect();
        phases.dedup();
        phases
    }

    /// All files of the models folder, staging included, that hold a piece of a download.
    fn parts(&self) -> Vec<std::path::PathBuf> {
        fn walk(folder: &Path, out: &mut Vec<std::path::PathBuf>) {
            for entry in std::fs::read_dir(folder).expect("lists").flatten() {
                match entry.path() {
                    path if path.is_dir() => walk(&path, out),
                    path if path.extension().is_some_and(|extension| extension == "part") => out.push(path),
                    _ => {}
                }
            }
        }
        let mut out = Vec::new();
        walk(&self.settings.root, &mut out);
        out
    }
}

/// A whole GGUF file with one tensor, about 3 MB, so that it comes in many pieces.
fn gguf(seed: u8) -> Vec<u8> {
    let elements = 768 * 1024_u32;
    let bytes: Vec<u8> =
        (0..elements).flat_map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(u32::from(seed)) >> 9).to_le_bytes()).collect();
    let mut writer = Writer::new();
    writer.metadata("general.architecture", Value::String("llama".into()));
    writer.tensor("x", &[1024, u64::from(elements) / 1024], BlockType::F32, bytes);
    writer.finish()
}

fn sha256(bytes: &[u8]) -> Sha256 {
    let mut hasher = Hasher::default();
    hasher.update(bytes);
    hasher.finish()
}

/// A catalogue of one model `m:1`.
fn known(content: &[u8], sources: Vec<Source>) -> Vec<KnownModel> {
    vec![KnownModel {
        names: vec!["m:1".into(), "m".into()],
        description: "a test".into(),
        licence: "MIT".into(),
        file: "m.gguf".into(),
        bytes: content.len() as u64,
        sha256: sha256(content),
        sources,
    }]
}

fn hub_source() -> Source {
    Source::Hub(HubFile { repository: "own/rep".into(), revision: "main".into(), file: "m.gguf".into() })
}

/// Where the file of [`hub_source`] is.
const HUB_PATH: &str = "/own/rep/resolve/main/m.gguf";

/// A wheel with one file in it.
fn wheel(member: &str, content: &[u8]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    let options = zip::write::SimpleFileOptions::default();
    zip.start_file("pkg/__init__.py", options).expect("starts");
    zip.write_all(b"# nothing").expect("writes");
    zip.start_file(member, options).expect("starts");
    zip.write_all(content).expect("writes");
    zip.finish().expect("finishes").into_inner()
}

fn fetch_error(result: Result<LocalModel, CatalogError>) -> FetchError {
    match result {
        Err(CatalogError::Fetch(error)) => error,
        other => panic!("no error of fetching: {other:?}"),
    }
}

/// How many tries have been made.
#[derive(Default)]
struct Counter(Mutex<usize>);

impl Counter {
    fn next(&self) -> usize {
        let mut count = self.0.lock().expect("not poisoned");
        *count += 1;
        *count - 1
    }
}

#[tokio::test]
async fn what_is_not_here_is_said_to_be_pullable() {
    let fixture = Fixture::new("http://127.0.0.1:1", "http://127.0.0.1:1", known(&gguf(0), vec![hub_source()]));
    let catalog = fixture.start().await;
    let error = catalog.resolve("m").await.expect_err("not here");
    assert_eq!(error, CatalogError::NotHere { name: "m:1".into() });
    assert!(error.to_string().contains("shoal pull m:1"));
    assert!(matches!(catalog.resolve("n:1").await, Err(CatalogError::Reference(ReferenceError::Unknown { .. }))));
    assert!(matches!(catalog.remove("m", |_| false).await, Err(CatalogError::Store(StoreError::Absent { .. }))));
    assert!(matches!(catalog.remove("./x.gguf", |_| false).await, Err(CatalogError::Store(StoreError::Disk { .. }))));
    assert_eq!(catalog.list().await, Ok(Listing::default()));
    catalog.stop().await;
    assert_eq!(catalog.pull("m", fixture.sink(), &Cancel::new()).await, Err(CatalogError::Stopped));
}

#[tokio::test]
async fn a_file_by_its_path() {
    let fixture = Fixture::new("http://127.0.0.1:1", "http://127.0.0.1:1", Vec::new());
    let path = fixture.folder.path().join("own.gguf");
    let content = gguf(1);
    std::fs::write(&path, &content).expect("writes");
    let catalog = fixture.start().await;
    let model = catalog.resolve(path.to_str().expect("text")).await.expect("is there");
    assert_eq!((model.sha256, model.bytes), (sha256(&content).to_string(), content.len() as u64));
    std::fs::write(&path, &content[..content.len() / 2]).expect("writes");
    let error = catalog.resolve(path.to_str().expect("text")).await.expect_err("cut short");
    assert!(matches!(error, CatalogError::Store(StoreError::NotAModel { .. })), "{error}");
}
