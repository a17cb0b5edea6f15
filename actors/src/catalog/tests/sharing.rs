//! Several who want the same model, and those who change their mind.

use super::*;

/// A server that holds the rest of the file back until it is told to go on.
fn gated(content: &[u8], gate: &Arc<(Mutex<bool>, std::sync::Condvar)>) -> Server {
    let (content, gate) = (content.to_vec(), Arc::clone(gate));
    Server::start(move |request| {
        let (open, changed) = &*gate;
        let open = changed.wait_while(open.lock().expect("not poisoned"), |open| !*open).expect("not poisoned");
        drop(open);
        Response::file(request, &content, "\"1\"")
    })
}

fn open(gate: &(Mutex<bool>, std::sync::Condvar)) {
    *gate.0.lock().expect("not poisoned") = true;
    gate.1.notify_all();
}

#[tokio::test(flavor = "multi_thread")]
async fn pulls_in_one_process_share_a_download() {
    let content = gguf(0);
    let gate = Arc::default();
    let server = gated(&content, &gate);
    let fixture = Fixture::new(&server.url(""), "http://127.0.0.1:1", known(&content, vec![hub_source()]));
    let catalog = fixture.start().await;
    let counts: Vec<Arc<Mutex<Vec<Phase>>>> = (0..3).map(|_| Arc::default()).collect();
    let joined = Arc::new(tokio::sync::Semaphore::new(0));
    let pulls: Vec<_> = counts
        .iter()
        .map(|count| {
            let (catalog, count, joined) = (catalog.clone(), Arc::clone(count), Arc::clone(&joined));
            tokio::spawn(async move {
                let sink: ProgressSink = Arc::new(move |step| {
                    let mut phases = count.lock().expect("not poisoned");
                    if phases.is_empty() {
                        joined.add_permits(1);
                    }
                    phases.push(step.phase);
                });
                catalog.pull("m", sink, &Cancel::new()).await
            })
        })
        .collect();
    drop(joined.acquire_many(3).await.expect("open"));
    open(&gate);
    for pull in pulls {
        pull.await.expect("ends").expect("comes");
    }
    assert_eq!(server.seen().len(), 1);
    for count in counts {
        assert!(count.lock().expect("not poisoned").contains(&Phase::Download));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_share_a_folder_download_once() {
    let content = gguf(0);
    let gate = Arc::default();
    let server = gated(&content, &gate);
    let fixture = Fixture::new(&server.url(""), "http://127.0.0.1:1", known(&content, vec![hub_source()]));
    // Catalogues that know nothing of each other lock as processes do.
    let catalogs = [fixture.start().await, fixture.start().await, fixture.start().await];
    let waiting = Arc::new(tokio::sync::Semaphore::new(0));
    let pulls: Vec<_> = catalogs
        .into_iter()
        .map(|catalog| {
            let waiting = Arc::clone(&waiting);
            tokio::spawn(async move {
                let sink: ProgressSink = Arc::new(move |step| {
                    if step.phase == Phase::Wait {
                        waiting.add_permits(1);
                    }
                });
                catalog.pull("m", sink, &Cancel::new()).await
            })
        })
        .collect();
    drop(waiting.acquire_many(2).await.expect("open"));
    open(&gate);
    let mut models = Vec::new();
    for pull in pulls {
        models.push(pull.await.expect("ends").expect("comes"));
    }
    assert!(models.windows(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(std::fs::read(&models[0].path).expect("reads"), content);
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_to_leave_ends_it_and_what_came_is_kept() {
    let content = gguf(0);
    let tries = Arc::new(Counter::default());
    let (served, count) = (content.clone(), Arc::clone(&tries));
    let server = Server::start(move |request| match count.next() {
        0 => Response::file(request, &served, "\"1\"").stall(1_000_000),
        _ => Response::file(request, &served, "\"1\""),
    });
    let fixture = Fixture::new(&server.url(""), "http://127.0.0.1:1", known(&content, vec![hub_source()]));
    let catalog = fixture.start().await;
    let (first, second) = (Cancel::new(), Cancel::new());
    let half = Arc::new(tokio::sync::Semaphore::new(0));
    let sink = || -> ProgressSink {
        let half = Arc::clone(&half);
        Arc::new(move |step| {
            if step.phase == Phase::Download && step.done >= 1_000_000 {
                half.add_permits(1);
            }
        })
    };
    let pull = |cancel: &Cancel| {
        let (catalog, sink, cancel) = (catalog.clone(), sink(), cancel.clone());
        tokio::spawn(async move { catalog.pull("m", sink, &cancel).await })
    };
    let one = pull(&first);
    drop(half.acquire().await.expect("open"));
    let two = pull(&second);
    drop(half.acquire_many(2).await.expect("open"));
    first.cancel();
    assert_eq!(fetch_error(one.await.expect("ends")), FetchError::Cancelled);
    assert!(!two.is_finished());
    second.cancel();
    assert_eq!(fetch_error(two.await.expect("ends")), FetchError::Cancelled);
    let parts = fixture.parts();
    assert_eq!(std::fs::metadata(&parts[0]).expect("is there").len(), 1_000_000);
    // The stalled connection ends with its server; a fresh catalogue goes on from what is there.
    drop(server);
    let served = content.clone();
    let server = Server::start(move |request| Response::file(request, &served, "\"1\""));
    let mut fixture = fixture;
    fixture.settings.sources.hub = HubSettings::new(&server.url("")).expect("an address");
    fixture.pull("m").await.expect("comes");
    assert_eq!(server.seen()[0].header("range"), Some("bytes=1000000-"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_that_nobody_awaits_any_more_ends() {
    let content = gguf(0);
    let gate = Arc::default();
    let server = gated(&content, &gate);
    let fixture = Fixture::new(&server.url(""), "http://127.0.0.1:1", known(&content, vec![hub_source()]));
    let catalog = fixture.start().await;
    let connected = Arc::new(tokio::sync::Semaphore::new(0));
    let permit = Arc::clone(&connected);
    let sink: ProgressSink = Arc::new(move |_| permit.add_permits(1));
    let task = tokio::spawn({
        let catalog = catalog.clone();
        async move { catalog.pull("m", sink, &Cancel::new()).await }
    });
    drop(connected.acquire().await.expect("open"));
    task.abort();
    assert!(task.await.expect_err("aborted").is_cancelled());
    open(&gate);
    // Whether or not the abandoned thread got to its end, the next pull has the model.
    catalog.pull("m", fixture.sink(), &Cancel::new()).await.expect("comes");
}

#[tokio::test]
async fn an_already_cancelled_pull_asks_nobody() {
    let content = gguf(0);
    let server = Server::start(|_| Response::new(500, ""));
    let fixture = Fixture::new(&server.url(""), "http://127.0.0.1:1", known(&content, vec![hub_source()]));
    let catalog = fixture.start().await;
    let cancel = Cancel::new();
    cancel.cancel();
    assert_eq!(fetch_error(catalog.pull("m", fixture.sink(), &cancel).await), FetchError::Cancelled);
    assert!(server.seen().is_empty());
}

#[tokio::test]
async fn a_model_without_its_manifest_is_verified_instead_of_fetched() {
    let content = gguf(0);
    let served = content.clone();
    let server = Server::start(move |request| Response::file(request, &served, "\"1\""));
    let fixture = Fixture::new(&server.url(""), "http://127.0.0.1:1", known(&content, vec![hub_source()]));
    let model = fixture.pull("m").await.expect("comes");
    std::fs::write(model.path.with_file_name("manifest.json"), "{\"form\":1,\"na").expect("writes");
    let again = fixture.pull("m").await.expect("comes");
    assert_eq!((again.path, again.source.as_str()), (model.path, "an earlier download"));
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn changes_by_other_processes_are_seen() {
    let content = gguf(0);
    let served = content.clone();
    let server = Server::start(move |request| Response::file(request, &served, "\"1\""));
    let mut fixture = Fixture::new(&server.url(""), "http://127.0.0.1:1", known(&content, vec![hub_source()]));
    fixture.settings.refresh = Some(Duration::from_millis(5));
    let watching = fixture.start().await;
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    watching.subscribe(Box::new(move |models| drop(tell.send(models.to_vec()))));
    assert_eq!(told.recv().await, Some(Vec::new()));
    let model = fixture.pull("m").await.expect("comes");
    assert_eq!(told.recv().await, Some(vec![model.on_disk()]));
}
