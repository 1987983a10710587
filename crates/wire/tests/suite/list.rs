//! Checked-in lists.
use std::path::Path;

/// Compares with a list in `tests/`, or writes it.
pub fn compare(name: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    if std::env::var_os("FREEFLOW_UPDATE").is_some() {
        std::fs::write(&file, text).unwrap();
    }
    let list = std::fs::read_to_string(&file).unwrap_or_default();
    for (number, (line, expected)) in text.lines().zip(list.lines()).enumerate() {
        assert_eq!(line, expected, "{name}, line {}; if it is meant: FREEFLOW_UPDATE=1", number + 1);
    }
    assert_eq!(text.lines().count(), list.lines().count(), "{name}: lines; if it is meant: FREEFLOW_UPDATE=1");
}
