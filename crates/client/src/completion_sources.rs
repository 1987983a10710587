//! The queues whose completions come to a CQ, and what is outstanding of them.
use crate::inbox::LocalCompletion;
use crate::registry::CompletedCount;
use crate::rings::Rings;
use freeflow_verbs::{Completion, CompletionFlags, CompletionOpcode, CompletionStatus};
use std::sync::Arc;

/// Attachments of one block of the table, a power of two.
const BLOCK: usize = 64;

/// Which of a QP's completions come to a CQ.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Role {
    pub sends: bool,
    pub receives: bool,
}

/// A queue with completions that come to a CQ.
pub(crate) enum CompletionSource {
    Qp(Arc<Rings>, Role),
    /// An XRC SRQ: the QP may be another process'.
    Srq(Arc<CompletedCount>),
}

type Block = [Option<CompletionSource>; BLOCK];

/// The QPs and XRC SRQs whose completions come to a CQ, by cookie: a two-level table.
#[derive(Default)]
pub(crate) struct Attached {
    blocks: Vec<Option<Box<Block>>>,
}

impl Attached {
    pub fn add(&mut self, cookie: u32, source: CompletionSource) {
        let cookie = cookie as usize;
        if self.blocks.len() <= cookie / BLOCK {
            self.blocks.resize_with(cookie / BLOCK + 1, || None);
        }
        let block = self.blocks[cookie / BLOCK].get_or_insert_with(|| Box::new([const { None }; BLOCK]));
        block[cookie % BLOCK] = Some(source);
    }

    pub fn remove(&mut self, cookie: u32) {
        let cookie = cookie as usize;
        let Some(Some(block)) = self.blocks.get_mut(cookie / BLOCK) else { return };
        block[cookie % BLOCK] = None;
        if block.iter().all(Option::is_none) {
            self.blocks[cookie / BLOCK] = None;
        }
    }

    #[inline]
    pub fn get(&self, cookie: u32) -> Option<&CompletionSource> {
        let cookie = cookie as usize;
        let block = self.blocks.get(cookie / BLOCK)?.as_ref()?;
        block[cookie % BLOCK].as_ref()
    }

    /// Frees the slot of a completed request and returns the completion, unless its QP or SRQ is
    /// gone. Says how many it returned.
    #[inline]
    pub fn give_back(&self, completion: &Completion, take: &mut impl FnMut(&Completion)) -> usize {
        match self.get(completion.qp_cookie) {
            Some(CompletionSource::Qp(rings, _)) if rings.qpn == completion.qpn => rings.give_back(completion),
            Some(CompletionSource::Srq(completed)) => completed.add_one(),
            _ => return 0,
        }
        take(completion);
        1
    }

    /// The same for one of the inbox.
    #[inline]
    pub fn give_back_own(&self, completion: &Completion, take: &mut impl FnMut(&Completion)) -> usize {
        match self.get(completion.qp_cookie) {
            Some(CompletionSource::Qp(rings, _)) if rings.qpn == completion.qpn => rings.give_back_own(completion),
            _ => return 0,
        }
        take(completion);
        1
    }

    /// Whether those completions of its queue were returned that the router wrote before.
    #[inline]
    pub fn has_turn(&self, own: &LocalCompletion) -> bool {
        match self.get(own.completion.qp_cookie) {
            Some(CompletionSource::Qp(rings, _)) => rings.has_turn(own.after),
            _ => true,
        }
    }

    pub fn each_receiver(&self, mut each: impl FnMut(&Rings)) {
        for source in self.blocks.iter().flatten().flat_map(|block| block.iter().flatten()) {
            if let CompletionSource::Qp(rings, role) = source
                && role.receives
                && rings.has_incoming()
            {
                each(rings);
            }
        }
    }

    /// Whether the RECVs of this QP complete here.
    pub fn receives_of(&self, rings: &Rings) -> bool {
        matches!(self.get(rings.cookie), Some(CompletionSource::Qp(own, role)) if role.receives && own.qpn == rings.qpn)
    }

    /// The router is gone: completes what is outstanding, in the order of posting in each queue.
    pub fn flush(&self, limit: usize, take: &mut impl FnMut(&Completion)) -> usize {
        let mut count = 0;
        for source in self.blocks.iter().flatten().flat_map(|block| block.iter().flatten()) {
            let CompletionSource::Qp(rings, role) = source else { continue };
            let mut completion = Completion {
                status: CompletionStatus::WorkRequestFlushed,
                qpn: rings.qpn,
                qp_cookie: rings.cookie,
                ..Completion::default()
            };
            while role.sends
                && count < limit
                && let Some((position, wr_id)) = rings.oldest_send()
            {
                completion.opcode = CompletionOpcode::Send;
                completion.flags = CompletionFlags(CompletionFlags::SEND_QUEUE);
                completion.ring_position = position;
                completion.work_request_id = wr_id;
                rings.give_back(&completion);
                take(&completion);
                count += 1;
            }
            while role.receives
                && count < limit
                && let Some((position, wr_id)) = rings.oldest_receive()
            {
                completion.opcode = CompletionOpcode::Receive;
                completion.flags = CompletionFlags(0);
                completion.ring_position = position;
                completion.work_request_id = wr_id;
                rings.give_back(&completion);
                take(&completion);
                count += 1;
            }
        }
        count
    }
}
