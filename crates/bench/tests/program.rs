//! The program as a user or a script meets it: its help, its complaints, and the agent's side of the harness.
use freeflow_bench::verbs::{Job, Memory, Operation, Reply, Request, Traffic};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_freeflow-bench");

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().expect("run")
}

#[test]
fn help_and_complaints() {
    let help = run(&["--help"]);
    assert!(help.status.success() && String::from_utf8_lossy(&help.stdout).contains("--quick"));
    for arguments in [&["--nothing"][..], &["--only", "nothing"], &["--modes"], &["--write-results"]] {
        let complaint = run(arguments);
        assert_eq!(complaint.status.code(), Some(2), "{arguments:?}");
        assert!(String::from_utf8_lossy(&complaint.stderr).contains("try --help"));
    }
}

#[test]
fn one_handoff_is_json() {
    let handoff = run(&["handoff"]);
    assert!(handoff.status.success());
    let value: serde_json::Value = serde_json::from_slice(&handoff.stdout).expect("JSON");
    assert!(value["one_way_ns"]["p50"].as_f64().is_some_and(|ns| ns > 0.0));
}

/// Without a device, and with nonsense on its input, an agent says what is wrong and goes on.
#[test]
fn an_agent_answers_every_line_and_ends_with_its_input() {
    let mut agent = Command::new(PROGRAM)
        .arg("agent")
        // Where no library can reach a router.
        .env("FREEFLOW_SOCKET", "/nonexistent/router.sock")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("agent");
    let mut input = agent.stdin.take().expect("input");
    let mut output = BufReader::new(agent.stdout.take().expect("output"));
    let mut ask = |line: &str| {
        writeln!(input, "{line}").expect("written");
        let mut reply = String::new();
        output.read_line(&mut reply).expect("read");
        serde_json::from_str::<Reply>(&reply).expect("a reply")
    };
    let text = |request: &Request| serde_json::to_string(request).expect("JSON");
    assert_eq!(ask(&text(&Request::Hello)), Reply::Done);
    assert!(matches!(ask("nonsense"), Reply::Failed(_)));
    let job = Job { traffic: Traffic::Latency, operation: Operation::Send, bytes: 64, slots: 1, duration_ms: 1 };
    assert!(matches!(ask(&text(&Request::Prepare { memory: Memory::Ordinary, job })), Reply::Failed(_)));
    assert!(matches!(ask(&text(&Request::Run { job })), Reply::Failed(_)));
    assert_eq!(ask(&text(&Request::Start { argv: vec!["echo".into(), "x".into()] })), Reply::Started);
    let finish = Request::Finish { timeout_ms: 10_000 };
    assert_eq!(ask(&text(&finish)), Reply::Output { status: Some(0), text: "x\n".into() });
    drop(input);
    assert!(agent.wait().expect("ended").success());
}
