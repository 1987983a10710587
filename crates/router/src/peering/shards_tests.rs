//! How many engines routers have: who says it to whom, and what is believed.
use super::seals_tests::file;
use super::state::{Output, State};
use super::update::Update;
use freeflow_engine::HostId;
use freeflow_protocol::peer::{FEATURE_SHARDS, PEER_PROTOCOL, PeerMessage};
use freeflow_protocol::version::Offer;
use freeflow_verbs::Instant;

const H: HostId = HostId(1);
const NOW: Instant = Instant(1_000_000_000_000);

/// A router with so many engines that has heard a greeting, and what it did then.
fn greeted(shard_count: u8, features: u64) -> (State, Vec<Output>) {
    let mut state = State::new(NOW, file(false), 5);
    state.set_shards(shard_count);
    state.handle_connected(NOW, H, 50);
    while state.poll_output().is_some() {}
    let (offer, host) = (Offer { features, ..PEER_PROTOCOL }, "h1".into());
    state.handle_message(NOW, 50, PeerMessage::Hello { offer, host, epoch: 9, icrc_wanted: true }, true);
    let done = std::iter::from_fn(|| state.poll_output()).collect();
    (state, done)
}

#[test]
fn a_router_says_first_how_many_engines_it_has() {
    for (count, features, says) in
        [(1, FEATURE_SHARDS, None), (4, FEATURE_SHARDS, Some(4)), (4, PEER_PROTOCOL.features & !FEATURE_SHARDS, None)]
    {
        let (_, done) = greeted(count, features);
        let sent: Vec<_> = (done.iter())
            .filter_map(|output| match output {
                Output::Send(50, message) => Some(message.clone()),
                _ => None,
            })
            .collect();
        let expected = says.map(|count| PeerMessage::Shards { count });
        assert_eq!(sent.first().filter(|first| matches!(first, PeerMessage::Shards { .. })), expected.as_ref());
        assert!(!sent.iter().skip(1).any(|message| matches!(message, PeerMessage::Shards { .. })), "{sent:?}");
    }
}

#[test]
fn only_numbers_of_engines_are_believed() {
    for (count, features, is_good) in [
        (1, true, true),
        (2, true, true),
        (8, true, true),
        (0, true, false),
        (3, true, false),
        (16, true, false),
        (2, false, false),
    ] {
        let features = if features { PEER_PROTOCOL.features } else { PEER_PROTOCOL.features & !FEATURE_SHARDS };
        let (mut state, _) = greeted(1, features);
        state.handle_message(NOW, 50, PeerMessage::Shards { count }, true);
        let done: Vec<_> = std::iter::from_fn(|| state.poll_output()).collect();
        let update = Output::Update(Update::Shards { host: H, count });
        assert_eq!(done.contains(&update), is_good, "{count}: {done:?}");
        let refused = done.contains(&Output::Close(50));
        assert_eq!(refused, !is_good, "{count}: {done:?}");
    }
}

#[test]
fn a_sealed_router_with_several_engines_requires_that_others_know_of_them() {
    for (sealed, count, requires) in [(false, 4, false), (true, 1, false), (true, 4, true)] {
        let mut state = State::new(NOW, file(sealed), 5);
        state.set_shards(count);
        state.handle_connected(NOW, H, 50);
        let required = std::iter::from_fn(|| state.poll_output()).find_map(|output| match output {
            Output::Send(50, PeerMessage::Hello { offer, .. }) => Some(offer.required_features & FEATURE_SHARDS != 0),
            _ => None,
        });
        assert_eq!(required, Some(requires), "sealed {sealed}, {count} engines");
    }
}
