//! The C functions against themselves, over the connection manager and verbs of `fake`.
#![allow(clippy::undocumented_unsafe_blocks)]
use crate::address::Address;
use crate::exports::*;
use crate::fake;
use crate::ffi::errno;
use libc::{c_int, c_void, pollfd};
use std::net::SocketAddr;
use std::ptr;
use std::thread;
use std::time::Duration;

fn address(port: u16) -> Address {
    Address::from_std(SocketAddr::from(([127, 0, 0, 1], port)))
}

fn listener(port: u16) -> c_int {
    let fd = rsocket(libc::AF_INET, libc::SOCK_STREAM, 0);
    assert!(fd >= 0, "errno {}", errno());
    let mut to = address(port);
    assert_eq!(unsafe { rbind(fd, to.pointer(), to.length()) }, 0);
    assert_eq!(rlisten(fd, 5), 0);
    fd
}

fn connect(port: u16, flags: c_int) -> (c_int, c_int) {
    let fd = rsocket(libc::AF_INET, libc::SOCK_STREAM | flags, 0);
    let mut to = address(port);
    (fd, unsafe { rconnect(fd, to.pointer(), to.length()) })
}

fn accept(listener: c_int) -> c_int {
    let fd = unsafe { raccept(listener, ptr::null_mut(), ptr::null_mut()) };
    assert!(fd >= 0, "errno {}", errno());
    fd
}

/// A connected pair.
fn pair(port: u16) -> [c_int; 3] {
    let listening = listener(port);
    let client = thread::spawn(move || connect(port, 0));
    let server = accept(listening);
    let (client, outcome) = client.join().unwrap();
    assert_eq!(outcome, 0);
    [listening, client, server]
}

fn send(fd: c_int, bytes: &[u8], flags: c_int) -> isize {
    unsafe { rsend(fd, bytes.as_ptr().cast(), bytes.len(), flags) }
}

fn receive(fd: c_int, room: &mut [u8], flags: c_int) -> isize {
    unsafe { rrecv(fd, room.as_mut_ptr().cast(), room.len(), flags) }
}

fn poll(fd: c_int, events: i16, timeout: c_int) -> i16 {
    let mut entry = [pollfd { fd, events, revents: 0 }];
    assert!(unsafe { rpoll(entry.as_mut_ptr(), 1, timeout) } >= 0);
    entry[0].revents
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|i| (i ^ i >> 8 ^ i >> 15) as u8 ^ seed).collect()
}

fn close_all(fds: &[c_int]) {
    for fd in fds {
        assert_eq!(rclose(*fd), 0);
    }
}

#[test]
fn a_stream_both_ways_at_once() {
    let [listening, client, server] = pair(7001);
    let both = [(client, 1u8, server, 2u8), (server, 2, client, 1)].map(|(from, seed, _, other)| {
        [
            thread::spawn(move || {
                let data = pattern(5_000_000, seed);
                for chunk in data.chunks(37_777) {
                    assert_eq!(send(from, chunk, 0), chunk.len() as isize);
                }
            }),
            thread::spawn(move || {
                let mut got = vec![0; 5_000_000];
                assert_eq!(receive(from, &mut got, libc::MSG_WAITALL), 5_000_000);
                assert!(got == pattern(5_000_000, other));
            }),
        ]
    });
    for handle in both.into_iter().flatten() {
        handle.join().unwrap();
    }
    close_all(&[client, server, listening]);
}

#[test]
fn what_is_not_blocking_says_so() {
    let listening = listener(7002);
    let (nobody, outcome) = connect(7999, 0);
    assert_eq!((outcome, errno()), (-1, libc::ECONNREFUSED));
    let (client, outcome) = connect(7002, libc::SOCK_NONBLOCK);
    assert_eq!((outcome, errno()), (-1, libc::EINPROGRESS));
    assert_eq!(poll(client, libc::POLLOUT, 0), 0);
    assert_eq!(poll(listening, libc::POLLIN, 1000), libc::POLLIN);
    let server = accept(listening);
    assert_eq!(poll(client, libc::POLLOUT | libc::POLLIN, 1000), libc::POLLOUT);
    let mut room = [0; 100];
    assert_eq!((receive(client, &mut room, 0), errno()), (-1, libc::EAGAIN));
    assert_eq!((receive(server, &mut room, libc::MSG_DONTWAIT), errno()), (-1, libc::EAGAIN));
    // As much as there is room for, and not more; then all of it arrives.
    let data = pattern(1 << 20, 3);
    let sent = send(client, &data, 0);
    assert!((1 << 16..1 << 20).contains(&sent), "{sent}");
    assert_eq!((send(client, &data, 0), errno()), (-1, libc::EAGAIN));
    assert_eq!(poll(client, libc::POLLOUT, 0), 0);
    let mut got = vec![0; sent as usize];
    assert_eq!(receive(server, &mut got[..10], libc::MSG_PEEK), 10);
    assert_eq!(receive(server, &mut got, libc::MSG_WAITALL), sent);
    assert!(got == data[..sent as usize]);
    assert_eq!(poll(client, libc::POLLOUT, 1000), libc::POLLOUT);
    close_all(&[client, server, listening, nobody]);
}

#[test]
fn halves_are_closed_one_by_one() {
    let [listening, client, server] = pair(7003);
    assert_eq!(send(client, b"last words", 0), 10);
    assert_eq!(rshutdown(client, libc::SHUT_WR), 0);
    assert_eq!((send(client, b"more", 0), errno()), (-1, libc::EPIPE));
    let mut room = [0; 100];
    assert_eq!(receive(server, &mut room, 0), 10);
    assert_eq!(receive(server, &mut room, 0), 0);
    assert_eq!(poll(server, libc::POLLIN, 0), libc::POLLIN);
    assert_eq!(send(server, b"answer", 0), 6);
    assert_eq!(rclose(server), 0);
    assert_eq!(receive(client, &mut room, 0), 6);
    assert_eq!(receive(client, &mut room, 0), 0);
    assert_eq!(poll(client, libc::POLLIN, 0), libc::POLLIN | libc::POLLHUP);
    close_all(&[client, listening]);
}

#[test]
fn peeking_waits_for_all() {
    let [listening, client, server] = pair(7029);
    let both = libc::MSG_PEEK | libc::MSG_WAITALL;
    let mut room = vec![0; 2 << 20];
    assert_eq!(send(client, b"half", 0), 4);
    assert_eq!(poll(server, libc::POLLIN, 5000), libc::POLLIN);
    assert_eq!(receive(server, &mut room[..8], both | libc::MSG_DONTWAIT), 4);
    let (peeking, begun) = (server, std::sync::mpsc::channel());
    let reader = thread::spawn(move || {
        let mut room = [0; 8];
        begun.0.send(()).unwrap();
        (receive(peeking, &mut room, both), room)
    });
    begun.1.recv().unwrap();
    thread::sleep(Duration::from_millis(30));
    assert_eq!(send(client, b" and half", 0), 9);
    assert_eq!(reader.join().unwrap(), (8, *b"half and"));
    assert_eq!(receive(server, &mut room[..13], libc::MSG_WAITALL), 13);
    // More than there is room for: all the room; and so with messages.
    for bytes in [2 << 20, 1] {
        let sent = until_some(Duration::ZERO, || {
            let data = pattern(bytes, 1);
            let sent =
                std::iter::from_fn(|| Some(send(client, &data, libc::MSG_DONTWAIT))).take_while(|sent| *sent > 0);
            Some(sent.sum::<isize>())
        });
        assert_eq!(receive(server, &mut room, both), sent);
        assert_eq!(receive(server, &mut room[..sent as usize], libc::MSG_WAITALL), sent);
    }
    // The end ends it too.
    assert_eq!(send(client, b"rest", 0), 4);
    assert_eq!(rclose(client), 0);
    assert_eq!(receive(server, &mut room, both), 4);
    assert_eq!(receive(server, &mut room, 0), 4);
    assert_eq!(receive(server, &mut room, both), 0);
    close_all(&[server, listening]);
}

#[test]
fn a_shutdown_here_is_a_broken_pipe_whatever_the_other_end_does() {
    for server_first in [false, true] {
        let [listening, client, server] = pair(7030);
        if server_first {
            assert_eq!(rclose(server), 0);
            assert_eq!(receive(client, &mut [0; 1], 0), 0);
            assert_eq!((send(client, b"x", 0), errno()), (-1, libc::ECONNRESET));
        }
        assert_eq!(rshutdown(client, libc::SHUT_WR), 0);
        if !server_first {
            assert_eq!(rclose(server), 0);
            assert_eq!(receive(client, &mut [0; 1], 0), 0);
        }
        assert_eq!((send(client, b"x", 0), errno()), (-1, libc::EPIPE));
        close_all(&[client, listening]);
    }
}

#[test]
fn streams_without_a_peer_hang_up_and_with_one_ignore_addresses() {
    let alone = rsocket(libc::AF_INET, libc::SOCK_STREAM, 0);
    let mut to = address(7033);
    for _ in 0..2 {
        assert_eq!(poll(alone, libc::POLLIN | libc::POLLOUT, 5000), libc::POLLOUT | libc::POLLHUP);
        assert_eq!(poll(alone, libc::POLLIN, 5000), libc::POLLHUP);
        unsafe { rbind(alone, to.pointer(), to.length()) };
    }
    assert_eq!(rlisten(alone, 1), 0);
    assert_eq!(poll(alone, libc::POLLIN | libc::POLLOUT, 0), 0);
    assert_eq!(rclose(alone), 0);
    let [listening, client, server] = pair(7034);
    assert_eq!(unsafe { rsendto(client, b"word".as_ptr().cast(), 4, 0, to.pointer(), to.length()) }, 4);
    assert_eq!(receive(server, &mut [0; 10], 0), 4);
    close_all(&[client, server, listening]);
}

#[test]
fn who_is_left_hears_of_it() {
    let [listening, client, server] = pair(7004);
    let reader = thread::spawn(move || (receive(client, &mut [0; 10], 0), errno()));
    thread::sleep(Duration::from_millis(50));
    fake::kill_peer_of(client);
    assert_eq!(reader.join().unwrap(), (-1, libc::ECONNRESET));
    assert_eq!((send(client, b"x", 0), errno()), (-1, libc::ECONNRESET));
    assert_ne!(poll(client, libc::POLLIN, 0) & libc::POLLERR, 0);
    close_all(&[client, server, listening]);
}

/// Asks again and again, with or without pauses, until the answer is there.
fn until_some<T>(pause: Duration, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = std::time::Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "never");
        thread::sleep(pause);
    }
}

#[test]
fn room_to_send_hides_no_death() {
    for pause in [Duration::ZERO, Duration::from_millis(20)] {
        let [listening, client, server] = pair(7025);
        let both = libc::POLLIN | libc::POLLOUT;
        assert_eq!(poll(client, both, 0), libc::POLLOUT);
        fake::part_from_peer(client);
        let reported =
            until_some(pause, || Some(poll(client, both, 1000)).filter(|reported| *reported != libc::POLLOUT));
        assert_eq!(reported, both | libc::POLLHUP);
        assert_eq!(receive(client, &mut [0; 10], 0), 0);
        close_all(&[client, server, listening]);
    }
}

#[test]
fn who_only_sends_hears_of_a_death() {
    for (pause, flags) in [(0, 0), (20, 0), (0, libc::MSG_DONTWAIT), (20, libc::MSG_DONTWAIT)] {
        let [listening, client, server] = pair(7026);
        let (stop, over) = std::sync::mpsc::channel();
        let reader = thread::spawn(move || while receive(server, &mut [0; 1000], 0) > 0 || over.try_recv().is_err() {});
        assert_eq!(send(client, b"x", flags), 1);
        fake::part_from_peer(client);
        let failed = || (send(client, b"x", flags) < 0).then(errno).filter(|error| *error != libc::EAGAIN);
        assert_eq!(until_some(Duration::from_millis(pause), failed), libc::ECONNRESET);
        stop.send(()).unwrap();
        assert_eq!(rclose(client), 0);
        reader.join().unwrap();
        close_all(&[server, listening]);
    }
}

#[test]
fn who_only_tries_to_receive_hears_of_a_death() {
    let [listening, client, server] = pair(7027);
    fake::part_from_peer(client);
    let reported = || Some(receive(client, &mut [0; 10], libc::MSG_DONTWAIT)).filter(|reported| *reported >= 0);
    assert_eq!(until_some(Duration::from_millis(20), reported), 0);
    close_all(&[client, server, listening]);
}

fn error_of(fd: c_int) -> c_int {
    let (mut value, mut length) = (-1 as c_int, 4);
    let room = (&raw mut value).cast();
    assert_eq!(unsafe { rgetsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, room, &raw mut length) }, 0);
    value
}

#[test]
fn what_poll_says_so_error_tells_once() {
    let [listening, client, server] = pair(7021);
    assert_eq!(error_of(client), 0);
    fake::kill_peer_of(client);
    assert_ne!(poll(client, libc::POLLIN, 0) & libc::POLLERR, 0);
    assert_eq!([error_of(client), error_of(client)], [libc::ECONNRESET, 0]);
    close_all(&[client, server, listening]);
}

#[test]
fn a_reset_is_reported_behind_what_came_before() {
    for words in [&b""[..], b"last words"] {
        let [listening, client, server] = pair(7028);
        let none = libc::linger { l_onoff: 1, l_linger: 0 };
        let value = (&raw const none).cast();
        assert_eq!(unsafe { rsetsockopt(server, libc::SOL_SOCKET, libc::SO_LINGER, value, 8) }, 0);
        assert_eq!(send(server, words, 0), words.len() as isize);
        assert_eq!(rclose(server), 0);
        let mut room = [0; 100];
        if !words.is_empty() {
            assert_eq!(receive(client, &mut room, 0), words.len() as isize);
        }
        assert_eq!((receive(client, &mut room, 0), errno()), (-1, libc::ECONNRESET));
        let reported = poll(client, libc::POLLIN | libc::POLLOUT, 0);
        assert_eq!(reported, libc::POLLIN | libc::POLLOUT | libc::POLLERR | libc::POLLHUP);
        assert_eq!([error_of(client), error_of(client)], [libc::ECONNRESET, 0]);
        close_all(&[client, listening]);
    }
}

#[test]
fn two_acceptors_get_two_connections() {
    let listening = listener(7022);
    for _ in 0..200 {
        let acceptors = [0, 1].map(|_| thread::spawn(move || accept(listening)));
        let clients = [0, 1].map(|_| thread::spawn(|| connect(7022, 0)));
        let servers = acceptors.map(|acceptor| acceptor.join().unwrap());
        close_all(&clients.map(|client| client.join().unwrap().0));
        close_all(&servers);
    }
    close_all(&[listening]);
}

#[test]
fn acceptors_hear_of_the_listeners_end() {
    for round in 0..200 {
        let listening = listener(7023);
        let acceptors =
            [0, 1].map(|_| thread::spawn(move || unsafe { raccept(listening, ptr::null_mut(), ptr::null_mut()) }));
        if round % 2 == 0 {
            thread::yield_now();
        }
        assert_eq!(rshutdown(listening, libc::SHUT_RDWR), 0);
        assert_eq!(acceptors.map(|acceptor| acceptor.join().unwrap()), [-1, -1]);
        close_all(&[listening]);
    }
}

#[test]
fn keepalives_end_with_their_socket() {
    let listening = listener(7024);
    let on: c_int = 1;
    let code =
        unsafe { rsetsockopt(listening, libc::SOL_SOCKET, libc::SO_KEEPALIVE, (&raw const on).cast::<c_void>(), 4) };
    assert_eq!(code, 0);
    let client = thread::spawn(|| connect(7024, 0));
    let server = accept(listening);
    let (client, _) = client.join().unwrap();
    // It learns only now that it is connected.
    assert_eq!(rclose(server), 0);
    assert!(!crate::keepalive::is_scheduled(server));
    close_all(&[client, listening]);
}

#[test]
fn a_blocked_sender_is_woken_by_shutdown_and_by_room() {
    let [listening, client, server] = pair(7005);
    let sender = thread::spawn(move || send(client, &pattern(1 << 20, 0), 0));
    thread::sleep(Duration::from_millis(50));
    let mut got = vec![0; 1 << 20];
    assert_eq!(receive(server, &mut got, libc::MSG_WAITALL), 1 << 20);
    assert_eq!(sender.join().unwrap(), 1 << 20);
    let sender = thread::spawn(move || send(client, &pattern(1 << 20, 0), 0));
    // It has begun; and by now it is blocked, or goes on a little.
    let mut left = receive(server, &mut got[..1], 0);
    assert_eq!(left, 1);
    thread::sleep(Duration::from_millis(50));
    assert_eq!(rshutdown(client, libc::SHUT_RDWR), 0);
    let sent = sender.join().unwrap();
    assert!((1..1 << 20).contains(&sent));
    while let count @ 1.. = receive(server, &mut got, 0) {
        left += count;
    }
    assert_eq!(left, sent);
    close_all(&[client, server, listening]);
}

#[test]
fn others_are_polled_too() {
    let [listening, client, server] = pair(7006);
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let waiter = thread::spawn(move || {
        let mut fds = [client, pipe[0], -1, listening].map(|fd| pollfd { fd, events: libc::POLLIN, revents: 0 });
        let ready = unsafe { rpoll(fds.as_mut_ptr(), 4, 5000) };
        (ready, fds.map(|entry| entry.revents))
    });
    thread::sleep(Duration::from_millis(50));
    assert_eq!(unsafe { libc::write(pipe[1], [1u8].as_ptr().cast(), 1) }, 1);
    assert_eq!(waiter.join().unwrap(), (1, [0, libc::POLLIN, 0, 0]));
    assert_eq!(unsafe { libc::read(pipe[0], [0u8].as_mut_ptr().cast(), 1) }, 1);

    // Two threads wait for the same; both are woken.
    let waiters = [0, 1].map(|_| thread::spawn(move || poll(client, libc::POLLIN, 5000)));
    thread::sleep(Duration::from_millis(50));
    assert_eq!(send(server, b"news", 0), 4);
    assert_eq!(waiters.map(|waiter| waiter.join().unwrap()), [libc::POLLIN; 2]);

    let mut sets: [libc::fd_set; 2] = unsafe { std::mem::zeroed() };
    unsafe {
        [client, pipe[0]].into_iter().for_each(|fd| libc::FD_SET(fd, &raw mut sets[0]));
        libc::FD_SET(client, &raw mut sets[1]);
        let most = 1 + client.max(pipe[0]);
        let [read, write] = sets.each_mut().map(ptr::from_mut);
        assert_eq!(rselect(most, read, write, ptr::null_mut(), ptr::null_mut()), 2);
        assert!(libc::FD_ISSET(client, read) && libc::FD_ISSET(client, write) && !libc::FD_ISSET(pipe[0], read));
        libc::close(pipe[0]);
        libc::close(pipe[1]);
    }
    close_all(&[client, server, listening]);
}

#[test]
fn options_are_kept() {
    let fd = rsocket(libc::AF_INET, libc::SOCK_STREAM, 0);
    let set = |level: c_int, name: c_int, value: c_int| unsafe {
        rsetsockopt(fd, level, name, (&raw const value).cast::<c_void>(), 4)
    };
    let get = |level: c_int, name: c_int| {
        let (mut value, mut length) = (-1 as c_int, 4);
        let code = unsafe { rgetsockopt(fd, level, name, (&raw mut value).cast(), &raw mut length) };
        if code == 0 { value } else { -errno() }
    };
    assert_eq!(get(libc::SOL_SOCKET, libc::SO_RCVBUF), 512 << 10);
    for (level, name, value, read) in [
        (libc::SOL_SOCKET, libc::SO_REUSEADDR, 1, 1),
        (libc::SOL_SOCKET, libc::SO_RCVBUF, 5000, 10000),
        (libc::SOL_SOCKET, libc::SO_SNDBUF, 10, 4096),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY, 1, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 30, 30),
        (libc::SOL_SOCKET, libc::SO_PRIORITY, 3, 3),
        (libc::SOL_SOCKET, libc::SO_BROADCAST, 2, 1),
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT, 0, 1),
        (libc::IPPROTO_TCP, libc::TCP_CORK, 1, 1),
        (libc::IPPROTO_TCP, libc::TCP_QUICKACK, 1, 1),
        (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, 5, 5),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 0, 0),
        (0x10000, 0, 100, 100),
        (0x10000, 1, 1 << 20, 0xFFFE),
        (0x10000, 3, 300, 256),
    ] {
        assert_eq!(set(level, name, value), 0, "{level} {name}");
        assert_eq!(get(level, name), read, "{level} {name}");
    }
    for (level, name) in [
        (libc::SOL_SOCKET, libc::SO_BINDTODEVICE),
        (libc::SOL_SOCKET, libc::SO_REUSEPORT),
        (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT),
    ] {
        assert_eq!((set(level, name, 2), errno()), (-1, libc::ENOTSUP), "{level} {name}");
    }
    assert_eq!(get(libc::SOL_SOCKET, libc::SO_ERROR), 0);
    assert_eq!(rfcntl(fd, libc::F_SETFL, libc::c_long::from(libc::O_NONBLOCK)), 0);
    assert_eq!(rfcntl(fd, libc::F_GETFL, 0), libc::O_NONBLOCK | libc::O_RDWR);
    assert_eq!(rclose(fd), 0);
    assert_eq!((rclose(fd), errno()), (-1, libc::EBADF));
    assert_eq!((rsocket(libc::AF_UNIX, libc::SOCK_STREAM, 0), errno()), (-1, libc::ENOTSUP));
}

#[test]
fn receiving_ends_after_its_time() {
    let [listening, client, server] = pair(7007);
    let time = libc::timeval { tv_sec: 0, tv_usec: 30_000 };
    let code = unsafe {
        rsetsockopt(client, libc::SOL_SOCKET, libc::SO_RCVTIMEO, (&raw const time).cast(), size_of_val(&time) as u32)
    };
    assert_eq!(code, 0);
    assert_eq!((receive(client, &mut [0; 1], 0), errno()), (-1, libc::EAGAIN));
    close_all(&[client, server, listening]);
}

#[test]
fn memory_is_mapped_and_written() {
    let listening = listener(7008);
    let size: c_int = 4;
    let server = thread::spawn(move || accept(listening));
    let client = rsocket(libc::AF_INET, libc::SOCK_STREAM, 0);
    assert_eq!(unsafe { rsetsockopt(client, 0x10000, 3, (&raw const size).cast(), 4) }, 0);
    let mut to = address(7008);
    assert_eq!(unsafe { rconnect(client, to.pointer(), to.length()) }, 0);
    let server = server.join().unwrap();
    let mut buffer = vec![0u8; 100_000];
    let place = buffer.as_mut_ptr().cast::<c_void>();
    assert_eq!(unsafe { riomap(server, place, 100_000, libc::PROT_WRITE, 0, 4096) }, 4096);
    assert_eq!(send(server, b"!", 0), 1);
    assert_eq!(receive(client, &mut [0; 1], 0), 1);
    let data = pattern(60_000, 9);
    assert_eq!(unsafe { riowrite(client, data.as_ptr().cast(), 60_000, 4096 + 1000, 0) }, 60_000);
    assert_eq!(unsafe { riowrite(client, data.as_ptr().cast(), 10, 1 << 20, 0) }, 0);
    assert_eq!(send(client, b"?", 0), 1);
    assert_eq!(receive(server, &mut [0; 1], 0), 1);
    assert!(buffer[1000..61_000] == data);
    assert_eq!(unsafe { riounmap(server, place, 100_000) }, 0);
    assert_eq!((unsafe { riounmap(server, place, 100_000) }, errno()), (-1, libc::EINVAL));
    assert_eq!(unsafe { riomap(client, place, 100, libc::PROT_WRITE, 0, 0) }, -1);
    close_all(&[client, server, listening]);
}

#[test]
fn datagrams_by_udp_then_by_queue_pairs() {
    let ends = [0, 1].map(|_| {
        let fd = rsocket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK, 0);
        let mut any = address(0);
        assert_eq!(unsafe { rbind(fd, any.pointer(), any.length()) }, 0);
        fd
    });
    let name = |fd: c_int| {
        let (mut name, mut length) = (address(0), 16);
        assert_eq!(unsafe { rgetsockname(fd, name.pointer(), &raw mut length) }, 0);
        name
    };
    let mut to = name(ends[1]);
    for round in 0..50u8 {
        let data = [round; 300];
        let sent = unsafe { rsendto(ends[0], data.as_ptr().cast(), 300, 0, to.pointer(), to.length()) };
        assert_eq!(sent, 300);
        assert_eq!(poll(ends[1], libc::POLLIN, 2000), libc::POLLIN);
        let (mut room, mut from, mut length) = ([0u8; 1000], address(0), 16);
        let got = unsafe { rrecvfrom(ends[1], room.as_mut_ptr().cast(), 1000, 0, from.pointer(), &raw mut length) };
        assert_eq!((got, room[299]), (300, round));
        assert_eq!(from.to_std(), name(ends[0]).to_std());
    }
    assert_eq!((send(ends[0], &[0; 4000], 0), errno()), (-1, libc::EMSGSIZE));
    assert_eq!((receive(ends[0], &mut [0; 1], 0), errno()), (-1, libc::EAGAIN));
    close_all(&ends);
}

#[test]
fn a_child_has_no_rsockets() {
    let [listening, client, server] = pair(7009);
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = send(client, b"x", 0) == -1 && errno() == libc::ENOTCONN;
        let closed = rclose(client) == 0;
        unsafe { libc::_exit(c_int::from(!(refused && closed))) };
    }
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    assert_eq!(send(client, b"x", 0), 1);
    assert_eq!(receive(server, &mut [0; 10], 0), 1);
    close_all(&[client, server, listening]);
}

#[test]
fn a_child_of_a_busy_process_waits_for_nothing() {
    let [listening, client, server] = pair(7011);
    // Another thread is within the table while this one forks.
    let (entered, begun) = std::sync::mpsc::channel();
    let (leave, over) = std::sync::mpsc::channel::<()>();
    let holder = thread::spawn(move || {
        crate::table::hold(|| {
            entered.send(()).unwrap();
            over.recv().unwrap();
        });
    });
    begun.recv().unwrap();
    let child = unsafe { libc::fork() };
    if child == 0 {
        unsafe { libc::alarm(10) };
        let refused = send(server, b"x", 0) == -1 && errno() == libc::ENOTCONN;
        let reported = poll(server, libc::POLLIN, 0) == libc::POLLNVAL;
        let closed = rclose(server) == 0 && rclose(server) == -1 && errno() == libc::EBADF;
        let own = rsocket(libc::AF_INET, libc::SOCK_DGRAM, 0);
        let closed = closed && own >= 0 && rclose(own) == 0;
        unsafe { libc::_exit(c_int::from(!(refused && reported && closed))) };
    }
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    leave.send(()).unwrap();
    holder.join().unwrap();
    assert_eq!(status, 0);
    close_all(&[client, server, listening]);
}

#[test]
fn a_listener_that_closes_waits_for_nobody() {
    let listening = listener(7012);
    assert_eq!(rlisten(listening, 2), 0);
    let clients = [(); 5].map(|()| connect(7012, libc::SOCK_NONBLOCK).0);
    // The listener answers when it is looked at: three of them then, and two wait until the program
    // takes one.
    assert_eq!(poll(listening, libc::POLLIN, 1000), libc::POLLIN);
    let connected = || clients.iter().filter(|client| poll(**client, libc::POLLOUT, 0) == libc::POLLOUT).count();
    assert_eq!(connected(), 3);
    let first = accept(listening);
    assert_eq!(poll(listening, libc::POLLIN, 1000), libc::POLLIN);
    assert_eq!(connected(), 4);
    close_all(&[first]);
    let begun = std::time::Instant::now();
    assert_eq!(rclose(listening), 0);
    assert!(begun.elapsed() < Duration::from_secs(2));
    close_all(&clients);
}

#[test]
fn many_connections_leave_nothing() {
    for _ in 0..200 {
        let [listening, client, server] = pair(7010);
        assert_eq!(send(server, b"hello", 0), 5);
        close_all(&[server]);
        assert_eq!(receive(client, &mut [0; 10], 0), 5);
        close_all(&[client, listening]);
    }
    // Other tests run beside this one.
    assert!(fake::objects().0 < 100);
}
