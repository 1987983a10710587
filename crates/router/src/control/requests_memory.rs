//! Requests about memory regions beyond registering them, and about memory windows.
use crate::base::slab::Key;
use crate::control::session::Outcome;
use crate::control::session::{Answer, MrEntry, MwEntry, Objects};
use crate::control::thread::Control;
use crate::dataplane::command::{AllocMw, AllocNullMr, DeallocMw, ReregisterMr};
use freeflow_engine::{MrKeys, SessionId};
use freeflow_protocol::library::{Handle, Reply};
use freeflow_verbs::{RegionChange, VerbsError, WindowKind};
use std::ops::Range;

impl Control {
    pub(crate) fn reregister_mr(
        &mut self,
        at: (Key, SessionId),
        mr: Handle,
        pd: Option<Handle>,
        change: RegionChange,
    ) -> Outcome {
        let session = at.1;
        let objects = self.objects(at.0)?;
        let entry = objects.mrs.get(mr)?;
        if entry.import.is_some() {
            // Another process registered it.
            return Err(VerbsError::NotSupported);
        }
        let id = entry.id;
        let pd = pd.map(|pd| objects.pds.get(pd).map(|entry| entry.id)).transpose()?;
        self.submit(at, ReregisterMr { session, mr: id, pd, change }, move |connection, keys: MrKeys| {
            let Objects { mrs, extents, .. } = &mut connection.objects;
            if let Ok(entry) = mrs.get_mut(mr) {
                entry.pd = pd.unwrap_or(entry.pd);
                if let Some(new) = change.translation {
                    let before = std::mem::replace(entry, MrEntry::new(&keys, entry.pd, new.address, new.length));
                    before.extent.iter().for_each(|range| extents.remove(range));
                    entry.extent.iter().for_each(|range| extents.insert(range));
                }
            }
            Answer::of(Reply::Mr { mr, lkey: keys.lkey, rkey: keys.rkey })
        })
    }

    pub(crate) fn alloc_null_mr(&mut self, at: (Key, SessionId), pd: Handle) -> Outcome {
        let session = at.1;
        let pd = self.objects(at.0)?.pds.get(pd)?.id;
        self.submit(at, AllocNullMr { session, pd }, move |connection, keys: MrKeys| {
            let mr = connection.objects.insert_mr(MrEntry::new(&keys, pd, 0, 0));
            Answer::of(Reply::Mr { mr, lkey: keys.lkey, rkey: keys.rkey })
        })
    }

    pub(crate) fn alloc_mw(&mut self, at: (Key, SessionId), pd: Handle, kind: WindowKind) -> Outcome {
        let session = at.1;
        let pd = self.objects(at.0)?.pds.get(pd)?.id;
        self.submit(at, AllocMw { session, pd, kind }, |connection, (id, rkey)| {
            let mw = connection.objects.mws.insert(MwEntry { id });
            Answer::of(Reply::Mw { mw, rkey })
        })
    }

    pub(crate) fn dealloc_mw(&mut self, at: (Key, SessionId), mw: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.mws.get(mw)?.id;
        self.submit(at, DeallocMw { session, mw: id }, move |connection, ()| {
            connection.objects.mws.remove(mw);
            Answer::done()
        })
    }
}

impl Objects {
    pub(crate) fn insert_mr(&mut self, entry: MrEntry) -> Handle {
        if let Some(range) = &entry.extent {
            self.extents.insert(range);
        }
        self.mrs.insert(entry)
    }

    pub(crate) fn remove_mr(&mut self, mr: Handle) -> Option<MrEntry> {
        let entry = self.mrs.remove(mr)?;
        if let Some(range) = &entry.extent {
            self.extents.remove(range);
        }
        Some(entry)
    }

    /// Whether a memory region touches the range.
    pub(crate) fn has_mr_over(&self, start: u64, bytes: u64) -> bool {
        let range: Range<u64> = start..start.saturating_add(bytes);
        self.extents.touch(&range)
    }
}
