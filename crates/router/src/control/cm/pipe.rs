//! Event channels of connection management: pairs of sockets, see
//! [`freeflow_shm::fd::event_sockets`], one encoded event a record. The router holds the end to write.
//!
//! A socket has room for few records. What does not fit is owed, and written when the kernel says
//! that there is room again. When the router dies the other end reaches end of file, which is how a
//! library learns of it.
use crate::admission::account::Charge;
use freeflow_shm::fd::send_record;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub struct EventPipe {
    write: OwnedFd,
    owed: VecDeque<Vec<u8>>,
    owed_bytes: usize,
    /// The kernel was asked to say when there is room; the number of that.
    pub watch: Option<u64>,
    _charge: Charge,
}

/// Beside its bytes, what a record that is owed takes.
const RECORD_BYTES: usize = 64;

/// Bytes that one channel holds in the kernel, with the kernel's overhead: at least a dozen records
/// of the usual size. A vNIC has its `channel_count_max` of them, those included that were
/// destroyed and that somebody still waits for.
pub const PIPE_BYTES: usize = 16 * 1024;

impl EventPipe {
    /// `write`: the end for records of an event channel of [`PIPE_BYTES`].
    pub fn new(write: OwnedFd, charge: Charge) -> Self {
        Self { write, owed: VecDeque::new(), owed_bytes: 0, watch: None, _charge: charge }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.write.as_fd()
    }

    /// Bytes kept for want of room.
    pub fn owed_bytes(&self) -> usize {
        self.owed_bytes
    }

    pub fn is_behind(&self) -> bool {
        !self.owed.is_empty()
    }

    pub fn send(&mut self, record: Vec<u8>) {
        if self.is_behind() || !send_record(&self.write, &record) {
            self.owed_bytes += record.len() + RECORD_BYTES;
            self.owed.push_back(record);
        }
    }

    /// Drops what is owed, and the memory that it took.
    pub fn forget(&mut self) {
        self.owed = VecDeque::new();
        self.owed_bytes = 0;
    }

    /// Before all that is owed.
    pub fn send_first(&mut self, records: Vec<Vec<u8>>) {
        for record in records.into_iter().rev() {
            self.owed_bytes += record.len() + RECORD_BYTES;
            self.owed.push_front(record);
        }
        self.pay();
    }

    /// Writes what is owed, as far as there is room.
    pub fn pay(&mut self) {
        while let Some(record) = self.owed.front() {
            if !send_record(&self.write, record) {
                return;
            }
            self.owed_bytes -= record.len() + RECORD_BYTES;
            self.owed.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::account::{Account, Commons};
    use std::sync::Arc;

    fn pipe() -> (OwnedFd, EventPipe) {
        let account = Arc::new(Account::new(Arc::new(Commons::new(40_000, 40_000))));
        let (read, write) = freeflow_shm::fd::event_sockets(PIPE_BYTES).unwrap();
        (read, EventPipe::new(write, Charge::channel(&account, 1).unwrap()))
    }

    fn read(fd: &OwnedFd) -> Vec<u8> {
        let mut bytes = [0; 2000];
        let count = rustix::io::read(fd, &mut bytes).unwrap();
        bytes[..count].to_vec()
    }

    #[test]
    fn records_come_one_a_read_and_in_order_though_the_pipe_is_full() {
        let (end, mut pipe) = pipe();
        let record = |number: u32| [&number.to_le_bytes()[..], &vec![7; number as usize % 900]].concat();
        (0..100).for_each(|number| pipe.send(record(number)));
        assert!(pipe.is_behind() && pipe.owed_bytes() > 0);
        let before = 100 - pipe.owed.len() as u32;
        for number in 0..before {
            assert_eq!(read(&end), record(number));
        }
        // Records put back come before owed ones, also if they do not fit at once.
        pipe.send_first((200..240).map(record).collect());
        for number in (200..240).chain(before..100) {
            assert_eq!(read(&end), record(number));
            pipe.pay();
        }
        assert!(!pipe.is_behind() && pipe.owed_bytes() == 0);
    }

    #[test]
    fn what_a_channel_owed_goes_with_it() {
        let (end, mut pipe) = pipe();
        (0..4000).for_each(|_| pipe.send(vec![1; 1000]));
        assert!(pipe.owed_bytes() > 3_900_000);
        pipe.forget();
        assert_eq!((pipe.owed_bytes(), pipe.owed.capacity()), (0, 0));
        assert_eq!(read(&end), [1; 1000], "the rest can be read");
        assert!(!freeflow_shm::fd::peer_closed(&end), "its reader goes on to wait");
    }

    #[test]
    fn the_ends_do_not_share_their_flags() {
        let (end, mut pipe) = pipe();
        assert!(!rustix::fs::fcntl_getfl(&end).unwrap().contains(rustix::fs::OFlags::NONBLOCK));
        // A library that fills the pipe, or makes its end what it likes, does not make the router wait.
        freeflow_shm::fd::set_nonblocking(&end, true).unwrap();
        freeflow_shm::fd::set_nonblocking(&end, false).unwrap();
        assert!(rustix::io::write(&end, &[1]).is_err(), "nor does it fill the other direction");
        (0..100).for_each(|_| pipe.send(vec![1; 1000]));
        assert!(pipe.is_behind());
        drop(end);
        pipe.pay();
        assert!(!pipe.is_behind(), "nobody misses them");
    }
}
