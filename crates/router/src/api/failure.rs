//! Answers to refused requests.
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use freeflow_orchestrator::objects::{Cause, Invalid};
use freeflow_orchestrator::{Reason, Refusal};
use serde::Serialize;

/// An answer that is no success.
#[derive(Clone, Debug)]
pub struct Failure {
    pub code: StatusCode,
    pub reason: &'static str,
    pub message: String,
    pub details: Option<Box<Details>>,
}

/// The object and fields concerned.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Details {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Which of the items that were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<usize>,
    pub causes: Vec<Cause>,
    /// Of a dry run that found it in use: `Vnic a`, …
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<String>,
}

/// As it goes out.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status<'a> {
    api_version: &'static str,
    kind: &'static str,
    status: &'static str,
    reason: &'a str,
    message: &'a str,
    code: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<&'a Details>,
}

impl Failure {
    fn new(code: StatusCode, reason: &'static str, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), details: None }
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    pub fn bad_method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "BadRequest", "this can't be done with that path")
    }

    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "Forbidden", message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", message)
    }

    pub fn expired() -> Self {
        Self::new(
            StatusCode::GONE,
            "Expired",
            "what has changed since that resourceVersion is not known any more; list again",
        )
    }

    /// Nothing was done; later it can be.
    pub fn busy(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "Busy", message)
    }

    /// The router ends, or is not what it should be.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal", message)
    }

    pub fn invalid(invalid: Invalid, index: Option<usize>) -> Self {
        let message = invalid.to_string();
        let details = Details { index, causes: invalid.causes, ..Details::default() };
        Self { details: Some(Box::new(details)), ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", message) }
    }

    pub fn about(mut self, kind: impl Into<String>, name: impl Into<String>) -> Self {
        let details = self.details.get_or_insert_default();
        (details.kind, details.name) = (Some(kind.into()), Some(name.into()));
        self
    }

    /// The message names the first of them.
    pub fn without_users(mut self) -> Self {
        if let Some(details) = &mut self.details {
            details.users.clear();
        }
        self
    }

    pub fn to_json(&self) -> serde_json::Value {
        let status = Status {
            api_version: freeflow_orchestrator::objects::API_VERSION,
            kind: "Status",
            status: "Failure",
            reason: self.reason,
            message: &self.message,
            code: self.code.as_u16(),
            details: self.details.as_deref(),
        };
        serde_json::to_value(status).unwrap_or_default()
    }
}

pub fn word(reason: Reason) -> &'static str {
    reason.word()
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let code = StatusCode::from_u16(refusal.reason.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut failure = Self::new(code, refusal.reason.word(), refusal.to_string());
        if let Some((kind, name)) = refusal.object {
            failure = failure.about(kind.name(), name);
        }
        if !refusal.causes.is_empty() {
            failure.details.get_or_insert_default().causes = refusal.causes;
        }
        if !refusal.users.is_empty() {
            failure.details.get_or_insert_default().users = refusal.users;
        }
        failure
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.code, super::json_header(), self.to_json().to_string()).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_orchestrator::objects::ObjectKind;

    #[test]
    fn every_reason_has_its_code() {
        let reasons = [
            (Reason::Invalid, 422, "Invalid"),
            (Reason::NotFound, 404, "NotFound"),
            (Reason::Forbidden, 403, "Forbidden"),
            (Reason::Conflict, 409, "Conflict"),
            (Reason::AlreadyExists, 409, "AlreadyExists"),
            (Reason::InUse, 409, "InUse"),
            (Reason::Exhausted, 507, "Exhausted"),
            (Reason::Internal, 500, "Internal"),
        ];
        for (reason, code, word) in reasons {
            let failure = Failure::from(Refusal::new(reason, "because"));
            assert_eq!((failure.code.as_u16(), failure.reason), (code, word));
            // The words are those of the orchestrator.
            assert_eq!(serde_json::to_value(reason).unwrap(), word);
        }
    }

    #[test]
    fn an_answer_names_the_object_and_the_fields() {
        let mut refusal = Refusal::new(Reason::Invalid, "bad").about(ObjectKind::QosClass, "slow");
        refusal.causes.push(Cause::new("spec.weight", "0 is too small"));
        let json = Failure::from(refusal).to_json();
        assert_eq!((&json["kind"], &json["status"], &json["code"]), (&"Status".into(), &"Failure".into(), &422.into()));
        assert_eq!((&json["details"]["kind"], &json["details"]["name"]), (&"QosClass".into(), &"slow".into()));
        assert_eq!(json["details"]["causes"][0]["field"], "spec.weight");
        let plain = Failure::bad_request("no").to_json();
        assert!(plain.get("details").is_none());
    }
}
