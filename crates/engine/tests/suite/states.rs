//! The state table against one written independently: the standard's tables as Linux states them, by attribute names.
use crate::common::*;
use freeflow_engine::{Refusal, modify_is_allowed, transition};
use freeflow_verbs::*;
use proptest::prelude::*;

const TYPES: [QpType; 5] = [QpType::Rc, QpType::Uc, QpType::Ud, QpType::XrcSend, QpType::XrcReceive];

/// `from to type: required | optional`; a line for each triple that exists, but those to RESET and ERR.
const EXPECTED: &str = "
RESET INIT RC: PKEY_INDEX PORT ACCESS_FLAGS |
RESET INIT UC: PKEY_INDEX PORT ACCESS_FLAGS |
RESET INIT UD: PKEY_INDEX PORT QKEY |
INIT INIT RC: | PKEY_INDEX PORT ACCESS_FLAGS
INIT INIT UC: | PKEY_INDEX PORT ACCESS_FLAGS
INIT INIT UD: | PKEY_INDEX PORT QKEY
INIT RTR RC: AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER | ALT_PATH ACCESS_FLAGS PKEY_INDEX
INIT RTR UC: AV PATH_MTU DEST_QPN RQ_PSN | ALT_PATH ACCESS_FLAGS PKEY_INDEX
INIT RTR UD: | PKEY_INDEX QKEY
RTR RTS RC: TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
RTR RTS UC: SQ_PSN | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
RTR RTS UD: SQ_PSN | CUR_STATE QKEY
RTS RTS RC: | CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE MIN_RNR_TIMER
RTS RTS UC: | CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE
RTS RTS UD: | CUR_STATE QKEY
RTS SQD RC: | EN_SQD_ASYNC_NOTIFY
RTS SQD UC: | EN_SQD_ASYNC_NOTIFY
RTS SQD UD: | EN_SQD_ASYNC_NOTIFY
SQD RTS RC: | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
SQD RTS UC: | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
SQD RTS UD: | CUR_STATE QKEY
SQD SQD RC: | PORT AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC MAX_DEST_RD_ATOMIC ALT_PATH ACCESS_FLAGS PKEY_INDEX MIN_RNR_TIMER PATH_MIG_STATE
SQD SQD UC: | AV ALT_PATH ACCESS_FLAGS PKEY_INDEX PATH_MIG_STATE
SQD SQD UD: | PKEY_INDEX QKEY
SQE RTS RC: |
SQE RTS UC: | CUR_STATE ACCESS_FLAGS
SQE RTS UD: | CUR_STATE QKEY
RESET INIT INI: PKEY_INDEX PORT ACCESS_FLAGS |
RESET INIT TGT: PKEY_INDEX PORT ACCESS_FLAGS |
INIT INIT INI: | PKEY_INDEX PORT ACCESS_FLAGS
INIT INIT TGT: | PKEY_INDEX PORT ACCESS_FLAGS
INIT RTR INI: AV PATH_MTU DEST_QPN RQ_PSN | ALT_PATH ACCESS_FLAGS PKEY_INDEX
INIT RTR TGT: AV PATH_MTU DEST_QPN RQ_PSN MAX_DEST_RD_ATOMIC MIN_RNR_TIMER | ALT_PATH ACCESS_FLAGS PKEY_INDEX
RTR RTS INI: TIMEOUT RETRY_CNT RNR_RETRY SQ_PSN MAX_QP_RD_ATOMIC | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
RTR RTS TGT: TIMEOUT SQ_PSN | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
RTS RTS INI: | CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE
RTS RTS TGT: | CUR_STATE ACCESS_FLAGS ALT_PATH PATH_MIG_STATE MIN_RNR_TIMER
RTS SQD INI: | EN_SQD_ASYNC_NOTIFY
RTS SQD TGT: | EN_SQD_ASYNC_NOTIFY
SQD RTS INI: | CUR_STATE ALT_PATH ACCESS_FLAGS PATH_MIG_STATE
SQD RTS TGT: | CUR_STATE ALT_PATH ACCESS_FLAGS MIN_RNR_TIMER PATH_MIG_STATE
SQD SQD INI: | PORT AV TIMEOUT RETRY_CNT RNR_RETRY MAX_QP_RD_ATOMIC ALT_PATH ACCESS_FLAGS PKEY_INDEX PATH_MIG_STATE
SQD SQD TGT: | PORT AV TIMEOUT MAX_DEST_RD_ATOMIC ALT_PATH ACCESS_FLAGS PKEY_INDEX MIN_RNR_TIMER PATH_MIG_STATE
SQE RTS INI: |
SQE RTS TGT: |
";

fn state(name: &str) -> QpState {
    match name {
        "RESET" => QpState::Reset,
        "INIT" => QpState::Init,
        "RTR" => QpState::ReadyToReceive,
        "RTS" => QpState::ReadyToSend,
        "SQD" => QpState::SqDrain,
        "SQE" => QpState::SqError,
        _ => panic!("{name}"),
    }
}

fn qp_type(name: &str) -> QpType {
    match name {
        "RC" => QpType::Rc,
        "UC" => QpType::Uc,
        "UD" => QpType::Ud,
        "INI" => QpType::XrcSend,
        "TGT" => QpType::XrcReceive,
        _ => panic!("{name}"),
    }
}

/// Bit positions of `enum ibv_qp_attr_mask`, written down once more.
fn bits(names: &str) -> u32 {
    const NAMES: [&str; 21] = [
        "STATE",
        "CUR_STATE",
        "EN_SQD_ASYNC_NOTIFY",
        "ACCESS_FLAGS",
        "PKEY_INDEX",
        "PORT",
        "QKEY",
        "AV",
        "PATH_MTU",
        "TIMEOUT",
        "RETRY_CNT",
        "RNR_RETRY",
        "RQ_PSN",
        "MAX_QP_RD_ATOMIC",
        "ALT_PATH",
        "MIN_RNR_TIMER",
        "SQ_PSN",
        "MAX_DEST_RD_ATOMIC",
        "PATH_MIG_STATE",
        "CAP",
        "DEST_QPN",
    ];
    names.split_whitespace().map(|name| 1 << NAMES.iter().position(|known| *known == name).unwrap()).sum()
}

/// Required and optional bits; `None`: no such transition.
fn expected(kind: QpType, from: QpState, to: QpState) -> Option<(u32, u32)> {
    if to == QpState::Reset || (to == QpState::Error && from != QpState::Reset) {
        return Some((0, 0));
    }
    EXPECTED.lines().filter(|line| !line.is_empty()).find_map(|line| {
        let (head, tail) = line.split_once(':').unwrap();
        let mut words = head.split_whitespace();
        let found = (state(words.next().unwrap()), state(words.next().unwrap()), qp_type(words.next().unwrap()));
        let (required, optional) = tail.split_once('|').unwrap();
        (found == (from, to, kind)).then(|| (bits(required), bits(optional)))
    })
}

fn expected_allowed(kind: QpType, from: QpState, to: QpState, mask: u32) -> bool {
    if mask & 2 != 0 && !matches!(from as u32, 2..=5) {
        return false;
    }
    expected(kind, from, to)
        .is_some_and(|(required, optional)| mask & required == required && mask & !(required | optional | 1) == 0)
}

#[test]
fn the_whole_table() {
    for kind in TYPES {
        for from in QpState::ALL {
            for to in QpState::ALL {
                let found = transition(kind, from, to).map(|found| (found.required, found.optional));
                assert_eq!(found, expected(kind, from, to), "{kind:?} {from:?} -> {to:?}");
                let (required, optional) = found.unwrap_or_default();
                // Exactly right, each attribute missing, each attribute too many, everything.
                let mut masks = vec![required | 1, required | optional | 1, u32::MAX];
                masks.extend((0..32).flat_map(|bit| [(required | 1) & !(1 << bit), required | 1 | 1 << bit]));
                for mask in masks {
                    assert_eq!(
                        modify_is_allowed(kind, from, to, QpAttributeMask(mask)),
                        expected_allowed(kind, from, to, mask),
                        "{kind:?} {from:?} -> {to:?} {mask:#x}"
                    );
                }
            }
        }
    }
}

fn any_state() -> impl Strategy<Value = QpState> {
    (0u32..7).prop_map(|number| QpState::from_number(number).unwrap())
}

proptest! {
    #[test]
    fn any_mask(kind in 0usize..5, from in any_state(), to in any_state(), mask in 0u32..1 << 21) {
        let kind = TYPES[kind];
        prop_assert_eq!(
            modify_is_allowed(kind, from, to, QpAttributeMask(mask)),
            expected_allowed(kind, from, to, mask)
        );
    }

    /// A QP that is driven by anything at all follows the table, and a refused modify changes nothing.
    #[test]
    fn a_driven_qp_follows_the_table(
        kind in 0usize..5,
        steps in prop::collection::vec((any_state(), 0u32..1 << 21, 0u8..3), 1..40),
    ) {
        let kind = TYPES[kind];
        let mut net = Net::new();
        let (end, peer) = (net.end(kind), net.end(kind));
        for (to, noise, how) in steps {
            let before = net.engine.query_qp(end.session, end.qp).unwrap();
            let mask = match (how, expected(kind, before.state, to)) {
                (0, _) | (_, None) => noise,
                (1, Some((required, _))) => required | 1,
                (_, Some((required, optional))) => required | 1 | (optional & noise),
            };
            let attributes = QpAttributes {
                state: to,
                current_state: before.state,
                port: 1,
                address: address(peer.gid),
                dest_qpn: peer.qpn.0,
                max_rd_atomic: 1,
                ..Default::default()
            };
            let next = if mask & 1 != 0 { to } else { before.state };
            // RoCE has no alternate path: allowed by the table, refused by value.
            let allowed = expected_allowed(kind, before.state, next, mask) && mask & (1 << 14) == 0;
            match net.modify(&end, &attributes, mask) {
                Ok(now) => {
                    prop_assert!(allowed);
                    prop_assert_eq!(now, next);
                    prop_assert_eq!(net.state(&end), next);
                }
                Err(Refusal::Error(VerbsError::InvalidArgument)) => {
                    prop_assert!(!allowed, "{:?} -> {:?} {:#x}", before.state, to, mask);
                    prop_assert_eq!(net.engine.query_qp(end.session, end.qp).unwrap(), before);
                }
                Err(other) => prop_assert!(false, "{:?}", other),
            }
        }
    }
}

#[test]
fn values_out_of_range_are_refused() {
    type Edit = fn(&mut QpAttributes);
    let edits: [(u32, Edit); 7] = [
        (QpAttributeMask::PORT, |a| a.port = 2),
        (QpAttributeMask::PKEY_INDEX, |a| a.pkey_index = 1),
        (QpAttributeMask::TIMEOUT, |a| a.timeout = 32),
        (QpAttributeMask::MAX_DEST_RD_ATOMIC, |a| a.max_dest_rd_atomic = 129),
        (QpAttributeMask::MAX_QP_RD_ATOMIC, |a| a.max_rd_atomic = 129),
        (QpAttributeMask::AV, |a| a.address.grh = None),
        (QpAttributeMask::AV, |a| a.address.grh.as_mut().unwrap().sgid_index = 1),
    ];
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.to(&a, QpState::SqDrain).unwrap();
    for (bit, edit) in edits {
        let mut attributes = QpAttributes { port: 1, address: address(b.gid), ..Default::default() };
        assert!(net.modify(&a, &attributes, bit).is_ok());
        edit(&mut attributes);
        let refused = net.modify(&a, &attributes, bit);
        assert_eq!(refused, Err(Refusal::Error(VerbsError::InvalidArgument)), "{bit:#x}");
    }
}

/// Soft-RoCE and mlx5 take these: so do we, and give them back as Soft-RoCE does.
#[test]
fn values_wider_than_their_fields_are_taken() {
    use QpAttributeMask as M;
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    net.to(&a, QpState::SqDrain).unwrap();
    for value in [8, 31, 32, 33, 255] {
        let wide = QpAttributes { retry_count: value, rnr_retry: value, min_rnr_timer: value, ..Default::default() };
        net.modify(&a, &wide, M::RETRY_CNT | M::RNR_RETRY | M::MIN_RNR_TIMER).unwrap();
        let found = net.engine.query_qp(a.session, a.qp).unwrap();
        assert_eq!((found.retry_count, found.rnr_retry, found.min_rnr_timer), (value, value, value));
    }
    net.to(&a, QpState::Reset).unwrap();
    net.init(&a);
    let above = 0xff << 24;
    let rtr = QpAttributes {
        state: QpState::ReadyToReceive,
        address: address(b.gid),
        dest_qpn: above | b.qpn.0,
        rq_psn: above | 5,
        ..Default::default()
    };
    let path = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
    net.modify(&a, &rtr, M::STATE | path).unwrap();
    let found = net.engine.query_qp(a.session, a.qp).unwrap();
    assert_eq!((found.dest_qpn, found.rq_psn), (b.qpn.0, 5), "of 24 bits");
}

#[test]
fn a_wrong_current_state_is_refused() {
    let mut net = Net::new();
    let (a, _) = net.pair(QpType::Rc);
    let mask = QpAttributeMask::STATE | QpAttributeMask::CUR_STATE;
    let mut attributes =
        QpAttributes { state: QpState::ReadyToSend, current_state: QpState::SqDrain, ..Default::default() };
    assert!(net.modify(&a, &attributes, mask).is_err());
    attributes.current_state = QpState::ReadyToSend;
    assert!(net.modify(&a, &attributes, mask).is_ok());
}

#[test]
fn attributes_are_kept_and_forgotten() {
    let mut net = Net::new();
    let (a, b) = net.pair(QpType::Rc);
    let found = net.engine.query_qp(a.session, a.qp).unwrap();
    assert_eq!((found.state, found.current_state), (QpState::ReadyToSend, QpState::ReadyToSend));
    assert_eq!((found.dest_qpn, found.timeout, found.rnr_retry, found.min_rnr_timer), (b.qpn.0, 8, 3, 12));
    assert_eq!(found.address, address(b.gid));
    assert_eq!(found.capabilities, capabilities());
    net.to(&a, QpState::Reset).unwrap();
    let reset = net.engine.query_qp(a.session, a.qp).unwrap();
    assert_eq!(reset, QpAttributes { capabilities: capabilities(), ..Default::default() });
}
