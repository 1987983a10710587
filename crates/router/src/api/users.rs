//! Limits of each user of the server: connections, requests at a time, requests a second.
//!
//! Users without a role have a few places of their own, so that they keep nobody out. The admin always finds some, also
//! while one process of the admin takes all that it can.
use super::caller::Caller;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Connections of all, where there are descriptors enough.
const CONNECTION_COUNT_MAX: usize = 256;
const CONNECTION_COUNT_MIN: usize = 32;
/// Requests of one user that are being worked on, or whose answers wait to be read. Others wait.
const REQUEST_COUNT_MAX: usize = 4;
/// Requests of one user who is not the admin: so many at once, and then one in this time.
const BURST_COUNT: u32 = 100;
const REQUEST_INTERVAL: Duration = Duration::from_millis(10);

pub struct User {
    uid: u32,
    is_admin: bool,
    pub requests: Arc<Semaphore>,
    /// When all requests so far are paid for.
    paid: Mutex<Instant>,
}

impl User {
    /// How long the next request has to wait.
    fn charge(&self, now: Instant) -> Duration {
        let mut paid = self.paid.lock().unwrap_or_else(PoisonError::into_inner);
        *paid = (*paid).max(now) + REQUEST_INTERVAL;
        (*paid - now).saturating_sub(REQUEST_INTERVAL * BURST_COUNT)
    }

    fn owes(&self, now: Instant) -> bool {
        *self.paid.lock().unwrap_or_else(PoisonError::into_inner) > now
    }

    pub async fn pace(&self) {
        if !self.is_admin {
            tokio::time::sleep(self.charge(Instant::now())).await;
        }
    }
}

#[derive(Default)]
struct Taken {
    all: usize,
    nobodies: usize,
    not_admins: usize,
    /// Connections of each process of the admin.
    by_process: BTreeMap<i32, usize>,
    /// A user that is gone stays here while it has something to pay.
    by_user: BTreeMap<u32, (usize, Arc<User>)>,
}

pub struct Users {
    connection_count_max: usize,
    taken: Mutex<Taken>,
}

/// A connection's; given back when dropped.
pub struct Place {
    users: Arc<Users>,
    is_nobody: bool,
    /// Of the admin: by which its connections are counted.
    process: Option<i32>,
    pub user: Arc<User>,
}

impl Users {
    /// `descriptors`: what this process may have.
    pub fn new(descriptors: u64) -> Arc<Self> {
        let share = usize::try_from(descriptors / 16).unwrap_or(usize::MAX);
        let connection_count_max = share.clamp(CONNECTION_COUNT_MIN, CONNECTION_COUNT_MAX);
        Arc::new(Self { connection_count_max, taken: Mutex::default() })
    }

    /// `None`: there is no room for one more.
    pub fn enter(self: &Arc<Self>, caller: &Caller) -> Option<Place> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (is_admin, is_nobody, uid) = (caller.role.is_admin, caller.role.is_nobody(), caller.who.uid);
        let max = self.connection_count_max;
        let own = taken.by_user.get(&uid).map_or(0, |(count, _)| *count);
        let process = is_admin.then_some(caller.who.pid);
        let of_process = process.and_then(|pid| taken.by_process.get(&pid)).copied().unwrap_or(0);
        let fits = taken.all < max
            && of_process < max * 7 / 8
            && (is_admin || taken.not_admins < max * 3 / 4 && own < max / 8)
            && (!is_nobody || taken.nobodies < max / 8);
        if !fits {
            return None;
        }
        let fresh = || {
            let requests = Arc::new(Semaphore::new(REQUEST_COUNT_MAX));
            Arc::new(User { uid, is_admin, requests, paid: Mutex::new(Instant::now()) })
        };
        let now = Instant::now();
        taken.by_user.retain(|_, (count, user)| *count > 0 || user.owes(now));
        taken.all += 1;
        taken.not_admins += usize::from(!is_admin);
        taken.nobodies += usize::from(is_nobody);
        if let Some(pid) = process {
            *taken.by_process.entry(pid).or_default() += 1;
        }
        let (count, user) = taken.by_user.entry(uid).or_insert_with(|| (0, fresh()));
        *count += 1;
        let mut user = user.clone();
        if user.is_admin != is_admin {
            // The same user with other groups than before.
            user = Arc::new(User { is_admin, requests: user.requests.clone(), uid, paid: Mutex::new(Instant::now()) });
        }
        Some(Place { users: self.clone(), is_nobody, process, user })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.users.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        taken.not_admins -= usize::from(!self.user.is_admin);
        taken.nobodies -= usize::from(self.is_nobody);
        if let Some((count, _)) = taken.by_user.get_mut(&self.user.uid) {
            *count -= 1;
        }
        if let Some(pid) = self.process
            && let Some(count) = taken.by_process.get_mut(&pid)
        {
            *count -= 1;
            if *count == 0 {
                taken.by_process.remove(&pid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::caller::Role;
    use super::*;
    use crate::audit::Who;

    fn caller(uid: u32, is_viewer: bool) -> Caller {
        let role = Role { is_admin: uid == 0, is_viewer, ..Role::default() };
        Caller { who: Who { uid, pid: 1, role: role.to_string() }, role: Arc::new(role) }
    }

    fn fill(users: &Arc<Users>, callers: impl Iterator<Item = Caller>) -> Vec<Place> {
        callers.filter_map(|caller| users.enter(&caller)).collect()
    }

    #[test]
    fn nobody_takes_what_others_need() {
        let users = Users::new(1 << 20);
        let nobodies = fill(&users, (1000..9000).map(|uid| caller(uid, false)));
        assert_eq!(nobodies.len(), 32);
        let one = fill(&users, (0..1000).map(|_| caller(500, true)));
        assert_eq!(one.len(), 32);
        let many = fill(&users, (1000..9000).map(|uid| caller(uid, true)));
        assert_eq!(nobodies.len() + one.len() + many.len(), 192);
        let admin = fill(&users, (0..1000).map(|_| caller(0, false)));
        assert_eq!(admin.len(), 64);
        drop((nobodies, one, many, admin));
        assert_eq!(fill(&users, [caller(1, true)].into_iter()).len(), 1);
        assert_eq!(users.taken.lock().unwrap().by_user.len(), 1);
        let process = fill(&users, (0..1000).map(|_| caller(0, false)));
        assert_eq!(process.len(), 224);
        let mut another = caller(0, false);
        another.who.pid = 2;
        assert_eq!(fill(&users, (0..1000).map(|_| another.clone())).len(), 32);
        drop(process);
        assert!(users.taken.lock().unwrap().by_process.is_empty());
        assert_eq!(Users::new(64).connection_count_max, CONNECTION_COUNT_MIN);
    }

    #[test]
    fn requests_in_a_row_have_to_wait() {
        let users = Users::new(1 << 20);
        let place = users.enter(&caller(5, true)).unwrap();
        let now = Instant::now();
        assert!((0..BURST_COUNT).all(|_| place.user.charge(now).is_zero()));
        assert_eq!(place.user.charge(now), REQUEST_INTERVAL);
        drop(place);
        let place = users.enter(&caller(5, true)).unwrap();
        assert_eq!(place.user.charge(now), REQUEST_INTERVAL * 2);
        assert_eq!(place.user.charge(now + REQUEST_INTERVAL * 10), Duration::ZERO);
    }
}
