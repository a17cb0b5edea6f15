//! Fetching from a hub.

use super::*;

/// A hub that sends its clients to a storage for the file.
fn hub(content: Vec<u8>, serve: impl Fn(&Request, &[u8]) -> Response + Send + Sync + 'static) -> Server {
    Server::start(move |request| if request.path == HUB_PATH { serve(request, &content) } else { Response::new(404, "no") })
}

fn fixture(server: &Server, content: &[u8]) -> Fixture {
    Fixture::new(&server.url(""), "http://127.0.0.1:1", known(content, vec![hub_source()]))
}

#[tokio::test]
async fn a_model_is_fetched_listed_resolved_and_removed() {
    let content = gguf(0);
    let server = hub(content.clone(), |request, content| Response::file(request, content, "\"1\""));
    let fixture = fixture(&server, &content);
    let catalog = fixture.start().await;
    let changes: Arc<Mutex<Vec<usize>>> = Arc::default();
    let (told, count) = (Arc::clone(&changes), Arc::new(tokio::sync::Notify::new()));
    let notify = Arc::clone(&count);
    catalog.subscribe(Box::new(move |models| {
        told.lock().expect("not poisoned").push(models.len());
        notify.notify_one();
    }));
    count.notified().await;
    let model = catalog.pull("m", fixture.sink(), &Cancel::new()).await.expect("comes");
    assert_eq!(std::fs::read(&model.path).expect("reads"), content);
    assert_eq!((model.name.as_str(), model.licence.as_deref()), ("m:1", Some("MIT")));
    assert_eq!(fixture.phases(), [Phase::Connect, Phase::Download]);
    let last = fixture.progress.lock().expect("not poisoned").last().cloned().expect("some");
    assert_eq!((last.done, last.total), (content.len() as u64, Some(content.len() as u64)));
    assert_eq!(catalog.resolve("m:1").await, Ok(model.clone()));
    assert_eq!(catalog.list().await.expect("lists").models, std::slice::from_ref(&model));
    assert_eq!(catalog.pull("m", fixture.sink(), &Cancel::new()).await, Ok(model.clone()));
    assert_eq!(server.seen().len(), 1, "what is here is not fetched again");
    count.notified().await;
    assert!(matches!(catalog.remove("m", |_| true).await, Err(CatalogError::Store(StoreError::InUse { .. }))));
    catalog.remove("m", |_| false).await.expect("removes");
    count.notified().await;
    assert_eq!(*changes.lock().expect("not poisoned"), [0, 1, 0]);
    assert!(!model.path.exists());
}

#[tokio::test]
async fn a_dropped_connection_is_resumed() {
    let content = gguf(0);
    let tries = Counter::default();
    let server = hub(content.clone(), move |request, content| match tries.next() {
        0 => Response::file(request, content, "\"1\"").cut(1_000_000),
        1 => Response::file(request, content, "\"1\"").cut(500_000),
        _ => Response::file(request, content, "\"1\""),
    });
    let fixture = fixture(&server, &content);
    let model = fixture.pull("m").await.expect("comes");
    assert_eq!(std::fs::read(&model.path).expect("reads"), content);
    let ranges: Vec<Option<String>> = server.seen().iter().map(|request| request.header("range").map(str::to_owned)).collect();
    assert_eq!(ranges, [None, Some("bytes=1000000-".into()), Some("bytes=1500000-".into())]);
    assert_eq!(server.seen()[1].header("if-range"), Some("\"1\""));
    assert!(fixture.phases().contains(&Phase::Retry) && fixture.phases().contains(&Phase::Verify));
    assert!(fixture.parts().is_empty());
}

#[tokio::test]
async fn a_second_run_goes_on_where_the_first_gave_up() {
    let content = gguf(0);
    let tries = Counter::default();
    let server = hub(content.clone(), move |request, content| match tries.next() {
        0 => Response::file(request, content, "\"1\"").cut(1_000_000),
        1..=4 => Response::new(503, "busy"),
        _ => Response::file(request, content, "\"1\""),
    });
    let fixture = fixture(&server, &content);
    let error = fetch_error(fixture.pull("m").await);
    assert!(matches!(error, FetchError::Status { status: 503, .. }), "{error}");
    assert_eq!(fixture.parts().len(), 1);
    fixture.pull("m").await.expect("comes");
    assert_eq!(server.seen().last().expect("a request").header("range"), Some("bytes=1000000-"));
}

#[tokio::test]
async fn a_server_that_ignores_ranges_starts_over() {
    let content = gguf(0);
    let tries = Counter::default();
    let server = hub(content.clone(), move |_, content| match tries.next() {
        0 => Response::new(200, content).cut(1_000_000),
        _ => Response::new(200, content),
    });
    let fixture = fixture(&server, &content);
    let model = fixture.pull("m").await.expect("comes");
    assert_eq!(std::fs::read(&model.path).expect("reads"), content);
    assert_eq!(server.seen().len(), 2);
}

#[tokio::test]
async fn a_file_that_changed_in_between_starts_over() {
    let (old, new) = (gguf(1), gguf(2));
    let tries = Counter::default();
    let listing = r#"{"siblings":[{"rfilename":"a.gguf"},{"rfilename":"m-Q4_0.gguf"}],"tags":["license:mit"]}"#;
    let server = Server::start({
        let new = new.clone();
        move |request| match request.path.as_str() {
            "/api/models/own/rep/revision/main?blobs=true" => Response::new(200, listing),
            "/own/rep/resolve/main/m-Q4_0.gguf" => match tries.next() {
                0 => Response::file(request, &old, "\"old\"").cut(1_000_000),
                _ => Response::file(request, &new, "\"new\""),
            },
            _ => Response::new(404, "no"),
        }
    });
    let fixture = Fixture::new(&server.url(""), "http://127.0.0.1:1", Vec::new());
    let catalog = fixture.start().await;
    let model = catalog.pull("own/rep:q4_0", fixture.sink(), &Cancel::new()).await.expect("comes");
    assert_eq!(std::fs::read(&model.path).expect("reads"), new);
    assert_eq!((model.name.as_str(), model.licence.as_deref()), ("own/rep:m-Q4_0.gguf", Some("mit")));
    assert_eq!(server.seen().last().expect("a request").header("if-range"), Some("\"old\""));
    for name in ["own/rep", "own/rep:Q4_0", "own/rep:m-Q4_0.gguf", "hf.co/own/rep"] {
        assert_eq!(catalog.resolve(name).await, Ok(model.clone()), "{name}");
    }
    assert!(matches!(catalog.resolve("own/rep:Q8_0").await, Err(CatalogError::NotHere { .. })));
    assert!(matches!(catalog.resolve("own/rep@v2").await, Err(CatalogError::NotHere { .. })));
    let ambiguous = fetch_error(catalog.pull("own/rep:nothing", fixture.sink(), &Cancel::new()).await);
    assert!(ambiguous.to_string().contains("a.gguf, m-Q4_0.gguf"), "{ambiguous}");
    catalog.remove("own/rep:q4_0", |_| false).await.expect("removes");
}

#[tokio::test]
async fn damaged_old_bytes_do_not_spoil_the_new_ones() {
    let content = gguf(0);
    let tries = Counter::default();
    let server = hub(content.clone(), move |request, content| match tries.next() {
        0 => Response::file(request, content, "\"1\"").cut(1_000_000),
        1..=4 => Response::new(500, ""),
        _ => Response::file(request, content, "\"1\""),
    });
    let fixture = fixture(&server, &content);
    fetch_error(fixture.pull("m").await);
    let part = fixture.parts().pop().expect("a part");
    let mut bytes = std::fs::read(&part).expect("reads");
    bytes[77] ^= 1;
    std::fs::write(&part, bytes).expect("writes");
    let model = fixture.pull("m").await.expect("comes");
    assert_eq!(std::fs::read(&model.path).expect("reads"), content);
}

#[tokio::test]
async fn a_wrong_file_is_refused() {
    let content = gguf(0);
    let server = hub(gguf(9), |request, other| Response::file(request, other, "\"1\""));
    let fixture = fixture(&server, &content);
    let error = fetch_error(fixture.pull("m").await);
    assert!(matches!(&error, FetchError::WrongHash { expected, .. } if *expected == sha256(&content)), "{error}");
    assert!(fixture.parts().is_empty());
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn a_lie_about_the_hash_or_the_size_is_seen_before_the_download() {
    let content = gguf(0);
    let server = hub(content.clone(), |request, content| {
        Response::file(request, content, "\"1\"").with("x-linked-etag", format!("\"{}\"", "0".repeat(64)))
    });
    let liar = fixture(&server, &content);
    assert!(matches!(fetch_error(liar.pull("m").await), FetchError::WrongHash { .. }));
    assert!(!liar.phases().contains(&Phase::Download));
    let server = hub(content[..1000].to_vec(), |request, content| Response::file(request, content, "\"1\""));
    let short = fixture(&server, &content);
    assert!(matches!(fetch_error(short.pull("m").await), FetchError::WrongSize { found: 1000, .. }));
}

#[tokio::test]
async fn a_body_without_end_is_cut_off() {
    let content = gguf(0);
    let server = hub(content.clone(), |_, content| {
        let mut response = Response::new(200, [content, content].concat());
        response.no_length = true;
        response
    });
    assert!(matches!(fetch_error(fixture(&server, &content).pull("m").await), FetchError::TooLarge { .. }));
}

#[tokio::test]
async fn a_hash_that_the_hub_promises_is_checked() {
    let content = gguf(0);
    let promise = sha256(&content).to_string();
    let listing =
        format!(r#"{{"siblings":[{{"rfilename":"m.gguf","size":{0},"lfs":{{"sha256":"{promise}","size":{0}}}}}]}}"#, content.len());
    let mut wrong = content.clone();
    wrong[2_000_000] ^= 1;
    let server = Server::start(move |request| match request.path.as_str() {
        HUB_PATH => Response::file(request, &wrong, "\"1\""),
        _ => Response::new(200, listing.clone()),
    });
    let fixture = Fixture::new(&server.url(""), "http://127.0.0.1:1", Vec::new());
    assert!(matches!(fetch_error(fixture.pull("own/rep").await), FetchError::WrongHash { .. }));
}

#[tokio::test]
async fn a_file_that_is_no_model_is_refused() {
    let whole = gguf(0);
    let short = whole[..whole.len() - 100_000].to_vec();
    let server = hub(short.clone(), |request, content| Response::file(request, content, "\"1\""));
    let fixture = fixture(&server, &short);
    let error = fetch_error(fixture.pull("m").await);
    assert!(matches!(error, FetchError::NotAModel { .. }), "{error}");
    assert!(fixture.start().await.list().await.expect("lists").models.is_empty());
}

#[tokio::test]
async fn the_token_goes_to_the_hub_and_nowhere_else() {
    let content = gguf(0);
    let storage = Server::start({
        let content = content.clone();
        move |request| Response::file(request, &content, "\"storage\"")
    });
    let promise = sha256(&content).to_string();
    // The same machine by another name is another host.
    let elsewhere = storage.url("/blob?sig=secret").replace("127.0.0.1", "localhost");
    let server = Server::start(move |request| match request.path.as_str() {
        HUB_PATH => Response::new(307, "").with("location", "/renamed/m.gguf"),
        "/renamed/m.gguf" => Response::new(302, "").with("location", elsewhere.clone()).with("x-linked-etag", format!("\"{promise}\"")),
        _ => Response::new(404, ""),
    });
    let mut fixture = fixture(&server, &content);
    fixture.settings.sources.hub = HubSettings::new(&server.url("")).expect("an address").with_token("hf_secret");
    fixture.pull("m").await.expect("comes");
    assert!(server.seen().iter().all(|request| request.header("authorization") == Some("Bearer hf_secret")));
    assert_eq!(server.seen().len(), 2);
    assert_eq!(storage.seen().len(), 1);
    assert_eq!(storage.seen()[0].header("authorization"), None);
    let told = format!("{:?}", fixture.progress.lock().expect("not poisoned"));
    assert!(!told.contains("secret"));
}

#[tokio::test]
async fn a_gated_model_says_which_token_and_where_to_get_it() {
    let content = gguf(0);
    for (status, code) in [(401, "GatedRepo"), (403, "GatedRepo"), (401, "RepoNotFound")] {
        let server = hub(content.clone(), move |_, _| Response::new(status, "no").with("x-error-code", code));
        let error = fetch_error(fixture(&server, &content).pull("m").await);
        let text = error.to_string();
        assert!(matches!(error, FetchError::Gated { .. }), "{text}");
        assert!(text.contains("HF_TOKEN") && text.contains("/settings/tokens") && text.contains("/own/rep"), "{text}");
        assert_eq!(server.seen().len(), 1, "asking again does not help");
    }
}

#[tokio::test]
async fn refusals_are_told_apart() {
    let content = gguf(0);
    let server = hub(content.clone(), |_, _| Response::new(404, "").with("x-error-code", "EntryNotFound"));
    assert!(matches!(fetch_error(fixture(&server, &content).pull("m").await), FetchError::Missing { .. }));
    for status in [429, 500] {
        let tries = Counter::default();
        let server = hub(content.clone(), move |request, content| match tries.next() {
            0 | 1 => Response::new(status, "").with("retry-after", "0"),
            _ => Response::file(request, content, "\"1\""),
        });
        fixture(&server, &content).pull("m").await.expect("comes at the third try");
        assert_eq!(server.seen().len(), 3);
    }
}

#[tokio::test]
async fn too_little_space_is_said_before_anything_is_asked() {
    #[derive(Debug)]
    struct Full;
    impl Space for Full {
        fn free_bytes(&self, _: &Path) -> std::io::Result<Option<u64>> {
            Ok(Some(1_000_000))
        }
    }
    let content = gguf(0);
    let server = hub(content.clone(), |request, content| Response::file(request, content, "\"1\""));
    let mut fixture = fixture(&server, &content);
    fixture.settings.space = Arc::new(Full);
    let error = fetch_error(fixture.pull("m").await);
    assert!(matches!(error, FetchError::NoSpace { free: 1_000_000, .. }) && error.to_string().contains("are missing"), "{error}");
    assert!(server.seen().is_empty());
}
