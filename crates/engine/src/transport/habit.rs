//! Whether an acknowledgement waits for the answer of the program: a responder's knowledge of how soon its QP sends
//! something itself after a message has come.
//!
//! Messages that arrive together are one *question*; the next burst of the QP's own is the *answer*. A QP that has
//! answered a few questions in a row within [`ANSWER_WAIT`] is expected to go on like that. One question without an
//! answer, or a second question before the answer, and it is not any more; and a QP that has made its peer wait in
//! vain needs twice as many answers the next time.
use freeflow_verbs::{Duration, Instant};
use serde::{Deserialize, Serialize};

/// How long an acknowledgement waits at most. Far less than a probe or a local ACK timeout of those who let it wait
/// ([`PATIENT_TIMEOUT_MIN`]), and than the allowance for delay of the congestion window.
pub(crate) const ANSWER_WAIT: Duration = Duration::from_micros(50);
/// The least local ACK timeout (in its exponent: 1 ms) of a requester that lets acknowledgements wait.
pub(crate) const PATIENT_TIMEOUT_MIN: u8 = 8;
/// A requester lets them wait while it has fewer packets on the way.
pub(crate) const PATIENT_PACKETS_MAX: u32 = 4;

/// Answers in a row that make a habit; after waits in vain up to so many.
const HABIT_ANSWERS: u16 = 4;
const HABIT_ANSWERS_MAX: u16 = 64;
/// After so many in a row, waits in vain are forgotten.
const FORGIVING_ANSWERS: u16 = 256;

/// Messages since acknowledgements last went out or began to wait.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Batch {
    Nothing,
    /// All of them may be a question.
    Question,
    /// One wants its acknowledgement now.
    Hurry,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Habit {
    answers: u16,
    answers_wanted: u16,
    batch: Batch,
    /// When the question came that has no answer yet.
    asked_at: Option<Instant>,
    /// A message has come since the QP last sent something.
    has_heard: bool,
}

impl Habit {
    pub fn new() -> Self {
        Self { answers: 0, answers_wanted: HABIT_ANSWERS, batch: Batch::Nothing, asked_at: None, has_heard: false }
    }

    /// An acknowledgement is owed for a message whose sender lets it wait, or does not.
    pub fn note_message(&mut self, may_wait: bool) {
        self.has_heard = true;
        let may_wait = may_wait && self.batch != Batch::Hurry;
        self.batch = if may_wait { Batch::Question } else { Batch::Hurry };
    }

    /// All messages that came together are noted. Whether their acknowledgement waits.
    pub fn expects_answer(&mut self, now: Instant) -> bool {
        let asks = core::mem::replace(&mut self.batch, Batch::Nothing) == Batch::Question;
        if core::mem::replace(&mut self.asked_at, asks.then_some(now)).is_some() {
            self.answers = 0;
        }
        asks && self.answers >= self.answers_wanted
    }

    /// The QP has sent something of its own.
    pub fn note_answer(&mut self, now: Instant) {
        let has_heard = core::mem::take(&mut self.has_heard);
        let Some(asked_at) = self.asked_at.take() else {
            // It sends without being asked: it is no answer by habit that comes next.
            if !has_heard {
                self.answers = 0;
            }
            return;
        };
        if now - asked_at > ANSWER_WAIT {
            self.answers = 0;
            return;
        }
        self.answers = (self.answers + 1).min(FORGIVING_ANSWERS);
        if self.answers == FORGIVING_ANSWERS {
            self.answers_wanted = HABIT_ANSWERS;
        }
    }

    /// No question is without an answer.
    pub fn has_answered(&self) -> bool {
        self.asked_at.is_none()
    }

    /// An acknowledgement has waited in vain.
    pub fn give_up(&mut self) {
        self.asked_at = None;
        self.answers = 0;
        self.answers_wanted = (2 * self.answers_wanted).min(HABIT_ANSWERS_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_micros(20);
    const LATE: Duration = Duration::from_micros(51);

    struct Qp {
        habit: Habit,
        now: Instant,
    }

    impl Qp {
        fn new() -> Self {
            Self { habit: Habit::new(), now: Instant(1) }
        }

        fn question(&mut self) -> bool {
            self.habit.note_message(true);
            self.habit.expects_answer(self.now)
        }

        fn answer(&mut self, after: Duration) {
            self.now = self.now + after;
            self.habit.note_answer(self.now);
        }

        /// Questions that are answered soon until one would wait.
        fn learn(&mut self) -> u32 {
            for count in 0..1000 {
                if self.question() {
                    return count;
                }
                self.answer(SOON);
            }
            panic!("never");
        }
    }

    #[test]
    fn who_sends_without_being_asked_has_no_habit() {
        let mut qp = Qp::new();
        qp.learn();
        qp.answer(SOON);
        assert!(qp.question());
        qp.answer(SOON);
        qp.answer(SOON);
        assert!(!qp.question(), "it talks of its own");
    }

    #[test]
    fn four_answers_are_a_habit() {
        assert_eq!(Qp::new().learn(), 4);
    }

    #[test]
    fn a_late_answer_a_missing_one_and_a_message_in_a_hurry_end_it() {
        let mut qp = Qp::new();
        qp.learn();
        qp.answer(LATE);
        assert!(!qp.question(), "late");
        qp.answer(SOON);
        assert_eq!(qp.learn(), 3);
        assert!(!qp.question(), "two questions and no answer");
        qp.answer(SOON);
        assert_eq!(qp.learn(), 3);
        qp.answer(SOON);
        qp.habit.note_message(true);
        qp.habit.note_message(false);
        qp.habit.note_message(true);
        assert!(!qp.habit.expects_answer(qp.now), "one of three can't wait");
        assert!(qp.question(), "which says nothing of the program");
    }

    #[test]
    fn waits_in_vain_make_it_harder_until_they_are_forgotten() {
        let mut qp = Qp::new();
        for wanted in [4, 8, 16, 32, 64, 64] {
            assert_eq!(qp.learn(), wanted);
            qp.habit.give_up();
        }
        for _ in 0..FORGIVING_ANSWERS {
            qp.question();
            qp.answer(SOON);
        }
        qp.question();
        qp.answer(LATE);
        assert_eq!(qp.learn(), 4);
    }
}
