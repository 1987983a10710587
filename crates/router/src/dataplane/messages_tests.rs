//! Messages between the planes are a checked-in list: a difference there is a decision.
use crate::dataplane::command::COMMANDS;
use crate::dataplane::event::EVENTS;

const LIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/dataplane/messages.txt");

#[test]
fn messages_are_those_that_are_listed() {
    let commands = COMMANDS.iter().map(|(whose, name, answer)| format!("command of {whose}: {name} -> {answer}\n"));
    let events = EVENTS.iter().map(|name| format!("event: {name}\n"));
    let list: String = commands.chain(events).collect();
    if std::env::var_os("FREEFLOW_UPDATE").is_some() {
        std::fs::write(LIST, &list).unwrap();
    }
    assert_eq!(
        std::fs::read_to_string(LIST).unwrap(),
        list,
        "FREEFLOW_UPDATE=1 writes it again; review the difference"
    );
}
