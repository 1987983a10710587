//! The state machine's part in the engines of routers: each says how many it has.
use super::notes::Why;
use super::state::{Output, State};
use super::update::Update;
use freeflow_engine::HostId;
use freeflow_protocol::peer::PeerMessage;
use freeflow_verbs::{Instant, Shard};

impl State {
    /// This router has so many engines: said to each host that comes up from now on. For the start, before any does.
    pub fn set_shards(&mut self, count: u8) {
        debug_assert!(Shard::new(0, count).is_some(), "{count} engines");
        self.shard_count = count;
    }

    /// To a host that is up and knows of several engines. It takes one for granted.
    pub(super) fn announce_shards(&mut self, id: HostId) {
        if self.shard_count > 1 {
            self.send(id, PeerMessage::Shards { count: self.shard_count });
        }
    }

    /// The same from such a host.
    pub(super) fn handle_shards(&mut self, now: Instant, host: HostId, count: u8) {
        if Shard::new(0, count).is_none() {
            return self.offend(now, host, Why::Nonsense);
        }
        self.outputs.push_back(Output::Update(Update::Shards { host, count }));
    }
}
