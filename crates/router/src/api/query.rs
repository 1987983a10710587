//! A request's address: the names in its path, the parameters after `?`, and label selectors.
use super::failure::Failure;
use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;
use freeflow_orchestrator::objects::Labels;
use freeflow_orchestrator::{check_label_name, check_label_value};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// Terms of one selector.
const TERM_COUNT_MAX: usize = 32;

/// The variable parts of a path, decoded. A path that is not well-formed is refused by a Status, as all else.
pub struct Named<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Named<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match Path::from_request_parts(parts, state).await {
            Ok(Path(names)) => Ok(Self(names)),
            Err(error) if error.status() == StatusCode::BAD_REQUEST => {
                Err(Failure::bad_request("the path is not well-formed"))
            }
            Err(error) => Err(Failure::internal(error.to_string())),
        }
    }
}

/// Parameters by name. One that is not `known` is refused: a misspelt `dryRun` must not change anything.
pub fn parameters(query: Option<&str>, known: &[&str]) -> Result<BTreeMap<String, String>, Failure> {
    let mut all = BTreeMap::new();
    for part in query.unwrap_or_default().split('&').filter(|part| !part.is_empty()) {
        let (name, value) = part.split_once('=').unwrap_or((part, ""));
        let (Some(name), Some(value)) = (decode(name), decode(value)) else {
            return Err(Failure::bad_request("the query is not well-formed"));
        };
        if !known.contains(&name.as_str()) {
            let known = if known.is_empty() { "none".into() } else { known.join(", ") };
            return Err(Failure::bad_request(format!("the parameter {name} is not known here; there are: {known}")));
        }
        if all.insert(name, value).is_some() {
            return Err(Failure::bad_request("a parameter is given twice"));
        }
    }
    Ok(all)
}

/// Percent-encoding. `None`: not well-formed.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                (digit()? * 16 + digit()?) as u8
            }
            other => other,
        });
    }
    String::from_utf8(bytes).ok()
}

/// `true` or `false`; absent is false.
pub fn flag(parameters: &BTreeMap<String, String>, name: &str) -> Result<bool, Failure> {
    match parameters.get(name).map(String::as_str) {
        None | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(other) => Err(Failure::bad_request(format!("{name} is true or false, not {other}"))),
    }
}

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
    pub fn parse(text: &str) -> Result<Self, Failure> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let why = |term: &str, why: &str| {
            Failure::bad_request(format!("labelSelector: {term:?}: {why}; terms are a=b, a==b, a!=b, a and !a"))
        };
        let parsed = text.split(',').map(str::trim).map(|term| Term::parse(term).map_err(|error| why(term, &error)));
        let terms: Vec<Term> = parsed.take(TERM_COUNT_MAX + 1).collect::<Result<_, _>>()?;
        if terms.len() > TERM_COUNT_MAX {
            return Err(Failure::bad_request(format!("a selector has {TERM_COUNT_MAX} terms at most")));
        }
        Ok(Self(terms))
    }

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

    #[test]
    fn queries_are_decoded_and_strict() {
        let known = ["dryRun", "labelSelector"];
        let all = parameters(Some("labelSelector=a%3Db%2Cc+d&dryRun=true"), &known).unwrap();
        assert_eq!((all["labelSelector"].as_str(), flag(&all, "dryRun").unwrap()), ("a=b,c d", true));
        for bad in
            ["dryrun=true", "dryRun=1&dryRun=1", "labelSelector=%zz", "labelSelector=%f", "x", "labelSelector=%ff"]
        {
            assert!(parameters(Some(bad), &known).is_err(), "{bad}");
        }
        assert!(flag(&parameters(Some("dryRun=yes"), &known).unwrap(), "dryRun").is_err());
        assert!(parameters(None, &[]).unwrap().is_empty());
    }

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
        assert!(Selector::parse(&many(TERM_COUNT_MAX + 1)).unwrap_err().message.contains("32 terms"));
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
            assert_eq!(failure.code.as_u16(), 400);
            assert!(failure.message.contains(&format!("\"{term}\"")), "{text}: {}", failure.message);
        }
        let fits = |text: &str| Selector::parse(text).unwrap().fits(&[("a".into(), "b c=d".into())].into());
        assert!(fits("a=b c=d") && fits(" ") && fits("a != b") && !fits("!a"));
    }
}
