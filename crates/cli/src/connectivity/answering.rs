//! The answering end of a connectivity test: does what the other end asks for, with its own objects, one conversation
//! at a time.

use super::connection::{Identifier, Outcome};
use super::endpoint::{Endpoint, MESSAGE_BYTES_MAX, Part, RECEIVE_COUNT};
use super::messages::{Answer, Conversation, Facts, Step, VERSION, pattern};
use crate::failure::{Context as _, Result, fail};
use freeflow_verbs::{Gid, PathMtu, SendOpcode};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a message, a datagram and a TCP connection are waited for.
const MESSAGE_TIME: Duration = Duration::from_secs(3);
const DATAGRAM_TIME: Duration = Duration::from_millis(500);
const STRAY_TIME: Duration = Duration::from_millis(100);
const TCP_TIME: Duration = Duration::from_secs(3);
/// Round trips that one step may ask for.
const ECHO_COUNT_MAX: u32 = 10_000;
/// Bytes that come back over TCP.
pub const TCP_BYTES: usize = 64 << 10;

/// This end's objects, for the other one.
pub fn facts(endpoint: &Endpoint) -> Result<Facts> {
    Ok(Facts {
        version: VERSION,
        gid: endpoint.gid()?.0.into(),
        rc_qpn: endpoint.rc.qp.qpn(),
        ud_qpn: endpoint.ud.qp.qpn(),
        address: endpoint.address(Part::Window),
        rkey: endpoint.region.rkey,
        path_mtu: endpoint.path_mtu(),
    })
}

/// The smaller one of both ends' path MTUs.
pub fn common_mtu(endpoint: &Endpoint, other: PathMtu) -> PathMtu {
    let own = endpoint.path_mtu();
    if own.bytes() < other.bytes() { own } else { other }
}

/// Unix time, nanoseconds.
pub fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Answers until the other end has ended, or the time is over.
pub fn answer(endpoint: &Endpoint, conversation: &mut Conversation, deadline: Instant) -> Result<()> {
    while let Some(step) = conversation.hear::<Step>()? {
        if step == Step::End {
            return Ok(());
        }
        if Instant::now() > deadline {
            fail!("the test takes too long");
        }
        let answer = carry_out(endpoint, conversation, step);
        conversation.say(&answer.unwrap_or_else(|failure| Answer::Failed(failure.to_string())))?;
    }
    Ok(())
}

fn checked(bytes: u32) -> Result<u32> {
    if bytes > MESSAGE_BYTES_MAX {
        fail!("{bytes} bytes are more than the {MESSAGE_BYTES_MAX} that there are");
    }
    Ok(bytes)
}

fn carry_out(endpoint: &Endpoint, conversation: &mut Conversation, step: Step) -> Result<Answer> {
    match step {
        Step::Facts => return Ok(Answer::Facts(facts(endpoint)?)),
        Step::Tcp => tcp(endpoint, conversation)?,
        Step::Connect { facts, may_be_denied } => {
            let mtu = common_mtu(endpoint, facts.path_mtu);
            endpoint.connect(Gid(facts.gid.octets()), facts.rc_qpn, mtu, may_be_denied)?;
        }
        Step::Echo { count, bytes } => echo(endpoint, conversation, count, checked(bytes)?)?,
        Step::Messages => return Ok(Answer::Count(messages(endpoint))),
        Step::Fill { seed, bytes } => endpoint.fill(Part::Window, &pattern(seed, checked(bytes)?))?,
        Step::Verify { seed, bytes } => {
            if endpoint.read(Part::Window, 0, checked(bytes)?)? != pattern(seed, bytes) {
                fail!("the memory does not hold what was written");
            }
        }
        Step::SetWord { word } => endpoint.fill(Part::Window, &word.to_le_bytes())?,
        Step::Word => {
            let bytes = endpoint.read(Part::Window, 0, 8)?;
            return Ok(Answer::Word(u64::from_le_bytes(bytes.try_into().expect("eight bytes were read"))));
        }
        Step::Datagrams { count } => {
            conversation.say(&Answer::Done)?;
            return Ok(Answer::Count(datagrams(endpoint, count)));
        }
        Step::Connection => connection(endpoint, conversation)?,
        Step::Clock => return Ok(Answer::Time(now_ns())),
        Step::End => {}
    }
    Ok(Answer::Done)
}

/// Sends back as much as comes over one connection, up to [`TCP_BYTES`].
fn tcp(endpoint: &Endpoint, conversation: &mut Conversation) -> Result<()> {
    let own = endpoint.gid()?.to_ipv4().unwrap_or(Ipv4Addr::UNSPECIFIED);
    let listener = TcpListener::bind((own, 0)).context("can't listen")?;
    conversation.say(&Answer::Port(listener.local_addr().context("can't listen")?.port()))?;
    if !crate::process::poll_readable(&listener.try_clone().context("can't listen")?.into(), Some(TCP_TIME))
        .context("can't listen")?
    {
        fail!("no TCP connection came within {} s", TCP_TIME.as_secs());
    }
    let (mut stream, _) = listener.accept().context("a TCP connection")?;
    for set in [stream.set_read_timeout(Some(TCP_TIME)), stream.set_write_timeout(Some(TCP_TIME))] {
        set.context("a TCP connection")?;
    }
    let mut content = vec![0; TCP_BYTES];
    stream.read_exact(&mut content).context("a TCP connection")?;
    stream.write_all(&content).context("a TCP connection")
}

/// A message that is alone comes back with its content; of many the times count.
fn echo(endpoint: &Endpoint, conversation: &mut Conversation, count: u32, bytes: u32) -> Result<()> {
    if count > ECHO_COUNT_MAX {
        fail!("{count} round trips are more than {ECHO_COUNT_MAX}");
    }
    conversation.say(&Answer::Done)?;
    for _ in 0..count {
        let Some((slot, length)) = endpoint.rc.receive(MESSAGE_TIME)? else {
            fail!("a message did not come within {} s", MESSAGE_TIME.as_secs());
        };
        if count == 1 {
            endpoint.fill(Part::Out, &endpoint.received(&endpoint.rc, slot, length)?)?;
        }
        endpoint.post_receive(&endpoint.rc, slot)?;
        endpoint.request(&endpoint.rc, SendOpcode::Send, bytes, (0, 0), (0, 0))?;
    }
    Ok(())
}

/// Messages that came although they should not; a QP in error has none.
fn messages(endpoint: &Endpoint) -> u32 {
    let mut count = 0;
    while let Ok(Some(_)) = endpoint.rc.receive(STRAY_TIME) {
        count += 1;
    }
    count
}

fn datagrams(endpoint: &Endpoint, count: u32) -> u32 {
    let mut arrived = 0;
    while arrived < count.min(RECEIVE_COUNT) {
        let Ok(Some((slot, _))) = endpoint.ud.receive(DATAGRAM_TIME) else { break };
        let _ = endpoint.post_receive(&endpoint.ud, slot);
        arrived += 1;
    }
    arrived
}

/// Sends back one message over a connection of rdma_cm.
fn connection(endpoint: &Endpoint, conversation: &mut Conversation) -> Result<()> {
    let listener = Identifier::create(endpoint)?;
    conversation.say(&Answer::Port(listener.listen()?))?;
    let queue = match listener.accept()? {
        Outcome::Connected(queue) => queue,
        Outcome::Refused(reason) => fail!("no connection: {reason}"),
    };
    let Some((slot, length)) = queue.receive(MESSAGE_TIME)? else { fail!("no message came over the connection") };
    endpoint.fill(Part::Out, &endpoint.received(&queue, slot, length)?)?;
    endpoint.request(&queue, SendOpcode::Send, length.min(MESSAGE_BYTES_MAX), (0, 0), (0, 0))
}
