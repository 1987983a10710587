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

/// Room for the entries of a list.
pub(crate) type Ranges = [OwnRange; RANGES_MAX];

pub(crate) const NO_RANGES: Ranges = [OwnRange { address: 0, bytes: 0 }; RANGES_MAX];

/// A request's own memory, checked.
#[derive(Clone, Copy)]
pub(crate) struct Payload<'a> {
    pub inline: &'a [u8],
    pub ranges: &'a [OwnRange],
    pub bytes: u32,
}

impl<'a> Payload<'a> {
    pub const NOTHING: Self = Self { inline: &[], ranges: &[], bytes: 0 };

    /// `None`: the router says what is wrong, if anything is. The entries are put into `room`.
    #[inline(always)] // for the one range that most have
    pub fn of(
        request: &SendDescriptor<'a>,
        context: &QpContext<'_>,
        keys: &mut Cache,
        room: &'a mut Ranges,
    ) -> Option<Self> {
        if let Some(inline) = request.inline {
            return Some(Self { inline, ranges: &[], bytes: inline.len() as u32 });
        }
        let needed = if request.opcode == SendOpcode::RdmaRead { Access::LOCAL_WRITE } else { Access(0) };
        let [sge] = request.sges else { return Self::of_several(request.sges, needed, &{ *context }, keys, room) };
        if sge.length == 0 {
            return Some(Self::NOTHING);
        }
        room[0] = context.session.regions.resolve(keys, sge, context.pd, needed)?;
        Some(Self { inline: &[], ranges: &room[..1], bytes: sge.length })
    }

    #[inline(never)]
    fn of_several(
        sges: &[Sge],
        needed: Access,
        context: &QpContext<'_>,
        keys: &mut Cache,
        room: &'a mut Ranges,
    ) -> Option<Self> {
        let (mut count, mut bytes) = (0, 0_u32);
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            let range = context.session.regions.resolve(keys, sge, context.pd, needed)?;
            *room.get_mut(count)? = range;
            count += 1;
            bytes = bytes.checked_add(range.bytes)?;
        }
        Some(Self { inline: &[], ranges: &room[..count], bytes })
    }
}
