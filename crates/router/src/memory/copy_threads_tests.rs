//! Copies by copy threads: the bytes, whose turn it is, and that nothing of a session is touched once it is
//! settled.
use crate::base::mode::Mode;
use crate::base::wake::Waker;
use crate::dataplane::ports::{Ports, Session};
use crate::memory::copy_threads::{CopyThreadOptions, CopyThreads, WORKERS_MAX};
use crate::memory::page_table::PageTable;
use crate::memory::slow_path::TenantMemory;
use crate::memory::transfers::Arrival;
use freeflow_engine::{CopyOutcome, MemorySide, SessionId, Source, SourceBody, Span, SpanRegion, Token, VnicId};
use freeflow_shm::{Doorbell, Segment, SessionSegment, monotonic_ns};
use freeflow_verbs::Instant;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::channel;

const AT: u64 = 0x100000;

/// There is none: all memory of these sessions is shared.
struct Nothing;

impl TenantMemory for Nothing {
    fn read(&self, _: &mut [u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }

    fn write(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::NotFound.into())
    }
}

struct Rig {
    ports: Ports,
    segments: Vec<Arc<Segment>>,
}

fn id(index: u32) -> SessionId {
    SessionId { index, generation: 0 }
}

fn vnic(index: u32) -> VnicId {
    VnicId { index, generation: 0 }
}

impl Rig {
    /// Sessions of `bytes` each, every one of a vNIC of its own.
    fn new(workers: u32, move_bytes_min: Option<u32>, sessions: u32, bytes: usize) -> Self {
        let (sender, _) = channel();
        let waker = Arc::new(Waker::new().unwrap());
        let mut ports = Ports::new(sender, waker.clone());
        let options = CopyThreadOptions { workers: Some(workers), move_bytes_min };
        ports.copy_threads = CopyThreads::start(options, Mode::LowCpu, &waker).unwrap();
        let mut segments = Vec::new();
        for index in 0..sessions {
            let segment = Arc::new(Segment::create("test", bytes).unwrap().0);
            let fill: Vec<u8> = (0..bytes).map(|at| (at / 7) as u8 ^ (31 * index) as u8).collect();
            segment.write(0, &fill, false).unwrap();
            let mut memory = PageTable::new(Arc::new(Nothing), Arc::default());
            memory.map(AT, segment.clone()).unwrap();
            segments.push(segment);
            ports.copy_threads.assign(vnic(index));
            let kick = Arc::new(Doorbell::new().unwrap());
            let session = Session::new(vnic(index), SessionSegment::create().unwrap().0, kick, memory);
            ports.sessions.insert(id(index), session);
        }
        Self { ports, segments }
    }

    fn copy(&mut self, token: u64, from: &[Span], to: &[Span]) -> CopyOutcome {
        let source = Source { prefix: &[], body: SourceBody::Spans(from) };
        self.ports.start_copy(Token(token), source, to, true)
    }

    fn bytes(&self, session: u32, at: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.segments[session as usize].read(at, &mut bytes).unwrap();
        bytes
    }

    fn arrivals(&mut self, count: usize) -> Vec<(u64, Result<(), MemorySide>)> {
        let (mut arrived, began) = (Vec::new(), monotonic_ns());
        while arrived.len() < count {
            assert!(monotonic_ns() - began < 30_000_000_000, "waited in vain");
            self.ports.copy_threads.collect(self.ports.epoch, 64);
            while let Some(Arrival::Copied(Token(token), result)) = self.ports.poll_moved() {
                arrived.push((token, result));
            }
        }
        arrived
    }
}

fn span(session: u32, offset: u64, length: u32) -> Span {
    Span { session: id(session), region: SpanRegion::new(0, false), address: AT + offset, length }
}

#[test]
fn one_below_eight_processors_or_as_asked() {
    let auto = |cpus| CopyThreadOptions::default().worker_count(cpus);
    assert_eq!([1, 2, 7, 8, 16, 24, 32, 256].map(auto), [1, 1, 1, 2, 2, 3, 4, 4]);
    let asked = |count| CopyThreadOptions { workers: Some(count), move_bytes_min: None }.worker_count(2);
    assert_eq!([0, 1, 5, 1000].map(asked), [1, 1, 5, WORKERS_MAX]);
    assert_eq!(Rig::new(1, None, 1, 4096).ports.copy_threads.worker_count(), 1);
}

#[test]
fn a_vnic_goes_where_the_fewest_are_and_stays() {
    let mut rig = Rig::new(3, None, 6, 4096);
    let homes = |rig: &Rig| (0..6).map(|at| rig.ports.copy_threads.home(vnic(at))).collect::<Vec<_>>();
    assert_eq!(homes(&rig), [1, 2, 3, 1, 2, 3]);
    for gone in [1, 4] {
        rig.ports.copy_threads.release(vnic(gone));
    }
    for new in [7, 8] {
        rig.ports.copy_threads.assign(vnic(new));
        assert_eq!(rig.ports.copy_threads.home(vnic(new)), 2);
    }
    assert_eq!(rig.ports.copy_threads.home(vnic(0)), 1);
}

#[test]
fn lists_are_copied_piece_by_piece() {
    let mut rig = Rig::new(2, Some(1), 3, 1 << 20);
    let from = [span(0, 5, 70_000), span(0, 300_001, 3), span(2, 9, 50_000)];
    let to = [span(1, 40_000, 1), span(1, 200_000, 90_000), span(1, 77, 30_002)];
    let wanted = [rig.bytes(0, 5, 70_000), rig.bytes(0, 300_001, 3), rig.bytes(2, 9, 50_000)].concat();
    assert_eq!(rig.copy(9, &from, &to), CopyOutcome::Pending);
    assert_eq!(rig.ports.copy_threads.in_flight(), 1);
    assert_eq!(rig.arrivals(1), [(9, Ok(()))]);
    let got = [rig.bytes(1, 40_000, 1), rig.bytes(1, 200_000, 90_000), rig.bytes(1, 77, 30_002)].concat();
    assert!(got == wanted);
    assert_eq!((rig.ports.copy_threads.in_flight(), rig.ports.copy_threads.moved_bytes()), (0, 120_003));
}

#[test]
fn what_is_small_alone_or_no_segment_is_the_workers() {
    let mut rig = Rig::new(2, None, 4, 1 << 20);
    rig.ports.now = Instant(1_000_000_000);
    assert_eq!(rig.copy(1, &[span(0, 0, 65_536)], &[span(1, 0, 65_536)]), CopyOutcome::Done, "nobody else");
    assert_eq!(rig.copy(2, &[span(2, 0, 65_536)], &[span(3, 0, 65_536)]), CopyOutcome::Pending, "two at once");
    assert_eq!(rig.copy(3, &[span(0, 0, 32_767)], &[span(1, 0, 32_767)]), CopyOutcome::Done, "small");
    let void = Span { session: SessionId::VOID, ..span(0, 0, 65_536) };
    assert_eq!(rig.copy(4, &[void], &[span(1, 0, 65_536)]), CopyOutcome::Done, "void");
    assert_eq!(rig.copy(5, &[span(1, 0, 65_536)], &[void]), CopyOutcome::Done, "into the void");
    let beyond = [span(2, (1 << 20) - 10, 65_536)];
    assert_ne!(rig.copy(6, &beyond, &[span(3, 0, 65_536)]), CopyOutcome::Done, "by the slow path");
    assert_eq!(rig.arrivals(1), [(2, Ok(()))]);
    rig.ports.waker.set_crowded(true);
    assert_eq!(rig.copy(8, &[span(0, 0, 65_536)], &[span(1, 0, 65_536)]), CopyOutcome::Done, "a crowd of pollers");
    assert_eq!(rig.copy(9, &[span(0, 0, 131_072)], &[span(1, 0, 131_072)]), CopyOutcome::Pending);
    assert_eq!(rig.arrivals(1), [(9, Ok(()))]);
    rig.ports.now = Instant(1_100_000_000);
    assert_eq!(rig.copy(7, &[span(2, 0, 65_536)], &[span(3, 0, 65_536)]), CopyOutcome::Done, "alone again");
}

#[test]
fn nothing_of_a_session_is_touched_once_it_is_settled() {
    const BYTES: u32 = 1 << 20;
    let mut rig = Rig::new(2, Some(1), 4, 8 << 20);
    for round in 0..30 {
        let clean = vec![0; 8 << 20];
        rig.segments[1].write(0, &clean, false).unwrap();
        for part in 0..8 {
            let offset = part * u64::from(BYTES);
            assert_eq!(rig.copy(part, &[span(0, offset, BYTES)], &[span(1, offset, BYTES)]), CopyOutcome::Pending);
            assert_eq!(rig.copy(part + 8, &[span(2, offset, BYTES)], &[span(3, offset, BYTES)]), CopyOutcome::Pending);
        }
        rig.ports.settle(id(if round % 2 == 0 { 0 } else { 1 }));
        // All is there now, though nothing was reported yet; and what is written now stays.
        assert!(rig.bytes(0, 0, 8 << 20) == rig.bytes(1, 0, 8 << 20), "round {round}");
        rig.segments[1].write(0, &clean, false).unwrap();
        let mut arrived = rig.arrivals(16);
        arrived.sort_unstable_by_key(|&(token, _)| token);
        assert_eq!(arrived, (0..16).map(|token| (token, Ok(()))).collect::<Vec<_>>());
        assert!(rig.bytes(1, 0, 8 << 20) == clean);
        assert!(rig.bytes(2, 0, 8 << 20) == rig.bytes(3, 0, 8 << 20));
        assert_eq!(Arc::strong_count(&rig.segments[1]), 3, "the page table's two and this one");
    }
}

#[test]
fn a_vnic_with_many_copies_does_not_hold_up_others() {
    let mut rig = Rig::new(2, Some(1), 3, 4 << 20);
    for token in 0..200 {
        assert_eq!(rig.copy(token, &[span(0, 0, 2 << 20)], &[span(1, 0, 2 << 20)]), CopyOutcome::Pending);
    }
    // At home where the first is.
    assert_eq!((rig.ports.copy_threads.home(vnic(0)), rig.ports.copy_threads.home(vnic(2))), (1, 1));
    for token in 1000..1004 {
        assert_eq!(rig.copy(token, &[span(2, 0, 4096)], &[span(2, 8192, 4096)]), CopyOutcome::Pending);
    }
    let arrived = rig.arrivals(204);
    let others: Vec<usize> = (0..arrived.len()).filter(|&at| arrived[at].0 >= 1000).collect();
    // As number 6, or later by what the other copy thread does while the machine gives one no
    // processor; in order of posting as 202. The fourth may be in the hands of one that gets none
    // for as long as all of it takes.
    assert!(others[2] < 150, "the third of four came as number {}", others[2]);
    let of_first: Vec<u64> = arrived.iter().map(|&(token, _)| token).filter(|&token| token < 1000).collect();
    assert_eq!(of_first.len(), 200);
}
