//! Messages from this host to this host, which wait for their turn. Senders take turns, and a flood
//! loses its own messages only: the machine sends them again.
use crate::admission::shares::{Shares, Ticket};
use crate::peering::Mad;
use freeflow_cm::Scope;
use freeflow_verbs::Gid;
use std::collections::{BTreeMap, VecDeque};

/// Of all senders; some 300 bytes each. A process that ends with 10,000 connections finds room.
const LETTER_COUNT_MAX: usize = 65_536;

pub struct Letter {
    /// Of the sender; where it arrives is found when its turn has come.
    pub scope: Scope,
    pub from: Gid,
    pub to: Gid,
    pub mad: Mad,
}

/// A vNIC, by its address.
type Sender = (Scope, Gid);

pub struct Letters {
    queues: BTreeMap<Sender, VecDeque<(Letter, Ticket)>>,
    /// Senders with letters, in the order of their turns.
    turns: VecDeque<Sender>,
    shares: Shares<Sender>,
}

impl Default for Letters {
    fn default() -> Self {
        Self { queues: BTreeMap::new(), turns: VecDeque::new(), shares: Shares::new(LETTER_COUNT_MAX) }
    }
}

impl Letters {
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// False: the sender has too many there already, and this one is lost.
    pub fn push(&mut self, letter: Letter) -> bool {
        let sender = (letter.scope, letter.from);
        let Some(ticket) = self.shares.take(sender) else { return false };
        let queue = self.queues.entry(sender).or_default();
        if queue.is_empty() {
            self.turns.push_back(sender);
        }
        queue.push_back((letter, ticket));
        true
    }

    /// The oldest of the sender whose turn it is.
    pub fn pop(&mut self) -> Option<Letter> {
        let sender = self.turns.pop_front()?;
        let queue = self.queues.get_mut(&sender)?;
        let (letter, _) = queue.pop_front()?;
        if queue.is_empty() {
            self.queues.remove(&sender);
        } else {
            self.turns.push_back(sender);
        }
        Some(letter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freeflow_verbs::NetworkId;

    fn letter(from: u8, number: u8) -> Letter {
        let mut mad = [0; size_of::<Mad>()];
        mad[0] = number;
        Letter { scope: Scope::Network(NetworkId(1)), from: Gid([from; 16]), to: Gid([9; 16]), mad }
    }

    #[test]
    fn senders_take_turns_and_a_flood_loses_its_own() {
        let mut letters = Letters::default();
        let flood = (0..2 * LETTER_COUNT_MAX).take_while(|_| letters.push(letter(1, 0))).count();
        assert_eq!(flood, LETTER_COUNT_MAX / 2);
        assert!((0..3).all(|number| letters.push(letter(2, number))));
        let first: Vec<(u8, u8)> =
            (0..6).map(|_| letters.pop().unwrap()).map(|letter| (letter.from.0[0], letter.mad[0])).collect();
        assert_eq!(first, [(1, 0), (2, 0), (1, 0), (2, 1), (1, 0), (2, 2)]);
        assert_eq!(std::iter::from_fn(|| letters.pop()).count(), flood - 3);
        assert!(letters.is_empty() && letters.queues.is_empty());
    }
}
