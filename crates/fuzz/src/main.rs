//! The engine: libFuzzer's `main`, which calls the target that FREEFLOW_FUZZ_TARGET names.
//! `scripts/fuzz` builds and runs it.
#![deny(unsafe_code)]
#![no_main]

/// The macro exports the functions that libFuzzer calls by their names, which counts as unsafe code.
#[allow(unsafe_code)]
mod engine {
    use freeflow_fuzz::{TARGETS, Target, target};
    use std::sync::OnceLock;

    static TARGET: OnceLock<&Target> = OnceLock::new();

    fn choose() {
        let name = std::env::var("FREEFLOW_FUZZ_TARGET").unwrap_or_default();
        let Some(chosen) = target(&name) else {
            let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
            eprintln!("FREEFLOW_FUZZ_TARGET is {name:?}; it is one of: {}", names.join(", "));
            std::process::exit(2);
        };
        let _ = TARGET.set(chosen);
    }

    libfuzzer_sys::fuzz_target!(init: choose(), |bytes: &[u8]| {
        if let Some(target) = TARGET.get() {
            (target.run)(bytes);
        }
    });
}
