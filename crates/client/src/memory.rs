//! Protection domains, memory regions and windows: control calls without state of their own.
use crate::regions::Region;
use crate::session::Session;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_verbs::{Access, RegionChange, VerbsError, WindowKind};

/// A registered memory region. Its keys are what the application sees.
#[derive(Clone, Copy, Debug)]
pub struct MemoryRegion {
    pub handle: Handle,
    pub lkey: u32,
    pub rkey: u32,
}

impl Session {
    pub fn alloc_pd(&self, context: Handle) -> Result<Handle, VerbsError> {
        match self.call(&Request::AllocPd { context })? {
            (Reply::Pd { pd }, _) => Ok(pd),
            _ => Err(self.nonsense()),
        }
    }

    /// Refused with Busy while something is in it. What was imported is only given up.
    pub fn dealloc_pd(&self, pd: Handle) -> Result<(), VerbsError> {
        self.destroy(&Request::DeallocPd { pd })
    }

    /// A PD of the process that the context was imported from. → this process' own handle.
    ///
    /// # Errors
    /// NotFound: that process has no such PD, or `context` is not imported.
    pub fn import_pd(&self, context: Handle, pd: Handle) -> Result<Handle, VerbsError> {
        match self.call(&Request::ImportPd { context, pd })? {
            (Reply::Pd { pd }, _) => Ok(pd),
            _ => Err(self.nonsense()),
        }
    }

    /// Registers memory. It is mapped, unless it is paged on demand.
    pub fn register(
        &self,
        pd: Handle,
        address: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<MemoryRegion, VerbsError> {
        let made = self.region(&Request::RegisterMr { pd, address, length, iova, access })?;
        if !access.contains(Access::ON_DEMAND) {
            self.regions.insert(made.lkey, Region { handle: made.handle, pd, iova, length, address, access });
        }
        Ok(made)
    }

    /// A region of all addresses: reads give zeros, writes are dropped.
    pub fn alloc_null_region(&self, pd: Handle) -> Result<MemoryRegion, VerbsError> {
        self.region(&Request::AllocNullMr { pd })
    }

    fn region(&self, request: &Request) -> Result<MemoryRegion, VerbsError> {
        match self.call(request)? {
            (Reply::Mr { mr, lkey, rkey }, _) => Ok(MemoryRegion { handle: mr, lkey, rkey }),
            _ => Err(self.nonsense()),
        }
    }

    /// Changes a region in place. On return nothing of what it covered before is read or written
    /// any more.
    ///
    /// # Errors
    /// Busy: windows are bound to it.
    pub fn reregister(&self, mr: Handle, pd: Option<Handle>, change: RegionChange) -> Result<MemoryRegion, VerbsError> {
        let before = self.regions.remove(mr);
        let made = match self.region(&Request::ReregisterMr { mr, pd, change }) {
            Ok(made) => made,
            Err(error) => {
                if let Some((lkey, region)) = before {
                    self.regions.insert(lkey, region);
                }
                return Err(error);
            }
        };
        let after = before.map(|(_, region)| changed(region, pd, &change));
        if let Some(region) = after.filter(|region| !region.access.contains(Access::ON_DEMAND)) {
            self.regions.insert(made.lkey, Region { handle: made.handle, ..region });
        }
        Ok(made)
    }

    /// On return nothing of the region is read or written any more. What was imported is only given
    /// up.
    ///
    /// # Errors
    /// Busy: windows are bound to it.
    pub fn deregister(&self, mr: Handle) -> Result<(), VerbsError> {
        let before = self.regions.remove(mr);
        self.destroy(&Request::DeregisterMr { mr }).inspect_err(|_| {
            if let Some((lkey, region)) = before {
                self.regions.insert(lkey, region);
            }
        })
    }

    /// A region of the process that the PD was imported from, and its length in bytes.
    pub fn import_region(&self, pd: Handle, mr: Handle) -> Result<(MemoryRegion, u64), VerbsError> {
        match self.call(&Request::ImportMr { pd, mr })? {
            (Reply::ImportedMr { mr, lkey, rkey, length }, _) => Ok((MemoryRegion { handle: mr, lkey, rkey }, length)),
            _ => Err(self.nonsense()),
        }
    }

    /// → the window's handle and its key.
    pub fn alloc_window(&self, pd: Handle, kind: WindowKind) -> Result<(Handle, u32), VerbsError> {
        match self.call(&Request::AllocMw { pd, kind })? {
            (Reply::Mw { mw, rkey }, _) => Ok((mw, rkey)),
            _ => Err(self.nonsense()),
        }
    }

    /// Takes its binding away too.
    pub fn dealloc_window(&self, mw: Handle) -> Result<(), VerbsError> {
        self.destroy(&Request::DeallocMw { mw })
    }
}

/// A region after a change that the router made.
fn changed(before: Region, pd: Option<Handle>, change: &RegionChange) -> Region {
    let mut after = Region { pd: pd.unwrap_or(before.pd), access: change.access.unwrap_or(before.access), ..before };
    if let Some(place) = change.translation {
        (after.address, after.length, after.iova) = (place.address, place.length, place.iova);
    }
    after
}
