//! Requests about memory regions beyond registering them, and about memory windows.
use crate::base::slab::Key;
use crate::control::requests::{Outcome, once, unless_in_flight};
use crate::control::session::{Answer, MrEntry, MwEntry, Objects};
use crate::control::thread::Control;
use crate::dataplane::worker::Worker;
use freeflow_engine::{MrKeys, SessionId};
use freeflow_protocol::library::{Handle, Reply};
use freeflow_verbs::{Instant, RegionChange, VerbsError, WindowKind};
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
        let work = move |worker: &mut Worker, now: Instant| {
            worker.rings.withdraw_grants_by(id);
            worker.rings.give_orders(now);
            // A change that takes something away makes the keys invalid while a copy is in flight, so
            // the copies of the movers are brought in first.
            worker.land_copies_of(now, session);
            unless_in_flight(worker.engine.reregister_mr(session, id, pd, &change))
        };
        self.submit(at, work, move |connection, keys: MrKeys| {
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
        let work = move |worker: &mut Worker, _: Instant| once(worker.engine.alloc_null_mr(session, pd));
        self.submit(at, work, move |connection, keys: MrKeys| {
            let mr = connection.objects.insert_mr(MrEntry::new(&keys, pd, 0, 0));
            Answer::of(Reply::Mr { mr, lkey: keys.lkey, rkey: keys.rkey })
        })
    }

    pub(crate) fn alloc_mw(&mut self, at: (Key, SessionId), pd: Handle, kind: WindowKind) -> Outcome {
        let session = at.1;
        let pd = self.objects(at.0)?.pds.get(pd)?.id;
        let work = move |worker: &mut Worker, _: Instant| once(worker.engine.alloc_mw(session, pd, kind));
        self.submit(at, work, |connection, (id, rkey)| {
            let mw = connection.objects.mws.insert(MwEntry { id });
            Answer::of(Reply::Mw { mw, rkey })
        })
    }

    pub(crate) fn dealloc_mw(&mut self, at: (Key, SessionId), mw: Handle) -> Outcome {
        let session = at.1;
        let id = self.objects(at.0)?.mws.get(mw)?.id;
        let work = move |worker: &mut Worker, _: Instant| unless_in_flight(worker.engine.dealloc_mw(session, id));
        self.submit(at, work, move |connection, ()| {
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
