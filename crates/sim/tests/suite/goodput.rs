//! Goodput over loss and round-trip time: a change of the table is a decision. `FREEFLOW_UPDATE=1` writes it again.
use freeflow_sim::goodput;
use std::path::Path;

#[test]
fn goodput_is_as_reviewed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goodput.txt");
    let updates = std::env::var_os("FREEFLOW_UPDATE").is_some();
    if updates || std::env::var_os("FREEFLOW_TEST_FULL").is_some() {
        let table = goodput::table();
        if updates {
            std::fs::write(&path, &table).expect("the table is writable");
        }
        assert_reviewed(&path, |reviewed| table == reviewed, &table);
        return;
    }
    // The windows of long ways are simulated in `make test-full`.
    for part in [goodput::short_windows(), goodput::crowds()] {
        assert_reviewed(&path, |reviewed| reviewed.contains(&part), &part);
    }
}

fn assert_reviewed(path: &Path, is_as_now: impl Fn(&str) -> bool, now: &str) {
    let reviewed = std::fs::read_to_string(path).expect("tests/goodput.txt is there");
    assert!(is_as_now(&reviewed), "now:\n{now}\nreviewed:\n{reviewed}\nif it is meant: FREEFLOW_UPDATE=1");
}
