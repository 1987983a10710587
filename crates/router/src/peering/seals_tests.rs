//! Sealed and plain hosts: who agrees with whom, and how keys travel.
use super::file::{KEY_BYTES, PeerEntry, PeersFile};
use super::handle::SealMessage;
use super::state::{Note, Output, State, Why};
use super::update::Update;
use freeflow_engine::HostId;
use freeflow_protocol::peer::{FEATURE_FRAMES, FEATURE_SEALED, PEER_PROTOCOL, PeerMessage, SealSecret};
use freeflow_protocol::version::Offer;
use freeflow_verbs::Instant;

const H: HostId = HostId(1);
const NOW: Instant = Instant(1_000_000_000_000);

/// h2, which h1 dials.
pub(super) fn file(sealed: bool) -> PeersFile {
    let address = |number: u8| format!("192.0.2.{number}").parse().unwrap();
    PeersFile {
        host: "h2".into(),
        address: address(2),
        control_port: 4790,
        key_file: "key".into(),
        icrc: true,
        frames: true,
        sealed,
        peers: vec![PeerEntry {
            host: "h1".into(),
            address: address(1),
            control_port: 4790,
            public_key: [1; KEY_BYTES],
            prefixes: ["10.111.1.0/24".parse().unwrap()].into_iter().collect(),
        }],
        external: Vec::new(),
        dscp: 0,
    }
}

/// Everything that it wants done.
fn outputs(state: &mut State) -> Vec<Output> {
    std::iter::from_fn(|| state.poll_output()).collect()
}

/// A host that has heard this greeting, and what it did then.
fn greeted(sealed: bool, features: u64, required_features: u64) -> (State, Vec<Output>) {
    let mut state = State::new(NOW, file(sealed), 5);
    state.handle_connected(NOW, H, 50);
    outputs(&mut state);
    let (offer, host) = (Offer { features, required_features, ..PEER_PROTOCOL }, "h1".into());
    state.handle_message(NOW, 50, PeerMessage::Hello { offer, host, epoch: 9, icrc_wanted: true }, true);
    let done = outputs(&mut state);
    (state, done)
}

fn secret() -> SealSecret {
    SealSecret { key: [7; 16], base: [8; 12] }
}

fn key(id: u32) -> PeerMessage {
    PeerMessage::SealKey { id, in_use: Some(3), secret: secret() }
}

#[test]
fn a_sealed_host_offers_and_requires_nothing_less() {
    for sealed in [false, true] {
        let mut state = State::new(NOW, file(sealed), 5);
        state.handle_connected(NOW, H, 50);
        let bit = if sealed { FEATURE_SEALED } else { 0 };
        let is_it = |output: &Output| {
            matches!(output, Output::Send(50, PeerMessage::Hello { offer, .. })
                if offer.features & FEATURE_SEALED == bit && offer.required_features == bit)
        };
        assert!(outputs(&mut state).iter().any(is_it), "{sealed}");
    }
}

#[test]
fn hosts_of_different_kinds_agree_on_nothing_and_the_reason_is_kept() {
    for (here, features, required, comes_up) in [
        (true, FEATURE_FRAMES | FEATURE_SEALED, FEATURE_SEALED, true),
        (false, FEATURE_FRAMES, 0, true),
        // A release before this one, and a host that is configured plain.
        (true, FEATURE_FRAMES, 0, false),
        (true, 0, 0, false),
        (false, FEATURE_FRAMES | FEATURE_SEALED, FEATURE_SEALED, false),
    ] {
        let (mut state, done) = greeted(here, features, required);
        let is_up = |output: &Output| matches!(output, Output::Update(Update::HostUp { .. }));
        assert_eq!(done.iter().any(is_up), comes_up, "{here} {features:#x} {required:#x}");
        let why = (!comes_up).then_some(Why::Seal { here });
        let noted = why.map(|why| Output::Note("h1".into(), Note::Down(why)));
        assert!(noted.is_none_or(|noted| done.contains(&noted)), "it is logged");
        assert_eq!(state.statuses()[0].problem, why);
        assert_eq!(state.statuses()[0].sealed, here);
        // The next connection ends before a word is said: why none came up is known still.
        state.handle_connected(NOW, H, 51);
        state.handle_disconnected(NOW, 51, super::state::Ending::Closed);
        assert_eq!(state.statuses()[0].problem, why.or(Some(Why::Ended)), "{here}");
    }
}

#[test]
fn both_reasons_name_the_field_of_the_peers_file() {
    for here in [false, true] {
        assert!(Why::Seal { here }.to_string().contains("\"wire\" in both peers files"));
    }
}

#[test]
fn keys_go_to_and_come_from_hosts_that_are_up() {
    let (mut state, _) = greeted(true, FEATURE_SEALED, FEATURE_SEALED);
    state.handle_message(NOW, 50, key(5), true);
    state.handle_message(NOW, 50, PeerMessage::SealKeyHeld { id: 6 }, true);
    let updates =
        [Update::SealKey { host: H, id: 5, in_use: Some(3), secret: secret() }, Update::SealKeyHeld { host: H, id: 6 }];
    assert_eq!(outputs(&mut state), updates.map(Output::Update));
    state.send_seal(H, SealMessage::Key { id: 5, in_use: Some(3), secret: secret() });
    state.send_seal(H, SealMessage::Held { id: 6 });
    let messages = [key(5), PeerMessage::SealKeyHeld { id: 6 }];
    assert_eq!(outputs(&mut state), messages.map(|message| Output::Send(50, message)));
    state.handle_disconnected(NOW, 50, super::state::Ending::Closed);
    outputs(&mut state);
    state.send_seal(H, SealMessage::Held { id: 6 });
    assert_eq!(outputs(&mut state), []);
}

#[test]
fn a_key_where_none_was_agreed_on_is_nonsense() {
    for (sealed, message) in [(false, key(5)), (false, PeerMessage::SealKeyHeld { id: 5 }), (true, key(1 << 24))] {
        let offered = if sealed { FEATURE_SEALED } else { 0 };
        let (mut state, _) = greeted(sealed, offered, offered);
        state.handle_message(NOW, 50, message, true);
        assert!(outputs(&mut state).contains(&Output::Close(50)), "{sealed}");
        assert_eq!(state.statuses()[0].problem, Some(Why::Nonsense));
        // A plain host sends none, either.
        state.send_seal(H, SealMessage::Held { id: 6 });
        assert_eq!(outputs(&mut state), []);
    }
}

#[test]
fn another_setting_takes_effect_with_a_new_connection() {
    let (mut state, _) = greeted(false, FEATURE_FRAMES, 0);
    state.handle_reload(NOW, file(true));
    let done = outputs(&mut state);
    assert!(done.contains(&Output::Close(50)));
    let seals = |output: &Output| matches!(output, Output::Update(Update::Settings(settings)) if settings.sealed);
    assert!(done.iter().any(seals), "the worker sends nothing plain from here on");
}
