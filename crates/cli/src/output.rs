//! Output of the command. A reader that went away (`freeflow ps | head -1`) is no error.

use serde::Serialize;
use std::io::Write;

pub fn line(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// One line on standard error. Not `eprintln!`: it panics when that is gone.
pub fn complaint(what: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "freeflow: {what}");
}

pub fn json(value: &impl Serialize) {
    line(serde_json::to_string_pretty(value).expect("what is printed is encodable"));
}

/// Rows in columns as wide as their widest cell; the first row is the heading.
pub fn table(rows: &[Vec<String>]) {
    columns(rows).into_iter().for_each(line);
}

/// The lines of a table.
pub fn columns(rows: &[Vec<String>]) -> Vec<String> {
    let column_count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..column_count).map(|column| width(column).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        cells.join("   ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// `3.4 GB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["B", "kB", "MB", "GB", "TB", "PB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// `3 minutes`.
pub fn duration(seconds: u64) -> String {
    let (count, unit) = match seconds {
        0..60 => (seconds, "second"),
        60..3600 => (seconds / 60, "minute"),
        3600..86_400 => (seconds / 3600, "hour"),
        _ => (seconds / 86_400, "day"),
    };
    format!("{count} {unit}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(65_536), "65.5 kB");
        assert_eq!(bytes(999_999), "1.0 MB");
        assert_eq!(duration(1), "1 second");
        assert_eq!(duration(7300), "2 hours");
    }
}
