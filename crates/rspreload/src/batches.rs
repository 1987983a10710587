//! `recvmmsg` and `sendmmsg`: several messages by one call, for an rsocket one after another.
use crate::calls::{recvmsg, sendmsg};
use crate::real::{self, errno, set_errno};
use crate::table::rsocket_of;
use libc::{c_int, c_uint, mmsghdr, timespec};
use std::slice;
use std::time::{Duration, Instant};

/// As many as the kernel takes in one call (`UIO_MAXIOV`).
const MESSAGES_MAX: c_uint = 1024;

/// Result of several calls: how many succeeded, or the error of the first.
fn outcome(done: c_int) -> c_int {
    if done > 0 { done } else { -1 }
}

/// As long as the kernel: the time is looked at after each message, so one that blocks is waited
/// for.
#[unsafe(no_mangle)]
unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if rsocket_of(fd).is_none() {
        // SAFETY: the C contract.
        return unsafe { real::recvmmsg(fd, messages, count, flags, timeout) };
    }
    // SAFETY: the C contract: null or valid.
    let span = unsafe { timeout.as_ref() };
    let span = match span.map(|time| (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec))) {
        None => None,
        Some((Ok(seconds), Ok(nanos @ ..1_000_000_000))) => Some(Duration::new(seconds, nanos)),
        Some(_) => return set_errno(libc::EINVAL),
    };
    if count == 0 {
        return 0;
    }
    let begun = Instant::now();
    let (wait_for_one, mut flags) = (flags & libc::MSG_WAITFORONE != 0, flags & !libc::MSG_WAITFORONE);
    // SAFETY: the C contract: so many.
    let messages = unsafe { slice::from_raw_parts_mut(messages, count.min(MESSAGES_MAX) as usize) };
    let mut done = 0;
    for message in messages {
        // SAFETY: the C contract.
        let bytes = unsafe { recvmsg(fd, &raw mut message.msg_hdr, flags) };
        if bytes < 0 {
            return outcome(done);
        }
        message.msg_len = bytes as c_uint;
        done += 1;
        if wait_for_one {
            flags |= libc::MSG_DONTWAIT;
        }
        if span.is_some_and(|span| begun.elapsed() >= span) {
            break;
        }
    }
    done
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    if rsocket_of(fd).is_none() {
        // SAFETY: the C contract.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    }
    if count == 0 {
        return 0;
    }
    let saved = errno();
    // SAFETY: the C contract: so many.
    let messages = unsafe { slice::from_raw_parts_mut(messages, count.min(MESSAGES_MAX) as usize) };
    let mut done = 0;
    for message in messages {
        // SAFETY: the C contract.
        let bytes = unsafe { sendmsg(fd, &raw const message.msg_hdr, flags) };
        if bytes < 0 {
            return outcome(done);
        }
        message.msg_len = bytes as c_uint;
        done += 1;
        // SAFETY: the C contract: a list of that length.
        if (bytes as usize) < unsafe { length(&message.msg_hdr) } {
            break;
        }
    }
    set_errno(saved);
    done
}

/// # Safety
/// A message that was sent.
unsafe fn length(message: &libc::msghdr) -> usize {
    if message.msg_iov.is_null() {
        return 0;
    }
    // SAFETY: this function's contract.
    let pieces = unsafe { slice::from_raw_parts(message.msg_iov, message.msg_iovlen) };
    pieces.iter().map(|piece| piece.iov_len).sum()
}
