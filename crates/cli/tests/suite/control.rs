//! `apply`, `get`, `describe`, `delete` and `diff` against a server that answers from a table. The
//! real one is `tests/control/test_control.py`.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

const FREEFLOW: &str = env!("CARGO_BIN_EXE_freeflow");
const BASE: &str = "/apis/freeflow.io/v1";

/// Requests, and the answers to them: status and body, by method and path.
#[derive(Default)]
struct Table {
    answers: Vec<(&'static str, u16, String)>,
    asked: Vec<(String, String)>,
}

struct Server {
    run_dir: PathBuf,
    table: Arc<Mutex<Table>>,
}

impl Server {
    fn new(name: &str, answers: Vec<(&'static str, u16, Value)>) -> Self {
        let texts = answers.into_iter().map(|(what, code, body)| (what, code, body.to_string())).collect();
        Self::with_texts(name, texts)
    }

    fn with_texts(name: &str, answers: Vec<(&'static str, u16, String)>) -> Self {
        let run_dir = std::env::temp_dir().join(format!("freeflow-control-{name}-{}", std::process::id()));
        // A killed run with this number may have left one.
        let _ = std::fs::remove_dir_all(&run_dir);
        std::fs::create_dir_all(&run_dir).unwrap();
        let table = Arc::new(Mutex::new(Table { answers, asked: Vec::new() }));
        let listener = UnixListener::bind(run_dir.join("api.sock")).unwrap();
        let shared = Arc::clone(&table);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                answer(stream, &shared);
            }
        });
        Self { run_dir, table }
    }

    fn freeflow(&self, arguments: &[&str], input: &str) -> Output {
        freeflow(&self.run_dir, arguments, input)
    }

    fn asked(&self) -> Vec<(String, String)> {
        std::mem::take(&mut self.table.lock().unwrap().asked)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.run_dir);
    }
}

fn answer(stream: UnixStream, table: &Mutex<Table>) {
    let mut reader = BufReader::new(&stream);
    let mut first = String::new();
    reader.read_line(&mut first).unwrap();
    let mut length = 0;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let what = first.rsplit_once(' ').map_or(first.as_str(), |(what, _)| what).replace(BASE, "");
    let mut table = table.lock().unwrap();
    let (code, text) = match table.answers.iter().find(|(known, ..)| *known == what) {
        Some((_, code, text)) => (*code, text.clone()),
        None => (404, status("NotFound", &format!("there is no {what}"), json!({})).to_string()),
    };
    table.asked.push((what, String::from_utf8(body).unwrap()));
    drop(table);
    // In two chunks, of which the first ends anywhere.
    let (one, two) = text.as_bytes().split_at(text.len() / 2);
    let mut all = format!("HTTP/1.1 {code} x\r\ntransfer-encoding: chunked\r\n\r\n").into_bytes();
    for part in [one, two].into_iter().filter(|part| !part.is_empty()) {
        all.extend(format!("{:x}\r\n", part.len()).bytes());
        all.extend_from_slice(part);
        all.extend(b"\r\n");
    }
    all.extend(b"0\r\n\r\n");
    // A reader that has seen enough goes.
    let _ = (&stream).write_all(&all);
}

fn freeflow(run_dir: &std::path::Path, arguments: &[&str], input: &str) -> Output {
    let mut command = Command::new(FREEFLOW);
    command.env_remove("FREEFLOW_RUN_DIR").arg("--run-dir").arg(run_dir).args(arguments);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // One that doesn't want it closes the pipe.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn status(reason: &str, message: &str, details: Value) -> Value {
    json!({"kind": "Status", "status": "Failure", "reason": reason, "message": message, "details": details})
}

fn network(name: &str, cidr: &str) -> Value {
    json!({"apiVersion": "freeflow.io/v1", "kind": "Network", "metadata": {"name": name, "resourceVersion": 5, "generation": 1},
        "spec": {"tenant": "default", "cidrs": [cidr], "access": "allow", "dataPath": "auto"}, "status": {"vnicCount": 2}})
}

const TWO: &str = "kind: Network\nmetadata: {name: blue}\nspec: {cidrs: [10.1.0.0/16]}\n---\nkind: Network\nmetadata: {name: red}\n\
                   spec:\n  cidrs:\n  - nonsense\n";

fn items(list: &Value) -> &[Value] {
    list["items"].as_array().unwrap()
}

#[track_caller]
fn expect(output: &Output, code: i32, stdout: &str, stderr: &str) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{out}{err}");
    assert_eq!(out, stdout, "{err}");
    assert_eq!(err, stderr);
}

#[test]
fn apply_sends_the_files_and_prints_the_results() {
    let results = json!({"items": [{"kind": "Network", "name": "blue", "result": "created", "object": network("blue", "10.1.0.0/16")},
        {"kind": "Network", "name": "red", "result": "unchanged", "object": network("red", "10.2.0.0/16")}]});
    let server = Server::new("apply", vec![("POST /apply?dryRun=true", 200, results)]);
    let output = server.freeflow(&["apply", "-f", "-", "--dry-run"], TWO);
    expect(&output, 0, "network/blue created (dry run)\nnetwork/red unchanged (dry run)\n", "");
    let (_, body) = server.asked().pop().unwrap();
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        body["items"][1],
        json!({"kind": "Network", "metadata": {"name": "red"}, "spec": {"cidrs": ["nonsense"]}})
    );
    let output = server.freeflow(&["apply", "-f", "-", "--dry-run", "-o", "json"], TWO);
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&list["kind"], &list["items"][0]["metadata"]["name"]), (&"List".into(), &"blue".into()));
}

#[test]
fn a_refusal_names_file_document_line_and_field() {
    let causes = json!({"index": 1, "causes": [{"field": "spec.cidrs[0]", "message": "no CIDR"}]});
    let server = Server::new("refuse", vec![("POST /apply", 422, status("Invalid", "1 is invalid", causes))]);
    let directory = server.run_dir.join("manifests");
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("a.yaml"), TWO).unwrap();
    std::fs::write(directory.join("ignored.txt"), "{").unwrap();
    let output = server.freeflow(&["apply", "-f", directory.to_str().unwrap()], "");
    let place = directory.join("a.yaml");
    let printed = format!(
        "freeflow: refused, and nothing was changed:\n{} (document 2, line 9): spec.cidrs[0]: no CIDR\n",
        place.display()
    );
    expect(&output, 3, "", &printed);
    // A file that can't be read is not sent.
    server.asked();
    let output = server.freeflow(&["apply", "-f", "-"], "kind: Network\nmetadata: {name: [}\n");
    assert_eq!((output.status.code(), server.asked().len()), (Some(3), 0));
    assert!(String::from_utf8_lossy(&output.stderr).contains("standard input: "));
    let output = server.freeflow(&["apply", "-f", "-"], &format!("{TWO}---\n{TWO}"));
    assert!(
        String::from_utf8_lossy(&output.stderr)
            .contains("network blue is in standard input (document 1, line 1) already")
    );
    assert_eq!(server.freeflow(&["apply", "-f", "/no/such/file"], "").status.code(), Some(1));
}

#[test]
fn get_prints_tables_lists_and_single_objects() {
    let list = json!({"apiVersion": "freeflow.io/v1", "kind": "NetworkList", "metadata": {"resourceVersion": 9},
        "items": [network("blue", "10.1.0.0/16"), network("default", "10.111.0.0/16")]});
    let server = Server::new(
        "get",
        vec![
            ("GET /networks", 200, list.clone()),
            ("GET /networks?labelSelector=a%3Db", 200, json!({"items": []})),
            ("GET /networks/blue", 200, network("blue", "10.1.0.0/16")),
            ("GET /qosclasses/x", 403, status("Forbidden", "a viewer may not", json!({}))),
        ],
    );
    let heading = "NAME      TENANT    CIDRS           ACCESS   DATA PATH   VNICS   QOS   QUOTA\n";
    let table = format!(
        "{heading}blue      default   10.1.0.0/16     allow    auto        2       -     -\n\
         default   default   10.111.0.0/16   allow    auto        2       -     -\n"
    );
    expect(&server.freeflow(&["get", "net"], ""), 0, &table, "");
    let empty = "NAME   TENANT   CIDRS   ACCESS   DATA PATH   VNICS   QOS   QUOTA\n";
    expect(&server.freeflow(&["get", "networks", "-l", "a=b"], ""), 0, empty, "");
    let json: Value = serde_json::from_slice(&server.freeflow(&["get", "Network", "-o", "json"], "").stdout).unwrap();
    assert_eq!(json, list);
    let yaml = String::from_utf8(server.freeflow(&["get", "network", "blue", "-o", "yaml"], "").stdout).unwrap();
    assert!(yaml.starts_with("apiVersion: freeflow.io/v1\nkind: Network\nmetadata:\n"), "{yaml}");
    let described = String::from_utf8(server.freeflow(&["describe", "network", "blue"], "").stdout).unwrap();
    assert!(described.contains("\n  Cidrs:                 10.1.0.0/16\n"), "{described}");
    for options in [&["blue"] as &[&str], &[]] {
        let of = |verb: &str| server.freeflow(&[&[verb, "network", "-o", "json"], options].concat(), "").stdout;
        assert_eq!(of("describe"), of("get"), "{options:?}");
    }
    expect(&server.freeflow(&["get", "networks", "none"], ""), 4, "", "freeflow: there is no GET /networks/none\n");
    let output = server.freeflow(&["get", "qos", "x"], "");
    assert_eq!(output.status.code(), Some(5));
    assert!(String::from_utf8_lossy(&output.stderr).contains("freeflow-admin"));
    let output = server.freeflow(&["get", "pods"], "");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_vnic_is_found_by_its_container_too() {
    let vnic =
        |name: &str, title: &str| json!({"kind": "Vnic", "metadata": {"name": name}, "status": {"title": title}});
    let all = json!({"items": [vnic("v1", "web"), vnic("v2", "twin"), vnic("v3", "twin"), vnic("web2", "web2")]});
    let server = Server::new("by-container", vec![("GET /vnics", 200, all), ("GET /vnics/v9", 200, vnic("v9", "v1"))]);
    let output = server.freeflow(&["describe", "vnic", "web", "-o", "json"], "");
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), vnic("v1", "web"));
    let described = String::from_utf8(server.freeflow(&["describe", "vnic", "web"], "").stdout).unwrap();
    assert!(described.starts_with("Name:                    v1\n"), "{described}");
    let two = "freeflow: several vNICs are of \"twin\"; name one: v2, v3\n";
    expect(&server.freeflow(&["describe", "vnic", "twin"], ""), 1, "", two);
    expect(&server.freeflow(&["describe", "vnic", "no"], ""), 4, "", "freeflow: there is no GET /vnics/no\n");
    // Its own name goes first, and nothing else has two names.
    server.asked();
    assert_eq!(server.freeflow(&["describe", "vnic", "v9"], "").status.code(), Some(0));
    assert_eq!(server.freeflow(&["describe", "group", "web"], "").status.code(), Some(4));
    assert!(server.asked().iter().all(|(what, _)| what != "GET /vnics" && what != "GET /groups"));
}

#[test]
fn delete_goes_on_after_what_is_not_there_and_takes_files_backwards() {
    let server = Server::new(
        "delete",
        vec![
            ("DELETE /networks/blue", 200, json!({})),
            ("DELETE /networks/blue?dryRun=true", 200, json!({})),
            ("DELETE /groups/g", 200, json!({})),
            ("DELETE /groups/g?dryRun=true", 200, json!({})),
            ("DELETE /groups/old?resourceVersion=7", 409, status("Conflict", "it has changed", json!({}))),
            ("DELETE /networks/red?dryRun=true", 409, status("InUse", "2 vNICs are in it", json!({}))),
        ],
    );
    let missing = "freeflow: network/none: there is no DELETE /networks/none\n";
    expect(&server.freeflow(&["delete", "network", "none", "blue"], ""), 4, "network/blue deleted\n", missing);
    expect(&server.freeflow(&["delete", "network", "none", "--ignore-not-found"], ""), 0, "", "");
    let refused = "freeflow: network/red: 2 vNICs are in it\n";
    expect(&server.freeflow(&["delete", "network", "red", "--dry-run"], ""), 3, "", refused);
    let text = "kind: Network\nmetadata: {name: blue}\n---\nkind: Group\nmetadata: {name: g}\n";
    let output = server.freeflow(&["delete", "-f", "-"], text);
    expect(&output, 0, "group/g deleted\nnetwork/blue deleted\n", "");
    let text = "kind: Group\nmetadata: {name: old, resourceVersion: '7'}\n";
    expect(&server.freeflow(&["delete", "-f", "-"], text), 3, "", "freeflow: group/old: it has changed\n");
    // The dry run reports what the real one does; and what can't go keeps all the others.
    let in_use = |users: Value| status("InUse", "it is used", json!({"kind": "Network", "name": "n", "users": users}));
    let server = Server::new(
        "delete-users",
        vec![
            ("DELETE /groups/g?dryRun=true", 200, json!({})),
            ("DELETE /networks/n?dryRun=true", 409, in_use(json!(["Group g"]))),
            ("DELETE /groups/g", 200, json!({"items": [{"object": {"metadata": {"name": "g"}}}]})),
            ("DELETE /networks/n", 200, json!({"items": [{"object": network("n", "10.1.0.0/16")}]})),
            ("GET /groups/g", 200, json!({"metadata": {"name": "g"}})),
            ("GET /networks/n", 200, network("n", "10.1.0.0/16")),
            ("DELETE /networks/m?dryRun=true", 409, in_use(json!(["Group g", "Vnic v"]))),
            ("DELETE /vnics/w?dryRun=true", 403, status("Forbidden", "not yours", json!({}))),
        ],
    );
    let file = |names: &[(&str, &str)]| {
        let item = |(kind, name): &(&str, &str)| format!("kind: {kind}\nmetadata: {{name: {name}}}\n");
        names.iter().map(item).collect::<Vec<_>>().join("---\n")
    };
    let both = file(&[("Network", "n"), ("Group", "g")]);
    let printed = "group/g deleted (dry run)\nnetwork/n deleted (dry run)\n";
    expect(&server.freeflow(&["delete", "-f", "-", "--dry-run"], &both), 0, printed, "");
    expect(&server.freeflow(&["delete", "-f", "-"], &both), 0, "group/g deleted\nnetwork/n deleted\n", "");
    for options in [&["-o", "json"] as &[&str], &["-o", "json", "--dry-run"]] {
        let output = server.freeflow(&[&["delete", "-f", "-"], options].concat(), &both);
        let list: Value = serde_json::from_slice(&output.stdout).unwrap();
        let names: Vec<&Value> = items(&list).iter().map(|object| &object["metadata"]["name"]).collect();
        assert_eq!(names, ["g", "n"], "{options:?}");
    }
    server.asked();
    let more = file(&[("Network", "m"), ("Network", "n"), ("Vnic", "w"), ("Group", "g"), ("Quota", "absent")]);
    let output = server.freeflow(&["delete", "-f", "-"], &more);
    let printed = "freeflow: refused, and nothing was deleted:\nvnic/w: not yours\nnetwork/m: it is used by Vnic v\n";
    expect(&output, 5, "", printed);
    assert!(server.asked().iter().all(|(what, _)| what.ends_with("dryRun=true")));
    for wrong in [&["delete"] as &[&str], &["delete", "network"], &["delete", "network", "a", "-f", "x"]] {
        assert_eq!(server.freeflow(wrong, "").status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn diff_shows_the_changes_and_has_its_exit_status() {
    let with = |before: &str, after: &str| {
        json!({"items": [{"kind": "Network", "name": "blue", "result": "configured", "object": network("blue", after)}],
            "before": before})
    };
    let before = ("GET /networks/blue", 200, network("blue", "10.1.0.0/16"));
    let text = "kind: Network\nmetadata: {name: blue}\n";
    let same = Server::new("same", vec![("POST /apply?dryRun=true", 200, with("", "10.1.0.0/16")), before.clone()]);
    expect(&same.freeflow(&["diff", "-f", "-"], text), 0, "", "");
    let other = Server::new("other", vec![("POST /apply?dryRun=true", 200, with("", "10.2.0.0/16")), before]);
    let output = other.freeflow(&["diff", "-f", "-"], text);
    assert_eq!(output.status.code(), Some(1));
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.starts_with("--- a/network/blue\n+++ b/network/blue\n"), "{shown}");
    assert!(shown.contains("-  - 10.1.0.0/16\n+  - 10.2.0.0/16\n"), "{shown}");
    assert!(!shown.contains("status") && !shown.contains("resourceVersion"), "{shown}");
    let output = other.freeflow(&["diff", "-f", "-", "-o", "json"], text);
    let list: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), items(&list).len()), (Some(1), 1));
    let change = &list["items"][0];
    assert_eq!((&change["kind"], &change["name"]), (&"Network".into(), &"blue".into()));
    assert_eq!(change["before"]["spec"]["cidrs"][0], "10.1.0.0/16");
    assert_eq!(change["after"]["spec"]["cidrs"][0], "10.2.0.0/16");
    for wrong in [&["diff", "-f", "/no/such"] as &[&str], &["diff"]] {
        assert!(other.freeflow(wrong, text).status.code() >= Some(2));
    }
}

#[test]
fn watch_prints_changes_and_begins_anew_when_it_came_too_late() {
    let event = |what: &str, name: &str| json!({"type": what, "object": network(name, "10.1.0.0/16")}).to_string();
    let lines = [event("MODIFIED", "blue"), event("BOOKMARK", "x"), event("DELETED", "blue")].join("\n") + "\n";
    let list = json!({"metadata": {"resourceVersion": 9}, "items": [network("blue", "10.1.0.0/16")]}).to_string();
    let watch = "GET /networks?watch=true&resourceVersion=9";
    let server = Server::with_texts("watch", vec![("GET /networks", 200, list.clone()), (watch, 200, lines)]);
    let output = server.freeflow(&["get", "networks", "-w"], "");
    let words: Vec<String> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| line.split_whitespace().take(2).collect::<Vec<_>>().join(" "))
        .collect();
    assert_eq!(words, ["EVENT NAME", "ADDED blue", "MODIFIED blue", "DELETED blue"]);
    assert_eq!(output.status.code(), Some(1), "the server ended it");
    let output = server.freeflow(&["get", "networks", "other", "-w", "-o", "json"], "");
    assert!(output.stdout.is_empty());
    let expired = status("Expired", "too old", json!({})).to_string();
    let server = Server::with_texts("expired", vec![("GET /networks", 200, list), (watch, 410, expired)]);
    let output = server.freeflow(&["get", "networks", "-w", "-o", "json"], "");
    let asked = server.asked().len();
    assert!((4..100).contains(&asked) && output.status.code() == Some(1), "{asked}");
}

/// Answers that no router of ours gives.
const STRANGE: [&str; 12] = [
    "null",
    "7",
    "\"items\"",
    "[]",
    "[{\"items\": []}]",
    "{}",
    "{\"items\": null}",
    "{\"items\": {\"0\": 1}}",
    "{\"items\": [[]], \"metadata\": []}",
    "{\"items\": [7, {\"object\": [], \"metadata\": \"x\", \"spec\": {\"\": [{}]}}], \"metadata\": {\"continue\": 7}}",
    "{\"type\": \"MODIFIED\", \"object\": []}",
    "{\"type\": \"ERROR\", \"object\": 7, \"items\": [[[]]]}",
];

#[test]
fn no_answer_is_too_strange() {
    let text = "kind: Network\nmetadata: {name: blue}\n";
    let commands: [&[&str]; 10] = [
        &["apply", "-f", "-"],
        &["diff", "-f", "-"],
        &["delete", "-f", "-"],
        &["delete", "network", "blue", "-o", "json"],
        &["get", "networks"],
        &["get", "networks", "-w"],
        &["get", "network", "blue"],
        &["get", "vnic", "blue", "-o", "yaml"],
        &["describe", "networks"],
        &["top", "-n", "1"],
    ];
    for (number, answer) in STRANGE.into_iter().enumerate() {
        let asked = [
            "POST /apply",
            "POST /apply?dryRun=true",
            "DELETE /networks/blue",
            "GET /networks",
            "GET /networks?watch=true&resourceVersion=-",
            "GET /networks/blue",
            "GET /vnics",
            "GET /live?qps=false&continue=",
        ];
        let answers = asked.into_iter().map(|what| (what, 200, format!("{answer}\n"))).collect();
        let server = Server::with_texts(&format!("strange-{number}"), answers);
        for command in commands {
            let output = server.freeflow(command, text);
            let printed = String::from_utf8(output.stderr).unwrap();
            assert!((0..=5).contains(&output.status.code().unwrap_or(-1)), "{command:?} of {answer}: {printed}");
            let is_list = answer.starts_with("{\"items\": [");
            if !is_list && !answer.contains("[[[]]]") && (command[0] == "apply" || command[1] == "networks") {
                assert_eq!(output.status.code().map(i32::signum), Some(1), "{command:?} of {answer}");
                assert!(
                    printed.contains("the router's answer has no list of objects"),
                    "{command:?} of {answer}: {printed}"
                );
            }
        }
    }
    // One that leaves something out.
    let answer = json!({"items": [{"kind": "Network", "name": "blue", "result": "unchanged"}]});
    let server = Server::new("few", vec![("POST /apply?dryRun=true", 200, answer)]);
    let output = server.freeflow(&["diff", "-f", "-"], TWO);
    expect(&output, 2, "", "freeflow: the router's answer lists 1 objects; 2 were sent\n");
}

#[test]
fn without_a_server_the_reason_is_printed() {
    let run_dir = std::env::temp_dir().join(format!("freeflow-control-none-{}", std::process::id()));
    std::fs::create_dir_all(&run_dir).unwrap();
    let printed = |part: &str| {
        let output = freeflow(&run_dir, &["get", "networks"], "");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(part) && text.lines().count() == 1 && output.status.code() == Some(1), "{text}");
    };
    printed("no router is running in ");
    let _admin = UnixListener::bind(run_dir.join("admin.sock")).unwrap();
    printed("it is older than this command");
    drop(UnixListener::bind(run_dir.join("api.sock")).unwrap());
    printed("no router is running in ");
    std::fs::remove_dir_all(&run_dir).unwrap();
    // An answer that is none of ours.
    let server = Server::with_texts("strange", vec![("GET /networks", 404, "what?".into())]);
    let output = server.freeflow(&["get", "networks"], "");
    assert!(String::from_utf8(output.stderr).unwrap().contains("another version"));
}
