//! Costs of a cluster: tables of `scripts/bench-cluster`, which simulates many hosts and measures three of a
//! laboratory.
use crate::journal::Journal;
use crate::table::Table;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

const SCRIPT: &str = "scripts/bench-cluster";

/// Runs the script, shows its tables, and gives its figures. A part of it that fails is noted.
///
/// # Errors
/// The script can't be run, or has written nothing that can be read.
pub fn measure(
    freeflow: &Path,
    simulate: &Path,
    is_quick: bool,
    out: &Path,
    journal: &mut Journal,
) -> Result<Value, String> {
    let text = |error: std::io::Error| format!("{SCRIPT}: {error}");
    let file = out.join("cluster.json");
    fs::create_dir_all(out).map_err(text)?;
    if file.exists() {
        fs::remove_file(&file).map_err(text)?;
    }
    let program = freeflow.canonicalize().map_err(|error| format!("{}: {error}", freeflow.display()))?;
    let dist = program.parent().and_then(Path::parent).ok_or("the freeflow program is in no directory bin")?;
    let mut command = Command::new(SCRIPT);
    command.arg("--simulate").arg(simulate).arg("--out").arg(&file).env("FREEFLOW_DIST", dist);
    if is_quick {
        command.arg("--quick");
    }
    // The script prints its tables as they come; here they go to the results.
    let status = command.status().map_err(text)?;
    let written = fs::read_to_string(&file).map_err(|error| format!("{SCRIPT}: {status}, and no results: {error}"))?;
    let results: Value = serde_json::from_str(&written).map_err(|error| format!("{SCRIPT}: {error}"))?;
    take(&results, journal)?;
    Ok(results["figures"].clone())
}

fn texts(value: &Value) -> Option<Vec<String>> {
    value.as_array()?.iter().map(|text| text.as_str().map(str::to_owned)).collect()
}

fn table_of(value: &Value) -> Option<Table> {
    let header = texts(&value["header"])?;
    let mut table = Table::new(value["title"].as_str()?, &header.iter().map(String::as_str).collect::<Vec<_>>());
    for row in value["rows"].as_array()? {
        table.row(texts(row).filter(|cells| cells.len() == header.len())?);
    }
    Some(table)
}

fn take(results: &Value, journal: &mut Journal) -> Result<(), String> {
    for value in results["tables"].as_array().into_iter().flatten() {
        journal.tables.push(table_of(value).ok_or(format!("{SCRIPT}: no table: {value}"))?);
    }
    for failure in results["failures"].as_array().into_iter().flatten() {
        journal.failures.push(format!("cluster: {}", failure.as_str().unwrap_or_default()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tables_and_failures_of_the_script_are_the_runs() {
        let mut journal = Journal::default();
        let table = json!({"title": "t", "header": ["", "seconds"], "rows": [["move", "0.3"]]});
        take(&json!({"tables": [table], "failures": ["no etcd"]}), &mut journal).expect("tables");
        assert_eq!(journal.tables[0].to_markdown(), "### t\n|  | seconds |\n| --- | ---: |\n| move | 0.3 |\n");
        assert_eq!(journal.failures, ["cluster: no etcd"]);
        let narrow = json!({"title": "t", "header": ["", "seconds"], "rows": [["move"]]});
        assert!(take(&json!({"tables": [narrow]}), &mut journal).is_err());
    }
}
