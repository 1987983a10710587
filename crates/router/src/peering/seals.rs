//! The state machine's part in the keys of sealed packets: it brings them, and knows none.
use super::handle::SealMessage;
use super::notes::Why;
use super::state::{Output, State};
use super::update::Update;
use freeflow_engine::HostId;
use freeflow_protocol::peer::PeerMessage;
use freeflow_verbs::Instant;

/// Numbers of keys have 24 bits.
const KEY_ID_MAX: u32 = 0x00ff_ffff;

impl State {
    /// A key for a host, or the word that one of its own is here. Forgotten while the host is not up: with the next
    /// connection all begins again.
    pub fn send_seal(&mut self, id: HostId, message: SealMessage) {
        if !self.file().sealed || !self.is_up(id) {
            return;
        }
        let message = match message {
            SealMessage::Key { id, in_use, secret } => PeerMessage::SealKey { id, in_use, secret },
            SealMessage::Held { id } => PeerMessage::SealKeyHeld { id },
        };
        self.send(id, message);
    }

    /// The same from a host that is up.
    pub(super) fn handle_seal(&mut self, now: Instant, host: HostId, message: PeerMessage) {
        let is_sealed = self.file().sealed;
        let update = match message {
            PeerMessage::SealKey { id, in_use, secret } if is_sealed && id <= KEY_ID_MAX => {
                Update::SealKey { host, id, in_use, secret }
            }
            PeerMessage::SealKeyHeld { id } if is_sealed && id <= KEY_ID_MAX => Update::SealKeyHeld { host, id },
            _ => return self.offend(now, host, Why::Nonsense),
        };
        self.outputs.push_back(Output::Update(update));
    }
}
