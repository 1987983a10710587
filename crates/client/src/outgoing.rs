//! The requests of an RC queue pair that the posting thread carries out itself: by a channel to the RECVs of the peer, and in
//! memory of the peer that was granted.
//!
//! Invariant: a request is carried out here only if all requests that the router got before are done, and their completions
//! written; the router takes the next request only after this one. So requests are executed in the order of posting. (How
//! completions stay in order, `inbox` says.)
//!
//! Invariant: nothing is carried out here that the router would refuse: a key that is not known to be good, a RECV that is
//! too short, a payload too long are left to it, and it finds the fault.
use crate::grants::Grants;
use crate::incoming::map_channel;
use crate::regions::Cache;
use crate::session::Session;
use freeflow_protocol::library::{Handle, Reply, Request};
use freeflow_shm::{
    CHANNEL_MESSAGE_BYTES_MAX, ChannelSender, Credit, OwnMemory, OwnRange, RequestProducer, SendDescriptor, Staged,
    monotonic_ns, pause, sched_yield,
};
use freeflow_verbs::{Access, CompletionFlags, SendFlags, SendOpcode, Sge, VerbsError};

/// Entries of a list that is carried out here.
pub(crate) const RANGES_MAX: usize = 4;
/// Requests that the router gets before it is asked for a channel.
const REQUESTS_BEFORE_CHANNEL: u32 = 16;
/// The most requests between two such questions: what one costs is then little beside them.
const REQUESTS_BETWEEN_MAX: u32 = 1 << 11;
/// How long a post waits for room in a full channel, or for a RECV, before the router gets the request; half as long after it
/// was in vain.
const FULL_NS_MAX: u64 = 64_000;
const FULL_NS_MIN: u64 = 1_000;
/// Requests that the router gets before a post waits for it to be done with them, so that the next can be carried out
/// here; and the most, if it takes too long.
const REQUESTS_BEFORE_WAIT: u32 = 32;
const REQUESTS_BEFORE_WAIT_MAX: u32 = 4096;
/// The longest such wait, for each [`REQUESTS_BEFORE_WAIT`]; and the longest of all.
const WAIT_NS: u64 = 200_000;
const WAIT_NS_MAX: u64 = 3_000_000;
/// No queue holds as many requests.
pub(crate) const FAR: u32 = 1 << 30;
/// Looks before each of which the waiting thread pauses; after them it gives way.
const PAUSES: u32 = 64;

/// What a queue pair sends past the router. Under the send queue's lock.
#[derive(Default)]
pub(crate) struct Outgoing {
    /// How many RECVs of the peer were used up since the last reset.
    msn: u32,
    /// The last request was carried out here: the router has nothing of this queue.
    is_ours: bool,
    /// Requests that the router got since something was carried out here, and how many it takes to wait for it.
    handed: u32,
    handed_before_wait: u32,
    /// Completions of requests that the router got, one more than the virtual position of the last one; before the last change
    /// over, and now.
    returned_before_change: u32,
    signaled_until: u32,
    channel: Option<Open>,
    /// Requests that could have gone by a channel since it was last asked for one, and how many it takes.
    missed: u32,
    patience: u32,
    pub keys: Cache,
    pub grants: Grants,
}

struct Open {
    sender: ChannelSender,
    /// As the queue's header said when it was opened.
    channels_closed: u32,
    /// The peer's QP does not forbid WRITEs, whatever they name.
    takes_writes: bool,
    /// How long a post waits for room.
    full_ns: u64,
}

/// What a look at the channel says of the next message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Look {
    Room,
    /// Not now.
    Full,
    /// Not by the channel.
    Never,
}

#[inline]
fn look(open: &mut Open, msn: u32, bytes: u32) -> Look {
    match open.sender.credit(msn) {
        Credit::Routed => Look::Never,
        Credit::Bytes(capacity) if bytes > capacity => Look::Never,
        Credit::Bytes(_) if open.sender.has_room(bytes) => Look::Room,
        Credit::Bytes(_) | Credit::Missing => Look::Full,
    }
}

/// What the queue pair is to its requests.
#[derive(Clone, Copy)]
pub(crate) struct Home<'a> {
    pub session: &'a Session,
    pub handle: Handle,
    pub cookie: u32,
    pub pd: Handle,
    pub own: OwnMemory,
}

/// A request's own memory, checked.
pub(crate) struct Payload<'a> {
    pub inline: &'a [u8],
    ranges: [OwnRange; RANGES_MAX],
    count: usize,
    pub bytes: u32,
}

impl<'a> Payload<'a> {
    const NOTHING: Self =
        Self { inline: &[], ranges: [OwnRange { address: 0, bytes: 0 }; RANGES_MAX], count: 0, bytes: 0 };

    #[inline(always)] // most have one, which is known then
    pub fn ranges(&self) -> &[OwnRange] {
        &self.ranges[..self.count]
    }

    /// `None`: it is for the router to say what is wrong, if anything is.
    #[inline(always)] // for the one range that most have
    fn of(request: &SendDescriptor<'a>, home: &Home<'_>, keys: &mut Cache) -> Option<Self> {
        let mut payload = Self::NOTHING;
        if let Some(inline) = request.inline {
            (payload.inline, payload.bytes) = (inline, inline.len() as u32);
            return Some(payload);
        }
        let needed = if request.opcode == SendOpcode::RdmaRead { Access::LOCAL_WRITE } else { Access(0) };
        let [sge] = request.sges else { return Self::of_several(request.sges, needed, home, keys) };
        if sge.length > 0 {
            payload.ranges[0] = home.session.regions.resolve(keys, sge, home.pd, needed)?;
            (payload.count, payload.bytes) = (1, sge.length);
        }
        Some(payload)
    }

    #[inline(never)]
    fn of_several(sges: &[Sge], needed: Access, home: &Home<'_>, keys: &mut Cache) -> Option<Self> {
        let mut payload = Self::NOTHING;
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            let range = home.session.regions.resolve(keys, sge, home.pd, needed)?;
            *payload.ranges.get_mut(payload.count)? = range;
            payload.count += 1;
            payload.bytes = payload.bytes.checked_add(range.bytes)?;
        }
        Some(payload)
    }
}

impl Outgoing {
    /// Carries a request out. False: the router shall.
    #[inline]
    pub fn carry_out(
        &mut self,
        home: &Home<'_>,
        ring: &mut RequestProducer,
        returned: u32,
        request: &SendDescriptor<'_>,
    ) -> bool {
        match request.opcode {
            SendOpcode::Send | SendOpcode::SendWithImmediate => self.send(home, ring, returned, request),
            SendOpcode::RdmaWrite | SendOpcode::RdmaRead => self.reach(home, ring, returned, request),
            SendOpcode::RdmaWriteWithImmediate => self.write_and_tell(home, ring, returned, request),
            _ => false,
        }
    }

    #[inline]
    fn send(
        &mut self,
        home: &Home<'_>,
        ring: &mut RequestProducer,
        returned: u32,
        request: &SendDescriptor<'_>,
    ) -> bool {
        if !self.has_channel(home, ring) {
            return false;
        }
        let Some(payload) = Payload::of(request, home, &mut self.keys) else { return false };
        let may = home.session.is_surely_alive()
            && (self.is_ours || self.is_drained(ring, returned) && self.is_open(ring))
            && self.finds_room(payload.bytes);
        let sent = may && self.publish(home, ring, request, &payload, None);
        if sent {
            ring.count_send(payload.bytes);
        }
        sent
    }

    #[inline]
    fn reach(
        &mut self,
        home: &Home<'_>,
        ring: &mut RequestProducer,
        returned: u32,
        request: &SendDescriptor<'_>,
    ) -> bool {
        let Some(payload) = Payload::of(request, home, &mut self.keys) else { return false };
        let Some(place) = self.grants.find(home, ring, request, payload.bytes) else { return false };
        home.session.is_surely_alive()
            && (self.is_ours || self.is_drained(ring, returned) && self.grants.are_current(ring))
            && self.grants.reach(home, ring, place, &payload)
    }

    /// A WRITE with immediate data: both of these.
    #[inline(never)]
    fn write_and_tell(
        &mut self,
        home: &Home<'_>,
        ring: &mut RequestProducer,
        returned: u32,
        request: &SendDescriptor<'_>,
    ) -> bool {
        if !self.has_channel(home, ring) {
            return false;
        }
        let Some(payload) = Payload::of(request, home, &mut self.keys) else { return false };
        let place = match payload.bytes {
            // It names no memory, so the key does not matter (IBTA 9.7.4.1.6).
            0 if self.channel.as_ref().is_some_and(|open| open.takes_writes) => None,
            0 => return false,
            bytes => match self.grants.find(home, ring, request, bytes) {
                Some(place) => Some(place),
                None => return false,
            },
        };
        let is_current = |outgoing: &Self, ring: &RequestProducer| {
            outgoing.is_open(ring) && (place.is_none() || outgoing.grants.are_current(ring))
        };
        if !home.session.is_surely_alive()
            || !(self.is_ours || self.is_drained(ring, returned) && is_current(self, ring))
            || !self.finds_room(0)
        {
            return false;
        }
        match place {
            Some(place) if !self.grants.reach(home, ring, place, &payload) => return false,
            // Counted where its bytes were.
            Some(_) => {}
            None => ring.count_write(0),
        }
        self.publish(home, ring, request, &Payload::NOTHING, Some(payload.bytes))
    }

    /// Everything that the router got is done; completions from before the last change over were returned.
    #[inline]
    fn is_drained(&mut self, ring: &RequestProducer, returned: u32) -> bool {
        let is_returned = returned.wrapping_sub(self.returned_before_change) as i32 >= 0;
        if !is_returned {
            return false;
        }
        ring.done() == ring.position() || self.handed >= self.handed_before_wait && self.waits_for(ring)
    }

    /// Whether the channel is still what it was before the router was done with the last request: if that failed, it is not.
    fn is_open(&self, ring: &RequestProducer) -> bool {
        self.channel.as_ref().is_some_and(|open| open.channels_closed == ring.channels_closed())
    }

    /// Waits until the router is done with what it got: a program that always has requests under way would never see
    /// that otherwise.
    #[cold]
    fn waits_for(&mut self, ring: &RequestProducer) -> bool {
        self.handed = 0;
        let is_done = {
            let at_most_ns = WAIT_NS * u64::from(self.handed_before_wait / REQUESTS_BEFORE_WAIT);
            wait_until(at_most_ns.min(WAIT_NS_MAX), || ring.done() == ring.position())
        };
        let before = self.handed_before_wait;
        self.handed_before_wait = if is_done {
            REQUESTS_BEFORE_WAIT
        } else {
            (before * 2).clamp(REQUESTS_BEFORE_WAIT, REQUESTS_BEFORE_WAIT_MAX)
        };
        is_done
    }

    /// A request was carried out: its virtual position is one before `posted`. True: it is the first since the router got
    /// one.
    #[inline]
    pub fn note_done(&mut self, posted: u32) -> bool {
        let is_change = !self.is_ours;
        self.keep_near(posted);
        if is_change {
            self.is_ours = true;
            self.returned_before_change = self.signaled_until;
            (self.handed, self.handed_before_wait) = (0, REQUESTS_BEFORE_WAIT);
        }
        is_change
    }

    /// Positions run freely and are compared by their distance, so those that are remembered must not fall too far back. What
    /// is older than a queue can hold was returned.
    #[inline]
    fn keep_near(&mut self, posted: u32) {
        let nearest = posted.wrapping_sub(FAR);
        for position in [&mut self.signaled_until, &mut self.returned_before_change] {
            if posted.wrapping_sub(*position) > FAR {
                *position = nearest;
            }
        }
    }

    /// One more than the virtual position of the last signaled request that the router got.
    pub fn signaled_until(&self) -> u32 {
        self.signaled_until
    }

    /// Whether the peer takes messages by a channel.
    #[inline]
    fn has_channel(&mut self, home: &Home<'_>, ring: &mut RequestProducer) -> bool {
        if let Some(open) = &self.channel {
            if open.channels_closed == ring.channels_closed() {
                return open.sender.is_open();
            }
            self.channel = None;
        }
        self.missed += 1;
        if self.missed > self.patience.max(REQUESTS_BEFORE_CHANNEL) {
            self.open_channel(home, ring);
        }
        false
    }

    #[cold]
    fn open_channel(&mut self, home: &Home<'_>, ring: &mut RequestProducer) {
        self.missed = 0;
        self.patience = (self.patience.max(REQUESTS_BEFORE_CHANNEL) * 2).min(REQUESTS_BETWEEN_MAX);
        if !wait_until(WAIT_NS_MAX, || ring.taken() == ring.position()) {
            // It has not been asked, so the next time is sooner.
            self.missed = self.patience / 2;
            return;
        }
        // Not before: the router takes it for what is used up before the request that it takes next.
        ring.set_msn(self.msn);
        match home.session.call(&Request::OpenChannel { qp: home.handle }) {
            Ok((reply, descriptors)) => {
                let Reply::Direct { channels_closed, takes_writes, .. } = reply else { return };
                let Some((segment, credit_count)) = map_channel(&reply, &descriptors) else { return };
                let sender = ChannelSender::new(segment, credit_count);
                self.patience = 0;
                self.channel = Some(Open { sender, channels_closed, takes_writes, full_ns: FULL_NS_MAX });
            }
            Err(VerbsError::NotSupported) => self.patience = REQUESTS_BETWEEN_MAX,
            Err(_) => {}
        }
    }

    /// Whether the peer has a RECV for so many bytes, and the channel room. Waits a little for both: they come soon, if the peer polls.
    #[inline]
    fn finds_room(&mut self, bytes: u32) -> bool {
        let Some(open) = &mut self.channel else { return false };
        if bytes > CHANNEL_MESSAGE_BYTES_MAX {
            return false;
        }
        match look(open, self.msn, bytes) {
            Look::Room => true,
            Look::Never => false,
            Look::Full => self.awaits_room(bytes),
        }
    }

    /// The peer may be about to make room. One that does not poll is not waited for again and again.
    #[cold]
    fn awaits_room(&mut self, bytes: u32) -> bool {
        let Some(open) = &mut self.channel else { return false };
        let (msn, mut last) = (self.msn, Look::Full);
        wait_until(open.full_ns, || {
            last = look(open, msn, bytes);
            last != Look::Full
        });
        let open = self.channel.as_mut().expect("it was there");
        open.full_ns = match last {
            Look::Full => (open.full_ns / 2).max(FULL_NS_MIN),
            Look::Room | Look::Never => (open.full_ns * 2).min(FULL_NS_MAX),
        };
        last == Look::Room
    }

    /// Puts a message into the channel, which has room; `written`: one that tells of a WRITE. False: the peer's queue pair is in
    /// ERROR and may never see it; the router gets the request, and fails it.
    #[inline(always)] // with what is known of `written`
    fn publish(
        &mut self,
        home: &Home<'_>,
        ring: &mut RequestProducer,
        request: &SendDescriptor<'_>,
        payload: &Payload<'_>,
        written: Option<u32>,
    ) -> bool {
        let Some(open) = &mut self.channel else { return false };
        let solicited = request.flags.contains(SendFlags::SOLICITED);
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        let has_immediate = request.opcode.has_immediate();
        let message = Staged {
            length: payload.bytes,
            msn: self.msn,
            immediate: if has_immediate { request.immediate } else { 0 },
            flags: CompletionFlags(
                flag(has_immediate, CompletionFlags::WITH_IMMEDIATE) | flag(solicited, CompletionFlags::SOLICITED),
            ),
            written,
        };
        open.sender.publish(home.own, &message, payload.inline, payload.ranges());
        let must_tell = open.sender.must_tell();
        if must_tell && open.sender.may_be_unseen() {
            return false;
        }
        self.msn = self.msn.wrapping_add(1);
        // The router has nothing of this queue, so it counts for whatever it takes next, and if the peer ends.
        ring.set_msn(self.msn);
        if must_tell {
            ring.tell(solicited);
            home.session.ring(home.cookie);
        }
        true
    }

    /// The router gets the next request of this queue: before it is published.
    #[inline]
    pub fn hand_over(&mut self, request: &SendDescriptor<'_>, posted: u32, signaled: bool) {
        self.is_ours = false;
        self.keep_near(posted);
        if request.opcode.consumes_receive() {
            self.msn = self.msn.wrapping_add(1);
        }
        if signaled {
            self.signaled_until = posted.wrapping_add(1);
        }
        self.handed = self.handed.saturating_add(1);
    }
}

/// Looks until it is so, for so long at most.
fn wait_until(at_most_ns: u64, mut is_so: impl FnMut() -> bool) -> bool {
    let mut began_ns = 0;
    for looks in 0_u32.. {
        if is_so() {
            return true;
        }
        if looks < PAUSES {
            pause();
            continue;
        }
        let now_ns = monotonic_ns();
        if began_ns == 0 {
            began_ns = now_ns;
        } else if now_ns - began_ns > at_most_ns {
            return false;
        }
        sched_yield();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_remembered_stays_near() {
        let mut outgoing = Outgoing::default();
        let mut posted = 0_u32;
        for _ in 0..20 {
            posted = posted.wrapping_add(FAR / 2);
            outgoing.note_done(posted);
            let distance = posted.wrapping_sub(outgoing.signaled_until());
            assert!(distance <= FAR, "{distance}");
        }
    }
}
