//! `freeflow get -w`: what there is, then each change, until the caller or the router ends it.

use super::api::encoded;
use super::api::{Answer, Api, BASE, Trouble};
use super::columns;
use super::kinds::Kind;
use super::{items_of, list};
use crate::arguments_control::{Format, Get};
use crate::failure::{Failure, Result};
use crate::output;
use freeflow_manifest::to_yaml;
use serde_json::Value;

/// How often in a row the router may say that it has forgotten where we were.
const EXPIRED_COUNT_MAX: u32 = 8;

pub fn watch(api: &Api, kind: Kind, arguments: &Get) -> Result<()> {
    let mut printer = Printer::new(kind, arguments.output.format);
    let labels = arguments.labels.as_deref();
    let is_wanted = |object: &Value| arguments.name.as_deref().is_none_or(|name| object["metadata"]["name"] == name);
    for _ in 0..EXPIRED_COUNT_MAX {
        let present = list(api, kind, labels)?;
        let objects: Vec<Value> = items_of(&present)?.into_iter().filter(|object| is_wanted(object)).collect();
        printer.begin(&objects);
        let selector = labels.map(|labels| format!("&labelSelector={}", encoded(labels))).unwrap_or_default();
        let since = columns::text(&present["metadata"]["resourceVersion"]);
        let path = format!("{BASE}/{}?watch=true&resourceVersion={}{selector}", kind.plural, encoded(&since));
        let event = |event: Value| -> Answer<bool> {
            match event["type"].as_str() {
                Some("ERROR") => {
                    let code = event["object"]["code"].as_u64().and_then(|code| u16::try_from(code).ok());
                    let code = code.unwrap_or(if event["object"]["reason"] == "Expired" { 410 } else { 500 });
                    let refusal = serde_json::from_value(event["object"].clone()).unwrap_or_default();
                    return Err(Trouble::Refused(Box::new(super::Refusal { code, ..refusal })));
                }
                Some(what @ ("ADDED" | "MODIFIED" | "DELETED")) if is_wanted(&event["object"]) => {
                    printer.change(what, &event["object"], &event);
                }
                // Bookmarks, and what later routers may say.
                _ => {}
            }
            Ok(true)
        };
        match api.watch(&path, event) {
            // Too much happened while we were not looking: begin again.
            Err(Trouble::Refused(refusal)) if refusal.code == 410 => {}
            Err(trouble) => return Err(trouble.into()),
            Ok(()) => return Err(Failure::new("the router ended the watch")),
        }
    }
    Err(Failure::new("the router forgets changes faster than this command reads them"))
}

/// Prints rows in columns that keep their widths.
struct Printer {
    kind: Kind,
    format: Format,
    widths: Vec<usize>,
}

impl Printer {
    fn new(kind: Kind, format: Format) -> Self {
        Self { kind, format, widths: Vec::new() }
    }

    fn row(&self, what: &str, object: &Value) -> Vec<String> {
        let mut row = vec![what.to_string()];
        row.extend(columns::row(self.kind, object, self.format == Format::Wide));
        row
    }

    fn begin(&mut self, objects: &[Value]) {
        if !self.format.is_text() {
            for object in objects {
                self.change("ADDED", object, &serde_json::json!({"type": "ADDED", "object": object}));
            }
            return;
        }
        let mut headings = vec!["EVENT".to_string()];
        headings.extend(columns::headings(self.kind, self.format == Format::Wide));
        let mut rows = vec![headings];
        rows.extend(objects.iter().map(|object| self.row("ADDED", object)));
        // Room for the longest word of all.
        let event_width = "MODIFIED".len();
        self.widths = (0..rows[0].len())
            .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .enumerate()
            .map(|(column, width)| if column == 0 { event_width } else { width })
            .collect();
        for row in &rows {
            self.print(row);
        }
    }

    fn print(&self, row: &[String]) {
        let cells: Vec<String> = row.iter().zip(&self.widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        output::line(cells.join("   ").trim_end());
    }

    fn change(&self, what: &str, object: &Value, event: &Value) {
        match self.format {
            Format::Json => output::line(event),
            Format::Yaml => output::line(format!("---\n{}", to_yaml(event).trim_end())),
            Format::Table | Format::Wide => self.print(&self.row(what, object)),
        }
    }
}
