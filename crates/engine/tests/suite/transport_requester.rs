//! The requester and completer of RC and XRC against a peer that is a script: the packets of each operation, their
//! acknowledgements, the window, the order of requests. Losses and refusals: `transport_retransmit.rs`.
use crate::common::peer::pattern;
use crate::common::rig::*;
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::{AtomicEth, MASK_24, NakCode, Operation as O, PacketPosition as P, Reth, psn_add};

// ---- packets of each operation

/// SEND and WRITE of every kind: places, payload, PSNs, the extension headers, AckReq on the last packet only.
#[test]
fn messages_with_payload() {
    let mtus = [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu2048, PathMtu::Mtu4096];
    let operations = [
        (SendOpcode::Send, O::Send, O::Send),
        (SendOpcode::SendWithImmediate, O::Send, O::SendImmediate),
        (SendOpcode::SendWithInvalidate, O::Send, O::SendInvalidate),
        (SendOpcode::RdmaWrite, O::Write, O::Write),
        (SendOpcode::RdmaWriteWithImmediate, O::Write, O::WriteImmediate),
    ];
    for mtu in mtus {
        let size = mtu.bytes() as usize;
        for (opcode, begins, ends) in operations {
            for length in [0, 1, 3, size - 1, size, size + 1, 3 * size, 3 * size + 2] {
                let mut rig = Rig::new(mtu);
                rig.fill(&pattern(length));
                let request = SendRequest { immediate: 0x1122_3344, ..rig.request(1, opcode, length) };
                rig.post(SendRequest { flags: SendFlags(SendFlags::SIGNALED | SendFlags::SOLICITED), ..request });
                let out = rig.out();
                let count = length.div_ceil(size).max(1);
                assert_eq!(out.len(), count, "{opcode:?} {length} at {size}");
                for (at, (header, _)) in out.iter().enumerate() {
                    let last = at + 1 == count;
                    let place = match (at == 0, last) {
                        (true, true) => P::Only,
                        (true, false) => P::First,
                        (false, true) => P::Last,
                        (false, false) => P::Middle,
                    };
                    assert_eq!(header.opcode.place(), place);
                    assert_eq!(header.opcode.operation(), if last { ends } else { begins });
                    assert_eq!(header.psn, psn_add(FIRST_PSN, at as u32));
                    assert_eq!((header.ack_request, header.migrated, header.pkey), (last, false, 0xffff));
                    assert_eq!(header.solicited, last && opcode.consumes_receive());
                    if header.opcode.has_reth() {
                        assert_eq!(header.reth, Reth { address: 0x7000, rkey: 0x55aa, length: length as u32 });
                    }
                    if header.opcode.has_immediate() {
                        assert_eq!(header.immediate, 0x1122_3344);
                    }
                    if header.opcode.has_ieth() {
                        assert_eq!(header.invalidate, 0x1122_3344);
                    }
                }
                assert!(out.iter().rev().skip(1).all(|(_, payload)| payload.len() == size));
                let payload: Vec<u8> = out.iter().flat_map(|(_, payload)| payload.clone()).collect();
                assert_eq!(payload, pattern(length));
                assert_eq!(rig.statuses(), []);
                rig.ack(count as u32 - 1);
                assert_eq!(rig.statuses(), [(1, SUCCESS)]);
                assert_eq!(rig.net.engine.poll_timeout(), None, "no timer while nothing is under way");
            }
        }
    }
}

#[test]
fn inline_payload() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    let mut request = rig.request(1, SendOpcode::RdmaWrite, 0);
    request.inline_data[..600].copy_from_slice(&pattern(600));
    request.inline_length = 600;
    request.flags = SendFlags(SendFlags::SIGNALED | SendFlags::INLINE);
    rig.post(request);
    let out = rig.out();
    assert_eq!(out.iter().flat_map(|(_, payload)| payload.clone()).collect::<Vec<_>>(), pattern(600));
    assert_eq!(out.iter().map(|(_, payload)| payload.len()).collect::<Vec<_>>(), [256, 256, 88]);
}

#[test]
fn gathered_from_several_places() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.fill(&pattern(4096));
    let sges = [rig.sge(1000, 300), rig.sge(0, 0), rig.sge(10, 200)];
    rig.post(SendRequest { rkey: 1, ..request(1, SendOpcode::RdmaWrite, &sges) });
    let payload: Vec<u8> = rig.out().iter().flat_map(|(_, payload)| payload.clone()).collect();
    let memory = pattern(4096);
    assert_eq!(payload, [&memory[1000..1300], &memory[10..210]].concat());
}

#[test]
fn a_read_takes_the_psns_of_its_responses() {
    for (length, packets) in [(0, 1), (1, 1), (256, 1), (257, 2), (1000, 4)] {
        let mut rig = Rig::new(PathMtu::Mtu256);
        rig.read(1, length);
        rig.write(2, 0);
        let out = rig.out();
        assert_eq!(out.len(), 2);
        let (header, payload) = &out[0];
        assert_eq!((header.opcode.operation(), header.opcode.place()), (O::ReadRequest, P::Only));
        assert_eq!((header.psn, header.ack_request, payload.len()), (FIRST_PSN, true, 0));
        assert_eq!(header.reth, Reth { address: 0x7000, rkey: 0x55aa, length: length as u32 });
        assert_eq!(out[1].0.psn, psn_add(FIRST_PSN, packets), "{length}");
        let data = pattern(length);
        for at in 0..packets {
            let end = length.min((at as usize + 1) * 256);
            let place = match (at, packets) {
                (0, 1) => P::Only,
                (0, _) => P::First,
                _ if at + 1 == packets => P::Last,
                _ => P::Middle,
            };
            assert_eq!(rig.statuses(), []);
            rig.respond(at, place, &data[at as usize * 256..end]);
        }
        let completion = rig.net.only(&rig.end.clone());
        assert_eq!((completion.byte_count, completion.opcode), (length as u32, CompletionOpcode::RdmaRead));
        assert_eq!(rig.memory(length), data);
    }
}

#[test]
fn atomics() {
    let mut rig = Rig::new(PathMtu::Mtu1024);
    let cas = SendRequest { compare_add: 5, swap: 9, ..rig.request(1, SendOpcode::CompareSwap, 8) };
    rig.post(cas);
    let add = SendRequest { compare_add: 7, ..rig.request(2, SendOpcode::FetchAdd, 8) };
    rig.post(add);
    let out = rig.out();
    let (address, rkey) = (0x7000, 0x55aa);
    assert_eq!(out[0].0.opcode.operation(), O::CompareSwap);
    assert_eq!(out[0].0.atomic, AtomicEth { address, rkey, swap_add: 9, compare: 5 });
    assert_eq!(out[1].0.opcode.operation(), O::FetchAdd);
    assert_eq!(out[1].0.atomic, AtomicEth { address, rkey, swap_add: 7, compare: 0 });
    assert!(out.iter().all(|(header, payload)| header.ack_request && payload.is_empty()));
    rig.original(0, 0x0102_0304_0506_0708);
    assert_eq!(rig.memory(8), 0x0102_0304_0506_0708u64.to_ne_bytes(), "host byte order");
    rig.original(1, 3);
    assert_eq!(rig.succeeded(), [1, 2]);
}

#[test]
fn flush_and_atomic_write_are_answered_by_empty_read_responses() {
    let mut rig = Rig::new(PathMtu::Mtu1024);
    rig.fill(&[1, 2, 3, 4, 5, 6, 7, 8]);
    rig.post(rig.request(1, SendOpcode::AtomicWrite, 8));
    // Global, the whole region.
    let flush = SendRequest { compare_add: 100, swap: 1 | 1 << 8, ..rig.request(2, SendOpcode::Flush, 0) };
    rig.post(flush);
    let out = rig.out();
    assert_eq!((out[0].0.opcode.operation(), out[0].0.reth.length), (O::AtomicWrite, 8));
    assert_eq!(out[0].1, [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!((out[1].0.opcode.operation(), out[1].0.flush, out[1].0.reth.length), (O::Flush, 1 | 1 << 4, 100));
    rig.respond(0, P::Only, &[]);
    rig.respond(1, P::Only, &[]);
    assert_eq!(rig.succeeded(), [1, 2]);
}

#[test]
fn xrc_names_its_queue_in_every_packet() {
    let mut rig = Rig::with(QpType::XrcSend, PathMtu::Mtu256, attributes());
    let send = SendRequest { remote_srqn: 0x1234, ..rig.request(1, SendOpcode::Send, 600) };
    rig.post(send);
    let out = rig.out();
    assert_eq!(out.len(), 3);
    assert!(out.iter().all(|(header, _)| header.srqn == 0x1234));
    rig.ack(2);
    assert_eq!(rig.succeeded(), [1]);
}

// ---- acknowledgements

#[test]
fn one_acknowledgement_completes_many() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    for id in 0..5 {
        rig.write(id, 300);
    }
    assert_eq!(rig.out().len(), 10);
    rig.ack(4);
    assert_eq!(rig.succeeded(), [0, 1], "the third is not whole");
    rig.ack(9);
    assert_eq!(rig.succeeded(), [2, 3, 4]);
    assert_eq!(rig.status().in_flight_bytes, 0);
}

#[test]
fn stale_and_absurd_answers_do_nothing() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 600);
    rig.ack(1);
    rig.out();
    for psn in [0, 1, 3, 4, 1000, 0x80_0000, MASK_24] {
        rig.ack(psn);
        rig.nak(psn, NakCode::RemoteAccess);
        rig.respond(psn, P::Only, &[0; 256]);
        rig.original(psn, 1);
    }
    assert_eq!((rig.out(), rig.statuses()), (vec![], vec![]));
    assert_eq!(rig.counters().answers_ignored, 28);
    rig.ack(2);
    assert_eq!(rig.succeeded(), [1]);
    rig.ack(2);
    assert_eq!(rig.statuses(), []);
}

/// Unsignaled requests are acknowledged too, and leave nothing behind.
#[test]
fn unsignaled() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    for id in 0..10 {
        let mut request = rig.request(id, SendOpcode::RdmaWrite, 10);
        request.flags = SendFlags(if id == 9 { SendFlags::SIGNALED } else { 0 });
        rig.post(request);
    }
    rig.ack(8);
    assert_eq!(rig.statuses(), []);
    rig.ack(9);
    assert_eq!(rig.succeeded(), [9]);
    assert_eq!((rig.vnic().messages, rig.vnic().bytes), (10, 100));
}

#[test]
fn long_messages_ask_several_times_in_a_window() {
    let mut rig = Rig::new(PathMtu::Mtu1024);
    rig.write(1, 1 << 20);
    let window = rig.status().window_bytes;
    let briefs = rig.briefs();
    assert!(rig.status().in_flight_bytes <= window && rig.status().in_flight_bytes > window - 2048);
    let asking: Vec<u32> = briefs.iter().filter(|brief| brief.3).map(|brief| brief.2).collect();
    assert!(asking.len() >= 2, "{asking:?}");
    rig.ack(asking[0]);
    assert_eq!(rig.psns().len(), asking[0] as usize + 1, "as many packets go out as were acknowledged");
}

#[test]
fn the_window_grows_by_what_it_holds_back() {
    let mut rig = Rig::new(PathMtu::Mtu4096);
    let before = rig.status().window_bytes;
    for id in 0..4 {
        rig.write(id, 1 << 20);
    }
    for _ in 0..40 {
        let Some(last) = rig.briefs().iter().filter(|brief| brief.3).map(|brief| brief.2).next_back() else { break };
        rig.wait(50_000);
        rig.ack(last);
    }
    assert_eq!(rig.succeeded(), [0, 1, 2, 3]);
    assert_eq!((before, rig.status().window_bytes), (128 << 10, 1 << 20));
    assert_eq!(rig.status().smoothed_rtt_ns, 50_000);
}

// ---- order

#[test]
fn as_many_reads_as_the_responder_keeps() {
    let mut rig = Rig::with(QpType::Rc, PathMtu::Mtu256, QpAttributes { max_rd_atomic: 2, ..attributes() });
    for id in 0..4 {
        rig.read(id, 256);
    }
    rig.post(rig.request(4, SendOpcode::FetchAdd, 8));
    rig.write(5, 1);
    assert_eq!(rig.psns(), [0, 1]);
    rig.respond(0, P::Only, &[0; 256]);
    assert_eq!(rig.psns(), [2]);
    rig.respond(1, P::Only, &[0; 256]);
    rig.respond(2, P::Only, &[0; 256]);
    assert_eq!(rig.psns(), [3, 4, 5]);
}

#[test]
fn a_fence_waits_for_reads_and_not_for_writes() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    let fenced = |rig: &Rig, id| SendRequest {
        flags: SendFlags(SendFlags::SIGNALED | SendFlags::FENCE),
        ..rig.request(id, SendOpcode::RdmaWrite, 1)
    };
    rig.write(1, 1);
    rig.post(fenced(&rig, 2));
    assert_eq!(rig.psns(), [0, 1]);
    rig.read(3, 256);
    rig.post(fenced(&rig, 4));
    assert_eq!(rig.psns(), [2]);
    rig.respond(2, P::Only, &[0; 256]);
    assert_eq!(rig.psns(), [3]);
}

#[test]
fn a_request_that_is_refused_here_waits_for_its_turn() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 1);
    let mut bad = rig.request(2, SendOpcode::RdmaWrite, 10);
    bad.sges[0].lkey ^= 0x100;
    rig.post(bad);
    rig.write(3, 1);
    assert_eq!((rig.psns(), rig.statuses()), (vec![0], vec![]));
    rig.ack(0);
    assert_eq!(rig.statuses(), [(1, SUCCESS), (2, CompletionStatus::LocalProtectionError), (3, FLUSHED)]);
    assert_eq!(rig.psns(), []);
}

#[test]
fn a_malformed_descriptor_waits_for_its_turn() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 1);
    rig.net.post_send(&rig.end.clone(), rig.request(2, SendOpcode::RdmaWrite, 1));
    rig.net.world.sends.get_mut(&rig.end.qp).unwrap().malformed = true;
    rig.net.work();
    assert_eq!(rig.statuses(), []);
    rig.ack(0);
    assert_eq!(rig.statuses(), [(1, SUCCESS), (2, CompletionStatus::LocalQpOperationError)]);
}

#[test]
fn local_operations_wait_for_what_is_before_them() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 1);
    rig.post(SendRequest { immediate: 0x1234_5678, ..request(2, SendOpcode::LocalInvalidate, &[]) });
    rig.write(3, 1);
    assert_eq!((rig.psns(), rig.statuses()), (vec![0], vec![]));
    rig.ack(0);
    assert_eq!(rig.statuses(), [(1, SUCCESS), (2, CompletionStatus::LocalQpOperationError), (3, FLUSHED)]);
}

#[test]
fn draining_ends_when_all_is_acknowledged() {
    use QpAttributeMask as M;
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 300);
    rig.write(2, 300);
    let drain = QpAttributes { state: QpState::SqDrain, enable_sqd_async_notify: true, ..Default::default() };
    let end = rig.end;
    rig.net.modify(&end, &drain, M::STATE | M::EN_SQD_ASYNC_NOTIFY).unwrap();
    rig.write(3, 300);
    assert_eq!(rig.psns(), [0, 1, 2, 3]);
    let drained = |rig: &Rig| rig.net.world.saw(AsyncEventKind::SqDrained, EventTarget::Qp(rig.end.qp));
    rig.nak(1, NakCode::PsnSequence);
    assert_eq!(rig.psns(), [1, 2, 3], "what is under way goes on");
    assert_eq!(drained(&rig), 0);
    rig.ack(3);
    assert_eq!((drained(&rig), rig.succeeded()), (1, vec![1, 2]));
    assert_eq!(rig.psns(), []);
    rig.net.to(&end, QpState::ReadyToSend).unwrap();
    rig.net.work();
    assert_eq!(rig.psns(), [4, 5]);
}

// ---- ends

#[test]
fn a_reset_forgets_everything() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 10);
    rig.read(2, 1000);
    let end = rig.end;
    rig.net.to(&end, QpState::Reset).unwrap();
    assert_eq!((rig.statuses(), rig.net.engine.poll_timeout()), (vec![], None));
    assert_eq!(rig.net.engine.wire_qps().count(), 0);
}

#[test]
fn many_messages_are_bounded() {
    let mut rig = Rig::new(PathMtu::Mtu4096);
    for id in 0..200 {
        rig.net.post_send(&rig.end.clone(), rig.request(id, SendOpcode::RdmaWrite, 1));
    }
    rig.net.work();
    // As many as the send queue has places.
    assert_eq!(rig.psns().len(), 64);
    rig.ack(63);
    assert_eq!(rig.psns().len(), 64);
}

/// A run that is cut by snapshots goes on as it would have.
#[test]
fn a_snapshot_holds_what_is_under_way() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 600);
    rig.read(2, 600);
    rig.post(rig.request(3, SendOpcode::FetchAdd, 8));
    rig.out();
    rig.net.engine = Engine::restore(&rig.net.engine.snapshot()).unwrap();
    rig.nak(1, NakCode::PsnSequence);
    assert_eq!(rig.psns(), [1, 2, 3, 6]);
    rig.ack(2);
    rig.net.engine = Engine::restore(&rig.net.engine.snapshot()).unwrap();
    for (psn, length) in [(3, 256), (4, 256), (5, 88)] {
        rig.respond(psn, P::Middle, &vec![0; length]);
    }
    rig.original(6, 1);
    assert_eq!(rig.succeeded(), [1, 2, 3]);
}
