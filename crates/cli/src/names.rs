//! Names and ids for containers whose user gave none.

use crate::failure::{Context, Result};

const ADJECTIVES: [&str; 64] = [
    "able", "amber", "bold", "brave", "bright", "brisk", "calm", "clear", "clever", "cosmic", "crisp", "deft", "eager",
    "early", "fair", "fast", "fine", "firm", "fleet", "fond", "free", "fresh", "gentle", "glad", "golden", "grand",
    "happy", "hardy", "honest", "humble", "jolly", "keen", "kind", "late", "light", "lively", "loyal", "lucid",
    "lucky", "mellow", "merry", "mild", "modest", "neat", "nimble", "noble", "plain", "polite", "prime", "proud",
    "quick", "quiet", "rapid", "ready", "sharp", "silent", "smart", "solid", "steady", "sunny", "swift", "tidy",
    "warm", "wise",
];

const NOUNS: [&str; 64] = [
    "alder", "anchor", "aspen", "badger", "bay", "beacon", "birch", "bridge", "brook", "cedar", "cloud", "comet",
    "coral", "crane", "creek", "delta", "dune", "eagle", "falcon", "ferry", "finch", "fjord", "forest", "fox",
    "glacier", "harbor", "hawk", "hazel", "heron", "hill", "island", "ivy", "juniper", "kite", "lake", "lark",
    "linden", "lynx", "maple", "marten", "meadow", "moon", "oak", "orchid", "osprey", "otter", "pebble", "pine",
    "plover", "prairie", "raven", "reef", "ridge", "river", "robin", "rowan", "sparrow", "spruce", "stone", "stream",
    "swan", "thistle", "tide", "willow",
];

/// A pair of words; with `longer` a number as well, for the case that pairs keep colliding.
pub fn word_pair(longer: bool) -> Result<String> {
    let mut bytes = [0; 4];
    fill_random(&mut bytes)?;
    let pair = format!("{}-{}", ADJECTIVES[usize::from(bytes[0] % 64)], NOUNS[usize::from(bytes[1] % 64)]);
    Ok(if longer { format!("{pair}-{}", u16::from_le_bytes([bytes[2], bytes[3]])) } else { pair })
}

/// Twelve hex digits.
pub fn id() -> Result<String> {
    digits::<6>()
}

/// Hex digits, two for each byte.
pub fn digits<const BYTES: usize>() -> Result<String> {
    let mut bytes = [0; BYTES];
    fill_random(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn fill_random(bytes: &mut [u8]) -> Result<()> {
    let wanted = bytes.len();
    let got = rustix::rand::getrandom(bytes, rustix::rand::GetRandomFlags::empty()).context("no random numbers")?;
    assert_eq!(got, wanted, "getrandom gives up to 256 bytes whole");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_valid_and_vary() {
        let names: std::collections::BTreeSet<String> = (0..50).map(|_| word_pair(true).unwrap()).collect();
        assert!(names.len() > 40);
        for name in names {
            crate::record::check_name(&name).unwrap();
        }
        assert_eq!(id().unwrap().len(), 12);
    }
}
