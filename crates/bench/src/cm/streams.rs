//! Both ends of a round trip and of a stream over a socket: the kernel's TCP, or an rsocket.
//! Blocking calls, as most programs make them.
use super::library::{Library, address, anywhere, failed};
use crate::limits::end::{EndFigures, Meter, say_ready, trips};
use crate::stats::Summary;
use serde::{Deserialize, Serialize};
use std::ffi::c_int;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};

/// A read of a stream.
const READ_BYTES: usize = 256 << 10;
/// The first part of a stream warms up.
const WARM_UP_SHARE: u64 = 8;
const ADDRESS_BYTES: u32 = size_of::<libc::sockaddr_in>() as u32;

/// Kind of connection that carries a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Tcp,
    Rsocket,
}

/// A connected rsocket.
struct Rsocket<'a> {
    library: &'a Library,
    fd: c_int,
}

fn checked(status: c_int) -> io::Result<c_int> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(status) }
}

fn counted(count: isize) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

impl<'a> Rsocket<'a> {
    fn new(library: &'a Library) -> io::Result<Self> {
        // SAFETY: plain numbers.
        let fd = checked(unsafe { (library.socket)(libc::AF_INET, libc::SOCK_STREAM, 0) })?;
        Ok(Self { library, fd })
    }

    fn accepted(library: &'a Library, port: u16) -> io::Result<Self> {
        let listener = Self::new(library)?;
        let at = anywhere(port);
        // SAFETY: a valid address.
        checked(unsafe { (library.bind)(listener.fd, &raw const at, ADDRESS_BYTES) })?;
        // SAFETY: plain numbers.
        checked(unsafe { (library.listen_socket)(listener.fd, 1) })?;
        say_ready()?;
        // SAFETY: who connected is not asked for.
        let fd = checked(unsafe { (library.accept_socket)(listener.fd, std::ptr::null_mut(), std::ptr::null_mut()) })?;
        Ok(Self { library, fd })
    }

    fn connected(library: &'a Library, to: SocketAddrV4) -> io::Result<Self> {
        let socket = Self::new(library)?;
        let to = address(to);
        // SAFETY: a valid address.
        checked(unsafe { (library.connect_socket)(socket.fd, &raw const to, ADDRESS_BYTES) })?;
        Ok(socket)
    }
}

impl Read for Rsocket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        // SAFETY: as long as the slice.
        counted(unsafe { (self.library.receive)(self.fd, buffer.as_mut_ptr().cast(), buffer.len(), 0) })
    }
}

impl Write for Rsocket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: as long as the slice.
        counted(unsafe { (self.library.send)(self.fd, bytes.as_ptr().cast(), bytes.len(), 0) })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Rsocket<'_> {
    fn drop(&mut self) {
        // SAFETY: ours, closed once.
        unsafe { (self.library.close)(self.fd) };
    }
}

trait Connected: Read + Write {}
impl<T: Read + Write> Connected for T {}

fn with<T>(
    kind: Kind,
    tcp: impl FnOnce() -> io::Result<TcpStream>,
    rsocket: impl for<'a> FnOnce(&'a Library) -> io::Result<Rsocket<'a>>,
    use_it: impl FnOnce(&mut dyn Connected) -> io::Result<T>,
) -> io::Result<T> {
    match kind {
        Kind::Tcp => {
            let mut stream = tcp()?;
            stream.set_nodelay(true)?;
            use_it(&mut stream)
        }
        Kind::Rsocket => {
            let library = Library::load().map_err(failed)?;
            use_it(&mut rsocket(&library)?)
        }
    }
}

fn tcp_accepted(port: u16) -> io::Result<TcpStream> {
    let listener = TcpListener::bind(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, port))?;
    say_ready()?;
    Ok(listener.accept()?.0)
}

/// Sends each message back, until the other end closes.
pub fn echo(kind: Kind, port: u16, bytes: usize) -> io::Result<EndFigures> {
    let mut message = vec![0; bytes];
    with(
        kind,
        || tcp_accepted(port),
        |library| Rsocket::accepted(library, port),
        |stream| {
            let (meter, mut count) = (Meter::start(), 0);
            loop {
                match stream.read_exact(&mut message) {
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                    result => result?,
                }
                stream.write_all(&message)?;
                count += 1;
            }
            Ok(meter.figures(None, count, 0))
        },
    )
}

/// Microseconds of a round trip.
pub fn ping(kind: Kind, to: SocketAddrV4, bytes: usize, duration_ms: u64) -> io::Result<EndFigures> {
    let mut message = vec![7; bytes];
    with(
        kind,
        || TcpStream::connect(to),
        |library| Rsocket::connected(library, to),
        |stream| {
            trips(duration_ms, || {
                stream.write_all(&message)?;
                stream.read_exact(&mut message)
            })
        },
    )
}

/// Reads until the other end closes: Gb/s of payload after the warm-up, which ends at a byte of another value.
pub fn sink(kind: Kind, port: u16) -> io::Result<EndFigures> {
    let mut buffer = vec![0; READ_BYTES];
    with(
        kind,
        || tcp_accepted(port),
        |library| Rsocket::accepted(library, port),
        |stream| {
            let mut meter: Option<Meter> = None;
            let mut bytes = 0u64;
            loop {
                let count = stream.read(&mut buffer)?;
                if count == 0 {
                    break;
                }
                match &meter {
                    Some(_) => bytes += count as u64,
                    None if buffer[count - 1] != WARMING => meter = Some(Meter::start()),
                    None => {}
                }
            }
            let meter = meter.ok_or_else(|| failed("the stream ended before it was warm"))?;
            let figures = meter.figures(None, 0, bytes);
            let gbit_per_s = bytes as f64 * 8.0 / figures.elapsed_ns.max(1) as f64;
            Ok(EndFigures { figures: Summary::of(&mut [gbit_per_s]), ..figures })
        },
    )
}

const WARMING: u8 = 0;
const WARM: u8 = 1;

/// Sends messages of so many bytes for that long.
pub fn source(kind: Kind, to: SocketAddrV4, bytes: usize, duration_ms: u64) -> io::Result<EndFigures> {
    let mut message = vec![WARMING; bytes];
    with(
        kind,
        || TcpStream::connect(to),
        |library| Rsocket::connected(library, to),
        |stream| {
            let mut meter = Meter::start();
            let mut count = 0;
            let warm_ns = meter.begun_ns + duration_ms * 1_000_000 / WARM_UP_SHARE;
            let end_ns = meter.begun_ns + duration_ms * 1_000_000;
            loop {
                stream.write_all(&message)?;
                count += 1;
                let now = crate::sys::monotonic_ns();
                if message[0] == WARMING && now >= warm_ns {
                    message.fill(WARM);
                    (meter, count) = (Meter::start(), 0);
                } else if now >= end_ns {
                    return Ok(meter.figures(None, count, count * bytes as u64));
                }
            }
        },
    )
}
