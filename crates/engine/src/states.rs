//! States of a QP: which transitions exist, and the attributes that each needs and allows (IBTA
//! 10.3.1, 11.2.5.2 and its tables; the union that Linux enforces).
//!
//! The table is data; [`transition`] is its only reader.
use freeflow_verbs::{QpAttributeMask, QpState, QpType};

/// Attributes of one transition, [`QpAttributeMask`] bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transition {
    /// Attributes that it needs.
    pub required: u32,
    /// Attributes that it allows besides.
    pub optional: u32,
}

impl Transition {
    const fn without(self, bits: u32) -> Self {
        Self { required: self.required & !bits, optional: self.optional & !bits }
    }
}

struct Row {
    from: QpState,
    to: QpState,
    rc: Transition,
    uc: Transition,
    ud: Transition,
}

const NOTHING: Transition = Transition { required: 0, optional: 0 };

const fn needs(required: u32, optional: u32) -> Transition {
    Transition { required, optional }
}

const fn allows(optional: u32) -> Transition {
    Transition { required: 0, optional }
}

const fn row(from: QpState, to: QpState, rc: Transition, uc: Transition, ud: Transition) -> Row {
    Row { from, to, rc, uc, ud }
}

use QpAttributeMask as M;
use QpState::{Init, ReadyToReceive, ReadyToSend, Reset, SqDrain, SqError};

/// Attributes of a connected QP in INIT.
const CONNECTED_INIT: u32 = M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
const DATAGRAM_INIT: u32 = M::PKEY_INDEX | M::PORT | M::QKEY;
const PATH: u32 = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
/// Attributes that may change while sending.
const UC_LIVE: u32 = M::CUR_STATE | M::ALT_PATH | M::ACCESS_FLAGS | M::PATH_MIG_STATE;
const RC_LIVE: u32 = UC_LIVE | M::MIN_RNR_TIMER;
const UD_LIVE: u32 = M::CUR_STATE | M::QKEY;
/// Attributes that RC has for one of its halves only; each end of XRC is one half.
const OF_RESPONDERS: u32 = M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
const OF_REQUESTERS: u32 = M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
const NOTIFY: Transition = allows(M::EN_SQD_ASYNC_NOTIFY);

/// Every transition but those to RESET and ERROR, which [`transition`] allows from everywhere
/// (ERROR not from RESET).
const ROWS: &[Row] = &[
    row(Reset, Init, needs(CONNECTED_INIT, 0), needs(CONNECTED_INIT, 0), needs(DATAGRAM_INIT, 0)),
    row(Init, Init, allows(CONNECTED_INIT), allows(CONNECTED_INIT), allows(DATAGRAM_INIT)),
    row(
        Init,
        ReadyToReceive,
        needs(PATH | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER, M::ALT_PATH | M::ACCESS_FLAGS | M::PKEY_INDEX),
        needs(PATH, M::ALT_PATH | M::ACCESS_FLAGS | M::PKEY_INDEX),
        allows(M::PKEY_INDEX | M::QKEY),
    ),
    row(
        ReadyToReceive,
        ReadyToSend,
        needs(M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC, RC_LIVE),
        needs(M::SQ_PSN, UC_LIVE),
        needs(M::SQ_PSN, UD_LIVE),
    ),
    row(ReadyToSend, ReadyToSend, allows(RC_LIVE), allows(UC_LIVE), allows(UD_LIVE)),
    row(ReadyToSend, SqDrain, NOTIFY, NOTIFY, NOTIFY),
    row(SqDrain, ReadyToSend, allows(RC_LIVE), allows(UC_LIVE), allows(UD_LIVE)),
    row(
        SqDrain,
        SqDrain,
        allows(
            M::PORT
                | M::AV
                | M::TIMEOUT
                | M::RETRY_CNT
                | M::RNR_RETRY
                | M::MAX_QP_RD_ATOMIC
                | M::MAX_DEST_RD_ATOMIC
                | M::ALT_PATH
                | M::ACCESS_FLAGS
                | M::PKEY_INDEX
                | M::MIN_RNR_TIMER
                | M::PATH_MIG_STATE,
        ),
        allows(M::AV | M::ALT_PATH | M::ACCESS_FLAGS | M::PKEY_INDEX | M::PATH_MIG_STATE),
        allows(M::PKEY_INDEX | M::QKEY),
    ),
    // An RC QP never gets into SQE; the transition is declared for all types, as the kernel's table
    // does.
    row(SqError, ReadyToSend, NOTHING, allows(M::CUR_STATE | M::ACCESS_FLAGS), allows(UD_LIVE)),
];

/// Attributes that the transition needs and allows; `None` if there is no such transition.
pub fn transition(qp_type: QpType, from: QpState, to: QpState) -> Option<Transition> {
    if to == Reset || (to == QpState::Error && from != Reset) {
        return Some(NOTHING);
    }
    let row = ROWS.iter().find(|row| row.from == from && row.to == to)?;
    Some(match qp_type {
        QpType::Rc => row.rc,
        QpType::XrcSend => row.rc.without(OF_RESPONDERS),
        QpType::XrcReceive => row.rc.without(OF_REQUESTERS),
        QpType::Uc => row.uc,
        QpType::Ud => row.ud,
    })
}

/// Whether a modify with this mask may lead from one state to another.
pub fn modify_is_allowed(qp_type: QpType, from: QpState, to: QpState, mask: QpAttributeMask) -> bool {
    let may_claim_state = matches!(from, ReadyToReceive | ReadyToSend | SqDrain | SqError);
    if mask.contains(M::CUR_STATE) && !may_claim_state {
        return false;
    }
    let Some(Transition { required, optional }) = transition(qp_type, from, to) else { return false };
    mask.0 & required == required && mask.0 & !(required | optional | M::STATE) == 0
}
