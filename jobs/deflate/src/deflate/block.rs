//! Blocks: merging of neighboring pieces, and encoding.

use super::bits::BitWriter;
use super::huffman::{CODE_BITS_MAX, assign, code_lengths};
use super::matcher::{MATCH_MAX, Sequence};

/// Literals, end of block and lengths.
const LITLEN_SYMBOLS: usize = 286;
const END: usize = 256;
/// Distances below 4096 need only the first 24 of 30 symbols.
const DISTANCE_SYMBOLS: usize = 24;
/// One bit below the limit, so that four literals fit between two flushes.
const LITLEN_BITS_MAX: u32 = 14;
const PRECODE_SYMBOLS: usize = 19;
const PRECODE_BITS_MAX: u32 = 7;
const PRECODE_ORDER: [usize; PRECODE_SYMBOLS] =
    [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// First length of each length symbol (from 257 on) and its number of extra bits.
const LENGTHS: [(u16, u8); 29] = {
    let mut table = [(MATCH_MAX as u16, 0); 29];
    let (mut slot, mut first) = (0usize, 3u16);
    while slot < 28 {
        // Four symbols have each number of extra bits, but eight have none.
        let extra = if slot < 8 { 0 } else { slot / 4 - 1 };
        table[slot] = (first, extra as u8);
        first += 1 << extra;
        slot += 1;
    }
    table
};

/// Length symbol (less 257) of each match length.
static LENGTH_SLOT: [u8; 259] = {
    let mut table = [0u8; 259];
    let mut slot = 0;
    while slot < 28 {
        let (first, extra) = LENGTHS[slot];
        let mut len = first as usize;
        while len < first as usize + (1 << extra) && len < 258 {
            table[len] = slot as u8;
            len += 1;
        }
        slot += 1;
    }
    table[258] = 28;
    table
};

/// Symbol, number of extra bits and extra bits of a distance.
#[inline(always)]
fn distance_slot(distance: usize) -> (usize, u32, u32) {
    let d = distance as u32 - 1;
    if d < 4 {
        return (d as usize, 0, 0);
    }
    let top = 31 - d.leading_zeros();
    let extra = top - 1;
    ((2 * top + ((d >> extra) & 1)) as usize, extra, d & ((1 << extra) - 1))
}

/// Symbol statistics of some input bytes.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    litlen: [u32; LITLEN_SYMBOLS],
    distance: [u32; DISTANCE_SYMBOLS],
    /// Input bytes.
    pub(super) bytes: usize,
    /// Index of the end of its sequences.
    pub(super) sequences: usize,
}

impl Default for Piece {
    fn default() -> Self {
        Self {
            litlen: [0; LITLEN_SYMBOLS],
            distance: [0; DISTANCE_SYMBOLS],
            bytes: 0,
            sequences: 0,
        }
    }
}

impl Piece {
    #[inline(always)]
    pub(super) fn count_literals(&mut self, literals: &[u8]) {
        for &byte in literals {
            self.litlen[usize::from(byte)] += 1;
        }
    }

    #[inline(always)]
    pub(super) fn count_match(&mut self, len: usize, distance: usize) {
        self.litlen[257 + usize::from(LENGTH_SLOT[len])] += 1;
        self.distance[distance_slot(distance).0] += 1;
    }

    /// The sum of this piece and `next`, which follows it.
    fn with(&self, next: &Self) -> Self {
        let mut sum = self.clone();
        for (a, b) in sum.litlen.iter_mut().zip(&next.litlen) {
            *a += b;
        }
        for (a, b) in sum.distance.iter_mut().zip(&next.distance) {
            *a += b;
        }
        sum.bytes += next.bytes;
        sum.sequences = next.sequences;
        sum
    }

    /// Approximate bits of a separate block, times 16. Extra bits are left out, since they do not
    /// depend on the block boundaries.
    fn cost(&self) -> u64 {
        // Approximate header cost per symbol in use.
        const SYMBOL: u64 = 3 * 16;
        const HEADER: u64 = 80 * 16;
        HEADER + entropy(&self.litlen, SYMBOL) + entropy(&self.distance, SYMBOL)
    }
}

/// Sum of f·log2(total/f) in sixteenths of a bit, plus `per_symbol` for each symbol in use.
fn entropy(freqs: &[u32], per_symbol: u64) -> u64 {
    let mut total = 0;
    let mut sum = 0;
    let mut used = 0;
    for &f in freqs {
        total += f;
        sum += u64::from(f) * u64::from(log2_x16(f));
        used += u64::from(f != 0);
    }
    u64::from(total) * u64::from(log2_x16(total)) - sum + used * per_symbol
}

/// 16·log2(value), 0 for 0.
#[inline(always)]
fn log2_x16(value: u32) -> u32 {
    /// 16·log2(1 + i/64), rounded.
    static FRACTION: [u8; 64] = {
        let mut table = [0u8; 64];
        // log2 of 1+x by repeated squaring: five binary digits, the last for rounding.
        let mut i = 0;
        while i < 64 {
            let mut mantissa: u64 = ((64 + i as u64) << 24) / 64;
            let mut bits = 0u8;
            let mut digit = 0;
            while digit < 5 {
                mantissa = (mantissa * mantissa) >> 24;
                bits <<= 1;
                if mantissa >= 2 << 24 {
                    bits |= 1;
                    mantissa >>= 1;
                }
                digit += 1;
            }
            table[i] = bits.div_ceil(2);
            i += 1;
        }
        table
    };
    if value == 0 {
        return 0;
    }
    let top = 31 - value.leading_zeros();
    let fraction = ((u64::from(value) << 6 >> top) & 63) as usize;
    16 * top + u32::from(FRACTION[fraction])
}

/// The codes of one block.
#[derive(Debug)]
struct Codes {
    litlen_lens: [u8; LITLEN_SYMBOLS],
    litlen: [u16; LITLEN_SYMBOLS],
    distance_lens: [u8; DISTANCE_SYMBOLS],
    distance: [u16; DISTANCE_SYMBOLS],
}

impl Codes {
    fn new() -> Self {
        Self {
            litlen_lens: [0; LITLEN_SYMBOLS],
            litlen: [0; LITLEN_SYMBOLS],
            distance_lens: [0; DISTANCE_SYMBOLS],
            distance: [0; DISTANCE_SYMBOLS],
        }
    }

    /// The fixed codes of RFC 1951.
    fn fixed() -> Self {
        let mut codes = Self::new();
        let mut lens = [8u8; 288];
        lens[144..256].fill(9);
        lens[256..280].fill(7);
        let mut all = [0u16; 288];
        assign(&lens, &mut all);
        codes.litlen_lens.copy_from_slice(&lens[..LITLEN_SYMBOLS]);
        codes.litlen.copy_from_slice(&all[..LITLEN_SYMBOLS]);
        codes.distance_lens.fill(5);
        for (symbol, code) in codes.distance.iter_mut().enumerate() {
            *code = (symbol as u16).reverse_bits() >> 11;
        }
        codes
    }

    fn fit(&mut self, piece: &Piece) {
        code_lengths(&piece.litlen, LITLEN_BITS_MAX, &mut self.litlen_lens);
        code_lengths(&piece.distance, CODE_BITS_MAX, &mut self.distance_lens);
        assign(&self.litlen_lens, &mut self.litlen);
        assign(&self.distance_lens, &mut self.distance);
    }

    /// Bits of the symbols of `piece`, including extra bits.
    fn data_bits(&self, piece: &Piece) -> u64 {
        let mut bits = 0;
        for (&f, &len) in piece.litlen.iter().zip(&self.litlen_lens) {
            bits += u64::from(f) * u64::from(len);
        }
        for (&f, (_, extra)) in piece.litlen[257..].iter().zip(LENGTHS) {
            bits += u64::from(f) * u64::from(extra);
        }
        for (symbol, (&f, &len)) in piece.distance.iter().zip(&self.distance_lens).enumerate() {
            let extra = (symbol as u64 >> 1).saturating_sub(1);
            bits += u64::from(f) * (u64::from(len) + extra);
        }
        bits
    }
}

/// The run-length coded description of a block's codes (RFC 1951, section 3.2.7).
#[derive(Debug)]
struct Header {
    litlen_count: usize,
    distance_count: usize,
    precode_count: usize,
    precode_lens: [u8; PRECODE_SYMBOLS],
    precode: [u16; PRECODE_SYMBOLS],
    /// Symbol, extra bits.
    items: Vec<(u8, u8)>,
}

const fn precode_extra(symbol: u8) -> u32 {
    match symbol {
        16 => 2,
        17 => 3,
        18 => 7,
        _ => 0,
    }
}

impl Default for Header {
    fn default() -> Self {
        Self {
            litlen_count: 0,
            distance_count: 0,
            precode_count: 0,
            precode_lens: [0; PRECODE_SYMBOLS],
            precode: [0; PRECODE_SYMBOLS],
            items: Vec::with_capacity(LITLEN_SYMBOLS + DISTANCE_SYMBOLS),
        }
    }
}

impl Header {
    fn fit(&mut self, codes: &Codes) {
        let used = |lens: &[u8]| lens.iter().rposition(|&l| l != 0).map_or(0, |last| last + 1);
        self.litlen_count = used(&codes.litlen_lens).max(257);
        self.distance_count = used(&codes.distance_lens).max(1);
        let mut lens = [0u8; LITLEN_SYMBOLS + DISTANCE_SYMBOLS];
        let total = self.litlen_count + self.distance_count;
        lens[..self.litlen_count].copy_from_slice(&codes.litlen_lens[..self.litlen_count]);
        lens[self.litlen_count..total].copy_from_slice(&codes.distance_lens[..self.distance_count]);
        self.items.clear();
        let mut freqs = [0u32; PRECODE_SYMBOLS];
        let mut rest = &lens[..total];
        while let Some(&len) = rest.first() {
            let run = rest.iter().take_while(|&&l| l == len).count();
            let (taken, symbol, extra) = match (len, run) {
                (0, 11..) => (run.min(138), 18, run.min(138) - 11),
                (0, 3..) => (run, 17, run - 3),
                (1.., 4..) => {
                    // The length itself, then repeats of it.
                    freqs[usize::from(len)] += 1;
                    self.items.push((len, 0));
                    let repeats = (run - 1).min(6);
                    (repeats + 1, 16, repeats - 3)
                }
                _ => (1, len, 0),
            };
            freqs[usize::from(symbol)] += 1;
            self.items.push((symbol, extra as u8));
            rest = &rest[taken..];
        }
        code_lengths(&freqs, PRECODE_BITS_MAX, &mut self.precode_lens);
        assign(&self.precode_lens, &mut self.precode);
        self.precode_count = PRECODE_ORDER
            .iter()
            .rposition(|&symbol| self.precode_lens[symbol] != 0)
            .map_or(4, |last| (last + 1).max(4));
    }

    fn bits(&self) -> u64 {
        let items = self.items.iter().map(|&(symbol, _)| {
            u64::from(self.precode_lens[usize::from(symbol)]) + u64::from(precode_extra(symbol))
        });
        14 + 3 * self.precode_count as u64 + items.sum::<u64>()
    }

    fn write(&self, writer: &mut BitWriter, out: &mut [u8], at: &mut usize) {
        writer.add(self.litlen_count as u64 - 257, 5);
        writer.add(self.distance_count as u64 - 1, 5);
        writer.add(self.precode_count as u64 - 4, 4);
        for &symbol in &PRECODE_ORDER[..self.precode_count] {
            writer.flush_to(out, at);
            writer.add(u64::from(self.precode_lens[symbol]), 3);
        }
        for &(symbol, extra) in &self.items {
            let index = usize::from(symbol);
            writer.flush_to(out, at);
            writer.add(u64::from(self.precode[index]), u32::from(self.precode_lens[index]));
            writer.add(u64::from(extra), precode_extra(symbol));
        }
    }
}

/// Writes blocks; keeps the bits of an incomplete byte.
#[derive(Debug)]
pub(super) struct BlockWriter {
    bits: BitWriter,
    codes: Codes,
    fixed: Codes,
    header: Header,
}

impl Default for BlockWriter {
    fn default() -> Self {
        Self {
            bits: BitWriter::default(),
            codes: Codes::new(),
            fixed: Codes::fixed(),
            header: Header::default(),
        }
    }
}

impl BlockWriter {
    /// Starts a stream.
    pub(super) fn begin(&mut self) {
        self.bits.clear();
    }

    /// Ends a stream.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        self.bits.align(out);
    }

    /// Writes a segment and empties `pieces`; with `last`, it ends the stream.
    pub(super) fn write_segment(
        &mut self,
        segment: &[u8],
        sequences: &[Sequence],
        pieces: &mut Vec<Piece>,
        last: bool,
        out: &mut Vec<u8>,
    ) {
        let mut at = 0;
        let mut first_sequence = 0;
        let mut pieces = pieces.drain(..);
        let Some(mut block) = pieces.next() else { return };
        let mut cost = block.cost();
        loop {
            let next = pieces.next();
            if let Some(piece) = &next {
                let joined = block.with(piece);
                let joined_cost = joined.cost();
                let own = piece.cost();
                if joined_cost <= cost + own {
                    block = joined;
                    cost = joined_cost;
                    continue;
                }
                cost = own;
            }
            let end = block.sequences;
            let bytes = block.bytes;
            let is_last = last && next.is_none();
            let data = &segment[at..at + bytes];
            self.write_block(data, &sequences[first_sequence..end], block, is_last, out);
            at += bytes;
            first_sequence = end;
            match next {
                Some(piece) => block = piece,
                None => return,
            }
        }
    }

    fn write_block(
        &mut self,
        data: &[u8],
        sequences: &[Sequence],
        mut piece: Piece,
        last: bool,
        out: &mut Vec<u8>,
    ) {
        piece.litlen[END] = 1;
        self.codes.fit(&piece);
        self.header.fit(&self.codes);
        let dynamic = self.header.bits() + self.codes.data_bits(&piece);
        let fixed = self.fixed.data_bits(&piece);
        let stored_blocks = data.len().div_ceil(STORED_MAX).max(1) as u64;
        // The three bits of the block type, and at most seven of padding.
        let stored = data.len() as u64 * 8 + stored_blocks * (7 + 35);
        if stored <= dynamic.min(fixed) {
            self.write_stored(data, last, out);
            return;
        }
        let bits = 3 + dynamic.min(fixed);
        let mut at = out.len();
        let end_bits = u64::from(self.bits.pending()) + bits;
        out.resize(at + (end_bits / 8) as usize + 8, 0);
        self.bits.add(u64::from(last), 1);
        let codes = if fixed <= dynamic {
            self.bits.add(1, 2);
            &self.fixed
        } else {
            self.bits.add(2, 2);
            self.header.write(&mut self.bits, out, &mut at);
            &self.codes
        };
        write_symbols(codes, &mut self.bits, data, sequences, out, &mut at);
        debug_assert_eq!(at as u64 + 8, out.len() as u64);
        out.truncate(at);
    }

    fn write_stored(&mut self, data: &[u8], last: bool, out: &mut Vec<u8>) {
        let mut chunks = data.chunks(STORED_MAX).peekable();
        while let Some(chunk) = chunks.next() {
            self.bits.add(u64::from(last && chunks.peek().is_none()), 3);
            self.bits.align(out);
            let len = chunk.len() as u16;
            out.extend_from_slice(&len.to_le_bytes());
            out.extend_from_slice(&(!len).to_le_bytes());
            out.extend_from_slice(chunk);
        }
    }
}

/// Longest stored block.
const STORED_MAX: usize = 0xffff;

/// Writes the symbols of a block and the end symbol. `out[*at..]` has space for all of it and eight
/// bytes.
fn write_symbols(
    codes: &Codes,
    writer: &mut BitWriter,
    data: &[u8],
    sequences: &[Sequence],
    out: &mut [u8],
    at: &mut usize,
) {
    // A literal's code and length in one load.
    let mut literal_codes = [0u32; 256];
    for (symbol, place) in literal_codes.iter_mut().enumerate() {
        *place = u32::from(codes.litlen[symbol]) | u32::from(codes.litlen_lens[symbol]) << 16;
    }
    let mut bits = std::mem::take(writer);
    let mut rest = data;
    for sequence in sequences {
        let (literals, after) = rest.split_at(usize::from(sequence.literals));
        // Four codes of at most 14 bits, and up to seven bits left by a flush.
        for group in literals.chunks(4) {
            bits.flush_to(out, at);
            for &byte in group {
                let code = literal_codes[usize::from(byte)];
                bits.add(u64::from(code & 0xffff), code >> 16);
            }
        }
        if sequence.len != 0 {
            bits.flush_to(out, at);
            let len = usize::from(sequence.len);
            let slot = usize::from(LENGTH_SLOT[len]);
            let (first, extra) = LENGTHS[slot];
            bits.add(u64::from(codes.litlen[257 + slot]), codes.litlen_lens[257 + slot].into());
            bits.add((len - usize::from(first)) as u64, u32::from(extra));
            let (slot, extra, low) = distance_slot(usize::from(sequence.distance));
            bits.add(u64::from(codes.distance[slot]), u32::from(codes.distance_lens[slot]));
            bits.add(u64::from(low), extra);
        }
        rest = &after[usize::from(sequence.len)..];
    }
    bits.flush_to(out, at);
    bits.add(u64::from(codes.litlen[END]), u32::from(codes.litlen_lens[END]));
    bits.flush_to(out, at);
    *writer = bits;
}
