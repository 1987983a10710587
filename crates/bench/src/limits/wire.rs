//! Limits of the network between two hosts: bare programs, one end in each host, no library and no router.
//!
//! Unlike the other limits the two ends live in different network namespaces, so each is a process
//! of its own: this program again, as `freeflow-bench wire-end END`, with [`End`] as JSON. An end
//! that answers prints [`super::end::READY`] first; each prints its [`EndFigures`] when it is through.
use super::end::{EndFigures, Meter, QUIET_NS, THERE, say_ready, trips};
use super::wire_stream::{WINDOW_BYTES, set_option, sink, source};
use crate::cm::End as CmEnd;
use crate::stats::Summary;
use crate::sys;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

/// Longest that an end may run, seconds; then SIGALRM ends it.
const END_S_MAX: u32 = 60;
/// Longest wait for one answer.
const ANSWER_NS_MAX: u64 = if cfg!(test) { 5_000_000_000 } else { 1_000_000_000 };
/// Empty polls between looks at the clock.
const POLLS_A_LOOK: u32 = 1024;
/// The last message of a ping-pong is of this length.
const GOODBYE_BYTES: usize = 1;
const DATAGRAM_BYTES_MAX: usize = 2048;
const RECEIVE_BUFFER_BYTES: libc::c_int = 16 << 20;

/// One end's task, and its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// Takes a stream of RDMA WRITEs.
    Sink {
        port: u16,
        payload_bytes: usize,
    },
    /// Sends one.
    Source {
        to: Ipv4Addr,
        port: u16,
        payload_bytes: usize,
        duration_ms: u64,
    },
    /// Sends datagrams back; spins.
    Echo {
        port: u16,
    },
    Ping {
        to: Ipv4Addr,
        port: u16,
        bytes: usize,
        duration_ms: u64,
    },
    /// Counts datagrams, one system call each; blocks.
    Count {
        port: u16,
    },
    Flood {
        to: Ipv4Addr,
        port: u16,
        bytes: usize,
        duration_ms: u64,
    },
    /// A ping-pong over TCP, blocking.
    TcpEcho {
        port: u16,
        bytes: usize,
    },
    TcpPing {
        to: Ipv4Addr,
        port: u16,
        bytes: usize,
        duration_ms: u64,
    },
    /// Of connection management and its streams.
    Cm(CmEnd),
}

impl End {
    /// The ends that spin have a core each; the others run where the kernel puts them.
    fn cpu(&self) -> Option<usize> {
        let (first, second) = super::two_cpus();
        match self {
            Self::Source { .. } | Self::Ping { .. } | Self::Flood { .. } => first,
            Self::Sink { .. } | Self::Echo { .. } | Self::Count { .. } => second,
            Self::TcpEcho { .. } | Self::TcpPing { .. } | Self::Cm(_) => None,
        }
    }
}

/// Where an end is in a container it may not put itself first in line: it says that it is there,
/// and waits for a line to go on. Whoever started it does it meanwhile.
fn await_place(end: &End) -> io::Result<()> {
    if matches!(end, End::TcpEcho { .. } | End::TcpPing { .. } | End::Cm(_)) {
        println!("{THERE}");
        io::stdout().flush()?;
        io::stdin().read_line(&mut String::new())?;
    }
    Ok(())
}

/// `freeflow-bench wire-end END`.
pub fn main(end: &str) -> io::Result<()> {
    let end: End = serde_json::from_str(end)?;
    // SAFETY: a plain number; the default action of SIGALRM ends this process.
    unsafe { libc::alarm(END_S_MAX) };
    sys::new_session_first_in_line();
    sys::pin(end.cpu());
    await_place(&end)?;
    let figures = match end {
        End::Sink { port, payload_bytes } => sink(&bound(port)?, payload_bytes),
        End::Source { to, port, payload_bytes, duration_ms } => {
            source(&connected(to, port)?, to, (payload_bytes, WINDOW_BYTES), duration_ms)
        }
        End::Echo { port } => echo(&bound(port)?),
        End::Ping { to, port, bytes, duration_ms } => ping(&connected(to, port)?, bytes, duration_ms),
        End::Count { port } => count(&bound(port)?),
        End::Flood { to, port, bytes, duration_ms } => flood(&connected(to, port)?, bytes, duration_ms),
        End::TcpEcho { port, bytes } => tcp_echo(port, bytes),
        End::TcpPing { to, port, bytes, duration_ms } => tcp_ping(to, port, bytes, duration_ms),
        End::Cm(end) => end.run(),
    }?;
    println!("{}", serde_json::to_string(&figures)?);
    Ok(())
}

/// With room for a whole window.
fn bound(port: u16) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port))?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)?;
    Ok(socket)
}

fn connected(to: Ipv4Addr, port: u16) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0))?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, RECEIVE_BUFFER_BYTES)?;
    socket.connect(SocketAddrV4::new(to, port))?;
    Ok(socket)
}

/// Spins until `look` gives something, or until `within_ns` have passed: `None`.
fn spin<T>(within_ns: u64, mut look: impl FnMut() -> io::Result<T>) -> io::Result<Option<T>> {
    let since_ns = sys::monotonic_ns();
    let mut polls = 0u32;
    loop {
        match look() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            result => return result.map(Some),
        }
        std::hint::spin_loop();
        polls += 1;
        if polls.is_multiple_of(POLLS_A_LOOK) && sys::monotonic_ns() - since_ns > within_ns {
            return Ok(None);
        }
    }
}

fn silence() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "the other end does not answer")
}

fn echo(socket: &UdpSocket) -> io::Result<EndFigures> {
    socket.set_nonblocking(true)?;
    say_ready()?;
    let mut bytes = [0; DATAGRAM_BYTES_MAX];
    let (mut meter, mut count) = (Meter::start(), 0);
    while let Some((length, from)) =
        spin(if count == 0 { u64::MAX } else { QUIET_NS }, || socket.recv_from(&mut bytes))?
    {
        if count == 0 {
            meter = Meter::start();
        }
        count += 1;
        socket.send_to(&bytes[..length], from)?;
        if length == GOODBYE_BYTES {
            break;
        }
    }
    Ok(meter.figures(None, count, 0))
}

fn ping(socket: &UdpSocket, bytes: usize, duration_ms: u64) -> io::Result<EndFigures> {
    socket.set_nonblocking(true)?;
    let (message, mut answer) = (vec![7; bytes], [0; DATAGRAM_BYTES_MAX]);
    let trips = trips(duration_ms, || {
        socket.send(&message)?;
        spin(ANSWER_NS_MAX, || socket.recv(&mut answer))?.ok_or_else(silence).map(drop)
    });
    socket.send(&message[..GOODBYE_BYTES])?;
    trips
}

fn count(socket: &UdpSocket) -> io::Result<EndFigures> {
    say_ready()?;
    let mut bytes = [0; DATAGRAM_BYTES_MAX];
    socket.recv(&mut bytes)?;
    socket.set_read_timeout(Some(Duration::from_nanos(QUIET_NS)))?;
    let (meter, mut count) = (Meter::start(), 0);
    let mut figures = meter.figures(None, 0, 0);
    loop {
        match socket.recv(&mut bytes) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
            Ok(GOODBYE_BYTES) => break,
            Ok(_) => count += 1,
        }
        if count % 256 == 0 {
            figures = meter.figures(None, count, 0);
        }
    }
    let rate = figures.count as f64 * 1e9 / figures.elapsed_ns.max(1) as f64;
    Ok(EndFigures { figures: Summary::of(&mut [rate]), ..figures })
}

fn flood(socket: &UdpSocket, bytes: usize, duration_ms: u64) -> io::Result<EndFigures> {
    let message = vec![7; bytes];
    let (meter, mut count) = (Meter::start(), 0u64);
    let until = meter.begun_ns + duration_ms * 1_000_000;
    while !count.is_multiple_of(64) || sys::monotonic_ns() < until {
        socket.send(&message)?;
        count += 1;
    }
    let figures = meter.figures(None, count, 0);
    socket.send(&message[..GOODBYE_BYTES])?;
    Ok(figures)
}

fn tcp_echo(port: u16, bytes: usize) -> io::Result<EndFigures> {
    let listener = TcpListener::bind(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port))?;
    say_ready()?;
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut message = vec![0; bytes];
    let (meter, mut count) = (Meter::start(), 0);
    loop {
        match stream.read_exact(&mut message) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
            result => result?,
        }
        stream.write_all(&message)?;
        count += 1;
    }
    Ok(meter.figures(None, count, 0))
}

fn tcp_ping(to: Ipv4Addr, port: u16, bytes: usize, duration_ms: u64) -> io::Result<EndFigures> {
    let mut stream = TcpStream::connect(SocketAddrV4::new(to, port))?;
    stream.set_nodelay(true)?;
    let mut message = vec![7; bytes];
    trips(duration_ms, || {
        stream.write_all(&message)?;
        stream.read_exact(&mut message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_json() {
        let end = End::Source { to: Ipv4Addr::LOCALHOST, port: 7, payload_bytes: 4096, duration_ms: 5 };
        let text = serde_json::to_string(&end).expect("JSON");
        assert_eq!(serde_json::from_str::<End>(&text).expect("an end"), end);
        assert!(main("nonsense").is_err());
    }

    #[test]
    fn a_ping_pong_over_loopback() {
        let socket = bound(0).or_else(|_| UdpSocket::bind("127.0.0.1:0")).expect("socket");
        let port = socket.local_addr().expect("address").port();
        let other = std::thread::spawn(move || echo(&socket));
        let pinger = UdpSocket::bind("127.0.0.1:0").expect("socket");
        pinger.connect(("127.0.0.1", port)).expect("connected");
        let figures = ping(&pinger, 64, 5).expect("figures");
        let answered = other.join().expect("no panic").expect("figures");
        assert!(figures.figures.is_some_and(|summary| summary.p50 > 0.0));
        assert!(answered.count > figures.count, "{} of {}", answered.count, figures.count);
    }

    #[test]
    fn nobody_there_is_an_error() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("socket");
        let nobody = UdpSocket::bind("127.0.0.1:0").expect("socket");
        socket.connect(nobody.local_addr().expect("address")).expect("connected");
        assert_eq!(ping(&socket, 64, 5).map_err(|error| error.kind()), Err(ErrorKind::TimedOut));
    }
}
