//! How many vNICs a host may have: each takes a directory with some 130 files in the run directory,
//! in use or only declared, and its file system (`/run`) is the whole machine's.
use rustix::fs::statvfs;
use std::path::Path;

/// vNICs of a host at a time.
const COUNT_MAX: usize = 16_384;
/// Inodes of one vNIC: files and directories of its sysfs, its socket; a page for each, and as much
/// for directories.
const VNIC_INODES: u64 = 160;
const VNIC_BYTES: u64 = 640 << 10;
/// Inodes that vNICs leave to others, or a quarter of the file system where that is less.
const RESERVE_INODES: u64 = 8192;
const RESERVE_BYTES: u64 = 64 << 20;

/// Size of a file system, and how much of it is free. A total of 0 is no limit.
#[derive(Clone, Copy, Debug)]
struct Room {
    total: u64,
    free: u64,
}

impl Room {
    fn is_enough(self, wanted: u64, reserve: u64) -> bool {
        self.total == 0 || self.free >= wanted.saturating_add(reserve.min(self.total / 4))
    }
}

/// Whether there is room for new vNICs beside those that are present; else why not.
pub fn check(run_dir: &Path, present: usize, new: usize) -> Result<(), String> {
    let Ok(stat) = statvfs(run_dir) else { return check_count(present, new) };
    let inodes = Room { total: stat.f_files, free: stat.f_favail };
    let block = stat.f_frsize;
    let bytes = Room { total: stat.f_blocks.saturating_mul(block), free: stat.f_bavail.saturating_mul(block) };
    check_count(present, new)?;
    check_room(new, inodes, bytes).map_err(|what| {
        format!(
            "the file system of {} has too {what} for {new} more vNICs; delete vNICs, or make room",
            run_dir.display()
        )
    })
}

fn check_count(present: usize, new: usize) -> Result<(), String> {
    if present.saturating_add(new) > COUNT_MAX {
        return Err(format!("limit reached: {COUNT_MAX} vNICs on a host ({present} present, {new} more)"));
    }
    Ok(())
}

fn check_room(new: usize, inodes: Room, bytes: Room) -> Result<(), String> {
    let new = new as u64;
    if !inodes.is_enough(new * VNIC_INODES, RESERVE_INODES) {
        return Err(format!("few inodes ({} are free)", inodes.free));
    }
    if !bytes.is_enough(new * VNIC_BYTES, RESERVE_BYTES) {
        return Err(format!("little room ({} KiB are free)", bytes.free >> 10));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_keep_their_room() {
        let unlimited = Room { total: 0, free: 0 };
        let bytes = |free| Room { total: 1 << 30, free };
        let inodes = |free| Room { total: 1 << 20, free };
        assert!(check_room(1000, unlimited, unlimited).is_ok());
        assert!(check_room(1, unlimited, bytes(RESERVE_BYTES + VNIC_BYTES)).is_ok());
        assert!(check_room(1, unlimited, bytes(RESERVE_BYTES + VNIC_BYTES - 1)).unwrap_err().contains("little room"));
        assert!(check_room(2, unlimited, bytes(RESERVE_BYTES + VNIC_BYTES)).is_err());
        assert!(check_room(1, inodes(RESERVE_INODES + VNIC_INODES), unlimited).is_ok());
        assert!(check_room(1, inodes(RESERVE_INODES), unlimited).unwrap_err().contains("few inodes"));
        // A small file system keeps a quarter.
        assert!(check_room(1, unlimited, Room { total: 4 << 20, free: 2 << 20 }).is_ok());
        assert!(check_room(2, unlimited, Room { total: 4 << 20, free: 2 << 20 }).is_err());
    }

    #[test]
    fn there_is_a_limit_to_their_number() {
        assert!(check_count(COUNT_MAX - 1, 1).is_ok());
        assert!(check_count(COUNT_MAX, 1).unwrap_err().contains("16384"));
    }
}
