//! The mutex that is biased to a thread: its entrance without the mutex, and how another thread takes that back.
use super::check;
use freeflow_shm::biased_mutex::Bias;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{Ordering::*, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

/// Names of threads.
const ONE: u64 = 16;
const OTHER: u64 = 32;

/// A value under the mutex; loom fails where two reach it at once, or without one seeing what the other wrote.
#[derive(Default)]
struct Protected {
    bias: Bias,
    was_biased: Mutex<bool>,
    value: UnsafeCell<u32>,
}

impl Protected {
    fn add(&self, thread: u64) {
        let entrance = self.bias.enter(thread);
        let mut mutex = entrance.is_none().then(|| {
            let was_biased = self.was_biased.lock().unwrap();
            if self.bias.is_given() {
                self.bias.take_back(|| fence(SeqCst), thread::yield_now);
            }
            was_biased
        });
        // SAFETY: that it is alone is what is checked.
        self.value.with_mut(|value| unsafe { *value += 1 });
        if let Some(entrance) = entrance {
            entrance.leave();
        }
        if let Some(was_biased) = mutex.as_mut().filter(|was_biased| !***was_biased) {
            self.bias.give(thread);
            **was_biased = true;
        }
        drop(mutex);
    }
}

/// The thread to which it is biased goes on while another comes; each entrance is alone.
#[test]
fn a_bias_that_is_taken_back_lets_one_in_at_a_time() {
    check(|| {
        let protected = Arc::new(Protected::default());
        protected.add(ONE);
        let other = {
            let protected = Arc::clone(&protected);
            thread::spawn(move || protected.add(OTHER))
        };
        protected.add(ONE);
        protected.add(ONE);
        other.join().unwrap();
        // SAFETY: no other thread is left.
        assert_eq!(protected.value.with(|value| unsafe { *value }), 4);
    });
}

/// Either thread may have it first.
#[test]
fn a_bias_that_either_thread_gets_lets_one_in_at_a_time() {
    check(|| {
        let protected = Arc::new(Protected::default());
        let other = {
            let protected = Arc::clone(&protected);
            thread::spawn(move || {
                protected.add(OTHER);
                protected.add(OTHER);
            })
        };
        protected.add(ONE);
        protected.add(ONE);
        other.join().unwrap();
        // SAFETY: no other thread is left.
        assert_eq!(protected.value.with(|value| unsafe { *value }), 4);
    });
}
