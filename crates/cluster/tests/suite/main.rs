//! A cluster: first without etcd, then on a real one (Debian's, or the one that `FREEFLOW_ETCD` names).
#[path = "../../../etcd/tests/suite/common/mod.rs"]
#[allow(dead_code, reason = "the tests of etcd's store use the rest")]
mod common;
mod given;
mod joining;
mod leases;
mod mesh;
mod mirroring;
mod on_etcd;
mod peers_and_blocks;
mod placing;
mod vnics_of_hosts;
