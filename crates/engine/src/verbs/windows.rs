//! Verbs of memory windows (IBTA 11.2.8.7, 11.2.8.8).
use crate::window::MemoryWindow;
use crate::{Engine, MwId, PdId, Refusal, SessionId};
use freeflow_verbs::{VerbsError, WindowKind};

impl Engine {
    // ---- verbs

    /// Gives the window and its first key. Unbound, it opens nothing.
    ///
    /// # Errors
    /// NoMemory: the vNIC has as many as it may. NotFound: not the session's PD.
    pub fn alloc_mw(&mut self, session: SessionId, pd: PdId, kind: WindowKind) -> Result<(MwId, u32), VerbsError> {
        self.pd_of(session, pd)?;
        self.completer().keys.check_room()?;
        let vnic = self.requester.responder.session_vnic(session)?;
        self.charge(vnic, |usage| &mut usage.mws, |limits| limits.mw_count_max)?;
        self.add_pd_child(session, pd);
        Ok(self
            .requester
            .responder
            .completer
            .keys
            .register_window(&mut self.random, MemoryWindow::new(session, pd, kind)))
    }

    /// Takes a binding away too. The key is invalid as soon as this is first called; `InFlight`
    /// until no copy uses the window.
    ///
    /// # Errors
    /// [`Refusal::Error`] with NotFound: not the session's window.
    pub fn dealloc_mw(&mut self, session: SessionId, mw: MwId) -> Result<(), Refusal> {
        self.completer().keys.windows.owned(session, mw).map_err(Refusal::Error)?;
        if self.completer_mut().release(mw) {
            self.remove_mw(mw);
            Ok(())
        } else {
            Err(Refusal::InFlight)
        }
    }

    pub(crate) fn remove_mw(&mut self, mw: MwId) {
        self.completer_mut().unbind(mw.index);
        let Some(gone) = self.completer_mut().keys.remove_window(mw) else { return };
        assert_eq!(gone.in_flight, 0, "no operation uses a window that goes");
        self.drop_pd_child(gone.session, gone.pd);
        self.refund_session(gone.session, |usage| &mut usage.mws);
        for waiter in gone.waiters {
            self.completer_mut().wake(waiter);
        }
    }
}
