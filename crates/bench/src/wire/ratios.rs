//! Wanted ratios of FreeFlow between hosts: each figure against its limit, or against the kernel's
//! TCP.
use super::series::{Key, MTU_LARGE, MTU_SMALL, SMALL_BYTES, STREAM_BYTES, Series};
use super::shards::can_be_faster;
use serde::Serialize;

/// A figure divided by another of the same run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ratio {
    pub what: &'static str,
    pub value: f64,
    /// Below it (above, where less is better) something is wrong.
    pub floor: f64,
    pub aim: f64,
}

impl Ratio {
    /// Times of a round trip: less is better.
    pub fn less_is_better(&self) -> bool {
        self.aim < self.floor
    }
}

type Part = (Key, usize);

/// What, at which MTU, of what, against what, floor, aim.
type Wanted = (&'static str, u32, Part, Part, f64, f64);

const WRITE: Part = (Key::Write, STREAM_BYTES);
const SEND: Part = (Key::SendRoundTrip, SMALL_BYTES);

const LOSS_FREE: Part = (Key::LossFree, STREAM_BYTES);
const BARE: Part = (Key::BareStreamBeside, STREAM_BYTES);

const WANTED: [Wanted; 17] = [
    ("WRITE 1 MB, MTU 4200, share of the bare stream", MTU_LARGE, WRITE, (Key::BareStream, STREAM_BYTES), 0.85, 0.95),
    ("WRITE 1 MB, MTU 4200, times iperf3 over the link", MTU_LARGE, WRITE, (Key::IperfLink, 0), 2.0, 2.5),
    ("WRITE 1 MB, MTU 4200, times iperf3 over VXLAN", MTU_LARGE, WRITE, (Key::IperfOverlay, 0), 2.3, 3.0),
    ("WRITE 1 MB, MTU 1500, times iperf3 over the link", MTU_SMALL, WRITE, (Key::IperfLink, 0), 1.5, 2.0),
    ("SEND 64 B round trip, times UDP, spinning", MTU_LARGE, SEND, (Key::UdpRoundTrip, SMALL_BYTES), 3.0, 2.0),
    ("SEND 64 B round trip, times TCP over VXLAN", MTU_LARGE, SEND, (Key::TcpRoundTrip, SMALL_BYTES), 0.7, 0.45),
    (
        "WRITEs of 64 B a second, times one datagram a call",
        MTU_LARGE,
        (Key::WriteRate, SMALL_BYTES),
        (Key::DatagramRate, SMALL_BYTES),
        10.0,
        20.0,
    ),
    ("all flows, share of the best single one", MTU_LARGE, (Key::AllFlows, 0), (Key::SingleFlow, 0), 0.9, 0.95),
    ("WRITE 64 KB, MTU 4200, share of the bare stream", MTU_LARGE, (Key::Write, 64 << 10), BARE, 0.7, 0.85),
    ("SEND 64 KB, MTU 4200, share of the bare stream", MTU_LARGE, (Key::Send, 64 << 10), BARE, 0.7, 0.85),
    ("WRITE 4 KB, MTU 4200, share of the bare stream", MTU_LARGE, (Key::Write, 4 << 10), BARE, 0.35, 0.5),
    ("SEND 4 KB, MTU 4200, share of the bare stream", MTU_LARGE, (Key::Send, 4 << 10), BARE, 0.35, 0.5),
    ("WRITE 1 MB at 0.1 % loss, share of that without", MTU_LARGE, (Key::Lossy, STREAM_BYTES), LOSS_FREE, 0.85, 0.95),
    ("WRITE 1 MB at 1 % loss, share of that without", MTU_LARGE, (Key::VeryLossy, STREAM_BYTES), LOSS_FREE, 0.5, 0.7),
    (
        "WRITE 1 MB, 1 % overtaken, share of that in order",
        MTU_LARGE,
        (Key::Reordered, STREAM_BYTES),
        LOSS_FREE,
        0.9,
        0.97,
    ),
    (
        "WRITE 1 MB in sealed packets, share of plain ones",
        MTU_LARGE,
        (Key::Sealed, STREAM_BYTES),
        (Key::Plain, STREAM_BYTES),
        0.5,
        0.7,
    ),
    ("WRITE 1 MB at 10 ms, share of that without delay", MTU_LARGE, (Key::Long, STREAM_BYTES), LOSS_FREE, 0.5, 0.8),
];

/// Of routers with four shards, against one. Where processors don't suffice for four, they are not to cost anything.
const WANTED_OF_SHARDS: [Wanted; 3] = [
    (
        "WRITE 1 MB of one pair, 4 shards, times 1 shard",
        MTU_LARGE,
        (Key::FourShardsAlone, STREAM_BYTES),
        (Key::OneShardAlone, STREAM_BYTES),
        0.9,
        1.0,
    ),
    (
        "WRITE 1 MB of 4 pairs, 4 shards, times 1 shard",
        MTU_LARGE,
        (Key::FourShardsStreams, STREAM_BYTES),
        (Key::OneShardStreams, STREAM_BYTES),
        2.5,
        3.5,
    ),
    (
        "WRITEs of 64 B of 4 pairs, 4 shards, times 1 shard",
        MTU_LARGE,
        (Key::FourShardsMessages, SMALL_BYTES),
        (Key::OneShardMessages, SMALL_BYTES),
        2.5,
        3.5,
    ),
];

fn value(series: &[Series], mtu: u32, (key, bytes): Part) -> Option<f64> {
    let is_it = |one: &&Series| one.key == key && one.bytes == bytes && one.mtu == mtu && one.offloads;
    // The first of a key and size: its runs alternated with those of its limit.
    series.iter().find(is_it)?.middle().map(|run| run.figures.p50)
}

/// All ratios whose figures were measured.
pub fn ratios(series: &[Series]) -> Vec<Ratio> {
    let ratio = |&(what, mtu, of, against, floor, aim): &Wanted| {
        let value = value(series, mtu, of)? / value(series, mtu, against)?;
        Some(Ratio { what, value, floor, aim })
    };
    let fairness = value(series, MTU_LARGE, (Key::Fairness, 0));
    let fairness = fairness.map(|value| Ratio { what: "Jain's index of all flows", value, floor: 0.99, aim: 0.995 });
    let of_shards = WANTED_OF_SHARDS.iter().filter_map(ratio).map(|wanted| match can_be_faster() {
        true => wanted,
        false => Ratio { floor: 0.9, aim: 1.0, ..wanted },
    });
    WANTED.iter().filter_map(ratio).chain(fairness).chain(of_shards).collect()
}

#[cfg(test)]
mod tests {
    use super::super::series::tests::example;
    use super::*;

    #[test]
    fn ratios_are_taken_where_both_are_known() {
        let mut series = vec![
            example(Key::Write, STREAM_BYTES, MTU_LARGE, &[30.0]),
            example(Key::BareStream, STREAM_BYTES, MTU_LARGE, &[40.0]),
            example(Key::IperfLink, 0, MTU_SMALL, &[10.0]),
            example(Key::SendRoundTrip, SMALL_BYTES, MTU_LARGE, &[20.0]),
            example(Key::UdpRoundTrip, SMALL_BYTES, MTU_LARGE, &[8.0]),
            example(Key::Fairness, 0, MTU_LARGE, &[0.99]),
        ];
        let list = ratios(&series);
        assert_eq!(list.iter().map(|ratio| ratio.value).collect::<Vec<_>>(), [0.75, 2.5, 0.99]);
        assert_eq!(list.iter().map(Ratio::less_is_better).collect::<Vec<_>>(), [false, true, false]);
        series[1].offloads = false;
        assert_eq!(ratios(&series).len(), 2);
    }
}
