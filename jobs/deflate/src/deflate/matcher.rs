//! Match finder with a window of 4 KiB.

use std::ops::Range;

use super::block::Piece;

/// Distances are less than this.
const WINDOW: usize = 4096;
/// Buckets by the hash of four bytes: a table of 16 KiB shares the L1 cache with the input.
const BUCKET_BITS: u32 = 11;
/// Latest positions by the hash of three bytes.
const SHORT_BITS: u32 = 11;
/// Longest match of RFC 1951.
pub(super) const MATCH_MAX: usize = 258;
/// Bytes that must follow a position to search for a match there: one load.
const MARGIN: usize = 8;
/// Maximum distance of a three-byte match: beyond it, the distance costs too many bits.
const SHORT_DISTANCE_MAX: usize = 512;
/// A match of this length is taken without trying the next byte.
const NICE: usize = 48;
/// In a run with a period up to this, only the last few positions are recorded.
const RUN_PERIOD_MAX: usize = 8;

/// Range of a 16-bit position.
pub(super) const RING: usize = 64 << 10;

/// Some literals, then a match; `len` is 0 if only literals remain in a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) literals: u16,
    pub(super) len: u16,
    pub(super) distance: u16,
}

/// Latest positions within the last 4 KiB.
///
/// Positions are modulo 2^16, the ring's size. A bucket holds the four latest in one word, newest
/// lowest: one load returns all candidates, and their comparisons are independent, unlike those of
/// a hash chain. A stale position is harmless: its distance is bounded by the bytes behind, and its
/// bytes are compared.
#[derive(Debug)]
pub(super) struct Matcher {
    level: i32,
    tables: Box<Tables>,
}

#[derive(Debug)]
struct Tables {
    buckets: [u64; 1 << BUCKET_BITS],
    short: [u16; 1 << SHORT_BITS],
    /// The latest input. The eight bytes after its end repeat its start, so that a load may pass
    /// the end.
    ring: [u8; RING + 8],
}

#[derive(Clone, Copy, Debug)]
struct Match {
    len: usize,
    distance: usize,
}

#[inline(always)]
fn hash(word: u32, bits: u32) -> usize {
    (word.wrapping_mul(0x9e37_79b1) >> (32 - bits)) as usize
}

impl Tables {
    #[inline(always)]
    fn load4(&self, at: u16) -> u32 {
        let at = usize::from(at);
        self.ring[at..at + 4].first_chunk().map_or(0, |c| u32::from_le_bytes(*c))
    }

    #[inline(always)]
    fn load8(&self, at: u16) -> u64 {
        let at = usize::from(at);
        self.ring[at..at + 8].first_chunk().map_or(0, |c| u64::from_le_bytes(*c))
    }

    /// Number of equal bytes at two positions, at most `max`.
    #[inline(always)]
    fn equal_bytes(&self, a: u16, b: u16, max: usize) -> usize {
        let mut len = 0;
        while len < max {
            let step = len as u16;
            let differ = self.load8(a.wrapping_add(step)) ^ self.load8(b.wrapping_add(step));
            if differ != 0 {
                return max.min(len + (differ.trailing_zeros() >> 3) as usize);
            }
            len += 8;
        }
        max
    }

    /// Adds a position to its bucket and returns the previous content.
    #[inline(always)]
    fn push(&mut self, at: usize, word: u32) -> u64 {
        let bucket = &mut self.buckets[hash(word, BUCKET_BITS)];
        let before = *bucket;
        *bucket = before << 16 | at as u64 & 0xffff;
        before
    }

    /// Adds a position by three bytes and returns the previous one.
    #[inline(always)]
    fn push_short(&mut self, at: usize, word: u32) -> u16 {
        std::mem::replace(&mut self.short[hash(word << 8, SHORT_BITS)], at as u16)
    }

    #[inline(always)]
    fn push_all<const SHORT: bool>(&mut self, range: Range<usize>) {
        for at in range {
            let word = self.load4(at as u16);
            self.push(at, word);
            if SHORT {
                self.push_short(at, word);
            }
        }
    }

    /// Adds `at` and finds the longest match there that is longer than `beat` (at least 2) and at
    /// most `max`.
    #[inline(always)]
    fn find<const WAYS: usize, const SHORT: bool>(
        &mut self,
        at: usize,
        max: usize,
        beat: usize,
    ) -> Option<Match> {
        let here = at as u16;
        let word = self.load4(here);
        let bucket = self.push(at, word);
        let short = if SHORT { self.push_short(at, word) } else { here };
        let reach = at.min(WINDOW - 1);
        let distance_of = |candidate: u16| usize::from(here.wrapping_sub(candidate));
        let in_reach = |distance: usize, reach: usize| distance.wrapping_sub(1) < reach;

        let candidates = [bucket, bucket >> 16, bucket >> 32, bucket >> 48].map(|c| c as u16);
        let mut any = false;
        for &candidate in &candidates[..WAYS] {
            any |= self.load4(candidate) == word;
        }
        if !any {
            let distance = distance_of(short);
            let found = SHORT
                && beat < 3
                && (self.load4(short) ^ word) << 8 == 0
                && in_reach(distance, reach.min(SHORT_DISTANCE_MAX));
            return found.then_some(Match { len: 3, distance });
        }
        let mut best = None;
        let mut best_len = beat.max(3);
        for &candidate in &candidates[..WAYS] {
            let distance = distance_of(candidate);
            if !in_reach(distance, reach) {
                break;
            }
            let len = self.equal_bytes(candidate, here, max);
            if len > best_len {
                best = Some(Match { len, distance });
                best_len = len;
            }
        }
        best
    }
}

impl Matcher {
    pub(super) fn new(level: i32) -> Self {
        Self {
            level,
            tables: Box::new(Tables {
                buckets: [0; 1 << BUCKET_BITS],
                short: [0; 1 << SHORT_BITS],
                ring: [0; RING + 8],
            }),
        }
    }

    /// Resets the state, so that the output depends only on the unit.
    pub(super) fn reset(&mut self) {
        // Out of reach of the first positions.
        self.tables.buckets.fill(0x8000_8000_8000_8000);
        self.tables.short.fill(0x8000);
    }

    /// Splits a segment of the unit into sequences and counts their symbols per piece. The segment
    /// is at most a ring, or half a ring if the unit has several segments.
    pub(super) fn scan(
        &mut self,
        unit: &[u8],
        segment: Range<usize>,
        piece_bytes: usize,
        sequences: &mut Vec<Sequence>,
        pieces: &mut Vec<Piece>,
    ) {
        let start = segment.start % RING;
        let ring = &mut self.tables.ring;
        ring[start..start + segment.len()].copy_from_slice(&unit[segment.clone()]);
        if start == 0 {
            ring.copy_within(..8, RING);
        }
        let scan = match self.level {
            ..=1 => Self::scan_with::<2, false, false>,
            2 => Self::scan_with::<4, false, false>,
            3 => Self::scan_with::<4, true, false>,
            4.. => Self::scan_with::<4, true, true>,
        };
        scan(self, unit, segment, piece_bytes, sequences, pieces);
    }

    fn scan_with<const WAYS: usize, const SHORT: bool, const LAZY: bool>(
        &mut self,
        unit: &[u8],
        segment: Range<usize>,
        piece_bytes: usize,
        sequences: &mut Vec<Sequence>,
        pieces: &mut Vec<Piece>,
    ) {
        let tables = &mut *self.tables;
        let end = segment.end;
        let search_end = end.saturating_sub(MARGIN);
        let longest = |at: usize| MATCH_MAX.min(end - at);
        let mut at = segment.start;
        while at < end {
            let piece_start = at;
            let piece_end = end.min(at + piece_bytes);
            let mut piece = Piece::default();
            let mut literals_from = at;
            while at < piece_end {
                if at >= search_end {
                    at = piece_end;
                    break;
                }
                let Some(mut found) = tables.find::<WAYS, SHORT>(at, longest(at), 2) else {
                    at += 1;
                    continue;
                };
                let mut noted = at + 1;
                while LAZY && found.len < NICE && noted < search_end && noted < piece_end {
                    let better = tables.find::<WAYS, SHORT>(noted, longest(noted), found.len);
                    noted += 1;
                    let Some(better) = better else { break };
                    found = better;
                    at = noted - 1;
                }
                piece.count_literals(&unit[literals_from..at]);
                piece.count_match(found.len, found.distance);
                sequences.push(Sequence {
                    literals: (at - literals_from) as u16,
                    len: found.len as u16,
                    distance: found.distance as u16,
                });
                at += found.len;
                literals_from = at;
                if found.distance <= RUN_PERIOD_MAX {
                    noted = noted.max(at - RUN_PERIOD_MAX.min(found.len));
                }
                tables.push_all::<SHORT>(noted..at.min(search_end));
            }
            if literals_from < at {
                piece.count_literals(&unit[literals_from..at]);
                sequences.push(Sequence {
                    literals: (at - literals_from) as u16,
                    len: 0,
                    distance: 0,
                });
            }
            piece.bytes = at - piece_start;
            piece.sequences = sequences.len();
            pieces.push(piece);
        }
    }
}
