//! Bit writer, least significant bit first.

/// Collects bits and appends them to a vector, eight bytes at a time.
#[derive(Debug, Default)]
pub(super) struct BitWriter {
    bits: u64,
    count: u32,
}

impl BitWriter {
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Adds the low `count` bits of `bits`; the other bits must be zero. At most 56 bits may be
    /// added between two flushes, which leave up to seven.
    #[inline(always)]
    pub(super) fn add(&mut self, bits: u64, count: u32) {
        debug_assert!(count < 64 && bits >> count == 0 && self.count + count <= 64);
        self.bits |= bits << self.count;
        self.count += count;
    }

    /// Writes whole bytes to `out[*at..]`, which must have eight bytes of space.
    #[inline(always)]
    pub(super) fn flush_to(&mut self, out: &mut [u8], at: &mut usize) {
        if let Some(place) = out.get_mut(*at..).and_then(|o| o.first_chunk_mut::<8>()) {
            *place = self.bits.to_le_bytes();
        }
        let bytes = self.count >> 3;
        *at += bytes as usize;
        // A shift by 64 is not allowed; two shifts give zero.
        self.bits = (self.bits >> (bytes * 4)) >> (bytes * 4);
        self.count &= 7;
    }

    /// Appends the whole bytes to `out`.
    pub(super) fn flush(&mut self, out: &mut Vec<u8>) {
        while self.count >= 8 {
            out.push(self.bits as u8);
            self.bits >>= 8;
            self.count -= 8;
        }
    }

    /// Appends everything, padding the last byte with zero bits.
    pub(super) fn align(&mut self, out: &mut Vec<u8>) {
        self.count = self.count.next_multiple_of(8);
        self.flush(out);
    }

    /// Bits not yet in a whole byte.
    pub(super) fn pending(&self) -> u32 {
        self.count
    }
}
