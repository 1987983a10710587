//! Base of every plane: the log, wakers, slabs, privileges of threads, and deferred drops.

pub mod deferred_drop;
pub mod lease;
pub mod log;
pub mod log_file;
pub mod machine;
pub mod mode;
pub mod privileges;
pub mod slab;
pub mod system_calls;
pub mod wake;
