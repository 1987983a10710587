//! Messages on the stream between a router and a vNIC's near half: either way.
use crate::library::look_at;
use freeflow_protocol::attachment::{Report, Request};
use freeflow_protocol::{decode, encode};

pub fn run(bytes: &[u8]) {
    let Some((kind, message)) = bytes.split_first() else { return };
    match kind % 2 {
        0 => look_at(message, decode::<Report>, encode),
        _ => look_at(message, decode::<Request>, encode),
    }
}
