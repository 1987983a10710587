//! `GET /apis/freeflow.io/v1/live`: what vNICs, and their QPs, have done so far, for who makes
//! rates of it. A page at a time.
use super::failure::Failure;
use super::meters::{MeterPage, Position, VnicMeter};
use super::plane::PageMeters;
use super::query::{flag, parameters};
use super::routes::{Asking, Server, admitted, held};
use crate::dataplane::meters::QpMeter;
use crate::dataplane::slow_path_counts::{SlowPathAmount, SlowPathReason};
use axum::extract::{Extension, RawQuery, State};
use axum::response::Response;
use freeflow_engine::Throttled;
use freeflow_orchestrator::name_is_good;
use freeflow_orchestrator::objects::API_VERSION;
use freeflow_verbs::RateLimit;
use serde_json::{Value, json};
use std::sync::Arc;

/// Separates a vNIC's id, which has none, from a QP's number.
const SEPARATOR: char = ':';

/// As [`position_text`] writes it.
fn parse_position(text: &str) -> Option<Position> {
    let (vnic, qpn) = match text.split_once(SEPARATOR) {
        Some((vnic, qpn)) => (vnic, Some(qpn.parse().ok()?)),
        None => (text, None),
    };
    name_is_good(vnic).then(|| Position { vnic: vnic.into(), qpn })
}

fn position_text(position: &Position) -> String {
    match position.qpn {
        Some(qpn) => format!("{}{SEPARATOR}{qpn}", position.vnic),
        None => position.vnic.clone(),
    }
}

fn limit(limit: &RateLimit) -> Value {
    json!({"bitsPerSecond": limit.bits_per_s, "messagesPerSecond": limit.messages_per_s})
}

fn throttled(throttled: Throttled) -> Value {
    json!({"waits": throttled.waits, "nanoseconds": throttled.time.0})
}

fn slow_path((reason, SlowPathAmount { accesses, bytes }): (SlowPathReason, SlowPathAmount)) -> Value {
    json!({"reason": reason.text(), "accesses": accesses, "bytes": bytes})
}

fn qp(qp: &QpMeter) -> Value {
    let traffic = &qp.traffic;
    json!({
        "qpn": qp.qpn,
        "type": qp.qp_type,
        "state": qp.state,
        "path": qp.path,
        "peerAddress": qp.peer.map(|(address, _)| address),
        "peerQpn": qp.peer.map(|(_, qpn)| qpn),
        "messagesSent": traffic.messages_sent,
        "bytesSent": traffic.bytes_sent,
        "messagesReceived": traffic.messages_received,
        "bytesReceived": traffic.bytes_received,
        "slowPath": {
            "accesses": qp.slow_path.amount.accesses,
            "bytes": qp.slow_path.amount.bytes,
            "reason": qp.slow_path.reason.map(SlowPathReason::text),
        },
        "throttled": throttled(qp.throttled),
    })
}

fn vnic(vnic: &VnicMeter, with_qps: bool) -> Value {
    let (numbers, counters) = (&vnic.numbers, &vnic.numbers.counters);
    let way = |messages: u64, bytes: u64| json!({"messages": messages, "bytes": bytes});
    let routed = way(
        counters.messages.saturating_sub(counters.direct_messages).saturating_sub(counters.wire_messages),
        counters.bytes.saturating_sub(counters.direct_bytes).saturating_sub(counters.wire_bytes),
    );
    let mut value = json!({
        "vnic": vnic.id,
        "title": vnic.title,
        "tenant": vnic.tenant,
        "network": vnic.network,
        "address": vnic.address,
        "address6": vnic.address6,
        "messagesSent": counters.messages,
        "bytesSent": counters.sent.bytes,
        "bytesReceived": counters.received.bytes,
        "paths": {
            "direct": way(counters.direct_messages, counters.direct_bytes),
            "routed": routed,
            "wire": way(counters.wire_messages, counters.wire_bytes),
        },
        "slowPath": numbers.slow_path.by_reason().filter(|(_, amount)| amount.accesses > 0).map(slow_path).collect::<Vec<_>>(),
        "metered": vnic.is_metered,
        "limits": {
            "qp": limit(&vnic.shaping.qp),
            "vnic": limit(&vnic.shaping.vnic),
            "tenant": limit(&vnic.tenant_limit),
        },
        "throttled": throttled(numbers.throttled),
        "errors": counters.completions_with_error,
        "drops": counters.undeliverable,
        "qpCount": numbers.usage.qps,
    });
    if with_qps {
        value["qps"] = vnic.qps.iter().map(qp).collect();
    }
    value
}

/// With the time, so that rates need not take the answer's way into account.
fn document(page: &MeterPage, with_qps: bool) -> Value {
    let items: Vec<Value> = page.vnics.iter().map(|meter| vnic(meter, with_qps)).collect();
    let next = page.next.as_ref().map_or(String::new(), position_text);
    json!({"apiVersion": API_VERSION, "kind": "LiveList", "metadata": {"nanoseconds": page.read_ns, "continue": next}, "items": items})
}

pub async fn live(
    State(server): State<Arc<Server>>,
    Extension(asking): Extension<Asking>,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    let query = parameters(query.as_deref(), &["qps", "continue"])?;
    let with_qps = flag(&query, "qps")?;
    let after = query
        .get("continue")
        .filter(|text| !text.is_empty())
        .map(|text| parse_position(text).ok_or_else(|| Failure::bad_request("continue is what an earlier page said")));
    let after = after.transpose()?;
    let permit = admitted(&asking).await?;
    let page = server.link.ask(PageMeters { after, with_qps, tenants: asking.caller.role.read_tenants() }).await?;
    Ok(held(document(&page, with_qps).to_string().into_bytes(), permit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_come_back() {
        for position in
            [Position { vnic: "a-1".into(), qpn: None }, Position { vnic: "0123456789ab".into(), qpn: Some(77) }]
        {
            assert_eq!(parse_position(&position_text(&position)), Some(position));
        }
        for bad in [":", "a:", "a:x", "a:1:2", "../x", ":7"] {
            assert_eq!(parse_position(bad), None, "{bad}");
        }
    }
}
