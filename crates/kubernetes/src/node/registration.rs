//! The socket at which the kubelet finds the DRA driver (`plugins_registry`).
//!
//! The kubelet's client sends the socket's path as `:authority`, which is no authority, and so HTTP/2 libraries refuse
//! it. Two calls with small messages are answered here by the frames themselves. Headers are not decoded:
//! `GetInfo` has an empty message, and `NotifyRegistrationStatus` never has.
use crate::log;
use crate::node::messages::{PluginInfo, RegistrationStatus};
use prost::Message;
use std::collections::BTreeMap;
use std::io;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Longest frame that a client may send which was not promised more (RFC 9113, 4.2).
const FRAME_BYTES_MAX: usize = 16384;
/// Longest message, bytes: a status with an error's text.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Bytes of messages of a connection: no more than its flow control lets pass by itself.
const CONNECTION_BYTES_MAX: usize = 65535;
const STREAM_COUNT_MAX: usize = 16;
/// A connection on which nothing comes is closed.
const IDLE_TIME: Duration = Duration::from_secs(600);

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GO_AWAY: u8 = 7;
const END_STREAM: u8 = 1;
const ACKNOWLEDGED: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;
/// `:status: 200` and `content-type: application/grpc` by their places in HPACK's static table.
const HEAD: &[u8] = b"\x88\x0f\x10\x10application/grpc";
/// `grpc-status: 0`.
const TRAILERS: &[u8] = b"\x00\x0bgrpc-status\x010";
/// gRPC's prefix of a message: not compressed, and its length.
const PREFIX_BYTES: usize = 5;

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a frame is short").to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

fn answer(stream: u32, message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("a message is short").to_be_bytes();
    let data = [&[0], &length[..], message].concat();
    [
        frame(HEADERS, END_HEADERS, stream, HEAD),
        frame(DATA, 0, stream, &data),
        frame(HEADERS, END_HEADERS | END_STREAM, stream, TRAILERS),
    ]
    .concat()
}

/// A frame as it came.
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

async fn read_frame(connection: &mut UnixStream) -> io::Result<Frame> {
    let mut head = [0; 9];
    connection.read_exact(&mut head).await?;
    let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
    if length > FRAME_BYTES_MAX {
        return Err(invalid("a frame is too long"));
    }
    let mut payload = vec![0; length];
    connection.read_exact(&mut payload).await?;
    let stream = u32::from_be_bytes([head[5] & 0x7f, head[6], head[7], head[8]]);
    Ok(Frame { kind: head[3], flags: head[4], stream, payload })
}

/// The payload without its padding.
fn data(frame: &Frame) -> io::Result<&[u8]> {
    if frame.flags & PADDED == 0 {
        return Ok(&frame.payload);
    }
    let (length, rest) = frame.payload.split_first().ok_or_else(|| invalid("a frame without its padding"))?;
    let end = rest.len().checked_sub(usize::from(*length)).ok_or_else(|| invalid("more padding than frame"))?;
    Ok(&rest[..end])
}

/// The message of a call, which is one.
fn message(body: &[u8]) -> io::Result<&[u8]> {
    let (prefix, rest) = body.split_at_checked(PREFIX_BYTES).ok_or_else(|| invalid("a call without a message"))?;
    let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]);
    if prefix[0] != 0 || usize::try_from(length) != Ok(rest.len()) {
        return Err(invalid("a call with a message of another form"));
    }
    Ok(rest)
}

fn call(info: &PluginInfo, body: &[u8]) -> io::Result<Vec<u8>> {
    let message = message(body)?;
    if message.is_empty() {
        return Ok(info.encode_to_vec());
    }
    let status = RegistrationStatus::decode(message).map_err(|_| invalid("a status of another form"))?;
    match status.plugin_registered {
        true => log::line(&format!("the kubelet has registered {}", info.name)),
        false => log::line(&format!("the kubelet refuses to register {}: {}", info.name, status.error)),
    }
    Ok(Vec::new())
}

/// Serves a connection of the kubelet's until it ends.
///
/// # Errors
/// The other end breaks the protocol, or the connection breaks.
pub async fn serve(mut connection: UnixStream, info: &PluginInfo) -> io::Result<()> {
    let mut preface = [0; PREFACE.len()];
    connection.read_exact(&mut preface).await?;
    if preface != PREFACE {
        return Err(invalid("no HTTP/2"));
    }
    connection.write_all(&frame(SETTINGS, 0, 0, &[])).await?;
    let (mut bodies, mut bytes): (BTreeMap<u32, Vec<u8>>, usize) = (BTreeMap::new(), 0);
    loop {
        let Ok(frame_read) = timeout(IDLE_TIME, read_frame(&mut connection)).await else { return Ok(()) };
        let read = match frame_read {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        };
        match read.kind {
            SETTINGS if read.flags & ACKNOWLEDGED == 0 => {
                connection.write_all(&frame(SETTINGS, ACKNOWLEDGED, 0, &[])).await?;
            }
            PING if read.flags & ACKNOWLEDGED == 0 => {
                connection.write_all(&frame(PING, ACKNOWLEDGED, 0, &read.payload)).await?;
            }
            GO_AWAY => return Ok(()),
            RESET => {
                bodies.remove(&read.stream);
            }
            HEADERS if read.flags & END_STREAM != 0 => return Err(invalid("a call without a message")),
            DATA => {
                bytes += read.payload.len();
                let body = bodies.entry(read.stream).or_default();
                body.extend_from_slice(data(&read)?);
                if bytes > CONNECTION_BYTES_MAX || body.len() > MESSAGE_BYTES_MAX || bodies.len() > STREAM_COUNT_MAX {
                    return Err(invalid("too much on a connection"));
                }
                if read.flags & END_STREAM != 0 {
                    let body = bodies.remove(&read.stream).unwrap_or_default();
                    connection.write_all(&answer(read.stream, &call(info, &body)?)).await?;
                }
            }
            // Window updates, priorities, headers, which are not decoded, and frames still to be invented.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> PluginInfo {
        PluginInfo {
            kind: "DRAPlugin".into(),
            name: "freeflow.io".into(),
            endpoint: "/plugins/freeflow.io/dra.sock".into(),
            supported_versions: vec!["v1.DRAPlugin".into()],
        }
    }

    /// A call as grpc-go sends it: the socket's path as `:authority`, literally and without Huffman's code.
    fn request(stream: u32, message: &[u8]) -> Vec<u8> {
        let path = b"/pluginregistration.Registration/GetInfo";
        let authority = b"/var/lib/kubelet/plugins_registry/freeflow.io-reg.sock";
        let mut head = vec![0x83, 0x86, 0x44, u8::try_from(path.len()).unwrap()];
        head.extend_from_slice(path);
        head.extend_from_slice(&[0x41, u8::try_from(authority.len()).unwrap()]);
        head.extend_from_slice(authority);
        let data = [&[0], &u32::try_from(message.len()).unwrap().to_be_bytes()[..], message].concat();
        [frame(HEADERS, END_HEADERS, stream, &head), frame(DATA, END_STREAM, stream, &data)].concat()
    }

    async fn talk(sent: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&sent).await.unwrap();
        let (served, received) = tokio::join!(async { serve(theirs, &info()).await }, async {
            ours.shutdown().await.unwrap();
            let mut received = Vec::new();
            // A connection that is closed with bytes unread is reset.
            let _ = ours.read_to_end(&mut received).await;
            received
        });
        (served, received)
    }

    #[tokio::test]
    async fn the_kubelet_gets_the_driver_and_says_that_it_is_registered() {
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        let refused = RegistrationStatus { plugin_registered: false, error: "no".into() };
        let sent = [
            PREFACE.to_vec(),
            frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 255, 255]),
            frame(8, 0, 0, &[0, 0, 255, 255]),
            request(1, &[]),
            frame(PING, 0, 0, b"12345678"),
            request(3, &status.encode_to_vec()),
            request(5, &refused.encode_to_vec()),
        ]
        .concat();
        let (served, received) = talk(sent).await;
        served.unwrap();
        let wanted = [
            frame(SETTINGS, 0, 0, &[]),
            frame(SETTINGS, ACKNOWLEDGED, 0, &[]),
            answer(1, &info().encode_to_vec()),
            frame(PING, ACKNOWLEDGED, 0, b"12345678"),
            answer(3, &[]),
            answer(5, &[]),
        ]
        .concat();
        assert_eq!(received, wanted);
    }

    #[tokio::test]
    async fn other_words_end_the_connection() {
        let with_preface = |rest: &[u8]| [PREFACE, rest].concat();
        for sent in [
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(),
            with_preface(&[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]),
            with_preface(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &[])),
            with_preface(&frame(DATA, END_STREAM, 1, &[0, 0, 0, 0, 9])),
            with_preface(&frame(DATA, END_STREAM | PADDED, 1, &[200, 0])),
            with_preface(&frame(DATA, END_STREAM, 1, &[1, 0, 0, 0, 0])),
            with_preface(&request(1, &[0xff; 9])),
            with_preface(&frame(DATA, 0, 1, &[0; FRAME_BYTES_MAX]).repeat(9)),
        ] {
            let (served, _) = talk(sent).await;
            assert_eq!(served.unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
    }

    #[test]
    fn padding_is_left_out() {
        let padded = |payload: &[u8]| Frame { kind: DATA, flags: PADDED, stream: 1, payload: payload.to_vec() };
        assert_eq!(data(&padded(&[2, 7, 8, 0, 0])).unwrap(), [7, 8]);
        assert!(data(&padded(&[])).is_err());
    }
}
