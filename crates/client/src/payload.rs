//! A request's own memory, as the direct path takes it.
use crate::regions::Cache;
use crate::session::Session;
use freeflow_protocol::library::Handle;
use freeflow_shm::{OwnMemory, OwnRange, SendDescriptor};
use freeflow_verbs::{Access, SendOpcode, Sge};

/// Entries of a list that is carried out here.
pub(crate) const RANGES_MAX: usize = 4;

/// The queue pair of a request.
#[derive(Clone, Copy)]
pub(crate) struct QpContext<'a> {
    pub session: &'a Session,
    pub handle: Handle,
    pub cookie: u32,
    pub pd: Handle,
    pub own: OwnMemory,
}

/// A request's own memory, checked.
pub(crate) struct Payload<'a> {
    pub inline: &'a [u8],
    ranges: [OwnRange; RANGES_MAX],
    count: usize,
    pub bytes: u32,
}

impl<'a> Payload<'a> {
    pub const NOTHING: Self =
        Self { inline: &[], ranges: [OwnRange { address: 0, bytes: 0 }; RANGES_MAX], count: 0, bytes: 0 };

    #[inline(always)] // most have one, which is known then
    pub fn ranges(&self) -> &[OwnRange] {
        &self.ranges[..self.count]
    }

    /// `None`: the router says what is wrong, if anything is.
    #[inline(always)] // for the one range that most have
    pub fn of(request: &SendDescriptor<'a>, context: &QpContext<'_>, keys: &mut Cache) -> Option<Self> {
        let mut payload = Self::NOTHING;
        if let Some(inline) = request.inline {
            (payload.inline, payload.bytes) = (inline, inline.len() as u32);
            return Some(payload);
        }
        let needed = if request.opcode == SendOpcode::RdmaRead { Access::LOCAL_WRITE } else { Access(0) };
        let [sge] = request.sges else { return Self::of_several(request.sges, needed, context, keys) };
        if sge.length > 0 {
            payload.ranges[0] = context.session.regions.resolve(keys, sge, context.pd, needed)?;
            (payload.count, payload.bytes) = (1, sge.length);
        }
        Some(payload)
    }

    #[inline(never)]
    fn of_several(sges: &[Sge], needed: Access, context: &QpContext<'_>, keys: &mut Cache) -> Option<Self> {
        let mut payload = Self::NOTHING;
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            let range = context.session.regions.resolve(keys, sge, context.pd, needed)?;
            *payload.ranges.get_mut(payload.count)? = range;
            payload.count += 1;
            payload.bytes = payload.bytes.checked_add(range.bytes)?;
        }
        Some(payload)
    }
}
