//! A process of a connectivity test inside its container: one end.
//!
//! Its standard input is a socket to the other end, its standard output one to the command that has started it. An end
//! that answers other hosts has neither: it listens, and says so to people.

use super::answering::answer;
use super::asking::{Expected, ask};
use super::checks::Check;
use super::endpoint::Endpoint;
use super::messages::Conversation;
use crate::arguments_test::{Role, TestEnd};
use crate::failure::{Context as _, Failure, Result, fail};
use crate::output;
use crate::process::poll_readable;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Where an end answers those of other hosts, within the virtual network.
pub const PORT: u16 = 4788;
/// How long an end waits for a line of the other one: longer than any step.
pub const ANSWER_TIME: Duration = Duration::from_secs(20);
/// How long one conversation may take.
pub const PAIR_TIME: Duration = Duration::from_secs(60);
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// From an asking end to its command.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Said {
    /// The end has its vNIC, and reaches the other one; the command answers with an [`Expected`].
    Ready,
    Check(Check),
    Failed(String),
    End,
}

pub fn end(arguments: &TestEnd) -> Result<()> {
    match arguments.role {
        Role::Answer => {
            let mut conversation = Conversation::over(duplicate(std::io::stdin().as_fd())?, PAIR_TIME)?;
            answer(&Endpoint::open()?, &mut conversation, Instant::now() + PAIR_TIME)
        }
        Role::Ask => {
            let mut command = Conversation::over(duplicate(std::io::stdout().as_fd())?, ANSWER_TIME)?;
            let asked = asked(arguments, &mut command);
            let last = asked.map_or_else(|failure| Said::Failed(failure.to_string()), |()| Said::End);
            command.say(&last)
        }
        Role::Respond => respond(Duration::from_secs(arguments.seconds)),
    }
}

fn duplicate(fd: std::os::fd::BorrowedFd<'_>) -> Result<OwnedFd> {
    fd.try_clone_to_owned().context("a socket of the test")
}

fn asked(arguments: &TestEnd, command: &mut Conversation) -> Result<()> {
    let socket = match arguments.peer {
        None => duplicate(std::io::stdin().as_fd())?,
        Some(address) => {
            let to = SocketAddr::from((address, PORT));
            TcpStream::connect_timeout(&to, CONNECT_TIME)
                .map(OwnedFd::from)
                .map_err(|error| Failure::new(format!("no end answers at {to}: {error}")))?
        }
    };
    let mut conversation = Conversation::over(socket, ANSWER_TIME)?;
    let endpoint = Endpoint::open()?;
    command.say(&Said::Ready)?;
    let Some(expected) = command.hear::<Expected>()? else { fail!("the command has ended") };
    let mut heard = Ok(());
    ask(&endpoint, &mut conversation, expected, &mut |check| {
        let said = command.say(&Said::Check(check));
        heard = std::mem::replace(&mut heard, Ok(())).and(said);
    })?;
    heard
}

/// Own address of the container, as its vNIC has it.
fn own_address() -> Result<Ipv4Addr> {
    let endpoint = Endpoint::open()?;
    endpoint.gid()?.to_ipv4().ok_or_else(|| Failure::new("the vNIC has no IPv4 address"))
}

/// Answers ends of other hosts, one after the other, each with objects of its own.
fn respond(time: Duration) -> Result<()> {
    let deadline = Instant::now() + time;
    let address = own_address()?;
    let listener = TcpListener::bind((address, PORT)).context("can't listen")?;
    let wakes: OwnedFd = listener.try_clone().context("can't listen")?.into();
    output::line(format!("Answers at {address} for {}. On another host:", output::duration(time.as_secs())));
    output::line(format!("  freeflow test connectivity --peer {address}"));
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        if !poll_readable(&wakes, Some(left)).context("can't wait")? {
            continue;
        }
        let Ok((stream, from)) = listener.accept() else { continue };
        let conversation = Conversation::over(OwnedFd::from(stream), ANSWER_TIME);
        let done = conversation
            .and_then(|mut conversation| answer(&Endpoint::open()?, &mut conversation, Instant::now() + PAIR_TIME));
        output::line(match done {
            Ok(()) => format!("{}: done", from.ip()),
            Err(failure) => format!("{}: {failure}", from.ip()),
        });
    }
}
