//! Events on their way to a near half: what the router writes into one pair of sockets a channel,
//! one record at a time.
//!
//! Invariant: no more than one record of a channel is with the near half. So what a library does not
//! read waits where it waits without a near half, and is owed by the same rules.
use freeflow_protocol::attachment::{RECORD_BYTES_MAX, Request};
use rustix::event::epoll;
use rustix::io::retry_on_intr;
use rustix::net::RecvFlags;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Channels that the router has closed and whose reader reads nothing: so many keep what they were sent.
const CLOSING_COUNT_MAX: usize = 256;

struct Relay {
    relayed: OwnedFd,
    /// A record is with the near half.
    is_away: bool,
    /// The router writes no more, and nobody watches.
    is_closing: bool,
}

/// Those of one vNIC.
pub struct Relays {
    epoll: Arc<OwnedFd>,
    relays: BTreeMap<u64, Relay>,
    closing: usize,
    buffer: Vec<u8>,
}

impl Relays {
    pub fn new(epoll: Arc<OwnedFd>) -> Self {
        Self { epoll, relays: BTreeMap::new(), closing: 0, buffer: vec![0; RECORD_BYTES_MAX] }
    }

    /// One that can't be watched is closed at once, which its writer notices.
    pub fn insert(&mut self, channel: u64, relayed: OwnedFd) {
        let data = epoll::EventData::new_u64(channel);
        if epoll::add(&*self.epoll, &relayed, data, epoll::EventFlags::IN).is_ok() {
            self.relays.insert(channel, Relay { relayed, is_away: false, is_closing: false });
        }
    }

    /// Its writer notices.
    pub fn remove(&mut self, channel: u64) {
        if let Some(relay) = self.relays.remove(&channel) {
            self.closing -= usize::from(relay.is_closing);
        }
    }

    /// The near half has passed on the record that it had. False: it had none.
    pub fn note_taken(&mut self, channel: u64) -> bool {
        // It may have been closed meanwhile.
        let Some(relay) = self.relays.get_mut(&channel) else { return true };
        let data = epoll::EventData::new_u64(channel);
        if !relay.is_closing {
            let _ = epoll::modify(&*self.epoll, &relay.relayed, data, epoll::EventFlags::IN);
        }
        std::mem::replace(&mut relay.is_away, false)
    }

    /// Next request to the near half, if one may be sent now.
    pub fn next(&mut self, channel: u64) -> Option<Request> {
        let relay = self.relays.get_mut(&channel)?;
        if relay.is_away {
            // Watched for one thing only: its writer has closed it.
            if !relay.is_closing {
                if self.closing >= CLOSING_COUNT_MAX {
                    return self.close(channel);
                }
                relay.is_closing = true;
                self.closing += 1;
                let _ = epoll::delete(&*self.epoll, &relay.relayed);
            }
            return None;
        }
        let received =
            retry_on_intr(|| rustix::net::recv(&relay.relayed, self.buffer.as_mut_slice(), RecvFlags::DONTWAIT));
        match received {
            Ok((0, _)) => self.close(channel),
            Ok((bytes, _)) => {
                relay.is_away = true;
                if !relay.is_closing {
                    let data = epoll::EventData::new_u64(channel);
                    let _ = epoll::modify(&*self.epoll, &relay.relayed, data, epoll::EventFlags::empty());
                }
                Some(Request::Event { channel, record: self.buffer[..bytes].to_vec() })
            }
            Err(rustix::io::Errno::AGAIN) => None,
            Err(_) => self.close(channel),
        }
    }

    fn close(&mut self, channel: u64) -> Option<Request> {
        self.remove(channel);
        Some(Request::CloseChannel { channel })
    }
}
