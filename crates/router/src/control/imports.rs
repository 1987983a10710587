//! Contexts that processes of one vNIC share: passes, and the objects that a pass lets another process import.
//!
//! A *pass* is 16 random bytes that name one open context within one vNIC. A process gets them in a sealed file when it
//! opens the context; whoever it hands them to may import the context, and then the PDs, MRs and segments of it, by
//! the handles that they have in the exporting process.
//!
//! Invariant: an object is looked up in the connection that the pass names and nowhere else, and that connection is one
//! of the importer's own vNIC.
use crate::admission::account::Charge;
use crate::base::slab::Key;
use crate::control::passes::{ContextName, Opening, PassBytes};
use crate::control::session::{Answer, Connection, ContextEntry, MrEntry, Objects, PdEntry, Phase, SegmentEntry};
use crate::control::session::{Handled, Outcome};
use crate::control::thread::Control;
use crate::dataplane::command::{DeallocPd, SharePd, UnsharePd};
use freeflow_engine::SessionId;
use freeflow_protocol::library::{Handle, Reply};
use freeflow_verbs::VerbsError;

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
        let is_in_guest = self.vnic_of(key).is_some_and(|vnic| vnic.attachment.shared_memory().is_some());
        let refusal = if is_in_guest { VerbsError::NotSupported } else { VerbsError::NoMemory };
        let descriptor = found.lease.descriptor().ok_or(refusal)?;
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
