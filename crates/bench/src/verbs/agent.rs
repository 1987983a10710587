//! The loop of an agent: one request a line, its replies a line each. It ends when its standard input does.
use super::endpoint::{Device, Endpoint};
use super::flows::FlowEnds;
use super::objects::{Held, Resident};
use super::{Reply, Request, Usage, following, registration, traffic};
use super::{counting, mixed, watching};
use crate::sys;
use std::io::{self, BufRead, Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Between looks whether another program ended.
const FINISH_POLL: Duration = Duration::from_millis(5);

fn say(reply: &Reply) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, reply)?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Serves until there is nobody to serve.
pub fn main() -> io::Result<()> {
    let mut device = None;
    let mut program = None;
    let mut input = io::stdin().lock();
    loop {
        let mut line = String::new();
        if input.read_line(&mut line)? == 0 {
            break;
        }
        match serde_json::from_str(&line) {
            Ok(Request::Hello) => say(&Reply::Done)?,
            Ok(Request::Start { argv }) => say(&start(&argv, &mut program))?,
            Ok(Request::Finish { timeout_ms }) => say(&finish(program.take(), timeout_ms))?,
            Ok(request) => {
                if device.is_none() {
                    match Device::open() {
                        Ok(opened) => device = Some(opened),
                        Err(error) => say(&Reply::Failed(error))?,
                    }
                }
                if let Some(device) = &device {
                    connection(device, request, &mut input)?;
                }
            }
            Err(error) => say(&Reply::Failed(format!("not a request: {error}")))?,
        }
    }
    if let Some(mut program) = program {
        let _ = program.kill();
        let _ = program.wait();
    }
    Ok(())
}

/// Objects that an agent holds between the request that makes them and the `Release`.
#[derive(Default)]
struct Made<'a> {
    end: Option<Endpoint<'a>>,
    flows: Option<FlowEnds<'a>>,
    held: Option<Held<'a>>,
}

/// From a `Prepare`, `PrepareFlows`, `Register` or `Hold` to the `Release`.
fn connection(device: &Device, first: Request, input: &mut impl BufRead) -> io::Result<()> {
    let mut made = Made::default();
    let mut request = first;
    loop {
        let result = handle(device, &mut made, &request);
        say(&result.unwrap_or_else(Reply::Failed))?;
        if request == Request::Release {
            return Ok(());
        }
        let mut line = String::new();
        if input.read_line(&mut line)? == 0 {
            return Ok(());
        }
        request = match serde_json::from_str(&line) {
            Ok(request) => request,
            Err(error) => return say(&Reply::Failed(format!("not a request: {error}"))),
        };
    }
}

fn handle<'a>(device: &'a Device, made: &mut Made<'a>, request: &Request) -> Result<Reply, String> {
    let prepared = "nothing was prepared";
    match request {
        Request::Prepare { memory, job } => {
            let new = Endpoint::new(device, *memory, job)?;
            let address = new.address();
            made.end = Some(new);
            Ok(Reply::Prepared(address))
        }
        Request::Connect { peer } => made.end.as_mut().ok_or(prepared)?.connect(*peer).map(|()| Reply::Done),
        Request::Serve { job } => {
            let end = made.end.as_ref().ok_or(prepared)?;
            say(&Reply::Started).map_err(|error| error.to_string())?;
            traffic::serve(end, job).map(Reply::Ended)
        }
        Request::Run { job } => traffic::run(made.end.as_ref().ok_or(prepared)?, job).map(Reply::Ended),
        Request::PrepareFlows { flows } => {
            let flows = made.flows.insert(FlowEnds::new(device, flows)?);
            Ok(Reply::FlowsPrepared(flows.addresses()))
        }
        Request::ConnectFlows { peers } => made.flows.as_mut().ok_or(prepared)?.connect(peers).map(|()| Reply::Done),
        Request::RunFlows { run } => made.flows.as_ref().ok_or(prepared)?.run(run).map(Reply::Flowed),
        Request::Register { memory, bytes, count, threads } => {
            registration::measure(device, *memory, *bytes, *count, *threads).map(Reply::Registered)
        }
        Request::Hold { kind, count } => {
            let before = Resident::of("self")?;
            made.held = Some(Held::new(device, *kind, *count)?);
            Ok(Reply::Held(before, Resident::of("self")?))
        }
        Request::PrepareMix { mix } => {
            let new = mixed::prepare(device, mix)?;
            let address = new.address();
            made.end = Some(new);
            Ok(Reply::Prepared(address))
        }
        Request::ServeMix => {
            let end = made.end.as_ref().ok_or(prepared)?;
            say(&Reply::Started).map_err(|error| error.to_string())?;
            mixed::serve(end).map(Reply::Ended)
        }
        Request::RunMix { mix } => mixed::run(made.end.as_ref().ok_or(prepared)?, mix).map(Reply::Ended),
        Request::Count { job, dumps } => {
            counting::count(made.end.as_ref().ok_or(prepared)?, job, dumps).map(Reply::Counted)
        }
        Request::HeldAddresses => Ok(Reply::FlowsPrepared(made.held.as_ref().ok_or(prepared)?.addresses())),
        Request::ConnectHeld { peers } => made.held.as_ref().ok_or(prepared)?.connect(peers).map(|()| Reply::Done),
        Request::UseHeld { index, sends } => {
            made.held.as_ref().ok_or(prepared)?.go_round(*index, *sends).map(|()| Reply::Done)
        }
        Request::Watch { duration_ms } => {
            watching::watch(device, made.end.as_ref().ok_or(prepared)?, *duration_ms).map(Reply::Watched)
        }
        Request::Follow { sign } => {
            let end = made.end.as_ref().ok_or(prepared)?;
            say(&Reply::Started).map_err(|error| error.to_string())?;
            following::follow(device, end, *sign).map(|at_ns| Reply::Followed { at_ns })
        }
        Request::Usage => {
            let share_bytes = sys::share_bytes("self").ok_or("no /proc/self/smaps_rollup")?;
            Ok(Reply::Used(Usage { cpu_ns: sys::own_cpu_ns(), share_bytes }))
        }
        Request::Release => {
            *made = Made::default();
            Ok(Reply::Done)
        }
        Request::Hello | Request::Start { .. } | Request::Finish { .. } => Err("release first".to_owned()),
    }
}

fn start(argv: &[String], program: &mut Option<Child>) -> Reply {
    let [name, arguments @ ..] = argv else { return Reply::Failed("no program named".to_owned()) };
    if program.is_some() {
        return Reply::Failed("another program runs".to_owned());
    }
    let mut command = Command::new(name);
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    match command.spawn() {
        Ok(child) => {
            *program = Some(child);
            Reply::Started
        }
        Err(error) => Reply::Failed(format!("{name}: {error}")),
    }
}

/// The outputs of the programs started here are far smaller than a pipe holds, so reading them afterwards is enough.
fn finish(program: Option<Child>, timeout_ms: u64) -> Reply {
    let Some(mut program) = program else { return Reply::Failed("no program runs".to_owned()) };
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    let status = loop {
        match program.try_wait() {
            Ok(Some(status)) => break status.code(),
            Ok(None) if Instant::now() < deadline => thread::sleep(FINISH_POLL),
            _ => {
                let _ = program.kill();
                let _ = program.wait();
                break None;
            }
        }
    };
    let mut text = String::new();
    if let Some(mut out) = program.stdout.take() {
        let _ = out.read_to_string(&mut text);
    }
    if let Some(mut errors) = program.stderr.take() {
        let _ = errors.read_to_string(&mut text);
    }
    Reply::Output { status, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_programs_are_run_and_ended() {
        let mut program = None;
        let argv = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        assert_eq!(start(&argv(&["sh", "-c", "echo out; echo err >&2; exit 3"]), &mut program), Reply::Started);
        let Reply::Output { status, text } = finish(program.take(), 10_000) else { panic!("no output") };
        assert_eq!((status, text.as_str()), (Some(3), "out\nerr\n"));
        assert_eq!(start(&argv(&["sleep", "100"]), &mut program), Reply::Started);
        assert!(matches!(start(&argv(&["true"]), &mut program), Reply::Failed(_)));
        assert!(matches!(finish(program.take(), 1), Reply::Output { status: None, .. }));
        assert!(matches!(finish(None, 1), Reply::Failed(_)));
        assert!(matches!(start(&[], &mut program), Reply::Failed(_)));
    }
}
