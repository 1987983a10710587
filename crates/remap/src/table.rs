//! The bookkeeping of one process: arenas, what lies in them, which regions touch what.
use crate::borrowed::Borrowed;
use crate::commands;
use crate::first_stack::{self, AsidePages, is_first_stack};
use crate::hints::{Hints, Line, Obstacle};
use crate::kept_descriptor::KeptDescriptor;
use crate::move_budget::MoveBudget;
use crate::objects;
use crate::page_moves::{self, MOVE_BYTES_MAX, Moved, PageMove};
use crate::process_map::{Area, FileId, ProcessMap};
use crate::ranges::{NumberedRanges, PAGE_BYTES, RegionSpan, TouchCounts, without};
use crate::stale::outside;
use crate::threads::{is_window_possible, stack_in_use};
use freeflow_client::{Freeze, Handle, OwnMapping, Session};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Range, RangeInclusive};
use std::sync::{Arc, OnceLock, Weak};

/// `off`: nothing is moved, for debugging. `whole`: whole pages of regions alone, at registration. `eager`: those of
/// small regions at registration, too, however many there are.
const VARIABLE: &str = "FREEFLOW_REMAP";
/// The kernel's own default of vm.max_map_count.
const MAPPINGS_MAX: u64 = 65_530;
/// A remapped range costs up to three areas of the process's map, and half of all are the program's
/// own.
const MAPPINGS_SHARE: u64 = 6;
/// Exclusive arenas of a process: each is one more segment for the router. All of one is copied
/// when it is revoked, so none is larger than a move in one window.
pub(super) const EXCLUSIVE_ARENA_COUNT_MAX: usize = 512;
/// Requests to share memory that wait at a time.
const SHARE_REQUESTS_MAX: usize = 2 * EXCLUSIVE_ARENA_COUNT_MAX;
/// Areas that can't be moved and are known so: any others are found out again.
const IMMOVABLE_COUNT_MAX: usize = 256;

/// A segment that stands for a stretch of the process's addresses.
pub(crate) struct Arena {
    pub(super) number: u32,
    /// The session that it belongs to.
    pub(super) serial: u64,
    pub(super) segment: Handle,
    /// The first address of the stretch.
    pub(super) base: u64,
    pub(super) stretch_bytes: u64,
    /// The whole segment, at least the stretch.
    pub(super) bytes: u64,
    pub(super) mirror: *mut u8,
    pub(super) file: FileId,
    pub(super) remapped_bytes: u64,
    /// The process has private copies of its pages ([`page_moves::make_private`]): pages that those
    /// throw away must be zero in the file, so nothing more is remapped here.
    pub(super) is_closed: bool,
    /// It holds pages of one registration only, and may be granted to peers.
    pub(super) is_exclusive: bool,
    /// The program moved pages of it to other addresses, which could not be made private there. It
    /// is closed then.
    pub(super) is_shown_elsewhere: bool,
    /// Without one its pages can't become private copies once the router is gone.
    pub(super) descriptor: Option<KeptDescriptor>,
}

// SAFETY: the mirror belongs to no thread; what lies behind it is reached as raw bytes, under the
// table's lock.
unsafe impl Send for Arena {}

impl Arena {
    pub(super) fn stretch(&self) -> Range<u64> {
        self.base..self.base + self.stretch_bytes
    }

    /// The offset in the arena of an address's page.
    pub(super) fn offset_at(&self, address: u64) -> u64 {
        address - self.base
    }

    /// The mirror mapping of an address's page.
    pub fn mirror_of(&self, address: u64) -> *mut u8 {
        self.mirror.wrapping_add(self.offset_at(address) as usize)
    }

    /// Whether this area shows pages of the arena, and is not the library's own mapping of it.
    pub fn is_shown_in(&self, area: &Area) -> bool {
        let own = self.mirror.addr() as u64..self.mirror.addr() as u64 + self.bytes;
        area.shared && area.file == self.file && (area.end <= own.start || own.end <= area.start)
    }

    /// Whether this area shows, at `address`, the page that belongs there.
    pub fn is_at(&self, area: &Area, address: u64) -> bool {
        area.shared && self.file == area.file && area.offset + (address - area.start) == address - self.base
    }

    /// Whether an area shows, at an address in a piece's target, the page that the piece's mirror
    /// has for it.
    pub(super) fn is_shown(&self) -> impl Fn(&PageMove, &Area, u64) -> bool {
        move |piece, area, address| self.shows(piece, area, address)
    }

    pub(super) fn shows(&self, piece: &PageMove, area: &Area, address: u64) -> bool {
        let offset = self.offset_of(piece) + (address - piece.target);
        area.shared && self.file == area.file && area.offset + (address - area.start) == offset
    }

    /// Some of its pages at the addresses that they belong to.
    pub(super) fn piece(&self, range: &Range<u64>, protection: i32) -> PageMove {
        let bytes = (range.end - range.start) as usize;
        PageMove { target: range.start, mirror: self.mirror_of(range.start), bytes, protection, done: false }
    }

    /// Whether a piece is one of this arena.
    pub(super) fn has_mirror_of(&self, piece: &PageMove) -> bool {
        let start = self.mirror.addr();
        (start..start + self.bytes as usize).contains(&piece.mirror.addr())
    }

    /// The offset in the arena of a piece's beginning.
    pub(super) fn offset_of(&self, piece: &PageMove) -> u64 {
        piece.mirror.addr() as u64 - self.mirror.addr() as u64
    }

    /// Ends the mirror mapping.
    ///
    /// # Safety
    /// Neither the arena nor a piece of its mirror is used any more.
    pub unsafe fn unmap(&self) {
        // SAFETY: `add_arena` made the mapping, of that many bytes.
        unsafe { page_moves::unmap_mirror(self.mirror, self.bytes as usize) };
    }
}

#[derive(Default)]
pub(crate) struct Table {
    /// The generation of the process: a child of `fork` begins with an empty table.
    generation: u32,
    pub(super) touches: TouchCounts,
    /// The same, without regions that are on demand: only pages that others touch lie in arenas.
    pub(super) pins: TouchCounts,
    /// The same, of whole pages alone.
    pub(super) wholes: TouchCounts,
    /// How often each is registered.
    pub(super) regions: BTreeMap<RegionSpan, u32>,
    /// The session of each owner that has regions.
    pub(super) owners: BTreeMap<usize, u64>,
    /// Those sessions, by serial number.
    sessions: BTreeMap<u64, Weak<Session>>,
    /// By the arena's number.
    pub(super) remapped: NumberedRanges,
    /// Those that were moved while regions touched them: there may be more in them than regions.
    pub(super) partial: NumberedRanges,
    pub(super) arenas: Vec<Arena>,
    pub(super) last_number: u32,
    /// Pages of the first thread's stack that arenas show in their place.
    pub(super) aside_pages: AsidePages,
    /// Something is remapped that no region touches: it could not be taken back in time.
    pub(super) has_pending: bool,
    /// And some of that because the thread that tried it had it in its stack.
    pub(super) has_pending_stack: bool,
    /// Private copies of an arena's pages ([`page_moves::make_private`]), and their files.
    pub(super) copies: NumberedRanges,
    pub(super) copied: Vec<Copied>,
    /// The sessions whose commands were asked for, and the threads that receive them.
    commands: BTreeMap<u64, Option<Arc<OwnMapping<commands::Task>>>>,
    /// Memory that the program shares by a file of its own.
    pub(super) borrowed: Borrowed,
    /// Memory that shall be shared, by session, and how often that was asked for.
    share_requests: VecDeque<(u64, ShareRequest, u32)>,
    /// Areas of the map that the kernel does not move: huge pages, sealed memory.
    immovable: VecDeque<Area>,
    /// Variables of loaded objects, in what is being shared.
    pub(super) variables: Vec<Range<u64>>,
    pub(super) hints: Hints,
    pub(super) move_budget: MoveBudget,
    /// Small regions to which peers have rights.
    pub(super) small_remote: BTreeSet<RegionSpan>,
}

/// Memory that the router asks to be shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ShareRequest {
    /// Where a revoked segment was.
    Segment(Handle),
    /// As far as regions touch it.
    Addresses(Range<u64>),
}

/// An arena of which there are private copies.
pub(super) struct Copied {
    pub number: u32,
    /// The session that it belonged to, and its handle there.
    pub serial: u64,
    pub segment: Handle,
    pub file: FileId,
    /// Peers may still have it mapped.
    pub is_exposed: bool,
}

/// The exclusive arenas of one registration.
pub(super) struct ExclusiveArenas {
    /// The end of all pages that are moved.
    pub end: u64,
    /// The arena that was made last.
    pub arena: Option<u32>,
}

impl ExclusiveArenas {
    pub fn until(end: u64) -> Self {
        Self { end, arena: None }
    }
}

/// Knowledge that a registration has before it moves pages.
pub(crate) struct Known {
    /// The pages that [`Table::forget_gone`] gave.
    pub renewed: Vec<Range<u64>>,
    /// The process's own map, if it is open already.
    pub map: Option<ProcessMap>,
}

/// The pages that are moved into arenas.
#[derive(Clone, Copy)]
pub(super) enum Pages {
    /// Of a region that the router does not know yet.
    Unknown,
    /// Private copies of this file's, which regions touch.
    Copies(FileId),
    /// Of regions that the router knows.
    Touched,
    /// The same, and each is inside one of them.
    Whole,
}

impl Pages {
    /// Whether partial pages may be among them.
    fn are_partial(self) -> bool {
        matches!(self, Self::Touched)
    }

    /// The accesses that a move of these pages must keep out.
    fn freeze(self) -> Freeze {
        match self {
            Self::Unknown => Freeze::Threads,
            Self::Copies(_) | Self::Touched | Self::Whole => Freeze::ThreadsAndRouter,
        }
    }
}

/// The pages that are moved in this process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    Nothing,
    /// Of any region, at its registration.
    WholePages,
    /// All, and whole pages of any region at its registration.
    AllEagerly,
    All,
}

pub(crate) fn extent() -> Extent {
    static EXTENT: OnceLock<Extent> = OnceLock::new();
    *EXTENT.get_or_init(|| match std::env::var_os(VARIABLE) {
        Some(value) if value == "off" => Extent::Nothing,
        Some(value) if value == "whole" => Extent::WholePages,
        Some(value) if value == "eager" => Extent::AllEagerly,
        _ => Extent::All,
    })
}

/// Whether anything is moved in this process.
pub(crate) fn is_enabled() -> bool {
    extent() != Extent::Nothing
}

pub(super) fn runs_max() -> u64 {
    static MAX: OnceLock<u64> = OnceLock::new();
    *MAX.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        text.trim().parse().unwrap_or(MAPPINGS_MAX) / MAPPINGS_SHARE
    })
}

/// Longest move that begins at an address: pages of the first thread's stack go one by one.
pub(super) fn move_bytes_max(address: u64) -> u64 {
    if is_first_stack(address) { PAGE_BYTES } else { MOVE_BYTES_MAX }
}

/// Memory of the program's data.
fn is_data(area: &Area) -> bool {
    area.readable && area.writable && !area.executable
}

fn all_of(owner: usize) -> RangeInclusive<RegionSpan> {
    let all = |bound, is_on_demand| RegionSpan { owner, start: bound, length: bound, is_on_demand };
    all(0, false)..=all(u64::MAX, true)
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

    /// Whether the program sees pages of arenas.
    pub fn shows_arenas(&self) -> bool {
        self.arenas.iter().any(|arena| arena.remapped_bytes > 0 || arena.is_shown_elsewhere)
    }

    pub fn arenas(&self) -> &[Arena] {
        &self.arenas
    }

    pub fn arena(&self, number: u32) -> Option<&Arena> {
        self.arenas.iter().find(|arena| arena.number == number)
    }

    /// A session that has regions from now on.
    pub fn note_session(&mut self, session: &Arc<Session>) {
        self.sessions.retain(|_, other| other.strong_count() > 0);
        self.sessions.entry(session.serial()).or_insert_with(|| Arc::downgrade(session));
    }

    /// Whether a session is known to have ended: its router reaches no memory any more.
    pub(super) fn has_ended(&self, serial: u64) -> bool {
        self.sessions.get(&serial).and_then(Weak::upgrade).is_some_and(|session| session.is_dead())
    }

    /// `serial`: the session of the region's owner.
    pub fn add_region(&mut self, serial: u64, region: RegionSpan) {
        self.owners.insert(region.owner, serial);
        *self.regions.entry(region).or_default() += 1;
        self.touches.add(region.touched_pages());
        if !region.is_on_demand {
            self.pins.add(region.touched_pages());
            self.wholes.add(region.whole_pages());
        }
    }

    /// False: it was not there.
    pub fn remove_region(&mut self, region: RegionSpan) -> bool {
        let Some(count) = self.regions.get_mut(&region) else { return false };
        *count -= 1;
        if *count == 0 {
            self.regions.remove(&region);
            self.small_remote.remove(&region);
            if self.regions.range(all_of(region.owner)).next().is_none() {
                self.owners.remove(&region.owner);
            }
        }
        self.touches.remove(region.touched_pages());
        if !region.is_on_demand {
            self.pins.remove(region.touched_pages());
            self.wholes.remove(region.whole_pages());
        }
        true
    }

    /// The regions of an owner, each as often as it is registered.
    pub fn regions_of(&self, owner: usize) -> Vec<RegionSpan> {
        let regions = self.regions.range(all_of(owner));
        regions.flat_map(|(&region, &count)| (0..count).map(move |_| region)).collect()
    }

    /// Has the router map the files under these pages that the program shares.
    pub fn borrow(&mut self, session: &Arc<Session>, pages: Range<u64>, maps: &mut Option<ProcessMap>) {
        let Self { borrowed, arenas, copied, remapped, .. } = self;
        let is_own =
            |file| arenas.iter().any(|arena| arena.file == file) || copied.iter().any(|copied| copied.file == file);
        borrowed.borrow(session, pages, maps, remapped, &is_own);
    }

    /// Gives up what was borrowed among these pages and no region touches any more.
    pub fn give_back(&mut self, pages: Range<u64>) {
        self.borrowed.give_back(pages, &self.touches);
    }

    // ---- into arenas

    /// Places what can be remapped of these pages; no region that the router knows of touches what
    /// is moved, but those whose memory is gone: the renewed ones. `is_exclusive`: into exclusive
    /// arenas, if possible.
    pub fn move_in(&mut self, session: &Arc<Session>, pages: Range<u64>, known: Known, is_exclusive: bool) {
        if pages.is_empty() || !is_window_possible() {
            return;
        }
        let Some(maps) = known.map.or_else(ProcessMap::open) else { return };
        let mut free = self.left_behind(session, &maps, pages.clone());
        let untouched = self.touches.untouched(pages.clone());
        // Pages that nothing touches any more are among the untouched.
        free.extend(outside(known.renewed, &pages, &untouched));
        for range in untouched {
            let taken = self.remapped.within(range.clone());
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
                    if !self.is_immovable(area) && self.is_movable(session, area, range.start.max(area.start)) {
                        spots.push(range.start.max(area.start)..range.end.min(area.end));
                    }
                    true
                });
            }
        }
        let end = spots.iter().map(|spot| spot.end).max().unwrap_or(0);
        let mut exclusive = is_exclusive.then_some(ExclusiveArenas::until(end));
        for spot in spots {
            if self.move_in_spot(session, &maps, Pages::Unknown, spot, &mut exclusive).is_err() {
                return;
            }
        }
    }

    /// Private anonymous memory, as a heap is; what a dead session left in its arenas; private
    /// copies of such.
    fn is_movable(&self, session: &Session, area: &Area, address: u64) -> bool {
        if !is_data(area) {
            return false;
        }
        if area.shared {
            let mut arenas = self.arenas.iter();
            return arenas.any(|arena| arena.serial != session.serial() && arena.is_at(area, address));
        }
        !is_first_stack(address)
            && (area.file == FileId::default() || self.copied.iter().any(|copied| copied.file == area.file))
    }

    pub(super) fn may_move(&self, session: &Session, pages: Pages, area: &Area, address: u64) -> bool {
        let is_match = match pages {
            Pages::Unknown => true,
            Pages::Whole => !self.is_exposed(area),
            Pages::Copies(file) => !area.shared && area.file == file,
            // Also initialised variables, and the first stack.
            Pages::Touched => return self.is_shareable(area, address),
        };
        is_match && self.is_movable(session, area, address)
    }

    /// Private memory that is anonymous, or is so to the program: copies of an arena's pages, and
    /// variables of loaded objects. Pages of another file that the program throws away show that file
    /// again.
    fn is_shareable(&self, area: &Area, address: u64) -> bool {
        let is_anonymous = area.file == FileId::default() || self.copied.iter().any(|copied| copied.file == area.file);
        is_data(area)
            && !area.shared
            && !self.is_exposed(area)
            && (is_anonymous || self.variables.iter().any(|segment| segment.contains(&address)))
    }

    /// Looks for loaded objects whose variables are at an address. Not in a freeze window.
    pub(super) fn note_variables(&mut self, area: &Area, address: u64) {
        let is_known = |segments: &[Range<u64>]| segments.iter().any(|segment| segment.contains(&address));
        if is_data(area) && area.file != FileId::default() && !is_known(&self.variables) {
            self.variables.extend(objects::writable_segment_at(address));
        }
    }

    /// Copies that go into exclusive arenas again, by a command of their own.
    fn is_exposed(&self, area: &Area) -> bool {
        self.copied.iter().any(|copied| copied.is_exposed && copied.file == area.file)
    }

    /// An error: no more can be remapped now.
    pub(super) fn move_in_spot(
        &mut self,
        session: &Arc<Session>,
        maps: &ProcessMap,
        pages: Pages,
        spot: Range<u64>,
        exclusive: &mut Option<ExclusiveArenas>,
    ) -> Result<(), Obstacle> {
        let mut from = spot.start;
        while from < spot.end {
            if (self.remapped.len() + self.copies.len()) as u64 >= runs_max() {
                return Err(Obstacle::MappingLimit);
            }
            let own = exclusive.as_mut().and_then(|exclusive| self.exclusive_arena_for(session, from, exclusive));
            if own.is_none() {
                *exclusive = None;
            }
            let at = own.or_else(|| self.shared_arena_for(session, maps, from..spot.end)).ok_or(Obstacle::NoSegment)?;
            let arena = &self.arenas[at];
            if pages.are_partial() && arena.descriptor.is_none() {
                return Err(Obstacle::NoSegment);
            }
            let takes_aside = is_first_stack(from) && !self.aside_pages.contains_key(&from);
            let end = spot.end.min(arena.stretch().end).min(from + move_bytes_max(from));
            let bytes = (end - from) as usize;
            let mirror = arena.mirror_of(from);
            let piece = PageMove { target: from, mirror, bytes, protection: 0, done: false };
            let moved = if takes_aside {
                let is_right = |area: &Area, _| is_data(area) && !area.shared;
                first_stack::move_in(&mut self.aside_pages, session, maps, &piece, pages.freeze(), &is_right)
            } else {
                let is_right = |area: &Area, address| self.may_move(session, pages, area, address);
                page_moves::move_in(session, maps, &piece, pages.freeze(), None, &is_right)
            };
            if moved != Moved::Done {
                page_moves::punch(mirror, bytes);
                self.tidy(session);
                if moved == Moved::Never {
                    self.note_immovable(maps, from);
                }
                return Err(Obstacle::NotMoved);
            }
            self.commit_move_in(session, at, from..end);
            // The program may have mapped other memory there since: it leaves before a fork, too.
            if pages.are_partial() || matches!(pages, Pages::Whole) && exclusive.is_none() {
                self.partial.remove(from..end);
                self.partial.insert(from..end, 0);
            }
            from = end;
        }
        Ok(())
    }

    /// The kernel does not move what is mapped there.
    fn note_immovable(&mut self, maps: &ProcessMap, address: u64) {
        let Some(area) = maps.area_at(address) else { return };
        if self.immovable.len() >= IMMOVABLE_COUNT_MAX {
            self.immovable.pop_front();
        }
        self.immovable.push_back(area);
    }

    /// Whether such an area is known: not one that has changed since.
    pub(super) fn is_immovable(&self, area: &Area) -> bool {
        self.immovable.contains(area)
    }

    /// Records regions of pages that were remapped, and notifies the router.
    fn commit_move_in(&mut self, session: &Session, at: usize, range: Range<u64>) {
        for (piece, number) in self.remapped.within(range.clone()) {
            // In an arena of a session that is gone, until now.
            if let Some(old) = self.arenas.iter_mut().find(|arena| arena.number == number) {
                old.remapped_bytes -= piece.end - piece.start;
                page_moves::punch(old.mirror_of(piece.start), (piece.end - piece.start) as usize);
            }
            self.partial.remove(piece.clone());
            self.remapped.remove(piece);
        }
        self.drop_copies(range.clone());
        self.borrowed.forget(&range);
        let arena = &mut self.arenas[at];
        arena.remapped_bytes += range.end - range.start;
        let (number, segment, offset) = (arena.number, arena.segment, range.start - arena.base);
        self.remapped.insert(range.clone(), number);
        if session.map_part(segment, offset, range.clone()).is_err() {
            // By the slow path, which sees the same bytes, and by nothing that was here before.
            let _ = session.unmap_part(range);
        }
    }

    /// Whether the router's commands are carried out here, without which it grants nothing.
    pub(super) fn receives_commands(&mut self, session: &Arc<Session>) -> bool {
        let serial = session.serial();
        if let Some(thread) = self.commands.get(&serial) {
            return thread.is_some();
        }
        let thread = commands::start(session);
        let are_received = thread.is_some();
        // Those that have ended, and those that may ask once more.
        self.commands.retain(|_, thread| thread.is_some());
        self.commands.insert(serial, thread);
        are_received
    }

    /// The thread that can move pages which the calling thread has in its stack, if there are any.
    pub fn thread_for_stack(&self, session: &Session) -> Option<Arc<OwnMapping<commands::Task>>> {
        self.has_pending_stack.then(|| self.command_thread(session.serial()).cloned())?
    }

    /// The thread that carries out a session's commands.
    pub(super) fn command_thread(&self, serial: u64) -> Option<&Arc<OwnMapping<commands::Task>>> {
        self.commands.get(&serial)?.as_ref()
    }

    /// No commands come any more to that session.
    pub fn note_commands_ended(&mut self, serial: u64) {
        self.commands.insert(serial, None);
        self.share_requests.retain(|&(of, ..)| of != serial);
    }

    /// Memory shall be shared when there is time.
    pub fn queue_share(&mut self, serial: u64, request: ShareRequest) {
        let has_room = self.share_requests.len() < SHARE_REQUESTS_MAX;
        let is_same = |(of, queued, _): &&mut (u64, ShareRequest, u32)| *of == serial && *queued == request;
        if let Some((.., count)) = self.share_requests.iter_mut().find(is_same) {
            *count += 1;
        } else if has_room {
            self.share_requests.push_back((serial, request, 1));
        }
    }

    pub fn next_share(&mut self, serial: u64) -> Option<(ShareRequest, u32)> {
        let at = self.share_requests.iter().position(|&(of, ..)| of == serial)?;
        self.share_requests.remove(at).map(|(_, request, count)| (request, count))
    }

    /// A hint that is to be written, without the lock.
    pub fn take_hint(&mut self) -> Option<Line> {
        self.hints.take_line()
    }
}
