//! What every plane stands on: the log, wakers, slabs, what threads may do, and dropping things later.

pub mod deferred_drop;
pub mod log;
pub mod log_file;
pub mod machine;
pub mod mode;
pub mod privileges;
pub mod slab;
pub mod system_calls;
pub mod wake;
