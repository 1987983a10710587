//! Commands to share memory, and revoked memory again; what earns one is in [`sharing`](crate::memory::sharing) and
//! [`resharing`](crate::memory::resharing).
use crate::dataplane::ports::{Ports, Session};
use crate::dataplane::slow_path_counts::{SlowPathCounts, SlowPathReason};
use crate::dataplane::table::Table;
use crate::memory::grants::Grants;
use crate::memory::slow_path::Part;
use crate::memory::transfers::Way;
use freeflow_engine::SessionId;
use freeflow_protocol::library::{COMMAND_RESHARE, Handle, share_command};
use freeflow_verbs::Instant;

/// A command to share something, as its two words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareCommand {
    pub session: SessionId,
    words: (u32, u32),
}

impl ShareCommand {
    fn of_segment(session: SessionId, segment: Handle) -> Self {
        Self { session, words: (segment, COMMAND_RESHARE) }
    }

    fn of_block(session: SessionId, address: u64) -> Self {
        Self { session, words: share_command(address) }
    }
}

/// Why a part is reached by the slow path. `session`: whose it is, or nobody's.
pub(crate) fn slow_path_reason(session: Option<&Session>, part: &Part, way: Way) -> SlowPathReason {
    let Some(session) = session.filter(|_| way == Way::Mapped) else { return SlowPathReason::Missing };
    if session.lost.has(part.address) {
        SlowPathReason::TakenBack
    } else if !part.is_sharable {
        SlowPathReason::OnDemand
    } else if session.commands.is_none() {
        SlowPathReason::NoCommands
    } else if session.slow_path_use.was_asked(part.address) {
        SlowPathReason::NotShared
    } else {
        SlowPathReason::NotSharedYet
    }
}

impl Grants {
    /// A copier gets these to do, of a vNIC whose counts these are.
    pub(crate) fn note_slow_path(
        &mut self,
        sessions: &mut Table<SessionId, Session>,
        now: Instant,
        (parts, way): (&[Part], Way),
        counts: &mut SlowPathCounts,
    ) {
        let wanted = &mut self.leaving.wanted;
        for part in parts {
            counts.add(slow_path_reason(sessions.get(part.session), part, way), part.bytes as u64);
            let Some(session) = sessions.get_mut(part.session) else { continue };
            let (id, bytes) = (part.session, part.bytes as u64);
            if session.lost.has(part.address) {
                let segment = session.lost.note_moved(part.address, bytes);
                wanted.extend(segment.map(|segment| ShareCommand::of_segment(id, segment)));
            } else if part.is_sharable && session.commands.is_some() {
                let mut want = |block| wanted.push(ShareCommand::of_block(id, block));
                session.slow_path_use.note(now, part.address, bytes, &mut want);
            }
        }
    }
}

impl Ports {
    /// A process that reads no commands gets none of these: they are owed to nobody.
    pub(crate) fn send_share_commands(&mut self) {
        for ShareCommand { session, words: (first, second) } in std::mem::take(&mut self.grants.leaving.wanted) {
            let commands = self.sessions.get(session).and_then(|session| session.commands);
            if let Some(pipe) = commands.filter(|&pipe| !self.pipes.is_behind(pipe)) {
                self.pipes.send(pipe, first, second);
            }
        }
    }
}
