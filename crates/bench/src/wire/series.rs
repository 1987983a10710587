//! One figure: several runs of the same measurement, of which the median counts.
use crate::limits::handoff::Distance;
use crate::limits::{Better, Reference, SUSPECT_FACTOR};
use crate::stats::{Summary, median};
use crate::table::{Table, bytes, figure};
use serde::Serialize;

/// Room for path MTU 4096 and all headers; and the MTU of ordinary Ethernet, which leaves path MTU 1024.
pub const MTU_LARGE: u32 = 4200;
pub const MTU_SMALL: u32 = 1500;
pub const STREAM_BYTES: usize = 1 << 20;
pub const SMALL_BYTES: usize = 64;

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Key {
    /// Limits.
    BareStream,
    /// The same once more, in turns with messages of several sizes.
    BareStreamBeside,
    UdpRoundTrip,
    DatagramRate,
    /// The kernel's TCP.
    IperfLink,
    IperfOverlay,
    TcpRoundTrip,
    /// FreeFlow.
    Write,
    Send,
    Read,
    SendRoundTrip,
    WriteRate,
    LossFree,
    Lossy,
    VeryLossy,
    Reordered,
    Long,
    Plain,
    Sealed,
    SingleFlow,
    AllFlows,
    EachFlow,
    Fairness,
    /// Routers with one shard, and with four.
    OneShardAlone,
    FourShardsAlone,
    OneShardStreams,
    FourShardsStreams,
    OneShardMessages,
    FourShardsMessages,
}

impl Key {
    pub fn is_freeflow(self) -> bool {
        use Key::*;
        let is_bare = matches!(self, BareStream | BareStreamBeside | UdpRoundTrip | DatagramRate);
        !is_bare && !matches!(self, IperfLink | IperfOverlay | TcpRoundTrip)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::BareStream => "limit: bare UDP stream, GSO, GRO, ICRC",
            Self::BareStreamBeside => "limit: bare UDP stream of 1 MB",
            Self::UdpRoundTrip => "limit: UDP round trip, both spin",
            Self::DatagramRate => "limit: one datagram a call",
            Self::IperfLink => "iperf3 (TCP) over the link",
            Self::IperfOverlay => "iperf3 (TCP) over VXLAN",
            Self::TcpRoundTrip => "TCP round trip over VXLAN, blocking",
            Self::Write => "WRITE stream",
            Self::Send => "SEND stream",
            Self::Read => "READ stream",
            Self::SendRoundTrip => "SEND round trip",
            Self::WriteRate => "WRITEs, batched",
            Self::LossFree => "WRITE stream without loss",
            Self::Lossy => "WRITE stream, 0.1 % of packets lost",
            Self::VeryLossy => "WRITE stream, 1 % of packets lost",
            Self::Reordered => "WRITE stream, 1 % of packets overtaken",
            Self::Long => "WRITE stream, round trip of 10 ms",
            Self::Plain => "WRITE stream, plain",
            Self::Sealed => "WRITE stream, sealed",
            Self::SingleFlow => "one flow alone",
            Self::AllFlows => "all flows together",
            Self::EachFlow => "each of them",
            Self::Fairness => "Jain's index",
            Self::OneShardAlone => "WRITE stream of one pair, 1 shard",
            Self::FourShardsAlone => "WRITE stream of one pair, 4 shards",
            Self::OneShardStreams => "WRITE streams of 4 pairs, 1 shard",
            Self::FourShardsStreams => "WRITE streams of 4 pairs, 4 shards",
            Self::OneShardMessages => "WRITEs of 4 pairs, 1 shard",
            Self::FourShardsMessages => "WRITEs of 4 pairs, 4 shards",
        }
    }

    pub fn unit(self) -> &'static str {
        match self {
            Self::UdpRoundTrip | Self::TcpRoundTrip | Self::SendRoundTrip => "us",
            Self::DatagramRate | Self::WriteRate | Self::OneShardMessages | Self::FourShardsMessages => "M/s",
            Self::Fairness => "",
            _ => "Gb/s",
        }
    }

    fn better(self) -> Better {
        if self.unit() == "us" { Better::Lower } else { Better::Higher }
    }

    /// Figure of a limit on the reference machine (two virtual Zen 5 cores, Linux 6.18), offloads on.
    fn reference(self, mtu: u32) -> Reference {
        match self {
            Self::BareStream | Self::BareStreamBeside if mtu == MTU_LARGE => Reference::new(38.0, 26.0),
            Self::BareStream => Reference::new(26.0, 21.0),
            Self::UdpRoundTrip => Reference::both(6.6),
            Self::DatagramRate => Reference::both(0.15),
            _ => Reference::NONE,
        }
    }
}

/// CPU time of each side, all its programs and its router, microseconds for each gigabit of payload.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Cost {
    pub sender: f64,
    pub receiver: f64,
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Sample {
    pub figures: Summary,
    pub cost: Option<Cost>,
}

impl Sample {
    /// Of a run that gives one number.
    pub fn of(value: f64, cost: Option<Cost>) -> Result<Self, String> {
        Ok(Self { figures: Summary::of(&mut [value]).ok_or("no number")?, cost })
    }
}

/// The median run, as it is printed and compared.
pub type Figure = Sample;

#[derive(Clone, Debug, Serialize)]
pub struct Series {
    pub key: Key,
    /// Of one message; 0 where there is none.
    pub bytes: usize,
    pub mtu: u32,
    /// Whether batches crossed the links whole.
    pub offloads: bool,
    pub runs: Vec<Sample>,
    pub failure: Option<String>,
}

impl Series {
    pub fn new(key: Key, bytes: usize, mtu: u32, offloads: bool) -> Self {
        Self { key, bytes, mtu, offloads, runs: Vec::new(), failure: None }
    }

    pub fn name(&self) -> String {
        let offloads = if self.offloads { "" } else { ", no offloads" };
        format!("{}, {}, MTU {}{offloads}", self.key.name(), bytes(self.bytes), self.mtu)
    }

    /// The run in the middle, by p50. `None` when one failed.
    pub fn middle(&self) -> Option<Figure> {
        let p50s: Vec<f64> = self.runs.iter().map(|run| run.figures.p50).collect();
        let middle = median(&p50s).filter(|_| self.failure.is_none())?;
        self.runs.iter().find(|run| run.figures.p50 == middle).copied()
    }

    /// Times worse than on the reference machine, at the better of both distances: a bare program that is much worse
    /// is wrong, or the machine was not quiet.
    fn times_worse(&self) -> Option<f64> {
        let reference = self.key.reference(self.mtu);
        let far = reference.at(Distance::Far).filter(|_| self.offloads)?;
        let p50 = self.middle()?.figures.p50;
        Some(if self.key.better() == Better::Lower { p50 / far } else { far / p50 })
    }
}

/// The figures that were taken together.
pub fn table(title: &str, series: &[Series]) -> Table {
    let header = ["figure", "size", "p10", "p50", "p99", "unit", "least", "most", "sender us/Gb", "receiver us/Gb", ""];
    let mut table = Table::new(title, &header);
    let or_dash = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), figure);
    for one in series {
        let middle = one.middle();
        let of = |pick: fn(&Summary) -> f64| or_dash(middle.map(|run| pick(&run.figures)));
        let p50s = || one.runs.iter().map(|run| run.figures.p50);
        let remark = match one.times_worse() {
            _ if one.failure.is_some() => "FAILED".to_owned(),
            Some(times) if times > SUSPECT_FACTOR => format!("over {SUSPECT_FACTOR}!"),
            _ => String::new(),
        };
        table.row(vec![
            one.key.name().to_owned(),
            if one.bytes == 0 { String::new() } else { bytes(one.bytes) },
            of(|summary| summary.p10),
            of(|summary| summary.p50),
            of(|summary| summary.p99),
            one.key.unit().to_owned(),
            or_dash(p50s().min_by(f64::total_cmp)),
            or_dash(p50s().max_by(f64::total_cmp)),
            or_dash(middle.and_then(|run| run.cost).map(|cost| cost.sender)),
            or_dash(middle.and_then(|run| run.cost).map(|cost| cost.receiver)),
            remark,
        ]);
    }
    table
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn example(key: Key, bytes: usize, mtu: u32, values: &[f64]) -> Series {
        let runs = values.iter().filter_map(|&value| Sample::of(value, None).ok()).collect();
        Series { runs, ..Series::new(key, bytes, mtu, true) }
    }

    #[test]
    fn the_middle_run_counts() {
        let mut series = example(Key::Write, 64, 4200, &[3.0, 1.0, 2.0, 9.0, 2.5]);
        assert_eq!(series.middle().map(|run| run.figures.p50), Some(2.5));
        series.failure = Some("why".into());
        assert_eq!(series.middle(), None);
        assert_eq!(Series::new(Key::Write, 64, 4200, true).middle(), None);
    }

    #[test]
    fn bad_limits_and_failures_are_marked() {
        let slow = example(Key::UdpRoundTrip, 64, 4200, &[20.0]);
        let fine = example(Key::UdpRoundTrip, 64, 4200, &[8.0]);
        let weak = example(Key::BareStream, 1 << 20, 4200, &[5.0]);
        let mut failed = example(Key::Write, 64, 4200, &[5.0]);
        failed.failure = Some("why".into());
        let text = |series| table("t", &[series]).to_string();
        assert!(text(slow).contains("over 1.5!") && text(weak).contains("over 1.5!"));
        assert!(!text(fine).contains("over") && text(failed).contains("FAILED"));
    }
}
