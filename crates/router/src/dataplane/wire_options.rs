//! How the sockets are opened; for tests and benchmarks, since the defaults are right.
use crate::dataplane::wire_status::faults_of;
use freeflow_backend::{KEY_PACKETS, KEY_TIME_NS, Udp, UdpConfig};
use freeflow_protocol::ROUTER_MARK;
use freeflow_protocol::admin::WireFaults;
use freeflow_wire::UDP_PORT;
use serde::Deserialize;
use std::io;
use std::net::IpAddr;

/// `--wire-options`, a JSON object with some of these.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WireOptions {
    /// The kernel cuts batches into packets.
    pub gso: bool,
    /// The kernel puts packets together.
    pub gro: bool,
    /// Sending sockets, each with a source port of its own: 1 to 256.
    pub source_ports: u16,
    /// One QP's stream to a FreeFlow host takes one of these after the other.
    pub spread: bool,
    /// In place of the peers file's, 0 to 63.
    pub dscp: Option<u8>,
    pub send_buffer_bytes: u32,
    pub receive_buffer_bytes: u32,
    /// Packets, and milliseconds, after which the key of a sealed host is replaced.
    pub key_packets: u64,
    pub key_ms: u64,
    /// From the start on.
    pub faults: Option<WireFaults>,
}

impl Default for WireOptions {
    fn default() -> Self {
        let defaults = UdpConfig::new(Vec::new());
        Self {
            gso: defaults.gso,
            gro: defaults.gro,
            source_ports: defaults.source_port_count,
            spread: defaults.spread,
            dscp: None,
            send_buffer_bytes: defaults.send_buffer_bytes,
            receive_buffer_bytes: defaults.receive_buffer_bytes,
            key_packets: defaults.key_packets,
            key_ms: defaults.key_time_ns / 1_000_000,
            faults: None,
        }
    }
}

impl WireOptions {
    /// As they stand on a command line.
    ///
    /// # Errors
    /// No JSON object, or a field that there is not.
    pub fn parse(text: &str) -> Result<Self, String> {
        // A list would pass for the fields in their order.
        let fields: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(text).map_err(|error| error.to_string())?;
        serde_json::from_value(fields.into()).map_err(|error| error.to_string())
    }

    /// Opens the sockets on this host's address.
    ///
    /// # Errors
    /// Say what is the matter, and what to do.
    pub(crate) fn open(&self, address: IpAddr, dscp: u8, shard_count: u8) -> io::Result<Vec<Udp>> {
        let config = UdpConfig {
            source_port_count: self.source_ports,
            spread: self.spread,
            gso: self.gso,
            gro: self.gro,
            dscp: self.dscp.unwrap_or(dscp),
            send_buffer_bytes: self.send_buffer_bytes,
            receive_buffer_bytes: self.receive_buffer_bytes,
            mark: ROUTER_MARK,
            key_packets: self.key_packets.clamp(1, KEY_PACKETS),
            key_time_ns: self.key_ms.clamp(1, KEY_TIME_NS / 1_000_000) * 1_000_000,
            // Also where the peers file has them off: it may be read again.
            frames: true,
            ..UdpConfig::new(vec![address])
        };
        let mut sockets = Udp::open_all(config, shard_count).map_err(|error| explain(address, &error))?;
        for udp in &mut sockets {
            udp.set_faults(self.faults.as_ref().map(faults_of));
        }
        Ok(sockets)
    }
}

fn explain(address: IpAddr, error: &io::Error) -> io::Error {
    let why = match error.kind() {
        io::ErrorKind::AddrInUse => {
            "another program has it: another router on this address, or a RoCEv2 driver (rdma_rxe: rdma link show)"
        }
        io::ErrorKind::PermissionDenied => "its sockets need a mark, and that CAP_NET_ADMIN",
        io::ErrorKind::AddrNotAvailable => "this host does not have that address; see the peers file's \"address\"",
        _ => "can't open it",
    };
    io::Error::new(error.kind(), format!("UDP port {UDP_PORT} of {address}: {why} ({error})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_some_fields_of_an_object() {
        let options = WireOptions::parse(r#"{"gso": false, "faults": {"loss_ppm": 1000}}"#).unwrap();
        assert!(!options.gso && options.gro && options.faults.unwrap().loss_ppm == 1000);
        assert!(WireOptions::parse(r#"{"gos": false}"#).is_err());
        assert!(WireOptions::parse("[]").is_err());
    }

    #[test]
    fn a_port_that_is_taken_is_named() {
        let address = "127.0.0.77".parse().unwrap();
        let _first = WireOptions::default().open(address, 0, 1).unwrap();
        let error = WireOptions::default().open(address, 0, 1).map(drop).unwrap_err();
        assert!(error.kind() == io::ErrorKind::AddrInUse && error.to_string().contains("127.0.0.77"), "{error}");
    }
}
