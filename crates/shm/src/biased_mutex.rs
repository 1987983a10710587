//! A mutex that costs the thread which had it last no atomic read-modify-write operation: it is *biased* to that thread
//! until another one wants it.
//!
//! The thread to which it is biased says by a plain store that it is inside, and looks whether the bias still stands;
//! another one takes the bias back by a store, has the kernel make every running thread of the process pass a fence
//! (`membarrier`), and waits until the first is not inside. That is the store-buffering pattern of [`handshake`] with
//! all of its price on the side of whoever takes the bias back. It is biased once, to a thread that has shown it to be
//! its own; if another comes then, it is an ordinary mutex from there on.
//!
//! Once, because a thread that comes late, and finds that its bias was taken back, says that it is not inside: of a
//! second bias it would say it of another thread.
//!
//! [`handshake`]: crate::handshake
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Locks one after the other by the same thread until the mutex is biased to it.
#[cfg(not(loom))]
const STREAK: u32 = 192;

/// The entrance without the mutex.
#[derive(Debug, Default)]
pub struct Bias {
    /// The thread to which it is biased, or 0. Written by who has the mutex.
    thread: AtomicU64,
    /// Its thread is inside, or about to look whether it may be. Written by that thread.
    is_inside: AtomicU32,
}

/// A thread is inside until it leaves.
#[derive(Debug)]
pub struct Entrance<'a> {
    is_inside: &'a AtomicU32,
}

impl Entrance<'_> {
    #[inline]
    pub fn leave(&self) {
        // Release; partner: the Acquire load in `take_back`.
        self.is_inside.store(0, Ordering::Release);
    }
}

/// Keeps a store before a later load of the same thread, if the partner's fence is `membarrier`. The models know no
/// such fence; there both are the same.
#[inline]
fn light_fence() {
    #[cfg(not(loom))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(loom)]
    crate::sync::fence(Ordering::SeqCst);
}

impl Bias {
    /// Lets this thread in without the mutex, if it is biased to it. Never twice: a thread that is inside gets no other
    /// entrance.
    #[inline]
    pub fn enter(&self, thread: u64) -> Option<Entrance<'_>> {
        // Relaxed, all: what the mutex protects was last touched by this thread, here or when it had the mutex.
        if self.thread.load(Ordering::Relaxed) != thread || self.is_inside.load(Ordering::Relaxed) != 0 {
            return None;
        }
        self.is_inside.store(1, Ordering::Relaxed);
        // Partner: the heavy fence in `take_back`.
        light_fence();
        let entrance = Entrance { is_inside: &self.is_inside };
        if self.thread.load(Ordering::Relaxed) == thread {
            return Some(entrance);
        }
        entrance.leave();
        None
    }

    /// Whether some thread may enter. To be called by who has the mutex.
    #[inline]
    pub fn is_given(&self) -> bool {
        // Relaxed: written under the mutex.
        self.thread.load(Ordering::Relaxed) != 0
    }

    /// Lets this thread enter from now on, which has the mutex now. To be called once.
    pub fn give(&self, thread: u64) {
        // Relaxed: only this thread's loads count, and those of who has the mutex later.
        self.thread.store(thread, Ordering::Relaxed);
    }

    /// Lets no thread enter any more, and waits until none is inside. To be called by who has the mutex.
    /// `heavy_fence`: every thread of the process passes a fence between its begin and its end.
    pub fn take_back(&self, heavy_fence: impl FnOnce(), mut pass_time: impl FnMut()) {
        // Relaxed: ordered by the heavy fence.
        self.thread.store(0, Ordering::Relaxed);
        // Partner: the light fence in `enter`.
        heavy_fence();
        // Acquire; partner: the Release store in `Entrance::leave`.
        while self.is_inside.load(Ordering::Acquire) != 0 {
            pass_time();
        }
    }
}

#[cfg(not(loom))]
pub use mutex::{BiasedGuard, BiasedMutex};

#[cfg(not(loom))]
mod mutex {
    use super::{Bias, Entrance, STREAK};
    use crate::membarrier;
    use crate::sys::{pause, sched_yield, sleep_uncancelled, this_thread};
    use std::cell::UnsafeCell;
    use std::fmt;
    use std::marker::PhantomData;
    use std::mem::ManuallyDrop;
    use std::ops::{Deref, DerefMut};
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::Duration;

    /// Looks before each of which who takes the bias back pauses, then yields; after them it sleeps: who is inside
    /// makes a system call.
    const PAUSES: u32 = 64;
    const YIELDS: u32 = 1024;
    const SLEEP: Duration = Duration::from_micros(50);

    /// See the module. Locks whatever became of an earlier holder, as [`PoisonError::into_inner`] does.
    #[derive(Default)]
    pub struct BiasedMutex<T> {
        bias: Bias,
        habit: Mutex<Habit>,
        value: UnsafeCell<T>,
    }

    /// The thread that takes it again and again; under the mutex.
    #[derive(Debug, Default)]
    struct Habit {
        thread: u64,
        streak: u32,
        /// Some thread may be inside without the mutex.
        is_biased: bool,
        was_biased: bool,
    }

    // SAFETY: `value` is reached by guards alone. One at a time exists: by the mutex while it is not biased, by its
    // thread's entrance while it is; `Bias` lets nobody enter while another has the mutex, and `take_back` waits.
    unsafe impl<T: Send> Sync for BiasedMutex<T> {}

    impl<T: fmt::Debug> fmt::Debug for BiasedMutex<T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("BiasedMutex").field("bias", &self.bias).finish_non_exhaustive()
        }
    }

    impl<T> BiasedMutex<T> {
        pub fn new(value: T) -> Self {
            Self { bias: Bias::default(), habit: Mutex::default(), value: UnsafeCell::new(value) }
        }

        #[inline]
        pub fn lock(&self) -> BiasedGuard<'_, T> {
            match self.bias.enter(this_thread()) {
                Some(entrance) => self.guard(Some(entrance), None),
                None => self.guard_shared(),
            }
        }

        #[cold]
        fn guard_shared(&self) -> BiasedGuard<'_, T> {
            self.guard(None, Some(self.lock_shared()))
        }

        #[inline]
        fn guard<'a>(
            &'a self,
            entrance: Option<Entrance<'a>>,
            habit: Option<MutexGuard<'a, Habit>>,
        ) -> BiasedGuard<'a, T> {
            BiasedGuard { mutex: self, entrance, habit: ManuallyDrop::new(habit), value: PhantomData }
        }

        fn lock_shared(&self) -> MutexGuard<'_, Habit> {
            let mut habit = self.habit.lock().unwrap_or_else(PoisonError::into_inner);
            let thread = this_thread();
            if habit.is_biased {
                self.take_back();
                // Not before its end: whoever is stopped there must not have said that nobody is inside.
                habit.is_biased = false;
                habit.streak = 0;
            }
            habit.streak = if habit.thread == thread { habit.streak + 1 } else { 0 };
            habit.thread = thread;
            habit
        }

        /// Before the mutex is released, and not earlier: so a thread that locks twice at once never passes.
        #[cold]
        fn give_bias(&self, habit: &mut Habit) {
            habit.streak = 0;
            if !habit.was_biased && membarrier::is_registered() {
                (habit.is_biased, habit.was_biased) = (true, true);
                self.bias.give(habit.thread);
            }
        }

        #[cold]
        fn take_back(&self) {
            let mut looks = 0;
            self.bias.take_back(membarrier::fence_all_threads, || {
                looks += 1;
                match looks {
                    ..PAUSES => pause(),
                    PAUSES..YIELDS => sched_yield(),
                    YIELDS.. => sleep_uncancelled(SLEEP),
                }
            });
        }
    }

    /// The value, until it is dropped.
    pub struct BiasedGuard<'a, T> {
        mutex: &'a BiasedMutex<T>,
        /// By the bias; else by the mutex, which is released out of line.
        entrance: Option<Entrance<'a>>,
        habit: ManuallyDrop<Option<MutexGuard<'a, Habit>>>,
        /// It may be shared where the value may.
        value: PhantomData<&'a mut T>,
    }

    impl<T> Deref for BiasedGuard<'_, T> {
        type Target = T;

        #[inline]
        fn deref(&self) -> &T {
            // SAFETY: this is the only guard (see `Sync`).
            unsafe { &*self.mutex.value.get() }
        }
    }

    impl<T> DerefMut for BiasedGuard<'_, T> {
        #[inline]
        fn deref_mut(&mut self) -> &mut T {
            // SAFETY: as above, borrowed for as long.
            unsafe { &mut *self.mutex.value.get() }
        }
    }

    impl<T> Drop for BiasedGuard<'_, T> {
        #[inline]
        fn drop(&mut self) {
            match &self.entrance {
                Some(entrance) => entrance.leave(),
                None => self.release_shared(),
            }
        }
    }

    impl<T> BiasedGuard<'_, T> {
        #[cold]
        fn release_shared(&mut self) {
            let Some(mut habit) = self.habit.take() else { return };
            if habit.streak >= STREAK {
                self.mutex.give_bias(&mut habit);
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use std::os::unix::thread::JoinHandleExt;
        use std::sync::Arc;
        use std::sync::atomic::{AtomicBool, Ordering};

        #[test]
        fn it_is_biased_once_and_after_a_streak() {
            assert!(membarrier::register(), "Linux 4.14 and later have it");
            let mutex = Arc::new(BiasedMutex::new(0_u64));
            (0..STREAK).for_each(|_| *mutex.lock() += 1);
            assert!(!mutex.bias.is_given());
            (0..STREAK).for_each(|_| *mutex.lock() += 1);
            assert!(mutex.bias.is_given());
            let other = mutex.clone();
            std::thread::spawn(move || *other.lock() += 1).join().unwrap();
            (0..10 * STREAK).for_each(|_| *mutex.lock() += 1);
            assert!(!mutex.bias.is_given(), "threads share it");
            assert_eq!(*mutex.lock(), u64::from(12 * STREAK + 1));
        }

        #[test]
        fn threads_by_turns_and_at_once_lose_nothing() {
            assert!(membarrier::register());
            for round in 0..200_u64 {
                let mutex = Arc::new(BiasedMutex::new(0_u64));
                let add = |mutex: &BiasedMutex<u64>, count: u64| {
                    for _ in 0..count {
                        let mut value = mutex.lock();
                        let before = *value;
                        std::hint::black_box(&mut *value);
                        *value = before + 1;
                    }
                };
                add(&mutex, u64::from(2 * STREAK));
                assert!(mutex.bias.is_given());
                let threads = [500 + round, 700].map(|count| {
                    let mutex = mutex.clone();
                    std::thread::spawn(move || add(&mutex, count))
                });
                add(&mutex, 1000);
                threads.into_iter().for_each(|thread| thread.join().unwrap());
                assert_eq!(*mutex.lock(), u64::from(2 * STREAK) + 2200 + round);
            }
        }

        #[test]
        fn who_takes_the_bias_back_waits_for_who_is_inside() {
            assert!(membarrier::register());
            let mutex = Arc::new(BiasedMutex::new(0_u64));
            (0..2 * STREAK).for_each(|_| drop(mutex.lock()));
            let is_out = Arc::new(AtomicBool::new(false));
            let inside = mutex.lock();
            assert!(inside.entrance.is_some());
            let other = std::thread::spawn({
                let (mutex, is_out) = (mutex.clone(), is_out.clone());
                move || {
                    let _guard = mutex.lock();
                    is_out.load(Ordering::SeqCst)
                }
            });
            // Long enough for it to be there, or else nothing is shown; never wrong.
            std::thread::sleep(Duration::from_millis(20));
            is_out.store(true, Ordering::SeqCst);
            drop(inside);
            assert!(other.join().unwrap());
        }

        /// A thread that is cancelled while it takes the bias back would leave a mutex that says nobody is inside.
        #[test]
        fn who_takes_the_bias_back_is_not_cancelled() {
            unsafe extern "C" {
                fn pthread_setcancelstate(state: libc::c_int, before: *mut libc::c_int) -> libc::c_int;
            }
            const PTHREAD_CANCEL_DISABLE: libc::c_int = 1;
            assert!(membarrier::register());
            let mutex = Arc::new(BiasedMutex::new(0_u64));
            (0..2 * STREAK).for_each(|_| drop(mutex.lock()));
            let mut inside = mutex.lock();
            assert!(inside.entrance.is_some());
            let other = std::thread::spawn({
                let mutex = mutex.clone();
                move || {
                    let value = *mutex.lock();
                    // SAFETY: its second argument may be null. Nothing of this thread may be cut off below.
                    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, std::ptr::null_mut()) };
                    value
                }
            });
            // Long enough for it to sleep, or else nothing is shown; never wrong.
            std::thread::sleep(Duration::from_millis(20));
            // SAFETY: the thread is not joined yet.
            assert_eq!(unsafe { libc::pthread_cancel(other.as_pthread_t()) }, 0);
            std::thread::sleep(Duration::from_millis(20));
            *inside = 1;
            drop(inside);
            assert_eq!(other.join().unwrap(), 1);
        }

        trait Shared<Kind> {
            fn holds() {}
        }
        impl<T: ?Sized> Shared<()> for T {}
        impl<T: ?Sized + Sync> Shared<u8> for T {}

        /// Two threads would reach the same cell. Does not compile if the guard can be shared.
        #[test]
        fn a_guard_of_what_can_not_be_shared_is_not_shared() {
            <BiasedGuard<'_, std::cell::Cell<u32>> as Shared<_>>::holds();
        }
    }
}
