//! How work requests are serialized: the used part of their arrays, so that a request of one SGE
//! costs tens of bytes and not more than a thousand. What a request does not use is zero when it is
//! read back.
use crate::work::{ReceiveRequest, SendFlags, SendOpcode, SendRequest, Sge};
use crate::{INLINE_BYTES_MAX, SGE_COUNT_MAX};
use alloc::vec::Vec;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A send request with slices to write, or vectors that were read, as its arrays.
#[derive(Serialize, Deserialize)]
struct StoredSend<S, B> {
    work_request_id: u64,
    opcode: SendOpcode,
    flags: SendFlags,
    ring_position: u32,
    immediate: u32,
    remote_address: u64,
    rkey: u32,
    compare_add: u64,
    swap: u64,
    remote_srqn: u32,
    address_handle: u32,
    remote_qpn: u32,
    remote_qkey: u32,
    sges: S,
    inline_data: B,
}

#[derive(Serialize, Deserialize)]
struct StoredReceive<S> {
    work_request_id: u64,
    ring_position: u32,
    sges: S,
}

impl Serialize for SendRequest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Exhaustive, so that a new field can't be forgotten.
        let Self {
            work_request_id,
            opcode,
            flags,
            ring_position,
            sge_count: _,
            inline_length,
            immediate,
            remote_address,
            rkey,
            compare_add,
            swap,
            remote_srqn,
            address_handle,
            remote_qpn,
            remote_qkey,
            sges: _,
            inline_data,
        } = self;
        let stored = StoredSend {
            work_request_id: *work_request_id,
            opcode: *opcode,
            flags: *flags,
            ring_position: *ring_position,
            immediate: *immediate,
            remote_address: *remote_address,
            rkey: *rkey,
            compare_add: *compare_add,
            swap: *swap,
            remote_srqn: *remote_srqn,
            address_handle: *address_handle,
            remote_qpn: *remote_qpn,
            remote_qkey: *remote_qkey,
            sges: self.sges(),
            inline_data: &inline_data[..usize::from(*inline_length).min(INLINE_BYTES_MAX)],
        };
        stored.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for SendRequest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let stored = StoredSend::<Vec<Sge>, Vec<u8>>::deserialize(deserializer)?;
        if stored.inline_data.len() > INLINE_BYTES_MAX {
            return Err(D::Error::custom("too much inline data"));
        }
        let (sges, sge_count) = array(&stored.sges)?;
        let mut request = Self {
            work_request_id: stored.work_request_id,
            opcode: stored.opcode,
            flags: stored.flags,
            ring_position: stored.ring_position,
            sge_count,
            inline_length: stored.inline_data.len() as u16,
            immediate: stored.immediate,
            remote_address: stored.remote_address,
            rkey: stored.rkey,
            compare_add: stored.compare_add,
            swap: stored.swap,
            remote_srqn: stored.remote_srqn,
            address_handle: stored.address_handle,
            remote_qpn: stored.remote_qpn,
            remote_qkey: stored.remote_qkey,
            sges,
            inline_data: [0; INLINE_BYTES_MAX],
        };
        request.inline_data[..stored.inline_data.len()].copy_from_slice(&stored.inline_data);
        Ok(request)
    }
}

impl Serialize for ReceiveRequest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { work_request_id, ring_position, sge_count: _, sges: _ } = self;
        let (work_request_id, ring_position) = (*work_request_id, *ring_position);
        StoredReceive { work_request_id, ring_position, sges: self.sges() }.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for ReceiveRequest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let StoredReceive { work_request_id, ring_position, sges } =
            StoredReceive::<Vec<Sge>>::deserialize(deserializer)?;
        let (sges, sge_count) = array(&sges)?;
        Ok(Self { work_request_id, ring_position, sge_count, sges })
    }
}

fn array<E: Error>(used: &[Sge]) -> Result<([Sge; SGE_COUNT_MAX], u8), E> {
    let mut sges = [Sge::default(); SGE_COUNT_MAX];
    let place = sges.get_mut(..used.len()).ok_or_else(|| E::custom("too many scatter/gather entries"))?;
    place.copy_from_slice(used);
    Ok((sges, used.len() as u8))
}
