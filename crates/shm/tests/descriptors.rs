//! Sockets, descriptors, processes.
#![cfg(not(loom))]
use freeflow_shm::fd::{self, MESSAGE_BYTES_MAX, MESSAGE_FDS_MAX};
use freeflow_shm::{Doorbell, Segment, allowed_cpus, cpu_count, monotonic_ns, pin_to_cpu};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;

/// An empty directory of this test's own, removed at the end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("freeflow-shm-{name}-{}", std::process::id()));
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
    let (read, write) = fd::event_pipe().unwrap();
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
    // What a dead router left is replaced; anything else is not.
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
fn event_pipes_carry_events_and_the_end() {
    let (read, write) = fd::event_pipe().unwrap();
    let (mut read, mut write) = (File::from(read), File::from(write));
    write.write_all(&[1; 8]).unwrap();
    let mut event = [0; 8];
    read.read_exact(&mut event).unwrap();
    assert_eq!(event, [1; 8]);
    let full = loop {
        if let Err(error) = write.write(&[2; 8]) {
            break error;
        }
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    assert!(!fd::peer_closed(&read));
    drop(write);
    assert!(fd::peer_closed(&read));
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
