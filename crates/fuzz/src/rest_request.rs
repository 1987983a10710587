//! REST requests of any caller: method, path, query and body, up to the question that the control
//! thread would get. What is refused has asked it nothing.
use crate::bytes::Input;
use freeflow_orchestrator::objects::parse_object;
use freeflow_router::{Harness, HarnessAnswer, HarnessRole};
use serde_json::Value;
use tokio::runtime::Runtime;

const HOST: &str = "h1";
const BASE: &str = "/apis/freeflow.io/v1/";
const METHODS: [&str; 5] = ["GET", "PUT", "POST", "DELETE", "PATCH"];
const ROLES: [HarnessRole; 4] =
    [HarnessRole::Admin, HarnessRole::Viewer, HarnessRole::Tenant("blue"), HarnessRole::None];
/// Parameters that some change has.
const PARAMETERS_OF_CHANGES: [&str; 2] = ["dryRun", "resourceVersion"];
/// Objects of one `apply` of the admin.
const ITEM_COUNT_MAX: usize = 10_000;
/// The control thread never answers; other codes are refusals.
const CODES: [u16; 7] = [200, 400, 403, 404, 405, 422, 500];
/// They are answered without the control thread.
const STATIC_PATHS: [&str; 2] = ["/openapi/v3", "/version"];

thread_local! {
    /// Made once: making it costs more than an input.
    static RUNTIME: Runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
}

/// Method and role; the address up to the end of its line; the body.
pub fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    let Some(choice) = input.u8().map(usize::from) else { return };
    let (method, role) = (METHODS[choice % METHODS.len()], ROLES[choice / METHODS.len() % ROLES.len()]);
    let mut lines = input.0.splitn(2, |byte| *byte == b'\n');
    let (target, body) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    // Addresses of other forms name the same paths; a fragment is no part of a request.
    if !target.starts_with(b"/") || target.contains(&b'#') {
        return;
    }
    // Its probes keep what they found: each input has a server of its own.
    let server = Harness::new(HOST);
    let answer = RUNTIME.with(|runtime| runtime.block_on(server.ask(role, method, target, body)));
    if let Some(answer) = answer {
        let target = std::str::from_utf8(target).expect("addresses of requests are text");
        Request { method, role, target, body }.check(&answer);
    }
}

struct Request<'a> {
    method: &'static str,
    role: HarnessRole,
    target: &'a str,
    body: &'a [u8],
}

impl Request<'_> {
    fn check(&self, answer: &HarnessAnswer) {
        let (path, query) = self.target.split_once('?').unwrap_or((self.target, ""));
        assert!(CODES.contains(&answer.code), "{}", answer.code);
        if answer.code == 200 {
            assert!(STATIC_PATHS.contains(&path) && self.method == "GET", "{path}: answered by nobody");
        } else {
            check_refusal(answer);
        }
        if answer.code != 500 {
            assert_eq!(answer.request_count, 0, "what is refused has asked nothing");
        }
        if self.role == HarnessRole::None {
            assert_eq!(answer.code, 403, "who has no role is answered nothing");
        }
        if answer.request_count > 0 {
            self.check_asked(path, query);
        }
    }

    /// It has asked the control thread, so it is what its caller may ask.
    fn check_asked(&self, path: &str, query: &str) {
        assert_ne!(self.role, HarnessRole::None);
        let is_tenant = matches!(self.role, HarnessRole::Tenant(_));
        let of_host = path.strip_prefix(BASE).and_then(|path| path.strip_prefix("hosts/"));
        let is_subresource = of_host.is_some_and(|path| path.contains('/'));
        assert!(!is_tenant || !is_subresource && path != "/metrics", "it is of all tenants");
        if self.method == "GET" {
            return;
        }
        assert!(!is_subresource || self.role == HarnessRole::Admin, "only an admin changes a host");
        for parameter in query.split('&').filter(|part| !part.is_empty()) {
            let name = parameter.split_once('=').map_or(parameter, |(name, _)| name);
            // One that is written in percents is whatever it stands for.
            let is_known = PARAMETERS_OF_CHANGES.contains(&name) || name.contains('%');
            assert!(is_known, "a change with the unknown parameter {name}");
        }
        if path == format!("{BASE}apply") {
            let body: Value = serde_json::from_slice(self.body).expect("a change has a body of JSON");
            let items = body["items"].as_array().expect("a list of objects");
            assert!(items.len() <= ITEM_COUNT_MAX && items.iter().all(|item| parse_object(item).is_ok()));
        }
    }
}

/// A refusal says what it is by itself.
fn check_refusal(answer: &HarnessAnswer) {
    let status: Value = serde_json::from_slice(&answer.body).expect("a refusal is JSON");
    assert_eq!((&status["kind"], &status["code"]), (&"Status".into(), &answer.code.into()));
    for field in ["reason", "message"] {
        assert!(status[field].as_str().is_some_and(|text| !text.is_empty()), "a refusal has a {field}");
    }
}
