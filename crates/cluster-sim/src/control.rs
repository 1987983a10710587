//! A controller's memory: who wants in, and which blocks it has given.
use freeflow_orchestrator::Pool;
use std::collections::{BTreeMap, VecDeque};

#[derive(Default)]
pub struct Control {
    /// Hosts of which there are records.
    pub host_count: usize,
    /// Hosts that want in, or are about to ask.
    pub joining: usize,
    pub pending: VecDeque<usize>,
    pub passed_over: VecDeque<usize>,
    /// Requests that it answers still before its next round.
    pub batch_left: usize,
    pub batch_began: u64,
    pub is_planned: bool,
    /// Of each token.
    pub admitted: BTreeMap<usize, usize>,
    /// Hosts for which there is no block of `default`.
    pub refused: usize,
    /// All blocks.
    pub blocks: BTreeMap<(String, String), Pool>,
    pub to_give: Vec<(String, Option<String>)>,
    pub is_giving: bool,
    /// The revision of the last of them.
    pub given_at: u64,
    /// Transactions of blocks.
    pub written: u64,
    /// Blocks of declared networks that hosts have, and that they lack, as there are no more.
    pub given: usize,
    pub without_block: usize,
    /// Time of this machine for one look for blocks, the longest; and for one host that is admitted.
    pub look_ns: u64,
    pub admit_ns: u64,
}

impl Control {
    /// A round comes after the requests that it is answering.
    pub fn is_in_batch(&self) -> bool {
        self.batch_left > 0
    }

    /// Each host has a block of each network, or there is none for it.
    pub fn has_given(&self, hosts: usize, networks: usize) -> bool {
        self.given + self.without_block >= (hosts - self.refused) * networks
    }
}
