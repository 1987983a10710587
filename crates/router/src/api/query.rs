//! A request's address: the names in its path, and the parameters after `?`.
use super::failure::Failure;
use axum::extract::{FromRequestParts, Path};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

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
}
