//! One connection between two routers, without its socket: bytes in, messages out, and the other way round.
//!
//! The handshake is Noise_KK_25519_ChaChaPoly_BLAKE2s (the Noise Protocol Framework, revision 34):
//! both sides know each other's static key before they begin. Since the listener must know whose
//! key to use, the dialer's first frame has its name before the Noise message; the name proves
//! nothing by itself. Version and both names are the prologue, so they are authenticated too.
//!
//! ```text
//! frame     = length (u16, big endian), body
//! 1st body  = magic (4), length of the name (u8), name of the dialer, e, es, ss
//! 2nd body  = e, ee, se
//! then      = a PeerMessage each, encrypted, 16 bytes of tag
//! ```
//!
//! **A listener has a dialer's word only with the first message after the handshake:** the first
//! frame can be a copy of an older one. [`Event::Message`] is that proof; [`Event::Opened`] is not.
//!
//! Invariant: bytes of a stranger cost at most one frame of [`FRAME_BYTES_MAX`] and one handshake.
use super::file::{Key, PrivateKey};
use freeflow_protocol::peer::{HOST_NAME_BYTES_MAX, PEER_MESSAGE_BYTES_MAX, PeerMessage};
use snow::{Builder, HandshakeState, TransportState};
use thiserror::Error;

const PATTERN: &str = "Noise_KK_25519_ChaChaPoly_BLAKE2s";
/// "FFP" and the version of the handshake.
const MAGIC: [u8; 4] = *b"FFP1";
const TAG_BYTES: usize = 16;
const LENGTH_BYTES: usize = 2;
/// Largest body of a frame.
pub const FRAME_BYTES_MAX: usize = PEER_MESSAGE_BYTES_MAX + TAG_BYTES;
/// Largest body before the other side has proved who it is: an ephemeral key and a tag behind a name.
const OPENING_BYTES_MAX: usize = MAGIC.len() + 1 + HOST_NAME_BYTES_MAX + 32 + TAG_BYTES;

/// Why a connection can't go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ChannelError {
    /// No frame of this protocol.
    #[error("what comes is no FreeFlow control channel")]
    Malformed,
    /// No host of this name may dial here.
    #[error("no host of that name may connect from that address")]
    UnknownName,
    /// The other side has not the key that the peers file gives for it, or something changed the bytes on the way.
    #[error("it does not have the key that the peers file gives for it")]
    NotAuthentic,
}

#[derive(Debug, PartialEq)]
pub enum Event {
    /// The handshake is done.
    Opened,
    /// It was encrypted by the peer for this connection.
    Message(PeerMessage),
}

/// This host, to others.
#[derive(Clone, Debug)]
pub struct Identity {
    pub name: String,
    pub key: PrivateKey,
}

#[allow(clippy::large_enum_variant, reason = "one a connection")]
enum Phase {
    /// A listener's, before the first frame.
    Listening,
    /// A dialer's, before the second.
    Dialing(HandshakeState),
    Open(TransportState),
    /// After an error.
    Broken,
}

pub struct NoiseChannel {
    phase: Phase,
    input: Vec<u8>,
    /// Of `input`, done with.
    taken_bytes: usize,
    output: Vec<u8>,
    /// Of `output`, sent.
    sent_bytes: usize,
}

impl NoiseChannel {
    fn new(phase: Phase) -> Self {
        Self { phase, input: Vec::new(), taken_bytes: 0, output: Vec::new(), sent_bytes: 0 }
    }

    /// A connection from here; the first frame is ready to be sent.
    pub fn dial(own: &Identity, peer: &str, peer_key: &Key) -> Self {
        let handshake = builder(own, peer_key, &prologue(&own.name, peer)).and_then(Builder::build_initiator);
        let Ok(mut handshake) = handshake else { return Self::new(Phase::Broken) };
        let mut message = [0; OPENING_BYTES_MAX];
        let Ok(length) = handshake.write_message(&[], &mut message) else { return Self::new(Phase::Broken) };
        let mut channel = Self::new(Phase::Dialing(handshake));
        let name = own.name.as_bytes();
        channel.put_frame(&[&MAGIC, &[name.len() as u8], name, &message[..length]]);
        channel
    }

    /// A connection to here.
    pub fn listen() -> Self {
        Self::new(Phase::Listening)
    }

    pub fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open(_))
    }

    /// Bytes that came.
    pub fn handle_bytes(&mut self, bytes: &[u8]) {
        self.input.drain(..self.taken_bytes);
        self.taken_bytes = 0;
        self.input.extend_from_slice(bytes);
    }

    /// The next event, until there is nothing more. `find` gives the key of a host that may dial,
    /// by its name; it is asked once.
    pub fn poll_event(
        &mut self,
        own: &Identity,
        find: impl FnOnce(&str) -> Option<Key>,
    ) -> Result<Option<Event>, ChannelError> {
        let polled = self.poll(own, find);
        if polled.is_err() {
            self.phase = Phase::Broken;
        }
        polled
    }

    fn poll(&mut self, own: &Identity, find: impl FnOnce(&str) -> Option<Key>) -> Result<Option<Event>, ChannelError> {
        if matches!(self.phase, Phase::Broken) {
            return Err(ChannelError::Malformed);
        }
        let Some(body) = self.take_frame()? else { return Ok(None) };
        match std::mem::replace(&mut self.phase, Phase::Broken) {
            Phase::Listening => self.answer_opening(own, find, &body)?,
            Phase::Dialing(mut handshake) => {
                let mut nothing = [0; OPENING_BYTES_MAX];
                match handshake.read_message(&body, &mut nothing) {
                    Ok(0) if handshake.is_handshake_finished() => {}
                    _ => return Err(ChannelError::NotAuthentic),
                }
                self.phase = Phase::Open(handshake.into_transport_mode().map_err(|_| ChannelError::Malformed)?);
            }
            Phase::Open(mut transport) => {
                let mut text = [0; FRAME_BYTES_MAX];
                let read = transport.read_message(&body, &mut text);
                self.phase = Phase::Open(transport);
                let length = read.map_err(|_| ChannelError::NotAuthentic)?;
                let message = freeflow_protocol::decode(&text[..length]).map_err(|_| ChannelError::Malformed)?;
                return Ok(Some(Event::Message(message)));
            }
            Phase::Broken => return Err(ChannelError::Malformed),
        }
        Ok(Some(Event::Opened))
    }

    fn answer_opening(
        &mut self,
        own: &Identity,
        find: impl FnOnce(&str) -> Option<Key>,
        body: &[u8],
    ) -> Result<(), ChannelError> {
        let rest = body.strip_prefix(&MAGIC).ok_or(ChannelError::Malformed)?;
        let (&length, rest) = rest.split_first().ok_or(ChannelError::Malformed)?;
        let (name, message) = rest.split_at_checked(length.into()).ok_or(ChannelError::Malformed)?;
        let name = std::str::from_utf8(name).map_err(|_| ChannelError::Malformed)?;
        let key = find(name).ok_or(ChannelError::UnknownName)?;
        let mut handshake = builder(own, &key, &prologue(name, &own.name))
            .and_then(Builder::build_responder)
            .map_err(|_| ChannelError::NotAuthentic)?;
        let mut buffer = [0; OPENING_BYTES_MAX];
        match handshake.read_message(message, &mut buffer) {
            Ok(0) => {}
            _ => return Err(ChannelError::NotAuthentic),
        }
        let length = handshake.write_message(&[], &mut buffer).map_err(|_| ChannelError::Malformed)?;
        self.put_frame(&[&buffer[..length]]);
        self.phase = Phase::Open(handshake.into_transport_mode().map_err(|_| ChannelError::Malformed)?);
        Ok(())
    }

    /// The body of the next whole frame.
    fn take_frame(&mut self) -> Result<Option<Vec<u8>>, ChannelError> {
        let rest = &self.input[self.taken_bytes..];
        let Some((length, rest)) = rest.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes(*length));
        let length_max = if self.is_open() { FRAME_BYTES_MAX } else { OPENING_BYTES_MAX };
        if length == 0 || length > length_max {
            return Err(ChannelError::Malformed);
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let body = body.to_vec();
        self.taken_bytes += LENGTH_BYTES + length;
        Ok(Some(body))
    }

    /// Encrypts a message behind what is to be sent.
    ///
    /// # Panics
    /// If the channel is not open: nothing may be said before the peer is known.
    pub fn send(&mut self, message: &PeerMessage) {
        let Phase::Open(transport) = &mut self.phase else { panic!("a message before the handshake's end") };
        let text = freeflow_protocol::encode(message);
        assert!(text.len() <= PEER_MESSAGE_BYTES_MAX, "every message fits its frame");
        let mut body = [0; FRAME_BYTES_MAX];
        // Fails after 2^64 messages only.
        let Ok(length) = transport.write_message(&text, &mut body) else { return };
        self.put_frame(&[&body[..length]]);
    }

    fn put_frame(&mut self, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        debug_assert!(length <= FRAME_BYTES_MAX);
        self.output.extend_from_slice(&(length as u16).to_be_bytes());
        for part in parts {
            self.output.extend_from_slice(part);
        }
    }

    /// To be sent.
    pub fn output(&self) -> &[u8] {
        &self.output[self.sent_bytes..]
    }

    /// So much of [`Self::output`] was sent.
    pub fn handle_sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes;
        // Moved only when it halves at least, so each byte is moved once on average.
        if self.sent_bytes * 2 >= self.output.len() {
            self.output.drain(..self.sent_bytes);
            self.sent_bytes = 0;
        }
    }
}

fn prologue(dialer: &str, listener: &str) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    for name in [dialer, listener] {
        bytes.push(name.len() as u8);
        bytes.extend_from_slice(name.as_bytes());
    }
    bytes
}

fn builder<'a>(own: &'a Identity, peer_key: &'a Key, prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
    Builder::new(PATTERN.parse()?).local_private_key(&own.key.0)?.remote_public_key(peer_key)?.prologue(prologue)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host of this name: its identity and public key.
    fn host(name: &str) -> (Identity, Key) {
        let pair = Builder::new(PATTERN.parse().unwrap()).generate_keypair().unwrap();
        let key = |bytes: Vec<u8>| Key::try_from(bytes).unwrap();
        (Identity { name: name.into(), key: PrivateKey(key(pair.private)) }, key(pair.public))
    }

    /// All bytes of one to the other.
    fn pass(from: &mut NoiseChannel, to: &mut NoiseChannel) {
        let bytes = from.output().to_vec();
        to.handle_bytes(&bytes);
        from.handle_sent(bytes.len());
    }

    fn open() -> (Identity, NoiseChannel, NoiseChannel) {
        let ((one, one_key), (two, two_key)) = (host("one"), host("two"));
        let (mut dialer, mut listener) = (NoiseChannel::dial(&one, "two", &two_key), NoiseChannel::listen());
        pass(&mut dialer, &mut listener);
        let find = |name: &str| (name == "one").then_some(one_key);
        assert_eq!(listener.poll_event(&two, find), Ok(Some(Event::Opened)));
        pass(&mut listener, &mut dialer);
        assert_eq!(dialer.poll_event(&one, |_| None), Ok(Some(Event::Opened)));
        (two, dialer, listener)
    }

    #[test]
    fn messages_arrive_whole_and_in_order_however_they_are_cut() {
        let (own, mut dialer, mut listener) = open();
        let messages: Vec<PeerMessage> = (0..50).map(|stamp| PeerMessage::Ping { stamp }).collect();
        messages.iter().for_each(|message| dialer.send(message));
        let (bytes, mut came) = (dialer.output().to_vec(), Vec::new());
        for piece in bytes.chunks(7) {
            listener.handle_bytes(piece);
            while let Some(Event::Message(message)) = listener.poll_event(&own, |_| None).unwrap() {
                came.push(message);
            }
        }
        assert_eq!(came, messages);
        // Each counts once: the same bytes again are no messages.
        listener.handle_bytes(&bytes);
        assert_eq!(listener.poll_event(&own, |_| None), Err(ChannelError::NotAuthentic));
    }

    #[test]
    fn a_wrong_key_or_name_opens_nothing() {
        let ((one, one_key), (two, two_key), (other, other_key)) = (host("one"), host("two"), host("one"));
        // The dialer has another key than the listener knows; or expects another of the listener; or another listener.
        for (dialer, peer, key) in [(&other, "two", &two_key), (&one, "two", &other_key), (&one, "three", &two_key)] {
            let (mut dialer, mut listener) = (NoiseChannel::dial(dialer, peer, key), NoiseChannel::listen());
            pass(&mut dialer, &mut listener);
            assert_eq!(listener.poll_event(&two, |_| Some(one_key)), Err(ChannelError::NotAuthentic));
            assert!(listener.output().is_empty() && !listener.is_open());
        }
        let (mut dialer, mut listener) = (NoiseChannel::dial(&one, "two", &two_key), NoiseChannel::listen());
        pass(&mut dialer, &mut listener);
        assert_eq!(listener.poll_event(&two, |_| None), Err(ChannelError::UnknownName));
    }

    #[test]
    fn a_copied_opening_brings_no_message() {
        let ((one, one_key), (two, two_key)) = (host("one"), host("two"));
        let dialer = NoiseChannel::dial(&one, "two", &two_key);
        for _ in 0..2 {
            let mut listener = NoiseChannel::listen();
            listener.handle_bytes(dialer.output());
            assert_eq!(listener.poll_event(&two, |_| Some(one_key)), Ok(Some(Event::Opened)));
            listener.handle_bytes(&[0, 20, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]);
            assert_eq!(listener.poll_event(&two, |_| Some(one_key)), Err(ChannelError::NotAuthentic));
        }
    }

    #[test]
    fn garbage_is_refused_before_it_is_stored() {
        let (own, _) = host("own");
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0, 0], &[0xff; 100], &[0, 5, b'F', b'F', b'P', b'2', 0]] {
            let mut channel = NoiseChannel::listen();
            channel.handle_bytes(garbage);
            assert_eq!(channel.poll_event(&own, |_| None), Err(ChannelError::Malformed));
            assert_eq!(channel.poll_event(&own, |_| None), Err(ChannelError::Malformed), "and stays so");
        }
        let (own, mut dialer, mut listener) = open();
        dialer.put_frame(&[&[7; 40]]);
        pass(&mut dialer, &mut listener);
        assert_eq!(listener.poll_event(&own, |_| None), Err(ChannelError::NotAuthentic));
    }
}
