//! Memory windows of type 2: an end binds one over its area, the peer writes through it and takes
//! it away with a SEND.
use crate::model::{Window, WindowPhase};
use crate::run::Run;
use crate::topology::{Process, Side, TARGET_BYTES};
use crate::world::MEMORY_BASE;
use freeflow_verbs::*;

/// A fresh window; an older one goes.
pub fn renew(run: &mut Run, connection: usize, side: usize) {
    let Side { process, window, .. } = run.topology.connections[connection].sides[side];
    let Process { host, session, pd, .. } = run.topology.processes[process];
    let engine = &mut run.sim.hosts[host].engine;
    if let Some(window) = window
        && let Err(error) = engine.dealloc_mw(session, window.mw)
    {
        return run.wrong(format!("after RESET a window can't go: {error:?}"));
    }
    let (mw, key) = engine.alloc_mw(session, pd, WindowKind::Type2).expect("room");
    run.topology.connections[connection].sides[side].window = Some(Window { mw, key, phase: WindowPhase::Free });
}

/// A step with windows that a side may take now.
pub fn choice(run: &mut Run, connection: usize, side: usize) -> Option<SendOpcode> {
    let sides = &run.topology.connections[connection].sides;
    let (own, peers) = (sides[side].window?.phase, sides[1 - side].window?.phase);
    match run.rng.roll(8) {
        0 if own == WindowPhase::Free => Some(SendOpcode::BindWindow),
        1 if peers == WindowPhase::Open => Some(SendOpcode::SendWithInvalidate),
        _ => None,
    }
}

pub fn fill_bind(run: &mut Run, connection: usize, side: usize, request: &mut SendRequest, number: u64) {
    let low = run.rng.roll(256) as u32;
    let mine = &mut run.topology.connections[connection].sides[side];
    let Some(window) = &mut mine.window else { return };
    window.key = window.key & !0xff | low;
    window.phase = WindowPhase::Binding(number);
    request.rkey = window.key;
    request.immediate = mine.area_key;
    request.remote_address = MEMORY_BASE + mine.area_at;
    request.compare_add = TARGET_BYTES;
    request.swap = u64::from(Access::REMOTE_WRITE.0 | Access::REMOTE_READ.0);
}

/// The key by which a WRITE names the peer's area.
pub fn key(run: &mut Run, connection: usize, side: usize) -> u32 {
    let by_window = run.rng.one_in(2);
    let peer = &run.topology.connections[connection].sides[1 - side];
    match peer.window {
        Some(window) if window.phase == WindowPhase::Open && by_window => window.key,
        _ => peer.area_key,
    }
}

/// A bind is done: from now on the peer may know the key.
pub fn bound(run: &mut Run, connection: usize, side: usize, number: u64) {
    if let Some(window) = &mut run.topology.connections[connection].sides[side].window
        && window.phase == WindowPhase::Binding(number)
    {
        window.phase = WindowPhase::Open;
    }
}

/// The key that a SEND takes away from the peer.
pub fn close(run: &mut Run, connection: usize, side: usize) -> u32 {
    let peer = &mut run.topology.connections[connection].sides[1 - side];
    let Some(window) = &mut peer.window else { return 0 };
    window.phase = WindowPhase::Closing;
    window.key
}

pub fn closed(run: &mut Run, connection: usize, side: usize) {
    if let Some(window) = &mut run.topology.connections[connection].sides[side].window {
        window.phase = WindowPhase::Free;
    }
}
