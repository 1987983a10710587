//! Requests about what QPs do past the router: direct rings, grants of memory, and the end of grants.
use crate::admission::account::Charge;
use crate::base::slab::Key;
use crate::control::session::Answer;
use crate::control::session::Outcome;
use crate::control::thread::Control;
use crate::dataplane::command::{
    AcceptDatagramRing, AcceptDirectRing, ConfirmRevocation, DirectRingTerms, Grant, OpenDatagramRing, OpenDirectRing,
    OpenRevokeCommands,
};
use crate::dataplane::datagram_rings::{DatagramRing, IncomingTerms, OfferedMemory};
use crate::dataplane::direct::ring_bytes;
use crate::dataplane::event_pipes::PIPE_BYTES;
use crate::memory::grants::{Given, GrantRequest, Verdict};
use freeflow_engine::SessionId;
use freeflow_protocol::library::{Handle, Reply};
use freeflow_shm::foreign_memory;
use freeflow_verbs::VerbsError;
use std::os::fd::{AsFd, OwnedFd};

/// The library's description of a direct ring.
fn describe(terms: DirectRingTerms) -> Reply {
    let DirectRingTerms { credit_count, direct_rings_closed, takes_writes, msn } = terms;
    let segment_bytes = ring_bytes() as u64;
    match msn {
        None => Reply::Direct { segment_bytes, credit_count, direct_rings_closed, takes_writes },
        Some(msn) => Reply::NumberedDirect { segment_bytes, credit_count, direct_rings_closed, takes_writes, msn },
    }
}

impl Control {
    pub(crate) fn open_direct_ring(&mut self, at: (Key, SessionId), qp: Handle, is_numbered: bool) -> Outcome {
        let qp = self.objects(at.0)?.qps.get(qp)?.id;
        let vnic = self.vnic_of(at.0).ok_or(VerbsError::DeviceFatal)?;
        let charge = Charge::foreign(&vnic.account, &vnic.record.limits)?;
        let descriptor = foreign_memory("freeflow-direct-ring", ring_bytes()).map_err(|_| VerbsError::NoMemory)?;
        let copy = descriptor.try_clone().map_err(|_| VerbsError::NoMemory)?;
        self.submit(at, OpenDirectRing { qp, is_numbered, copy, charge }, move |_, terms| {
            Answer::with(describe(terms), vec![descriptor])
        })
    }

    pub(crate) fn accept_direct_ring(&mut self, at: (Key, SessionId), qp: Handle) -> Outcome {
        let qp = self.objects(at.0)?.qps.get(qp)?.id;
        self.submit(at, AcceptDirectRing { qp }, |_, (terms, descriptor)| {
            Answer::with(describe(terms), vec![descriptor])
        })
    }

    pub(crate) fn open_datagram_ring(
        &mut self,
        at: (Key, SessionId),
        qp: Handle,
        (ah, remote_qpn, qkey, place): (Handle, u32, u32, u32),
    ) -> Outcome {
        let objects = self.objects(at.0)?;
        let (qp, address_handle) = (objects.qps.get(qp)?.id, objects.ahs.get(&ah).ok_or(VerbsError::NotFound)?.index);
        let vnic = self.vnic_of(at.0).ok_or(VerbsError::DeviceFatal)?;
        let charge = Charge::datagram_ring(&vnic.account, &vnic.record.limits)?;
        let of_descriptor = Charge::descriptor(&vnic.account)?;
        let descriptor = foreign_memory("freeflow-direct-ring", ring_bytes()).map_err(|_| VerbsError::NoMemory)?;
        let copy = descriptor.try_clone().map_err(|_| VerbsError::NoMemory)?;
        let offered = OfferedMemory { descriptor: copy, _charge: of_descriptor };
        let ring = DatagramRing { address_handle, remote_qpn, qkey, place };
        self.submit(at, OpenDatagramRing { qp, ring, offered, charge }, move |_, ()| {
            Answer::with(Reply::DatagramRing { segment_bytes: ring_bytes() as u64 }, vec![descriptor])
        })
    }

    pub(crate) fn accept_datagram_ring(&mut self, at: (Key, SessionId), qp: Handle) -> Outcome {
        let qp = self.objects(at.0)?.qps.get(qp)?.id;
        self.submit(at, AcceptDatagramRing { qp }, |_, (terms, descriptor)| {
            let IncomingTerms { place, offer, source_qpn, source, route, first } = terms;
            let segment_bytes = ring_bytes() as u64;
            let reply = Reply::IncomingDatagramRing { segment_bytes, place, offer, source_qpn, source, route, first };
            Answer::with(reply, vec![descriptor])
        })
    }

    pub(crate) fn ask_grant(&mut self, at: (Key, SessionId), qp: Handle, request: GrantRequest) -> Outcome {
        let qp = self.objects(at.0)?.qps.get(qp)?.id;
        self.submit(at, Grant { qp, request }, |_, verdict| verdict.answer())
    }

    pub(crate) fn open_commands(&mut self, at: (Key, SessionId)) -> Outcome {
        let session = at.1;
        if self.objects(at.0)?.commands.is_some() {
            return Err(VerbsError::Exists);
        }
        let vnic = self.vnic_of(at.0).ok_or(VerbsError::DeviceFatal)?;
        let charge = Charge::descriptor(&vnic.account)?;
        let (read, write) = vnic.attachment.event_channel(PIPE_BYTES).map_err(|_| VerbsError::NoMemory)?;
        self.submit(at, OpenRevokeCommands { session, write }, move |connection, ()| {
            connection.objects.commands = Some(charge);
            let mut answer = Answer::done();
            answer.descriptors.push(read);
            answer
        })
    }

    pub(crate) fn confirm_revocation(&mut self, at: (Key, SessionId), segment: Handle) -> Outcome {
        self.objects(at.0)?.segments.get(segment)?;
        self.submit(at, ConfirmRevocation { session: at.1, segment }, |_, ()| Answer::done())
    }
}

impl Verdict {
    fn answer(self) -> Answer {
        match self {
            Self::Given(given) => given.answer(),
            Self::NotEnoughCredit { missing } => Answer::of(Reply::NotEnoughCredit { missing }),
        }
    }
}

impl Given {
    fn descriptor(&self) -> Result<OwnedFd, VerbsError> {
        let kept = self.lease.descriptor().ok_or(VerbsError::NotSupported)?;
        self.protection.seal(kept.as_fd()).map_err(|_| VerbsError::NotSupported)?;
        kept.try_clone().map_err(|_| VerbsError::NoMemory)
    }

    fn answer(self) -> Answer {
        match self.descriptor() {
            Ok(descriptor) => Answer::with(self.reply, vec![descriptor]),
            // It is noted as granted all the same, and revoked in its time.
            Err(error) => error.into(),
        }
    }
}
