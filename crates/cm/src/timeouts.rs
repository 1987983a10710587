//! Timeouts: retries, and connections given up.
use crate::address::TIMED_OUT;
use crate::connection::State;
use crate::id::IdState;
use crate::{Environment, Machine};
use freeflow_protocol::cm::{CmEventBody, CmEventKind};
use freeflow_verbs::Instant;
use freeflow_wire::cm::{About, reason};

/// Timers that one call deals with; what is left is due at once again.
const TIMERS_PER_CALL_MAX: usize = 4096;

impl Machine {
    /// Does what is due at `now`: see [`Self::poll_timeout`].
    pub fn handle_timeout<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant) {
        for _ in 0..TIMERS_PER_CALL_MAX {
            let Some(number) = self.take_due(now) else { break };
            self.handle_due(env, now, number);
        }
        self.resolve_again(env, now);
    }

    fn handle_due<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, number: u32) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        match connection.state {
            State::RequestSent | State::ReplySent | State::DisconnectSent | State::ServiceAsked => {
                if connection.retries_left == 0 || now >= connection.give_up {
                    return self.give_up(env, now, number);
                }
                connection.retries_left -= 1;
                let interval = self.limits.timing(connection.path.link).retry_interval;
                self.set_timer(number, Some(now + interval));
                self.send_again(env, number);
            }
            State::RequestReceived | State::ReplyReceived | State::ServiceRequested => self.give_up(env, now, number),
            State::TimeWait => {
                let handle = self.holder(number);
                self.forget(number);
                let Some(handle) = handle else { return };
                if self.ids.get(handle).is_some_and(|id| id.state == IdState::Disconnected) {
                    self.notify_owner(env, handle, CmEventKind::TimewaitExit, 0, CmEventBody::Nothing);
                }
            }
            State::ServiceAnswered => self.forget(number),
            State::Established => {}
        }
    }

    /// No answer came, from the other end or from the program here, and none is waited for any
    /// more.
    pub(crate) fn give_up<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, number: u32) {
        let Some(connection) = self.connections.get(&number) else { return };
        match connection.state {
            State::RequestSent => self.send_withdrawal(env, number),
            State::ReplySent => self.send_reject(env, number, About::Other, reason::TIMEOUT, &[]),
            State::ReplyReceived => self.send_reject(env, number, About::Rep, reason::TIMEOUT, &[]),
            State::RequestReceived => self.send_reject(env, number, About::Req, reason::NO_RESOURCES, &[]),
            State::ServiceRequested => self.send_service_refusal(env, number, &[]),
            State::ServiceAsked => {}
            State::DisconnectSent => return self.disconnected(env, now, number, TIMED_OUT),
            State::Established | State::TimeWait | State::ServiceAnswered => return,
        }
        self.fail(env, now, number, CmEventKind::Unreachable, TIMED_OUT, CmEventBody::Nothing);
    }
}
