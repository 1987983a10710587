//! Input as a sequence of small values. An input that has ended gives `None` from then on.

pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn array<const COUNT: usize>(&mut self) -> Option<[u8; COUNT]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    pub fn u8(&mut self) -> Option<u8> {
        Some(self.array::<1>()?[0])
    }

    pub fn u16(&mut self) -> Option<u16> {
        Some(u16::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.array()?))
    }

    /// As many bytes as two bytes of length say, or what is left.
    pub fn chunk(&mut self) -> Option<&'a [u8]> {
        let length = self.u16()?;
        let (chunk, rest) = self.0.split_at(usize::from(length).min(self.0.len()));
        self.0 = rest;
        Some(chunk)
    }
}
