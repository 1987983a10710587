//! Continuations for answers that have not come yet, by the ticket of the command.
use crate::dataplane::command::{Ask, Reply, Ticket};
use std::collections::BTreeMap;

type Continuation<T> = Box<dyn FnOnce(&mut T, Reply) + Send>;

/// Continuations for answers that have not come yet. `T`: the control thread's state.
pub(crate) struct Continuations<T> {
    last: u64,
    waiting: BTreeMap<Ticket, Continuation<T>>,
}

impl<T> Default for Continuations<T> {
    fn default() -> Self {
        Self { last: 0, waiting: BTreeMap::new() }
    }
}

impl<T> Continuations<T> {
    pub fn add<C: Ask>(&mut self, then: impl FnOnce(&mut T, C::Answer) + Send + 'static) -> Ticket {
        // It would take centuries to come to the end of them.
        self.last += 1;
        let ticket = Ticket(self.last);
        self.waiting.insert(ticket, Box::new(move |control, reply| then(control, C::answer_of(reply))));
        ticket
    }

    pub fn take(&mut self, ticket: Ticket) -> Option<Continuation<T>> {
        self.waiting.remove(&ticket)
    }
}
