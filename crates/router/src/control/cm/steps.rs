//! Steps of a connection that go with a change of its queue pair. The router is the connection
//! manager and has the queue pairs, so it does both in one request, and when a peer agrees to a
//! connection it does without being asked.
//!
//! The worker changes the QP; then this thread has the machine go on. A library's QP is named by a
//! handle of its own session, so nobody has another's changed.
use super::preparation::{Preparation, Prepared};
use crate::base::slab::Key;
use crate::control::session::Answer;
use crate::control::session::{Handled, Outcome};
use crate::control::thread::Control;
use crate::dataplane::command::{PrepareQp, StepQp};
use crate::dataplane::qp_changes::{Change, QpChanges};
use freeflow_cm::Owner;
use freeflow_engine::SessionId;
use freeflow_protocol::cm::{CmStep, DEPTH_AGREED};
use freeflow_protocol::library::{Handle, Reply};
use freeflow_verbs::{PathMtu, QpAttributeMask, QpAttributes, QpState, QpType, VerbsError};

/// Outstanding READs and atomics of a QP; [`DEPTH_AGREED`] stands for those that the two ends agreed on.
#[derive(Clone, Copy)]
struct Depths {
    responder: u8,
    initiator: u8,
}

impl Depths {
    const AGREED: Self = Self { responder: DEPTH_AGREED, initiator: DEPTH_AGREED };
}

fn only_state(state: QpState, extra: u32) -> Change {
    (QpAttributes { state, ..QpAttributes::default() }, QpAttributeMask(QpAttributeMask::STATE | extra))
}

impl Control {
    /// The owner that a session's identifiers have, if it has any.
    fn cm_owner(&mut self, key: Key) -> Result<Owner, VerbsError> {
        self.objects(key)?.cm.ok_or(VerbsError::NotFound)
    }

    /// Changes of a new QP of an identifier: INIT, and for datagrams on to RTS.
    pub(crate) fn first_changes(&mut self, key: Key, id: Handle, qp_type: QpType) -> Result<Vec<Change>, VerbsError> {
        let owner = self.cm_owner(key)?;
        let mut changes = vec![self.cm.machine.qp_attributes(owner, id, QpState::Init)?];
        if qp_type == QpType::Ud {
            changes.push(only_state(QpState::ReadyToReceive, 0));
            changes.push(only_state(QpState::ReadyToSend, QpAttributeMask::SQ_PSN));
        }
        Ok(changes)
    }

    /// On to RTS, by way of INIT again: what was settled since the QP was created counts.
    fn changes_to_send(&mut self, owner: Owner, id: Handle, depths: Depths) -> Result<Vec<Change>, VerbsError> {
        let machine = &mut self.cm.machine;
        let init = machine.qp_attributes(owner, id, QpState::Init)?;
        let mut receive = machine.qp_attributes(owner, id, QpState::ReadyToReceive)?;
        let mut send = machine.qp_attributes(owner, id, QpState::ReadyToSend)?;
        if depths.responder != DEPTH_AGREED {
            receive.0.max_dest_rd_atomic = depths.responder;
        }
        if depths.initiator != DEPTH_AGREED {
            send.0.max_rd_atomic = depths.initiator;
        }
        Ok(vec![init, receive, send])
    }

    pub(crate) fn handle_step(&mut self, (key, session): (Key, SessionId), qp: Handle, step: CmStep) -> Outcome {
        let owner = self.cm_owner(key)?;
        let (qp, id) = (self.objects(key)?.qps.get(qp)?.id, step.id());
        let path_mtu = self.cm.machine.path_mtu(owner, id)?;
        let (changes, path_mtu) = match &step {
            CmStep::Connect { parameters, .. } => {
                let ece = parameters.ece;
                self.handle_cm(key, step.into_request())?;
                self.cm.world.prepare(owner, id, Preparation { session, qp, ece });
                return Ok(Handled::Answered(Answer::of(Reply::CmStepped { state: None, path_mtu })));
            }
            CmStep::Accept { parameters, .. } => {
                let depths =
                    Depths { responder: parameters.responder_resources, initiator: parameters.initiator_depth };
                let changes = self.changes_to_send(owner, id, depths)?;
                let path_mtu = changes.iter().find(|(_, mask)| mask.contains(QpAttributeMask::PATH_MTU));
                let path_mtu = path_mtu.map(|(attributes, _)| attributes.path_mtu);
                (changes, path_mtu)
            }
            CmStep::Disconnect { .. } => (vec![only_state(QpState::Error, 0)], None),
        };
        self.submit_step(key, QpChanges::new(session, qp, changes), step, path_mtu)
    }

    /// Has the worker change the QP, and the machine take the step then.
    fn submit_step(&mut self, key: Key, changes: QpChanges, step: CmStep, path_mtu: Option<PathMtu>) -> Outcome {
        self.submit_with((key, changes.session), StepQp { changes }, move |control, result| {
            let taken = result.and_then(|state| {
                control.handle_cm(key, step.into_request())?;
                Ok(Answer::of(Reply::CmStepped { state: Some(state), path_mtu }))
            });
            control.handle_request_done(key, |_| taken.unwrap_or_else(Answer::from));
        })
    }

    /// Brings the QPs to RTS whose peers have agreed. Their programs hear of it afterwards.
    pub(super) fn prepare_qps(&mut self) {
        while let Some(Prepared { owner, id, with }) = self.cm.world.prepared.pop() {
            let Ok(changes) = self.changes_to_send(owner, id, Depths::AGREED) else {
                self.handle_prepared(id, false);
                continue;
            };
            let changes = QpChanges::new(with.session, with.qp, changes);
            self.ask_at(with.session, PrepareQp { changes }, move |control, is_ready| {
                control.handle_prepared(id, is_ready);
            });
        }
    }

    fn handle_prepared(&mut self, id: Handle, is_ready: bool) {
        let super::Cm { machine, world, .. } = &mut self.cm;
        machine.handle_prepared(world, id, is_ready);
    }
}
