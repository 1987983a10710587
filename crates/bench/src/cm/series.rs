//! One figure, with or without another beside it of the same run; the median of the runs counts, and of the ratios.
use crate::expectation::Expectation;
use crate::svg::{Plot, Row};
use crate::table::{Table, figure};
use serde::Serialize;

/// Bound of the ratio, or of the figure where nothing stands beside it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bound {
    pub floor: f64,
    pub aim: f64,
}

impl Bound {
    fn less_is_better(&self) -> bool {
        self.aim < self.floor
    }
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Wanted {
    /// Of the bench.
    pub part: &'static str,
    pub what: String,
    /// Of the figure and of what stands beside it.
    pub unit: &'static str,
    /// Name of the figure beside it.
    pub limit: Option<&'static str>,
    /// `None`: it is only reported.
    pub bound: Option<Bound>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Run {
    pub value: f64,
    /// Measured just before.
    pub limit: Option<f64>,
    pub p10: f64,
    pub p99: f64,
}

impl Run {
    /// The ratio, or the figure where nothing stands beside it.
    fn judged(&self) -> f64 {
        self.value / self.limit.unwrap_or(1.0)
    }
}

pub type Series = crate::series::Series<Wanted, Run>;

impl Series {
    fn limit(&self) -> Option<f64> {
        self.wanted.limit.and_then(|_| self.middle(|run| run.limit.unwrap_or(f64::NAN)))
    }

    pub fn judged(&self) -> Option<f64> {
        self.middle(Run::judged)
    }

    pub fn expectation(&self) -> Option<Expectation> {
        let bound = self.wanted.bound?;
        let less = bound.less_is_better();
        let against = self.wanted.limit.map_or_else(|| self.wanted.unit.to_owned(), |limit| format!("times {limit}"));
        Some(Expectation {
            what: format!("{}: {}, {against}", self.wanted.part, self.wanted.what),
            value: self.judged()?,
            at_least: (!less).then_some(bound.floor),
            at_most: less.then_some(bound.floor),
            aim: Some(bound.aim),
        })
    }

    fn verdict(&self) -> &'static str {
        match self.expectation() {
            _ if self.failure.is_some() => "FAILED",
            None => "",
            Some(expectation) if expectation.reached() => "aim reached",
            Some(expectation) if expectation.met() => "met",
            Some(_) => "MISSED",
        }
    }
}

/// The figures that were taken together. `least` and `most` are of the ratio where there is one.
pub fn table(title: &str, series: &[Series]) -> Table {
    let header = [
        "figure",
        "p10",
        "median",
        "p99",
        "unit",
        "beside",
        "its median",
        "ratio",
        "least",
        "most",
        "floor",
        "aim",
        "",
    ];
    let mut table = Table::new(title, &header);
    let or_dash = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), figure);
    for one in series {
        let (spread, limit, bound) = (one.spread(Run::judged), one.limit(), one.wanted.bound);
        table.row(vec![
            one.wanted.what.clone(),
            or_dash(one.middle(|run| run.p10)),
            or_dash(one.middle(|run| run.value)),
            or_dash(one.middle(|run| run.p99)),
            one.wanted.unit.to_owned(),
            one.wanted.limit.unwrap_or("").to_owned(),
            or_dash(limit),
            or_dash(limit.and_then(|_| one.judged())),
            or_dash(spread.map(|(least, _)| least)),
            or_dash(spread.map(|(_, most)| most)),
            or_dash(bound.map(|bound| bound.floor)),
            or_dash(bound.map(|bound| bound.aim)),
            one.verdict().to_owned(),
        ]);
    }
    table
}

/// One plot for each table; of figures beside others the ratios.
pub fn plots(series: &[Series]) -> Vec<Plot> {
    let mut plots: Vec<Plot> = Vec::new();
    for one in series {
        // Numbers of several units have no axis in common.
        let axis = match one.wanted.limit {
            Some(limit) => format!("times {limit}, or within the host"),
            None => one.wanted.unit.to_owned(),
        };
        let unit = if one.wanted.limit.is_some() { String::new() } else { format!(", {}", one.wanted.unit) };
        let title = format!(
            "{}: {}{unit}",
            if one.wanted.part == "cm" { "Connection management" } else { "Programs" },
            one.table
        );
        if plots.last().is_none_or(|plot| plot.title != title) {
            plots.push(Plot { title, axis, rows: Vec::new() });
        }
        let spread = one.spread(Run::judged);
        let row = Row {
            group: one.table.to_owned(),
            label: one.wanted.what.clone(),
            value: one.judged(),
            least: spread.map(|(least, _)| least),
            most: spread.map(|(_, most)| most),
            floor: one.wanted.bound.map(|bound| bound.floor),
            aim: one.wanted.bound.map(|bound| bound.aim),
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

    fn example(limit: Option<&'static str>, bound: Option<(f64, f64)>, runs: &[(f64, Option<f64>)]) -> Series {
        let bound = bound.map(|(floor, aim)| Bound { floor, aim });
        let wanted = Wanted { part: "cm", what: format!("figure beside {limit:?}"), unit: "u", limit, bound };
        let run = |&(value, limit): &(f64, Option<f64>)| Run { value, limit, p10: value, p99: value };
        Series { runs: runs.iter().map(run).collect(), ..Series::new("table", wanted) }
    }

    #[test]
    fn ratios_and_numbers_are_judged() {
        let ratio =
            example(Some("TCP"), Some((0.8, 0.55)), &[(7.0, Some(10.0)), (5.0, Some(10.0)), (30.0, Some(10.0))]);
        assert_eq!((ratio.judged(), ratio.spread(Run::judged), ratio.verdict()), (Some(0.7), Some((0.5, 3.0)), "met"));
        let number = example(None, Some((5000.0, 25_000.0)), &[(4000.0, None)]);
        assert_eq!((number.judged(), number.verdict()), (Some(4000.0), "MISSED"));
        assert_eq!(example(None, Some((5000.0, 25_000.0)), &[(26_000.0, None)]).verdict(), "aim reached");
        let reported = example(None, None, &[(1.0, None)]);
        assert_eq!((reported.expectation(), reported.verdict()), (None, ""));
        let failed = Series { failure: Some("why".into()), ..reported };
        assert_eq!((failed.judged(), failed.verdict()), (None, "FAILED"));
    }

    #[test]
    fn plots_have_one_unit_each() {
        let series =
            [example(None, Some((5.0, 25.0)), &[(10.0, None)]), example(Some("TCP"), None, &[(10.0, Some(5.0))])];
        assert_eq!(plots(&series).len(), 2);
        assert!(table("t", &series).to_string().contains("met"));
    }
}
