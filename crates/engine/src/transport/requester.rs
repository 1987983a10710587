//! Packets that the requester of a connected QP has sent; `requester::packets` and
//! `requester::timeouts` decide which are sent, and when.
use crate::fault::Fault;
use crate::transport::congestion::Congestion;
use crate::transport::repair::Repair;
use crate::transport::window::{Burst, PACKET_OVERHEAD_BYTES, SendWindow};
use crate::{PacketHead, Syndrome};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use freeflow_verbs::{CompletionStatus, Instant};
use serde::{Deserialize, Serialize};

/// Round trips that are measured at the same time.
pub(crate) const SAMPLES_MAX: usize = 8;

/// A long message asks for an acknowledgement so many times in a window, as far as that is the one of a short way: what
/// an acknowledgement lets go leaves in one burst.
pub(crate) const ACKS_PER_WINDOW: u64 = 4;

#[derive(Serialize, Deserialize)]
pub(crate) struct WireRequester {
    pub congestion: Congestion,
    pub(crate) window: SendWindow,
    pub(crate) clock: Clock,
    /// A turn ended for want of an answer or of memory: what ends the want names the QP in
    /// `poll_ready`.
    pub(crate) held: bool,
    /// The gate was found closed since the last packet went out.
    pub(crate) gated: bool,
    /// An RNR NAK came: nothing goes out until its timer expires.
    pub(crate) not_ready: bool,
    /// The payload of these packets is being fetched.
    pub(crate) fetching: Option<Burst>,
    /// The payload of so many answers, the oldest PSNs', is being written.
    pub(crate) writing: u32,
    /// The packets that would go out next, from this PSN on, can't: their memory is not there, or
    /// its key is not good any more.
    pub(crate) stuck: Option<(u32, Stuck)>,
    /// The request in hand made no sense.
    pub malformed: bool,
    /// Payload sent since the last packet that asked for an acknowledgement.
    pub unasked_bytes: u32,
    /// Packets that asked for an acknowledgement, were sent once, and when.
    pub(crate) samples: VecDeque<(u32, Instant)>,
    /// The last time that it went back for a loss, and the PSN that it went back to.
    pub(crate) went_back: Option<(u32, Instant)>,
    /// Packets that are missing at the peer while later ones are there.
    pub(crate) repair: Repair,
    /// Messages before this PSN go out by themselves: together with others they could not.
    pub(crate) alone_until: Option<u32>,
    /// Room for the headers of a burst.
    #[serde(skip)]
    pub heads: Vec<PacketHead>,
    /// Room for the inline data of messages that go out together.
    #[serde(skip)]
    pub inline: Vec<u8>,
}

/// The deadline that its timer stands for; see `retransmit`.
#[derive(Serialize, Deserialize)]
pub(crate) struct Clock {
    /// Begin of the local ACK timeout that runs: the last progress, or the last timeout.
    pub silent_since: Instant,
    /// The same for probes, and how many there were since the last progress.
    pub probe_since: Instant,
    pub probe_count: u32,
    /// The PSN of the last probe, if nothing was acknowledged since.
    pub probed: Option<u32>,
    /// The same for what is in flight to lapse; see `hosts`.
    pub lapse_since: Instant,
}

/// Why the payload of packets can't be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Stuck {
    Key,
    Memory,
}

impl Stuck {
    pub fn fault(self) -> Fault {
        let syndrome = match self {
            Self::Key => Syndrome::LocalKey,
            Self::Memory => Syndrome::LocalMemoryGone,
        };
        Fault::new(CompletionStatus::LocalProtectionError, syndrome)
    }
}

impl WireRequester {
    /// `mtu`: see [`super::wire::path_mtu`] and [`super::wire::frame_bytes`].
    pub fn new(sq_psn: u32, mtu: u32) -> Self {
        Self {
            congestion: Congestion::new(u64::from(mtu) + PACKET_OVERHEAD_BYTES),
            window: SendWindow::new(sq_psn, mtu),
            clock: Clock::new(Instant(0)),
            held: false,
            gated: false,
            not_ready: false,
            fetching: None,
            writing: 0,
            stuck: None,
            malformed: false,
            unasked_bytes: 0,
            samples: VecDeque::new(),
            went_back: None,
            inline: Vec::new(),
            repair: Repair::new(),
            alone_until: None,
            heads: Vec::new(),
        }
    }

    /// To RTS: requests begin with this PSN.
    pub fn begin(&mut self, sq_psn: u32) {
        // From SQD the number does not change, and messages may be there (IBTA 10.3.1.5).
        if self.window.is_empty() {
            *self = Self::new(sq_psn, self.window.mtu());
        }
    }

    pub fn in_flight_bytes(&self) -> u64 {
        self.window.in_flight_bytes()
    }

    /// Bytes that may be in flight. Packets that the peer keeps behind a missing one have left the network.
    pub(crate) fn window_bytes(&self) -> u64 {
        self.congestion.window_bytes() + self.repair.kept_bytes().min(self.in_flight_bytes())
    }

    /// No request is under way (for SQD).
    pub fn is_idle(&self) -> bool {
        self.window.is_empty()
    }
}
