//! Tenants' memory: where each byte of a process is, and who copies it.
//!
//! - [`page_table`], [`extents`]: the address space of a process as the router reaches it;
//! - [`copies`]: moving bytes inline, by copy threads ([`copy_threads`]) or by `/proc/PID/mem` ([`slow_path`]);
//! - [`quiesce`], [`freezer`]: copies and threads stand still while a library moves its pages;
//! - [`sharing`], [`resharing`]: memory that the slow path reaches, and that its process shall share;
//! - [`grants`], [`revocation`]: memory that a QP reaches past the router.

pub mod avoidance;
pub mod blocking;
pub mod bounce;
pub mod copies;
pub mod copy_threads;
pub mod entrusted;
pub mod extents;
pub mod freezer;
pub mod granting;
pub mod grants;
pub mod hand_over;
mod insiders;
pub mod lease;
pub mod page_table;
pub mod postponed;
pub mod quiesce;
pub mod resharing;
pub mod revocation;
pub mod revoking;
pub mod share_commands;
pub mod sharing;
pub mod slow_path;
pub mod transfers;

#[cfg(test)]
pub mod blocking_memory;
#[cfg(test)]
pub mod copies_tests;
#[cfg(test)]
pub mod copy_threads_tests;
#[cfg(test)]
pub mod grants_tests;
