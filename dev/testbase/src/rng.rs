//! A small random source whose runs can be repeated from a printed number.

use crate::seeds::number;

/// SplitMix64. Not for secrets.
#[derive(Clone, Debug)]
pub struct Rng {
    seed: u64,
    state: u64,
}

impl Rng {
    /// The run that belongs to a seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, state: seed }
    }

    /// The run of the seed in the environment variable `VDKIT_SEED`, or of `fallback`. To repeat
    /// a failed test, set the variable to the seed that it printed.
    pub fn from_env(fallback: u64) -> Self {
        Self::new(number("VDKIT_SEED").unwrap_or(fallback))
    }

    /// The seed, to be printed with a failure.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 where `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// A number of the range.
    pub fn within(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.below(range.end.saturating_sub(range.start))
    }

    /// True in `numerator` of `denominator` cases.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// Fills `buf` with random bytes.
    pub fn fill(&mut self, buf: &mut [u8]) {
        for chunk in buf.chunks_mut(8) {
            chunk.copy_from_slice(&self.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_one_run_and_numbers_stay_in_range() {
        let (mut a, mut b) = (Rng::new(7), Rng::new(7));
        let mut seen = [false; 10];
        for _ in 0..1000 {
            let n = a.below(10);
            assert_eq!(n, b.below(10));
            seen[n as usize] = true;
            assert!((5..8).contains(&a.within(5..8)));
            b.within(5..8);
        }
        assert_eq!(seen, [true; 10]);
        assert_eq!(Rng::new(1).below(0), 0);
        assert_ne!(Rng::new(1).next_u64(), Rng::new(2).next_u64());
    }
}
