//! Giving up capabilities.
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};
use std::io;

/// The calling thread keeps these capabilities, as far as it has them, and no other; its own calls
/// have the `effective` ones of them, and threads that it begins may take the others into effect by
/// this same function.
pub fn limit_capabilities(kept: CapabilitySet, effective: CapabilitySet) -> io::Result<()> {
    let permitted = capabilities(None)?.permitted & kept;
    let sets = CapabilitySets { effective: permitted & effective, permitted, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}

/// No program that the calling thread, or one that it begins later, executes can have other
/// capabilities than these, or gain any by set-user-ID. Errors: the thread lacks CAP_SETPCAP.
pub fn limit_programs(kept: CapabilitySet) -> io::Result<()> {
    set_no_new_privs(true)?;
    // A kernel that has no ambient set has nothing in it.
    let _ = clear_ambient_capability_set();
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if kept.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            // The kernel's last capability came before.
            Err(Errno::INVAL) => break,
            other => other?,
        }
    }
    Ok(())
}
