//! Copies and atomic operations between memory of every kind, void memory among them, against a model.
use crate::base::wake::Waker;
use crate::dataplane::ports::{Ports, Session, Vnic};
use crate::memory::page_table::PageTable;
use crate::memory::slow_path::{Finished, TenantMemory};
use crate::memory::transfers::Arrival;
use freeflow_engine::{
    AtomicOutcome, CopyOutcome, MemorySide, SessionId, Source, SourceBody, Span, SpanRegion, Token, VnicId,
};
use freeflow_shm::{Doorbell, Segment, SessionSegment};
use freeflow_verbs::{AtomicOperation, NetworkId};
use std::io;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};

const SHARED_AT: u64 = 0x10000;
const ORDINARY_AT: u64 = 0x40000;
const BYTES: usize = 0x8000;
const SESSION: SessionId = SessionId { index: 0, generation: 0 };

struct Ordinary(Mutex<Vec<u8>>);

impl TenantMemory for Ordinary {
    fn read(&self, into: &mut [u8], address: u64) -> io::Result<()> {
        let at = (address - ORDINARY_AT) as usize;
        into.copy_from_slice(&self.0.lock().unwrap()[at..at + into.len()]);
        Ok(())
    }

    fn write(&self, from: &[u8], address: u64) -> io::Result<()> {
        let at = (address - ORDINARY_AT) as usize;
        self.0.lock().unwrap()[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Shared,
    Ordinary,
    Void,
}

struct Rig {
    ports: Ports,
    finished: Receiver<Finished>,
    shared: Arc<Segment>,
    ordinary: Arc<Ordinary>,
    random: u64,
}

impl Rig {
    fn new() -> Self {
        let (sender, finished) = channel();
        let mut ports = Ports::new(sender, Arc::new(Waker::new().unwrap()));
        let vnic = VnicId { index: 0, generation: 0 };
        ports.vnics.insert(vnic, Vnic::new(NetworkId(1), false));
        let shared = Arc::new(Segment::create("test", BYTES).unwrap().0);
        let ordinary = Arc::new(Ordinary(Mutex::new(vec![0; BYTES])));
        let mut memory = PageTable::new(ordinary.clone(), Arc::default());
        memory.map(SHARED_AT, shared.clone()).unwrap();
        let kick = Arc::new(Doorbell::new().unwrap());
        let session = Session::new(vnic, SessionSegment::create().unwrap().0, kick, memory);
        ports.sessions.insert(SESSION, session);
        Self { ports, finished, shared, ordinary, random: 0x9e37_79b9_7f4a_7c15 }
    }

    fn next(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    /// Spans of `bytes` together, no two of which overlap; `half`: which half of memory they lie in.
    fn spans(&mut self, bytes: usize, half: u64) -> Vec<(Kind, Span)> {
        let (mut spans, mut left, mut offset) = (Vec::new(), bytes, half * BYTES as u64 / 2);
        while left > 0 {
            let length = (1 + self.next(3000) as usize).min(left);
            let (kind, session, base) = match self.next(3) {
                0 => (Kind::Shared, SESSION, SHARED_AT),
                1 => (Kind::Ordinary, SESSION, ORDINARY_AT),
                _ => (Kind::Void, SessionId::VOID, 0xdead_0000),
            };
            let length = if kind == Kind::Void { left.min(length * 8) } else { length };
            spans.push((
                kind,
                Span { session, region: SpanRegion::new(0, false), address: base + offset, length: length as u32 },
            ));
            offset += if kind == Kind::Void { 0 } else { length as u64 };
            left -= length;
        }
        spans
    }

    fn memory(&self) -> [Vec<u8>; 2] {
        let mut shared = vec![0; BYTES];
        self.shared.read(0, &mut shared).unwrap();
        [shared, self.ordinary.0.lock().unwrap().clone()]
    }

    fn copy(&mut self, source: Source<'_>, to: &[Span]) {
        match self.ports.start_copy(Token(7), source, to, true) {
            CopyOutcome::Done => {}
            CopyOutcome::Pending => loop {
                let finished = self.finished.recv().unwrap();
                match self.ports.handle_finished(finished) {
                    Some(Arrival::Copied(Token(7), Ok(()))) => break,
                    None => {}
                    other => panic!("{other:?}"),
                }
            },
            CopyOutcome::Fault(side) => panic!("{side:?}"),
        }
        assert_eq!(self.ports.transfers.in_flight(), 0);
    }
}

fn place(kind: Kind, span: &Span, memory: &[Vec<u8>; 2]) -> Vec<u8> {
    let (index, base) = if kind == Kind::Shared { (0, SHARED_AT) } else { (1, ORDINARY_AT) };
    let at = span.address.wrapping_sub(base) as usize;
    match kind {
        Kind::Void => vec![0; span.length as usize],
        _ => memory[index][at..at + span.length as usize].to_vec(),
    }
}

#[test]
fn spans_of_every_kind_mix() {
    let mut rig = Rig::new();
    for round in 0..400_u64 {
        let noise: Vec<u8> = (0..BYTES).map(|at| (at as u64 * 7 + round) as u8 | 1).collect();
        rig.shared.write(0, &noise, false).unwrap();
        rig.ordinary.0.lock().unwrap().copy_from_slice(&noise);
        let bytes = 1 + rig.next(12_000) as usize;
        let (from, to) = (rig.spans(bytes, 0), rig.spans(bytes, 1));
        let mut expected = rig.memory();
        let body: Vec<u8> = from.iter().flat_map(|(kind, span)| place(*kind, span, &expected)).collect();
        // Some are datagrams out of the ring: a prefix and bytes.
        let inline = round % 4 == 1;
        let mut at = 0;
        for (kind, span) in &to {
            let part = &body[at..at + span.length as usize];
            at += part.len();
            let (index, base) = if *kind == Kind::Shared { (0, SHARED_AT) } else { (1, ORDINARY_AT) };
            if *kind != Kind::Void {
                let place = (span.address - base) as usize;
                expected[index][place..place + part.len()].copy_from_slice(part);
            }
        }
        let from: Vec<Span> = from.into_iter().map(|(_, span)| span).collect();
        let to: Vec<Span> = to.into_iter().map(|(_, span)| span).collect();
        let cut = body.len().min(40);
        let source = if inline {
            Source { prefix: &body[..cut], body: SourceBody::Bytes(&body[cut..]) }
        } else {
            Source { prefix: &[], body: SourceBody::Spans(&from) }
        };
        rig.copy(source, &to);
        assert!(rig.memory() == expected, "round {round}: {from:?} to {to:?}");
    }
}

#[test]
fn an_atomic_operation_on_nothing_finds_zero() {
    let mut rig = Rig::new();
    let at = Span { session: SessionId::VOID, region: SpanRegion::new(0, false), address: 8, length: 8 };
    for operation in [AtomicOperation::FetchAdd { add: 5 }, AtomicOperation::CompareSwap { compare: 0, swap: 9 }] {
        assert_eq!(rig.ports.start_atomic(Token(1), at, operation), AtomicOutcome::Done(0));
    }
}

/// Four pages, of which the second and the last are shared as parts, and a copy to all of them that
/// the copier has done its part of.
fn half_done() -> (Rig, Arc<Segment>, Finished) {
    let mut rig = Rig::new();
    let arena = Arc::new(Segment::create("test", 0x5000).unwrap().0);
    for page in [1, 3] {
        rig.map_page(&arena, page);
    }
    let to = Span { session: SESSION, region: SpanRegion::new(0, false), address: ORDINARY_AT, length: 0x4000 };
    let source = Source { prefix: &[], body: SourceBody::Bytes(&[7; 0x4000]) };
    assert_eq!(rig.ports.start_copy(Token(7), source, &[to], true), CopyOutcome::Pending);
    let finished = rig.finished.recv().unwrap();
    (rig, arena, finished)
}

impl Rig {
    fn map_page(&mut self, arena: &Arc<Segment>, page: u64) {
        let memory = &mut self.ports.sessions.get_mut(SESSION).unwrap().memory;
        memory.map_part(ORDINARY_AT + 0x1000 * page, arena.clone(), 0x1000 * page, 0x1000).unwrap();
    }

    fn unmap_page(&mut self, page: u64) {
        let memory = &mut self.ports.sessions.get_mut(SESSION).unwrap().memory;
        memory.unmap_parts(ORDINARY_AT + 0x1000 * page, ORDINARY_AT + 0x1000 * (page + 1));
    }
}

#[test]
fn a_copy_is_done_again_where_its_destination_was_taken_back() {
    let (mut rig, arena, finished) = half_done();
    rig.unmap_page(1);
    assert!(rig.ports.handle_finished(finished).is_none());
    let finished = rig.finished.recv().unwrap();
    let arrival = rig.ports.handle_finished(finished);
    assert!(matches!(arrival, Some(Arrival::Copied(Token(7), Ok(())))), "{arrival:?}");
    assert_eq!(rig.memory()[1][..0x3000], [7; 0x3000]);
    let mut last = [0; 0x1000];
    arena.read(0x3000, &mut last).unwrap();
    assert_eq!(last, [7; 0x1000]);
}

#[test]
fn what_is_taken_back_elsewhere_does_not_concern_a_copy() {
    let (mut rig, arena, finished) = half_done();
    rig.map_page(&arena, 4);
    rig.unmap_page(4);
    let arrival = rig.ports.handle_finished(finished);
    assert!(matches!(arrival, Some(Arrival::Copied(Token(7), Ok(())))), "{arrival:?}");
}

#[test]
fn a_copy_whose_destination_is_taken_back_again_and_again_fails() {
    let (mut rig, arena, mut finished) = half_done();
    let mut rounds = 1;
    let arrival = loop {
        let (gone, back) = if rounds % 2 == 1 { (1, 2) } else { (2, 1) };
        rig.unmap_page(gone);
        rig.map_page(&arena, back);
        match rig.ports.handle_finished(finished) {
            None => finished = rig.finished.recv().unwrap(),
            Some(arrival) => break arrival,
        }
        rounds += 1;
    };
    assert!(matches!(arrival, Arrival::Copied(Token(7), Err(MemorySide::Destination))), "{arrival:?}");
    assert_eq!((rounds, rig.ports.transfers.in_flight()), (8, 0));
}
