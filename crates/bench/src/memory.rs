//! Costs of memory: registering it, and each object's share of it. The same in every mode of the
//! router, so measured in one.
use crate::suite::Pair;
use crate::svg::{Plot, Row};
use crate::table::{Table, bytes, figure};
use crate::verbs::objects::{Kind, Resident};
use crate::verbs::registration::Registration;
use crate::verbs::{Memory, Reply, Request};
use serde::Serialize;
use serde_json::Value;

/// Registrations of one size.
#[derive(Clone, Debug, Serialize)]
pub struct Registered {
    pub memory: Memory,
    pub bytes: usize,
    /// Others of the program at work.
    pub threads: usize,
    pub failure: Option<String>,
    pub cost: Option<Registration>,
}

/// Memory of one object of a kind, bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Footprint {
    pub kind: Kind,
    pub count: usize,
    pub failure: Option<String>,
    pub cost: Option<ObjectBytes>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct ObjectBytes {
    /// The router's and the program's own resident memory.
    pub router: f64,
    pub program: f64,
    /// Of the segments that both have mapped: reserved, and resident while the object is idle.
    pub segments: f64,
    pub segments_resident: f64,
}

/// Registers memory of each kind and size; after each one that failed the next begins again.
pub fn registrations(pair: &mut Pair<'_>, quick: bool) -> Vec<Registered> {
    let sizes: &[usize] = if quick { &[4 << 10, 1 << 20] } else { &[4 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20] };
    let mut list = Vec::new();
    for memory in Memory::ALL {
        let alone = sizes.iter().map(|&bytes| (bytes, 0));
        let beside =
            sizes.iter().filter(|&&bytes| memory == Memory::Ordinary && bytes <= 64 << 10).map(|&bytes| (bytes, 8));
        for (bytes, threads) in alone.chain(beside) {
            let count = ((256 << 20) / bytes).clamp(3, if quick { 20 } else { 100 });
            let request = Request::Register { memory, bytes, count, threads };
            let cost = pair.runner.ask(&request).and_then(|reply| match reply {
                Reply::Registered(cost) => Ok(cost),
                other => Err(format!("unexpected: {other:?}")),
            });
            let released = pair.runner.ask(&Request::Release).map(|_| ());
            let failure = cost.as_ref().err().or(released.as_ref().err()).cloned();
            list.push(Registered { memory, bytes, threads, failure, cost: cost.ok() });
        }
    }
    list
}

/// Makes many objects of each kind, and looks at the growth.
pub fn footprints(pair: &mut Pair<'_>, quick: bool) -> Vec<Footprint> {
    let count = if quick { 200 } else { 1000 };
    let mut list = Vec::new();
    for kind in Kind::ALONE {
        let cost = footprint(pair, kind, count);
        list.push(Footprint { kind, count, failure: cost.as_ref().err().cloned(), cost: cost.ok() });
    }
    list
}

fn footprint(pair: &mut Pair<'_>, kind: Kind, count: usize) -> Result<ObjectBytes, String> {
    // Once before, so that what is made only at first use is there already.
    hold(pair, kind, 1)?;
    pair.runner.ask(&Request::Release)?;
    let pid = pair.host.router_pid.to_string();
    let router_before = Resident::of(&pid)?;
    let segments_before = segment_bytes(pair)?;
    let (before, after) = hold(pair, kind, count)?;
    let router_after = Resident::of(&pid)?;
    let segments_after = segment_bytes(pair)?;
    pair.runner.ask(&Request::Release)?;
    let each = |after: u64, before: u64| (after as f64 - before as f64) / count as f64;
    Ok(ObjectBytes {
        router: each(router_after.private, router_before.private),
        program: each(after.private, before.private),
        segments: each(segments_after, segments_before),
        segments_resident: each(after.shared, before.shared),
    })
}

fn hold(pair: &mut Pair<'_>, kind: Kind, count: usize) -> Result<(Resident, Resident), String> {
    match pair.runner.ask(&Request::Hold { kind, count })? {
        Reply::Held(before, after) => Ok((before, after)),
        other => Err(format!("unexpected: {other:?}")),
    }
}

fn segment_bytes(pair: &Pair<'_>) -> Result<u64, String> {
    pair.host.status()?.get("segment_bytes").and_then(Value::as_u64).ok_or("no segment_bytes".to_owned())
}

pub fn registrations_table(list: &[Registered]) -> Table {
    let header = [
        "memory",
        "size",
        "other threads",
        "reg us",
        "p99",
        "dereg us",
        "p99",
        "mmap + copy us",
        "reg, times",
        "dereg, times",
    ];
    let mut table = Table::new("Registration, beside a bare mmap, copy and munmap of as many bytes", &header);
    for one in list {
        let mut row = vec![one.memory.name().to_owned(), bytes(one.bytes), one.threads.to_string()];
        match one.cost {
            Some(Registration { register, deregister, bare }) => row.extend([
                figure(register.p50),
                figure(register.p99),
                figure(deregister.p50),
                figure(deregister.p99),
                figure(bare.p50),
                figure(register.p50 / bare.p50),
                figure(deregister.p50 / bare.p50),
            ]),
            None => row.extend(["FAILED", "-", "-", "-", "-", "-", "-"].map(str::to_owned)),
        }
        table.row(row);
    }
    table
}

/// The floor and the aim for each of both verbs, times a bare mmap, copy and munmap.
fn bounds(one: &Registered) -> Option<(f64, f64)> {
    match (one.memory, one.bytes >> 10) {
        (Memory::Ordinary, 4) => Some((15.0, 5.0)),
        (Memory::Ordinary, 64) => Some((5.0, 2.5)),
        _ => None,
    }
}

/// Of each kind of memory, by size: the slower one of both verbs.
pub fn registrations_plot(list: &[Registered]) -> Option<Plot> {
    let row = |one: &Registered| {
        let group = one.memory.name().to_owned();
        let beside = if one.threads > 0 { format!(", {} threads", one.threads) } else { String::new() };
        let (label, cost) = (format!("{group}, {}{beside}", bytes(one.bytes)), one.cost.as_ref());
        let value = cost.map(|cost| cost.register.p50.max(cost.deregister.p50) / cost.bare.p50);
        let (floor, aim) = bounds(one).unzip();
        Row { group, label, value, least: None, most: None, floor, aim }
    };
    let (title, axis) = ("Registration", "times a bare mmap and copy: less is better");
    (!list.is_empty()).then(|| plot(title, axis, list.iter().map(row)))
}

pub fn footprints_plot(list: &[Footprint]) -> Option<Plot> {
    let row = |one: &Footprint| {
        let label = one.kind.name().to_owned();
        let resident = |cost: &ObjectBytes| (cost.router + cost.program + cost.segments_resident) / 1024.0;
        let value = one.cost.as_ref().map(resident);
        Row { group: label.clone(), label, value, least: None, most: None, floor: None, aim: None }
    };
    let (title, axis) = ("Memory for each object", "KB resident: less is better");
    (!list.is_empty()).then(|| plot(title, axis, list.iter().map(row)))
}

fn plot(title: &str, axis: &str, rows: impl Iterator<Item = Row>) -> Plot {
    Plot { title: title.to_owned(), axis: axis.to_owned(), rows: rows.collect() }
}

pub fn footprints_table(list: &[Footprint]) -> Table {
    let header = ["object", "count", "router B", "program B", "segments B, reserved", "segments B, resident"];
    let mut table = Table::new("Memory for each object", &header);
    for one in list {
        let mut row = vec![one.kind.name().to_owned(), one.count.to_string()];
        match one.cost {
            Some(cost) => {
                row.extend([cost.router, cost.program, cost.segments, cost.segments_resident].map(figure));
            }
            None => row.extend(["FAILED", "-", "-", "-"].map(str::to_owned)),
        }
        table.row(row);
    }
    table
}
