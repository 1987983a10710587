//! Passes: 16 random bytes that name one open context within one vNIC. See [`imports`](crate::control::imports).
use crate::admission::account::Charge;
use crate::base::machine::random_bytes;
use crate::base::slab::Key;
use crate::control::session::{ContextEntry, Objects};
use freeflow_engine::{ContextId, VnicId};
use freeflow_protocol::library::{Handle, PASS_BYTES};
use freeflow_shm::sealed_file;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) type PassBytes = [u8; PASS_BYTES];

/// A context, as the control thread finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextName {
    pub connection: Key,
    pub context: Handle,
}

/// The passes of all open contexts. Only the control thread looks; a pass may be dropped elsewhere.
#[derive(Clone, Default)]
pub struct Passes(Arc<Mutex<BTreeMap<(VnicId, PassBytes), ContextName>>>);

impl Passes {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(VnicId, PassBytes), ContextName>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn find(&self, vnic: VnicId, pass: PassBytes) -> Option<ContextName> {
        self.lock().get(&(vnic, pass)).copied()
    }
}

/// The pass of one context; it names nothing any more when dropped.
pub struct Pass {
    passes: Passes,
    name: (VnicId, PassBytes),
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.passes.lock().remove(&self.name);
    }
}

/// Parameters for opening a context.
pub(crate) struct Opening {
    pub passes: Passes,
    pub connection: Key,
    pub name: (VnicId, PassBytes),
    /// It is an import of this one.
    pub exporter: Option<ContextName>,
}

impl Opening {
    /// A context with a pass of its own. Errors: no entropy.
    pub(crate) fn fresh(passes: &Passes, connection: Key, vnic: VnicId) -> io::Result<Self> {
        let name = (vnic, random_bytes()?);
        Ok(Self { passes: passes.clone(), connection, name, exporter: None })
    }

    /// A sealed file with the pass, for the library.
    pub(crate) fn file(&self) -> io::Result<OwnedFd> {
        sealed_file("freeflow-pass", &self.name.1)
    }

    /// The context is open: the pass is good from now on. An imported context has its exporter's,
    /// which stays that one's.
    pub(crate) fn finish(self, objects: &mut Objects, id: ContextId, charge: Charge) -> Handle {
        let Self { passes, connection, name, exporter } = self;
        let entry = ContextEntry { id, pass: None, exporter, imported_pd_count: 0, _charge: charge };
        let context = objects.contexts.insert(entry);
        if exporter.is_none()
            && let Ok(entry) = objects.contexts.get_mut(context)
        {
            passes.lock().insert(name, ContextName { connection, context });
            entry.pass = Some(Pass { passes, name });
        }
        context
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_pass_names_nothing() {
        let passes = Passes::default();
        let (vnic, other) = (VnicId { index: 1, generation: 0 }, VnicId { index: 2, generation: 0 });
        let name = ContextName { connection: Key { index: 0, generation: 0 }, context: 1 };
        passes.lock().insert((vnic, [7; PASS_BYTES]), name);
        let pass = Pass { passes: passes.clone(), name: (vnic, [7; PASS_BYTES]) };
        assert_eq!(passes.find(vnic, [7; PASS_BYTES]), Some(name));
        assert_eq!(passes.find(other, [7; PASS_BYTES]), None);
        drop(pass);
        assert_eq!(passes.find(vnic, [7; PASS_BYTES]), None);
    }
}
