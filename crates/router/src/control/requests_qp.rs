//! Requests about queue pairs, and about what only some of them know: XRC domains, multicast groups.
use crate::base::slab::Key;
use crate::control::session::Outcome;
use crate::control::session::{Answer, Objects, QpEntry, XrcdEntry};
use crate::control::thread::Control;
use crate::dataplane::command::{
    AttachMulticast, CloseXrcd, CreateQp, CreateXrcTarget, DestroyQp, DetachMulticast, ModifyQp, OpenXrcTarget,
    OpenXrcd, QueryQp,
};
use crate::dataplane::direct::Direct;
use crate::dataplane::ports::{Attention, Qp};
use crate::dataplane::slow_path_counts::QpSlowPath;
use crate::memory::grants::GrantRequest;
use freeflow_engine::{ContextId, QpId, QpInit, SessionId, grant_qp_capabilities};
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::RequestConsumer;
use freeflow_shm::layout::QueueShape;
use freeflow_verbs::{
    FileIdentity, Gid, QpAttributeMask, QpAttributes, QpCapabilities, QpType, Qpn, VerbsError, XrcdOpenFlags,
};

/// The parameters of `CreateQp`.
struct QpRequest {
    qp_type: QpType,
    pd: Option<Handle>,
    send_cq: Option<Handle>,
    recv_cq: Option<Handle>,
    srq: Option<Handle>,
    xrcd: Option<Handle>,
    capabilities: QpCapabilities,
    all_signaled: bool,
    block_own_multicast: bool,
    cookie: u32,
    connection: Option<Handle>,
}

impl Control {
    pub(crate) fn handle_qp_request(&mut self, at: (Key, SessionId), request: Request) -> Outcome {
        match request {
            Request::OpenXrcd { context, file, flags } => self.open_xrcd(at, context, file, flags),
            Request::CloseXrcd { xrcd } => self.close_xrcd(at, xrcd),
            Request::CreateQp {
                qp_type,
                pd,
                send_cq,
                recv_cq,
                srq,
                xrcd,
                capabilities,
                all_signaled,
                block_own_multicast,
                cookie,
                connection,
            } => {
                let asked = QpRequest {
                    qp_type,
                    pd,
                    send_cq,
                    recv_cq,
                    srq,
                    xrcd,
                    capabilities,
                    all_signaled,
                    block_own_multicast,
                    cookie,
                    connection,
                };
                self.create_qp(at, &asked)
            }
            Request::OpenQp { xrcd, qpn, cookie } => self.open_qp(at, xrcd, qpn, cookie),
            Request::ModifyQp { qp, attributes, mask } => self.modify_qp(at, qp, attributes, mask),
            Request::QueryQp { qp } => self.query_qp(at, qp),
            Request::DestroyQp { qp } => self.destroy_qp(at, qp),
            Request::AttachMulticast { qp, gid } => self.attach_multicast(at, qp, gid),
            Request::DetachMulticast { qp, gid } => self.detach_multicast(at, qp, gid),
            Request::OpenDirectRing { qp } => self.open_direct_ring(at, qp, false),
            Request::OpenNumberedDirectRing { qp } => self.open_direct_ring(at, qp, true),
            Request::AcceptDirectRing { qp } => self.accept_direct_ring(at, qp),
            Request::OpenDatagramRing { qp, ah, remote_qpn, qkey, place } => {
                self.open_datagram_ring(at, qp, (ah, remote_qpn, qkey, place))
            }
            Request::AcceptDatagramRing { qp } => self.accept_datagram_ring(at, qp),
            Request::AskGrant { qp, rkey, address, length, access } => {
                self.ask_grant(at, qp, GrantRequest { rkey, address, length, access })
            }
            Request::OpenCommands => self.open_commands(at),
            Request::ConfirmRevocation { segment } => self.confirm_revocation(at, segment),
            _ => Err(VerbsError::InvalidArgument),
        }
    }

    fn open_xrcd(
        &mut self,
        at: (Key, SessionId),
        context: Handle,
        file: Option<FileIdentity>,
        flags: XrcdOpenFlags,
    ) -> Outcome {
        let session = at.1;
        let context = self.objects(at.0)?.contexts.get(context)?.id;
        self.submit(at, OpenXrcd { session, context, file, flags }, move |connection, id| {
            let xrcd = connection.objects.xrcds.insert(XrcdEntry { id, context });
            Answer::of(Reply::Xrcd { xrcd })
        })
    }

    fn close_xrcd(&mut self, at: (Key, SessionId), xrcd: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.xrcds.get(xrcd)?.id;
        self.submit(at, CloseXrcd { session, xrcd: id }, move |connection, ()| {
            connection.objects.xrcds.remove(xrcd);
            Answer::done()
        })
    }

    fn create_qp(&mut self, at: (Key, SessionId), asked: &QpRequest) -> Outcome {
        let (key, session) = at;
        let changes = match asked.connection {
            Some(id) => self.first_changes(key, id, asked.qp_type)?,
            None => Vec::new(),
        };
        let objects = self.objects(key)?;
        let (init, context) = objects.qp_init(asked)?;
        let (service, cookie) = (init.qp_type, init.cookie);
        let is_datagram = service == QpType::Ud;
        objects.check_doorbell(cookie)?;
        if service == QpType::XrcReceive {
            let command = CreateXrcTarget { session, context, init, changes };
            return self
                .submit(at, command, move |connection, (id, qpn)| connection.objects.answer_target(id, qpn, cookie));
        }
        let receives_itself = service != QpType::XrcSend && init.srq.is_none();
        let granted = grant_qp_capabilities(&asked.capabilities, !receives_itself)?;
        let send_shape = QueueShape::send(granted.max_send_wr, granted.max_send_sge, granted.max_inline_data);
        let receive_shape = QueueShape::receive(granted.max_recv_wr, granted.max_recv_sge);
        let bytes = send_shape.bytes() + receive_shape.bytes();
        let (segment, memory, charge) = self.new_ring(key, "freeflow-qp", bytes)?;
        let segment_bytes = segment.bytes() as u64;
        let send = {
            let (wr, sge) = (granted.max_send_wr, granted.max_send_sge);
            RequestConsumer::new(segment.clone(), 0, send_shape, wr, sge, granted.max_inline_data)
        };
        // Of one that uses an SRQ it has no RECVs, and numbers its messages.
        let receive = (service != QpType::XrcSend).then(|| {
            let (wr, sge) = (granted.max_recv_wr, granted.max_recv_sge);
            RequestConsumer::new(segment, send_shape.bytes(), receive_shape, wr, sge, 0)
        });
        let (receives_wanted, attention) = (false, Attention::Doorbell);
        let direct = Direct::default();
        let qp = Qp {
            session,
            context,
            cookie,
            service,
            send,
            receive,
            receives_wanted,
            attention,
            direct,
            slow_path: QpSlowPath::default(),
        };
        self.submit(at, CreateQp { init, qp, changes }, move |connection, (id, qpn)| {
            connection.objects.doorbells.insert(cookie);
            let qp = connection.objects.qps.insert(QpEntry { id, cookie, is_datagram, _charge: Some(charge) });
            Answer::with_memory(Reply::Qp { qp, qpn: qpn.0, capabilities: granted, segment_bytes }, memory, Vec::new())
        })
    }

    fn open_qp(&mut self, at: (Key, SessionId), xrcd: Handle, qpn: u32, cookie: u32) -> Outcome {
        let session = at.1;
        let objects = self.objects(at.0)?;
        let XrcdEntry { id: xrcd, context } = *objects.xrcds.get(xrcd)?;
        objects.check_doorbell(cookie)?;
        if qpn > Qpn::MASK {
            return Err(VerbsError::InvalidArgument);
        }
        let qpn = Qpn(qpn);
        let command = OpenXrcTarget { session, context, xrcd, qpn, cookie };
        self.submit(at, command, move |connection, id| connection.objects.answer_target(id, qpn, cookie))
    }

    fn modify_qp(
        &mut self,
        at: (Key, SessionId),
        qp: Handle,
        attributes: QpAttributes,
        mask: QpAttributeMask,
    ) -> Outcome {
        let session = at.1;
        let qp = self.objects(at.0)?.qps.get(qp)?.id;
        self.submit(at, ModifyQp { session, qp, attributes, mask }, |_, state| Answer::of(Reply::QpModified { state }))
    }

    fn query_qp(&mut self, at: (Key, SessionId), qp: Handle) -> Outcome {
        let session = at.1;
        let qp = self.objects(at.0)?.qps.get(qp)?.id;
        self.submit(at, QueryQp { session, qp }, |_, attributes| Answer::of(Reply::QpAttributes(attributes)))
    }

    fn destroy_qp(&mut self, at: (Key, SessionId), qp: Handle) -> Outcome {
        let session = at.1;
        let entry = self.objects(at.0)?.qps.get(qp)?;
        let (id, cookie) = (entry.id, entry.cookie);
        self.submit(at, DestroyQp { session, qp: id, cookie }, move |connection, _held| {
            if let Some(entry) = connection.objects.qps.remove(qp) {
                connection.objects.doorbells.remove(&entry.cookie);
            }
            Answer::done()
        })
    }

    fn attach_multicast(&mut self, at: (Key, SessionId), qp: Handle, group: Gid) -> Outcome {
        let qp = self.objects(at.0)?.qps.get(qp)?.id;
        self.submit(at, AttachMulticast { session: at.1, qp, group }, |_, ()| Answer::done())
    }

    fn detach_multicast(&mut self, at: (Key, SessionId), qp: Handle, group: Gid) -> Outcome {
        let qp = self.objects(at.0)?.qps.get(qp)?.id;
        self.submit(at, DetachMulticast { session: at.1, qp, group }, |_, ()| Answer::done())
    }
}

impl Objects {
    /// The objects that a QP shall stand on, by the engine's names; and the context that its events go to.
    fn qp_init(&self, asked: &QpRequest) -> Result<(QpInit, ContextId), VerbsError> {
        let pd = asked.pd.map(|pd| self.pds.get(pd)).transpose()?;
        let xrcd = asked.xrcd.map(|xrcd| self.xrcds.get(xrcd)).transpose()?;
        let cq = |cq: Option<Handle>| cq.map(|cq| self.cqs.get(cq).map(|entry| entry.id)).transpose();
        let context = pd.map(|pd| pd.context).or(xrcd.map(|xrcd| xrcd.context)).ok_or(VerbsError::InvalidArgument)?;
        let init = QpInit {
            pd: pd.map(|pd| pd.id),
            qp_type: asked.qp_type,
            send_cq: cq(asked.send_cq)?,
            recv_cq: cq(asked.recv_cq)?,
            srq: asked.srq.map(|srq| self.srqs.get(srq).map(|entry| entry.id)).transpose()?,
            xrcd: xrcd.map(|xrcd| xrcd.id),
            capabilities: asked.capabilities,
            all_signaled: asked.all_signaled,
            block_own_multicast: asked.block_own_multicast,
            cookie: asked.cookie,
        };
        Ok((init, context))
    }

    /// An XRC target is open: it has no rings.
    fn answer_target(&mut self, id: QpId, qpn: Qpn, cookie: u32) -> Answer {
        self.doorbells.insert(cookie);
        let qp = self.qps.insert(QpEntry { id, cookie, is_datagram: false, _charge: None });
        let capabilities = QpCapabilities::default();
        Answer::of(Reply::Qp { qp, qpn: qpn.0, capabilities, segment_bytes: 0 })
    }
}
