//! The simulation's tests in one binary.
mod goodput;
mod promises;
mod seeds;
mod shards;
