//! Frames of records of other hosts: each message of them is acted upon as a frame of its own would be.
use crate::qp::Teardown;
use crate::transport::kept::bytes_of;
use crate::transport::packets::Packet;
use crate::transport::wire::PKEY_MASK;
use crate::{Engine, Environment, HostId, IpInfo, QpId};
use freeflow_verbs::Instant;
use freeflow_wire::records::Records;

impl Engine {
    /// As [`handle_datagram`](Self::handle_datagram), of a frame of records.
    pub(crate) fn handle_records<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        from: HostId,
        ip: &IpInfo,
        bytes: &[u8],
    ) {
        let Ok(records) = Records::parse(bytes) else { return self.requester.responder.drops.malformed += 1 };
        if records.pkey & PKEY_MASK != PKEY_MASK {
            return self.requester.responder.drops.wrong_pkey += 1;
        }
        let Some((id, _)) =
            self.requester.responder.qpns.get(records.dest_qpn).and_then(|index| self.completer().qps.at(index))
        else {
            return self.requester.responder.drops.unknown_qpn += 1;
        };
        // They are all requests of the same service.
        let Some((first, _)) = records.clone().next() else { return };
        if !self.may_act(env, id, from, &records.header(records.psn, &first)) {
            return;
        }
        if self.wire(id).writing {
            return self.park(id, bytes, ip);
        }
        self.act_on_records(env, now, id, records, ip);
    }

    /// Acts upon the messages one after the other. What comes behind one that is being written elsewhere waits; where
    /// one takes the QP down, the others are lost.
    pub(crate) fn act_on_records<E: Environment>(
        &mut self,
        env: &mut E,
        now: Instant,
        id: QpId,
        mut records: Records<'_>,
        ip: &IpInfo,
    ) {
        if ip.congestion {
            self.requester.responder.owe_echo(id);
        }
        loop {
            let qp = self.completer().qps.get(id).filter(|qp| qp.receives() && qp.teardown == Teardown::None);
            let Some(wire) = qp.and_then(|qp| qp.wire.as_deref()) else {
                self.requester.responder.drops.wrong_state += u64::from(!records.is_empty());
                return;
            };
            if wire.writing {
                return self.park_records(id, records, ip);
            }
            if self.requester.responder.take_writes(env, now, id, &mut records, ip) {
                continue;
            }
            let (psn, Some((record, payload))) = (records.psn, records.next()) else { return };
            let header = records.header(psn, &record);
            self.act(env, now, id, &Packet { header: &header, payload, ip: *ip });
        }
    }

    /// The messages wait before all that waits already, each as a frame of its own.
    fn park_records(&mut self, id: QpId, mut records: Records<'_>, ip: &IpInfo) {
        // It was noted.
        let ip = &IpInfo { congestion: false, ..*ip };
        let mut place = 0;
        while let (psn, Some((record, payload))) = (records.psn, records.next()) {
            let header = records.header(psn, &record);
            if !self.park_at(id, place, bytes_of(&Packet { header: &header, payload, ip: *ip }), ip) {
                return;
            }
            place += 1;
        }
    }
}
