//! A value in a mapping of its own: no block of an allocator, which may share a page with memory of
//! the program's that is moved while other threads run.
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::io;
use std::ops::Deref;
use std::ptr::{self, NonNull};

/// A value that no move of registered memory touches. For what a thread changes without the lock of
/// such moves.
#[derive(Debug)]
pub struct OwnMapping<T>(NonNull<T>);

// SAFETY: it owns the value, as a box does.
unsafe impl<T: Send> Send for OwnMapping<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for OwnMapping<T> {}

impl<T> OwnMapping<T> {
    /// # Errors
    /// There is no memory.
    pub fn new(value: T) -> io::Result<Self> {
        const { assert!(size_of::<T>() > 0 && align_of::<T>() <= 4096) };
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), size_of::<T>(), rights, MapFlags::PRIVATE)? };
        let start = NonNull::new(start.cast::<T>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: mapped just now, aligned to a page, and of that size.
        unsafe { start.write(value) };
        Ok(Self(start))
    }
}

impl<T> Deref for OwnMapping<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: `new` wrote the value, and it stays until the drop.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Drop for OwnMapping<T> {
    fn drop(&mut self) {
        // SAFETY: the value is owned and not used any more, and `new` made the mapping.
        unsafe {
            self.0.drop_in_place();
            let _ = munmap(self.0.as_ptr().cast(), size_of::<T>());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn it_has_a_page_of_its_own_and_ends_with_its_value() {
        let counted = Arc::new(());
        let mapped = OwnMapping::new((7_u64, counted.clone())).unwrap();
        assert_eq!(mapped.0.as_ptr().addr() % 4096, 0);
        assert_eq!(Arc::strong_count(&counted), 2);
        assert_eq!(mapped.deref().0, 7);
        drop(mapped);
        assert_eq!(Arc::strong_count(&counted), 1);
    }
}
