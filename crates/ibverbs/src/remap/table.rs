//! The bookkeeping of one process: zones, what lies in them, which regions touch what.
use super::PAGE_BYTES;
use super::areas::{Area, Identity, Maps};
use super::moving::{self, Move, Others, WINDOW_BYTES};
use super::stale::{ALL, check, outside};
use super::{orders, touched};
use freeflow_client::{Handle, Ranges, Session, TouchCounts};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

/// Zones begin and end at multiples of this, bytes.
const ZONE_BYTES: u64 = 16 << 20;
/// Empty zones that are kept for later, none larger than [`ZONE_BYTES`].
const SPARE_COUNT_MAX: usize = 2;
/// The kernel's own default of vm.max_map_count.
const MAPPINGS_MAX: u64 = 65_530;
/// A placed range costs up to three areas of the process' map, and half of all are the program's own.
const MAPPINGS_SHARE: u64 = 6;
/// Own zones of a process: each is one more segment for the router. All of one is copied when it is withdrawn, so none is
/// larger than what is moved in one window.
const OWN_ZONE_COUNT_MAX: usize = 512;
/// As many segments as shall be shared again at a time.
const ADVICE_MAX: usize = 2 * OWN_ZONE_COUNT_MAX;
/// Around the stack pointer: what is written while this library runs.
const STACK_BELOW_BYTES: u64 = 256 << 10;
const STACK_ABOVE_BYTES: u64 = 32 << 10;

pub(crate) struct Zone {
    pub(super) number: u32,
    /// Of the session that has it.
    pub(super) serial: u64,
    pub(super) segment: Handle,
    /// The stretch of addresses that it stands for.
    pub(super) base: u64,
    pub(super) stretch_bytes: u64,
    /// All of it, at least the stretch.
    pub(super) bytes: u64,
    pub(super) alias: *mut u8,
    pub(super) file: Identity,
    pub(super) placed_bytes: u64,
    /// Private copies of its pages are about ([`moving::make_private`]): what they throw away must be zero in the file,
    /// so nothing more is placed here.
    pub(super) is_closed: bool,
    /// It holds pages of one registration only, and may be granted to peers.
    pub(super) is_own: bool,
    /// The program moved pages of it to other addresses, which could not be made private there. It is closed then.
    pub(super) is_shown_elsewhere: bool,
}

// SAFETY: the alias belongs to no thread; what lies behind it is reached as raw bytes, under the table's lock.
unsafe impl Send for Zone {}

impl Zone {
    fn stretch(&self) -> Range<u64> {
        self.base..self.base + self.stretch_bytes
    }

    /// Where in the zone the page of an address is.
    pub(super) fn offset_at(&self, address: u64) -> u64 {
        address - self.base
    }

    /// Where a page's place in the zone is mapped.
    pub fn alias_of(&self, address: u64) -> *mut u8 {
        self.alias.wrapping_add(self.offset_at(address) as usize)
    }

    /// Whether this area shows pages of the zone, and is not the library's own mapping of it.
    pub fn is_shown_in(&self, area: &Area) -> bool {
        let own = self.alias.addr() as u64..self.alias.addr() as u64 + self.bytes;
        area.shared && area.file == self.file && (area.end <= own.start || own.end <= area.start)
    }

    /// Whether this area shows, at `address`, the page that belongs there.
    pub fn is_at(&self, area: &Area, address: u64) -> bool {
        area.shared && self.file == area.file && area.offset + (address - area.start) == address - self.base
    }

    /// Whether an area shows, at an address in a piece's target, the page that the piece's alias has for it.
    pub(super) fn is_shown(&self) -> impl Fn(&Move, &Area, u64) -> bool {
        move |piece, area, address| self.shows(piece, area, address)
    }

    pub(super) fn shows(&self, piece: &Move, area: &Area, address: u64) -> bool {
        let offset = self.offset_of(piece) + (address - piece.target);
        area.shared && self.file == area.file && area.offset + (address - area.start) == offset
    }

    /// Where in the zone a piece begins.
    pub(super) fn offset_of(&self, piece: &Move) -> u64 {
        piece.alias.addr() as u64 - self.alias.addr() as u64
    }

    pub fn alias(&self) -> (*mut u8, usize) {
        (self.alias, self.bytes as usize)
    }
}

#[derive(Default)]
pub(crate) struct Table {
    /// Of the process: a child of `fork` begins with an empty table.
    generation: u32,
    pub(super) touches: TouchCounts,
    /// By owner, start and length; how often.
    pub(super) regions: BTreeMap<(usize, u64, u64), u32>,
    /// The session of each owner that has regions.
    pub(super) owners: BTreeMap<usize, u64>,
    /// The number is the zone's.
    pub(super) placed: Ranges,
    pub(super) zones: Vec<Zone>,
    last_number: u32,
    /// Something is placed that no region touches: it could not be taken back when it should have been.
    pub(super) owed: bool,
    /// Private copies of a zone's pages ([`moving::make_private`]), and their files.
    pub(super) copies: Ranges,
    pub(super) copied: Vec<Copied>,
    /// The sessions whose orders were asked for, and whether they come.
    orders: BTreeMap<u64, bool>,
    /// Segments that shall be shared again, by session.
    advice: VecDeque<(u64, Handle)>,
}

/// A zone of which there are private copies.
pub(super) struct Copied {
    pub number: u32,
    /// Of the session that had it, and what that called it.
    pub serial: u64,
    pub segment: Handle,
    pub file: Identity,
    /// Peers may have it mapped still.
    pub is_exposed: bool,
}

/// Where a registration's pages go that shall lie apart.
pub(super) struct Apart {
    /// Of all that is placed.
    end: u64,
    /// The own zone that was made last.
    zone: Option<u32>,
}

impl Apart {
    pub fn until(end: u64) -> Self {
        Self { end, zone: None }
    }
}

/// What [`Table::forget_gone`] gave, and the map of the process, if it is open already.
pub(super) type Known = (Vec<Range<u64>>, Option<Maps>);

/// What is moved into zones.
#[derive(Clone, Copy)]
pub(super) enum Pages {
    /// Of a region that the router does not know yet.
    Unknown,
    /// Private copies of this file's, which regions touch.
    Copies(Identity),
}

impl Pages {
    fn others(self) -> Others {
        match self {
            Self::Unknown => Others::Threads,
            Self::Copies(_) => Others::Router,
        }
    }
}

fn runs_max() -> u64 {
    static MAX: OnceLock<u64> = OnceLock::new();
    *MAX.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        text.trim().parse().unwrap_or(MAPPINGS_MAX) / MAPPINGS_SHARE
    })
}

/// What is written while this library runs: no page of it is moved.
pub(super) fn stack_in_use() -> Range<u64> {
    let here = 0_u8;
    let here = (&raw const here).addr() as u64;
    here.saturating_sub(STACK_BELOW_BYTES) & !(PAGE_BYTES - 1)..(here + STACK_ABOVE_BYTES) & !(PAGE_BYTES - 1)
}

/// An address in the first thread's stack.
fn first_stack() -> u64 {
    // SAFETY: takes a number and gives one.
    unsafe { libc::getauxval(libc::AT_EXECFN) }
}

/// Pages of many regions come into a zone that is not an own one, also when the router could have granted it already. The
/// router grants no segment of which a part was taken back: so never this one.
fn keep_from_peers(session: &Session, zone: &Zone) -> bool {
    let start = zone.alias.addr() as u64;
    let page = start..start + PAGE_BYTES;
    session.map_part(zone.segment, 0, page.clone()).is_ok() && session.unmap_part(page).is_ok()
}

/// `range` without `hole`.
pub(super) fn without(range: Range<u64>, hole: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let before = range.start..range.end.min(hole.start);
    let after = range.start.max(hole.end)..range.end;
    [before, after].into_iter().filter(|piece| piece.start < piece.end)
}

pub(super) fn protection(area: &Area) -> i32 {
    let right = |has, right| if has { right } else { 0 };
    right(area.readable, libc::PROT_READ)
        | right(area.writable, libc::PROT_WRITE)
        | right(area.executable, libc::PROT_EXEC)
}

impl Table {
    pub fn new(generation: u32) -> Self {
        Self { generation, ..Self::default() }
    }

    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether the program sees pages of zones.
    pub fn shows_zones(&self) -> bool {
        self.zones.iter().any(|zone| zone.placed_bytes > 0 || zone.is_shown_elsewhere)
    }

    pub fn zones(&self) -> &[Zone] {
        &self.zones
    }

    pub fn zone(&self, number: u32) -> Option<&Zone> {
        self.zones.iter().find(|zone| zone.number == number)
    }

    /// `serial`: of the owner's session.
    pub fn note(&mut self, serial: u64, owner: usize, start: u64, length: u64) {
        self.owners.insert(owner, serial);
        *self.regions.entry((owner, start, length)).or_default() += 1;
        self.touches.add(touched(start, length));
    }

    /// False: it was not noted.
    pub fn unnote(&mut self, owner: usize, start: u64, length: u64) -> bool {
        let key = (owner, start, length);
        let Some(count) = self.regions.get_mut(&key) else { return false };
        *count -= 1;
        if *count == 0 {
            self.regions.remove(&key);
            if self.regions.range((owner, 0, 0)..=(owner, u64::MAX, u64::MAX)).next().is_none() {
                self.owners.remove(&owner);
            }
        }
        self.touches.remove(touched(start, length));
        true
    }

    pub fn left_by(&self, owner: usize) -> Vec<(u64, u64)> {
        let regions = self.regions.range((owner, 0, 0)..=(owner, u64::MAX, u64::MAX));
        regions.flat_map(|(&(_, start, length), &count)| (0..count).map(move |_| (start, length))).collect()
    }

    // ---- into zones

    /// Places what can be placed of these pages; no region that the router knows of touches what is moved, but those whose
    /// memory is gone: the renewed ones. `apart`: in own zones, if possible.
    pub fn move_in(&mut self, session: &Arc<Session>, pages: Range<u64>, (renewed, maps): Known, apart: bool) {
        if pages.is_empty() || !moving::is_possible() {
            return;
        }
        let Some(maps) = maps.or_else(Maps::open) else { return };
        let mut free = self.left_behind(session, &maps, pages.clone());
        let untouched = self.touches.untouched(pages.clone());
        // What nothing touches any more is among the untouched.
        free.extend(outside(renewed, &pages, &untouched));
        for range in untouched {
            let taken = self.placed.within(range.clone());
            let mut from = range.start;
            for (piece, _) in taken {
                free.push(from..piece.start);
                from = piece.end;
            }
            free.push(from..range.end);
        }
        let mut spots = Vec::new();
        let stack = stack_in_use();
        for range in free {
            for range in without(range, &stack) {
                maps.visit(range.start, range.end, &mut |area| {
                    if self.is_movable(session, area, range.start.max(area.start)) {
                        spots.push(range.start.max(area.start)..range.end.min(area.end));
                    }
                    true
                });
            }
        }
        let end = spots.iter().map(|spot| spot.end).max().unwrap_or(0);
        let mut apart = apart.then_some(Apart::until(end));
        for spot in spots {
            if !self.move_in_spot(session, &maps, Pages::Unknown, spot, &mut apart) {
                return;
            }
        }
    }

    /// Private anonymous memory, as a heap is; what a dead session left in its zones; private copies of such.
    fn is_movable(&self, session: &Session, area: &Area, address: u64) -> bool {
        if !area.readable || !area.writable || area.executable {
            return false;
        }
        if (area.start..area.end).contains(&first_stack()) {
            return false;
        }
        if area.shared {
            let mut zones = self.zones.iter();
            return zones.any(|zone| zone.serial != session.serial() && zone.is_at(area, address));
        }
        area.file == Identity::default() || self.copied.iter().any(|copied| copied.file == area.file)
    }

    pub(super) fn may_move(&self, session: &Session, pages: Pages, area: &Area, address: u64) -> bool {
        let is_it = match pages {
            Pages::Unknown => true,
            Pages::Copies(file) => !area.shared && area.file == file,
        };
        is_it && self.is_movable(session, area, address)
    }

    /// False: no more can be placed now.
    pub(super) fn move_in_spot(
        &mut self,
        session: &Arc<Session>,
        maps: &Maps,
        pages: Pages,
        spot: Range<u64>,
        apart: &mut Option<Apart>,
    ) -> bool {
        let mut from = spot.start;
        while from < spot.end {
            if (self.placed.len() + self.copies.len()) as u64 >= runs_max() {
                return false;
            }
            let own = apart.as_mut().and_then(|apart| self.own_zone_for(session, from, apart));
            if own.is_none() {
                *apart = None;
            }
            let Some(at) = own.or_else(|| self.zone_for(session, from..spot.end)) else { return false };
            let zone = &self.zones[at];
            let end = spot.end.min(zone.stretch().end).min(from + WINDOW_BYTES);
            let bytes = (end - from) as usize;
            let alias = zone.alias_of(from);
            let piece = Move { target: from, alias, bytes, protection: 0, done: false };
            let is_right = |area: &Area, address| self.may_move(session, pages, area, address);
            if !moving::move_in(session, maps, &piece, pages.others(), &is_right) {
                moving::punch(alias, bytes);
                self.tidy(session);
                return false;
            }
            self.settle_in(session, at, from..end);
            from = end;
        }
        true
    }

    /// Takes note of pages that were placed, and tells the router.
    fn settle_in(&mut self, session: &Session, at: usize, range: Range<u64>) {
        for (piece, number) in self.placed.within(range.clone()) {
            // In a zone of a session that is gone, until now.
            if let Some(old) = self.zones.iter_mut().find(|zone| zone.number == number) {
                old.placed_bytes -= piece.end - piece.start;
                moving::punch(old.alias_of(piece.start), (piece.end - piece.start) as usize);
            }
            self.placed.remove(piece);
        }
        self.drop_copies(range.clone());
        let zone = &mut self.zones[at];
        zone.placed_bytes += range.end - range.start;
        let (number, segment, offset) = (zone.number, zone.segment, range.start - zone.base);
        self.placed.insert(range.clone(), number);
        if session.map_part(segment, offset, range.clone()).is_err() {
            // By the fallback, which sees the same bytes, and by nothing that was here before.
            let _ = session.unmap_part(range);
        }
    }

    /// The own zone for the page at `from`; `None`: there are too many, or nothing is granted here.
    fn own_zone_for(&mut self, session: &Arc<Session>, from: u64, apart: &mut Apart) -> Option<usize> {
        let current = self.zones.iter().position(|zone| Some(zone.number) == apart.zone);
        if current.is_some_and(|at| self.zones[at].stretch().contains(&from)) {
            return current;
        }
        if self.zones.iter().filter(|zone| zone.is_own).count() >= OWN_ZONE_COUNT_MAX || !self.has_orders(session) {
            return None;
        }
        let at = self.make_zone(session, from, apart.end.min(from + WINDOW_BYTES) - from, true)?;
        apart.zone = Some(self.zones[at].number);
        Some(at)
    }

    /// Whether the router's orders are carried out here, without which it grants nothing.
    fn has_orders(&mut self, session: &Arc<Session>) -> bool {
        let serial = session.serial();
        if let Some(&they_come) = self.orders.get(&serial) {
            return they_come;
        }
        let they_come = orders::start(session);
        // Those that have ended, and those that may ask once more.
        self.orders.retain(|_, they_come| *they_come);
        self.orders.insert(serial, they_come);
        they_come
    }

    /// No orders come any more to that session.
    pub fn note_end_of_orders(&mut self, serial: u64) {
        self.orders.insert(serial, false);
        self.advice.retain(|&(of, _)| of != serial);
    }

    /// A segment shall be shared again when there is time.
    pub fn note_advice(&mut self, serial: u64, segment: Handle) {
        if self.advice.len() < ADVICE_MAX && !self.advice.contains(&(serial, segment)) {
            self.advice.push_back((serial, segment));
        }
    }

    pub fn next_advice(&mut self, serial: u64) -> Option<Handle> {
        let at = self.advice.iter().position(|&(of, _)| of == serial)?;
        self.advice.remove(at).map(|(_, segment)| segment)
    }

    /// The zone for many that has a place for the first of these pages; a new one if need be.
    fn zone_for(&mut self, session: &Session, range: Range<u64>) -> Option<usize> {
        let serial = session.serial();
        let (mut after, mut before) = (0, u64::MAX);
        for (at, zone) in self.zones.iter().enumerate().filter(|(_, zone)| zone.serial == serial && !zone.is_own) {
            if !zone.is_closed && zone.stretch().contains(&range.start) {
                return Some(at);
            }
            if zone.placed_bytes > 0 && !zone.is_closed {
                let stretch = zone.stretch();
                after = if stretch.end <= range.start { after.max(stretch.end) } else { after };
                before = if stretch.start > range.start { before.min(stretch.start) } else { before };
            }
        }
        let base = (range.start & !(ZONE_BYTES - 1)).max(after);
        let bytes = range.end.min(before).next_multiple_of(ZONE_BYTES).min(before) - base;
        // What is empty may stand for other addresses.
        let spare = |zone: &&mut Zone| {
            let is_free = !zone.is_closed && !zone.is_own && zone.placed_bytes == 0;
            zone.serial == serial && is_free && zone.bytes >= bytes
        };
        if let Some(zone) = self.zones.iter_mut().find(spare) {
            (zone.base, zone.stretch_bytes) = (base, zone.bytes.min(before - base));
            let number = zone.number;
            return self.zones.iter().position(|zone| zone.number == number);
        }
        self.make_zone(session, base, bytes, false).or_else(|| {
            // A limit may leave room for what is needed alone.
            let bytes = range.end.min(range.start + WINDOW_BYTES).min(before) - range.start;
            self.make_zone(session, range.start, bytes, false)
        })
    }

    fn make_zone(&mut self, session: &Session, base: u64, bytes: u64, is_own: bool) -> Option<usize> {
        let (segment, _, descriptor) = session.create_segment(bytes).ok()?;
        let made = self.add_zone(session, segment, descriptor.as_fd(), base..base + bytes, is_own);
        let Some(at) = made else {
            let _ = session.destroy_segment(segment);
            return None;
        };
        // Whether orders come or not: peers' rights to some of it are not others' to all of it.
        if !is_own && !keep_from_peers(session, &self.zones[at]) {
            self.zones[at].is_closed = true;
            self.tidy(session);
            return None;
        }
        Some(at)
    }

    /// Maps a segment for the library's own use, as the zone of these addresses.
    pub(super) fn add_zone(
        &mut self,
        session: &Session,
        segment: Handle,
        descriptor: BorrowedFd<'_>,
        stretch: Range<u64>,
        is_own: bool,
    ) -> Option<usize> {
        let bytes = stretch.end - stretch.start;
        let alias = moving::map_alias(descriptor, bytes as usize)?;
        let address = alias.addr() as u64;
        let mut file = None;
        if let Some(maps) = Maps::open() {
            maps.visit(address, address + 1, &mut |area| {
                file = Some(area.file);
                false
            });
        }
        let Some(file) = file else {
            // SAFETY: mapped just now.
            unsafe { moving::unmap_alias(alias, bytes as usize) };
            return None;
        };
        self.last_number += 1;
        self.zones.push(Zone {
            number: self.last_number,
            serial: session.serial(),
            segment,
            base: stretch.start,
            stretch_bytes: bytes,
            bytes,
            alias,
            file,
            placed_bytes: 0,
            is_closed: false,
            is_own,
            is_shown_elsewhere: false,
        });
        Some(self.zones.len() - 1)
    }

    // ---- out of zones

    /// Takes back what is placed of these pages and touched by no region any more.
    pub fn move_out(&mut self, session: &Session, pages: Range<u64>) {
        let mut found = Vec::new();
        for (range, number) in self.placed.within(pages.clone()) {
            found.extend(self.touches.untouched(range).into_iter().map(|range| (range, number)));
        }
        let copies = self.exposed_copies(pages);
        if found.is_empty() && copies.is_empty() {
            return;
        }
        let Some(maps) = Maps::open() else {
            self.owed = true;
            return;
        };
        for (range, number) in found {
            self.move_out_range(session, &maps, range, number);
        }
        for (range, number) in copies {
            self.owed |= !self.restore_copies(session, &maps, range, number);
        }
        drop(maps);
        self.tidy(session);
    }

    fn move_out_range(&mut self, session: &Session, maps: &Maps, range: Range<u64>, number: u32) {
        let Some(at) = self.zones.iter().position(|zone| zone.number == number) else { return };
        let zone = &self.zones[at];
        let is_ours = zone.serial == session.serial();
        let (there, gone) = check(zone, maps, &range);
        if is_ours && session.unmap_part(range.clone()).is_err() {
            self.owed = true;
            return;
        }
        let stack = stack_in_use();
        for (piece, protection) in there {
            if piece.start < stack.end && stack.start < piece.end {
                self.owed = true;
                continue;
            }
            let mut from = piece.start;
            while from < piece.end {
                let end = piece.end.min(from + WINDOW_BYTES);
                let alias = self.zones[at].alias_of(from);
                let one = Move { target: from, alias, bytes: (end - from) as usize, protection, done: false };
                let moved = moving::move_out(session, maps, &mut [one], Others::Threads, &self.zones[at].is_shown());
                if moved || self.leave_copy(session, maps, at, &one) {
                    self.placed.remove(from..end);
                    self.zones[at].placed_bytes -= end - from;
                    moving::punch(alias, one.bytes);
                } else {
                    self.owed = true;
                }
                from = end;
            }
        }
        for piece in gone {
            self.forget(session, maps, &piece, number);
        }
    }

    /// The threads can't be held: private copies, which cost an area of the map each.
    fn leave_copy(&mut self, session: &Session, maps: &Maps, at: usize, piece: &Move) -> bool {
        let zone = &self.zones[at];
        if zone.serial != session.serial() || (self.placed.len() + self.copies.len()) as u64 >= 2 * runs_max() {
            return false;
        }
        let Ok(descriptor) = session.reopen_segment(zone.segment) else { return false };
        // It waited for the router: the program may have taken the pages away meanwhile.
        if !moving::is_all(maps, piece, &|area, address| zone.is_shown()(piece, area, address)) {
            return false;
        }
        if !moving::make_private(piece, descriptor.as_fd(), piece.target - zone.base) {
            return false;
        }
        let is_exposed = zone.is_own;
        self.note_copy(at, piece, is_exposed);
        // Taken back once threads can be held.
        self.owed |= is_exposed;
        true
    }

    /// Tries once more what could not be taken back.
    pub fn settle(&mut self, session: &Session) {
        if self.owed && moving::is_possible() {
            self.owed = false;
            self.move_out(session, ALL);
            self.settle_moved(session);
        }
    }

    /// Gives back zones in which nothing is placed, but for a few.
    pub fn tidy(&mut self, session: &Session) {
        let mut spares = 0;
        let mut at = 0;
        while at < self.zones.len() {
            let zone = &self.zones[at];
            let is_ours = zone.serial == session.serial() && !session.is_dead();
            let is_useful = is_ours && !zone.is_closed && !zone.is_own;
            let is_shown = zone.placed_bytes > 0 || zone.is_shown_elsewhere;
            let keep = is_shown || (is_useful && zone.bytes <= ZONE_BYTES && spares < SPARE_COUNT_MAX);
            if keep {
                spares += usize::from(!is_shown);
                at += 1;
                continue;
            }
            let zone = self.zones.swap_remove(at);
            // SAFETY: made by `map_alias`; nothing is placed, so nothing is copied from or to it any more.
            unsafe { moving::unmap_alias(zone.alias, zone.bytes as usize) };
            if is_ours {
                let _ = session.destroy_segment(zone.segment);
            }
        }
    }
}
