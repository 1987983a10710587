//! The eleven messages (IBTA 1.4 tables 106 to 120; annex A14 for XRC; the vendor's fields of
//! extended connection establishment where Linux has them).
use super::fields::{Body, Field, message};

message! {
    /// Request for communication, active → passive.
    Req {
        local_comm_id: u32 = (0, 0, 32),
        /// Of extended connection establishment: 24 bits. The options are the attribute modifier.
        vendor_id: u32 = (5, 0, 24),
        service_id: u64 = (8, 0, 64),
        local_ca_guid: u64 = (16, 0, 64),
        local_qkey: u32 = (28, 0, 32),
        local_qpn: u32 = (32, 0, 24),
        responder_resources: u8 = (35, 0, 8),
        local_eecn: u32 = (36, 0, 24),
        initiator_depth: u8 = (39, 0, 8),
        remote_eecn: u32 = (40, 0, 24),
        /// 4.096 us * 2^n, as all time-outs here.
        remote_response_timeout: u8 = (43, 0, 5),
        /// See [`Req::transport`].
        transport_service: u8 = (43, 5, 2),
        flow_control: bool = (43, 7, 1),
        starting_psn: u32 = (44, 0, 24),
        local_response_timeout: u8 = (47, 0, 5),
        retry_count: u8 = (47, 5, 3),
        pkey: u16 = (48, 0, 16),
        /// `enum ibv_mtu`.
        path_mtu: u8 = (50, 0, 4),
        rdc_exists: bool = (50, 4, 1),
        rnr_retry_count: u8 = (50, 5, 3),
        cm_retries_max: u8 = (51, 0, 4),
        srq: bool = (51, 4, 1),
        extended_transport: u8 = (51, 5, 3),
        primary_local_lid: u16 = (52, 0, 16),
        primary_remote_lid: u16 = (54, 0, 16),
        primary_local_gid: [u8; 16] = (56, 0, 128),
        primary_remote_gid: [u8; 16] = (72, 0, 128),
        primary_flow_label: u32 = (88, 0, 20),
        primary_packet_rate: u8 = (91, 2, 6),
        primary_traffic_class: u8 = (92, 0, 8),
        primary_hop_limit: u8 = (93, 0, 8),
        primary_service_level: u8 = (94, 0, 4),
        primary_subnet_local: bool = (94, 4, 1),
        primary_ack_timeout: u8 = (95, 0, 5),
        alternate_local_lid: u16 = (96, 0, 16),
        alternate_remote_lid: u16 = (98, 0, 16),
        alternate_local_gid: [u8; 16] = (100, 0, 128),
        alternate_remote_gid: [u8; 16] = (116, 0, 128),
        alternate_flow_label: u32 = (132, 0, 20),
        alternate_packet_rate: u8 = (135, 2, 6),
        alternate_traffic_class: u8 = (136, 0, 8),
        alternate_hop_limit: u8 = (137, 0, 8),
        alternate_service_level: u8 = (138, 0, 4),
        alternate_subnet_local: bool = (138, 4, 1),
        alternate_ack_timeout: u8 = (139, 0, 5),
        sap_supported: bool = (139, 5, 1),
        private_data: [u8; 92] = (140, 0, 736),
    }
}

message! {
    /// "The message has come, the answer takes a while."
    Mra {
        local_comm_id: u32 = (0, 0, 32),
        remote_comm_id: u32 = (4, 0, 32),
        /// Which message: see [`super::About`].
        about: u8 = (8, 0, 2),
        service_timeout: u8 = (9, 0, 5),
        private_data: [u8; 222] = (10, 0, 1776),
    }
}

message! {
    /// No, or no more.
    Rej {
        local_comm_id: u32 = (0, 0, 32),
        remote_comm_id: u32 = (4, 0, 32),
        about: u8 = (8, 0, 2),
        /// Bytes of `information` that count.
        information_length: u8 = (9, 0, 7),
        /// See [`super::reason`].
        reason: u16 = (10, 0, 16),
        information: [u8; 72] = (12, 0, 576),
        private_data: [u8; 148] = (84, 0, 1184),
    }
}

message! {
    /// Reply to a request, passive → active.
    Rep {
        local_comm_id: u32 = (0, 0, 32),
        remote_comm_id: u32 = (4, 0, 32),
        local_qkey: u32 = (8, 0, 32),
        local_qpn: u32 = (12, 0, 24),
        vendor_id_high: u8 = (15, 0, 8),
        /// Of an XRC target: its QPN.
        local_eecn: u32 = (16, 0, 24),
        vendor_id_middle: u8 = (19, 0, 8),
        starting_psn: u32 = (20, 0, 24),
        vendor_id_low: u8 = (23, 0, 8),
        responder_resources: u8 = (24, 0, 8),
        initiator_depth: u8 = (25, 0, 8),
        target_ack_delay: u8 = (26, 0, 5),
        failover_accepted: u8 = (26, 5, 2),
        flow_control: bool = (26, 7, 1),
        rnr_retry_count: u8 = (27, 0, 3),
        srq: bool = (27, 3, 1),
        local_ca_guid: u64 = (28, 0, 64),
        private_data: [u8; 196] = (36, 0, 1568),
    }
}

message! {
    /// Ready to use, active → passive.
    Rtu {
        local_comm_id: u32 = (0, 0, 32),
        remote_comm_id: u32 = (4, 0, 32),
        private_data: [u8; 224] = (8, 0, 1792),
    }
}

message! {
    /// Request for disconnection.
    Dreq {
        local_comm_id: u32 = (0, 0, 32),
        remote_comm_id: u32 = (4, 0, 32),
        remote_qpn: u32 = (8, 0, 24),
        private_data: [u8; 220] = (12, 0, 1760),
    }
}

message! {
    /// Reply to a disconnection.
    Drep {
        local_comm_id: u32 = (0, 0, 32),
        remote_comm_id: u32 = (4, 0, 32),
        private_data: [u8; 224] = (8, 0, 1792),
    }
}

message! {
    /// Load alternate path.
    Lap {
        local_comm_id: u32 = (0, 0, 32),
        remote_comm_id: u32 = (4, 0, 32),
        remote_qpn: u32 = (12, 0, 24),
        remote_response_timeout: u8 = (15, 0, 5),
        alternate_local_lid: u16 = (20, 0, 16),
        alternate_remote_lid: u16 = (22, 0, 16),
        alternate_local_gid: [u8; 16] = (24, 0, 128),
        alternate_remote_gid: [u8; 16] = (40, 0, 128),
        alternate_flow_label: u32 = (56, 0, 20),
        alternate_traffic_class: u8 = (59, 0, 8),
        alternate_hop_limit: u8 = (60, 0, 8),
        alternate_packet_rate: u8 = (61, 2, 6),
        alternate_service_level: u8 = (62, 0, 4),
        alternate_subnet_local: bool = (62, 4, 1),
        alternate_ack_timeout: u8 = (63, 0, 5),
        private_data: [u8; 168] = (64, 0, 1344),
    }
}

message! {
    /// Alternate path response.
    Apr {
        local_comm_id: u32 = (0, 0, 32),
        remote_comm_id: u32 = (4, 0, 32),
        information_length: u8 = (8, 0, 8),
        status: u8 = (9, 0, 8),
        information: [u8; 72] = (12, 0, 576),
        private_data: [u8; 148] = (84, 0, 1184),
    }
}

message! {
    /// Which QP serves this service id, by datagrams?
    SidrReq {
        request_id: u32 = (0, 0, 32),
        pkey: u16 = (4, 0, 16),
        service_id: u64 = (8, 0, 64),
        private_data: [u8; 216] = (16, 0, 1728),
    }
}

message! {
    /// The answer to [`SidrReq`].
    SidrRep {
        request_id: u32 = (0, 0, 32),
        /// See [`super::sidr_status`].
        status: u8 = (4, 0, 8),
        information_length: u8 = (5, 0, 8),
        /// Of extended connection establishment: 16 bits of it are here.
        vendor_id_high: u16 = (6, 0, 16),
        qpn: u32 = (8, 0, 24),
        vendor_id_low: u8 = (11, 0, 8),
        service_id: u64 = (12, 0, 64),
        qkey: u32 = (20, 0, 32),
        information: [u8; 72] = (24, 0, 576),
        private_data: [u8; 136] = (96, 0, 1088),
    }
}

/// Transport service of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Reliable datagram; FreeFlow has none.
    Rd,
    /// The REQ comes from an XRC initiator.
    Xrc,
}

impl Req {
    /// `None`: a reserved combination.
    pub fn transport(&self) -> Option<Transport> {
        match (self.transport_service, self.extended_transport) {
            (0, _) => Some(Transport::Rc),
            (1, _) => Some(Transport::Uc),
            (2, _) => Some(Transport::Rd),
            (3, 1) => Some(Transport::Xrc),
            _ => None,
        }
    }

    /// Sets both fields of the transport service.
    pub fn set_transport(&mut self, transport: Transport) {
        (self.transport_service, self.extended_transport) = match transport {
            Transport::Rc => (0, 0),
            Transport::Uc => (1, 0),
            Transport::Rd => (2, 0),
            Transport::Xrc => (3, 1),
        };
    }
}

impl Rep {
    /// Of extended connection establishment: 24 bits, in three places.
    pub fn vendor_id(&self) -> u32 {
        u32::from_be_bytes([0, self.vendor_id_high, self.vendor_id_middle, self.vendor_id_low])
    }

    /// Sets all three parts; the upper 8 bits are ignored.
    pub fn set_vendor_id(&mut self, vendor_id: u32) {
        [_, self.vendor_id_high, self.vendor_id_middle, self.vendor_id_low] = vendor_id.to_be_bytes();
    }
}

impl SidrRep {
    /// Of extended connection establishment: 24 bits, in two places.
    pub fn vendor_id(&self) -> u32 {
        u32::from(self.vendor_id_high) << 8 | u32::from(self.vendor_id_low)
    }

    /// Sets both parts; the upper 8 bits are ignored.
    pub fn set_vendor_id(&mut self, vendor_id: u32) {
        self.vendor_id_high = (vendor_id >> 8) as u16;
        self.vendor_id_low = vendor_id as u8;
    }
}
