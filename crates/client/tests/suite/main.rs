//! The client's tests in one binary. Apart from them: `left_behind`, which marks the whole process
//! as a child of `fork`.
#[path = "../common/mod.rs"]
mod common;
mod memory;
mod rings;
