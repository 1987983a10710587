//! The machine-wide file of pollers: how many threads poll under each router of this machine, so that all of them keep
//! the waiting rule together.
//!
//! The file holds [`SLOT_COUNT`] slots of 32 bytes: owner (u64, random), count (u32), zero (u32),
//! time (u64, CLOCK_MONOTONIC ns), zero. A slot whose time is older than [`STALE`] counts nothing
//! and can be taken by anyone; a router that polls renews its own every tenth of a second. Two
//! routers that take the same slot at once see it at their next renewal: the one that does not find
//! its own number there takes another. Only routers (root) can open the file; what it says is
//! advice.
use freeflow_verbs::{Duration, Instant};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

const SLOT_BYTES: usize = 32;
const SLOT_COUNT: usize = 64;
const STALE: Duration = Duration::from_millis(1000);
/// More than this from one router is not believed.
const COUNT_MAX: u32 = 4096;

pub struct Pollers {
    /// Absent: this router knows only itself.
    file: Option<File>,
    owner: u64,
    slot: Option<usize>,
    published: u32,
    elsewhere: u32,
}

impl Pollers {
    /// In `directory`, which is made if it is not there. `owner` is random and not 0.
    pub fn open(directory: &Path, owner: u64) -> io::Result<Self> {
        std::fs::create_dir_all(directory)?;
        let path = directory.join("pollers");
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        Ok(Self { file: Some(file), ..Self::alone(owner) })
    }

    /// Without a file.
    pub fn alone(owner: u64) -> Self {
        Self { file: None, owner, slot: None, published: 0, elsewhere: 0 }
    }

    /// Pollers under the other routers, as last seen.
    pub fn elsewhere(&self) -> u32 {
        self.elsewhere
    }

    /// Whether this router's count is in the file and wants to be taken back before it sleeps for long.
    pub fn is_counted(&self) -> bool {
        self.published > 0
    }

    /// Reads what the others say, and says how many poll here.
    pub fn publish(&mut self, count: u32, now: Instant) {
        let Some(file) = &self.file else { return };
        let mut bytes = [0; SLOT_BYTES * SLOT_COUNT];
        let mut filled = 0;
        while let Ok(read) = file.read_at(&mut bytes[filled..], filled as u64)
            && read > 0
        {
            filled += read;
        }
        let slots: Vec<Slot> = bytes.chunks_exact(SLOT_BYTES).map(Slot::decode).collect();
        let elsewhere = slots.iter().filter(|slot| slot.owner != self.owner && slot.is_fresh(now));
        self.elsewhere = elsewhere.map(|slot| slot.count.min(COUNT_MAX)).sum();
        if count == 0 && self.published == 0 {
            return;
        }
        if self.slot.is_none_or(|at| slots[at].owner != self.owner) {
            self.slot = slots.iter().position(|slot| !slot.is_fresh(now));
        }
        let Some(at) = self.slot else { return };
        let own = Slot { owner: self.owner, count, time: now };
        if file.write_all_at(&own.encode(), (at * SLOT_BYTES) as u64).is_ok() {
            self.published = count;
        }
    }
}

struct Slot {
    owner: u64,
    count: u32,
    time: Instant,
}

impl Slot {
    fn decode(bytes: &[u8]) -> Self {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        Self { owner: word(0), count: word(8) as u32, time: Instant(word(16)) }
    }

    fn encode(&self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        bytes[..8].copy_from_slice(&self.owner.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.count.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.time.0.to_le_bytes());
        bytes
    }

    /// Times from the future are of another boot.
    fn is_fresh(&self, now: Instant) -> bool {
        self.owner != 0 && self.time <= now + STALE && now - self.time < STALE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routers_see_each_other_until_they_fall_silent() {
        let directory = std::env::temp_dir().join(format!("ff-pollers-{}", std::process::id()));
        // A killed run with this number may have left one.
        let _ = std::fs::remove_dir_all(&directory);
        let (mut a, mut b) = (Pollers::open(&directory, 1).unwrap(), Pollers::open(&directory, 2).unwrap());
        let at = |ms: u64| Instant(1_000_000_000_000) + Duration::from_millis(ms);
        a.publish(3, at(0));
        b.publish(2, at(10));
        a.publish(3, at(100));
        assert_eq!((a.elsewhere(), b.elsewhere()), (2, 3));
        assert!(a.is_counted());
        a.publish(0, at(200));
        b.publish(2, at(210));
        assert_eq!(b.elsewhere(), 0);
        assert!(!a.is_counted());
        a.publish(1, at(1500));
        assert_eq!(a.elsewhere(), 0);
        // a may have taken b's slot; then b finds another.
        b.publish(2, at(1510));
        a.publish(1, at(1520));
        assert_eq!((a.elsewhere(), b.elsewhere()), (2, 1));
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
