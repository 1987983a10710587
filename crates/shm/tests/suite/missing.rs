//! Segments whose pages this process does not allocate.
use freeflow_shm::{AccessError, Segment, install_sigbus_guard, page_bytes, refuses_missing_pages};
use std::os::fd::{AsFd, OwnedFd};

const PAGES: usize = 64;

/// The router's mapping, the program's and the memory of both; none where the kernel can't.
fn pair() -> Option<(Segment, Segment, OwnedFd)> {
    install_sigbus_guard().unwrap();
    if let Err(error) = refuses_missing_pages() {
        println!("not here: {error}");
        return None;
    }
    let bytes = PAGES * page_bytes();
    let (mut ours, fd) = Segment::create("test", bytes).unwrap();
    ours.refuse_missing().unwrap();
    let theirs = Segment::map(fd.as_fd(), bytes).unwrap();
    Some((ours, theirs, fd))
}

#[test]
fn every_access_to_a_missing_page_is_refused_and_allocates_nothing() {
    let Some((ours, _, memory)) = pair() else { return };
    let page = page_bytes();
    let (local, _) = Segment::create("test", PAGES * page).unwrap();
    let mut bytes = vec![7; 3 * page];
    for _ in 0..100 {
        assert_eq!(ours.read(page - 5, &mut bytes), Err(AccessError::Missing));
        for last in [false, true] {
            assert_eq!(ours.write(3, &bytes, last), Err(AccessError::Missing));
            assert_eq!(ours.write(3, &bytes[..5], last), Err(AccessError::Missing));
            assert_eq!(Segment::copy(&local, 0, &ours, page, 2 * page, last), Err(AccessError::Missing));
            assert_eq!(Segment::copy(&ours, 0, &local, 1, 100, last), Err(AccessError::Missing));
            assert_eq!(Segment::copy(&ours, 0, &ours, 64, 9 * page, last), Err(AccessError::Missing));
        }
        assert_eq!(ours.fetch_add(8, 1), Err(AccessError::Missing));
        assert_eq!(ours.compare_swap(16, 0, 1), Err(AccessError::Missing));
        assert_eq!(ours.probe(0, 1), Err(AccessError::Missing));
    }
    assert!(!ours.poisoned() && !local.poisoned());
    assert_eq!(rustix::fs::fstat(&memory).unwrap().st_blocks, 0);
}

#[test]
fn what_the_program_touched_is_reached_and_what_it_took_away_is_not() {
    let Some((ours, theirs, _memory)) = pair() else { return };
    let page = page_bytes();
    theirs.populate(page, 2 * page).unwrap();
    let bytes: Vec<u8> = (0..2 * page).map(|at| (at / 3) as u8).collect();
    ours.write(page, &bytes, true).unwrap();
    ours.probe(page, 2 * page).unwrap();
    let mut seen = vec![0; 2 * page];
    theirs.read(page, &mut seen).unwrap();
    assert_eq!(seen, bytes);
    // From its end: the copy goes backwards, and meets the missing page in its midst.
    assert_eq!(Segment::copy(&ours, page, &ours, page + 8, 2 * page, false), Err(AccessError::Missing));
    assert_eq!(ours.probe(page + 1, 2 * page - 1), Ok(()));
    assert_eq!(ours.probe(page + 1, 2 * page), Err(AccessError::Missing));
    assert_eq!(ours.write(page - 1, &bytes[..2], false), Err(AccessError::Missing));
    assert_eq!(ours.fetch_add(2 * page, 5).map(|_| ()), Ok(()));
    let at = (theirs.address() + page) as *mut _;
    // SAFETY: nothing of Rust's lies in the range.
    unsafe { rustix::mm::madvise(at, page, rustix::mm::Advice::LinuxRemove).unwrap() };
    assert_eq!(ours.read(page, &mut seen[..1]), Err(AccessError::Missing));
    assert_eq!(ours.read(2 * page, &mut seen[..1]), Ok(()));
    assert!(!ours.poisoned());
}

#[test]
fn threads_are_refused_each_for_itself() {
    let Some((ours, theirs, _memory)) = pair() else { return };
    let page = page_bytes();
    theirs.populate(0, page).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            let ours = &ours;
            scope.spawn(move || {
                let mut bytes = [0; 64];
                for round in 0..2000_usize {
                    let at = 1 + (round + thread) % (PAGES - 1);
                    assert_eq!(ours.read(at * page, &mut bytes), Err(AccessError::Missing));
                    assert_eq!(ours.write(thread * 64, &bytes, true), Ok(()));
                }
            });
        }
    });
    assert!(!ours.poisoned());
}
