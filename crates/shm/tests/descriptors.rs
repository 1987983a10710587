//! Sockets, descriptors, processes.
#![cfg(not(loom))]
use freeflow_shm::fd::{self, MESSAGE_BYTES_MAX, MESSAGE_FDS_MAX};
use freeflow_shm::{Doorbell, Segment, allowed_cpus, cpu_count, monotonic_ns, pin_to_cpu};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

/// An empty directory of this test's own, removed at the end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("freeflow-shm-{name}-{}", std::process::id()));
        // A killed run with this number may have left one.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_segment_crosses_a_socket() {
    let (here, there) = fd::seqpacket_pair().unwrap();
    let (segment, memfd) = Segment::create("test", 4096).unwrap();
    let doorbell = Doorbell::new().unwrap();
    fd::send_message(&here, b"two", &[memfd.as_fd(), doorbell.as_fd()]).unwrap();
    fd::send_message(&here, b"none", &[]).unwrap();
    let mut buffer = Vec::new();
    let (length, fds) = fd::receive_message(&there, &mut buffer, 2).unwrap();
    assert_eq!((length, &buffer[..]), (3, &b"two"[..]));
    let [received, bell]: [_; 2] = fds.try_into().unwrap();
    for fd in [&received, &bell] {
        assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
    let mapped = Segment::map(received.as_fd(), 4096).unwrap();
    segment.u64(8).store(99, Relaxed);
    assert_eq!(mapped.u64(8).load(Relaxed), 99);
    Doorbell::from(bell).kick();
    assert!(doorbell.drain() && !doorbell.drain());
    let (length, fds) = fd::receive_message(&there, &mut buffer, 0).unwrap();
    assert_eq!((length, &buffer[..], fds.len()), (4, &b"none"[..], 0));
    drop(here);
    assert_eq!(fd::receive_message(&there, &mut buffer, 2).unwrap().0, 0);
    assert!(buffer.is_empty());
    let error = fd::send_message(&there, b"gone", &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BrokenPipe);
}

#[test]
fn messages_of_every_size_up_to_the_limit() {
    let (here, there) = fd::seqpacket_pair().unwrap();
    let mut buffer = Vec::new();
    for bytes in [1, 100, MESSAGE_BYTES_MAX - 1, MESSAGE_BYTES_MAX] {
        let message: Vec<u8> = (0..bytes).map(|i| i as u8).collect();
        fd::send_message(&here, &message, &[]).unwrap();
        assert_eq!(fd::receive_message(&there, &mut buffer, 0).unwrap().0, bytes);
        assert_eq!(buffer, message);
    }
    let error = fd::send_message(&here, &vec![0; MESSAGE_BYTES_MAX + 1], &[]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
}

#[test]
fn truncated_messages_are_errors() {
    let (here, there) = fd::seqpacket_pair().unwrap();
    let mut buffer = Vec::new();
    // Longer than allowed: a hostile sender doesn't go through `send_message`.
    rustix::net::send(&here, &vec![1; MESSAGE_BYTES_MAX + 1], rustix::net::SendFlags::empty()).unwrap();
    assert_eq!(fd::receive_message(&there, &mut buffer, 0).unwrap_err().kind(), ErrorKind::InvalidData);
    assert!(buffer.is_empty());
    // The connection goes on with the next message.
    fd::send_message(&here, b"ok", &[]).unwrap();
    assert_eq!(fd::receive_message(&there, &mut buffer, 0).unwrap().0, 2);
}

#[test]
fn too_many_descriptors_are_an_error_and_none_leaks() {
    let (here, there) = fd::seqpacket_pair().unwrap();
    let (read, write) = fd::event_sockets(16 * 1024).unwrap();
    let mut buffer = Vec::new();
    for (sent, allowed) in [(1, 0), (2, 1), (3, 2), (MESSAGE_FDS_MAX, 3)] {
        fd::send_message(&here, b"x", &vec![write.as_fd(); sent]).unwrap();
        let error = fd::receive_message(&there, &mut buffer, allowed).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }
    // More than the receiver has room for at all.
    send_raw(&here, &[write.as_fd(); MESSAGE_FDS_MAX + 3]);
    assert_eq!(fd::receive_message(&there, &mut buffer, 16).unwrap_err().kind(), ErrorKind::InvalidData);
    // All copies of the write end are closed with ours: end of file.
    drop(write);
    assert!(fd::peer_closed(&read));
    assert_eq!(File::from(read).read(&mut [0; 8]).unwrap(), 0);
    let fds = [here.as_fd(); MESSAGE_FDS_MAX + 1];
    assert_eq!(fd::send_message(&here, b"x", &fds).unwrap_err().kind(), ErrorKind::InvalidInput);
}

/// Sends descriptors without the limit of `send_message`.
fn send_raw(sock: impl AsFd, fds: &[BorrowedFd<'_>]) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(fds)));
    let bytes = [std::io::IoSlice::new(b"x")];
    rustix::net::sendmsg(sock, &bytes, &mut control, rustix::net::SendFlags::empty()).unwrap();
}

#[test]
fn a_listener_knows_who_connects() {
    let directory = Directory::new("listen");
    let path = directory.0.join("router.sock");
    let listener = fd::listen_seqpacket(&path, 0o666).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
    assert_eq!(fd::accept(&listener).unwrap_err().kind(), ErrorKind::WouldBlock);
    let client = fd::connect_seqpacket(&path).unwrap();
    let server = fd::accept(&listener).unwrap();
    let mut buffer = Vec::new();
    assert_eq!(fd::receive_message(&server, &mut buffer, 0).unwrap_err().kind(), ErrorKind::WouldBlock);
    // The client's socket is a blocking one, and yet nobody waits.
    let mut bytes = [0; 8];
    assert!(fd::receive_now(&client, &mut bytes, 0).is_none());
    fd::send_message(&server, b"welcome", &[]).unwrap();
    assert_eq!(fd::receive_now(&client, &mut bytes, 0).unwrap().unwrap().0, 7);
    assert_eq!(&bytes[..7], b"welcome");
    fd::send_message(&client, b"hello", &[]).unwrap();
    assert_eq!(fd::receive_message(&server, &mut buffer, 0).unwrap().0, 5);
    let peer = fd::peer_credentials(&server).unwrap();
    assert_eq!(peer.pid, std::process::id() as i32);
    assert_eq!(peer.uid, rustix::process::getuid().as_raw());
    assert_eq!(peer.gid, rustix::process::getgid().as_raw());
    assert!(fd::pidfd_alive(fd::peer_pidfd(&server).unwrap()));
    assert!(!fd::peer_closed(&server));
    drop(client);
    assert!(fd::peer_closed(&server));
    drop(listener);
    // A socket that a dead router left is replaced; anything else is not.
    assert_eq!(fd::connect_seqpacket(&path).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    drop(fd::listen_seqpacket(&path, 0o600).unwrap());
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, b"precious").unwrap();
    assert_eq!(fd::listen_seqpacket(&path, 0o600).unwrap_err().kind(), ErrorKind::AddrInUse);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    assert_eq!(fd::connect_seqpacket(directory.0.join("none")).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn long_paths_work() {
    let directory = Directory::new("long");
    let deep = directory.0.join("d".repeat(120));
    std::fs::create_dir(&deep).unwrap();
    let path = deep.join("router.sock");
    let listener = fd::listen_seqpacket(&path, 0o600).unwrap();
    let client = fd::connect_seqpacket(&path).unwrap();
    let server = fd::accept(&listener).unwrap();
    fd::send_message(&client, b"hello", &[]).unwrap();
    assert_eq!(fd::receive_message(&server, &mut Vec::new(), 0).unwrap().0, 5);
}

#[test]
fn event_sockets_carry_records_and_the_end() {
    let (read, write) = fd::event_sockets(16 * 1024).unwrap();
    let mut read = File::from(read);
    assert!(fd::send_record(&write, &[1; 8]) && fd::send_record(&write, &[2; 1000]));
    let mut record = [0; 2000];
    assert_eq!(read.read(&mut record).unwrap(), 8);
    assert_eq!(read.read(&mut record).unwrap(), 1000, "one record a read");
    // Nothing goes the other way, descriptors neither.
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let fds = [read.as_fd()];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let bytes = [std::io::IoSlice::new(b"x")];
    let sent = rustix::net::sendmsg(&read, &bytes, &mut control, rustix::net::SendFlags::NOSIGNAL);
    assert_eq!(sent, Err(rustix::io::Errno::PIPE));
    // A sender does not wait, although its end blocks.
    let count = (0..1000).take_while(|_| fd::send_record(&write, &[2; 8])).count();
    assert!((8..64).contains(&count), "{count}");
    assert!(!fd::peer_closed(&read));
    drop(write);
    assert!(fd::peer_closed(&read));
    for _ in 0..count {
        assert_eq!(read.read(&mut record).unwrap(), 8);
    }
    assert_eq!(read.read(&mut record).unwrap(), 0);
}

#[test]
fn records_for_nobody_are_as_good_as_sent() {
    let (read, write) = fd::event_sockets(16 * 1024).unwrap();
    assert!(fd::send_record(&write, &[1; 8]));
    drop(read);
    assert!(fd::peer_closed(&write));
    assert!((0..100).all(|_| fd::send_record(&write, &[1; 8])));
}

/// A `read` into memory of which userfaultfd withholds a page; a pipe would hold the sender up as long as that lasts.
#[test]
fn a_reader_that_stands_still_does_not_hold_the_sender_up() {
    use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags, mmap_anonymous, userfaultfd};
    #[repr(C)]
    struct Words<const N: usize>([u64; N]);
    const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
    const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
    const PAGE: usize = 4096;
    // SAFETY: it has no memory yet.
    let Ok(faults) = (unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }) else {
        eprintln!("left out: no userfaultfd here");
        return;
    };
    // SAFETY: new memory at an address of the kernel's choice.
    let page = unsafe {
        mmap_anonymous(std::ptr::null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE).unwrap()
    } as usize;
    let (mut api, mut register) = (Words([0xaa, 0, 0]), Words([page as u64, PAGE as u64, 1, 0]));
    // SAFETY: structures of the sizes that the two numbers name; the memory is this test's.
    let done = unsafe {
        let raw = std::os::fd::AsRawFd::as_raw_fd(&faults);
        libc::ioctl(raw, UFFDIO_API, &raw mut api) == 0 && libc::ioctl(raw, UFFDIO_REGISTER, &raw mut register) == 0
    };
    assert!(done, "{}", std::io::Error::last_os_error());
    let (read, write) = fd::event_sockets(16 * 1024).unwrap();
    assert!(fd::send_record(&write, &[1; 8]));
    let reader = std::thread::spawn(move || {
        // SAFETY: the page is nobody else's, and is never unmapped.
        unsafe { libc::read(std::os::fd::AsRawFd::as_raw_fd(&read), page as *mut libc::c_void, PAGE) }
    });
    let mut polled = [rustix::event::PollFd::new(&faults, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut polled, Some(&limit)).unwrap(), 1, "the reader stands still");
    let (done, is_done) = std::sync::mpsc::channel();
    let sender = std::thread::spawn(move || {
        let all = (0..1000).map(|_| fd::send_record(&write, &[2; 8])).filter(|sent| *sent).count();
        done.send(all).unwrap();
    });
    let sent = is_done.recv_timeout(std::time::Duration::from_secs(10));
    drop(faults);
    assert!((1..64).contains(&sent.expect("the sender waits for the reader")));
    assert_eq!(reader.join().unwrap(), 8);
    sender.join().unwrap();
}

/// The library shares the kick's description and may make it blocking: the router's drain must not wait even then.
#[test]
fn drain_never_waits() {
    let bell = Doorbell::new().unwrap();
    assert!(!bell.drain());
    fd::set_nonblocking(&bell, false).unwrap();
    assert!(!bell.drain());
    bell.kick();
    bell.kick();
    assert!(bell.drain());
    assert!(!bell.drain());
}

#[test]
fn clock_and_processors() {
    let before = monotonic_ns();
    freeflow_shm::pause();
    freeflow_shm::sched_yield();
    assert!(monotonic_ns() >= before);
    let cpus = allowed_cpus().unwrap();
    assert!(!cpus.is_empty() && cpu_count() >= 1);
    std::thread::spawn(move || {
        pin_to_cpu(cpus[0]).unwrap();
        assert_eq!(allowed_cpus().unwrap(), [cpus[0]]);
        assert_eq!(pin_to_cpu(1 << 20).unwrap_err().kind(), ErrorKind::InvalidInput);
    })
    .join()
    .unwrap();
}
