//! Bounds and aims of figures.
use serde::Serialize;

/// Something that ought to hold on two cores, and whether it did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Expectation {
    pub what: String,
    pub value: f64,
    pub at_least: Option<f64>,
    pub at_most: Option<f64>,
    /// A wanted value better than the bound.
    pub aim: Option<f64>,
}

impl Expectation {
    pub fn met(&self) -> bool {
        self.at_least.is_none_or(|bound| self.value >= bound) && self.at_most.is_none_or(|bound| self.value <= bound)
    }

    /// Whether the aim is reached; never where there is none.
    pub fn reached(&self) -> bool {
        let beyond = |aim| if self.at_most.is_some() { self.value <= aim } else { self.value >= aim };
        self.met() && self.aim.is_some_and(beyond)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds() {
        let expectation =
            |value, at_least, at_most| Expectation { what: String::new(), value, at_least, at_most, aim: None }.met();
        assert!(expectation(2.0, None, Some(2.0)));
        assert!(!expectation(2.1, None, Some(2.0)));
        assert!(expectation(0.6, Some(0.6), None));
        assert!(!expectation(0.5, Some(0.6), None));
        assert!(!expectation(f64::NAN, Some(0.6), None));
    }

    #[test]
    fn aims() {
        let one = |value, at_least, at_most, aim| Expectation { what: String::new(), value, at_least, at_most, aim };
        assert!(one(0.9, Some(0.6), None, Some(0.85)).reached());
        assert!(!one(0.7, Some(0.6), None, Some(0.85)).reached());
        assert!(one(1.9, None, Some(3.0), Some(2.0)).reached());
        assert!(!one(2.1, None, Some(3.0), Some(2.0)).reached());
        assert!(!one(9.0, Some(0.6), None, None).reached());
    }
}
