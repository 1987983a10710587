//! The tests of rdma_cm's machine in one binary.
mod common;
mod ipv6;
mod link_model;
mod linux;
mod policy;
mod ports;
mod random;
mod resolving;
mod scenarios;
