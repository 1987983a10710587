//! One figure, measured several times beside what is wanted of it.
use crate::stats::{Summary, median};
use serde::Serialize;

/// `W`: what is wanted. `R`: what a measurement gave.
#[derive(Clone, Debug, Serialize)]
pub struct Series<W, R> {
    pub table: &'static str,
    pub wanted: W,
    pub runs: Vec<R>,
    pub failure: Option<String>,
}

impl<W, R> Series<W, R> {
    pub fn new(table: &'static str, wanted: W) -> Self {
        Self { table, wanted, runs: Vec::new(), failure: None }
    }

    /// The median over the runs; `None` when one failed.
    pub fn middle(&self, of: impl Fn(&R) -> f64) -> Option<f64> {
        median(&self.runs.iter().map(of).collect::<Vec<_>>()).filter(|_| self.failure.is_none())
    }

    /// Least and most over the runs; `None` when one failed.
    pub fn spread(&self, of: impl Fn(&R) -> f64) -> Option<(f64, f64)> {
        let mut all: Vec<f64> = self.runs.iter().map(of).collect();
        let summary = Summary::of(&mut all).filter(|_| self.failure.is_none())?;
        Some((summary.min, summary.max))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_leaves_no_figures() {
        let mut series = Series { runs: vec![3.0, 1.0, 2.0], ..Series::new("table", ()) };
        assert_eq!((series.middle(|run| *run), series.spread(|run| *run)), (Some(2.0), Some((1.0, 3.0))));
        series.failure = Some("why".into());
        assert_eq!((series.middle(|run| *run), series.spread(|run| *run)), (None, None));
        assert_eq!(Series::<(), f64>::new("table", ()).middle(|run| *run), None);
    }
}
