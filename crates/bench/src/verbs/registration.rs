//! Cost of a registration: `ibv_reg_mr` and `ibv_dereg_mr` of memory that is in use, beside the
//! least that moving so many bytes to new pages can cost, a bare `mmap`, a copy and a `munmap`.
use super::Memory;
use super::endpoint::{Device, not_null, zero};
use crate::stats::Summary;
use crate::sys::{self, Shared};
use freeflow_verbs::Access;
use serde::{Deserialize, Serialize};
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

/// Microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Registration {
    pub register: Summary,
    pub deregister: Summary,
    /// `mmap`, copy of all bytes, `munmap`.
    pub bare: Summary,
}

/// Registrations that are not counted: a library may treat the first ones of a program otherwise.
const UNCOUNTED: usize = 80;

/// Registers and deregisters the same bytes `count` times, beside so many threads that write to memory of their own;
/// the bytes are written to before each time.
pub fn measure(
    device: &Device,
    memory: Memory,
    bytes: usize,
    count: usize,
    threads: usize,
) -> Result<Registration, String> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| work_until(&is_over));
        }
        let measured = measure_alone(device, memory, bytes, count);
        is_over.store(true, Ordering::Relaxed);
        measured
    })
}

fn work_until(is_over: &AtomicBool) {
    let mut words = [0_u64; 512];
    while !is_over.load(Ordering::Relaxed) {
        for word in &mut words {
            *word = std::hint::black_box(*word + 1);
        }
        std::thread::yield_now();
    }
}

fn measure_alone(device: &Device, memory: Memory, bytes: usize, count: usize) -> Result<Registration, String> {
    let library = &device.library;
    let buffer = device.allocate(memory, bytes)?;
    let base = buffer.base();
    let access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ);
    // SAFETY: an open context.
    let pd = not_null(unsafe { (library.alloc_pd)(device.context()) }, "ibv_alloc_pd")?;
    let (mut register, mut deregister, mut bare) = (Vec::new(), Vec::new(), Vec::new());
    let mut outcome = Ok(());
    let uncounted = if bytes <= 1 << 20 { UNCOUNTED } else { 0 };
    for turn in 0..uncounted + count {
        // SAFETY: our own memory, so long; no region lies over it now.
        unsafe { ptr::write_bytes(base, turn as u8, bytes) };
        bare.push(microseconds(|| copy_to_new_pages(base, bytes))?);
        let mut mr = ptr::null_mut();
        register.push(microseconds(|| {
            // SAFETY: the region is deregistered below, before the memory goes.
            mr = unsafe { (library.reg_mr)(pd, base.cast::<c_void>(), bytes, access.0 as c_int) };
            not_null(mr, "ibv_reg_mr").map(|_| ())
        })?);
        // SAFETY: our own memory.
        unsafe { ptr::write_bytes(base, !turn as u8, bytes) };
        // SAFETY: registered above, deregistered once.
        deregister.push(microseconds(|| zero(unsafe { (library.dereg_mr)(mr) }, "ibv_dereg_mr"))?);
        outcome = kept(base, bytes, !turn as u8);
        if outcome.is_err() {
            break;
        }
    }
    // SAFETY: nothing is in it any more.
    unsafe { (library.dealloc_pd)(pd) };
    outcome?;
    for samples in [&mut register, &mut deregister, &mut bare] {
        samples.drain(..uncounted);
    }
    let summary = |samples: &mut Vec<f64>| Summary::of(samples).ok_or("no samples");
    Ok(Registration {
        register: summary(&mut register)?,
        deregister: summary(&mut deregister)?,
        bare: summary(&mut bare)?,
    })
}

fn microseconds(work: impl FnOnce() -> Result<(), String>) -> Result<f64, String> {
    let begun = sys::monotonic_ns();
    work()?;
    Ok((sys::monotonic_ns() - begun) as f64 / 1e3)
}

fn copy_to_new_pages(from: *const u8, bytes: usize) -> Result<(), String> {
    let pages = Shared::untouched(bytes).map_err(|error| format!("mmap: {error}"))?;
    // SAFETY: both ranges have so many bytes, of different mappings.
    unsafe { ptr::copy_nonoverlapping(from, pages.at(0, bytes), bytes) };
    Ok(())
}

/// A deregistration must not lose what was written.
fn kept(base: *const u8, bytes: usize, expected: u8) -> Result<(), String> {
    // SAFETY: our own memory, so long.
    let held = unsafe { std::slice::from_raw_parts(base, bytes) };
    match held.iter().position(|&byte| byte != expected) {
        None => Ok(()),
        Some(at) => Err(format!("byte {at} of {bytes} changed by a registration")),
    }
}
