//! The simulation's tests in one binary.
mod clusters;
