//! Input of the control thread: the worker's answers and events, and messages of other threads.
//!
//! The continuation of an answer stays on this thread, by the ticket of its command.
//!
//! Invariant: a command that was given a ticket is answered once, unless the worker ends first, and
//! then the router ends.
use crate::admission::address_map::AddressMap;
use crate::base::slab::Key;
use crate::control::message::Message;
use crate::control::requests_remap::borrowed;
use crate::control::session::{Answer, Connection};
use crate::control::session::{Handled, Outcome};
use crate::control::store_slot::QueuedCommand;
use crate::control::thread::Control;
use crate::dataplane::command::{Ask, Bound, COMMAND_TIME_MAX, Submission};
use crate::dataplane::event::{Counted, Done, Event, ManagementReceived, PolicyViolated, SessionFailed, VnicFailed};
use freeflow_engine::SessionId;
use freeflow_shm::monotonic_ns;
use freeflow_verbs::{Instant, VerbsError};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

/// Messages of other threads in a row: a host that says much holds up nobody's requests.
const TURN_MESSAGES_MAX: usize = 64;

impl Control {
    /// Has the worker of a shard execute a command, and this thread then go on with the answer.
    pub(crate) fn ask<C: Ask>(
        &mut self,
        shard: u8,
        command: C,
        then: impl FnOnce(&mut Self, C::Answer) + Send + 'static,
    ) {
        let ticket = Some(self.continuations.add::<C>(then));
        self.workers.of(shard).submit(Submission { ticket, command: command.into_command(), bound: None });
    }

    /// The same of all shards, each of which gets its own command; the answers come in order of the shards, when all
    /// are there.
    pub(crate) fn ask_all<C: Ask>(
        &mut self,
        mut command: impl FnMut(u8) -> C,
        then: impl FnOnce(&mut Self, Vec<C::Answer>) + Send + 'static,
    ) {
        let count = self.workers.count();
        let answers: Vec<Option<C::Answer>> = (0..count).map(|_| None).collect();
        let gathered = Arc::new(Mutex::new((answers, Some(then))));
        for shard in 0..count {
            let gathered = gathered.clone();
            self.ask(shard, command(shard), move |control, answer| {
                let all = {
                    let mut gathered = gathered.lock().unwrap_or_else(PoisonError::into_inner);
                    let (answers, then) = &mut *gathered;
                    answers[usize::from(shard)] = Some(answer);
                    let complete = answers.iter().all(Option::is_some).then(|| std::mem::take(answers));
                    complete.and_then(|answers| Some((answers, then.take()?)))
                };
                if let Some((answers, then)) = all {
                    then(control, answers.into_iter().flatten().collect());
                }
            });
        }
    }

    /// Has the worker execute a request of a connection; `finish` makes the answer.
    pub(crate) fn submit<T, C: Ask<Answer = Result<T, VerbsError>>>(
        &mut self,
        at: (Key, SessionId),
        command: C,
        finish: impl FnOnce(&mut Connection, T) -> Answer + Send + 'static,
    ) -> Outcome {
        let key = at.0;
        self.submit_with(at, command, move |control, result| {
            control.handle_request_done(key, |connection| match result {
                Ok(value) => finish(connection, value),
                Err(error) => error.into(),
            });
        })
    }

    /// The same, where more than the connection is concerned.
    pub(crate) fn submit_with<T, C: Ask<Answer = Result<T, VerbsError>>>(
        &mut self,
        (key, session): (Key, SessionId),
        command: C,
        then: impl FnOnce(&mut Self, Result<T, VerbsError>) + Send + 'static,
    ) -> Outcome {
        let connection = self.connections.get_mut(key).ok_or(VerbsError::NotFound)?;
        connection.busy = true;
        let (cancelled, deadline) = (connection.cancelled.clone(), Instant(monotonic_ns()) + COMMAND_TIME_MAX);
        let ticket = Some(self.continuations.add::<C>(then));
        let bound = Some(Bound { session, cancelled, deadline });
        self.workers
            .of(session.shard())
            .hand_over(Some(session), Submission { ticket, command: command.into_command(), bound });
        Ok(Handled::Submitted)
    }

    /// Has the worker execute a command about a session, which need not be one of its connection's requests.
    pub(crate) fn ask_at<C: Ask>(
        &mut self,
        session: SessionId,
        command: C,
        then: impl FnOnce(&mut Self, C::Answer) + Send + 'static,
    ) {
        let ticket = Some(self.continuations.add::<C>(then));
        self.workers
            .of(session.shard())
            .hand_over(Some(session), Submission { ticket, command: command.into_command(), bound: None });
    }

    /// Takes what other threads left for this one, but so many messages that requests have their turn; whether there
    /// was something.
    pub(crate) fn take_messages(&mut self) -> bool {
        let (mut is_work, mut messages) = (false, 0);
        loop {
            if let Ok(event) = self.events.try_recv() {
                self.handle_worker_event(event);
            } else if messages < TURN_MESSAGES_MAX
                && let Ok(message) = self.messages.try_recv()
            {
                self.handle_thread_message(message);
                messages += 1;
            } else {
                return is_work;
            }
            is_work = true;
        }
    }

    fn handle_worker_event(&mut self, event: Event) {
        match event {
            Event::Done(Done { ticket, reply, rest }) => {
                // The rest of the command is dropped here, not on the worker's thread.
                drop(rest);
                if let Some(then) = ticket.and_then(|ticket| self.continuations.take(ticket)) {
                    then(self, reply);
                }
            }
            Event::SessionFailed(SessionFailed { session, reason, held }) => {
                self.handle_session_failed(session, reason, held);
            }
            Event::VnicFailed(VnicFailed { vnic, reason, held }) => self.handle_vnic_failed(vnic, reason, held),
            Event::PolicyViolated(PolicyViolated { incidents, violations }) => {
                self.report_incidents(incidents);
                self.report_violations(violations);
            }
            Event::Counted(Counted { counters }) => self.sysfs.update(&counters),
            Event::ManagementReceived(ManagementReceived { mads, backlog }) => {
                backlog.fetch_sub(mads.len(), Relaxed);
                for (from, mad) in &mads {
                    self.handle_management(*from, mad);
                }
            }
        }
    }

    fn handle_thread_message(&mut self, message: Message) {
        match message {
            Message::PeersUpdated { updates, backlog } => self.handle_peers_updates(updates, &backlog),
            Message::Identified { vnic, newcomer, process } => self.finish_connection(vnic, *newcomer, process),
            Message::GuestConnected { vnic, connection } => self.accept_guest(&vnic, *connection),
            Message::AttachmentEnded { vnic } => self.handle_attachment_ended(&vnic),
            Message::ThreadsFrozen { connection, result } => {
                let answer = result.map_or_else(Answer::from, |()| Answer::done());
                self.handle_request_done(connection, |_| answer);
            }
            Message::SegmentBorrowed { connection, result } => {
                self.handle_request_done(connection, |connection| borrowed(connection, result));
            }
            Message::MemoryFreed { connection, answer } => self.handle_request_done(connection, |_| answer),
            Message::Stored { store, stored } => self.handle_stored(store, stored),
            Message::CaptureEnded { admin, who, outcome } => self.finish_capture(admin, *who, outcome),
            Message::ReadInventory { answer } => {
                // The thread that asked may have gone.
                let _ = answer.send(self.host_inventory());
            }
            Message::SetAccess { table } => {
                let address_map = AddressMap::of(self.state.access());
                self.set_access(*table, address_map);
            }
            Message::CountAccess { rule, answer } => {
                // The thread that asked may have gone.
                let _ = answer.send(self.access_counts(rule.as_deref()));
            }
            Message::Declare { command, answer } => self.when_stored(QueuedCommand::Declare { command, answer }),
            Message::Api(request) => request.serve_by(self),
        }
    }
}
