//! One connected stream: what may be written into the other end's memory and where, what arrived,
//! which credits are owed, who closed what. Sans-IO: memory is offsets, posting and completions are
//! the caller's. The other end is not believed: what it announces beyond what it was granted fails
//! the connection.
//!
//! The caller posts what `plan_*` and `poll_*` return in that order, hands each completion's id to
//! `handle_sent` and each arrived message to `handle_message`, then asks `poll_credits` again.
use crate::config::BUFFER_BYTES;
use crate::wire::{
    ByteOrder, ConnectionData, Control, DATA_BYTES_MAX, IOMAP_BYTES, IomapEntry, Message, TARGET_BYTES, TARGET_COUNT,
    Target,
};
use std::collections::VecDeque;

/// Requests kept back for messages of the protocol itself.
pub const CONTROL_SLOT_COUNT: u32 = 4;
/// Send requests with an id like this are ours to fold; receives carry [`RECEIVE_ID`].
pub const RECEIVE_ID: u64 = 1 << 63;
/// Less room in the send ring than this share of it is not used for a part of a longer message,
/// within these bounds: who waits for room would be woken for every few KB, and those cost each
/// party on the way as much as many.
const SEND_LOW_WATER_SHARE: u32 = 8;
const SEND_LOW_WATER_BYTES_MIN: u32 = 2048;
const SEND_LOW_WATER_BYTES_MAX: u32 = 65536;
/// A ring is outgrown when the stream has filled it so many times.
const GROWTH_RINGS: u64 = 4;
/// One completion for each such share of the send ring, and of the send queue.
const SIGNAL_RING_SHARE: u32 = 8;
const SIGNAL_QUEUE_SHARE: u32 = 4;

const ID_CONTROL: u64 = 1 << 62;
const ID_DISCONNECT: u64 = 1 << 61;
const ID_SLOTS_SHIFT: u32 = 32;

/// Sizes of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub send_bytes: u32,
    pub receive_bytes: u32,
    pub send_slots: u16,
    pub receive_slots: u16,
    pub inline_bytes: u32,
    pub iomap_count: u16,
}

/// Our target list, which the other end writes into.
pub trait TargetSlots {
    /// Takes the entry out, if one was written since it was last taken.
    fn take(&mut self, slot: usize) -> Option<Target>;
}

/// Which of a direction's two buffers: a stream that moves much gets a longer one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Ring {
    #[default]
    First,
    Grown,
}

/// A piece of a ring buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Span {
    pub ring: Ring,
    pub offset: u32,
    pub bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The bytes travel in the request itself.
    Inline,
    /// The caller copies them into these pieces of the send ring first.
    Ring([Span; 2]),
}

/// A write of the program's data, or of an entry of the I/O map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    pub source: Source,
    pub bytes: u32,
    pub address: u64,
    pub key: u32,
    pub immediate: Option<u32>,
    pub signaled: bool,
    pub id: u64,
}

/// A message of the protocol itself; always signaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlWrite {
    pub payload: Option<[u8; TARGET_BYTES]>,
    pub address: u64,
    pub key: u32,
    /// `None` only for the empty write that keeps a connection alive.
    pub immediate: Option<u32>,
    pub id: u64,
}

/// Which ways an open connection can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ways {
    Both,
    ReceiveOnly,
    SendOnly,
    /// We closed both; the other end may not know yet.
    Neither,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A request failed: the other end is gone.
    Transport,
    /// It said what it must not say.
    Protocol,
    /// It closed without care for what was under way, and said so.
    Reset,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Opening,
    Open(Ways),
    /// Properly closed, by either end. What arrived before can still be read.
    Disconnected,
    Failed(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
    Both,
}

impl State {
    #[must_use]
    pub fn is_open(self) -> bool {
        matches!(self, Self::Open(_))
    }

    #[must_use]
    pub fn sends(self) -> bool {
        matches!(self, Self::Open(Ways::Both | Ways::SendOnly))
    }

    #[must_use]
    pub fn receives(self) -> bool {
        matches!(self, Self::Open(Ways::Both | Ways::ReceiveOnly))
    }

    /// After a message of the other end.
    fn after(self, control: Control) -> Self {
        match (self, control) {
            (Self::Open(_), Control::Disconnect) => Self::Disconnected,
            (Self::Open(_), Control::Reset) => Self::Failed(Failure::Reset),
            (Self::Open(Ways::Both | Ways::SendOnly), Control::Shutdown) => Self::Open(Ways::SendOnly),
            (Self::Open(Ways::ReceiveOnly | Ways::Neither), Control::Shutdown) => Self::Disconnected,
            _ => self,
        }
    }

    /// After a shutdown of our own, and what the other end must hear.
    fn shut(self, direction: Direction) -> (Self, Option<Control>) {
        let Self::Open(ways) = self else { return (self, None) };
        let (ways, control) = match (ways, direction) {
            (Ways::Neither, _) => (Ways::Neither, None),
            (_, Direction::Both) | (Ways::SendOnly, Direction::Write) | (Ways::ReceiveOnly, Direction::Read) => {
                (Ways::Neither, Some(Control::Disconnect))
            }
            (Ways::Both, Direction::Write) => (Ways::ReceiveOnly, Some(Control::Shutdown)),
            (Ways::Both, Direction::Read) => (Ways::SendOnly, None),
            (Ways::ReceiveOnly, Direction::Write) | (Ways::SendOnly, Direction::Read) => (ways, None),
        };
        (Self::Open(ways), control)
    }
}

/// Our half as the sender.
#[derive(Debug)]
struct Sending {
    slots_free: u32,
    /// Posted unsignaled since the last signaled one, which its completion speaks for too; and
    /// their bytes of the ring.
    slots_silent: u32,
    ring_silent: u32,
    ring: Ring,
    ring_bytes: u32,
    ring_position: u32,
    ring_free: u32,
    /// Of the first ring, and not known to have arrived, since the grown one is in use.
    ring_former: u32,
    /// All so far.
    bytes: u64,
    /// Messages sent, and up to which they may be, modulo 2^16.
    sent: u16,
    limit: u16,
    target: Target,
    slot_next: usize,
    iomap: Target,
}

/// Our half as the receiver.
#[derive(Debug)]
struct Receiving {
    /// Sizes of the messages that are not read yet.
    messages: VecDeque<u32>,
    unread: u32,
    ring: Ring,
    /// Takes the place of the first ring once all that was granted there was written and read.
    grown: Option<Target>,
    /// All that was read so far.
    bytes: u64,
    position: u32,
    /// Bytes that the other end may still write.
    granted: u32,
    /// Bytes that were read and not granted again.
    freed: u32,
    grant_next: u32,
    received: u16,
    /// Up to which the other end may send, as last granted.
    limit: u16,
    credits_due: u16,
    /// The other end's target list, and which entry we write next.
    list: Target,
    slot_next: u32,
}

#[derive(Debug)]
pub struct Stream {
    sizes: Sizes,
    state: State,
    /// We said that we send no more.
    shut_for_sending: bool,
    order: ByteOrder,
    control_free: u32,
    /// How many were planned; they complete in order.
    control_sent: u32,
    /// Where our receive ring is, for targets.
    ring: Target,
    sending: Sending,
    receiving: Receiving,
}

impl Stream {
    /// `ring`: our receive buffer as the other end sees it, of `receive_bytes` rounded down to an
    /// even number.
    #[must_use]
    pub fn new(sizes: Sizes, ring: Target) -> Self {
        let half = ring.bytes / 2;
        let sending = Sending {
            slots_free: u32::from(sizes.send_slots).saturating_sub(CONTROL_SLOT_COUNT).max(1),
            slots_silent: 0,
            ring_silent: 0,
            ring: Ring::First,
            ring_bytes: sizes.send_bytes,
            ring_position: 0,
            ring_free: sizes.send_bytes,
            ring_former: 0,
            bytes: 0,
            sent: 0,
            limit: 0,
            target: Target::default(),
            slot_next: 1,
            iomap: Target::default(),
        };
        let receiving = Receiving {
            messages: VecDeque::with_capacity(usize::from(sizes.receive_slots) + 1),
            unread: 0,
            ring: Ring::First,
            grown: None,
            bytes: 0,
            position: 0,
            granted: half,
            freed: half,
            grant_next: half,
            received: 0,
            limit: sizes.receive_slots,
            credits_due: sizes.receive_slots / 2,
            list: Target::default(),
            slot_next: 0,
        };
        Self {
            sizes,
            state: State::Opening,
            shut_for_sending: false,
            order: ByteOrder::Ours,
            control_free: CONTROL_SLOT_COUNT,
            control_sent: 0,
            ring,
            sending,
            receiving,
        }
    }

    #[must_use]
    pub fn sizes(&self) -> &Sizes {
        &self.sizes
    }

    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Our connection data for the other end; `list` is where our target list lies.
    #[must_use]
    pub fn connection_data(&self, list: Target) -> ConnectionData {
        ConnectionData {
            big_endian: cfg!(target_endian = "big"),
            iomap: true,
            credits: self.sizes.receive_slots,
            iomap_count: self.sizes.iomap_count,
            target_list: Target { bytes: TARGET_COUNT, ..list },
            first_target: Target { bytes: self.half(), ..self.ring },
        }
    }

    /// The other end sent us its own.
    pub fn handle_connection_data(&mut self, data: &ConnectionData) {
        self.order = if data.big_endian == cfg!(target_endian = "big") { ByteOrder::Ours } else { ByteOrder::Swapped };
        self.sending.limit = data.credits;
        self.sending.target = data.first_target;
        let entries = u64::from(data.target_list.bytes);
        self.sending.iomap = Target {
            address: data.target_list.address.wrapping_add(entries * TARGET_BYTES as u64),
            key: data.target_list.key,
            bytes: u32::from(data.iomap_count),
        };
        self.receiving.list = data.target_list;
        self.receiving.slot_next = 1 % data.target_list.bytes.max(1);
    }

    /// Both ends are ready.
    pub fn open(&mut self) {
        if self.state == State::Opening {
            self.state = State::Open(Ways::Both);
        }
    }

    pub fn fail(&mut self, failure: Failure) {
        if matches!(self.state, State::Opening | State::Open(_)) {
            self.state = State::Failed(failure);
        }
    }

    /// The connection manager says that the other end went. Properly, as far as it knows: a program
    /// that exits, or is killed, without a word closes its streams in order, as by TCP.
    pub fn disconnect(&mut self) {
        if matches!(self.state, State::Opening | State::Open(_)) {
            self.state = State::Disconnected;
        }
    }

    /// Whether nothing can be sent because of our own shutdown, whatever else there is.
    #[must_use]
    pub fn is_shut_for_sending(&self) -> bool {
        self.shut_for_sending
    }

    /// Entries of I/O map that the other end has for us.
    #[must_use]
    pub fn remote_iomap_count(&self) -> u32 {
        self.sending.iomap.bytes
    }

    fn half(&self) -> u32 {
        self.ring.bytes / 2
    }

    /// The least that is granted again. As many parts as the other end has entries for, since one is
    /// written again only when all of the part that it named was read: with halves (rdma-core has
    /// two entries) half of the ring stands empty while the other end waits for the grant.
    fn grant_bytes(&self) -> u32 {
        let size = self.half() * 2;
        let parts = if self.receiving.list.bytes >= TARGET_COUNT { TARGET_COUNT } else { 2 };
        if size.is_multiple_of(parts) { size / parts } else { size / 2 }
    }
}

/// Sending.
impl Stream {
    /// Whether some data can be sent at once.
    pub fn can_send(&mut self, slots: &mut impl TargetSlots) -> bool {
        self.state.sends() && self.has_credit() && self.find_target(slots) && self.ring_usable(u32::MAX)
    }

    /// Plans the transfer of up to `wanted` bytes (not 0). `None`: not now.
    pub fn plan_send(&mut self, wanted: u32, slots: &mut impl TargetSlots) -> Option<Write> {
        if !self.state.sends() || !self.has_credit() || !self.find_target(slots) {
            return None;
        }
        let (source, bytes) = self.source(wanted.min(self.sending.target.bytes).min(DATA_BYTES_MAX))?;
        let Target { address, key, .. } = self.sending.target;
        self.sending.target.address = address.wrapping_add(u64::from(bytes));
        self.sending.target.bytes -= bytes;
        self.sending.sent = self.sending.sent.wrapping_add(1);
        Some(self.write(source, bytes, address, key, Some(Message::Data(bytes))))
    }

    /// Plans the transfer of up to `wanted` bytes (not 0) to `offset` of the other end's mapped
    /// memory.
    pub fn plan_direct(&mut self, wanted: u32, entry: &IomapEntry, offset: u64) -> Option<Write> {
        if !self.state.sends() || self.sending.slots_free == 0 {
            return None;
        }
        let left = u32::try_from(entry.bytes_from(offset)?).unwrap_or(u32::MAX);
        let (source, bytes) = self.source(wanted.min(left))?;
        let address = entry.target.address.wrapping_add(offset - entry.offset);
        Some(self.write(source, bytes, address, entry.target.key, None))
    }

    /// Plans the announcement of an entry of our mappings: [`IOMAP_BYTES`] bytes.
    pub fn plan_iomap(&mut self, index: u16) -> Option<Write> {
        let list = self.sending.iomap;
        if !self.state.sends() || !self.has_credit() || u32::from(index) >= list.bytes {
            return None;
        }
        if self.sizes.inline_bytes < IOMAP_BYTES as u32 && self.sending.ring_free < IOMAP_BYTES as u32 {
            return None;
        }
        let (source, bytes) = self.source(IOMAP_BYTES as u32)?;
        self.sending.sent = self.sending.sent.wrapping_add(1);
        let address = list.address.wrapping_add(u64::from(index) * IOMAP_BYTES as u64);
        Some(self.write(source, bytes, address, list.key, Some(Message::Iomap(index))))
    }

    /// Whether so many bytes of the ring are not known to have arrived.
    #[must_use]
    pub fn has_under_way(&self, bytes: u32) -> bool {
        self.sending.ring_bytes - self.sending.ring_free >= bytes
    }

    /// Whether so much was sent that a longer ring is worth its memory. Never if somebody has said
    /// how long it is.
    #[must_use]
    pub fn outgrows_send_ring(&self) -> bool {
        let sending = &self.sending;
        let may_grow = sending.ring == Ring::First && self.sizes.send_bytes == BUFFER_BYTES;
        may_grow && sending.bytes >= u64::from(sending.ring_bytes) * GROWTH_RINGS
    }

    /// Sends from a ring of `bytes` from now on; what is under way in the first one is left alone.
    pub fn grow_send_ring(&mut self, bytes: u32) {
        let sending = &mut self.sending;
        if sending.ring == Ring::First {
            sending.ring_former = sending.ring_bytes - sending.ring_free;
            (sending.ring, sending.ring_bytes) = (Ring::Grown, bytes);
            (sending.ring_position, sending.ring_free) = (0, bytes);
        }
    }

    /// In which byte order entries of memory are written for the other end.
    #[must_use]
    pub fn order(&self) -> ByteOrder {
        self.order
    }

    /// A send request was completed. `success` is that of its completion.
    pub fn handle_sent(&mut self, id: u64, success: bool) {
        if id & ID_CONTROL != 0 {
            self.control_free += 1;
            if id & ID_DISCONNECT != 0 && self.state.is_open() {
                self.state = State::Disconnected;
            }
        } else if success {
            // (Of one that failed those before it may have been counted: nothing is sent any more.)
            let sending = &mut self.sending;
            sending.slots_free += (id >> ID_SLOTS_SHIFT) as u32 & 0xFFFF;
            let former = (id as u32).min(sending.ring_former);
            sending.ring_former -= former;
            sending.ring_free += id as u32 - former;
        }
        if !success {
            self.fail(Failure::Transport);
        }
    }

    /// Whether all that was posted before the last control message is done.
    #[must_use]
    pub fn control_done(&self) -> bool {
        self.control_free == CONTROL_SLOT_COUNT
    }

    fn has_credit(&self) -> bool {
        self.sending.slots_free != 0 && self.sending.sent != self.sending.limit
    }

    /// A target is full before the next is begun; the other end writes a new one only where a full
    /// one stood.
    fn find_target(&mut self, slots: &mut impl TargetSlots) -> bool {
        if self.sending.target.bytes == 0 {
            let Some(target) = slots.take(self.sending.slot_next) else { return false };
            self.sending.target = target;
            self.sending.slot_next = (self.sending.slot_next + 1) % TARGET_COUNT as usize;
        }
        true
    }

    fn ring_usable(&self, wanted: u32) -> bool {
        let size = self.sending.ring_bytes;
        let share = (size / SEND_LOW_WATER_SHARE).clamp(SEND_LOW_WATER_BYTES_MIN, SEND_LOW_WATER_BYTES_MAX);
        // Not more than there is when all is done but what no completion was asked for.
        let least = share.min(size / 2).max(1);
        self.sending.ring_free >= least.min(wanted)
    }

    fn source(&self, wanted: u32) -> Option<(Source, u32)> {
        if wanted <= self.sizes.inline_bytes {
            return Some((Source::Inline, wanted));
        }
        if !self.ring_usable(wanted) {
            return None;
        }
        let bytes = wanted.min(self.sending.ring_free);
        let Sending { ring, ring_bytes, ring_position, .. } = self.sending;
        Some((Source::Ring(spans(ring, ring_bytes, ring_position, bytes)), bytes))
    }

    /// Takes a slot, and the ring's bytes. Signaled is what completes a share of the ring or of the
    /// queue, so that they are freed: completions of all would wake who waits for room again and
    /// again.
    fn write(&mut self, source: Source, bytes: u32, address: u64, key: u32, message: Option<Message>) -> Write {
        let sending = &mut self.sending;
        let mut ring_bytes = 0;
        if let Source::Ring(_) = source {
            ring_bytes = bytes;
            sending.ring_free -= bytes;
            sending.ring_position = (sending.ring_position + bytes) % sending.ring_bytes;
        }
        sending.slots_free -= 1;
        sending.bytes += u64::from(bytes);
        sending.slots_silent += 1;
        sending.ring_silent += ring_bytes;
        let ring_due = sending.ring_silent > sending.ring_bytes / SIGNAL_RING_SHARE;
        let signaled = ring_due || sending.slots_silent >= u32::from(self.sizes.send_slots) / SIGNAL_QUEUE_SHARE;
        let id = u64::from(sending.slots_silent) << ID_SLOTS_SHIFT | u64::from(sending.ring_silent);
        if signaled {
            (sending.slots_silent, sending.ring_silent) = (0, 0);
        }
        Write { source, bytes, address, key, immediate: message.map(Message::to_bits), signaled, id }
    }
}

/// Receiving.
impl Stream {
    /// A message arrived (and its receive request is posted again).
    pub fn handle_message(&mut self, bits: u32) {
        if matches!(self.state, State::Opening) {
            // Only who is connected sends: the other end learned it sooner than we.
            self.open();
        }
        match Message::from_bits(bits) {
            Message::Data(bytes) => self.handle_data(bytes),
            Message::Credits(limit) => self.sending.limit = limit,
            // It counts as sent, so it counts as received.
            Message::Iomap(_) => self.receiving.received = self.receiving.received.wrapping_add(1),
            Message::Control(control) => self.state = self.state.after(control),
            Message::Unknown(_) => {}
        }
    }

    fn handle_data(&mut self, bytes: u32) {
        let receiving = &mut self.receiving;
        if bytes > receiving.granted || receiving.messages.len() >= usize::from(self.sizes.receive_slots) {
            self.fail(Failure::Protocol);
            return;
        }
        if bytes == 0 {
            receiving.received = receiving.received.wrapping_add(1);
            return;
        }
        receiving.granted -= bytes;
        receiving.unread += bytes;
        receiving.messages.push_back(bytes);
    }

    /// Bytes that can be read now.
    #[must_use]
    pub fn unread(&self) -> u32 {
        self.receiving.unread
    }

    /// Whether nothing more can arrive until something is read.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let receiving = &self.receiving;
        let messages = receiving.received.wrapping_add(receiving.messages.len() as u16);
        let no_room_due = receiving.grown.is_some() || receiving.freed < self.grant_bytes();
        messages == receiving.limit || (receiving.granted == 0 && no_room_due)
    }

    /// Where the next up to `wanted` bytes lie in the receive ring.
    #[must_use]
    pub fn readable(&self, wanted: usize) -> [Span; 2] {
        let bytes = u32::try_from(wanted).unwrap_or(u32::MAX).min(self.receiving.unread);
        spans(self.receiving.ring, self.half() * 2, self.receiving.position, bytes)
    }

    /// The same of what was read.
    #[must_use]
    pub fn outgrows_receive_ring(&self) -> bool {
        let receiving = &self.receiving;
        let is_first = receiving.ring == Ring::First && receiving.grown.is_none();
        is_first
            && self.sizes.receive_bytes == BUFFER_BYTES
            && receiving.bytes >= u64::from(self.ring.bytes) * GROWTH_RINGS
    }

    /// Receives into this ring as soon as the first one is empty: nothing of that is granted any
    /// more.
    pub fn grow_receive_ring(&mut self, ring: Target) {
        if self.receiving.ring == Ring::First {
            self.receiving.grown = Some(ring);
        }
    }

    fn take_grown_ring(&mut self) {
        let receiving = &mut self.receiving;
        if receiving.granted == 0
            && receiving.unread == 0
            && let Some(ring) = receiving.grown.take()
        {
            receiving.ring = Ring::Grown;
            (receiving.position, receiving.grant_next) = (0, 0);
            receiving.freed = ring.bytes & !1;
            self.ring = ring;
        }
    }

    /// The program has these bytes; `bytes` is not more than [`Stream::readable`] gave.
    pub fn consume(&mut self, bytes: u32) {
        let size = self.half() * 2;
        let receiving = &mut self.receiving;
        assert!(bytes <= receiving.unread, "more was read than there is");
        receiving.unread -= bytes;
        receiving.freed += bytes;
        receiving.bytes += u64::from(bytes);
        receiving.position = (receiving.position + bytes) % size;
        let mut left = bytes;
        while let Some(message) = receiving.messages.front_mut() {
            if *message > left {
                *message -= left;
                break;
            }
            left -= *message;
            receiving.messages.pop_front();
            receiving.received = receiving.received.wrapping_add(1);
        }
    }

    /// The message that gives the other end new room, if that is due.
    pub fn poll_credits(&mut self) -> Option<ControlWrite> {
        self.take_grown_ring();
        let (size, part) = (self.half() * 2, self.grant_bytes());
        let receiving = &mut self.receiving;
        let buffer_due = receiving.freed >= part && receiving.grown.is_none();
        let credits_due = receiving.received.wrapping_sub(receiving.credits_due) as i16 >= 0;
        if !(self.state.is_open() && self.control_free != 0 && (buffer_due || credits_due)) {
            return None;
        }
        receiving.credits_due = receiving.received.wrapping_add(self.sizes.receive_slots / 2);
        receiving.limit = receiving.received.wrapping_add(self.sizes.receive_slots);
        let limit = Message::Credits(receiving.limit);
        if !buffer_due {
            return self.post(limit);
        }
        // Whole parts, as far as they lie together.
        let bytes = (receiving.freed - receiving.freed % part).min(size - receiving.grant_next);
        let target = Target {
            address: self.ring.address.wrapping_add(u64::from(receiving.grant_next)),
            key: self.ring.key,
            bytes,
        };
        let slot = receiving.slot_next;
        receiving.grant_next = (receiving.grant_next + bytes) % size;
        receiving.freed -= bytes;
        receiving.granted += bytes;
        receiving.slot_next = (slot + 1) % receiving.list.bytes.max(1);
        let list = receiving.list;
        let mut write = self.post(limit)?;
        write.payload = Some(target.to_memory(self.order));
        write.address = list.address.wrapping_add(u64::from(slot) * TARGET_BYTES as u64);
        write.key = list.key;
        Some(write)
    }

    /// Which of the places for payloads of control messages the last one planned may use: it is the
    /// only one with it until it completes.
    #[must_use]
    pub fn control_buffer(&self) -> usize {
        self.control_sent.wrapping_sub(1) as usize % CONTROL_SLOT_COUNT as usize
    }

    /// A message that keeps the connection alive: the transport's acknowledgement is all that is
    /// wanted.
    pub fn plan_keepalive(&mut self) -> Option<ControlWrite> {
        if !self.state.is_open() || self.control_free == 0 {
            return None;
        }
        let write = self.post(Message::Control(Control::Keepalive))?;
        Some(ControlWrite { immediate: None, ..write })
    }

    /// Closes a direction. What is returned must be sent by [`Stream::plan_control`].
    pub fn shut(&mut self, direction: Direction) -> Option<Control> {
        let (state, control) = self.state.shut(direction);
        self.state = state;
        self.shut_for_sending |= direction != Direction::Read;
        control
    }

    /// `None`: all slots for control messages are in use.
    pub fn plan_control(&mut self, control: Control) -> Option<ControlWrite> {
        if !self.state.is_open() { None } else { self.post(Message::Control(control)) }
    }

    fn post(&mut self, message: Message) -> Option<ControlWrite> {
        self.control_free = self.control_free.checked_sub(1)?;
        self.control_sent = self.control_sent.wrapping_add(1);
        let disconnect = if message == Message::Control(Control::Disconnect) { ID_DISCONNECT } else { 0 };
        let id = ID_CONTROL | disconnect;
        Some(ControlWrite { payload: None, address: 0, key: 0, immediate: Some(message.to_bits()), id })
    }
}

/// `bytes` of a ring from `position` on.
fn spans(ring: Ring, ring_bytes: u32, position: u32, bytes: u32) -> [Span; 2] {
    let first = bytes.min(ring_bytes - position);
    [Span { ring, offset: position, bytes: first }, Span { ring, offset: 0, bytes: bytes - first }]
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
