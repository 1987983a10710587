//! `rsetsockopt` and `rgetsockopt`. What a program sets without harm is taken and given back; what
//! would need another answer than it gets is refused with ENOTSUP, as rdma-core does.
use crate::datagram::DatagramSocket;
use crate::ffi::{Outcome, checked};
use crate::keepalive;
use crate::settings::Settings;
use crate::socket::{Phase, StreamSocket};
use crate::stream::State;
use crate::wire::round_iomap_count;
use freeflow_abi::{
    RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, RDMA_OPTION_ID_REUSEADDR, RDMA_OPTION_ID_TOS, ibv_path_data, ibv_path_record,
};
use libc::{
    IP_TOS, IPPROTO_IP, IPPROTO_IPV6, IPPROTO_TCP, IPV6_V6ONLY, SO_ACCEPTCONN, SO_BROADCAST, SO_DOMAIN, SO_ERROR,
    SO_KEEPALIVE, SO_LINGER, SO_OOBINLINE, SO_PRIORITY, SO_PROTOCOL, SO_RCVBUF, SO_RCVLOWAT, SO_RCVTIMEO, SO_REUSEADDR,
    SO_REUSEPORT, SO_SNDBUF, SO_SNDTIMEO, SO_TYPE, SOL_SOCKET, TCP_CONGESTION, TCP_CORK, TCP_DEFER_ACCEPT, TCP_INFO,
    TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_MAXSEG, TCP_NODELAY, TCP_QUICKACK, TCP_USER_TIMEOUT, c_int,
};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// `SOL_RDMA`, and its options.
pub const SOL_RDMA: c_int = 0x10000;
pub const RDMA_SQSIZE: c_int = 0;
pub const RDMA_RQSIZE: c_int = 1;
pub const RDMA_INLINE: c_int = 2;
pub const RDMA_IOMAPSIZE: c_int = 3;
pub const RDMA_ROUTE: c_int = 4;
/// Ours, for the preload library, which has an ordinary socket to try next: how long to look for an
/// address, ms.
pub const RDMA_RESOLVE_MS: c_int = 0x4646;

const SLOTS_MAX: u32 = 0xFFFE;
/// The kernel's own limit for buffers that are asked for.
const BUFFER_BYTES_MAX: u32 = 1 << 30;
const SEND_BYTES_MIN: u32 = 2048;
const ROUTE_BYTES_MAX: usize = 4096;
const RESOLVE_MS_MAX: c_int = 60_000;
const TCP_STATE_ESTABLISHED: u8 = 1;
const TCP_STATE_CLOSE: u8 = 7;
const TCP_INFO_BYTES: usize = size_of::<libc::tcp_info>();

fn number(value: &[u8]) -> Outcome<c_int> {
    value.first_chunk().map(|bytes| c_int::from_ne_bytes(*bytes)).ok_or(libc::EINVAL)
}

fn two_numbers(value: &[u8]) -> Outcome<[c_int; 2]> {
    Ok([number(value)?, number(value.get(4..).ok_or(libc::EINVAL)?)?])
}

fn time(value: &[u8]) -> Outcome<Option<Duration>> {
    let bytes: &[u8; 16] = value.first_chunk().ok_or(libc::EINVAL)?;
    let word = |at: usize| i64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
    let (seconds, micros) = (word(0), word(8));
    if !(0..1_000_000).contains(&micros) {
        return Err(libc::EDOM);
    }
    let whole = Duration::from_secs(u64::try_from(seconds).unwrap_or(0)) + Duration::from_micros(micros as u64);
    Ok((!whole.is_zero()).then_some(whole))
}

fn time_to_bytes(time: Option<Duration>) -> Vec<u8> {
    let time = time.unwrap_or_default();
    let (seconds, micros) = (time.as_secs() as i64, i64::from(time.subsec_micros()));
    [seconds.to_ne_bytes(), micros.to_ne_bytes()].concat()
}

/// Sizes of buffers are doubled, as the kernel does.
fn buffer(value: &[u8]) -> Outcome<u32> {
    Ok((number(value)? as u32).min(BUFFER_BYTES_MAX / 2) * 2)
}

/// Options that only concern the sizes of what is made later.
fn set_sizes(settings: &mut Settings, level: c_int, name: c_int, value: &[u8]) -> Option<Outcome<()>> {
    let sizes = &mut settings.sizes;
    let slots = |value: &[u8]| number(value).map(|count| (count as u32).min(SLOTS_MAX) as u16);
    let outcome = match (level, name) {
        (SOL_SOCKET, SO_RCVBUF) => buffer(value).map(|bytes| sizes.receive_bytes = bytes.max(SEND_BYTES_MIN)),
        (SOL_SOCKET, SO_SNDBUF) => buffer(value).map(|bytes| {
            sizes.send_bytes = if bytes < SEND_BYTES_MIN { SEND_BYTES_MIN * 2 } else { bytes };
        }),
        (SOL_RDMA, RDMA_SQSIZE) => slots(value).map(|count| sizes.send_slots = count),
        (SOL_RDMA, RDMA_RQSIZE) => slots(value).map(|count| sizes.receive_slots = count),
        (SOL_RDMA, RDMA_INLINE) => number(value).map(|bytes| sizes.inline_bytes = (bytes as u32).min(SLOTS_MAX)),
        (SOL_RDMA, RDMA_IOMAPSIZE) => number(value).map(|count| sizes.iomap_count = round_iomap_count(count as u32)),
        _ => return None,
    };
    Some(outcome)
}

fn get_sizes(settings: &Settings, level: c_int, name: c_int) -> Option<c_int> {
    let sizes = &settings.sizes;
    Some(match (level, name) {
        (SOL_SOCKET, SO_RCVBUF) => sizes.receive_bytes as c_int,
        (SOL_SOCKET, SO_SNDBUF) => sizes.send_bytes as c_int,
        (SOL_RDMA, RDMA_SQSIZE) => c_int::from(sizes.send_slots),
        (SOL_RDMA, RDMA_RQSIZE) => c_int::from(sizes.receive_slots),
        (SOL_RDMA, RDMA_INLINE) => sizes.inline_bytes as c_int,
        (SOL_RDMA, RDMA_IOMAPSIZE) => c_int::from(sizes.iomap_count),
        _ => return None,
    })
}

impl StreamSocket {
    /// # Errors
    /// ENOTSUP: no such option; EINVAL; what the connection manager says.
    pub fn set_option(&self, level: c_int, name: c_int, value: &[u8]) -> Outcome<()> {
        let mut setup = self.setup();
        let phase = setup.phase;
        let fixed = !matches!(phase, Phase::Initial | Phase::Bound | Phase::Listening);
        if level == SOL_RDMA && fixed {
            return Err(libc::EINVAL);
        }
        let settings = &mut setup.settings;
        if fixed && level == SOL_SOCKET && matches!(name, SO_RCVBUF | SO_SNDBUF) {
            return Ok(());
        }
        if let Some(outcome) = set_sizes(settings, level, name, value) {
            return outcome;
        }
        match level {
            SOL_SOCKET => self.set_socket_option(settings, phase, name, value),
            IPPROTO_TCP => self.set_tcp_option(settings, phase, name, value),
            _ => self.set_other_option(settings, phase, (level, name), value),
        }
    }

    fn set_socket_option(&self, settings: &mut Settings, phase: Phase, name: c_int, value: &[u8]) -> Outcome<()> {
        match name {
            SO_REUSEADDR => {
                settings.reuse_address = number(value)?;
                let set = self.id.set_option(RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &value[..4]);
                // Too late is no harm.
                if phase == Phase::Initial { set } else { Ok(()) }
            }
            SO_KEEPALIVE => {
                settings.keepalive = number(value)? != 0;
                match settings.keepalive {
                    true if phase == Phase::Connected => keepalive::schedule(self.fd, settings.keepalive_s),
                    true => {}
                    false => keepalive::cancel(self.fd),
                }
                Ok(())
            }
            SO_LINGER => {
                let [on, seconds] = two_numbers(value)?;
                settings.linger_s = (on != 0).then_some(seconds.max(0) as u32);
                Ok(())
            }
            SO_RCVTIMEO | SO_SNDTIMEO => {
                let slot = if name == SO_RCVTIMEO { &mut settings.receive_timeout } else { &mut settings.send_timeout };
                *slot = time(value)?;
                let any = settings.receive_timeout.is_some() || settings.send_timeout.is_some();
                self.timeouts.store(any, Ordering::Relaxed);
                Ok(())
            }
            SO_OOBINLINE => number(value).map(|on| settings.out_of_band_inline = on),
            // These options hold anyway, or make no difference that shows.
            SO_PRIORITY => number(value).map(|priority| settings.priority = priority),
            SO_BROADCAST => number(value).map(|on| settings.broadcast = c_int::from(on != 0)),
            // 0 means 1.
            SO_RCVLOWAT if matches!(number(value)?, 0 | 1) => Ok(()),
            SO_REUSEPORT if number(value)? == 0 => Ok(()),
            _ => Err(libc::ENOTSUP),
        }
    }

    fn set_tcp_option(&self, settings: &mut Settings, phase: Phase, name: c_int, value: &[u8]) -> Outcome<()> {
        match name {
            TCP_NODELAY => number(value).map(|on| settings.no_delay = on),
            TCP_KEEPIDLE => {
                let seconds = number(value)?;
                settings.keepalive_s = u32::try_from(seconds).ok().filter(|s| *s != 0).ok_or(libc::EINVAL)?;
                if settings.keepalive && phase == Phase::Connected {
                    keepalive::schedule(self.fd, settings.keepalive_s);
                }
                Ok(())
            }
            TCP_KEEPCNT => number(value).map(|count| settings.keepalive_count = count),
            TCP_KEEPINTVL => number(value).map(|seconds| settings.keepalive_interval_s = seconds),
            // The transport is reliable, sends at once, and has a segment size and congestion
            // control of its own.
            TCP_MAXSEG | TCP_CONGESTION => Ok(()),
            TCP_QUICKACK => number(value).map(|on| settings.quick_ack = c_int::from(on != 0)),
            TCP_CORK => number(value).map(|on| settings.cork = c_int::from(on != 0)),
            TCP_DEFER_ACCEPT => number(value).map(|seconds| settings.defer_accept_s = seconds.max(0)),
            // The device's own times count.
            TCP_USER_TIMEOUT if number(value)? == 0 => Ok(()),
            _ => Err(libc::ENOTSUP),
        }
    }

    fn set_other_option(
        &self,
        settings: &mut Settings,
        phase: Phase,
        option: (c_int, c_int),
        value: &[u8],
    ) -> Outcome<()> {
        match option {
            (IPPROTO_IP, IP_TOS) => {
                settings.type_of_service = number(value)?;
                self.id.set_option(RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &[settings.type_of_service as u8])
            }
            (IPPROTO_IPV6, IPV6_V6ONLY) => {
                settings.v6_only = number(value)?;
                let set = self.id.set_option(RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &value[..4]);
                if phase == Phase::Initial { set } else { Ok(()) }
            }
            (SOL_RDMA, RDMA_ROUTE) if (1..=ROUTE_BYTES_MAX).contains(&value.len()) => {
                settings.route = Some(value.to_vec());
                Ok(())
            }
            (SOL_RDMA, RDMA_ROUTE) => Err(libc::EINVAL),
            (SOL_RDMA, RDMA_RESOLVE_MS) => number(value).map(|ms| settings.resolve_ms = ms.clamp(0, RESOLVE_MS_MAX)),
            _ => Err(libc::ENOTSUP),
        }
    }

    /// # Errors
    /// ENOTSUP: no such option; EINVAL: no room.
    pub fn option(&self, level: c_int, name: c_int, room: usize) -> Outcome<Vec<u8>> {
        let setup = self.setup();
        let (settings, phase) = (&setup.settings, setup.phase);
        if let Some(value) = get_sizes(settings, level, name) {
            return Ok(value.to_ne_bytes().to_vec());
        }
        let value = match (level, name) {
            (SOL_SOCKET, SO_REUSEADDR) => settings.reuse_address,
            (SOL_SOCKET, SO_KEEPALIVE) => c_int::from(settings.keepalive),
            (SOL_SOCKET, SO_OOBINLINE) => settings.out_of_band_inline,
            (SOL_SOCKET, SO_ERROR) => {
                drop(setup);
                // A program that waited for the connection asks this first.
                self.drive(&mut self.setup());
                self.take_error()
            }
            (SOL_SOCKET, SO_PRIORITY) => settings.priority,
            (SOL_SOCKET, SO_BROADCAST) => settings.broadcast,
            (SOL_SOCKET, SO_REUSEPORT) => 0,
            (SOL_SOCKET, SO_RCVLOWAT) => 1,
            (SOL_SOCKET, SO_TYPE) => libc::SOCK_STREAM,
            (SOL_SOCKET, SO_DOMAIN) => self.family,
            (SOL_SOCKET, SO_PROTOCOL) => IPPROTO_TCP,
            (SOL_SOCKET, SO_ACCEPTCONN) => c_int::from(phase == Phase::Listening),
            (SOL_SOCKET, SO_LINGER) => {
                let linger = settings.linger_s;
                return Ok([u32::from(linger.is_some()), linger.unwrap_or(0)].map(u32::to_ne_bytes).concat());
            }
            (SOL_SOCKET, SO_RCVTIMEO) => return Ok(time_to_bytes(settings.receive_timeout)),
            (SOL_SOCKET, SO_SNDTIMEO) => return Ok(time_to_bytes(settings.send_timeout)),
            (IPPROTO_IP, IP_TOS) => settings.type_of_service,
            (IPPROTO_IPV6, IPV6_V6ONLY) => settings.v6_only,
            (IPPROTO_TCP, TCP_NODELAY) => settings.no_delay,
            (IPPROTO_TCP, TCP_KEEPIDLE) => settings.keepalive_s as c_int,
            (IPPROTO_TCP, TCP_KEEPCNT) => settings.keepalive_count,
            (IPPROTO_TCP, TCP_KEEPINTVL) => settings.keepalive_interval_s,
            (IPPROTO_TCP, TCP_QUICKACK) => settings.quick_ack,
            (IPPROTO_TCP, TCP_CORK) => settings.cork,
            (IPPROTO_TCP, TCP_DEFER_ACCEPT) => settings.defer_accept_s,
            (IPPROTO_TCP, TCP_USER_TIMEOUT) => 0,
            (IPPROTO_TCP, TCP_MAXSEG) => self.path().map_or(2048, |path| 1 << (7 + (path.mtu & 7))),
            (IPPROTO_TCP, TCP_CONGESTION) => return Ok(b"rdma\0".to_vec()),
            (IPPROTO_TCP, TCP_INFO) => return Ok(self.tcp_info(settings)),
            (SOL_RDMA, RDMA_ROUTE) => {
                let route = settings.route.clone().unwrap_or_else(|| self.path_bytes());
                return if room < route.len() { Err(libc::EINVAL) } else { Ok(route) };
            }
            _ => return Err(libc::ENOTSUP),
        };
        Ok(value.to_ne_bytes().to_vec())
    }

    fn tcp_info(&self, settings: &Settings) -> Vec<u8> {
        let open = self.connected_link().is_some_and(|link| matches!(link.lock().stream.state(), State::Open(_)));
        let mut info = vec![0; TCP_INFO_BYTES];
        info[0] = if open { TCP_STATE_ESTABLISHED } else { TCP_STATE_CLOSE };
        let window = std::mem::offset_of!(libc::tcp_info, tcpi_snd_cwnd);
        info[window..window + 4].copy_from_slice(&u32::from(settings.sizes.send_slots).to_ne_bytes());
        let mss = std::mem::offset_of!(libc::tcp_info, tcpi_snd_mss);
        info[mss..mss + 4]
            .copy_from_slice(&self.path().map_or(2048u32, |path| 1 << (7 + (path.mtu & 7))).to_ne_bytes());
        info
    }

    /// The first path record of the connection.
    fn path(&self) -> Option<freeflow_abi::ibv_sa_path_rec> {
        // SAFETY: the identifier exists; a record that is pointed to is there as long as the route.
        unsafe {
            let route = &raw const (*self.id.raw()).route;
            let record = (*route).path_rec;
            (!record.is_null() && (*route).num_paths > 0).then(|| *record)
        }
    }

    fn path_bytes(&self) -> Vec<u8> {
        const EXACTLY: u8 = 2 << 6;
        let Some(from) = self.path() else { return Vec::new() };
        let flow_and_hops = u32::from_be(from.flow_label) << 8 | u32::from(from.hop_limit);
        let path = ibv_path_record {
            dgid: from.dgid,
            sgid: from.sgid,
            dlid: from.dlid,
            slid: from.slid,
            flowlabel_hoplimit: flow_and_hops.to_be(),
            tclass: from.traffic_class,
            reversible_numpath: u8::from(from.reversible != 0) << 7 | 1,
            pkey: from.pkey,
            qosclass_sl: u16::from(from.sl).to_be(),
            mtu: from.mtu | EXACTLY,
            rate: from.rate | EXACTLY,
            packetlifetime: from.packet_life_time | EXACTLY,
            ..ibv_path_record::default()
        };
        let data = ibv_path_data { flags: u32::from(from.preference), reserved: 0, path };
        let mut bytes = vec![0; size_of::<ibv_path_data>()];
        // SAFETY: a struct of integers without padding, copied into as many bytes.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const data).cast::<u8>(), bytes.as_mut_ptr(), bytes.len());
        }
        bytes
    }
}

impl DatagramSocket {
    /// # Errors
    /// As of a stream; those of `setsockopt`.
    pub fn set_option(&self, level: c_int, name: c_int, value: &[u8]) -> Outcome<()> {
        if level != SOL_RDMA {
            // SAFETY: a value of that length.
            let set = unsafe {
                libc::setsockopt(self.fd(), level, name, value.as_ptr().cast(), value.len() as libc::socklen_t)
            };
            checked(set)?;
        }
        self.with_settings(|settings| match set_sizes(settings, level, name, value) {
            Some(outcome) => outcome,
            None if level == SOL_RDMA => Err(libc::ENOTSUP),
            None if level == SOL_SOCKET && name == SO_RCVTIMEO => {
                time(value).map(|time| settings.receive_timeout = time)
            }
            None if level == SOL_SOCKET && name == SO_SNDTIMEO => time(value).map(|time| settings.send_timeout = time),
            None => Ok(()),
        })
    }

    /// # Errors
    /// ENOTSUP; those of `getsockopt`.
    pub fn option(&self, level: c_int, name: c_int, room: usize) -> Outcome<Vec<u8>> {
        if let Some(value) = self.with_settings(|settings| get_sizes(settings, level, name)) {
            return Ok(value.to_ne_bytes().to_vec());
        }
        if level == SOL_RDMA {
            return Err(libc::ENOTSUP);
        }
        let mut value = vec![0; room.min(TCP_INFO_BYTES)];
        let mut length = value.len() as libc::socklen_t;
        // SAFETY: room of that length.
        checked(unsafe { libc::getsockopt(self.fd(), level, name, value.as_mut_ptr().cast(), &raw mut length) })?;
        value.truncate(length as usize);
        Ok(value)
    }
}
