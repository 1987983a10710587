//! All chance of a run, from one seed (SplitMix64).

#[derive(Clone, Debug)]
pub struct Rng(u64);

/// A part of a whole million.
pub const MILLION: u64 = 1_000_000;

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Another row of numbers out of the same seed: what is drawn from one changes nothing of the
    /// other.
    pub fn for_part(seed: u64, part: u64) -> Self {
        let mut rng = Self(seed ^ part.wrapping_mul(0xd6e8_feb8_6659_fd93));
        rng.draw();
        rng
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// 0 … `sides` - 1; 0 for no sides.
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.draw() % sides.max(1)
    }

    /// `from` … `to`, both included.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.roll(to - from + 1)
    }

    pub fn happens(&mut self, per_million: u64) -> bool {
        per_million > 0 && self.roll(MILLION) < per_million
    }

    pub fn one_in(&mut self, count: u64) -> bool {
        self.roll(count) == 0
    }

    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.roll(of.len() as u64) as usize]
    }
}
