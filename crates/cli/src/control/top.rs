//! `freeflow top`: what each vNIC and queue pair does, from two looks at what they have done so far.

use super::api::encoded;
use super::api::{Api, BASE};
use super::columns::harmless;
use crate::arguments::Format;
use crate::arguments_control::{Top, TopSort};
use crate::failure::{Context, Failure, Result};
use crate::output;
use freeflow_cluster::HostTraffic;
use freeflow_shm::termination_signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// More pages than this no router has.
const PAGE_COUNT_MAX: usize = 100_000;
/// Lines where the terminal does not say how many it has.
const LINE_COUNT_DEFAULT: u16 = 24;
const CTRL_C: u8 = 3;
const ENTER_SCREEN: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE_SCREEN: &str = "\x1b[?25h\x1b[?1049l";
const HOME_AND_CLEAR: &str = "\x1b[H\x1b[2J";

// ---- what the router says

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Way {
    messages: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Paths {
    direct: Way,
    routed: Way,
    wire: Way,
}

/// Accesses to memory by the slow path.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct SlowPath {
    reason: Option<String>,
    accesses: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default, rename_all = "camelCase")]
struct Limit {
    bits_per_second: Option<u64>,
    messages_per_second: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Limits {
    qp: Limit,
    vnic: Limit,
    tenant: Limit,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
struct Throttled {
    nanoseconds: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Qp {
    qpn: u32,
    path: String,
    messages_sent: u64,
    bytes_sent: u64,
    bytes_received: u64,
    slow_path: SlowPath,
    throttled: Throttled,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Vnic {
    vnic: String,
    title: String,
    tenant: String,
    network: String,
    messages_sent: u64,
    bytes_sent: u64,
    bytes_received: u64,
    /// By reason.
    slow_path: Vec<SlowPath>,
    paths: Paths,
    limits: Limits,
    throttled: Throttled,
    errors: u64,
    drops: u64,
    qps: Vec<Qp>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PageMetadata {
    nanoseconds: u64,
    #[serde(rename = "continue")]
    next: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Page {
    metadata: PageMetadata,
    items: Vec<Vnic>,
}

/// All vNICs, by id, and when each was looked at.
type Look = BTreeMap<String, (u64, Vnic)>;

fn add_page(look: &mut Look, page: Page) -> String {
    for vnic in page.items {
        match look.get_mut(&vnic.vnic) {
            // Its QPs go on.
            Some((_, before)) => before.qps.extend(vnic.qps),
            None => {
                look.insert(vnic.vnic.clone(), (page.metadata.nanoseconds, vnic));
            }
        }
    }
    page.metadata.next
}

fn look(api: &Api, with_qps: bool) -> Result<Look> {
    let (mut look, mut next) = (Look::new(), String::new());
    for _ in 0..PAGE_COUNT_MAX {
        let page = api.get(&format!("{BASE}/live?qps={with_qps}&continue={}", encoded(&next)))?;
        let page: Page = serde_json::from_value(page).context("the router's answer")?;
        next = add_page(&mut look, page);
        if next.is_empty() {
            return Ok(look);
        }
    }
    Err(Failure::new("the router's list of vNICs has no end"))
}

// ---- rates

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct SlowPathRates {
    accesses_per_second: f64,
    bits_per_second: f64,
    /// Of most of the accesses; none: there were none.
    reason: Option<String>,
}

/// A vNIC, or a QP of it.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Rates {
    messages_per_second: f64,
    bits_per_second_out: f64,
    bits_per_second_in: f64,
    /// `direct`, `routed`, `wire`; none: nothing went.
    path: Option<String>,
    slow_path: SlowPathRates,
    limit: Limit,
    held_percent: f64,
}

#[derive(Clone, Debug, Default, Serialize)]
struct QpRow {
    qpn: u32,
    #[serde(flatten)]
    rates: Rates,
}

#[derive(Clone, Debug, Default, Serialize)]
struct Row {
    vnic: String,
    title: String,
    tenant: String,
    network: String,
    #[serde(flatten)]
    rates: Rates,
    /// In this round.
    errors: u64,
    drops: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    qps: Option<Vec<QpRow>>,
}

fn per_second(before: u64, after: u64, seconds: f64) -> f64 {
    after.saturating_sub(before) as f64 / seconds
}

/// The lower of two, where there is one.
fn lower(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    one.into_iter().chain(other).min()
}

fn main_path(before: &Paths, after: &Paths) -> Option<String> {
    let grown = |before: Way, after: Way| {
        (after.bytes.saturating_sub(before.bytes), after.messages.saturating_sub(before.messages))
    };
    let ways = [
        ("direct", grown(before.direct, after.direct)),
        ("routed", grown(before.routed, after.routed)),
        ("wire", grown(before.wire, after.wire)),
    ];
    let most = ways.into_iter().max_by_key(|(_, grown)| *grown)?;
    (most.1 != (0, 0)).then(|| most.0.into())
}

fn slow_path_rates(before: &[SlowPath], after: &[SlowPath], seconds: f64) -> SlowPathRates {
    let grown = |now: &SlowPath| {
        let then = before.iter().find(|then| then.reason == now.reason).cloned().unwrap_or_default();
        SlowPath {
            reason: now.reason.clone(),
            accesses: now.accesses.saturating_sub(then.accesses),
            bytes: now.bytes.saturating_sub(then.bytes),
        }
    };
    let grown: Vec<SlowPath> = after.iter().map(grown).filter(|grown| grown.accesses > 0).collect();
    let sum = |of: fn(&SlowPath) -> u64| grown.iter().map(of).sum::<u64>() as f64 / seconds;
    SlowPathRates {
        accesses_per_second: sum(|grown| grown.accesses),
        bits_per_second: sum(|grown| grown.bytes) * 8.0,
        reason: grown.iter().max_by_key(|grown| grown.accesses).and_then(|grown| grown.reason.clone()),
    }
}

fn held_percent(before: Throttled, after: Throttled, seconds: f64) -> f64 {
    per_second(before.nanoseconds, after.nanoseconds, seconds) / 1e7
}

/// A QP's reason is that of its last access.
fn slow_path_of_qp(before: &SlowPath, after: &SlowPath, seconds: f64) -> SlowPathRates {
    let before = SlowPath { reason: after.reason.clone(), ..before.clone() };
    slow_path_rates(&[before], std::slice::from_ref(after), seconds)
}

fn qp_row(before: &Qp, after: &Qp, limit: Limit, seconds: f64) -> QpRow {
    let rates = Rates {
        messages_per_second: per_second(before.messages_sent, after.messages_sent, seconds),
        bits_per_second_out: per_second(before.bytes_sent, after.bytes_sent, seconds) * 8.0,
        bits_per_second_in: per_second(before.bytes_received, after.bytes_received, seconds) * 8.0,
        path: Some(after.path.clone()),
        slow_path: slow_path_of_qp(&before.slow_path, &after.slow_path, seconds),
        limit,
        held_percent: held_percent(before.throttled, after.throttled, seconds),
    };
    QpRow { qpn: after.qpn, rates }
}

/// A vNIC or QP that the look before lacked counts from zero.
fn rows(before: &Look, after: &Look, begun_ns: u64, with_qps: bool) -> Vec<Row> {
    let nothing = (begun_ns, Vnic::default());
    let row = |(id, (now_ns, now)): (&String, &(u64, Vnic))| {
        let (then_ns, then) = before.get(id).unwrap_or(&nothing);
        let seconds = (now_ns.saturating_sub(*then_ns) as f64 / 1e9).max(1e-3);
        let of_qps: BTreeMap<u32, &Qp> = then.qps.iter().map(|qp| (qp.qpn, qp)).collect();
        let none = Qp::default();
        let qps =
            now.qps.iter().map(|qp| qp_row(of_qps.get(&qp.qpn).copied().unwrap_or(&none), qp, now.limits.qp, seconds));
        let limits = &now.limits;
        let rates = Rates {
            messages_per_second: per_second(then.messages_sent, now.messages_sent, seconds),
            bits_per_second_out: per_second(then.bytes_sent, now.bytes_sent, seconds) * 8.0,
            bits_per_second_in: per_second(then.bytes_received, now.bytes_received, seconds) * 8.0,
            path: main_path(&then.paths, &now.paths),
            slow_path: slow_path_rates(&then.slow_path, &now.slow_path, seconds),
            limit: Limit {
                bits_per_second: lower(limits.vnic.bits_per_second, limits.tenant.bits_per_second),
                messages_per_second: lower(limits.vnic.messages_per_second, limits.tenant.messages_per_second),
            },
            held_percent: held_percent(then.throttled, now.throttled, seconds),
        };
        Row {
            vnic: id.clone(),
            title: now.title.clone(),
            tenant: now.tenant.clone(),
            network: now.network.clone(),
            rates,
            errors: now.errors.saturating_sub(then.errors),
            drops: now.drops.saturating_sub(then.drops),
            qps: with_qps.then(|| qps.collect()),
        }
    };
    after.iter().map(row).collect()
}

/// Averages from one look to the next, for who tells others of them.
#[derive(Default)]
pub struct Sampler(Option<Look>);

impl Sampler {
    /// Since the last time, by the vNICs' names; the first time nothing.
    pub fn take(&mut self, api: &Api) -> Result<BTreeMap<String, HostTraffic>> {
        let after = look(api, false)?;
        let rows = match &self.0 {
            Some(before) => {
                let begun_ns = before.values().map(|(at, _)| *at).min();
                rows(before, &after, begun_ns.unwrap_or_else(freeflow_shm::monotonic_ns), false)
            }
            None => Vec::new(),
        };
        self.0 = Some(after);
        Ok(rows.into_iter().map(|row| (row.vnic.clone(), told(row))).collect())
    }
}

fn told(row: Row) -> HostTraffic {
    let rates = row.rates;
    HostTraffic {
        messages_per_s: rates.messages_per_second.round() as u64,
        bits_out_per_s: rates.bits_per_second_out.round() as u64,
        bits_in_per_s: rates.bits_per_second_in.round() as u64,
        path: rates.path,
        held_percent: rates.held_percent.round() as u32,
        errors: row.errors,
        drops: row.drops,
    }
}

fn weight(rates: &Rates, errors: u64, sort: TopSort) -> f64 {
    match sort {
        TopSort::Rate => rates.bits_per_second_out + rates.bits_per_second_in,
        TopSort::Messages => rates.messages_per_second,
        TopSort::Held => rates.held_percent,
        TopSort::Errors => errors as f64,
        TopSort::Name => 0.0,
    }
}

fn name(row: &Row) -> &str {
    if row.title.is_empty() { &row.vnic } else { &row.title }
}

/// Its name; of a container with several vNICs also the vNIC's id, as `freeflow describe vnic` takes it.
fn distinct_name(row: &Row, rows: &[Row]) -> String {
    let is_shared = rows.iter().any(|other| other.vnic != row.vnic && name(other) == name(row));
    if is_shared && row.vnic != name(row) { format!("{} ({})", name(row), row.vnic) } else { name(row).to_owned() }
}

fn sort(rows: &mut [Row], by: TopSort) {
    rows.sort_by(|one, other| {
        let (a, b) = (weight(&one.rates, one.errors, by), weight(&other.rates, other.errors, by));
        // Ids of a container's vNICs follow the order of its devices.
        b.total_cmp(&a).then_with(|| (name(one), &one.vnic).cmp(&(name(other), &other.vnic)))
    });
    for qps in rows.iter_mut().filter_map(|row| row.qps.as_mut()) {
        qps.sort_by(|one, other| weight(&other.rates, 0, by).total_cmp(&weight(&one.rates, 0, by)));
    }
}

// ---- what is shown

/// `1.2 M`.
pub fn amount(value: f64) -> String {
    let (mut value, mut unit) = (value, 0);
    const UNITS: [&str; 5] = ["", " k", " M", " G", " T"];
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0}") } else { format!("{value:.1}{}", UNITS[unit]) }
}

fn limit_text(limit: &Limit) -> String {
    let bits = limit.bits_per_second.map(|bits| format!("{}bit/s", amount(bits as f64)));
    let messages = limit.messages_per_second.map(|messages| format!("{}msg/s", amount(messages as f64)));
    let parts: Vec<String> = bits.into_iter().chain(messages).collect();
    if parts.is_empty() { "-".into() } else { parts.join(", ") }
}

/// `1.2 Gbit/s: registered on demand`.
fn slow_path_text(slow_path: &SlowPathRates) -> String {
    let rate = || amount(slow_path.bits_per_second);
    slow_path.reason.as_deref().map_or("-".into(), |reason| format!("{}bit/s: {}", rate(), harmless(reason)))
}

fn cells(rates: &Rates) -> Vec<String> {
    vec![
        amount(rates.messages_per_second),
        amount(rates.bits_per_second_out),
        amount(rates.bits_per_second_in),
        rates.path.as_deref().map_or("-".into(), harmless),
        slow_path_text(&rates.slow_path),
        limit_text(&rates.limit),
        format!("{:.0}%", rates.held_percent),
    ]
}

fn table(rows: &[Row]) -> Vec<Vec<String>> {
    let heading = [
        "NAME",
        "NETWORK",
        "TENANT",
        "QP",
        "MSG/S",
        "OUT BIT/S",
        "IN BIT/S",
        "PATH",
        "SLOW PATH",
        "LIMIT",
        "HELD",
        "ERRORS",
        "DROPS",
    ];
    let mut table = vec![heading.map(str::to_owned).to_vec()];
    for row in rows {
        let mut line =
            vec![harmless(&distinct_name(row, rows)), harmless(&row.network), harmless(&row.tenant), "-".into()];
        line.extend(cells(&row.rates));
        line.extend([row.errors.to_string(), row.drops.to_string()]);
        table.push(line);
        for qp in row.qps.iter().flatten() {
            let mut line = vec![String::new(), String::new(), String::new(), qp.qpn.to_string()];
            line.extend(cells(&qp.rates));
            table.push(line);
        }
    }
    table
}

/// The caller's terminal as a screen of our own; it is as it was when this is dropped.
struct Screen(Option<Termios>);

impl Screen {
    fn enter() -> Self {
        // Keys come one by one and are not shown. Without signals from keys: Ctrl-Z would leave the terminal as it is.
        let before = tcgetattr(io::stdin()).ok();
        if let Some(before) = &before {
            let mut keys = before.clone();
            keys.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, &keys);
        }
        let screen = Self(before);
        screen.write(ENTER_SCREEN);
        screen
    }

    fn write(&self, text: &str) {
        let mut out = io::stdout().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    /// As much of the table as fits, below a line that says what it is.
    fn show(&self, title: &str, rows: &[Vec<String>]) {
        let (lines, columns) = tcgetwinsize(io::stdout()).map_or((0, 0), |size| (size.ws_row, size.ws_col));
        let lines = usize::from(if lines == 0 { LINE_COUNT_DEFAULT } else { lines });
        let columns = if columns == 0 { usize::MAX } else { usize::from(columns) };
        let mut text = format!("{HOME_AND_CLEAR}{}", title.chars().take(columns).collect::<String>());
        for line in output::columns(rows).into_iter().take(lines.saturating_sub(2)) {
            text.push_str("\r\n");
            text.extend(line.chars().take(columns));
        }
        self.write(&text);
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.write(LEAVE_SCREEN);
        if let Some(before) = &self.0 {
            let _ = tcsetattr(io::stdin(), OptionalActions::Now, before);
        }
    }
}

/// Waits; true: the caller wants an end.
fn is_over(signals: &OwnedFd, with_keys: bool, until: Instant) -> bool {
    let stdin = io::stdin();
    let mut with_keys = with_keys;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let stdin_fd = stdin.as_fd();
        let mut polled = vec![PollFd::new(signals, PollFlags::IN)];
        if with_keys {
            polled.push(PollFd::from_borrowed_fd(stdin_fd, PollFlags::IN));
        }
        match poll(&mut polled, Some(&timeout)) {
            Ok(0) => return false,
            Err(Errno::INTR) => continue,
            Err(_) => return true,
            Ok(_) if !polled[0].revents().is_empty() => return true,
            Ok(_) => {}
        }
        let mut keys = [0; 16];
        match rustix::io::read(stdin_fd, &mut keys) {
            Ok(0) => with_keys = false,
            Ok(count) if keys[..count].iter().any(|key| matches!(*key, b'q' | b'Q' | CTRL_C)) => return true,
            Ok(_) | Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => with_keys = false,
        }
    }
}

/// One round, as it is shown.
pub struct TopRound {
    pub title: String,
    pub table: Vec<Vec<String>>,
    pub json: serde_json::Value,
}

/// Shows what `round` finds each time, until the caller has seen enough.
pub fn rounds(arguments: &Top, mut round: impl FnMut() -> Result<TopRound>) -> Result<i32> {
    let signals = termination_signals().context("signals")?;
    let is_table = arguments.output.format == Format::Table;
    let on_terminal = is_table && isatty(io::stdout());
    let with_keys = on_terminal && isatty(io::stdin());
    let once = arguments.once.then_some(1);
    let rounds = arguments.rounds.or(once).or((!on_terminal).then_some(1));
    let screen = on_terminal.then(Screen::enter);
    if let Some(screen) = &screen {
        screen.show("freeflow top: counting …", &[]);
    }
    let (mut next, mut done) = (Instant::now(), 0);
    while rounds.is_none_or(|rounds| done < rounds) {
        next = (next + arguments.delay).max(Instant::now());
        if is_over(&signals, with_keys, next) {
            break;
        }
        show(arguments, screen.as_ref(), &round()?);
        done += 1;
    }
    Ok(0)
}

pub fn top(api: &Api, arguments: &Top) -> Result<i32> {
    // A router that is not there says so on the terminal as it was.
    let mut before = look(api, arguments.qps)?;
    rounds(arguments, || {
        let begun_ns = before.values().map(|(at, _)| *at).min();
        let begun_ns =
            begun_ns.unwrap_or_else(|| freeflow_shm::monotonic_ns().saturating_sub(nanoseconds(arguments.delay)));
        let after = look(api, arguments.qps)?;
        let mut rows = rows(&before, &after, begun_ns, arguments.qps);
        sort(&mut rows, arguments.sort);
        before = after;
        let seconds = arguments.delay.as_secs_f64();
        Ok(TopRound {
            title: format!("freeflow top: {} vNICs, every {seconds} s; q ends it", rows.len()),
            table: table(&rows),
            json: serde_json::json!({"vnics": rows}),
        })
    })
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn show(arguments: &Top, screen: Option<&Screen>, round: &TopRound) {
    match (arguments.output.format, screen) {
        // A line each round, for programs that read along.
        (Format::Json, _) => output::line(&round.json),
        (Format::Table, None) => output::table(&round.table),
        (Format::Table, Some(screen)) => screen.show(&round.title, &round.table),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn look_of(at_ns: u64, messages: u64, next: &str) -> (Look, String) {
        let page = json!({
            "metadata": {"nanoseconds": at_ns, "continue": next},
            "items": [{
                "vnic": "a", "title": "one\u{1b}[2J", "tenant": "t", "network": "n",
                "messagesSent": messages, "bytesSent": 1000 * messages, "bytesReceived": 10 * messages,
                "paths": {"routed": {"messages": messages, "bytes": 1000 * messages}},
                "limits": {"vnic": {"bitsPerSecond": 5000}, "tenant": {"bitsPerSecond": 4000, "messagesPerSecond": 7}},
                "throttled": {"waits": 1, "nanoseconds": messages * 1_000_000},
                "errors": messages, "drops": 0,
                "slowPath": [
                    {"reason": "one", "accesses": 3 * messages, "bytes": 5 * messages},
                    {"reason": "another", "accesses": messages, "bytes": 7 * messages},
                    {"reason": "of before", "accesses": 9999, "bytes": 9999},
                ],
                "qps": [{"qpn": 5, "path": "routed", "messagesSent": messages, "bytesSent": 1000 * messages,
                         "slowPath": {"reason": at_ns.to_string(), "accesses": messages, "bytes": messages}}],
            }],
        });
        let mut look = Look::new();
        let next = add_page(&mut look, serde_json::from_value(page).unwrap());
        (look, next)
    }

    #[test]
    fn rates_come_from_two_looks() {
        let (before, after) = (look_of(1_000_000_000, 100, "").0, look_of(3_000_000_000, 300, "").0);
        let all = rows(&before, &after, 0, true);
        let row = &all[0];
        assert_eq!(row.rates.messages_per_second, 100.0);
        let expected = |accesses_per_second, bits_per_second, reason: &str| SlowPathRates {
            accesses_per_second,
            bits_per_second,
            reason: Some(reason.into()),
        };
        assert_eq!(row.rates.slow_path, expected(400.0, 9600.0, "one"));
        assert_eq!(row.qps.as_ref().unwrap()[0].rates.slow_path, expected(100.0, 800.0, "3000000000"));
        assert_eq!(slow_path_text(&row.rates.slow_path), "9.6 kbit/s: one");
        assert_eq!((row.rates.bits_per_second_out, row.rates.bits_per_second_in), (800_000.0, 8_000.0));
        assert_eq!(row.rates.path.as_deref(), Some("routed"));
        assert_eq!(row.rates.limit, Limit { bits_per_second: Some(4000), messages_per_second: Some(7) });
        assert_eq!((row.rates.held_percent, row.errors), (10.0, 200));
        assert_eq!(row.qps.as_ref().unwrap()[0].rates.bits_per_second_out, 800_000.0);
        let idle = rows(&after, &after, 0, false);
        assert_eq!((idle[0].rates.messages_per_second, idle[0].rates.path.clone()), (0.0, None));
        assert_eq!(idle[0].rates.slow_path, SlowPathRates::default());
        // One that is new, and one that went.
        assert_eq!(rows(&Look::new(), &after, 2_000_000_000, false)[0].rates.messages_per_second, 300.0);
        assert!(rows(&before, &Look::new(), 0, false).is_empty());
        let told = told(rows(&before, &after, 0, false).remove(0));
        let expected = (100, 800_000, 8_000, 10, 200, Some("routed"));
        let of = (told.messages_per_s, told.bits_out_per_s, told.bits_in_per_s, told.held_percent, told.errors);
        assert_eq!((of.0, of.1, of.2, of.3, of.4, told.path.as_deref()), expected);
    }

    #[test]
    fn pages_of_one_vnic_are_joined_and_names_are_harmless() {
        let (mut look, next) = look_of(1, 1, "a:5");
        assert_eq!(next, "a:5");
        let more = json!({"metadata": {"continue": ""}, "items": [{"vnic": "a", "qps": [{"qpn": 9}]}]});
        assert_eq!(add_page(&mut look, serde_json::from_value(more).unwrap()), "");
        assert_eq!(look["a"].1.qps.iter().map(|qp| qp.qpn).collect::<Vec<_>>(), [5, 9]);
        let table = table(&rows(&Look::new(), &look, 0, true));
        assert!(table.iter().flatten().all(|cell| !cell.contains('\u{1b}')), "{table:?}");
        assert_eq!(table.len(), 4);
    }

    #[test]
    fn rows_are_sorted() {
        let row = |title: &str, rate: f64, messages: f64| Row {
            title: title.into(),
            rates: Rates { bits_per_second_out: rate, messages_per_second: messages, ..Rates::default() },
            ..Row::default()
        };
        let mut all = vec![row("b", 1.0, 9.0), row("a", 1.0, 3.0), row("c", 7.0, 5.0)];
        for (by, expected) in [(TopSort::Rate, "cab"), (TopSort::Messages, "bca"), (TopSort::Name, "abc")] {
            sort(&mut all, by);
            assert_eq!(all.iter().map(|row| row.title.as_str()).collect::<String>(), expected);
        }
        let vnic = |id: &str, title: &str| Row { vnic: id.into(), ..row(title, 0.0, 0.0) };
        let mut all = vec![vnic("c.1", "c"), vnic("9", "two"), vnic("c", "c"), vnic("5", "two"), vnic("db", "")];
        sort(&mut all, TopSort::Rate);
        let names: Vec<String> = all.iter().map(|one| distinct_name(one, &all)).collect();
        assert_eq!(names, ["c", "c (c.1)", "db", "two (5)", "two (9)"]);
        assert_eq!((amount(12.4), amount(1_250_000.0)), ("12".into(), "1.2 M".into()));
    }
}
