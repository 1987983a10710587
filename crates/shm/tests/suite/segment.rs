//! Segments and what may happen to them; the session segment.
use freeflow_shm::handshake::fence_for_all;
use freeflow_shm::layout::{SESSION_MAGIC, WAIT_SPIN, WAIT_YIELD, session};
use freeflow_shm::{AccessError, Segment, SessionSegment, install_sigbus_guard, page_bytes, sched_yield, sealed_file};
use rustix::io::Errno;
use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

#[test]
fn a_segment_is_sealed_and_rounded_to_pages() {
    let (segment, fd) = Segment::create("test", 5000).unwrap();
    assert_eq!(segment.bytes(), 5000_usize.next_multiple_of(page_bytes()));
    let file = File::from(fd);
    for length in [0, 4096, 1 << 20] {
        assert_eq!(file.set_len(length).unwrap_err().kind(), ErrorKind::PermissionDenied);
    }
    assert_eq!(file.metadata().unwrap().len(), segment.bytes() as u64);
    use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals};
    assert!(fcntl_get_seals(&file).unwrap().contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    assert_eq!(fcntl_add_seals(&file, SealFlags::WRITE), Err(rustix::io::Errno::PERM));
    assert!(rustix::io::fcntl_getfd(&file).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn impossible_sizes_are_refused() {
    for bytes in [0, usize::MAX, usize::MAX / 2 + 1] {
        assert_eq!(Segment::create("test", bytes).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    let (_, fd) = Segment::create("name with \0 and more", 4096).unwrap();
    assert_eq!(Segment::map(fd.as_fd(), page_bytes() + 1).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(Segment::map(fd.as_fd(), 0).unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(Segment::map(fd.as_fd(), 100).unwrap().bytes(), 100);
}

#[test]
fn two_mappings_share_their_bytes() {
    let (one, fd) = Segment::create("test", 4096).unwrap();
    let two = Segment::map(fd.as_fd(), 4096).unwrap();
    one.u32(12).store(7, Relaxed);
    one.u64(16).store(8, Relaxed);
    assert_eq!((two.u32(12).load(Relaxed), two.u64(16).load(Relaxed)), (7, 8));
    assert_eq!(two.fetch_add(16, 5), Ok(8));
    assert_eq!(two.compare_swap(16, 1, 2), Ok(13));
    assert_eq!(two.compare_swap(16, 13, 2), Ok(13));
    assert_eq!(one.u64(16).load(Relaxed), 2);
    assert_eq!(one.fetch_add(16, u64::MAX), Ok(2));
    assert_eq!(one.u64(16).load(Relaxed), 1);
}

#[test]
fn what_is_outside_is_refused() {
    let (segment, fd) = Segment::create("test", 4096).unwrap();
    let bytes = segment.bytes();
    let mut buffer = [0; 16];
    for offset in [bytes - 15, bytes, bytes + 1, usize::MAX, usize::MAX - 15] {
        assert_eq!(segment.read(offset, &mut buffer), Err(AccessError::OutOfBounds));
        for last in [false, true] {
            assert_eq!(segment.write(offset, &buffer, last), Err(AccessError::OutOfBounds));
            assert_eq!(Segment::copy(&segment, offset, &segment, 0, 16, last), Err(AccessError::OutOfBounds));
            assert_eq!(Segment::copy(&segment, 0, &segment, offset, 16, last), Err(AccessError::OutOfBounds));
        }
    }
    for offset in [bytes - 7, bytes, usize::MAX - 7, 1, 4] {
        assert_eq!(segment.fetch_add(offset, 1), Err(AccessError::OutOfBounds));
        assert_eq!(segment.compare_swap(offset, 1, 1), Err(AccessError::OutOfBounds));
    }
    assert_eq!(segment.read(bytes, &mut []), Ok(()));
    let short = Segment::map(fd.as_fd(), 100).unwrap();
    assert_eq!(short.read(85, &mut buffer), Err(AccessError::OutOfBounds));
    assert_eq!(short.read(84, &mut buffer), Ok(()));
}

/// Every alignment of both ends and every small length, with and without the tail protocol.
#[test]
fn copies_are_exact() {
    let (segment, fd) = Segment::create("test", 4096).unwrap();
    let other = Segment::map(fd.as_fd(), 4096).unwrap();
    let source: Vec<u8> = (1..=64).collect();
    for last in [false, true] {
        for offset in 0..17 {
            for length in 0..40 {
                segment.write(0, &[0xee; 64], false).unwrap();
                segment.write(offset, &source[..length], last).unwrap();
                let mut got = [0; 64];
                other.read(0, &mut got).unwrap();
                let mut want = [0xee; 64];
                want[offset..offset + length].copy_from_slice(&source[..length]);
                assert_eq!(got, want);
            }
        }
        // Overlapping, both directions, against the slice's own copy.
        for (from, to) in (0..20).flat_map(|from| (0..20).map(move |to| (from, to))) {
            for length in [0, 1, 7, 8, 9, 16, 31] {
                segment.write(0, &source, false).unwrap();
                Segment::copy(&segment, from, &segment, to, length, last).unwrap();
                let mut want = source.clone();
                want.copy_within(from..from + length, to);
                let mut got = [0; 64];
                segment.read(0, &mut got).unwrap();
                assert_eq!(got[..], want[..]);
            }
        }
    }
}

/// A reader that polls on the last word never sees it before the bytes in front of it.
#[test]
fn the_last_bytes_come_last() {
    const BYTES: usize = 3000;
    let (writer, fd) = Segment::create("test", 4096).unwrap();
    let reader = Segment::map(fd.as_fd(), 4096).unwrap();
    let done = Segment::map(fd.as_fd(), 4096).unwrap();
    let rounds = 2000_u64;
    let thread = std::thread::spawn(move || {
        let mut payload = vec![0; BYTES];
        for round in 1..=rounds {
            payload.fill(round as u8);
            payload[BYTES - 8..].copy_from_slice(&round.to_ne_bytes());
            writer.write(0, &payload, true).unwrap();
            while writer.u64(4088).load(Acquire) != round {
                std::thread::yield_now();
            }
        }
    });
    let mut got = vec![0; BYTES - 8];
    for round in 1..=rounds {
        while reader.u64(BYTES - 8).load(Acquire) != round {
            std::thread::yield_now();
        }
        reader.read(0, &mut got).unwrap();
        assert!(got.iter().all(|byte| *byte == round as u8));
        done.u64(4088).store(round, Release);
    }
    thread.join().unwrap();
}

/// A file of two pages, mapped, then truncated to one: what SIGBUS is made of.
fn truncated() -> (Segment, OwnedFd) {
    let page = page_bytes();
    let fd = rustix::fs::memfd_create("hole", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 2 * page as u64).unwrap();
    let segment = Segment::map(fd.as_fd(), 2 * page).unwrap();
    segment.write(0, &vec![5; 2 * page], false).unwrap();
    rustix::fs::ftruncate(&fd, page as u64).unwrap();
    (segment, fd)
}

#[test]
fn a_fault_in_a_segment_poisons_it_and_no_other() {
    install_sigbus_guard().unwrap();
    install_sigbus_guard().unwrap();
    let page = page_bytes();
    let (segment, _fd) = truncated();
    let (other, _other_fd) = truncated();
    let mut got = vec![1; 2 * page];
    segment.read(0, &mut got[..page]).unwrap();
    assert!(!segment.poisoned());
    segment.read(0, &mut got).unwrap();
    assert!(segment.poisoned() && !other.poisoned());
    assert!(got[..page].iter().all(|byte| *byte == 5) && got[page..].iter().all(|byte| *byte == 0));
    // Further accesses of every kind go on.
    segment.write(page - 4, &[7; 8], true).unwrap();
    assert_eq!(segment.fetch_add(page + 64, 1), Ok(0));
    other.u32(page).store(1, Relaxed);
    assert!(other.poisoned());
    // A new segment in the same place of the table is clean.
    drop(segment);
    drop(other);
    assert!(!truncated().0.poisoned());
}

#[test]
fn many_threads_may_fault_at_once() {
    install_sigbus_guard().unwrap();
    for _ in 0..50 {
        let (segment, _fd) = truncated();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut got = [0; 16];
                    segment.read(page_bytes() - 8, &mut got).unwrap();
                    assert_eq!(std::hint::black_box(got)[8..], [0; 8]);
                });
            }
        });
        assert!(segment.poisoned());
    }
}

/// The rest of the table of signals stays as it was: a SIGBUS that is not about a segment kills, by that signal.
#[test]
fn other_bus_errors_still_kill() {
    for case in ["raise", "fault"] {
        let me = std::env::current_exe().unwrap();
        let status = std::process::Command::new(me)
            .args(["--exact", "segment::dies_of_a_bus_error", "--ignored", "--nocapture"])
            .env("FREEFLOW_TEST_SIGBUS", case)
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(libc::SIGBUS), "{case}");
    }
}

#[test]
#[ignore = "run by other_bus_errors_still_kill in a process of its own"]
fn dies_of_a_bus_error() {
    let Ok(case) = std::env::var("FREEFLOW_TEST_SIGBUS") else { return };
    install_sigbus_guard().unwrap();
    if case == "raise" {
        // SAFETY: kills this process, which is what it is for.
        unsafe { libc::raise(libc::SIGBUS) };
    } else {
        let page = page_bytes();
        let fd = rustix::fs::memfd_create("hole", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        // SAFETY: a new mapping, of an empty file: reading it faults, which is what it is for.
        let value = unsafe {
            let prot = rustix::mm::ProtFlags::READ;
            let at = rustix::mm::mmap(std::ptr::null_mut(), page, prot, rustix::mm::MapFlags::SHARED, &fd, 0);
            at.unwrap().cast::<u8>().read_volatile()
        };
        println!("{value}");
    }
}

#[test]
fn many_segments_come_and_go() {
    let mut kept = Vec::new();
    for i in 0..3000 {
        kept.push(Segment::create("test", 4096).unwrap().0);
        if i % 3 == 0 {
            kept.swap_remove(i / 3);
        }
    }
    let mut addresses: Vec<_> = kept.iter().map(Segment::address).collect();
    addresses.sort_unstable();
    addresses.dedup();
    assert_eq!(addresses.len(), kept.len());
}

#[test]
fn a_session_carries_doorbells_and_advice() {
    let (router, fd) = SessionSegment::create().unwrap();
    let library = SessionSegment::map(fd.as_fd(), 0).unwrap();
    assert_eq!(library.segment().u64(session::MAGIC).load(Relaxed), SESSION_MAGIC);
    assert!(router.summary_is_empty());
    assert!(!router.take_doorbells(|_| panic!("none rings")));
    let bells = [0, 63, 64, 1023, 1024, 4095, 40_000, 65_535];
    for bell in bells {
        assert!(!library.ring(bell), "the router is awake");
        library.ring(bell);
    }
    assert!(!router.summary_is_empty());
    let mut got = Vec::new();
    assert!(router.take_doorbells(|bell| got.push(bell)));
    assert_eq!(got, bells);
    assert!(router.summary_is_empty() && !router.take_doorbells(|_| panic!("taken")));
    router.set_router_sleeps(true);
    assert!(library.ring(5));
    router.set_router_sleeps(false);
    assert!(!library.ring(6));
    assert_eq!(library.wait_policy(), WAIT_SPIN);
    router.set_wait_policy(WAIT_YIELD);
    assert_eq!(library.wait_policy(), WAIT_YIELD);
}

/// Two threads hand a turn to each other, each asleep meanwhile: were a wake-up lost, one would sleep for a minute.
#[test]
fn a_session_wakes_sleepers() {
    const ROUNDS: u64 = 2_000;
    let (router, fd) = SessionSegment::create().unwrap();
    let library = SessionSegment::map(fd.as_fd(), 0).unwrap();
    let answered = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                router.advance(round);
                fence_for_all();
                router.wake_sleepers(round);
                while answered.load(Relaxed) < round {
                    sched_yield();
                }
            }
        });
        for round in 1..=ROUNDS {
            // A wake-up that comes late ends the next sleep early.
            let began = Instant::now();
            while library.completed() < round {
                library.sleep_while(round - 1, 60_000_000_000);
            }
            assert!(began.elapsed() < Duration::from_secs(50), "slept to the end");
            answered.store(round, Relaxed);
        }
    });
    library.sleep_while(ROUNDS - 1, u64::MAX / 2);
    library.sleep_while(ROUNDS, 1_000);
}

/// Each side knows whether the other waits for its processor.
#[test]
fn a_session_shows_who_waits_for_whom() {
    let (router, fd) = SessionSegment::create().unwrap();
    let library = SessionSegment::map(fd.as_fd(), 0).unwrap();
    assert!(!library.is_worker_here(0), "it has not said where it is");
    assert!(router.is_poller_here(0, 0) && !router.is_poller_here(1, 0));
    router.set_router_cpu(0);
    assert!(library.is_worker_here(0) && !library.is_worker_here(3));
    assert!(router.is_poller_here(3, 0) && !router.is_poller_here(0, 0));
    library.sleep_while(0, 1_000);
    assert!(!router.is_poller_here(3, 0), "it sleeps, and waits for no processor");
    assert!(router.is_poller_here(3, 1), "it has been woken");
    router.set_router_cpu(3);
    router.set_router_sleeps(true);
    assert!(!library.is_worker_here(3), "the worker sleeps");
}

/// All bits set, over and over, names only doorbells that exist, each once.
#[test]
fn a_hostile_bitmap_names_only_doorbells_that_exist() {
    let (router, fd) = SessionSegment::create().unwrap();
    let library = Segment::map(fd.as_fd(), session::BYTES).unwrap();
    library.write(session::DOORBELLS, &vec![0xff; session::BYTES - session::DOORBELLS], false).unwrap();
    library.u64(session::SUMMARY).store(u64::MAX, Relaxed);
    let mut next = 0;
    while router.take_doorbells(|bell| {
        assert_eq!(bell, next);
        next += 1;
    }) {}
    assert_eq!(next, 65_536);
    // A summary without doorbells.
    library.u64(session::SUMMARY).store(u64::MAX, Relaxed);
    assert!(!router.take_doorbells(|_| panic!("none rings")));
}

#[test]
fn what_is_no_session_is_refused() {
    let (_, fd) = Segment::create("test", session::BYTES).unwrap();
    assert_eq!(SessionSegment::map(fd.as_fd(), 0).unwrap_err().kind(), ErrorKind::InvalidData);
    let (session, fd) = SessionSegment::create().unwrap();
    session.segment().u32(session::VERSION).fetch_add(1, Relaxed);
    assert_eq!(SessionSegment::map(fd.as_fd(), 0).unwrap_err().kind(), ErrorKind::Unsupported);
    let (_, fd) = Segment::create("test", 4096).unwrap();
    assert_eq!(SessionSegment::map(fd.as_fd(), 0).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn a_sealed_file_can_not_be_changed() {
    let file = sealed_file("test", b"0123456789abcdef").unwrap();
    assert!(rustix::io::pwrite(&file, b"x", 0).is_err());
    assert!(rustix::fs::ftruncate(&file, 0).is_err());
    let mut bytes = [0; 16];
    assert_eq!(rustix::io::pread(&file, &mut bytes, 0), Ok(16));
    assert_eq!(&bytes, b"0123456789abcdef");
}

#[test]
fn parts_of_one_mapping_reach_nothing_beyond_them() {
    struct Held(Arc<AtomicU64>);
    impl Drop for Held {
        fn drop(&mut self) {
            self.0.fetch_add(1, Relaxed);
        }
    }
    let page = page_bytes();
    let (whole, fd) = Segment::create("test", 4 * page).unwrap();
    let whole = Arc::new(whole);
    let dropped = Arc::new(AtomicU64::new(0));
    let part = Segment::part(&whole, page, 2 * page, Held(dropped.clone())).unwrap();
    let library = Segment::map_at(fd.as_fd(), page as u64, 2 * page).unwrap();
    part.write(2 * page - 4, b"last", false).unwrap();
    let mut bytes = [0; 4];
    library.read(2 * page - 4, &mut bytes).unwrap();
    assert_eq!(&bytes, b"last");
    assert!(part.write(2 * page - 3, b"last", false).is_err() && part.read(2 * page, &mut bytes).is_err());
    assert!(part.fetch_add(2 * page, 1).is_err() && part.fetch_add(2 * page - 8, 1).is_ok());
    let end = Segment::part(&whole, 3 * page, page, ()).unwrap();
    Segment::copy(&part, 2 * page - 4, &end, 0, 4, false).unwrap();
    assert!(Segment::copy(&part, 2 * page - 3, &end, 0, 4, false).is_err());
    for (offset, length) in [(3 * page, page + 1), (4 * page, 1), (1, page), (page, 0), (usize::MAX - page + 1, page)] {
        assert_eq!(Segment::part(&whole, offset, length, ()).unwrap_err(), Errno::INVAL, "{offset} {length}");
    }
    // The mapping lasts as long as a part does.
    drop(whole);
    part.write(0, b"here", false).unwrap();
    assert_eq!(dropped.load(Relaxed), 0);
    drop(part);
    assert_eq!(dropped.load(Relaxed), 1);
    end.read(0, &mut bytes).unwrap();
    assert_eq!(Segment::map_at(fd.as_fd(), 3 * page as u64, 2 * page).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(Segment::map_at(fd.as_fd(), u64::MAX - 4095, page).unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn where_one_part_is_poisoned_all_are() {
    install_sigbus_guard().unwrap();
    let page = page_bytes();
    let memory = rustix::fs::memfd_create("shrinks", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 2 * page as u64).unwrap();
    let whole = Arc::new(Segment::map(memory.as_fd(), 2 * page).unwrap());
    let [first, second] = [0, page].map(|offset| Segment::part(&whole, offset, page, ()).unwrap());
    rustix::fs::ftruncate(&memory, page as u64).unwrap();
    assert!(!first.poisoned() && !second.poisoned());
    second.read(0, &mut [0; 4]).unwrap();
    assert!(first.poisoned() && second.poisoned() && whole.poisoned());
}
