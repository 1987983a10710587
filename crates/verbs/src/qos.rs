//! Quality of service: what the engine's scheduler holds a vNIC's requests to.
use serde::{Deserialize, Serialize};

/// Highest priority; 0 is the lowest. Strict: nothing of a lower one goes while a higher one has something that may go.
pub const PRIORITY_MAX: u8 = 7;
/// Of a vNIC that nobody has said anything about.
pub const PRIORITY_DEFAULT: u8 = 3;
/// Weights of vNICs of one priority: 1 to this. A vNIC with weight 4 gets four times the bytes of one with weight 1.
pub const WEIGHT_MAX: u16 = 1000;
/// Weight of a vNIC that declares none.
pub const WEIGHT_DEFAULT: u16 = 100;

/// Two token buckets: payload and messages. A message may begin while its bucket is not empty, and is charged whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RateLimit {
    /// Payload, bits/s; none: unlimited.
    pub bits_per_s: Option<u64>,
    /// Depth of the payload's bucket, bytes; none: 2 ms at the rate, 64 KiB at least.
    pub burst_bytes: Option<u64>,
    /// Messages a second.
    pub messages_per_s: Option<u64>,
    /// Depth of the messages' bucket; none: 2 ms at the rate, 16 at least.
    pub burst_messages: Option<u64>,
}

impl RateLimit {
    /// Whether nothing is limited.
    pub fn is_none(&self) -> bool {
        self.bits_per_s.is_none() && self.messages_per_s.is_none()
    }
}

/// A tenant as the engine's scheduler knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TenantId(pub u32);

/// Limits, weight and priority of a vNIC's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shaping {
    /// Of each of its QPs by itself.
    pub qp: RateLimit,
    /// Of all its QPs together.
    pub vnic: RateLimit,
    /// The vNIC's owner. A tenant's limit is that of all its vNICs together, set for the tenant.
    pub tenant: Option<TenantId>,
    /// 0 to [`PRIORITY_MAX`].
    pub priority: u8,
    /// 1 to [`WEIGHT_MAX`].
    pub weight: u16,
}

impl Default for Shaping {
    fn default() -> Self {
        Self {
            qp: RateLimit::default(),
            vnic: RateLimit::default(),
            tenant: None,
            priority: PRIORITY_DEFAULT,
            weight: WEIGHT_DEFAULT,
        }
    }
}
