//! `freeflow ping`: round trips between the vNICs of two containers of this host, and which way they went.
//!
//! The command becomes a process of both vNICs: it connects to the sockets that are mounted into
//! the containers, makes an RC QP at each, and sends messages to and fro by the same library, rings
//! and router as the containers' programs. One thread is the one end, another thread the other, so
//! the messages cross processors as they do between programs. The containers notice nothing; for
//! that moment each vNIC has a session and a few objects more.

use crate::admin::Admin;
use crate::arguments::{Format, Ping};
use crate::failure::{Context as _, Failure, Result, fail};
use crate::output;
use crate::qps::{self, Qp};
use freeflow_client::{
    CompletionQueue, Context, MemoryRegion, QpParameters, QueuePair, SendDescriptor, Session, allocate,
};
use freeflow_hostnet::run_dir::RunDir;
use freeflow_protocol::admin::VnicStatus;
use freeflow_verbs::{
    Access, AddressHandleAttributes, CompletionFlags, CompletionStatus, Gid, GlobalRoute, PathMtu, QpAttributeMask,
    QpAttributes, QpCapabilities, QpState, QpType, SendFlags, SendOpcode, Sge,
};
use serde::Serialize;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Round trips before those that are measured: both ends are awake then, and what can be direct is, as a rule.
const WARM_UP_COUNT: u32 = 500;
/// How long one message may take: longer than the QPs' own retries.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// RECVs that are posted; one is used at a time.
const RECEIVE_COUNT: u32 = 8;
const REQUESTS_MAX: u32 = 64;
const CQ_ENTRIES: u32 = 256;
/// `off`: all by the router, as in every program.
const DIRECT_VARIABLE: &str = "FREEFLOW_DIRECT";
/// 4.096 µs · 2^14 = 67 ms, seven times, as programs have it.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 7;

/// One end: what a program that uses this vNIC has.
struct End {
    name: String,
    session: Arc<Session>,
    /// Closing it closes all that it holds.
    _context: Context,
    cq: Arc<CompletionQueue>,
    qp: QueuePair,
    region: MemoryRegion,
    /// The message that goes; the one that comes follows it.
    address: u64,
    bytes: u32,
}

impl End {
    fn open(vnic: &VnicStatus, bytes: u32) -> Result<Self> {
        let session = Session::connect(&Path::new(&vnic.directory).join("router.sock"));
        let session = Arc::new(session.context(format!("container {}", vnic.name))?);
        if std::env::var_os(DIRECT_VARIABLE).is_none_or(|value| value != "off") {
            session.allow_direct(crate::sys::memory_that_stays());
        }
        let failed = |what: &str| format!("container {}: {what}", vnic.name);
        let context = Context::open(&session).context(failed("can't open its device"))?;
        let pd = session.alloc_pd(context.handle()).context(failed("can't make a PD"))?;
        let cq = CompletionQueue::create(&session, context.handle(), CQ_ENTRIES, None, false);
        let cq = Arc::new(cq.context(failed("can't make a CQ"))?);
        let wanted = QpParameters {
            qp_type: QpType::Rc,
            pd: Some(pd),
            send_cq: Some(&cq),
            recv_cq: Some(&cq),
            srq: None,
            xrcd: None,
            capabilities: QpCapabilities {
                max_send_wr: REQUESTS_MAX,
                max_recv_wr: REQUESTS_MAX,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            all_signaled: true,
            block_own_multicast: false,
            connection: None,
        };
        let qp = QueuePair::create(&session, &wanted).context(failed("can't make a QP"))?;
        let length = 2 * bytes as usize;
        let address = allocate(&session, length).context(failed("no memory"))? as u64;
        let access = Access::LOCAL_WRITE;
        let region = session.register(pd, address, length as u64, address, access);
        let region = region.context(failed("can't register memory"))?;
        Ok(Self { name: vnic.name.clone(), session, _context: context, cq, qp, region, address, bytes })
    }

    fn gid(&self) -> Result<Gid> {
        self.session.gids().first().copied().ok_or_else(|| Failure::new(format!("container {} has no GID", self.name)))
    }

    fn modify(&self, attributes: &QpAttributes, mask: u32) -> Result<()> {
        let changed = self.qp.modify(attributes, QpAttributeMask(mask | QpAttributeMask::STATE));
        changed.map(|_| ()).context(format!("container {}: can't connect its QP", self.name))
    }

    /// Ready to receive from the other end, with RECVs posted.
    fn listen(&self, other: &Self) -> Result<()> {
        use QpAttributeMask as M;
        let init = QpAttributes { state: QpState::Init, port: 1, ..QpAttributes::default() };
        self.modify(&init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS)?;
        for _ in 0..RECEIVE_COUNT {
            self.post_receive()?;
        }
        let route = GlobalRoute { dgid: other.gid()?, hop_limit: 64, ..GlobalRoute::default() };
        let receive = QpAttributes {
            state: QpState::ReadyToReceive,
            path_mtu: PathMtu::Mtu1024,
            dest_qpn: other.qp.qpn(),
            address: AddressHandleAttributes { grh: Some(route), port: 1, ..AddressHandleAttributes::default() },
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            ..QpAttributes::default()
        };
        let mask = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        self.modify(&receive, mask)
    }

    fn begin_sending(&self) -> Result<()> {
        use QpAttributeMask as M;
        let send = QpAttributes {
            state: QpState::ReadyToSend,
            timeout: TIMEOUT,
            retry_count: RETRIES,
            rnr_retry: RETRIES,
            max_rd_atomic: 1,
            ..QpAttributes::default()
        };
        self.modify(&send, M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC)
    }

    fn post_receive(&self) -> Result<()> {
        let sge = Sge { address: self.address + u64::from(self.bytes), length: self.bytes, lkey: self.region.lkey };
        let posted = self.qp.begin_receive().and_then(|mut batch| batch.push(0, &[sge]));
        posted.context(format!("container {}: can't post a RECV", self.name))
    }

    /// Sends the message of that number.
    fn send(&self, number: u32) -> Result<()> {
        let sge = Sge { address: self.address, length: self.bytes, lkey: self.region.lkey };
        let posted = self.qp.post(&SendDescriptor {
            wr_id: 0,
            opcode: SendOpcode::SendWithImmediate,
            flags: SendFlags(SendFlags::SIGNALED),
            immediate: number,
            remote_address: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            remote_srqn: 0,
            sges: &[sge],
            inline: None,
        });
        posted.context(format!("container {}: can't post a SEND", self.name))
    }

    /// Waits for the message of that number, and posts the next RECV.
    fn receive(&self, number: u32) -> Result<()> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            let (mut arrived, mut bad) = (None, None);
            let polled = self.cq.poll(REQUESTS_MAX as usize, |completion| {
                if completion.status != CompletionStatus::Success {
                    bad = bad.or(Some(completion.status));
                } else if !completion.flags.contains(CompletionFlags::SEND_QUEUE) {
                    arrived = Some((completion.immediate, completion.byte_count));
                }
            });
            polled.context(format!("container {}: can't poll", self.name))?;
            if let Some(status) = bad {
                fail!("container {}: a request failed: {status:?}", self.name);
            }
            if let Some(what) = arrived {
                if what != (number, self.bytes) {
                    fail!("container {}: another message came than was sent: {what:?}", self.name);
                }
                return self.post_receive();
            }
            if Instant::now() > deadline {
                fail!("container {}: message {number} did not come within {ANSWER_TIMEOUT:?}", self.name);
            }
        }
    }
}

/// Times of round trips, nanoseconds, in order of length.
struct Times(Vec<u64>);

impl Times {
    fn of(mut times_ns: Vec<u64>) -> Self {
        times_ns.sort_unstable();
        Self(times_ns)
    }

    /// Microseconds; so many hundredths of all take no longer.
    fn percentile_us(&self, percent: usize) -> f64 {
        let last = self.0.len().saturating_sub(1);
        let at = (last * percent).div_ceil(100);
        self.0.get(at).map_or(0.0, |&ns| ns as f64 / 1000.0)
    }
}

/// Which way the measured messages of one end went.
#[derive(Serialize)]
struct Way {
    /// `partly` direct, the rest routed.
    path: &'static str,
    direct_count: u64,
    /// Why not all were direct, if it is known.
    reason: Option<String>,
}

impl Way {
    fn of(count: u64, before: &Qp, after: &Qp) -> Self {
        let direct_count = after.direct_messages.saturating_sub(before.direct_messages).min(count);
        let path = match direct_count {
            all if all == count => "direct",
            0 => "routed",
            _ => "partly",
        };
        let reason = (direct_count < count).then(|| after.reason.clone().or_else(|| before.reason.clone())).flatten();
        Self { path, direct_count, reason }
    }

    /// `routed (not asked yet)`.
    fn text(&self, count: u64) -> String {
        let path = match self.path {
            "partly" => format!("direct {} of {count} times", self.direct_count),
            path => path.to_owned(),
        };
        self.reason.as_ref().map_or(path.clone(), |reason| format!("{path} ({reason})"))
    }
}

/// The JSON form of `freeflow ping`.
#[derive(Serialize)]
struct Report {
    from: String,
    to: String,
    from_ip: IpAddr,
    to_ip: IpAddr,
    network: String,
    data_path: &'static str,
    count: usize,
    bytes: u32,
    min_us: f64,
    /// Half of all round trips took between these two.
    quartile_1_us: f64,
    median_us: f64,
    quartile_3_us: f64,
    percentile_99_us: f64,
    max_us: f64,
    /// There and back: the messages themselves.
    ways: [Way; 2],
    /// The QPs of both ends after the last round trip.
    qps: [Qp; 2],
    /// Their paths were others when the measurement began.
    path_changed: bool,
}

pub fn ping(run_dir: &RunDir, arguments: &Ping) -> Result<()> {
    let mut admin = Admin::connect(run_dir)?;
    let vnics = admin.vnics()?;
    let (one, other) = (find(&vnics, &arguments.from)?, find(&vnics, &arguments.to)?);
    if one.network != other.network {
        fail!(
            "{} is in network {} and {} in network {}: what is measured is within one",
            one.name,
            one.network,
            other.name,
            other.network
        );
    }
    let data_path = admin.network(&one.network)?.data_path.name();
    let ends = (End::open(one, arguments.size)?, End::open(other, arguments.size)?);
    ends.0.listen(&ends.1)?;
    ends.1.listen(&ends.0)?;
    ends.0.begin_sending()?;
    ends.1.begin_sending()?;
    let mut ways = |ends: (&End, &End)| -> Result<[Qp; 2]> {
        Ok([way_of(&mut admin, one, ends.0, &vnics)?, way_of(&mut admin, other, ends.1, &vnics)?])
    };
    let (before, times_ns, after) = measure((&ends.0, &ends.1), arguments.count, &mut ways)?;
    let times = Times::of(times_ns);
    let report = Report {
        from: one.name.clone(),
        to: other.name.clone(),
        from_ip: one.address,
        to_ip: other.address,
        network: one.network.clone(),
        data_path,
        count: times.0.len(),
        bytes: arguments.size,
        min_us: times.percentile_us(0),
        quartile_1_us: times.percentile_us(25),
        median_us: times.percentile_us(50),
        quartile_3_us: times.percentile_us(75),
        percentile_99_us: times.percentile_us(99),
        max_us: times.percentile_us(100),
        path_changed: (0..2)
            .any(|end| (before[end].path, before[end].direct_ring) != (after[end].path, after[end].direct_ring)),
        ways: [0, 1].map(|end| Way::of(u64::from(arguments.count), &before[end], &after[end])),
        qps: after,
    };
    print(&report, arguments.output.format);
    Ok(())
}

/// Sends to and fro; asks for the QPs' paths before the measured part and after it. → these, and
/// the times, nanoseconds.
fn measure<W>(
    ends: (&End, &End),
    count: u32,
    ways: &mut dyn FnMut((&End, &End)) -> Result<W>,
) -> Result<(W, Vec<u64>, W)> {
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            (0..WARM_UP_COUNT + count).try_for_each(|number| {
                ends.1.receive(number)?;
                ends.1.send(number)
            })
        });
        let round_trip = |number| {
            ends.0.send(number)?;
            ends.0.receive(number)
        };
        let pinged = (0..WARM_UP_COUNT).try_for_each(round_trip).and_then(|()| {
            let before = ways(ends)?;
            let mut times_ns = Vec::with_capacity(count as usize);
            for number in WARM_UP_COUNT..WARM_UP_COUNT + count {
                let begin = Instant::now();
                round_trip(number)?;
                times_ns.push(begin.elapsed().as_nanos() as u64);
            }
            Ok((before, times_ns, ways(ends)?))
        });
        let echoed = echo.join().map_err(|_| Failure::new("the other end panicked"))?;
        match (pinged, echoed) {
            (Ok(measured), Ok(())) => Ok(measured),
            // One of the two is the cause, the other waited in vain.
            (Err(one), Err(other)) => Err(Failure::new(format!("{one}; {other}"))),
            (Err(failure), Ok(())) | (Ok(_), Err(failure)) => Err(failure),
        }
    })
}

fn way_of(admin: &mut Admin, vnic: &VnicStatus, end: &End, vnics: &[VnicStatus]) -> Result<Qp> {
    let own = qps::named(admin.qps(Some(&vnic.id))?, vnics).into_iter().find(|qp| qp.qpn == end.qp.qpn());
    own.ok_or_else(|| Failure::new(format!("the router does not list the QP of container {}", vnic.name)))
}

/// By name, id or address.
fn find<'a>(vnics: &'a [VnicStatus], wanted: &str) -> Result<&'a VnicStatus> {
    let address: Option<IpAddr> = wanted.parse().ok();
    let is_it = |vnic: &&VnicStatus| {
        vnic.name == wanted || vnic.id == wanted || vnic.addresses().any(|own| Some(own) == address)
    };
    let found: Vec<&VnicStatus> = vnics.iter().filter(is_it).collect();
    match found[..] {
        [vnic] => match &vnic.failed {
            Some(reason) => Err(Failure::new(format!("the vNIC of {wanted} has failed: {reason}"))),
            None => Ok(vnic),
        },
        [] => Err(Failure::new(format!(
            "no running container of this host is called {wanted:?} or has that address; see freeflow ps. Containers of \
             other hosts can't be pinged: freeflow peers ls shows the round trips between hosts"
        ))),
        _ => Err(Failure::new(format!("several containers are {wanted:?}; name one by its id: freeflow ps -o json"))),
    }
}

fn print(report: &Report, format: Format) {
    if format == Format::Json {
        output::json(report);
        return;
    }
    let Report { from, to, from_ip, to_ip, .. } = report;
    output::line(format!(
        "{from} ({from_ip}) and {to} ({to_ip}): {} round trips of {} bytes",
        report.count, report.bytes
    ));
    output::line(format!(
        "round trip: min {:.2} us, median {:.2} us, half between {:.2} and {:.2} us, 99% within {:.2} us, max {:.2} us",
        report.min_us,
        report.median_us,
        report.quartile_1_us,
        report.quartile_3_us,
        report.percentile_99_us,
        report.max_us
    ));
    let [there, back] = report.ways.each_ref().map(|way| way.text(report.count as u64));
    let changed = if report.path_changed { "; it changed while they went" } else { "" };
    output::line(format!(
        "path: {from} to {to} {there}, back {back}{changed} (network {}, data path {})",
        report.network, report.data_path
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_measured_times() {
        let times = Times::of(vec![5000, 1000, 3000, 2000, 4000]);
        let of = |percent| times.percentile_us(percent);
        assert_eq!([of(0), of(25), of(50), of(75), of(99), of(100)], [1.0, 2.0, 3.0, 4.0, 5.0, 5.0]);
        assert_eq!(Times::of(vec![7000]).percentile_us(50), 7.0);
    }
}
