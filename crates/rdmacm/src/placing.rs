//! The device of an identifier, where a container has several vNICs: that with its own address, or that by which the
//! kernel would reach the peer. Until then an identifier is on the first.
use crate::address::is_any;
use crate::boundary::Outcome;
use crate::call::{bound, command, destroy_id};
use crate::channel::EventChannel;
use crate::device::Device;
use crate::id::{Home, Id};
use crate::lifecycle::{create_at, port_space};
use crate::pipe::Pipe;
use crate::process::Process;
use freeflow_abi::qp_type_from_c;
use freeflow_protocol::cm::{CmAddress, CmRequest};
use freeflow_verbs::Gid;
use std::ffi::c_int;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;

/// Of a socket that sends nothing.
const ANY_PORT: u16 = 9;
/// Of ports that are free at one vNIC, so many are tried until one is free at all of them.
const PORT_TRIES_MAX: u32 = 64;

fn device_with(address: Gid) -> Option<Arc<Device>> {
    Process::devices().ok()?.into_iter().find(|device| device.has(address))
}

fn ip_of(gid: Gid) -> IpAddr {
    gid.to_ipv4().map_or_else(|| Ipv6Addr::from(gid.0).into(), IpAddr::from)
}

/// The device with the address from which the kernel would send to this one.
fn device_towards(destination: Gid) -> Option<Arc<Device>> {
    if let Some(own) = device_with(destination) {
        return Some(own);
    }
    let ip = ip_of(destination);
    let any: IpAddr = if ip.is_ipv4() { [0, 0, 0, 0].into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect((ip, ANY_PORT)).ok()?;
    device_with(Gid::from_ip(socket.local_addr().ok()?.ip()))
}

/// The identifier is going to be bound there.
pub(crate) fn place_at(id: &Id, address: Gid) -> Outcome<()> {
    if is_placed(id) || is_any(address) {
        return Ok(());
    }
    device_with(address).map_or(Ok(()), |device| place(id, device))
}

/// The identifier is going to talk to this peer.
pub(crate) fn place_towards(id: &Id, source: Option<Gid>, destination: Gid) -> Outcome<()> {
    if is_placed(id) {
        return Ok(());
    }
    let device = match source.filter(|source| !is_any(*source)) {
        Some(source) => device_with(source),
        None => device_towards(destination),
    };
    device.map_or(Ok(()), |device| place(id, device))
}

/// There is no choice, or no more.
fn is_placed(id: &Id) -> bool {
    let state = id.state();
    !state.channel.is_joint() || state.device.is_some() || state.is_gone
}

/// Moves an identifier that is nowhere yet to a device.
fn place(id: &Id, device: Arc<Device>) -> Outcome<()> {
    release(id);
    if Arc::ptr_eq(&id.home().device, &device) {
        return Ok(());
    }
    let (channel, address) = {
        let state = id.state();
        (state.channel.clone(), state.bound)
    };
    let home = repeat_at(id, &*channel.pipe_of(&device)?)?;
    if let Some(address) = address {
        // SAFETY: the device is there.
        let moved = unsafe { bound(home.device.context(), CmRequest::Bind { id: home.handle, address }) };
        moved.inspect_err(|_| undo(&home))?;
    }
    undo(&id.set_home(home));
    Ok(())
}

fn undo(home: &Home) {
    // SAFETY: the device is there.
    unsafe { destroy_id(home.device.context(), home.handle) };
}

/// Makes an identifier at another device as well, with the options that it has.
fn repeat_at(id: &Id, pipe: &Pipe) -> Outcome<Home> {
    // SAFETY: reads of integers that do not change.
    let (ps, qp_type) = unsafe { ((*id.as_c()).ps, (*id.as_c()).qp_type) };
    let qp_type = qp_type_from_c(qp_type).map_err(freeflow_abi::errno_of)?;
    let home = create_at(pipe, port_space(ps)?, qp_type, id.key)?;
    let options = id.state().options.clone();
    for option in options {
        let request = CmRequest::SetOption { id: home.handle, option };
        // SAFETY: the device is there.
        unsafe { command(home.device.context(), request) }.inspect_err(|_| undo(&home))?;
    }
    Ok(home)
}

/// The identifier is as it was before it listened, at its own device.
pub(crate) fn listen_no_more(id: &Id) {
    let (channel, address) = {
        let state = id.state();
        (state.channel.clone(), state.bound)
    };
    let device = id.home().device;
    let Ok(home) = channel.pipe_of(&device).and_then(|pipe| repeat_at(id, &pipe)) else { return };
    undo(&id.set_home(home.clone()));
    if let Some(address) = address {
        // SAFETY: the device is there.
        let _ = unsafe { bound(home.device.context(), CmRequest::Bind { id: home.handle, address }) };
    }
}

/// The port is no more its own at other vNICs.
fn release(id: &Id) {
    let reserved = mem::take(&mut id.state().reserved);
    reserved.iter().for_each(undo);
}

/// Binds an identifier at its device. One that wants any port at a wildcard address gets one that is free at all vNICs,
/// and has it there.
pub(crate) fn bind_placed(id: &Id, wanted: CmAddress) -> Outcome<CmAddress> {
    let channel = id.state().channel.clone();
    let is_everywhere = channel.is_joint() && wanted.port == 0 && is_any(wanted.gid);
    let mut tries = 0;
    loop {
        // SAFETY: the identifier's device is there.
        let local = unsafe { bound(id.context()?, CmRequest::Bind { id: id.handle(), address: wanted })? };
        let address = CmAddress { port: local.port, ..wanted };
        let reserved = if is_everywhere { reserve_at_others(id, &channel, address) } else { Ok(Vec::new()) };
        let error = match reserved {
            Err(error) if is_taken(error) => error,
            // A vNIC that is gone, say, hinders nobody who connects by another one. Who listens hears of it then.
            reserved => {
                let mut state = id.state();
                (state.bound, state.reserved) = (Some(address), reserved.unwrap_or_default());
                return Ok(local);
            }
        };
        // The router knows no unbinding.
        let home = repeat_at(id, &*channel.pipe_of(&id.home().device)?)?;
        undo(&id.set_home(home));
        tries += 1;
        if tries == PORT_TRIES_MAX {
            return Err(error);
        }
    }
}

fn is_taken(error: c_int) -> bool {
    matches!(error, libc::EADDRINUSE | libc::EADDRNOTAVAIL)
}

/// A listener that was not bound listens at any port.
pub(crate) fn bind_listener(id: &Id) -> Outcome<()> {
    let is_unbound = {
        let state = id.state();
        state.channel.is_joint() && state.bound.is_none() && state.device.is_none()
    };
    let any = CmAddress { gid: Gid::from_ip(Ipv4Addr::UNSPECIFIED.into()), port: 0 };
    if is_unbound { bind_placed(id, any).map(drop) } else { Ok(()) }
}

fn reserve_at_others(id: &Id, channel: &EventChannel, address: CmAddress) -> Outcome<Vec<Home>> {
    let own = id.home().device;
    let mut reserved = Vec::new();
    for device in Process::devices()?.into_iter().filter(|device| !Arc::ptr_eq(device, &own)) {
        match reserve_at(id, channel, &device, address) {
            Ok(home) => reserved.push(home),
            Err(error) => {
                reserved.iter().for_each(undo);
                return Err(error);
            }
        }
    }
    Ok(reserved)
}

/// Makes the identifier at another device as well, bound to this address.
fn reserve_at(id: &Id, channel: &EventChannel, device: &Arc<Device>, address: CmAddress) -> Outcome<Home> {
    let home = repeat_at(id, &*channel.pipe_of(device)?)?;
    let bind = CmRequest::Bind { id: home.handle, address };
    // SAFETY: the device is there.
    unsafe { bound(home.device.context(), bind) }.inspect_err(|_| undo(&home))?;
    Ok(home)
}

/// A listener at a wildcard address listens at all vNICs, at the same port.
pub(crate) fn listen_at_others(id: &Id, local: CmAddress, backlog: u32) -> Outcome<()> {
    let channel = id.state().channel.clone();
    if !channel.is_joint() || !is_any(local.gid) {
        return Ok(());
    }
    let mut others = mem::take(&mut id.state().reserved);
    if others.is_empty() {
        others = reserve_at_others(id, &channel, local)?;
    }
    let listening = others.iter().try_for_each(|home| {
        let listen = CmRequest::Listen { id: home.handle, backlog };
        // SAFETY: the device is there.
        unsafe { bound(home.device.context(), listen) }.map(drop)
    });
    listening.inspect_err(|_| others.iter().for_each(undo))?;
    id.state().others = others;
    Ok(())
}
