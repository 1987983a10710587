//! How long one program's control verbs and messages take while something else happens on the host:
//! the longest of each, window by window.
use super::endpoint::{Device, Endpoint, PollTimeout, Post, not_null, zero};
use super::{Operation, Watched};
use crate::sys;

/// Messages between two control verbs.
const MESSAGES: usize = 16;
const WINDOW_NS: u64 = 500_000_000;

/// The longest of one window.
#[derive(Clone, Copy, Default)]
struct Longest {
    control_ns: u64,
    message_ns: u64,
}

/// WRITEs one after the other, and a protection domain made and freed after every sixteenth.
pub fn watch(device: &Device, end: &Endpoint<'_>, duration_ms: u64) -> Result<Watched, String> {
    let mut watched = Watched::default();
    let mut longest = Longest::default();
    let mut window_end = sys::monotonic_ns() + WINDOW_NS;
    let until = window_end - WINDOW_NS + duration_ms * 1_000_000;
    let mut number = 0;
    loop {
        for _ in 0..MESSAGES {
            longest.message_ns = longest.message_ns.max(message(end, number)?);
            number += 1;
        }
        longest.control_ns = longest.control_ns.max(control(device)?);
        let now = sys::monotonic_ns();
        if now >= window_end {
            watched.control_ms.push(longest.control_ns as f64 / 1e6);
            watched.message_ms.push(longest.message_ns as f64 / 1e6);
            longest = Longest::default();
            window_end = now + WINDOW_NS;
        }
        if now >= until {
            return Ok(watched);
        }
    }
}

fn message(end: &Endpoint<'_>, number: usize) -> Result<u64, String> {
    let begun = sys::monotonic_ns();
    end.post(Post { operation: Operation::Write, immediate: None, signaled: true }, number, 1)?;
    let mut poll_timeout = PollTimeout::new();
    while end.poll_sends(|_| {})? == 0 {
        poll_timeout.spend()?;
    }
    Ok(sys::monotonic_ns() - begun)
}

fn control(device: &Device) -> Result<u64, String> {
    let library = &device.library;
    let begun = sys::monotonic_ns();
    // SAFETY: an open context; the domain is freed once, with nothing in it.
    unsafe {
        let pd = not_null((library.alloc_pd)(device.context()), "ibv_alloc_pd")?;
        zero((library.dealloc_pd)(pd), "ibv_dealloc_pd")?;
    }
    Ok(sys::monotonic_ns() - begun)
}
