//! Contexts that processes of one vNIC share: passes, and the objects that a pass lets another process import.
//!
//! A *pass* is 16 random bytes that name one open context within one vNIC. A process gets them in a sealed file when it
//! opens the context; whoever it hands them to may import the context, and then the PDs, MRs and segments of it, by
//! the handles that they have in the exporting process.
//!
//! Invariant: an object is looked up in the connection that the pass names and nowhere else, and that connection is one
//! of the importer's own vNIC.
use crate::admission::account::Charge;
use crate::base::machine::random_bytes;
use crate::base::slab::Key;
use crate::control::requests::{Handled, Outcome};
use crate::control::session::{Answer, Connection, ContextEntry, MrEntry, Objects, PdEntry, Phase, SegmentEntry};
use crate::control::thread::Control;
use crate::dataplane::command::{DeallocPd, SharePd, UnsharePd};
use freeflow_engine::{ContextId, SessionId, VnicId};
use freeflow_protocol::library::{Handle, PASS_BYTES, Reply};
use freeflow_verbs::VerbsError;
use rustix::fs::{MemfdFlags, SealFlags};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type PassBytes = [u8; PASS_BYTES];

/// A context, as the control thread finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextName {
    connection: Key,
    context: Handle,
}

/// The passes of all open contexts. Only the control thread looks; a pass may be dropped elsewhere.
#[derive(Clone, Default)]
pub struct Passes(Arc<Mutex<BTreeMap<(VnicId, PassBytes), ContextName>>>);

impl Passes {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(VnicId, PassBytes), ContextName>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, vnic: VnicId, pass: PassBytes) -> Option<ContextName> {
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

/// What a context is opened with.
pub(crate) struct Opening {
    passes: Passes,
    connection: Key,
    name: (VnicId, PassBytes),
    /// It is an import of this one.
    exporter: Option<ContextName>,
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

    /// The context is open: the pass is good from now on. An imported context has its exporter's, which stays that one's.
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

/// A memfd with these bytes, which nobody can change.
fn sealed_file(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Linux before 6.3.
        Err(rustix::io::Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
        other => other?,
    };
    if rustix::io::pwrite(&file, bytes, 0)? != bytes.len() {
        return Err(io::ErrorKind::WriteZero.into());
    }
    rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// The process and the context that something is imported from.
struct Exporter<'a> {
    session: SessionId,
    objects: &'a Objects,
    context: &'a ContextEntry,
}

impl Control {
    pub(crate) fn import_context(&mut self, at: (Key, SessionId), pass: PassBytes) -> Outcome {
        let vnic = self.vnic_of(at.0).ok_or(VerbsError::DeviceFatal)?.engine_id;
        let name = self.passes.find(vnic, pass).ok_or(VerbsError::NotFound)?;
        self.exporter(at.0, name)?;
        let opening =
            Opening { passes: self.passes.clone(), connection: at.0, name: (vnic, pass), exporter: Some(name) };
        self.open_context(at, opening)
    }

    /// The exporter of that name, if it lives and is of the same vNIC as the importer.
    fn exporter(&self, importer: Key, name: ContextName) -> Result<Exporter<'_>, VerbsError> {
        let importer = self.connections.get(importer).ok_or(VerbsError::NotFound)?;
        let connection = self.connections.get(name.connection).ok_or(VerbsError::NotFound)?;
        let Phase::Ready(session) = connection.phase else { return Err(VerbsError::NotFound) };
        if connection.closing || connection.vnic != importer.vnic {
            return Err(VerbsError::NotFound);
        }
        let objects = &connection.objects;
        Ok(Exporter { session, objects, context: objects.contexts.get(name.context)? })
    }

    /// Where objects that are imported into this context come from: an ordinary context's own are its own.
    fn exporter_of(&self, importer: Key, context: Handle) -> Result<Exporter<'_>, VerbsError> {
        let connection = self.connections.get(importer).ok_or(VerbsError::NotFound)?;
        let entry = connection.objects.contexts.get(context)?;
        self.exporter(importer, entry.exporter.unwrap_or(ContextName { connection: importer, context }))
    }

    fn charge_import(&self, key: Key) -> Result<Charge, VerbsError> {
        let vnic = self.vnic_of(key).ok_or(VerbsError::DeviceFatal)?;
        Ok(Charge::import(&vnic.account, u64::from(vnic.record.limits.mr_count_max))?)
    }

    pub(crate) fn import_pd(&mut self, at: (Key, SessionId), context: Handle, pd: Handle) -> Outcome {
        let (key, session) = at;
        let exporter = self.exporter_of(key, context)?;
        let found = exporter.objects.pds.get(pd)?;
        if found.context != exporter.context.id {
            return Err(VerbsError::NotFound);
        }
        let (id, owner) = (found.id, exporter.session);
        let entry = PdEntry { id, context: self.objects(key)?.contexts.get(context)?.id, import: Some(context) };
        self.submit(at, SharePd { owner, session, pd: id }, move |connection, ()| {
            if let Ok(context) = connection.objects.contexts.get_mut(context) {
                context.imported_pd_count += 1;
            }
            let pd = connection.objects.pds.insert(entry);
            Answer::of(Reply::Pd { pd })
        })
    }

    pub(crate) fn dealloc_pd(&mut self, at: (Key, SessionId), pd: Handle) -> Outcome {
        let (key, session) = at;
        let PdEntry { id, import, .. } = *self.objects(key)?.pds.get(pd)?;
        let finish = move |connection: &mut Connection, ()| {
            connection.objects.pds.remove(pd);
            if let Some(context) = import
                && let Ok(context) = connection.objects.contexts.get_mut(context)
            {
                context.imported_pd_count -= 1;
            }
            Answer::done()
        };
        match import {
            Some(_) => self.submit(at, UnsharePd { session, pd: id }, finish),
            None => self.submit(at, DeallocPd { session, pd: id }, finish),
        }
    }

    pub(crate) fn import_mr(&mut self, at: (Key, SessionId), pd: Handle, mr: Handle) -> Outcome {
        let key = at.0;
        let objects = &self.connections.get(key).ok_or(VerbsError::NotFound)?.objects;
        let pd = objects.pds.get(pd)?;
        let (id, found) = match &pd.import {
            Some(context) => (pd.id, self.exporter_of(key, *context)?.objects.mrs.get(mr)?),
            None => (pd.id, objects.mrs.get(mr)?),
        };
        if found.pd != id {
            return Err(VerbsError::InvalidArgument);
        }
        let entry = found.imported(self.charge_import(key)?);
        let (lkey, rkey, length) = (entry.lkey, entry.rkey, entry.length);
        let mr = self.objects(key)?.mrs.insert(entry);
        Ok(Handled::Answered(Answer::of(Reply::ImportedMr { mr, lkey, rkey, length })))
    }

    pub(crate) fn import_segment(&mut self, key: Key, context: Handle, segment: Handle) -> Outcome {
        let found = self.exporter_of(key, context)?.objects.segments.get(segment)?;
        let length = found.segment.bytes() as u64;
        let descriptor = found.lease.descriptor().ok_or(VerbsError::NoMemory)?;
        if !found.lease.mark_imported() {
            return Err(VerbsError::NotSupported);
        }
        let descriptor = descriptor.try_clone().map_err(|_| VerbsError::NoMemory)?;
        let (segment, lease) = (found.segment.clone(), found.lease.clone());
        let import = Some(self.charge_import(key)?);
        let entry = SegmentEntry { segment, mapped_at: None, lease, _import: import };
        let segment = self.objects(key)?.segments.insert(entry);
        Ok(Handled::Answered(Answer::with(Reply::Segment { segment, length }, vec![descriptor])))
    }
}

impl MrEntry {
    /// The same region, in the process that imports it: nothing lies over its own memory.
    fn imported(&self, charge: Charge) -> Self {
        Self { extent: None, import: Some(charge), ..*self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_pass_can_not_be_changed() {
        let file = sealed_file("test", b"0123456789abcdef").unwrap();
        assert!(rustix::io::pwrite(&file, b"x", 0).is_err());
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        let mut bytes = [0; PASS_BYTES];
        assert_eq!(rustix::io::pread(&file, &mut bytes, 0), Ok(PASS_BYTES));
        assert_eq!(&bytes, b"0123456789abcdef");
    }

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
