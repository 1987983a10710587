//! Against real etcd: Debian's, or the one that `FREEFLOW_ETCD` names.
mod common;
mod conformance;
mod exactly_once;
mod following;
mod security;
