//! Messages on Unix sockets: of the library, of the command, and their answers, which a library
//! takes from a router that another tenant may have made.
use freeflow_protocol::admin::{AdminReply, AdminRequest};
use freeflow_protocol::library::{Reply, Request};
use freeflow_protocol::{DecodeError, MESSAGE_BYTES_MAX, decode, encode};
use std::fmt::Debug;

pub fn run(bytes: &[u8]) {
    let Some((kind, message)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => look_at(message, decode::<Request>, encode),
        1 => look_at(message, decode::<Reply>, encode),
        2 => look_at(message, decode::<AdminRequest>, encode),
        _ => look_at(message, decode::<AdminReply>, encode),
    }
}

pub fn look_at<M: PartialEq + Debug>(
    bytes: &[u8],
    decode: fn(&[u8]) -> Result<M, DecodeError>,
    encode: fn(&M) -> Vec<u8>,
) {
    let Ok(message) = decode(bytes) else { return };
    assert!(bytes.len() <= MESSAGE_BYTES_MAX);
    let again = encode(&message);
    assert!(again.len() <= bytes.len(), "the encoding is the shortest");
    assert_eq!(decode(&again), Ok(message), "what is read is what is written");
}
