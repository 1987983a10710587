//! Packets between the shards of one router, and what their engines tell each other.
//!
//! To an engine another shard is another host: with QPs of its own, a congestion window, packets in order. But the link
//! is memory of this process: nothing is lost, damaged, or forged there, so packets have neither ICRC nor seal, and no
//! [`Path`](freeflow_engine::Path) leads out of the router. Packets gather in *parcels*, which a worker hands over at
//! the end of its turn, and gets back empty; so a sender that is faster waits for parcels, as it would for a socket.
//! The questions that routers ask each other by their channel are asked here by the same [`Update`]s.
//!
//! Packets of other hosts that a socket of the wrong shard received (a sender that knows nothing of shards has several
//! of them in one batch) are handed on in the same parcels.
//!
//! Invariant: what is in the inbox of a worker is seen before it sleeps ([`Siblings::has_arrivals`]), and who puts
//! something there wakes it.
use crate::base::wake::Waker;
use crate::dataplane::fabric::{EXTERNAL_HOST_BASE, EXTERNAL_HOST_COUNT_MAX, HOP_LIMIT};
use crate::peering::Update;
use freeflow_engine::{Destination, HostId, IpInfo, PeerInfo, Violation, ViolationKind};
use freeflow_verbs::{Gid, NetworkId, Qpn, Shard};
use freeflow_wire::PAYLOAD_BYTES_MAX;
use freeflow_wire::frame::FRAME_PAYLOAD_BYTES_MAX;
use std::collections::HashSet;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, Sender, channel};

/// Numbers of shards begin here, behind those of external hosts.
const HOST_BASE: u32 = EXTERNAL_HOST_BASE + EXTERNAL_HOST_COUNT_MAX;
/// Bytes of a parcel: a burst fits.
const PARCEL_BYTES: usize = 128 * 1024;
/// Parcels of one shard on the way to another, and handed back, at most: a congestion window.
const PARCEL_COUNT_MAX: usize = 16;
/// With so many deliveries in its inbox a shard is asked about no more attempts; nor about more in one turn.
const WAITING_MAX: usize = 256;
const TURN_ATTEMPTS_MAX: usize = 64;
/// Of a packet, in its BTH (IBTA 9.2.6).
const DEST_QPN: Range<usize> = 5..8;
/// Of a datagram, in its DETH behind the BTH (IBTA 9.3.3).
const SOURCE_QPN: Range<usize> = 17..20;
/// The upper three bits of an opcode (IBTA 9.2.1).
const UD_SERVICE: u8 = 0b011;
/// Senders that are remembered; then they are introduced once more.
const INTRODUCED_MAX: usize = 65_536;

/// The number by which engines know a shard of their router.
pub(crate) const fn host_of(shard: u8) -> HostId {
    HostId(HOST_BASE + shard as u32)
}

/// The shard that a number is of.
#[inline]
pub(crate) const fn shard_of(host: HostId) -> Option<u8> {
    match host.0.checked_sub(HOST_BASE) {
        Some(shard) if shard < Shard::COUNT_MAX as u32 => Some(shard as u8),
        _ => None,
    }
}

/// The sender of a packet in a parcel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The shard that the parcel is from.
    Shard,
    /// Another host: the packet came to the wrong socket.
    Address(IpAddr),
    /// The same of a packet to a multicast group, which has members in both shards.
    Relayed(IpAddr),
}

struct Packet {
    place: Range<usize>,
    origin: Origin,
    ip: IpInfo,
}

/// Packets on their way from one shard to another.
pub(crate) struct Parcel {
    from: u8,
    bytes: Vec<u8>,
    packets: Vec<Packet>,
    /// Those that the receiver has taken.
    taken: usize,
}

impl Parcel {
    fn new(from: u8) -> Self {
        Self { from, bytes: Vec::new(), packets: Vec::new(), taken: 0 }
    }

    pub fn from(&self) -> HostId {
        host_of(self.from)
    }

    /// The next packet, in the order in which they were sent.
    #[inline]
    pub fn next_packet(&mut self) -> Option<(Origin, IpInfo, &[u8])> {
        let packet = self.packets.get(self.taken)?;
        self.taken += 1;
        Some((packet.origin, packet.ip, &self.bytes[packet.place.clone()]))
    }

    fn room(&self) -> usize {
        PARCEL_BYTES - self.bytes.len()
    }
}

enum Delivery {
    Parcel(Parcel),
    /// A parcel comes back from this shard.
    Empty(u8, Parcel),
    News(Update),
    Attempts(Vec<Attempt>),
}

/// A remote key was used on a QP of network `own`, and is none of that QP's shard; or a message of such a QP went to a
/// QPN that nobody has where it came to.
pub(crate) struct Attempt {
    pub own: NetworkId,
    pub attempt: Violation,
}

/// The inbox of a shard, for the others.
#[derive(Clone)]
struct Way {
    inbox: Sender<Delivery>,
    /// Deliveries that the worker has not taken.
    waiting: Arc<AtomicUsize>,
    waker: Arc<Waker>,
}

impl Way {
    fn put(&self, delivery: Delivery) {
        // Counted first: the worker takes no more than are counted. SeqCst: either it sees this before it sleeps, or
        // `wake` sees that it sleeps.
        self.waiting.fetch_add(1, SeqCst);
        // Fails only when that worker has ended, and then the router ends.
        let _ = self.inbox.send(delivery);
        self.waker.wake();
    }
}

/// The way to one of the others.
struct Link {
    way: Way,
    filling: Option<Parcel>,
    spare: Vec<Parcel>,
    /// Parcels that were ever made for it.
    made: usize,
    /// To be asked about at the end of the turn.
    attempts: Vec<Attempt>,
}

impl Link {
    fn has_parcel(&self) -> bool {
        !self.spare.is_empty() || self.made < PARCEL_COUNT_MAX
    }

    /// The parcel that has room for so many bytes. A full one goes out.
    fn parcel(&mut self, from: u8, bytes: usize) -> Option<&mut Parcel> {
        if let Some(full) = self.filling.take_if(|parcel| parcel.room() < bytes) {
            self.way.put(Delivery::Parcel(full));
        }
        if self.filling.is_none() {
            let parcel = match self.spare.pop() {
                Some(parcel) => parcel,
                None if self.made < PARCEL_COUNT_MAX => {
                    self.made += 1;
                    Parcel::new(from)
                }
                None => return None,
            };
            self.filling = Some(parcel);
        }
        self.filling.as_mut()
    }
}

/// A shard's ends of the links to the others.
pub(crate) struct Siblings {
    pub shard: Shard,
    links: Vec<Option<Link>>,
    inbox: Receiver<Delivery>,
    waiting: Arc<AtomicUsize>,
    /// The packet that is being written: to which shard, and its bytes in that parcel.
    begun: Option<(u8, Range<usize>)>,
    /// A sender was told that there is no room.
    short: bool,
    /// A parcel of which a turn took only some packets.
    begun_parcel: Option<Parcel>,
    pub news: Vec<Update>,
    /// Connections that they ended: looked at behind the commands of a turn, which may have brought the same rules.
    pub disconnected: Vec<Update>,
    /// Keys and QPNs that were tried in other shards.
    pub attempts: Vec<Attempt>,
    /// Senders of datagrams that a shard is told of before their packets come: they may be gone when it would ask.
    strangers: Vec<(u8, Qpn)>,
    introduced: HashSet<(u8, Qpn)>,
    /// Packets of other hosts that found no room on the way to their shard: they are lost.
    pub strays_lost: u64,
    /// Those that were handed on.
    pub strays: u64,
}

impl Siblings {
    /// Of all shards, by the wakers of their workers.
    pub fn all(wakers: &[Arc<Waker>]) -> Vec<Self> {
        let (ways, inboxes): (Vec<Way>, Vec<Receiver<Delivery>>) = (wakers.iter())
            .map(|waker| {
                let (inbox, end) = channel();
                (Way { inbox, waiting: Arc::default(), waker: waker.clone() }, end)
            })
            .unzip();
        let link =
            |way: &Way| Link { way: way.clone(), filling: None, spare: Vec::new(), made: 0, attempts: Vec::new() };
        Shard::all(wakers.len() as u8)
            .zip(inboxes)
            .map(|(shard, inbox)| {
                let own = usize::from(shard.index());
                Self {
                    shard,
                    links: ways.iter().enumerate().map(|(at, way)| (at != own).then(|| link(way))).collect(),
                    inbox,
                    waiting: ways[own].waiting.clone(),
                    begun: None,
                    short: false,
                    begun_parcel: None,
                    news: Vec::new(),
                    disconnected: Vec::new(),
                    attempts: Vec::new(),
                    strangers: Vec::new(),
                    introduced: HashSet::new(),
                    strays_lost: 0,
                    strays: 0,
                }
            })
            .collect()
    }

    /// The other shards, as hosts.
    pub fn hosts(&self) -> impl Iterator<Item = HostId> {
        self.shard.others().map(host_of)
    }

    /// How packets get to another shard.
    pub fn destination(host: HostId, flow: u32) -> Destination {
        Destination {
            host,
            flow,
            traffic_class: 0,
            hop_limit: HOP_LIMIT,
            mtu: PAYLOAD_BYTES_MAX as u16,
            frame_bytes: FRAME_PAYLOAD_BYTES_MAX as u16,
            selective: true,
            records: true,
        }
    }

    fn link(&mut self, shard: u8) -> Option<&mut Link> {
        self.links.get_mut(usize::from(shard))?.as_mut()
    }

    /// Whether a burst finds room: there is a parcel behind the one that is being filled.
    pub fn has_room(&mut self, shard: u8) -> bool {
        let has_room = self.link(shard).is_some_and(|link| link.has_parcel());
        self.short |= !has_room;
        has_room
    }

    /// Begins a packet of so many bytes. `None`: there is no room.
    pub fn reserve(&mut self, shard: u8, bytes: usize) -> Option<&mut [u8]> {
        self.abandon();
        let own = self.shard.index();
        let parcel = self.links.get_mut(usize::from(shard))?.as_mut()?.parcel(own, bytes)?;
        let begin = parcel.bytes.len();
        parcel.bytes.resize(begin + bytes, 0);
        self.begun = Some((shard, begin..begin + bytes));
        parcel.bytes.get_mut(begin..)
    }

    /// The packet that was begun is written.
    pub fn commit(&mut self, origin: Origin, ip: IpInfo) {
        let Some((shard, place)) = self.begun.take() else { return };
        if let Some(parcel) = self.link(shard).and_then(|link| link.filling.as_mut()) {
            parcel.packets.push(Packet { place, origin, ip });
        }
    }

    /// The packet that was begun is not sent.
    pub fn abandon(&mut self) {
        let Some((shard, place)) = self.begun.take() else { return };
        if let Some(parcel) = self.link(shard).and_then(|link| link.filling.as_mut()) {
            parcel.bytes.truncate(place.start);
        }
    }

    /// Hands a packet of another host on to another shard, to another QPN if one is named. Without room it is lost, as
    /// in a full socket.
    pub fn hand_on(&mut self, shard: u8, origin: Origin, ip: IpInfo, packet: &[u8], to: Option<Qpn>) {
        match self.reserve(shard, packet.len()) {
            Some(place) => {
                place.copy_from_slice(packet);
                if let (Some(qpn), Some(field)) = (to, place.get_mut(DEST_QPN)) {
                    field.copy_from_slice(&qpn.0.to_be_bytes()[1..]);
                }
                self.commit(origin, ip);
                self.strays += u64::from(matches!(origin, Origin::Address(_)));
            }
            None => self.strays_lost += 1,
        }
    }

    /// Hands over all that was written; whether there was anything.
    pub fn flush(&mut self) -> bool {
        self.abandon();
        let mut is_any = false;
        for link in self.links.iter_mut().flatten() {
            if let Some(parcel) = link.filling.take_if(|parcel| !parcel.packets.is_empty()) {
                link.way.put(Delivery::Parcel(parcel));
                is_any = true;
            }
            if !link.attempts.is_empty() {
                link.way.put(Delivery::Attempts(std::mem::take(&mut link.attempts)));
            }
        }
        is_any
    }

    /// Something is there that the worker has not taken.
    #[inline]
    pub fn has_arrivals(&self) -> bool {
        self.begun_parcel.is_some() || self.waiting.load(SeqCst) > 0
    }

    /// Takes what the others left, up to the next parcel. What they said is in `news` then.
    pub fn take(&mut self) -> Option<Parcel> {
        if let Some(parcel) = self.begun_parcel.take() {
            return Some(parcel);
        }
        while self.has_arrivals()
            && let Ok(delivery) = self.inbox.try_recv()
        {
            self.waiting.fetch_sub(1, SeqCst);
            match delivery {
                Delivery::Parcel(parcel) => return Some(parcel),
                Delivery::Empty(from, parcel) => {
                    self.short = false;
                    if let Some(link) = self.link(from) {
                        link.spare.push(parcel);
                    }
                }
                Delivery::News(update @ Update::Disconnected { .. }) => self.disconnected.push(update),
                Delivery::News(update) => self.news.push(update),
                Delivery::Attempts(attempts) => self.attempts.extend(attempts),
            }
        }
        None
    }

    /// The packets of a parcel that a turn took were acted upon; the others are the next turn's.
    pub fn give_back(&mut self, mut parcel: Parcel) {
        if parcel.taken < parcel.packets.len() {
            self.begun_parcel = Some(parcel);
            return;
        }
        parcel.taken = 0;
        parcel.bytes.clear();
        parcel.packets.clear();
        let (from, own) = (parcel.from, self.shard.index());
        if let Some(link) = self.link(from) {
            link.way.put(Delivery::Empty(own, parcel));
        }
    }

    /// A sender waits for parcels that come back.
    pub fn is_short(&self) -> bool {
        self.short
    }

    fn tell(&self, shard: u8, update: Update) {
        if let Some(Some(link)) = self.links.get(usize::from(shard)) {
            link.way.put(Delivery::News(update));
        }
    }

    fn own_host(&self) -> HostId {
        host_of(self.shard.index())
    }

    /// A packet with these headers goes to another shard. The first of a UD QP makes it known there.
    #[inline]
    pub fn introduce(&mut self, shard: u8, head: &[u8]) {
        let (Some(opcode), Some(&[a, b, c])) = (head.first(), head.get(SOURCE_QPN).and_then(<[u8]>::first_chunk))
        else {
            return;
        };
        if opcode >> 5 != UD_SERVICE {
            return;
        }
        let stranger = (shard, Qpn(u32::from_be_bytes([0, a, b, c])));
        if self.introduced.len() >= INTRODUCED_MAX {
            self.introduced.clear();
        }
        if self.introduced.insert(stranger) {
            self.strangers.push(stranger);
        }
    }

    /// Those that are to be introduced; to be told of before the next [`flush`](Self::flush).
    pub fn strangers(&mut self) -> Vec<(u8, Qpn)> {
        std::mem::take(&mut self.strangers)
    }

    /// The QPN is somebody else's now.
    pub fn note_changed(&mut self, qpn: Qpn) {
        if !self.introduced.is_empty() {
            for shard in 0..self.shard.count() {
                self.introduced.remove(&(shard, qpn));
            }
        }
    }

    /// Asks for the QP behind a QPN of another shard.
    pub fn ask(&self, shard: u8, qpn: Qpn) {
        self.tell(shard, Update::Asked { host: self.own_host(), qpn });
    }

    /// Says what is behind a QPN of this shard.
    pub fn notify(&self, shard: u8, qpn: Qpn, info: Option<PeerInfo>) {
        self.tell(shard, Update::Peer { host: self.own_host(), qpn, info });
    }

    /// Policy has ended the connection of our `qpn` with that shard's `peer`.
    pub fn disconnected(&self, shard: u8, peer: Qpn, qpn: Qpn) {
        self.tell(shard, Update::Disconnected { host: self.own_host(), qpn: peer, peer: qpn });
    }

    /// Asks the other shards whether a key is another network's of theirs. Of tenants who try many, some are not asked
    /// about: it is for the audit log.
    pub fn ask_whose_key(&mut self, own: NetworkId, attempt: &Violation) {
        for shard in self.shard.others() {
            self.tell_attempt(shard, own, attempt);
        }
    }

    /// The same of a QPN, if it would be another shard's. False: it would not, or that one has too much to do.
    pub fn ask_whose_qpn(&mut self, attempt: &Violation) -> bool {
        let is_message = matches!(attempt.kind, ViolationKind::Message | ViolationKind::Datagram);
        let shard = self.shard.of_qpn(Qpn(attempt.number));
        let may_be_its = is_message && attempt.owner.is_none() && shard != self.shard.index();
        may_be_its && self.tell_attempt(shard, attempt.network, attempt)
    }

    fn tell_attempt(&mut self, shard: u8, own: NetworkId, attempt: &Violation) -> bool {
        let Some(link) = self.link(shard) else { return false };
        let has_time = link.attempts.len() < TURN_ATTEMPTS_MAX && link.way.waiting.load(SeqCst) < WAITING_MAX;
        if has_time {
            link.attempts.push(Attempt { own, attempt: *attempt });
        }
        has_time
    }

    /// By which QPN this shard's members of a multicast group are reached.
    pub fn group(&self, network: NetworkId, gid: Gid, qpn: Option<Qpn>) {
        for shard in self.shard.others() {
            self.tell(shard, Update::Group { host: self.own_host(), network, gid, qpn });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Siblings, Siblings) {
        let wakers = [Arc::new(Waker::new().unwrap()), Arc::new(Waker::new().unwrap())];
        let mut all = Siblings::all(&wakers).into_iter();
        (all.next().unwrap(), all.next().unwrap())
    }

    fn send(from: &mut Siblings, bytes: &[u8]) -> bool {
        let Some(place) = from.reserve(1, bytes.len()) else { return false };
        place.copy_from_slice(bytes);
        from.commit(Origin::Shard, IpInfo::default());
        true
    }

    fn all_of(parcel: &mut Parcel) -> Vec<(Origin, Vec<u8>)> {
        let mut all = Vec::new();
        while let Some((origin, _, bytes)) = parcel.next_packet() {
            all.push((origin, bytes.to_vec()));
        }
        all
    }

    #[test]
    fn a_parcel_may_be_taken_in_several_turns() {
        let (mut a, mut b) = pair();
        (0..4_u8).for_each(|number| assert!(send(&mut a, &[number; 16])));
        a.flush();
        for number in 0..4 {
            assert!(b.has_arrivals());
            let mut parcel = b.take().unwrap();
            assert_eq!(parcel.next_packet().unwrap().2, [number; 16]);
            b.give_back(parcel);
            assert_eq!(a.has_arrivals(), number == 3, "it comes back when all were taken");
        }
        assert!(!b.has_arrivals() && b.take().is_none());
    }

    #[test]
    fn numbers_of_shards_are_nobody_elses() {
        assert_eq!(shard_of(host_of(7)), Some(7));
        assert_eq!(shard_of(HostId(HOST_BASE - 1)), None);
        assert_eq!(shard_of(HostId(HOST_BASE + 8)), None);
        assert_eq!(shard_of(HostId(0)), None);
        assert!(HOST_BASE + u32::from(Shard::COUNT_MAX) < freeflow_backend::PEER_COUNT_MAX);
    }

    #[test]
    fn packets_arrive_in_order_and_parcels_come_back() {
        let (mut a, mut b) = pair();
        assert!(!b.has_arrivals() && !a.flush());
        for round in 0..3 * PARCEL_COUNT_MAX as u32 {
            assert!(a.has_room(1));
            assert!(send(&mut a, &round.to_be_bytes()) && send(&mut a, b"next"));
            // One that is begun and not written leaves nothing.
            a.reserve(1, 100).unwrap().fill(1);
            assert!(a.flush() && b.has_arrivals());
            let mut parcel = b.take().unwrap();
            let packets = all_of(&mut parcel);
            assert_eq!(packets, [(Origin::Shard, round.to_be_bytes().to_vec()), (Origin::Shard, b"next".to_vec())]);
            assert_eq!(parcel.from(), host_of(0));
            b.give_back(parcel);
            assert!(b.take().is_none() && a.take().is_none() && !a.has_arrivals());
        }
    }

    #[test]
    fn a_sender_waits_for_a_receiver_that_takes_nothing() {
        let (mut a, mut b) = pair();
        let packet = vec![7; 1 << 16];
        let mut sent = 0;
        while a.has_room(1) {
            assert!(send(&mut a, &packet));
            sent += 1;
        }
        assert!((PARCEL_COUNT_MAX..=2 * PARCEL_COUNT_MAX).contains(&sent) && a.is_short());
        a.flush();
        let mut came = 0;
        while let Some(mut parcel) = b.take() {
            came += all_of(&mut parcel).len();
            b.give_back(parcel);
        }
        assert_eq!(came, sent);
        assert!(a.take().is_none() && !a.is_short() && a.has_room(1));
    }

    #[test]
    fn what_shards_say_is_said_in_the_others_words() {
        let (mut a, b) = pair();
        b.ask(0, Qpn(6));
        b.disconnected(0, Qpn(6), Qpn(9));
        assert!(a.take().is_none());
        assert!(matches!(a.news[0], Update::Asked { host, qpn: Qpn(6) } if host == host_of(1)));
        assert!(
            matches!(a.disconnected[0], Update::Disconnected { host, qpn: Qpn(6), peer: Qpn(9) } if host == host_of(1))
        );
    }

    #[test]
    fn a_sender_of_datagrams_is_introduced_once() {
        let (mut a, _b) = pair();
        let head = |opcode: u8| [&[opcode; 1][..], &[0; 16], &[0, 1, 4], &[0; 4]].concat();
        let datagram = head(0x64);
        a.introduce(1, &datagram);
        a.introduce(1, &datagram);
        a.introduce(1, &head(0x04));
        a.introduce(1, &datagram[..12]);
        assert_eq!(a.strangers(), [(1, Qpn(0x104))]);
        a.introduce(1, &datagram);
        assert_eq!(a.strangers(), []);
        a.note_changed(Qpn(0x104));
        a.introduce(1, &datagram);
        assert_eq!(a.strangers(), [(1, Qpn(0x104))]);
    }

    #[test]
    fn a_stray_keeps_its_sender() {
        let (mut a, mut b) = pair();
        let from: IpAddr = "192.0.2.7".parse().unwrap();
        a.hand_on(1, Origin::Address(from), IpInfo { congestion: true, ..IpInfo::default() }, b"packet", None);
        a.flush();
        let mut parcel = b.take().unwrap();
        let (origin, ip, bytes) = parcel.next_packet().unwrap();
        assert_eq!((origin, ip.congestion, bytes), (Origin::Address(from), true, &b"packet"[..]));
        assert_eq!((a.strays, a.strays_lost), (1, 0));
    }
}
