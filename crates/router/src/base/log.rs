//! Log lines on stderr: time, level, what happened, `key=value`. Never from the data path. Where
//! stderr is `router.log`, that is bounded: see [`crate::base::log_file`].
use freeflow_verbs::civil_date;
use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes one line. Values with blanks, quotes or control characters are quoted and escaped: they
/// may come from a tenant.
pub fn write(level: &str, what: &str, pairs: &[(&str, &dyn std::fmt::Display)]) {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut line = format!("{} {level:5} {what}", timestamp(since_epoch.as_secs(), since_epoch.subsec_millis()));
    for (key, value) in pairs {
        let value = value.to_string();
        let plain = !value.is_empty() && value.chars().all(|c| c.is_ascii_graphic() && c != '"' && c != '\\');
        let _ = if plain { write!(line, " {key}={value}") } else { write!(line, " {key}={value:?}") };
    }
    line.push('\n');
    crate::base::log_file::write(line.as_bytes());
}

/// Lines that a tenant can cause as often as it likes: so many at once, then one a second. The log
/// is on a file system that all share.
pub struct Lines {
    left: u64,
    renewed_ns: u64,
    left_out: u64,
}

const LINES_AT_ONCE: u64 = 100;
const LINE_INTERVAL_NS: u64 = 1_000_000_000;

impl Default for Lines {
    fn default() -> Self {
        Self { left: LINES_AT_ONCE, renewed_ns: 0, left_out: 0 }
    }
}

impl Lines {
    /// `None`: not now. Else how many were left out since the last one.
    pub fn take(&mut self, now_ns: u64) -> Option<u64> {
        let earned = now_ns.saturating_sub(self.renewed_ns) / LINE_INTERVAL_NS;
        if earned > 0 {
            self.left = LINES_AT_ONCE.min(self.left.saturating_add(earned));
            self.renewed_ns = now_ns;
        }
        if self.left == 0 {
            self.left_out += 1;
            return None;
        }
        self.left -= 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

macro_rules! info {
    ($what:literal $(, $key:ident = $value:expr)* $(,)?) => {
        $crate::base::log::write("info", $what, &[$((stringify!($key), &$value as &dyn std::fmt::Display)),*])
    };
}

macro_rules! warning {
    ($what:literal $(, $key:ident = $value:expr)* $(,)?) => {
        $crate::base::log::write("warn", $what, &[$((stringify!($key), &$value as &dyn std::fmt::Display)),*])
    };
}

pub(crate) use {info, warning};

/// RFC 3339, UTC.
pub fn timestamp(seconds: u64, millis: u32) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

#[cfg(test)]
mod tests {
    #[test]
    fn dates_are_right() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000Z"),
            (1_735_689_600, "2025-01-01T00:00:00.000Z"),
        ] {
            assert_eq!(super::timestamp(seconds, 0), text);
        }
    }
}
