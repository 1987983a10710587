//! Making arenas and giving them back: which segment stands for which addresses.
use crate::kept_descriptor::{KeptDescriptor, kept_count_max};
use crate::page_moves::{self, MOVE_BYTES_MAX};
use crate::process_map::{Area, ProcessMap};
use crate::ranges::PAGE_BYTES;
use crate::table::{Arena, EXCLUSIVE_ARENA_COUNT_MAX, ExclusiveArenas, Table};
use freeflow_client::{Handle, Session};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Arenas begin and end at multiples of this, bytes.
const ARENA_BYTES: u64 = 16 << 20;
/// Or of this, where memory is mapped in small areas far from each other, of which there are many.
const SMALL_ARENA_BYTES: u64 = 256 << 10;
/// Arenas with less than [`SMALL_ARENA_BYTES`] in them before others are small. A segment counts with
/// all its bytes against the vNIC's limit.
const SPARSE_COUNT_MAX: usize = 32;
/// Empty arenas that are kept for later, none larger than [`ARENA_BYTES`].
const SPARE_COUNT_MAX: usize = 2;

/// Pages of many regions come into a shared arena, which must not be granted to a peer. The router
/// grants no segment of which a part was taken back: so none of this one.
fn keep_from_peers(session: &Session, arena: &Arena) -> bool {
    let start = arena.mirror.addr() as u64;
    let page = start..start + PAGE_BYTES;
    session.map_part(arena.segment, 0, page.clone()).is_ok() && session.unmap_part(page).is_ok()
}

impl Table {
    /// The exclusive arena for the page at `from`; `None`: there are too many, or nothing is
    /// granted here.
    pub(super) fn exclusive_arena_for(
        &mut self,
        session: &Arc<Session>,
        from: u64,
        exclusive: &mut ExclusiveArenas,
    ) -> Option<usize> {
        let current = self.arenas.iter().position(|arena| Some(arena.number) == exclusive.arena);
        if current.is_some_and(|at| self.arenas[at].stretch().contains(&from)) {
            return current;
        }
        if self.arenas.iter().filter(|arena| arena.is_exclusive).count() >= EXCLUSIVE_ARENA_COUNT_MAX
            || !self.receives_commands(session)
        {
            return None;
        }
        let at = self.create_arena(session, from, exclusive.end.min(from + MOVE_BYTES_MAX) - from, true)?;
        exclusive.arena = Some(self.arenas[at].number);
        Some(at)
    }

    /// The arena for many that has a place for the first of these pages; a new one if need be.
    pub(super) fn shared_arena_for(
        &mut self,
        session: &Session,
        maps: &ProcessMap,
        range: Range<u64>,
    ) -> Option<usize> {
        let serial = session.serial();
        let (mut after, mut before) = (0, u64::MAX);
        for (at, arena) in
            self.arenas.iter().enumerate().filter(|(_, arena)| arena.serial == serial && !arena.is_exclusive)
        {
            if !arena.is_closed && arena.stretch().contains(&range.start) {
                return Some(at);
            }
            if arena.remapped_bytes > 0 && !arena.is_closed {
                let stretch = arena.stretch();
                after = if stretch.end <= range.start { after.max(stretch.end) } else { after };
                before = if stretch.start > range.start { before.min(stretch.start) } else { before };
            }
        }
        let unit = self.arena_bytes_at(serial, maps, range.start);
        let base = (range.start & !(unit - 1)).max(after);
        let bytes = range.end.min(before).next_multiple_of(unit).min(before) - base;
        // An empty arena may stand for other addresses.
        let spare = |arena: &&mut Arena| {
            let is_free = !arena.is_closed && !arena.is_exclusive && arena.remapped_bytes == 0;
            arena.serial == serial && is_free && arena.bytes >= bytes
        };
        if let Some(arena) = self.arenas.iter_mut().find(spare) {
            (arena.base, arena.stretch_bytes) = (base, arena.bytes.min(before - base));
            let number = arena.number;
            return self.arenas.iter().position(|arena| arena.number == number);
        }
        self.create_arena(session, base, bytes, false).or_else(|| {
            // A limit may leave room for what is needed alone.
            let bytes = range.end.min(range.start + MOVE_BYTES_MAX).min(before) - range.start;
            self.create_arena(session, range.start, bytes, false)
        })
    }

    /// The multiple at which a new shared arena begins and ends.
    fn arena_bytes_at(&self, serial: u64, maps: &ProcessMap, address: u64) -> u64 {
        let is_sparse = |arena: &&Arena| {
            arena.serial == serial && arena.bytes >= ARENA_BYTES && arena.remapped_bytes < SMALL_ARENA_BYTES
        };
        if self.arenas.iter().filter(is_sparse).count() < SPARSE_COUNT_MAX {
            return ARENA_BYTES;
        }
        let start = address & !(ARENA_BYTES - 1);
        let covers = |area: Area| area.start <= start && start + ARENA_BYTES <= area.end;
        if maps.area_at(address).is_some_and(covers) { ARENA_BYTES } else { SMALL_ARENA_BYTES }
    }

    fn create_arena(&mut self, session: &Session, base: u64, bytes: u64, is_exclusive: bool) -> Option<usize> {
        let (segment, _, descriptor) = session.create_segment(bytes).ok()?;
        let made = self.add_arena(session, segment, descriptor.as_fd(), base..base + bytes, is_exclusive);
        let Some(at) = made else {
            let _ = session.destroy_segment(segment);
            return None;
        };
        // Whether commands come or not: peers' rights to some of it are not others' to all of
        // it.
        if !is_exclusive && !keep_from_peers(session, &self.arenas[at]) {
            self.arenas[at].is_closed = true;
            self.tidy(session);
            return None;
        }
        Some(at)
    }

    /// Maps a segment for the library's own use, as the arena of these addresses.
    pub(super) fn add_arena(
        &mut self,
        session: &Session,
        segment: Handle,
        descriptor: BorrowedFd<'_>,
        stretch: Range<u64>,
        is_exclusive: bool,
    ) -> Option<usize> {
        let bytes = stretch.end - stretch.start;
        let mirror = page_moves::map_mirror(descriptor, bytes as usize)?;
        let address = mirror.addr() as u64;
        let area = ProcessMap::open().and_then(|maps| maps.area_at(address));
        let Some(Area { file, .. }) = area else {
            // SAFETY: mapped just now.
            unsafe { page_moves::unmap_mirror(mirror, bytes as usize) };
            return None;
        };
        // Partial pages are more often in shared arenas.
        let count_max = if is_exclusive { kept_count_max() / 2 } else { kept_count_max() };
        let count = self.arenas.iter().filter(|arena| arena.descriptor.is_some()).count();
        let kept = (count < count_max).then(|| KeptDescriptor::of(descriptor)).flatten();
        self.last_number += 1;
        self.arenas.push(Arena {
            number: self.last_number,
            serial: session.serial(),
            segment,
            base: stretch.start,
            stretch_bytes: bytes,
            bytes,
            mirror,
            file,
            remapped_bytes: 0,
            is_closed: false,
            is_exclusive,
            is_shown_elsewhere: false,
            descriptor: kept,
        });
        Some(self.arenas.len() - 1)
    }

    /// Gives back arenas in which nothing is remapped, but for a few.
    pub fn tidy(&mut self, session: &Session) {
        let mut spares = 0;
        let mut at = 0;
        while at < self.arenas.len() {
            let arena = &self.arenas[at];
            let is_ours = arena.serial == session.serial() && !session.is_dead();
            let is_useful = is_ours && !arena.is_closed && !arena.is_exclusive;
            let is_shown = arena.remapped_bytes > 0 || arena.is_shown_elsewhere;
            let keep = is_shown || (is_useful && arena.bytes <= ARENA_BYTES && spares < SPARE_COUNT_MAX);
            if keep {
                spares += usize::from(!is_shown);
                at += 1;
                continue;
            }
            let arena = self.arenas.swap_remove(at);
            // SAFETY: nothing is remapped, so nothing is copied from or to it any more.
            unsafe { arena.unmap() };
            if is_ours {
                let _ = session.destroy_segment(arena.segment);
            }
        }
    }
}
