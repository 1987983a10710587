//! Settings of a socket, as the program sets and reads them.
use crate::config::Config;
use crate::stream::Sizes;
use std::time::Duration;

const RESOLVE_TIMEOUT_MS: i32 = 2000;

/// Options that are kept and given back; those that act are looked at where they do.
#[derive(Clone, Debug)]
pub struct Settings {
    pub sizes: Sizes,
    pub reuse_address: i32,
    pub keepalive: bool,
    pub keepalive_s: u32,
    pub keepalive_interval_s: i32,
    pub keepalive_count: i32,
    pub out_of_band_inline: i32,
    /// Seconds that closing waits; with 0 it does not say goodbye.
    pub linger_s: Option<u32>,
    pub no_delay: i32,
    pub v6_only: i32,
    pub type_of_service: i32,
    /// These mean nothing here, and are read back.
    pub priority: i32,
    pub broadcast: i32,
    pub quick_ack: i32,
    pub cork: i32,
    pub defer_accept_s: i32,
    pub receive_timeout: Option<Duration>,
    pub send_timeout: Option<Duration>,
    /// How long one look for the destination's address may take.
    pub resolve_ms: i32,
    /// `RDMA_ROUTE`: path records for the connection.
    pub route: Option<Vec<u8>>,
}

impl Settings {
    #[must_use]
    pub fn new(config: &Config) -> Self {
        Self {
            sizes: Sizes {
                send_bytes: config.send_bytes,
                receive_bytes: config.receive_bytes,
                send_slots: config.send_slots,
                receive_slots: config.receive_slots,
                inline_bytes: config.inline_bytes,
                iomap_count: config.iomap_count,
            },
            reuse_address: 0,
            keepalive: false,
            keepalive_s: 7200,
            keepalive_interval_s: 75,
            keepalive_count: 9,
            out_of_band_inline: 0,
            linger_s: None,
            no_delay: 0,
            v6_only: 0,
            type_of_service: 0,
            priority: 0,
            broadcast: 0,
            quick_ack: 0,
            cork: 0,
            defer_accept_s: 0,
            receive_timeout: None,
            send_timeout: None,
            resolve_ms: RESOLVE_TIMEOUT_MS,
            route: None,
        }
    }

    /// Settings that a connection has of the socket that accepted it.
    #[must_use]
    pub fn inherited(&self) -> Self {
        Self { route: None, ..self.clone() }
    }
}
