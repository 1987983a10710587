//! Messages of another host on the control channel: one, or several one behind the other.
use crate::bytes::Input;

use freeflow_protocol::peer::{PEER_MESSAGE_BYTES_MAX, PeerMessage};
use freeflow_protocol::{decode, encode};

pub fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    match input.u8() {
        Some(0) => look_at(input.0),
        Some(_) => std::iter::from_fn(|| input.chunk()).for_each(look_at),
        None => {}
    }
}

fn look_at(bytes: &[u8]) {
    let Ok(message) = decode::<PeerMessage>(bytes) else { return };
    let again = encode(&message);
    assert!(again.len() <= bytes.len(), "the encoding is the shortest");
    assert!(bytes.len() > PEER_MESSAGE_BYTES_MAX || again.len() <= PEER_MESSAGE_BYTES_MAX);
    assert_eq!(decode(&again), Ok(message), "what is read is what is written");
}
