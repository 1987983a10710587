//! Commands to share revoked memory again; what earns one is in [`resharing`](crate::memory::resharing).
use crate::dataplane::ports::{Ports, Session};
use crate::dataplane::table::Table;
use crate::memory::grants::{Grants, Name};
use crate::memory::slow_path::Part;
use freeflow_engine::SessionId;
use freeflow_protocol::library::COMMAND_RESHARE;

impl Grants {
    /// A copier gets these to do.
    pub(crate) fn note_slow_path(&mut self, sessions: &mut Table<SessionId, Session>, parts: &[Part]) {
        for part in parts {
            if let Some(session) = sessions.get_mut(part.session)
                && let Some(segment) = session.lost.note_moved(part.address, part.bytes as u64)
            {
                self.leaving.wanted.push((part.session, segment));
            }
        }
    }
}

impl Ports {
    /// A process that reads no commands gets none of these: they are owed to nobody.
    pub(crate) fn send_reshare_commands(&mut self) {
        let wanted: Vec<Name> = std::mem::take(&mut self.grants.leaving.wanted);
        for (session, segment) in wanted {
            let commands = self.sessions.get(session).and_then(|session| session.commands);
            if let Some(pipe) = commands.filter(|&pipe| !self.pipes.is_behind(pipe)) {
                self.pipes.send(pipe, segment, COMMAND_RESHARE);
            }
        }
    }
}
