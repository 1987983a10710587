//! Label selectors, as requests have them.
use crate::check::{check_label_name, check_label_value};
use crate::objects::Labels;
use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// Terms of one selector.
const TERM_COUNT_MAX: usize = 32;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Term {
    Is(String, String),
    IsNot(String, String),
    Has(String),
    HasNot(String),
}

impl Term {
    /// Errors: why no label can be meant.
    fn parse(text: &str) -> Result<Self, String> {
        let (name, value, is_equal) = if let Some((name, value)) = text.split_once("!=") {
            (name, Some(value), false)
        } else if let Some((name, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
            (name, Some(value), true)
        } else {
            let name = text.strip_prefix('!');
            (name.unwrap_or(text), None, name.is_none())
        };
        let (name, value) = (name.trim().to_owned(), value.map(|value| value.trim().to_owned()));
        check_label_name(&name)?;
        value.as_deref().map_or(Ok(()), check_label_value)?;
        Ok(match (value, is_equal) {
            (Some(value), true) => Self::Is(name, value),
            (Some(value), false) => Self::IsNot(name, value),
            (None, true) => Self::Has(name),
            (None, false) => Self::HasNot(name),
        })
    }
}

/// Terms that all hold: `a=b`, `a==b`, `a!=b`, `a`, `!a`, by commas. Without any it fits all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector(Vec<Term>);

impl Selector {
    /// From the text of a request, or of `-l`.
    ///
    /// # Errors
    /// A sentence for people: no label can be meant, or there are too many terms.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let why =
            |term: &str, why: &str| format!("labelSelector: {term:?}: {why}; terms are a=b, a==b, a!=b, a and !a");
        let parsed = text.split(',').map(str::trim).map(|term| Term::parse(term).map_err(|error| why(term, &error)));
        let terms: Vec<Term> = parsed.take(TERM_COUNT_MAX + 1).collect::<Result<_, _>>()?;
        if terms.len() > TERM_COUNT_MAX {
            return Err(format!("a selector has {TERM_COUNT_MAX} terms at most"));
        }
        Ok(Self(terms))
    }

    /// Whether an object has such labels.
    pub fn fits(&self, labels: &Labels) -> bool {
        self.0.iter().all(|term| match term {
            Term::Is(name, value) => labels.get(name) == Some(value),
            Term::IsNot(name, value) => labels.get(name) != Some(value),
            Term::Has(name) => labels.contains_key(name),
            Term::HasNot(name) => !labels.contains_key(name),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn selectors_select() {
        let labels: Labels = [("tier".into(), "web".into()), ("zone".into(), String::new())].into();
        for (text, fits) in [
            ("", true),
            ("tier=web", true),
            ("tier==web, zone=", true),
            ("tier=db", false),
            ("tier!=db,other!=x", true),
            ("tier,zone,!other", true),
            ("other", false),
            ("!tier", false),
        ] {
            assert_eq!(Selector::parse(text).unwrap().fits(&labels), fits, "{text}");
        }
        let many = |count: usize| vec!["a"; count].join(",");
        assert!(Selector::parse(&many(TERM_COUNT_MAX)).is_ok());
        assert!(Selector::parse(&many(TERM_COUNT_MAX + 1)).unwrap_err().contains("32 terms"));
    }

    #[test]
    fn what_is_no_selector_is_refused_by_term() {
        for (text, term) in [
            ("a in (b)", "a in (b)"),
            ("tier=web,x in (y", "x in (y"),
            ("a in (b,c)", "a in (b"),
            ("a notin (b)", "a notin (b)"),
            ("=,", "="),
            ("=b", "=b"),
            ("!=b", "!=b"),
            ("!", "!"),
            ("!a=b", "!a=b"),
            ("!!a", "!!a"),
            ("a,,b", ""),
            ("a,", ""),
            ("a=b\u{1}", "a=b\\u{1}"),
        ] {
            let failure = Selector::parse(text).expect_err(text);
            assert!(failure.contains(&format!("\"{term}\"")), "{text}: {failure}");
        }
        let fits = |text: &str| Selector::parse(text).unwrap().fits(&[("a".into(), "b c=d".into())].into());
        assert!(fits("a=b c=d") && fits(" ") && fits("a != b") && !fits("!a"));
    }
}
