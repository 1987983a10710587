//! Requests to the kernel's routing tables, interfaces and neighbours: one socket, one request at a time.
//!
//! The messages are `netlink-packet-route`'s. The socket is ours, and blocks: `rtnetlink`, which has
//! the same messages, needs an asynchronous runtime, and who uses this crate forks and changes
//! network namespaces, which threads of a runtime would not follow.

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with};
use std::io;
use std::os::fd::OwnedFd;

/// The kernel fills at most this much into a message, if the buffer is as large.
const BUFFER_BYTES: usize = 32 << 10;
/// How often a list is asked for again that changed while the kernel sent it.
const DUMP_TRY_COUNT_MAX: usize = 16;

/// A connection to the kernel, of the network namespace in which it was opened.
pub(crate) struct Netlink {
    socket: OwnedFd,
    sequence_number: u32,
    buffer: Vec<u8>,
}

impl Netlink {
    /// # Errors
    /// The kernel gives no socket.
    pub fn open() -> io::Result<Self> {
        // NETLINK_ROUTE is the protocol 0.
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
        Ok(Self { socket, sequence_number: 0, buffer: vec![0; BUFFER_BYTES] })
    }

    /// Has the kernel change something. `flags` are NLM_F_CREATE and the like.
    ///
    /// # Errors
    /// The kernel's own.
    pub fn change(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.send(message, NLM_F_REQUEST | NLM_F_ACK | flags)?;
        self.receive().map(drop)
    }

    /// The one object that a request asks for.
    ///
    /// # Errors
    /// The kernel's own; ENODEV where there is no such interface.
    pub fn get(&mut self, message: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        self.send(message, NLM_F_REQUEST)?;
        let answer = self.receive()?.objects.pop();
        answer.ok_or_else(|| io::Error::other("the kernel acknowledges a question without an answer"))
    }

    /// All objects that a request asks for, as they were at one time.
    ///
    /// # Errors
    /// The kernel's own; they change faster than the kernel lists them.
    pub fn list(&mut self, message: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        for _ in 0..DUMP_TRY_COUNT_MAX {
            self.send(message.clone(), NLM_F_REQUEST | NLM_F_DUMP)?;
            let answer = self.receive()?;
            if !answer.is_inconsistent {
                return Ok(answer.objects);
            }
        }
        Err(io::Error::other("the host's interfaces change while they are listed"))
    }

    fn send(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.sequence_number += 1;
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        header.sequence_number = self.sequence_number;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        match send(&self.socket, &bytes, SendFlags::empty())? {
            length if length == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Reads until the answer to the last request ends.
    fn receive(&mut self) -> io::Result<Answer> {
        let mut answer = Answer::default();
        loop {
            let length = match recv(&self.socket, &mut self.buffer[..], RecvFlags::TRUNC) {
                Err(rustix::io::Errno::INTR) => continue,
                received => received?.1,
            };
            if length > self.buffer.len() {
                return Err(io::Error::other("the kernel's answer is longer than its limit"));
            }
            if answer.take_datagram(&self.buffer[..length], self.sequence_number)? {
                return Ok(answer);
            }
        }
    }
}

/// The kernel's answer to one request.
#[derive(Debug, Default)]
struct Answer {
    objects: Vec<RouteNetlinkMessage>,
    /// Something changed while the kernel listed it.
    is_inconsistent: bool,
}

impl Answer {
    /// Whether the answer is whole. Errors: the kernel's own; bytes that are no message.
    fn take_datagram(&mut self, mut bytes: &[u8], sequence_number: u32) -> io::Result<bool> {
        while !bytes.is_empty() {
            let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes).map_err(io::Error::other)?;
            let (header, payload) = message.into_parts();
            // Messages begin at multiples of four bytes; a length of none would never end.
            let length = (header.length as usize).next_multiple_of(4).max(4);
            bytes = bytes.get(length..).unwrap_or_default();
            if header.sequence_number != sequence_number {
                continue;
            }
            self.is_inconsistent |= header.flags & NLM_F_DUMP_INTR != 0;
            let is_one_of_many = header.flags & netlink_packet_core::NLM_F_MULTIPART != 0;
            match payload {
                NetlinkPayload::InnerMessage(object) => self.objects.push(object),
                NetlinkPayload::Error(error) if error.code.is_some() => return Err(error.to_io()),
                NetlinkPayload::Error(_) => return Ok(true),
                NetlinkPayload::Done(done) if done.code < 0 => {
                    return Err(io::Error::from_raw_os_error(-done.code));
                }
                NetlinkPayload::Done(_) => return Ok(true),
                _ => continue,
            }
            if !is_one_of_many {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_packet_core::NLM_F_MULTIPART;
    use netlink_packet_route::link::LinkMessage;

    fn bytes(payload: NetlinkPayload<RouteNetlinkMessage>, flags: u16, sequence_number: u32) -> Vec<u8> {
        let mut header = NetlinkHeader::default();
        (header.flags, header.sequence_number) = (flags, sequence_number);
        let mut message = NetlinkMessage::new(header, payload);
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        bytes
    }

    fn link(flags: u16, sequence_number: u32) -> Vec<u8> {
        bytes(RouteNetlinkMessage::NewLink(LinkMessage::default()).into(), flags, sequence_number)
    }

    fn error(code: i32, sequence_number: u32) -> Vec<u8> {
        let mut error = netlink_packet_core::ErrorMessage::default();
        error.code = std::num::NonZero::new(code);
        bytes(NetlinkPayload::Error(error), 0, sequence_number)
    }

    #[test]
    fn an_answer_ends_with_its_object_its_list_or_its_error() {
        let mut answer = Answer::default();
        assert!(answer.take_datagram(&link(0, 7), 7).unwrap());
        assert_eq!(answer.objects.len(), 1);

        let mut answer = Answer::default();
        let page = [link(NLM_F_MULTIPART, 7), link(NLM_F_MULTIPART | NLM_F_DUMP_INTR, 7)].concat();
        assert!(!answer.take_datagram(&page, 7).unwrap());
        // The unread rest of an earlier request's answer is passed over.
        assert!(!answer.take_datagram(&error(-1, 6), 7).unwrap());
        let done = bytes(NetlinkPayload::Done(Default::default()), NLM_F_MULTIPART, 7);
        assert!(answer.take_datagram(&done, 7).unwrap());
        assert!(answer.objects.len() == 2 && answer.is_inconsistent);

        assert!(Answer::default().take_datagram(&error(0, 7), 7).unwrap());
        let refused = Answer::default().take_datagram(&error(-19, 7), 7).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(19));
    }

    #[test]
    fn bytes_that_are_no_message_are_an_error() {
        let whole = link(0, 7);
        for cut in 1..whole.len() {
            assert!(Answer::default().take_datagram(&whole[..cut], 7).is_err(), "{cut}");
        }
        let mut short = whole;
        short[..4].fill(0);
        assert!(Answer::default().take_datagram(&short, 7).is_err());
    }
}
