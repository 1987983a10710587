//! The tests of packets in one binary.
mod captures;
mod cm;
mod layout;
mod list;
mod opcodes;
mod random;
mod reference;
