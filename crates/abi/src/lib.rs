//! C layouts of libibverbs and librdmacm (x86-64), the errno table, and conversions to the
//! vocabulary of `freeflow-verbs`.
//!
//! Names are those of `infiniband/verbs.h` (rdma-core), so that a reader can hold one beside the
//! other. Where a struct has grown, the newest layout stands here; every size and the offsets that
//! programs were compiled with are asserted when this crate is built, and compared with the
//! installed header by `tests/layout/`.
//!
//! C enums are plain integers here: an application can put any number there, and a Rust enum must
//! not hold one that it does not name. There is no logic in the layouts, and nothing here does I/O.
//!
//! ```
//! use freeflow_abi::{errno_of, ibv_qp_cap, qp_capabilities_from_c, qp_type_from_c};
//! use freeflow_verbs::{QpType, VerbsError};
//!
//! // Numbers of C become the vocabulary's types once, at the boundary.
//! assert_eq!(qp_type_from_c(2), Ok(QpType::Rc));
//! let cap = ibv_qp_cap { max_send_wr: 64, ..Default::default() };
//! assert_eq!(qp_capabilities_from_c(&cap).max_send_wr, 64);
//!
//! // A program can put any number there, and gets the errno that a NIC's driver gives.
//! assert_eq!(qp_type_from_c(77).map_err(errno_of), Err(errno_of(VerbsError::InvalidArgument)));
//! ```
#![allow(non_camel_case_types)]

mod attributes;
mod constants;
mod context;
mod convert;
mod convert_device;
mod errno;
mod extended;
mod kernel;
mod layout_checks;
mod objects;
mod rdma;
mod work;

pub use attributes::*;
pub use constants::*;
pub use context::*;
pub use convert::{
    ah_attributes_from_c, ah_attributes_to_c, async_event_kind_to_c, completion_to_c, gid_from_c, gid_to_c,
    invalid_as_error, qp_attributes_from_c, qp_attributes_to_c, qp_capabilities_from_c, qp_capabilities_to_c,
    qp_type_from_c, sge_from_c, srq_attributes_from_c, srq_attributes_to_c,
};
pub use convert_device::{copy_prefix, device_attributes_ex_to_c, device_attributes_to_c, port_attributes_to_c};
pub use errno::errno_of;
pub use extended::*;
pub use kernel::*;
pub use objects::*;
pub use rdma::*;
pub use work::*;
