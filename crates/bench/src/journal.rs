//! Output of a run while it measures: hand-offs, tables and failures, in order.
use crate::limits::handoff::Handoff;
use crate::table::{Table, figure};
use std::io;

#[derive(Default)]
pub struct Journal {
    /// Each with the word for when it was measured.
    pub handoffs: Vec<(String, Handoff)>,
    pub failures: Vec<String>,
    /// All that was shown, in its order.
    pub tables: Vec<Table>,
}

impl Journal {
    /// Measures and prints the hand-off.
    pub fn handoff(&mut self, when: &str) -> io::Result<Handoff> {
        let handoff = Handoff::measure()?;
        let ns = handoff.summary;
        println!(
            "  hand-off {when}: {} ns one way (p10 {}, p99 {}): {}",
            figure(ns.p50),
            figure(ns.p10),
            figure(ns.p99),
            handoff.distance.name()
        );
        self.handoffs.push((when.to_owned(), handoff));
        Ok(handoff)
    }

    /// Prints a table, and keeps it for [`crate::results`].
    pub fn show(&mut self, table: Table) {
        println!("{table}");
        self.tables.push(table);
    }

    pub fn fail(&mut self, what: String) {
        eprintln!("freeflow-bench: {what}");
        self.failures.push(what);
    }
}
