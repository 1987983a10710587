//! The asking end of a connectivity test: does one check after the other with an answering end.
//!
//! Where rules deny, a check passes if nothing arrives: the answering end says so itself.

use super::answering::{TCP_BYTES, common_mtu, facts, now_ns};
use super::checks::{Check, Verdict};
use super::connection::{Identifier, Outcome};
use super::endpoint::{Endpoint, MESSAGE_BYTES_MAX, Part, Queue};
use super::messages::{Answer, Conversation, Facts, Step, VERSION, pattern};
use super::plain_ip;
use crate::failure::{Context as _, Failure, Result, fail};
use freeflow_verbs::{Gid, SendOpcode};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

const ECHO_COUNT: u16 = 5;
/// A packet without payload of note, as `ping` sends, bytes.
const SMALL_PACKET_BYTES: usize = 84;
const TCP_TIME: Duration = Duration::from_secs(3);
const MESSAGE_TIME: Duration = Duration::from_secs(3);
const MESSAGE_BYTES: u32 = 4096;
const ROUND_TRIP_COUNT: u32 = 600;
/// Of these, before both ends are awake.
const WARM_UP_COUNT: u32 = 100;
const ROUND_TRIP_BYTES: u32 = 64;
const DATAGRAM_COUNT: u32 = 20;
const DATAGRAM_BYTES: u32 = 512;
/// Clocks of two hosts that differ more are worth a word: leases and tokens go by them.
const CLOCK_DIFFERENCE_NS_MAX: u64 = 500_000_000;

const COUNTERS: &str = "/sys/class/infiniband/freeflow0/ports/1/hw_counters";
/// One packet of so many that is sent again may be a host that was busy.
const LOSS_PACKETS_MIN: u64 = 200;

/// The declared rules' word on the two ends, and where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected {
    /// QPs that are connected by hand may talk: one direction is allowed.
    pub connected: bool,
    /// This end may begin: datagrams, and connections by rdma_cm.
    pub begun: bool,
    /// Both are in one network, so that plain IP goes between them.
    pub same_network: bool,
    /// They are on two hosts.
    pub across: bool,
}

/// Emits one check after the other.
pub fn ask(
    endpoint: &Endpoint,
    conversation: &mut Conversation,
    expected: Expected,
    emit: &mut dyn FnMut(Check),
) -> Result<()> {
    let other = match conversation.ask(&Step::Facts)? {
        Answer::Facts(facts) if facts.version == VERSION => facts,
        Answer::Facts(facts) => fail!("the other end speaks version {}, this one {VERSION}", facts.version),
        _ => fail!("the other end does not say who it is"),
    };
    let mut asking = Asking { endpoint, conversation, other, gid: Gid::default() };
    asking.gid = Gid(asking.other.gid.octets());
    if expected.same_network {
        asking.plain_ip(emit)?;
        emit(judged(
            "TCP",
            asking.tcp(),
            "is a firewall between the two? see the interface of the container, and the bridge's rules",
        ));
    }
    if expected.connected {
        asking.connected(emit);
    } else {
        emit(asking.connected_denied()?);
    }
    emit(if expected.begun { asking.datagrams() } else { asking.datagrams_denied()? });
    emit(if expected.begun { asking.connection() } else { asking.connection_denied()? });
    if expected.across {
        let mut loss =
            judged("loss", loss(), "see freeflow wire status on both hosts, and the counters of their links");
        if loss.verdict == Verdict::Failed {
            loss.verdict = Verdict::Note;
        }
        emit(loss);
        emit(asking.clock()?);
    }
    asking.conversation.say(&Step::End)
}

struct Asking<'a> {
    endpoint: &'a Endpoint,
    conversation: &'a mut Conversation,
    other: Facts,
    gid: Gid,
}

fn judged(name: &str, done: Result<String>, remedy: &str) -> Check {
    match done {
        Ok(detail) => Check::new(name, Verdict::Ok, detail),
        Err(failure) => Check::new(name, Verdict::Failed, failure.to_string()).with_remedy(remedy),
    }
}

const ROUTER_REMEDY: &str = "see freeflow status, freeflow peers ls, and the router's log on both hosts";

/// Microseconds.
fn micros(time: Duration) -> String {
    format!("{:.1} us", time.as_nanos() as f64 / 1000.0)
}

impl Asking<'_> {
    fn ipv4(&self) -> Result<Ipv4Addr> {
        self.gid.to_ipv4().ok_or_else(|| Failure::new("the other end has no IPv4 address"))
    }

    fn plain_ip(&mut self, emit: &mut dyn FnMut(Check)) -> Result<()> {
        let mtu = plain_ip::mtu()?;
        let tries = [("plain IP", SMALL_PACKET_BYTES), ("full packets", mtu)];
        for (name, bytes) in tries {
            let echoes = self.ipv4().and_then(|to| plain_ip::echoes(to, ECHO_COUNT, bytes));
            let echoes = match echoes {
                Ok(echoes) => echoes,
                Err(failure) => {
                    emit(Check::new(name, Verdict::Failed, failure.to_string()));
                    continue;
                }
            };
            let (sent, came) = (echoes.sent, echoes.times.len());
            let detail = match echoes.times.get(came / 2) {
                Some(median) => format!("{came} of {sent} echoes of {bytes} bytes, median {}", micros(*median)),
                None => format!("none of {sent} echoes of {bytes} bytes came back"),
            };
            emit(match came {
                0 if bytes == mtu => Check::new(name, Verdict::Failed, detail).with_remedy(
                    "packets of this size are lost: compare the MTU of the hosts' links with the overlay's",
                ),
                0 => Check::new(name, Verdict::Failed, detail)
                    .with_remedy("between hosts UDP 4789 has to be open; see freeflow doctor, and the host's firewall"),
                came if came < sent => Check::new(name, Verdict::Note, detail).with_remedy("packets are lost"),
                _ => Check::new(name, Verdict::Ok, detail),
            });
        }
        Ok(())
    }

    fn tcp(&mut self) -> Result<String> {
        let Answer::Port(port) = self.conversation.ask(&Step::Tcp)? else { fail!("the other end does not listen") };
        let sent = (|| -> Result<()> {
            let to = SocketAddr::from((self.ipv4()?, port));
            let mut stream = TcpStream::connect_timeout(&to, TCP_TIME).context("can't connect")?;
            for set in [stream.set_read_timeout(Some(TCP_TIME)), stream.set_write_timeout(Some(TCP_TIME))] {
                set.context("a TCP connection")?;
            }
            let content = pattern(3, TCP_BYTES as u32);
            stream.write_all(&content).context("can't send")?;
            let mut back = vec![0; TCP_BYTES];
            stream.read_exact(&mut back).context("nothing came back")?;
            if back != content {
                fail!("other bytes came back than were sent");
            }
            Ok(())
        })();
        // Also after a failure: the other end answers in any case.
        let answered = self.conversation.answer();
        sent?;
        answered?;
        Ok(format!("{TCP_BYTES} bytes there and back"))
    }

    /// All of an RC QP that was connected by hand.
    fn connected(&mut self, emit: &mut dyn FnMut(Check)) {
        let connect = judged("RC connect", self.connect(false), ROUTER_REMEDY);
        let goes_on = connect.verdict == Verdict::Ok;
        emit(connect);
        type Tried<'a> = fn(&mut Asking<'a>) -> Result<String>;
        let steps: [(&str, Tried<'_>); 5] = [
            ("RC SEND", Asking::send),
            ("RC WRITE", Asking::write),
            ("RC READ", Asking::read),
            ("RC atomics", Asking::atomics),
            ("RC latency", Asking::latency),
        ];
        let mut goes_on = goes_on;
        for (name, step) in steps {
            if !goes_on {
                emit(Check::new(name, Verdict::Skipped, "the RC QPs are not connected any more"));
                continue;
            }
            let check = judged(name, step(self), ROUTER_REMEDY);
            // A QP that had an error takes no more requests.
            goes_on = check.verdict == Verdict::Ok;
            emit(check);
        }
    }

    fn connect(&mut self, may_be_denied: bool) -> Result<String> {
        let mtu = common_mtu(self.endpoint, self.other.path_mtu);
        let facts = facts(self.endpoint)?;
        self.conversation.order(&Step::Connect { facts, may_be_denied })?;
        self.endpoint.connect(self.gid, self.other.rc_qpn, mtu, may_be_denied)?;
        Ok(format!("path MTU {}", mtu.bytes()))
    }

    fn request(&self, opcode: SendOpcode, bytes: u32, operands: (u64, u64)) -> Result<()> {
        let to = (self.other.address, self.other.rkey);
        self.endpoint.request(&self.endpoint.rc, opcode, bytes, to, operands)
    }

    /// Sends a message and compares it with the one that comes back.
    fn there_and_back(&self, queue: &Queue, seed: u64, bytes: u32) -> Result<()> {
        let content = pattern(seed, bytes);
        self.endpoint.fill(Part::Out, &content)?;
        self.endpoint.request(queue, SendOpcode::Send, bytes, (0, 0), (0, 0))?;
        let Some((slot, length)) = queue.receive(MESSAGE_TIME)? else { fail!("no message came back") };
        if length != bytes || self.endpoint.received(queue, slot, length)? != content {
            fail!("another message came back than was sent");
        }
        self.endpoint.post_receive(queue, slot)
    }

    fn send(&mut self) -> Result<String> {
        self.conversation.order(&Step::Echo { count: 1, bytes: MESSAGE_BYTES })?;
        self.there_and_back(&self.endpoint.rc, 11, MESSAGE_BYTES)?;
        self.conversation.answer()?;
        Ok(format!("{MESSAGE_BYTES} bytes there and back"))
    }

    fn write(&mut self) -> Result<String> {
        self.endpoint.fill(Part::Out, &pattern(13, MESSAGE_BYTES_MAX))?;
        self.request(SendOpcode::RdmaWrite, MESSAGE_BYTES_MAX, (0, 0))?;
        self.conversation.order(&Step::Verify { seed: 13, bytes: MESSAGE_BYTES_MAX })?;
        Ok(format!("{MESSAGE_BYTES_MAX} bytes"))
    }

    fn read(&mut self) -> Result<String> {
        self.conversation.order(&Step::Fill { seed: 17, bytes: MESSAGE_BYTES_MAX })?;
        self.request(SendOpcode::RdmaRead, MESSAGE_BYTES_MAX, (0, 0))?;
        if self.endpoint.read(Part::Out, 0, MESSAGE_BYTES_MAX)? != pattern(17, MESSAGE_BYTES_MAX) {
            fail!("other bytes were read than the other end has");
        }
        Ok(format!("{MESSAGE_BYTES_MAX} bytes"))
    }

    fn atomics(&mut self) -> Result<String> {
        const FIRST: u64 = 40;
        const SUM: u64 = 42;
        const LAST: u64 = 7;
        self.conversation.order(&Step::SetWord { word: FIRST })?;
        let before = |endpoint: &Endpoint| -> Result<u64> {
            let bytes = endpoint.read(Part::Out, 0, 8)?;
            Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes were read")))
        };
        self.request(SendOpcode::FetchAdd, 8, (SUM - FIRST, 0))?;
        let added_to = before(self.endpoint)?;
        self.request(SendOpcode::CompareSwap, 8, (SUM, LAST))?;
        let compared_with = before(self.endpoint)?;
        let word = self.conversation.ask(&Step::Word)?;
        if (added_to, compared_with, &word) != (FIRST, SUM, &Answer::Word(LAST)) {
            fail!("FETCH_ADD found {added_to}, CMP_SWAP {compared_with}, and the word is {word:?}");
        }
        Ok("FETCH_ADD and CMP_SWAP".into())
    }

    fn latency(&mut self) -> Result<String> {
        self.conversation.order(&Step::Echo { count: ROUND_TRIP_COUNT, bytes: ROUND_TRIP_BYTES })?;
        let mut times = Vec::new();
        for number in 0..ROUND_TRIP_COUNT {
            let begin = Instant::now();
            self.endpoint.request(&self.endpoint.rc, SendOpcode::Send, ROUND_TRIP_BYTES, (0, 0), (0, 0))?;
            let Some((slot, _)) = self.endpoint.rc.receive(MESSAGE_TIME)? else { fail!("a message did not come back") };
            if number >= WARM_UP_COUNT {
                times.push(begin.elapsed());
            }
            self.endpoint.post_receive(&self.endpoint.rc, slot)?;
        }
        self.conversation.answer()?;
        times.sort();
        let at = |percent: usize| micros(times[(times.len() - 1) * percent / 100]);
        Ok(format!("round trip: median {}, 99% within {}", at(50), at(99)))
    }

    /// So many datagrams, and how many of them arrived.
    fn send_datagrams(&mut self) -> Result<u32> {
        let ah = self.endpoint.address_handle(self.gid);
        self.conversation.order(&Step::Datagrams { count: DATAGRAM_COUNT })?;
        let sent = ah.and_then(|ah| {
            (0..DATAGRAM_COUNT).try_for_each(|_| self.endpoint.send_datagram(ah, self.other.ud_qpn, DATAGRAM_BYTES))
        });
        match (self.conversation.answer()?, sent) {
            // Refused at once is as good as not arrived.
            (Answer::Count(0), Err(failure)) => Err(failure),
            (Answer::Count(count), _) => Ok(count),
            _ => fail!("the other end does not count"),
        }
    }

    fn datagrams(&mut self) -> Check {
        const NAME: &str = "UD";
        match self.send_datagrams() {
            Ok(DATAGRAM_COUNT) => {
                Check::new(NAME, Verdict::Ok, format!("{DATAGRAM_COUNT} of {DATAGRAM_COUNT} datagrams"))
            }
            Ok(0) => Check::new(NAME, Verdict::Failed, format!("none of {DATAGRAM_COUNT} datagrams arrived"))
                .with_remedy(ROUTER_REMEDY),
            Ok(count) => Check::new(NAME, Verdict::Note, format!("{count} of {DATAGRAM_COUNT} datagrams arrived"))
                .with_remedy("datagrams are lost: see freeflow wire status"),
            Err(failure) => Check::new(NAME, Verdict::Failed, failure.to_string()).with_remedy(ROUTER_REMEDY),
        }
    }

    fn datagrams_denied(&mut self) -> Result<Check> {
        const NAME: &str = "UD denied";
        Ok(match self.send_datagrams() {
            Ok(0) => Check::new(NAME, Verdict::Ok, format!("none of {DATAGRAM_COUNT} datagrams arrived")),
            Ok(count) => breach(NAME, format!("{count} datagrams arrived")),
            Err(failure) => Check::new(NAME, Verdict::Ok, failure.to_string()),
        })
    }

    /// Connects by rdma_cm and sends one message there and back.
    fn connected_by_cm(&mut self) -> Result<std::result::Result<(), String>> {
        let Answer::Port(port) = self.conversation.ask(&Step::Connection)? else {
            fail!("the other end does not listen")
        };
        let tried = (|| {
            let identifier = Identifier::create(self.endpoint)?;
            match identifier.connect(self.gid, port)? {
                Outcome::Connected(queue) => self.there_and_back(&queue, 19, ROUND_TRIP_BYTES).map(Ok),
                Outcome::Refused(reason) => Ok(Err(reason)),
            }
        })();
        let answered = self.conversation.hear::<Answer>()?;
        match (tried?, answered) {
            (Ok(()), Some(Answer::Done)) => Ok(Ok(())),
            (Err(reason), Some(Answer::Failed(_))) => Ok(Err(reason)),
            (_, answer) => fail!("the two ends do not agree: the other one says {answer:?}"),
        }
    }

    fn connection(&mut self) -> Check {
        const NAME: &str = "rdma_cm";
        match self.connected_by_cm() {
            Ok(Ok(())) => Check::new(NAME, Verdict::Ok, "connected, and a message there and back"),
            Ok(Err(reason)) => Check::new(NAME, Verdict::Failed, reason)
                .with_remedy("see freeflow ps --cm; between hosts TCP 4790 has to be open"),
            Err(failure) => Check::new(NAME, Verdict::Failed, failure.to_string()).with_remedy(ROUTER_REMEDY),
        }
    }

    fn connection_denied(&mut self) -> Result<Check> {
        const NAME: &str = "rdma_cm denied";
        Ok(match self.connected_by_cm()? {
            Ok(()) => breach(NAME, "a connection was made".into()),
            Err(reason) => Check::new(NAME, Verdict::Ok, reason),
        })
    }

    fn connected_denied(&mut self) -> Result<Check> {
        const NAME: &str = "RC denied";
        let sent = self.connect(true).and_then(|_| self.request(SendOpcode::Send, ROUND_TRIP_BYTES, (0, 0)));
        let Answer::Count(count) = self.conversation.ask(&Step::Messages)? else {
            fail!("the other end does not count")
        };
        Ok(match (count, sent) {
            (0, Err(failure)) => Check::new(NAME, Verdict::Ok, failure.to_string()),
            (0, Ok(())) => breach(NAME, "a message was acknowledged".into()),
            (count, _) => breach(NAME, format!("{count} messages arrived")),
        })
    }

    fn clock(&mut self) -> Result<Check> {
        const NAME: &str = "clocks";
        let before = now_ns();
        let Answer::Time(theirs) = self.conversation.ask(&Step::Clock)? else { fail!("the other end has no clock") };
        let after = now_ns();
        let difference = theirs.abs_diff(before / 2 + after / 2);
        let detail =
            format!("differ by {:.1} ms, at most {:.1} ms more", ms(difference), ms(after.abs_diff(before) / 2));
        Ok(match difference > CLOCK_DIFFERENCE_NS_MAX {
            false => Check::new(NAME, Verdict::Ok, detail),
            true => Check::new(NAME, Verdict::Note, detail)
                .with_remedy("tokens and certificates of a cluster go by the clock: run chrony or systemd-timesyncd"),
        })
    }
}

/// Packets of the vNIC that had to be sent again, by its counters.
fn loss() -> Result<String> {
    let counter = |name: &str| -> Result<u64> {
        let path = format!("{COUNTERS}/{name}");
        let text = std::fs::read_to_string(&path).context(&path)?;
        text.trim().parse().context(&path)
    };
    // The router writes them now and then, at least so often.
    std::thread::sleep(Duration::from_millis(2 * counter("lifespan")?.min(1000)));
    let (again, sent) = (counter("completer_retry_err")?, counter("sent_pkts")?);
    if again * LOSS_PACKETS_MIN > sent {
        fail!("{again} of {sent} packets had to be sent again");
    }
    Ok(format!("{again} of {sent} packets were sent again"))
}

fn ms(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

fn breach(name: &str, detail: String) -> Check {
    Check::new(name, Verdict::Failed, format!("{detail} although the declared rules deny it"))
        .with_remedy("take the networks' vNICs out of service, and report it: this must not happen")
}
