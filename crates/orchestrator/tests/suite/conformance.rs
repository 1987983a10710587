//! The store that the others are compared with, compared with its model.
use freeflow_orchestrator::MemoryStore;
use freeflow_orchestrator::conformance::{self, Kind};
use proptest::prelude::*;

#[test]
fn memory_store_keeps_managers() {
    conformance::check_managers(MemoryStore::new(), |store| store);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn memory_store(operations in proptest::collection::vec(any::<u64>(), 0..120)) {
        // Nothing survives in memory; leases of a store that was never closed go on as they were.
        let operations: Vec<u64> = operations.into_iter().filter(|&operation| !conformance::reopens(operation)).collect();
        conformance::check(MemoryStore::new(), Kind::Embedded, &operations, |store| store);
    }
}
