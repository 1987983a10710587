//! The requester's reaction to losses, refusals, silence, and memory that can't be read: against a
//! peer that is a script.
use crate::common::peer::{HOST, PEER_QPN, pattern};
use crate::common::rig::*;
use crate::common::*;
use freeflow_engine::*;
use freeflow_verbs::*;
use freeflow_wire::{MASK_24, NakCode, Operation as O, PacketPosition as P, Reth, Syndrome as Aeths, psn_add};

// ---- losses

#[test]
fn a_sequence_nak_goes_back_n() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    for id in 0..3 {
        rig.write(id, 600);
    }
    assert_eq!(rig.psns(), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    let window = rig.status().window_bytes;
    rig.nak(4, NakCode::PsnSequence);
    assert_eq!(rig.succeeded(), [0], "a NAK acknowledges what is before it");
    let expected = [
        (O::Write, P::Middle, 4, false),
        (O::Write, P::Last, 5, true),
        (O::Write, P::First, 6, false),
        (O::Write, P::Middle, 7, false),
        (O::Write, P::Last, 8, true),
    ];
    assert_eq!(rig.briefs(), expected);
    assert_eq!(rig.status().window_bytes, window - window / 8);
    let counters = rig.counters();
    assert_eq!((counters.packets_sent, counters.packets_retransmitted, counters.sequence_naks_received), (14, 5, 1));
    rig.ack(8);
    assert_eq!(rig.succeeded(), [1, 2]);
}

/// A retry sends the bytes that the memory holds then.
#[test]
fn a_retry_reads_memory_anew() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.fill(&[1; 300]);
    rig.write(1, 300);
    rig.fill(&[2; 300]);
    rig.out();
    rig.nak(1, NakCode::PsnSequence);
    assert_eq!(rig.out()[0].1, [2; 44]);
}

#[test]
fn a_nak_that_comes_twice_counts_once() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 100);
    rig.wait(100_000);
    rig.ack(0);
    rig.write(2, 1000);
    rig.out();
    rig.wait(50_000);
    rig.nak(2, NakCode::PsnSequence);
    assert_eq!(rig.psns(), [2, 3, 4]);
    rig.nak(2, NakCode::PsnSequence);
    assert_eq!(rig.psns(), []);
    rig.wait(200_000);
    rig.nak(2, NakCode::PsnSequence);
    assert_eq!(rig.psns(), [2, 3, 4], "later it is another loss");
}

#[test]
fn an_answer_beyond_an_unanswered_read_is_a_nak() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 10);
    rig.read(2, 1000);
    rig.write(3, 10);
    assert_eq!(rig.psns(), [0, 1, 5]);
    let data = pattern(1000);
    rig.respond(1, P::First, &data[..256]);
    assert_eq!(rig.succeeded(), [1], "a response acknowledges what is before it");
    rig.ack(5);
    assert_eq!((rig.statuses(), rig.counters().implied_naks), (vec![], 1));
    let out = rig.out();
    assert_eq!(out.iter().map(|(header, _)| header.psn).collect::<Vec<_>>(), [psn_add(FIRST_PSN, 2), 2]);
    assert_eq!(out[0].0.reth, Reth { address: 0x7000 + 256, rkey: 0x55aa, length: 744 }, "only the rest is asked for");
    rig.respond(2, P::First, &data[256..512]);
    rig.respond(3, P::Middle, &data[512..768]);
    rig.respond(4, P::Last, &data[768..]);
    rig.ack(5);
    assert_eq!(rig.succeeded(), [2, 3]);
    assert_eq!(rig.memory(1000), data);
}

#[test]
fn a_response_that_skips_one_is_a_nak() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.read(1, 1000);
    rig.out();
    rig.respond(0, P::First, &[1; 256]);
    rig.respond(2, P::Middle, &[3; 256]);
    let out = rig.out();
    assert_eq!((out[0].0.psn, out[0].0.reth.length), (psn_add(FIRST_PSN, 1), 744));
    // The late one of the first request is as good.
    rig.respond(1, P::Middle, &[2; 256]);
    rig.respond(2, P::Middle, &[3; 256]);
    rig.respond(3, P::Last, &[4; 232]);
    assert_eq!(rig.succeeded(), [1]);
    rig.respond(1, P::First, &[9; 256]);
    assert_eq!(rig.memory(768)[256..], [[2; 256], [3; 256]].concat(), "duplicates change nothing");
}

#[test]
fn a_long_read_is_asked_for_as_the_window_allows() {
    let mut rig = Rig::new(PathMtu::Mtu1024);
    let length = 300 * 1024;
    rig.read(1, length);
    let (mut asked, mut answered) = (Vec::new(), 0);
    while rig.state() == QpState::ReadyToSend {
        for (header, _) in rig.out() {
            let first = header.psn.wrapping_sub(FIRST_PSN) & MASK_24;
            assert_eq!(header.reth.address, 0x7000 + u64::from(first) * 1024);
            asked.push((first, header.reth.length.div_ceil(1024)));
        }
        assert!(rig.status().in_flight_bytes <= rig.status().window_bytes);
        if answered == length as u32 / 1024 {
            break;
        }
        rig.respond(answered, P::Middle, &[answered as u8; 1024]);
        answered += 1;
    }
    assert_eq!(rig.succeeded(), [1]);
    assert!(asked.len() >= 3, "{asked:?}");
    let mut next = 0;
    for (first, count) in asked {
        assert_eq!(first, next, "each piece follows the one before");
        next += count;
    }
    assert_eq!(next, 300);
}

/// A piece that was asked for is asked for again as it was: a responder knows it by that.
#[test]
fn pieces_of_a_read_stay_what_they_are() {
    let mut rig = Rig::new(PathMtu::Mtu1024);
    rig.read(1, 300 * 1024);
    let pieces: Vec<u32> = rig.out().iter().map(|(header, _)| header.reth.length).collect();
    assert_eq!(pieces.len(), 1);
    let end = pieces[0] / 1024;
    for psn in 0..end - 10 {
        rig.respond(psn, P::Middle, &[0; 1024]);
    }
    let second = rig.out();
    assert_eq!(second.len(), 1);
    rig.wait(68 * MS);
    let again = rig.out();
    let last = again.last().unwrap();
    assert_eq!(last.0.reth.length, 10 * 1024);
    for psn in end - 10..end {
        rig.respond(psn, P::Middle, &[0; 1024]);
    }
    let out = rig.out();
    assert_eq!(out[0].0.reth, second[0].0.reth, "though the window is smaller now");
}

// ---- NAKs that end the QP

#[test]
fn naks_end_the_request_and_flush_the_rest() {
    for (code, status) in [
        (NakCode::InvalidRequest, CompletionStatus::RemoteInvalidRequest),
        (NakCode::RemoteAccess, CompletionStatus::RemoteAccessError),
        (NakCode::RemoteOperational, CompletionStatus::RemoteOperationError),
    ] {
        let mut rig = Rig::new(PathMtu::Mtu256);
        for id in 0..5 {
            let mut request = rig.request(id, SendOpcode::RdmaWrite, 10);
            request.flags = SendFlags(if id == 3 { 0 } else { SendFlags::SIGNALED });
            rig.post(request);
        }
        rig.nak(1, code);
        assert_eq!(rig.statuses(), [(0, SUCCESS), (1, status), (2, FLUSHED), (3, FLUSHED), (4, FLUSHED)]);
        assert_eq!(rig.state(), QpState::Error);
        rig.write(5, 10);
        assert_eq!(rig.statuses(), [(5, FLUSHED)]);
        assert_eq!(rig.net.engine.poll_timeout(), None);
    }
}

#[test]
fn responses_that_do_not_fit_end_the_qp() {
    let wrong: [fn(&mut Rig); 5] = [
        |rig| rig.respond(0, P::Only, &[0; 10]),
        |rig| rig.respond(0, P::First, &[0; 512]),
        |rig| rig.respond(0, P::Only, &[]),
        |rig| rig.original(0, 7),
        |rig| {
            rig.respond(0, P::First, &[0; 256]);
            rig.respond(1, P::Last, &[0; 256]);
        },
    ];
    for wrong in wrong {
        let mut rig = Rig::new(PathMtu::Mtu256);
        rig.read(1, 300);
        rig.write(2, 1);
        wrong(&mut rig);
        assert_eq!(rig.statuses(), [(1, CompletionStatus::BadResponse), (2, FLUSHED)]);
    }
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 300);
    rig.respond(1, P::Only, &[0; 44]);
    assert_eq!(rig.statuses(), [(1, CompletionStatus::BadResponse)]);
}

// ---- RNR

#[test]
fn receiver_not_ready() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    for id in 0..3 {
        rig.post(rig.request(id, SendOpcode::Send, 10));
    }
    rig.out();
    // Timer 12: 640 us. Retries 3. As Linux rxe does, a sequence NAK follows at once.
    for attempt in 0..4 {
        rig.aeth(1, Aeths::ReceiverNotReady { timer: 12 });
        rig.nak(1, NakCode::PsnSequence);
        if attempt == 3 {
            break;
        }
        assert_eq!(rig.psns(), [], "not before the time");
        rig.wait(639_999);
        assert_eq!(rig.psns(), []);
        rig.wait(1);
        assert_eq!(rig.psns(), [1, 2]);
    }
    assert_eq!(rig.statuses(), [(0, SUCCESS), (1, CompletionStatus::RnrRetryExceeded), (2, FLUSHED)]);
    assert_eq!((rig.vnic().rnr_naks, rig.vnic().rnr_retries_exceeded, rig.counters().rnr_naks_received), (4, 1, 4));
}

#[test]
fn rnr_for_ever_and_progress() {
    for rnr_retry in [7, 8, 255] {
        let mut rig =
            Rig::with(QpType::Rc, PathMtu::Mtu256, QpAttributes { rnr_retry, retry_count: 0, ..attributes() });
        rig.post(rig.request(1, SendOpcode::Send, 10));
        for _ in 0..300 {
            rig.out();
            rig.aeth(0, Aeths::ReceiverNotReady { timer: 31 });
            rig.aeth(0, Aeths::ReceiverNotReady { timer: 31 });
            rig.wait(492 * MS);
        }
        assert_eq!(rig.psns().first(), Some(&0));
        rig.ack(0);
        assert_eq!(rig.succeeded(), [1]);
    }
}

/// A retry count of more than three bits is counted down as it is.
#[test]
fn a_wide_retry_count_is_as_many_retries() {
    let mut rig = Rig::with(QpType::Rc, PathMtu::Mtu256, QpAttributes { retry_count: 9, ..attributes() });
    rig.write(1, 10);
    rig.wait(9 * 67_108_864);
    assert_eq!(rig.statuses(), []);
    rig.wait(67_108_864);
    assert_eq!(rig.statuses(), [(1, CompletionStatus::RetryExceeded)]);
    assert_eq!(rig.vnic().ack_timeouts, 9);
}

#[test]
fn progress_renews_the_retries() {
    let mut rig = Rig::with(QpType::Rc, PathMtu::Mtu256, QpAttributes { rnr_retry: 1, ..attributes() });
    for id in 0..6 {
        rig.post(rig.request(id, SendOpcode::Send, 10));
        rig.aeth(id as u32, Aeths::ReceiverNotReady { timer: 1 });
        rig.wait(10_000);
        rig.ack(id as u32);
        rig.out();
    }
    assert_eq!(rig.succeeded(), [0, 1, 2, 3, 4, 5]);
}

// ---- timers

/// Timeout 14 is 67.108864 ms; retry count 2: the end comes with the third.
#[test]
fn silence_ends_in_the_promised_time() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    let begin = rig.net.now.0;
    rig.write(1, 600);
    rig.write(2, 600);
    rig.out();
    for retry in 1..=3u64 {
        let at = begin + retry * 67_108_864;
        rig.wait(at - 1 - rig.net.now.0);
        assert_eq!(rig.statuses(), []);
        assert!(rig.psns().iter().all(|psn| *psn == 0), "probes");
        rig.wait(1);
        if retry < 3 {
            assert_eq!(rig.psns(), [0, 1], "goes back to the oldest, with the least window");
            assert_eq!(rig.counters().ack_timeouts, retry);
        }
    }
    assert_eq!(rig.statuses(), [(1, CompletionStatus::RetryExceeded), (2, FLUSHED)]);
    assert_eq!((rig.vnic().ack_timeouts, rig.vnic().retries_exceeded), (2, 1));
    assert_eq!(rig.net.engine.poll_timeout(), None);
}

#[test]
fn progress_restarts_the_timeout() {
    let mut rig = Rig::with(QpType::Rc, PathMtu::Mtu256, QpAttributes { retry_count: 0, ..attributes() });
    rig.write(1, 2560);
    for psn in 0..9 {
        rig.wait(60 * MS);
        rig.ack(psn);
    }
    let last = rig.net.now.0;
    rig.wait(67 * MS);
    assert_eq!(rig.statuses(), []);
    rig.wait(MS);
    assert_eq!(rig.statuses(), [(1, CompletionStatus::RetryExceeded)]);
    assert!(rig.net.now.0 - last < 69 * MS);
}

#[test]
fn no_timeout_waits_for_ever() {
    let mut rig = Rig::with(QpType::Rc, PathMtu::Mtu256, QpAttributes { timeout: 0, retry_count: 0, ..attributes() });
    rig.write(1, 10);
    rig.wait(3_600_000 * MS);
    assert_eq!(rig.statuses(), []);
    assert!(rig.psns().len() < 3_700, "probes come a second apart at last");
    rig.ack(0);
    assert_eq!(rig.succeeded(), [1]);
}

#[test]
fn a_probe_repeats_the_oldest_packet() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 1000);
    rig.out();
    rig.wait(MS - 1);
    assert_eq!(rig.briefs(), []);
    rig.wait(1);
    assert_eq!(rig.briefs(), [(O::Write, P::First, 0, true)]);
    rig.wait(2 * MS);
    assert_eq!(rig.briefs(), [(O::Write, P::First, 0, true)], "twice as long after the first");
    let counters = rig.counters();
    assert_eq!((counters.probes_sent, counters.packets_retransmitted, counters.ack_timeouts), (2, 2, 0));
    // It filled a gap: what follows is gone too.
    rig.ack(0);
    assert_eq!(rig.psns(), [1, 2, 3]);
    rig.ack(3);
    assert_eq!(rig.succeeded(), [1]);
}

#[test]
fn a_probe_that_finds_all_arrived_repeats_nothing() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 1000);
    rig.wait(MS);
    rig.out();
    rig.ack(3);
    assert_eq!((rig.succeeded(), rig.psns()), (vec![1], vec![]));
}

#[test]
fn a_probe_asks_for_the_rest_of_a_read() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.read(1, 1000);
    rig.respond(0, P::First, &[0; 256]);
    rig.out();
    rig.wait(MS);
    let out = rig.out();
    assert_eq!((out.len(), out[0].0.psn, out[0].0.reth.length), (1, psn_add(FIRST_PSN, 1), 744));
}

// ---- the environment's answers

#[test]
fn no_room_loses_nothing() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.net.world.transmit_room = Some(0);
    rig.net.post_send(&rig.end.clone(), rig.request(1, SendOpcode::RdmaWrite, 300));
    let Net { engine, world, now, .. } = &mut rig.net;
    assert_eq!(engine.run(world, *now, rig.end.qp, 1 << 20), Progress::More);
    assert_eq!(rig.psns(), []);
    rig.net.world.transmit_room = None;
    rig.net.work();
    assert_eq!(rig.psns(), [0, 1]);
    assert_eq!(rig.counters().packets_retransmitted, 0);
}

#[test]
fn pending_payload_keeps_the_order() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.net.world.always_put_off = true;
    rig.fill(&pattern(300));
    rig.write(1, 300);
    rig.write(2, 10);
    assert_eq!((rig.psns(), rig.net.world.pending.len()), (vec![], 1), "one at a time");
    assert_eq!(rig.net.engine.copies_in_flight(rig.end.session), 1);
    rig.ack(0);
    assert_eq!(rig.counters().answers_ignored, 1, "it is not sent yet");
    rig.net.land(0);
    assert_eq!(rig.psns(), [0, 1]);
    rig.net.work();
    rig.net.land(0);
    assert_eq!(rig.psns(), [2]);
    rig.ack(2);
    assert_eq!(rig.succeeded(), [1, 2]);
    assert_eq!(rig.net.engine.copies_in_flight(rig.end.session), 0);
}

#[test]
fn pending_results_keep_the_order() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.read(1, 512);
    rig.write(2, 1);
    rig.net.world.always_put_off = true;
    rig.respond(0, P::First, &[1; 256]);
    rig.respond(1, P::Last, &[2; 256]);
    rig.ack(2);
    assert_eq!((rig.statuses(), rig.net.world.pending.len()), (vec![], 1));
    rig.net.land(0);
    assert_eq!((rig.statuses(), rig.net.world.pending.len()), (vec![], 1));
    rig.net.land(0);
    assert_eq!(rig.succeeded(), [1, 2]);
    assert_eq!(rig.memory(512), [[1; 256], [2; 256]].concat());
}

#[test]
fn memory_that_is_gone_fails_in_order() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 10);
    rig.net.world.gone.insert(rig.end.session);
    rig.write(2, 10);
    rig.write(3, 10);
    assert_eq!((rig.psns(), rig.statuses()), (vec![0], vec![]));
    rig.ack(0);
    assert_eq!(rig.statuses(), [(1, SUCCESS), (2, CompletionStatus::LocalProtectionError), (3, FLUSHED)]);
}

#[test]
fn memory_that_is_found_gone_later_fails_in_order() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 10);
    rig.net.world.always_put_off = true;
    rig.write(2, 300);
    rig.out();
    let (token, _) = rig.net.world.pending.remove(0);
    let Net { engine, world, now, .. } = &mut rig.net;
    engine.handle_copied(world, *now, token, Err(MemorySide::Source));
    rig.net.work();
    assert_eq!(rig.statuses(), []);
    rig.ack(0);
    assert_eq!(rig.statuses(), [(1, SUCCESS), (2, CompletionStatus::LocalProtectionError)]);
}

/// A retry that can't read its memory any more does not matter if the first try arrived.
#[test]
fn an_acknowledgement_saves_a_retry_without_memory() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 10);
    rig.write(2, 10);
    rig.ack(0);
    rig.write(3, 10);
    rig.write(4, 10);
    rig.out();
    rig.net.world.gone.insert(rig.end.session);
    rig.nak(1, NakCode::PsnSequence);
    assert_eq!(rig.statuses(), [(1, SUCCESS), (2, CompletionStatus::LocalProtectionError), (3, FLUSHED), (4, FLUSHED)]);

    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.read(1, 256);
    rig.write(2, 10);
    rig.write(3, 10);
    rig.net.world.gone.insert(rig.end.session);
    rig.net.world.sent.clear();
    // The READ can be asked for again, the WRITE behind it can't be read.
    rig.ack(1);
    assert_eq!((rig.psns(), rig.statuses()), (vec![0], vec![]));
    rig.net.world.gone.clear();
    rig.respond(0, P::Only, &[0; 256]);
    rig.ack(2);
    assert_eq!(rig.state(), QpState::Error, "the WRITE was the oldest when its memory was found gone");
    assert_eq!(rig.statuses(), [(1, SUCCESS), (2, CompletionStatus::LocalProtectionError), (3, FLUSHED)]);
}

#[test]
fn a_key_that_is_taken_back_stops_a_message() {
    let mut rig = Rig::new(PathMtu::Mtu1024);
    rig.write(1, 1 << 20);
    let sent = rig.psns().len() as u32;
    let Net { engine, .. } = &mut rig.net;
    engine.deregister_mr(rig.end.session, rig.end.mr).unwrap();
    rig.ack(sent / 2);
    assert_eq!(rig.psns(), []);
    assert_eq!(rig.statuses(), [(1, CompletionStatus::LocalProtectionError)]);
}

#[test]
fn flushed_while_payload_is_fetched() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 10);
    rig.net.world.always_put_off = true;
    rig.write(2, 10);
    rig.write(3, 10);
    rig.nak(0, NakCode::RemoteAccess);
    assert_eq!(rig.statuses(), [(1, CompletionStatus::RemoteAccessError)], "not while its memory is read");
    rig.net.land(0);
    rig.net.work();
    assert_eq!(rig.statuses(), [(2, FLUSHED), (3, FLUSHED)]);
}

// ---- the gate

#[test]
fn nothing_goes_out_before_the_peer_is_known() {
    let mut rig = Rig::behind_gate(QpType::Rc, PathMtu::Mtu256, attributes());
    rig.write(1, 10);
    rig.write(2, 10);
    rig.wait(100 * MS);
    assert_eq!((rig.psns(), rig.counters().ack_timeouts), (vec![], 1));
    rig.introduce();
    rig.peer_changed();
    assert_eq!(rig.psns(), [0, 1]);
    rig.ack(1);
    assert_eq!(rig.succeeded(), [1, 2]);
}

#[test]
fn a_peer_that_never_comes_is_silence() {
    let mut rig = Rig::behind_gate(QpType::Rc, PathMtu::Mtu256, attributes());
    rig.write(1, 10);
    rig.wait(3 * 67_108_864 - 1);
    assert_eq!(rig.statuses(), []);
    rig.wait(1);
    assert_eq!(rig.statuses(), [(1, CompletionStatus::RetryExceeded)]);
    assert_eq!(rig.psns(), []);
}

#[test]
fn a_peer_that_goes_hears_no_more() {
    let mut rig = Rig::new(PathMtu::Mtu256);
    rig.write(1, 10);
    assert_eq!(rig.psns(), [0]);
    rig.net.world.peers.insert((HOST, Qpn(PEER_QPN)), PeerAnswer::Absent);
    rig.peer_changed();
    rig.write(2, 10);
    rig.wait(3 * 68 * MS);
    assert_eq!(rig.psns(), [], "no probe, no retry");
    assert_eq!(rig.statuses(), [(1, CompletionStatus::RetryExceeded), (2, FLUSHED)]);
}
