//! The fuzz targets: each a function over any bytes, which panics where a promise is broken.
//! `main.rs` gives them to the engine; `tests/corpus.rs` replays what it has found.
//!
//! A target must be deterministic, keep nothing from one input to the next, and answer short inputs in microseconds.
#![deny(unsafe_code)]

mod attachment;
mod bytes;
mod cm;
mod cm_machine;
mod guest;
mod library;
mod manifest;
mod peer;
mod peer_state;
mod rest;
mod rest_request;
mod rings;
mod wire;

/// A parser, or several that read the same kind of bytes; or a state machine, whose steps are the bytes.
pub struct Target {
    /// Also the name of its folder in `corpus/`.
    pub name: &'static str,
    pub run: fn(&[u8]),
}

pub const TARGETS: [Target; 12] = [
    Target { name: "wire", run: wire::run },
    Target { name: "cm", run: cm::run },
    Target { name: "peer", run: peer::run },
    Target { name: "library", run: library::run },
    Target { name: "attachment", run: attachment::run },
    Target { name: "guest", run: guest::run },
    Target { name: "rings", run: rings::run },
    Target { name: "rest", run: rest::run },
    Target { name: "rest_request", run: rest_request::run },
    Target { name: "manifest", run: manifest::run },
    Target { name: "cm_machine", run: cm_machine::run },
    Target { name: "peer_state", run: peer_state::run },
];

/// The target of this name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
