//! Model of memory and queues if requests are executed in order, and of the results allowed where
//! some of them may not have been.
use freeflow_engine::MwId;
use freeflow_verbs::SendOpcode;
use std::collections::VecDeque;

/// How far a memory window is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowPhase {
    Free,
    /// The request with this number binds it.
    Binding(u64),
    Open,
    /// The peer takes it away.
    Closing,
}

/// A memory window over an area.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub mw: MwId,
    pub key: u32,
    pub phase: WindowPhase,
}

/// A request that was posted.
#[derive(Clone, Debug)]
pub struct Posted {
    pub id: u64,
    /// Counts the requests of its side.
    pub number: u64,
    pub opcode: SendOpcode,
    pub signaled: bool,
    /// It must not succeed.
    pub forbidden: bool,
    /// Bytes that READs and atomics must bring: where, what, and from where in the area.
    pub brings: Option<Brings>,
    /// The how manieth message with a RECV it is.
    pub message: Option<u64>,
}

#[derive(Clone, Debug)]
pub struct Brings {
    pub to: u64,
    pub bytes: Vec<u8>,
    /// READ: the place in the area. Atomics happen once: nothing but `bytes` will do.
    pub from: Option<u64>,
}

/// A message that a RECV must find.
#[derive(Clone, Debug)]
pub struct Expected {
    pub number: u64,
    pub is_send: bool,
    pub bytes: Vec<u8>,
    pub immediate: Option<u32>,
    /// The key that it takes away.
    pub invalidates: Option<u32>,
    /// WRITE with immediate data: where its bytes are.
    pub at: Option<u64>,
}

struct Effect {
    number: u64,
    at: usize,
    bytes: Vec<u8>,
}

/// Memory that one peer writes to.
pub struct Area {
    /// With all that is known to be executed.
    sure: Vec<u8>,
    /// With all that was posted.
    last: Vec<u8>,
    /// Posted and not known to be executed.
    effects: VecDeque<Effect>,
}

impl Area {
    pub fn new(bytes: usize) -> Self {
        Self { sure: vec![0; bytes], last: vec![0; bytes], effects: VecDeque::new() }
    }

    /// As requests that are posted now will find it.
    pub fn last(&self) -> &[u8] {
        &self.last
    }

    pub fn write(&mut self, number: u64, at: u64, bytes: &[u8]) {
        let at = at as usize;
        self.last[at..at + bytes.len()].copy_from_slice(bytes);
        self.effects.push_back(Effect { number, at, bytes: bytes.to_vec() });
    }

    /// Requests up to this one are executed.
    pub fn done(&mut self, number: u64) {
        while let Some(effect) = self.effects.pop_front_if(|effect| effect.number <= number) {
            self.sure[effect.at..effect.at + effect.bytes.len()].copy_from_slice(&effect.bytes);
        }
    }

    /// Whether a later request may have put this byte there.
    fn may_be(&self, after: u64, at: usize, byte: u8) -> bool {
        self.effects.iter().any(|effect| {
            let within = at >= effect.at && at < effect.at + effect.bytes.len();
            effect.number > after && within && effect.bytes[at - effect.at] == byte
        })
    }

    /// `found` at `at`, where the request `number` must have seen or left `bytes`: or what a later
    /// request wrote.
    pub fn explains(&self, number: u64, at: u64, bytes: &[u8], found: &[u8]) -> bool {
        bytes.len() == found.len()
            && bytes
                .iter()
                .zip(found)
                .enumerate()
                .all(|(offset, (expected, byte))| expected == byte || self.may_be(number, at as usize + offset, *byte))
    }

    /// The first byte that nothing explains.
    pub fn unexplained(&self, found: &[u8]) -> Option<usize> {
        (0..found.len()).find(|&at| found[at] != self.sure[at] && !self.may_be(0, at, found[at]))
    }

    pub fn has_unsure(&self) -> bool {
        !self.effects.is_empty()
    }

    /// A new connection begins with what is there.
    pub fn settle(&mut self, found: &[u8]) {
        self.sure.copy_from_slice(found);
        self.last.copy_from_slice(found);
        self.effects.clear();
    }
}
