//! How often hosts say that they have followed: with each change all of a large cluster would speak at once, and etcd
//! writes one word after another.
use crate::records::{Followed, Holdings};
use std::time::{Duration, Instant};

/// Of fewer hosts each speaks at once.
const AT_ONCE_COUNT: usize = 64;
/// For each host there are so long between two words of a host, so in all there are 500 a second.
const PAUSE_OF_EACH: Duration = Duration::from_millis(2);
const PAUSE_LONGEST: Duration = Duration::from_secs(30);

/// A host's last words, and when it may say the next ones. Only those wait that have nothing new but a later revision.
#[derive(Default)]
pub struct Pace {
    last: Option<(Instant, Holdings, Followed)>,
    waits: bool,
}

impl Pace {
    /// Between two words of a host, where there are so many.
    pub fn pause(host_count: usize) -> Duration {
        let count = u32::try_from(host_count).unwrap_or(u32::MAX);
        if host_count <= AT_ONCE_COUNT { Duration::ZERO } else { (PAUSE_OF_EACH * count).min(PAUSE_LONGEST) }
    }

    /// Whether these words are to be said now, and are from now on the last ones; else they wait.
    pub fn may_say(&mut self, holdings: &Holdings, followed: &Followed, pause: Duration, now: Instant) -> bool {
        let is_same = |(_, before, last): &(Instant, Holdings, Followed)| {
            let last = Followed { revision: followed.revision, at_s: followed.at_s, ..last.clone() };
            before == holdings && last == *followed
        };
        self.waits = self.last.as_ref().is_some_and(|last| now < last.0 + pause && is_same(last));
        if !self.waits {
            self.last = Some((now, holdings.clone(), followed.clone()));
        }
        !self.waits
    }

    /// How long words wait still; `None`: none do.
    pub fn wait(&self, pause: Duration, now: Instant) -> Option<Duration> {
        let (said_at, ..) = self.last.as_ref().filter(|_| self.waits)?;
        Some((*said_at + pause).saturating_duration_since(now))
    }

    /// The next words are said at once, whatever they are.
    pub fn forget(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::Problem;

    #[test]
    fn words_wait_that_say_nothing_but_a_later_revision() {
        let (mut pace, begin, pause) = (Pace::default(), Instant::now(), Duration::from_secs(2));
        let at = |seconds| begin + Duration::from_secs(seconds);
        let word = |revision| Followed { revision, ..Followed::default() };
        let none = Holdings::default();
        assert!(pace.may_say(&none, &word(1), pause, at(0)) && pace.wait(pause, at(0)).is_none());
        assert!(!pace.may_say(&none, &word(2), pause, at(1)));
        assert_eq!(pace.wait(pause, at(1)), Some(Duration::from_secs(1)));
        assert_eq!(pace.wait(pause, at(9)), Some(Duration::ZERO));
        let with_problem = Followed { problems: vec![Problem::new("a")], ..word(2) };
        assert!(pace.may_say(&none, &with_problem, pause, at(1)) && pace.wait(pause, at(1)).is_none());
        let claims = Holdings { claims: [("v".to_owned(), 1)].into(), ..Holdings::default() };
        assert!(pace.may_say(&claims, &with_problem, pause, at(1)));
        assert!(!pace.may_say(&claims, &with_problem, pause, at(2)) && pace.may_say(&claims, &word(2), pause, at(2)));
        assert!(!pace.may_say(&claims, &word(3), pause, at(3)) && pace.may_say(&claims, &word(3), pause, at(4)));
        assert!(pace.may_say(&claims, &word(4), Duration::ZERO, at(4)), "few hosts");
        assert!(!pace.may_say(&claims, &word(5), pause, at(5)));
        pace.forget();
        assert!(pace.may_say(&claims, &word(5), pause, at(5)));
    }

    #[test]
    fn the_pause_grows_with_the_hosts() {
        let pauses = [2, 64, 65, 1000, 10_000, usize::MAX].map(|count| Pace::pause(count).as_millis());
        assert_eq!(pauses, [0, 0, 130, 2000, 20_000, 30_000]);
    }
}
