//! The results page (`docs/performance/RESULTS.md`): the tables of one run, put between two markers
//! of a Markdown file. What stands outside of the markers is left as it is.
use crate::report::{Report, machine, unix_time_s};
use serde_json::Value;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

const BEGIN: &str = "<!-- bench: begin -->";
const END: &str = "<!-- bench: end -->";

/// # Errors
/// When the file can't be read, or has not one pair of markers.
pub fn check(file: &Path) -> io::Result<()> {
    replace(&fs::read_to_string(file)?, "").map(drop)
}

/// Replaces what stands between the markers of `file`.
///
/// # Errors
/// Those of [`check`], and when the file can't be written.
pub fn write(file: &Path, report: &Report) -> io::Result<()> {
    let text = replace(&fs::read_to_string(file)?, &section(report, unix_time_s(), &machine()))?;
    fs::write(file, text)
}

fn replace(text: &str, section: &str) -> io::Result<String> {
    let wrong = || io::Error::other(format!("the file needs the markers {BEGIN} and {END}, once and in this order"));
    let (before, rest) = text.split_once(BEGIN).ok_or_else(wrong)?;
    let (_, after) = rest.split_once(END).ok_or_else(wrong)?;
    if after.contains(BEGIN) || after.contains(END) {
        return Err(wrong());
    }
    Ok(format!("{before}{BEGIN}\n{section}{END}{after}"))
}

fn section(report: &Report, unix_time_s: u64, machine: &Value) -> String {
    let mut text = String::new();
    let word = |name: &str| machine[name].as_str().unwrap_or("?").to_owned();
    let _ = writeln!(
        text,
        "Made by `scripts/bench{}` on {} ({}, family {}, model {}, {} processors, Linux {}).\n",
        if report.quick { " --quick" } else { "" },
        date(unix_time_s),
        word("cpu"),
        word("cpu_family"),
        word("cpu_model"),
        machine["cpus"],
        word("kernel"),
    );
    for table in &report.journal.tables {
        let _ = writeln!(text, "{}", table.to_markdown());
    }
    let handoffs =
        report.journal.handoffs.iter().map(|(_, handoff)| format!("{:.0}", handoff.summary.p50)).collect::<Vec<_>>();
    if !handoffs.is_empty() {
        let _ = writeln!(text, "Hand-off of a cache line before and after each table, ns: {}.\n", handoffs.join(", "));
    }
    for failure in &report.journal.failures {
        let _ = writeln!(text, "- failed: {failure}");
    }
    text
}

/// Year, month and day (UTC) of the proleptic Gregorian calendar (Howard Hinnant's `civil_from_days`).
fn date(unix_time_s: u64) -> String {
    let days = unix_time_s / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let (month, day) =
        (if shifted < 10 { shifted + 3 } else { shifted - 9 }, day_of_year - (153 * shifted + 2) / 5 + 1);
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Journal;
    use crate::table::Table;
    use serde_json::json;

    #[test]
    fn only_what_is_between_the_markers_is_replaced() {
        let text = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        let new = replace(&text, "new\n").expect("replaced");
        assert_eq!(new, format!("before\n{BEGIN}\nnew\n{END}\nafter\n"));
        assert_eq!(replace(&new, "new\n").expect("replaced"), new);
        for wrong in ["", BEGIN, END, &format!("{END}{BEGIN}"), &format!("{text}{text}")] {
            assert!(replace(wrong, "new\n").is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_run_says_when_where_and_what_failed() {
        let mut table = Table::new("Limit: copying", &["limit", "p50"]);
        table.row(vec!["one copy".into(), "9.1".into()]);
        let journal = Journal { tables: vec![table], failures: vec!["wire: no lab".into()], ..Journal::default() };
        let report = Report { quick: true, journal, ..Report::default() };
        let machine = json!({ "cpu": "CPU", "cpu_family": "26", "cpu_model": "2", "cpus": 2, "kernel": "6.18.0" });
        assert_eq!(
            section(&report, 1_764_115_200, &machine),
            "Made by `scripts/bench --quick` on 2025-11-26 (CPU, family 26, model 2, 2 processors, Linux 6.18.0).\n\n\
             ### Limit: copying\n| limit | p50 |\n| --- | ---: |\n| one copy | 9.1 |\n\n- failed: wire: no lab\n"
        );
    }

    #[test]
    fn days_have_their_dates() {
        for (time, day) in
            [(0, "1970-01-01"), (951_782_399, "2000-02-28"), (951_782_400, "2000-02-29"), (4_107_542_400, "2100-03-01")]
        {
            assert_eq!(date(time), day);
        }
    }

    #[test]
    fn the_page_of_the_repository_has_its_markers() {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/performance/RESULTS.md");
        check(&page).expect("markers");
    }
}
