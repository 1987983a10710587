//! One figure beside what was declared, measured several times: the median of the ratios counts.
use crate::expectation::Expectation;
use crate::svg::{Plot, Row};
use crate::table::{Table, figure};
use serde::Serialize;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Wanted {
    pub what: String,
    /// Name of the figure that it is compared with.
    pub limit: &'static str,
    /// Of the figure and of its limit.
    pub unit: &'static str,
    /// Of the ratio.
    pub at_least: Option<f64>,
    pub at_most: Option<f64>,
}

impl Wanted {
    /// The ratio is one, give or take.
    pub fn within(what: String, limit: &'static str, tolerance: f64) -> Self {
        Self { what, limit, unit: "Gb/s", at_least: Some(1.0 - tolerance), at_most: Some(1.0 + tolerance) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Run {
    pub value: f64,
    pub limit: f64,
}

impl Run {
    fn ratio(&self) -> f64 {
        self.value / self.limit
    }
}

pub type Series = crate::series::Series<Wanted, Run>;

impl Series {
    pub fn ratio(&self) -> Option<f64> {
        self.middle(Run::ratio)
    }

    /// `None` where nothing is wanted.
    pub fn expectation(&self) -> Option<Expectation> {
        let Wanted { what, limit, at_least, at_most, .. } = &self.wanted;
        let one = Expectation {
            what: format!("qos: {what}, of {limit}"),
            value: self.ratio()?,
            at_least: *at_least,
            at_most: *at_most,
            aim: None,
        };
        Some(one).filter(|one| one.at_least.is_some() || one.at_most.is_some())
    }

    fn verdict(&self) -> &'static str {
        match (&self.failure, self.expectation()) {
            (Some(_), _) => "FAILED",
            (None, None) => "",
            (None, Some(expectation)) if expectation.met() => "met",
            (None, Some(_)) => "MISSED",
        }
    }
}

/// Four decimals: what is wanted is within a hundredth.
fn exact(value: f64) -> String {
    format!("{value:.4}")
}

pub fn table(title: &str, series: &[Series]) -> Table {
    let header = ["figure", "median", "unit", "limit", "its median", "ratio", "least", "most", "floor", "ceiling", ""];
    let mut table = Table::new(title, &header);
    let or_dash = |value: Option<f64>, shown: fn(f64) -> String| value.map_or_else(|| "-".to_owned(), shown);
    for one in series {
        let (least, most) = one.spread(Run::ratio).unzip();
        table.row(vec![
            one.wanted.what.clone(),
            or_dash(one.middle(|run| run.value), exact),
            one.wanted.unit.to_owned(),
            one.wanted.limit.to_owned(),
            or_dash(one.middle(|run| run.limit), exact),
            or_dash(one.ratio(), exact),
            or_dash(least, exact),
            or_dash(most, exact),
            or_dash(one.wanted.at_least, figure),
            or_dash(one.wanted.at_most, figure),
            one.verdict().to_owned(),
        ]);
    }
    table
}

/// One plot for each table.
pub fn plots(series: &[Series]) -> Vec<Plot> {
    let mut plots: Vec<Plot> = Vec::new();
    for one in series {
        let title = format!("In control: {}", one.table);
        if plots.last().is_none_or(|plot| plot.title != title) {
            plots.push(Plot { title, axis: "measured, of what is declared".to_owned(), rows: Vec::new() });
        }
        let (least, most) = one.spread(Run::ratio).unzip();
        let row = Row {
            group: one.table.to_owned(),
            label: one.wanted.what.clone(),
            value: one.ratio(),
            least,
            most,
            floor: one.wanted.at_least,
            aim: one.wanted.at_most,
        };
        if let Some(plot) = plots.last_mut() {
            plot.rows.push(row);
        }
    }
    plots
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example(values: &[f64]) -> Series {
        let wanted = Wanted::within("one flow".to_owned(), "its cap", 0.01);
        let runs = values.iter().map(|&value| Run { value, limit: 2.0 }).collect();
        Series { runs, ..Series::new("caps", wanted) }
    }

    #[test]
    fn a_ratio_is_held_from_both_sides() {
        assert_eq!(example(&[1.99, 2.01, 3.0]).verdict(), "met");
        assert_eq!(example(&[2.03, 2.01, 2.03]).verdict(), "MISSED");
        assert_eq!(example(&[1.97]).verdict(), "MISSED");
        assert_eq!(example(&[2.03, 2.01, 2.03]).spread(Run::ratio), Some((1.005, 1.015)));
        let failed = Series { failure: Some("why".into()), ..example(&[2.0]) };
        assert_eq!((failed.ratio(), failed.verdict()), (None, "FAILED"));
        assert_eq!(example(&[]).expectation(), None);
    }

    #[test]
    fn what_is_only_shown_is_not_expected() {
        let mut series = example(&[1.0]);
        (series.wanted.at_least, series.wanted.at_most) = (None, None);
        assert_eq!((series.expectation(), series.verdict()), (None, ""));
        assert!(table("t", &[series]).to_string().contains("0.5000"));
    }
}
