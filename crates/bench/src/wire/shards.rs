//! Routers with one and with four shards, in turns: four pairs of containers that stream or send small messages, and
//! one pair alone.
use super::series::{SMALL_BYTES, STREAM_BYTES};
use super::{Bench, Key, Link, Sample};
use crate::crowd::{Crowd, PairOfAgents, gbit_per_s};
use crate::lab::Lab;
use crate::verbs::flows::Flows;
use std::thread::available_parallelism;

/// Pairs of containers: as many as shards, each of which gets a pair of them.
const PAIR_COUNT: usize = 4;
/// Of each pair.
const STREAMS: Flows = Flows { count: 2, bytes: STREAM_BYTES, batch: 2 };
const MESSAGES: Flows = Flows { count: 2, bytes: SMALL_BYTES, batch: 64 };
/// From so many processors on each shard has one beside the programs.
const PROCESSORS_MIN: usize = 8;

/// Whether the machine has processors for four shards: elsewhere they can't be faster, and are not to be slower.
pub fn can_be_faster() -> bool {
    available_parallelism().is_ok_and(|count| count.get() >= PROCESSORS_MIN)
}

/// A lab, and the crowds in it.
struct Side<'a> {
    bench: Bench<'a>,
    streams: Crowd,
    messages: Crowd,
    keys: [Key; 3],
}

fn crowd(lab: &Lab, what: &str, flows: Flows) -> Result<Crowd, String> {
    Crowd::new(PAIR_COUNT, flows, |number| {
        let runner = lab.agent(1, &format!("{what}-runner-{number}"))?;
        let server = lab.agent(2, &format!("{what}-server-{number}"))?;
        Ok(PairOfAgents { runner, server })
    })
}

impl<'a> Side<'a> {
    fn new(lab: &'a Lab, of: &Bench<'_>, keys: [Key; 3]) -> Result<Self, String> {
        // First, so that their containers are spread over the shards by themselves.
        let (streams, messages) = (crowd(lab, "streams", STREAMS)?, crowd(lab, "messages", MESSAGES)?);
        let (effort, offloads) = (of.effort, of.offloads);
        let bench = Bench { lab, link: Link::new(lab)?, effort, offloads, series: Vec::new() };
        lab.favour()?;
        Ok(Self { bench, streams, messages, keys })
    }

    fn measure(&mut self) -> Result<(), String> {
        let [alone, streams, messages] = self.keys;
        let duration_ms = self.bench.effort.duration_ms;
        let of_streams: f64 = gbit_per_s(&self.streams.run(duration_ms)?).iter().sum();
        let of_messages: f64 = gbit_per_s(&self.messages.run(duration_ms)?).iter().sum();
        let millions = of_messages * 1e9 / 8.0 / SMALL_BYTES as f64 / 1e6;
        self.bench.sample(alone, STREAM_BYTES, |bench| bench.stream(crate::verbs::Operation::Write, STREAM_BYTES));
        self.bench.sample(streams, STREAM_BYTES, |_| Sample::of(of_streams, None));
        self.bench.sample(messages, SMALL_BYTES, |_| Sample::of(millions, None));
        Ok(())
    }
}

pub fn measure(bench: &mut Bench<'_>) -> Result<(), String> {
    let one = bench.lab.beside("plain", "one-shard", &["--shards", "1"])?;
    let four = bench.lab.beside("plain", "four-shards", &["--shards", "4", "--shard-by", "vnic"])?;
    let mut sides = [
        Side::new(&one, bench, [Key::OneShardAlone, Key::OneShardStreams, Key::OneShardMessages])?,
        Side::new(&four, bench, [Key::FourShardsAlone, Key::FourShardsStreams, Key::FourShardsMessages])?,
    ];
    for _ in 0..bench.effort.runs {
        for side in &mut sides {
            side.measure()?;
        }
    }
    for side in sides {
        bench.series.extend(side.bench.series);
    }
    Ok(())
}
