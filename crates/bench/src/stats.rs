//! Order statistics of samples, which are also their machine-readable form.
//!
//! Percentiles are nearest-rank: always a value that was measured, never one in between.
use serde::{Deserialize, Serialize};

/// Summary of a set of samples, for the tables. The unit is the samples' own.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub count: usize,
    pub mean: f64,
    pub min: f64,
    pub p10: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Summary {
    /// Sorts the samples in place. `None` when there are none, or one is not a number.
    pub fn of(samples: &mut [f64]) -> Option<Self> {
        if samples.is_empty() || samples.iter().any(|sample| !sample.is_finite()) {
            return None;
        }
        samples.sort_unstable_by(f64::total_cmp);
        Some(Self {
            count: samples.len(),
            mean: samples.iter().sum::<f64>() / samples.len() as f64,
            min: samples[0],
            p10: percentile(samples, 10.0),
            p50: percentile(samples, 50.0),
            p90: percentile(samples, 90.0),
            p99: percentile(samples, 99.0),
            max: samples[samples.len() - 1],
        })
    }

    /// Every figure multiplied: a change of unit.
    pub fn scaled(self, factor: f64) -> Self {
        Self {
            count: self.count,
            mean: self.mean * factor,
            min: self.min * factor,
            p10: self.p10 * factor,
            p50: self.p50 * factor,
            p90: self.p90 * factor,
            p99: self.p99 * factor,
            max: self.max * factor,
        }
    }
}

/// The smallest sample such that at least `percent` per cent of all samples are not above it.
///
/// # Panics
/// When `sorted` is empty.
pub fn percentile(sorted: &[f64], percent: f64) -> f64 {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

/// The middle sample, the lower one of two. `None` when there are none.
pub fn median(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    Summary::of(&mut sorted).map(|summary| summary.p50)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measured_values() {
        let sorted: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&sorted, 10.0), 10.0);
        assert_eq!(percentile(&sorted, 50.0), 50.0);
        assert_eq!(percentile(&sorted, 99.0), 99.0);
        assert_eq!(percentile(&sorted, 100.0), 100.0);
        assert_eq!(percentile(&sorted, 0.0), 1.0);
        assert_eq!(percentile(&[7.0], 1.0), 7.0);
        assert_eq!(percentile(&[7.0], 99.0), 7.0);
        assert_eq!(percentile(&[1.0, 2.0, 3.0], 99.0), 3.0);
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.0));
        assert_eq!(median(&[1.0, f64::NAN]), None);
        assert_eq!(median(&[1.0, f64::INFINITY]), None);
    }

    #[test]
    fn a_summary_orders_its_figures() {
        let mut samples = [9.0, 1.0, 5.0, 3.0, 7.0];
        let summary = Summary::of(&mut samples).expect("samples");
        assert_eq!((summary.count, summary.min, summary.p50, summary.max), (5, 1.0, 5.0, 9.0));
        assert_eq!(summary.mean, 5.0);
        assert!(summary.p10 <= summary.p50 && summary.p50 <= summary.p90 && summary.p90 <= summary.p99);
        assert_eq!(summary.scaled(2.0).p50, 10.0);
        assert_eq!(summary.scaled(2.0).count, 5);
        assert_eq!(Summary::of(&mut []), None);
    }

    #[test]
    fn a_summary_survives_json() {
        let summary = Summary::of(&mut [1.5, 2.5, 1e9, 0.001]).expect("samples");
        let text = serde_json::to_string(&summary).expect("JSON");
        assert_eq!(serde_json::from_str::<Summary>(&text).expect("a summary"), summary);
        assert!(serde_json::from_str::<Summary>("{ \"count\": 1 }").is_err());
        assert!(serde_json::from_str::<Summary>("null").is_err());
    }
}
