//! A process' own RDMA objects for the connectivity test: one memory region, an RC QP that is connected by hand, and a
//! UD QP, by the same library that programs use.
//!
//! Memory is filled and read through `/proc/self/mem`, so that the test sees what the router or a peer has written
//! without unsafe code. Not here: the order of the steps (`asking`, `answering`), and `rdma_cm` (`connection`).

use crate::failure::{Context as _, Failure, Result, fail};
use freeflow_client::{
    CompletionQueue, Context, Handle, MemoryRegion, QpParameters, QueuePair, SendDescriptor, Session, allocate,
    socket_path,
};
use freeflow_verbs::{
    Access, AddressHandleAttributes, Completion, CompletionFlags, CompletionStatus, Gid, GlobalRoute, PathMtu,
    QpAttributeMask, QpAttributes, QpCapabilities, QpState, QpType, SendFlags, SendOpcode, Sge,
};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest message of the test, bytes: many packets of every path MTU.
pub const MESSAGE_BYTES_MAX: u32 = 256 << 10;
/// RECVs that a QP has posted, and their size, bytes.
pub const RECEIVE_COUNT: u32 = 32;
const SLOT_BYTES: u32 = 8 << 10;
const REQUESTS_MAX: u32 = 64;
const CQ_ENTRIES: u32 = 256;
pub const QKEY: u32 = 0x0f1e_e10f;
/// 4.096 µs · 2^14 = 67 ms.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 7;
/// A denied connection ends sooner.
const RETRIES_IF_DENIED: u8 = 2;

/// Parts of the region: what goes out, what peers may reach, and RECVs of the RC, UD and rdma_cm QPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Out,
    Window,
    Receives,
    Datagrams,
    ConnectionReceives,
}

impl Part {
    const COUNT: u64 = 5;

    fn offset(self) -> u64 {
        self as u64 * u64::from(MESSAGE_BYTES_MAX)
    }
}

/// A QP with the CQ that is its own.
pub struct Queue {
    pub qp: QueuePair,
    cq: Arc<CompletionQueue>,
    receives: Part,
    /// Completions that nobody has asked for yet.
    kept: RefCell<VecDeque<Completion>>,
}

pub struct Endpoint {
    pub session: Arc<Session>,
    context: Context,
    pd: Handle,
    pub region: MemoryRegion,
    base: u64,
    memory: File,
    pub rc: Queue,
    pub ud: Queue,
}

fn capabilities() -> QpCapabilities {
    QpCapabilities {
        max_send_wr: REQUESTS_MAX,
        max_recv_wr: REQUESTS_MAX,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: 0,
    }
}

impl Endpoint {
    pub fn open() -> Result<Self> {
        let session = Arc::new(Session::connect(&socket_path()).context("can't connect to the router")?);
        session.allow_direct(crate::sys::memory_that_stays());
        let context = Context::open(&session).context("can't open the device")?;
        let pd = session.alloc_pd(context.handle()).context("can't make a PD")?;
        let length = Part::COUNT * u64::from(MESSAGE_BYTES_MAX);
        let base = allocate(&session, length as usize).context("no memory")? as u64;
        let access = [Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC];
        let access = access.into_iter().fold(Access::LOCAL_WRITE, Access::union);
        let region = session.register(pd, base, length, base, access).context("can't register memory")?;
        let memory = File::options().read(true).write(true).open("/proc/self/mem").context("/proc/self/mem")?;
        let queue = |qp_type, receives| Queue::create(&session, &context, pd, qp_type, receives, None);
        let (rc, ud) = (queue(QpType::Rc, Part::Receives)?, queue(QpType::Ud, Part::Datagrams)?);
        let endpoint = Self { session, context, pd, region, base, memory, rc, ud };
        endpoint.bring_up_datagrams()?;
        endpoint.initialise(&endpoint.rc)?;
        Ok(endpoint)
    }

    /// An RC QP for an identifier of rdma_cm: it begins in INIT.
    pub fn connection_queue(&self, id: Handle) -> Result<Queue> {
        Queue::create(&self.session, &self.context, self.pd, QpType::Rc, Part::ConnectionReceives, Some(id))
    }

    pub fn gid(&self) -> Result<Gid> {
        self.session.gids().first().copied().ok_or_else(|| Failure::new("the vNIC has no GID"))
    }

    /// Largest path MTU of the device.
    pub fn path_mtu(&self) -> PathMtu {
        self.session.device().port.active_mtu
    }

    pub fn address(&self, part: Part) -> u64 {
        self.base + part.offset()
    }

    pub fn fill(&self, part: Part, bytes: &[u8]) -> Result<()> {
        self.memory.write_all_at(bytes, self.address(part)).context("can't write own memory")
    }

    pub fn read(&self, part: Part, offset: u64, bytes: u32) -> Result<Vec<u8>> {
        let mut content = vec![0; bytes as usize];
        self.memory.read_exact_at(&mut content, self.address(part) + offset).context("can't read own memory")?;
        Ok(content)
    }

    /// Of the RECV of that number: where its message lies.
    pub fn received(&self, queue: &Queue, slot: u64, bytes: u32) -> Result<Vec<u8>> {
        self.read(queue.receives, slot % u64::from(RECEIVE_COUNT) * u64::from(SLOT_BYTES), bytes.min(SLOT_BYTES))
    }

    fn sge(&self, part: Part, bytes: u32) -> Sge {
        Sge { address: self.address(part), length: bytes, lkey: self.region.lkey }
    }

    pub fn initialise(&self, queue: &Queue) -> Result<()> {
        use QpAttributeMask as M;
        let access = [Access::REMOTE_READ, Access::REMOTE_ATOMIC].into_iter().fold(Access::REMOTE_WRITE, Access::union);
        let init = QpAttributes { state: QpState::Init, port: 1, access, ..QpAttributes::default() };
        queue.modify(&init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS)
    }

    /// Ready to send and to receive, with RECVs posted.
    fn bring_up_datagrams(&self) -> Result<()> {
        use QpAttributeMask as M;
        let init = QpAttributes { state: QpState::Init, port: 1, qkey: QKEY, ..QpAttributes::default() };
        self.ud.modify(&init, M::PKEY_INDEX | M::PORT | M::QKEY)?;
        self.ud.modify(&QpAttributes { state: QpState::ReadyToReceive, ..QpAttributes::default() }, 0)?;
        self.post_receives(&self.ud)?;
        self.ud.modify(&QpAttributes { state: QpState::ReadyToSend, ..QpAttributes::default() }, M::SQ_PSN)
    }

    pub fn post_receives(&self, queue: &Queue) -> Result<()> {
        (0..u64::from(RECEIVE_COUNT)).try_for_each(|slot| self.post_receive(queue, slot))
    }

    pub fn post_receive(&self, queue: &Queue, slot: u64) -> Result<()> {
        let slot = slot % u64::from(RECEIVE_COUNT);
        let address = self.address(queue.receives) + slot * u64::from(SLOT_BYTES);
        let sge = Sge { address, length: SLOT_BYTES, lkey: self.region.lkey };
        let posted = queue.qp.begin_receive().and_then(|mut batch| batch.push(slot, &[sge]));
        posted.context("can't post a RECV")
    }

    fn route(&self, to: Gid) -> AddressHandleAttributes {
        let route = GlobalRoute { dgid: to, hop_limit: 64, ..GlobalRoute::default() };
        AddressHandleAttributes { grh: Some(route), port: 1, ..AddressHandleAttributes::default() }
    }

    /// Connects the RC QP by hand: the QP numbers were exchanged.
    pub fn connect(&self, gid: Gid, qpn: u32, mtu: PathMtu, may_be_denied: bool) -> Result<()> {
        use QpAttributeMask as M;
        let receive = QpAttributes {
            state: QpState::ReadyToReceive,
            path_mtu: mtu,
            dest_qpn: qpn,
            address: self.route(gid),
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            ..QpAttributes::default()
        };
        let mask = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        self.rc.modify(&receive, mask)?;
        self.post_receives(&self.rc)?;
        let send = QpAttributes {
            state: QpState::ReadyToSend,
            timeout: TIMEOUT,
            retry_count: if may_be_denied { RETRIES_IF_DENIED } else { RETRIES },
            rnr_retry: RETRIES,
            max_rd_atomic: 1,
            ..QpAttributes::default()
        };
        self.rc.modify(&send, M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC)
    }

    /// Carries out a request of an RC QP on this part and the peer's address, and waits for its completion.
    pub fn request(
        &self,
        queue: &Queue,
        opcode: SendOpcode,
        bytes: u32,
        to: (u64, u32),
        operands: (u64, u64),
    ) -> Result<()> {
        let sge = self.sge(Part::Out, bytes);
        let (compare_add, swap) = operands;
        queue.post(&SendDescriptor { opcode, compare_add, swap, ..blank(to.0, to.1, &[sge]) })?;
        queue.sent()
    }

    pub fn send_datagram(&self, ah: Handle, qpn: u32, bytes: u32) -> Result<()> {
        let remote = u64::from(ah) | u64::from(qpn) << 32;
        self.ud.post(&blank(remote, QKEY, &[self.sge(Part::Out, bytes)]))?;
        self.ud.sent()
    }

    pub fn address_handle(&self, gid: Gid) -> Result<Handle> {
        self.session.create_address_handle(self.pd, &self.route(gid)).context("can't make an address handle")
    }
}

fn blank(remote_address: u64, rkey: u32, sges: &[Sge]) -> SendDescriptor<'_> {
    SendDescriptor {
        wr_id: 0,
        opcode: SendOpcode::Send,
        flags: SendFlags(SendFlags::SIGNALED),
        immediate: 0,
        remote_address,
        rkey,
        compare_add: 0,
        swap: 0,
        remote_srqn: 0,
        sges,
        inline: None,
    }
}

impl Queue {
    fn create(
        session: &Arc<Session>,
        context: &Context,
        pd: Handle,
        qp_type: QpType,
        receives: Part,
        connection: Option<Handle>,
    ) -> Result<Self> {
        let cq = CompletionQueue::create(session, context.handle(), CQ_ENTRIES, None, false);
        let cq = Arc::new(cq.context("can't make a CQ")?);
        let wanted = QpParameters {
            qp_type,
            pd: Some(pd),
            send_cq: Some(&cq),
            recv_cq: Some(&cq),
            srq: None,
            xrcd: None,
            capabilities: capabilities(),
            all_signaled: true,
            block_own_multicast: false,
            connection,
        };
        let qp = QueuePair::create(session, &wanted).context("can't make a QP")?;
        Ok(Self { qp, cq, receives, kept: RefCell::default() })
    }

    pub fn modify(&self, attributes: &QpAttributes, mask: u32) -> Result<()> {
        let changed = self.qp.modify(attributes, QpAttributeMask(mask | QpAttributeMask::STATE));
        changed.map(|_| ()).context(format!("can't bring the QP to {:?}", attributes.state))
    }

    fn post(&self, request: &SendDescriptor<'_>) -> Result<()> {
        self.qp.post(request).context("can't post a request")
    }

    /// The next completion of the wanted kind; `None`: none within the time. One of the other kind is kept: a peer's
    /// answer may come before the acknowledgement of the request.
    fn next(&self, of_sends: bool, time: Duration) -> Result<Option<Completion>> {
        let deadline = Instant::now() + time;
        let is_wanted = |completion: &Completion| completion.flags.contains(CompletionFlags::SEND_QUEUE) == of_sends;
        let mut kept = self.kept.borrow_mut();
        loop {
            if let Some(place) = kept.iter().position(is_wanted) {
                return Ok(kept.remove(place));
            }
            let mut found = 0;
            let polled = self.cq.poll(REQUESTS_MAX as usize, |completion| {
                kept.push_back(*completion);
                found += 1;
            });
            polled.context("can't poll")?;
            if let Some(bad) = kept.iter().find(|completion| completion.status != CompletionStatus::Success) {
                fail!("a request failed: {:?}", bad.status);
            }
            if found == 0 && Instant::now() > deadline {
                return Ok(None);
            }
        }
    }

    /// Waits for the completion of the one request that was posted.
    fn sent(&self) -> Result<()> {
        match self.next(true, REQUEST_TIME)? {
            Some(_) => Ok(()),
            None => fail!("a request was not done within {REQUEST_TIME:?}"),
        }
    }

    /// Waits for a message: the number of its RECV and its length.
    pub fn receive(&self, time: Duration) -> Result<Option<(u64, u32)>> {
        Ok(self.next(false, time)?.map(|completion| (completion.work_request_id, completion.byte_count)))
    }
}

/// Longer than all retries of a QP together.
const REQUEST_TIME: Duration = Duration::from_secs(10);
