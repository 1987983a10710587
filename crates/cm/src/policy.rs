//! Established connections when policy changes: those that are not allowed any more are cut, some
//! at a time.
use crate::connection::State;
use crate::{Asked, Environment, Machine};
use freeflow_protocol::cm::CmAddress;
use freeflow_verbs::Instant;

impl Machine {
    /// Applies a change of [`Environment::allows`]. Pending requests are checked at once,
    /// connections in [`Self::poll_policy`], which goes round, so that one change after the other
    /// does not keep it from the last ones.
    pub fn handle_policy_changed(&mut self) {
        self.policy_left = 1 << u32::BITS;
    }

    /// Whether there are connections to be looked at.
    pub fn looks_at_policy(&self) -> bool {
        self.policy_left > 0
    }

    /// Looks at so many connections at most. Both programs of one that is cut get Disconnected; of
    /// one that is being made, what they get when nobody answers.
    pub fn poll_policy<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, count_max: usize) {
        for _ in 0..count_max {
            if self.policy_left == 0 {
                return;
            }
            let first = self.policy_next;
            let next = self.connections.range(first..).next().or_else(|| self.connections.first_key_value());
            let step = |number: u32| u64::from(number.wrapping_sub(first)) + 1;
            let Some((&number, connection)) = next.filter(|(number, _)| step(**number) <= self.policy_left) else {
                self.policy_left = 0;
                return;
            };
            self.policy_left -= step(number);
            self.policy_next = number.wrapping_add(1);
            let live = !matches!(connection.state, State::DisconnectSent | State::TimeWait | State::ServiceAnswered);
            let (vnic, path) = (connection.vnic, connection.path);
            let remote = CmAddress { gid: path.remote, port: 0 };
            if live && !env.allows(vnic, path.place(), remote, Asked::ToStand) {
                self.cut(env, now, number);
            }
        }
    }

    fn cut<E: Environment + ?Sized>(&mut self, env: &mut E, now: Instant, number: u32) {
        let is_established = self.connections.get(&number).is_some_and(|c| c.state == State::Established);
        if !is_established {
            return self.give_up(env, now, number);
        }
        self.begin_disconnect(env, now, number);
        // Nobody waits for the other end's word.
        self.disconnected(env, now, number, 0);
    }
}
