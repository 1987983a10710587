//! The orchestrator's tests in one binary.
mod addresses;
mod common;
mod conformance;
mod managers;
mod objects;
