//! A resource's conditions, and the times in them.
use crate::declared::{Condition, Resource, Status};
use freeflow_verbs::civil_date;
use std::time::{SystemTime, UNIX_EPOCH};

/// Longest message, bytes.
const MESSAGE_BYTES_MAX: usize = 1024;
/// Longest list of causes in it.
const ELLIPSIS: &str = "…";

/// FreeFlow has taken the spec.
pub const ACCEPTED: &str = "Accepted";
/// All hosts follow it.
pub const ENFORCED: &str = "Enforced";
/// Only while it waits for others: `False`.
pub const DELETED: &str = "Deleted";

/// A condition without a time and generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    pub r#type: &'static str,
    pub status: &'static str,
    pub reason: String,
    pub message: String,
}

impl Said {
    /// A condition; Kubernetes wants a word of letters for the reason.
    pub fn new(r#type: &'static str, status: &'static str, reason: &str, message: &str) -> Self {
        let is_word = reason.starts_with(|letter: char| letter.is_ascii_alphabetic())
            && reason.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let reason = if is_word { reason.to_owned() } else { "Refused".to_owned() };
        Self { r#type, status, reason, message: shortened(message) }
    }
}

fn shortened(message: &str) -> String {
    if message.len() <= MESSAGE_BYTES_MAX {
        return message.into();
    }
    let end = (0..=MESSAGE_BYTES_MAX).rev().find(|at| message.is_char_boundary(*at)).unwrap_or(0);
    format!("{}{ELLIPSIS}", &message[..end])
}

/// The status with these conditions; `None`: the resource has it already.
pub fn status_with(resource: &Resource, freeflow_name: &str, said: &[Said], now: SystemTime) -> Option<Status> {
    let old = resource.status.clone().unwrap_or_default();
    let condition = |said: &Said| {
        let before = old.conditions.iter().find(|condition| condition.r#type == said.r#type);
        let since = before.filter(|before| before.status == said.status && !before.last_transition_time.is_empty());
        Condition {
            r#type: said.r#type.into(),
            status: said.status.into(),
            observed_generation: resource.metadata.generation,
            last_transition_time: since.map_or_else(|| rfc3339(now, false), |since| since.last_transition_time.clone()),
            reason: said.reason.clone(),
            message: said.message.clone(),
        }
    };
    let status = Status { freeflow_name: freeflow_name.into(), conditions: said.iter().map(condition).collect() };
    (resource.status.as_ref() != Some(&status)).then_some(status)
}

/// Whether the resource's condition is another one than this, so that people want to hear of it.
pub fn is_news(resource: &Resource, said: &Said) -> bool {
    let conditions = resource.status.iter().flat_map(|status| &status.conditions);
    let before = conditions.into_iter().find(|condition| condition.r#type == said.r#type);
    before.is_none_or(|before| {
        (before.status.as_str(), &before.reason, &before.message) != (said.status, &said.reason, &said.message)
    })
}

/// `2026-01-31T12:00:00Z`, or with microseconds, as leases have it.
pub fn rfc3339(time: SystemTime, with_micros: bool) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let micros = if with_micros { format!(".{:06}", since.subsec_micros()) } else { String::new() };
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{micros}Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_are_written_as_kubernetes_reads_them() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_764_547_200, "2025-12-01T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds), false), text);
        }
        assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_micros(1_000_042), true), "1970-01-01T00:00:01.000042Z");
    }

    #[test]
    fn a_condition_keeps_its_time_while_it_is_the_same() {
        let mut resource = Resource::default();
        resource.metadata.generation = 3;
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let accepted = Said::new(ACCEPTED, "True", "Declared", "fine");
        assert!(is_news(&resource, &accepted));
        resource.status = status_with(&resource, "k8s._.a", std::slice::from_ref(&accepted), at(10));
        assert!(resource.status.is_some() && !is_news(&resource, &accepted));
        assert_eq!(status_with(&resource, "k8s._.a", std::slice::from_ref(&accepted), at(20)), None);
        let other = Said::new(ACCEPTED, "True", "Declared", "finer");
        let status = status_with(&resource, "k8s._.a", &[other], at(20)).unwrap();
        assert_eq!(status.conditions[0].last_transition_time, "1970-01-01T00:00:10Z");
        let refused = Said::new(ACCEPTED, "False", "a word?", &"ä".repeat(MESSAGE_BYTES_MAX));
        let status = status_with(&resource, "k8s._.a", &[refused], at(20)).unwrap();
        let condition = &status.conditions[0];
        assert_eq!(
            (condition.reason.as_str(), condition.last_transition_time.as_str()),
            ("Refused", "1970-01-01T00:00:20Z")
        );
        assert!(condition.message.len() <= MESSAGE_BYTES_MAX + ELLIPSIS.len() && condition.observed_generation == 3);
    }
}
