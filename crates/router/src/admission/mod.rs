//! Admission: which addresses may talk, refusals, and accounts of what tenants take of the router.
//!
//! Both the worker and the control thread have an instance of [`access::AccessPolicy`]; nothing here belongs to one
//! thread.

pub mod access;
pub mod account;
pub mod address_map;
pub mod inter_network;
pub mod shares;
pub mod tallies;
pub mod violations;
