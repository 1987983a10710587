//! The list of pieces that a program's call names.
use crate::memory::Memory;
use crate::stream::Span;
use libc::iovec;

/// A position in a program's list of pieces.
#[derive(Debug)]
pub struct Pieces<'a> {
    list: &'a [iovec],
    offset: usize,
}

impl<'a> Pieces<'a> {
    /// # Safety
    /// Each piece is valid for its length as long as this lives.
    #[must_use]
    pub unsafe fn new(list: &'a [iovec]) -> Self {
        Self { list, offset: 0 }
    }

    /// `None`: more than a call can answer.
    #[must_use]
    pub fn bytes(&self) -> Option<usize> {
        let total = self.list.iter().try_fold(0usize, |sum, piece| sum.checked_add(piece.iov_len))?;
        (total <= isize::MAX as usize).then_some(total)
    }

    /// The next up to `most` bytes that lie in one piece, without taking them.
    #[inline]
    pub fn front(&mut self, most: usize) -> (*mut u8, usize) {
        while let [first, rest @ ..] = self.list {
            if self.offset < first.iov_len {
                let left = (first.iov_len - self.offset).min(most);
                return (first.iov_base.cast::<u8>().wrapping_add(self.offset), left);
            }
            self.list = rest;
            self.offset = 0;
        }
        (std::ptr::null_mut(), 0)
    }

    /// Hands out the next `bytes`, piece by piece.
    #[inline]
    pub fn take(&mut self, bytes: usize, mut each: impl FnMut(*mut u8, usize, usize)) {
        let mut done = 0;
        while done < bytes {
            let (pointer, length) = self.front(bytes - done);
            if length == 0 {
                return;
            }
            each(pointer, done, length);
            self.offset += length;
            done += length;
        }
    }

    /// Copies the next bytes into a piece of registered memory.
    pub fn fill(&mut self, memory: &Memory, span: Span) {
        self.take(span.bytes as usize, |from, done, length| {
            // SAFETY: the contract of `new`: each piece is valid for its length.
            unsafe { memory.fill(span.offset as usize + done, from, length) };
        });
    }

    pub fn extract(&mut self, memory: &Memory, span: Span) {
        self.take(span.bytes as usize, |to, done, length| {
            // SAFETY: the contract of `new`: each piece is valid for its length.
            unsafe { memory.extract(span.offset as usize + done, to, length) };
        });
    }
}
