//! The control plane: the thread `ff-control` ([`thread::Control`]), which has sockets, handles,
//! vNICs and what is declared.

pub mod accept;
pub mod access_admin;
pub mod admin;
pub mod admin_audit;
pub mod admin_connection;
pub mod api_objects;
pub mod api_requests;
pub mod apply;
pub mod attaching;
pub mod cm;
pub mod continuations;
pub mod device;
pub mod direct;
pub mod direct_admin;
pub mod external;
pub mod external_admin;
pub mod feeding;
pub mod host_lists;
pub mod host_status;
pub mod imports;
pub mod inbox;
pub mod lease_timer;
pub mod leasing;
pub mod message;
pub mod metering;
pub mod mode;
pub mod passes;
pub mod peer_updates;
pub mod placement;
pub mod policy;
pub mod policy_updates;
pub mod requests;
pub mod requests_memory;
pub mod requests_qp;
pub mod requests_remap;
pub mod resources;
pub mod session;
pub mod shards;
pub mod statuses;
pub mod store_slot;
pub mod storing;
pub mod sysfs;
pub mod sysfs_counters;
pub mod thread;
pub mod vnic_entry;
pub mod vnic_room;
pub mod vnics;
pub mod wire_admin;

#[cfg(test)]
pub mod thread_tests;
