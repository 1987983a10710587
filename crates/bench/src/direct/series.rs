//! One figure and its limit, measured in turns several times: the median of the ratios counts, each
//! to the limit just before it, because where the cores are may change between the runs.
use crate::expectation::Expectation;
use crate::stats::{Summary, median};
use crate::svg::{Plot, Row};
use crate::table::{Table, figure};
use serde::Serialize;

/// A figure, its bound, and the wanted value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Wanted {
    /// Figures of one group are one thing in several sizes.
    pub group: &'static str,
    pub what: String,
    pub limit: &'static str,
    /// Of the figure and of its limit.
    pub unit: &'static str,
    /// Below it (above, where less is better) something is wrong.
    pub floor: f64,
    pub aim: f64,
}

impl Wanted {
    /// Times of a duration: less is better.
    pub fn less_is_better(&self) -> bool {
        self.aim < self.floor
    }
}

/// One measurement, and the limit taken just before it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Run {
    pub value: f64,
    pub limit: f64,
    /// Within the measurement, where its program says so.
    pub p10: Option<f64>,
    pub p99: Option<f64>,
}

impl Run {
    fn ratio(&self) -> f64 {
        self.value / self.limit
    }
}

/// Result of one measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Value {
    pub value: f64,
    pub p10: Option<f64>,
    pub p99: Option<f64>,
}

impl Value {
    pub fn of(value: f64) -> Self {
        Self { value, p10: None, p99: None }
    }
}

impl From<Summary> for Value {
    fn from(summary: Summary) -> Self {
        Self { value: summary.p50, p10: Some(summary.p10), p99: Some(summary.p99) }
    }
}

pub type Series = crate::series::Series<Wanted, Run>;

impl Series {
    pub fn ratio(&self) -> Option<f64> {
        self.middle(Run::ratio)
    }

    pub fn expectation(&self) -> Option<Expectation> {
        let Wanted { floor, aim, .. } = self.wanted;
        let less = self.wanted.less_is_better();
        Some(Expectation {
            what: format!(
                "direct: {}, {} {}",
                self.wanted.what,
                if less { "times" } else { "share of" },
                self.wanted.limit
            ),
            value: self.ratio()?,
            at_least: (!less).then_some(floor),
            at_most: less.then_some(floor),
            aim: Some(aim),
        })
    }

    fn verdict(&self) -> &'static str {
        match self.expectation() {
            None => "FAILED",
            Some(expectation) if expectation.reached() => "aim reached",
            Some(expectation) if expectation.met() => "met",
            Some(_) => "MISSED",
        }
    }
}

/// The figures that were taken together.
pub fn table(title: &str, series: &[Series]) -> Table {
    let header =
        ["figure", "p10", "median", "p99", "unit", "limit", "its median", "ratio", "least", "most", "floor", "aim", ""];
    let mut table = Table::new(title, &header);
    let or_dash = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), figure);
    for one in series {
        let inner = |of: fn(&Run) -> Option<f64>| median(&one.runs.iter().filter_map(of).collect::<Vec<_>>());
        let spread = one.spread(Run::ratio);
        table.row(vec![
            one.wanted.what.clone(),
            or_dash(inner(|run| run.p10)),
            or_dash(one.middle(|run| run.value)),
            or_dash(inner(|run| run.p99)),
            one.wanted.unit.to_owned(),
            one.wanted.limit.to_owned(),
            or_dash(one.middle(|run| run.limit)),
            or_dash(one.ratio()),
            or_dash(spread.map(|(least, _)| least)),
            or_dash(spread.map(|(_, most)| most)),
            figure(one.wanted.floor),
            figure(one.wanted.aim),
            one.verdict().to_owned(),
        ]);
    }
    table
}

/// One plot for each table.
pub fn plots(series: &[Series]) -> Vec<Plot> {
    let mut plots: Vec<Plot> = Vec::new();
    for one in series {
        let title = format!("Within a host, direct: {}", one.table);
        if plots.last().is_none_or(|plot| plot.title != title) {
            let less = one.wanted.less_is_better();
            let axis = if less { "times the limit: less is better" } else { "share of the limit: more is better" };
            plots.push(Plot { title, axis: axis.to_owned(), rows: Vec::new() });
        }
        let spread = one.spread(Run::ratio);
        let row = Row {
            group: one.wanted.group.to_owned(),
            label: one.wanted.what.clone(),
            value: one.ratio(),
            least: spread.map(|(least, _)| least),
            most: spread.map(|(_, most)| most),
            floor: Some(one.wanted.floor),
            aim: Some(one.wanted.aim),
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

    fn example(table: &'static str, floor: f64, aim: f64, runs: &[(f64, f64)]) -> Series {
        let wanted = Wanted { group: "g", what: format!("figure of {table}"), limit: "limit", unit: "u", floor, aim };
        let run = |&(value, limit): &(f64, f64)| Run { value, limit, p10: None, p99: Some(value) };
        Series { runs: runs.iter().map(run).collect(), ..Series::new(table, wanted) }
    }

    #[test]
    fn the_median_of_the_ratios_counts_and_their_spread_shows() {
        let series = example("a", 4.0, 2.5, &[(300.0, 100.0), (200.0, 50.0), (900.0, 100.0)]);
        assert_eq!((series.ratio(), series.spread(Run::ratio)), (Some(4.0), Some((3.0, 9.0))));
        assert_eq!(series.verdict(), "met");
        assert_eq!(example("a", 0.5, 0.8, &[(8.5, 10.0)]).verdict(), "aim reached");
        assert_eq!(example("a", 0.5, 0.8, &[(4.0, 10.0)]).verdict(), "MISSED");
        let failed = Series { failure: Some("why".into()), ..series };
        assert_eq!((failed.ratio(), failed.verdict()), (None, "FAILED"));
        assert_eq!(example("a", 0.5, 0.8, &[]).expectation(), None);
    }

    #[test]
    fn each_table_has_a_plot_with_all_its_rows() {
        let series = [
            example("latency", 4.0, 2.5, &[(300.0, 100.0)]),
            example("latency", 6.0, 4.0, &[]),
            example("streams", 0.5, 0.8, &[(8.5, 10.0)]),
        ];
        let plots = plots(&series);
        assert_eq!(plots.iter().map(|plot| plot.rows.len()).collect::<Vec<_>>(), [2, 1]);
        for (plot, series) in plots.iter().zip([&series[..2], &series[2..]]) {
            let svg = plot.to_svg();
            assert!(series.iter().all(|one| svg.contains(&one.wanted.what)));
            assert!(table("t", series).to_string().contains(&series[0].wanted.what));
        }
    }
}
