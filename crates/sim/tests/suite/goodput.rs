//! Goodput over loss and round-trip time: a change of the table is a decision. `FREEFLOW_UPDATE=1` writes it again.
use std::path::Path;

#[test]
fn goodput_is_as_reviewed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goodput.txt");
    let table = freeflow_sim::goodput::table();
    if std::env::var_os("FREEFLOW_UPDATE").is_some() {
        std::fs::write(&path, &table).expect("the table is writable");
    }
    let reviewed = std::fs::read_to_string(&path).expect("tests/goodput.txt is there");
    assert!(table == reviewed, "now:\n{table}\nreviewed:\n{reviewed}\nif it is meant: FREEFLOW_UPDATE=1");
}
