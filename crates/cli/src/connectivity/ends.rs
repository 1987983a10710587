//! The two processes of a connectivity test, each in a container of `freeflow run`, and what they say.
//!
//! Invariant: when [`run`] returns, its containers have ended, or a complaint names the one that has not. They end by
//! themselves when this process dies: their sockets close, and their time is bounded.

use super::asking::Expected;
use super::checks::{Check, Verdict};
use super::end::{ANSWER_TIME, PAIR_TIME, Said};
use super::messages::{Conversation, printable};
use super::rules::{Member, Rules};
use crate::admin::Admin;
use crate::failure::{Context as _, EXIT_FAILURE, Failure, Result, fail};
use crate::interruption::Interruption;
use crate::process::Process;
use crate::{output, tools};
use freeflow_hostnet::run_dir::RunDir;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::Signal;
use std::io::Read;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a container may take to end.
const END_TIME: Duration = Duration::from_secs(15);
/// Checks of one pair at most: an end that says more is not ours.
const CHECK_COUNT_MAX: usize = 64;
/// How much of what a container says of its failure is shown, bytes.
const STDERR_BYTES_MAX: u64 = 4096;

/// One end: where it is, and what its vNIC is to have.
#[derive(Clone, Debug)]
pub struct End {
    pub run_dir: RunDir,
    pub host: String,
    pub network: String,
    pub labels: Vec<(String, String)>,
}

/// The end that is asked.
#[derive(Clone, Debug)]
pub enum Partner {
    Here(End),
    /// An end that answers on another host already.
    There {
        address: Ipv4Addr,
        labels: Vec<(String, String)>,
    },
}

/// A container of a test, ended when it is dropped.
struct Contained {
    child: Child,
    name: String,
}

impl Contained {
    fn start(end: &End, name: String, role: &[String], stdin: Stdio, stdout: Stdio) -> Result<Self> {
        let program = tools::own_path()?;
        let mut command = Command::new(&program);
        command.arg("--run-dir").arg(end.run_dir.path());
        command.args(["run", "--rm", "--no-names", "--workdir", "/", "--name", &name, "--network", &end.network]);
        for (key, value) in &end.labels {
            command.args(["--label", &format!("{key}={value}")]);
        }
        command.arg("--").arg(&program).args(["test", "end", "--role"]).args(role);
        command.stdin(stdin).stdout(stdout).stderr(Stdio::piped());
        Ok(Self { child: command.spawn().context("can't start an end of the test")?, name })
    }

    /// Waits for the end of the container, and ends it if it takes too long. What it said of its failure.
    fn finish(mut self) -> Option<String> {
        // The text of a living one has no end.
        if self.end(END_TIME) { self.said() } else { None }
    }

    fn said(&mut self) -> Option<String> {
        let mut text = Vec::new();
        let stderr = self.child.stderr.take()?;
        stderr.take(STDERR_BYTES_MAX).read_to_end(&mut text).ok()?;
        let text = printable(String::from_utf8_lossy(&text).trim());
        (!text.is_empty()).then_some(text)
    }

    /// False if it does not end.
    fn end(&mut self, patience: Duration) -> bool {
        if let Some(process) = Process::of(self.child.id())
            && !process.wait_end(patience)
        {
            let _ = process.signal(Signal::TERM);
            if !process.wait_end(END_TIME) {
                output::complaint(format!("container {} does not end; remove it with: freeflow rm -f", self.name));
                return false;
            }
        }
        let _ = self.child.wait();
        true
    }
}

impl Drop for Contained {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

fn sockets() -> Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).context("socketpair")
}

/// The vNIC of a container, as its router shows it.
fn member(end: &End, container: &str) -> Result<Member> {
    let vnic = Admin::connect(&end.run_dir)?.vnics()?.into_iter().find(|vnic| vnic.name == container);
    let vnic = vnic.ok_or_else(|| Failure::new(format!("the router does not show the vNIC of {container}")))?;
    Ok(Member {
        addresses: vnic.addresses().collect(),
        network: vnic.network,
        id: vnic.id,
        labels: vnic.labels.into_iter().collect(),
    })
}

/// Tests one pair; what goes wrong with the test itself is a check that failed.
pub fn run(from: &End, to: &Partner, number: usize, signals: &Interruption) -> Result<Vec<Check>> {
    let mut checks = Vec::new();
    let tried = pair(from, to, number, signals, &mut checks);
    signals.check("the test's containers are removed")?;
    if let Err(failure) = tried {
        let remedy = "see freeflow status; for an end on another host: freeflow test connectivity --respond there";
        checks.push(Check::new("ends", Verdict::Failed, failure.to_string()).with_remedy(remedy));
    }
    Ok(checks)
}

fn pair(from: &End, to: &Partner, number: usize, signals: &Interruption, checks: &mut Vec<Check>) -> Result<()> {
    let name = |end: &str| format!("connectivity-{}-{number}-{end}", std::process::id());
    let (to_command, from_asking) = sockets()?;
    let mut role = vec!["ask".to_owned()];
    let (asking_stdin, answering) = match to {
        Partner::Here(end) => {
            let (one, other) = sockets()?;
            let answering = Contained::start(end, name("answers"), &["answer".into()], other.into(), Stdio::null())?;
            (Stdio::from(one), Some((end, answering)))
        }
        Partner::There { address, .. } => {
            role.extend(["--peer".into(), address.to_string()]);
            (Stdio::null(), None)
        }
    };
    let asking = Contained::start(from, name("asks"), &role, asking_stdin, from_asking.into())?;
    let mut conversation = Conversation::over(to_command, ANSWER_TIME)?;
    let heard = listen(&mut conversation, signals, checks, || {
        let one = member(from, &name("asks"))?;
        let across = !matches!(to, Partner::Here(end) if end.run_dir.path() == from.run_dir.path());
        let other = match to {
            Partner::Here(end) => member(end, &name("answers"))?,
            Partner::There { address, labels } => Member {
                network: from.network.clone(),
                id: String::new(),
                addresses: vec![(*address).into()],
                labels: labels.iter().cloned().collect(),
            },
        };
        Ok(Rules::read(&from.run_dir)?.expected(&one, &other, across))
    });
    drop(conversation);
    let said = [asking.finish(), answering.and_then(|(_, answering)| answering.finish())];
    heard.map_err(|failure| {
        let said: Vec<String> = said.into_iter().flatten().collect();
        let more = if said.is_empty() { String::new() } else { format!("; {}", said.join("; ")) };
        Failure::new(format!("{failure}{more}")).with_code(EXIT_FAILURE)
    })
}

fn listen(
    conversation: &mut Conversation,
    signals: &Interruption,
    checks: &mut Vec<Check>,
    expected: impl Fn() -> Result<Expected>,
) -> Result<()> {
    let deadline = Instant::now() + PAIR_TIME + ANSWER_TIME;
    while Instant::now() < deadline && !signals.has_come() {
        match conversation.hear::<Said>()? {
            Some(Said::Ready) => conversation.say(&expected()?)?,
            Some(Said::Check(check)) if checks.len() < CHECK_COUNT_MAX => checks.push(check),
            Some(Said::Check(_)) => fail!("an end of the test says more than it should"),
            Some(Said::Failed(reason)) => fail!("{}", printable(&reason)),
            Some(Said::End) => return Ok(()),
            None => fail!("an end of the test did not start, or has died"),
        }
    }
    fail!("the test takes too long")
}

/// An end that answers other hosts, until its time is over or a signal comes.
pub fn respond(end: &End, name: &str, seconds: u64, signals: &Interruption) -> Result<()> {
    let role = ["respond".to_owned(), "--seconds".to_owned(), seconds.to_string()];
    let mut responding = Contained::start(end, name.to_owned(), &role, Stdio::null(), Stdio::inherit())?;
    let process = Process::of(responding.child.id());
    while process.is_some_and(|process| process.is_alive()) && !signals.has_come() {
        signals.comes_within(Duration::from_millis(200));
    }
    if signals.has_come() {
        // The terminal has sent it to the container, too; a supervisor has not.
        responding.end(Duration::ZERO);
        return Ok(());
    }
    let status = responding.child.wait().context("the answering end")?;
    if status.success() {
        return Ok(());
    }
    Err(Failure::new(responding.said().unwrap_or_else(|| format!("the answering end failed: {status}"))))
}
