//! How the worker carries out commands: by [`Execute`], a file a subject.
mod direct;
mod memory;
mod meters;
mod objects;
mod policy;
mod qps;
mod queues;
mod vnics;
mod wire;

#[cfg(test)]
use crate::dataplane::command::Call;
use crate::dataplane::command::{
    Bound, COMMAND_TIME_MAX, Command, Execute, Execution, Fence, Probe, Progress, Reply, Stop, Submission, Ticket,
};
use crate::dataplane::event::{Done, Event};
use crate::dataplane::worker::Worker;
use freeflow_verbs::{Instant, VerbsError};

impl Worker {
    pub(crate) fn run_commands(&mut self, now: Instant) -> bool {
        let mut busy = false;
        for submission in std::mem::take(&mut self.waiting_commands) {
            self.run_command(now, submission);
        }
        while let Some(submission) = self.queued_commands.pop_front() {
            busy = true;
            self.run_command(now, submission);
        }
        busy | std::mem::take(&mut self.goes_on)
    }

    fn run_command(&mut self, now: Instant, submission: Submission) {
        // It may take back what packets refer to.
        self.ports.fabric.end_references();
        let Submission { ticket, command, bound } = submission;
        if bound.as_ref().is_some_and(Bound::is_cancelled) {
            return self.refuse(ticket, VerbsError::DeviceFatal, command);
        }
        match command.execute(self, now) {
            Progress::Done { reply, rest } => {
                if let Some(Bound { session, .. }) = bound
                    && reply.is_shortage()
                {
                    self.note_shortages(session);
                }
                self.answer(ticket, reply, rest);
            }
            Progress::Again(command) => {
                let resumed_at = self.ports.resumed_at;
                let is_late = |bound: &Bound| now >= bound.deadline.max(resumed_at + COMMAND_TIME_MAX);
                if bound.as_ref().is_some_and(is_late) {
                    self.refuse(ticket, VerbsError::TimedOut, command);
                } else {
                    self.waiting_commands.push(Submission { ticket, command, bound });
                }
            }
        }
    }

    fn refuse(&self, ticket: Option<Ticket>, error: VerbsError, command: Command) {
        self.answer(ticket, Reply::Refused(error), Some(command));
    }

    /// Says so only where somebody waits for it, or something is to be dropped.
    fn answer(&self, ticket: Option<Ticket>, reply: Reply, rest: Option<Command>) {
        if ticket.is_some() || rest.is_some() {
            self.notify_control(Done { ticket, reply, rest });
        }
    }

    /// Notifies the control thread.
    pub(crate) fn notify_control(&self, event: impl Into<Event>) {
        // Fails only while the router ends.
        let _ = self.events.send(event.into());
        self.control_waker.wake();
    }
}

impl Execute<Fence> for Worker {
    fn execute(&mut self, _: Instant, Fence {}: Fence) -> Execution<Fence> {
        Execution::done(())
    }
}

impl Execute<Probe> for Worker {
    fn execute(&mut self, _: Instant, Probe { answer }: Probe) -> Execution<Probe> {
        answer.give();
        Execution::done(())
    }
}

impl Execute<Stop> for Worker {
    fn execute(&mut self, _: Instant, Stop {}: Stop) -> Execution<Stop> {
        self.stopping = true;
        Execution::done(())
    }
}

#[cfg(test)]
impl Execute<Call> for Worker {
    fn execute(&mut self, now: Instant, mut command: Call) -> Execution<Call> {
        if (command.run)(self, now) { Execution::Again(command) } else { Execution::done(()) }
    }
}
