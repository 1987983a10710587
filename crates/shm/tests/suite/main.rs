//! Shared memory's tests in one binary. Apart from them: `descriptors`, since a child that is not yet executing holds
//! copies of all of them; `loom`, which is built in another way.
#![cfg(not(loom))]
mod missing;
mod processes;
mod segment;
