//! The order of datagrams of one sender that come by either way.

pub(super) fn is_at_or_after(number: u32, other: u32) -> bool {
    number.wrapping_sub(other).cast_signed() >= 0
}

/// The order of what the router delivers of a ring's sender and of what stands in the ring, where each says how many of
/// the router's came before.
pub(super) struct Order {
    /// How many the router has delivered since the ring was opened, by the sender's reckoning.
    pub routed: u32,
    /// Those from before were in RECVs before this one; absent once all of these have completed.
    since: Option<u32>,
    /// One was left in its RECV though older ones stand in the ring: these say less than is so.
    pub is_ahead: bool,
}

impl Order {
    /// Of a ring that was opened when the router took this RECV next.
    pub fn new(first: u32) -> Self {
        Self { routed: 0, since: Some(first), is_ahead: false }
    }

    /// The ring's next one, which says this, is taken.
    pub fn take(&mut self, routed: u32, has_displaced: bool) {
        let says_less = self.is_ahead && !is_at_or_after(routed, self.routed);
        if !has_displaced && !says_less {
            (self.routed, self.is_ahead) = (routed, false);
        }
        self.since = None;
    }

    /// Whether one that was delivered to this RECV counts.
    pub fn has_begun(&self, position: u32) -> bool {
        self.since.is_none_or(|since| is_at_or_after(position, since))
    }

    /// One was delivered that counts. `next`: what the ring's next one says. False: older ones stand in the ring, or
    /// wait behind it.
    pub fn passes(&mut self, next: Option<u32>, has_displaced: bool) -> bool {
        if has_displaced || next.is_some_and(|next| is_at_or_after(self.routed, next)) {
            return false;
        }
        self.count();
        true
    }

    /// → how many came before.
    pub fn count(&mut self) -> u32 {
        let before = self.routed;
        (self.routed, self.since) = (before.wrapping_add(1), None);
        before
    }
}

/// Of a datagram that the router delivered too early, and the ring's next one: whether the first comes first.
pub(super) fn is_routed_next(displaced: Option<u32>, next: Option<u32>) -> bool {
    match (displaced, next) {
        (Some(displaced), Some(next)) => !is_at_or_after(displaced, next),
        (displaced, None) => displaced.is_some(),
        (None, Some(_)) => false,
    }
}
