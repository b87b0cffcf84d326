use super::*;

/// Inflates with a window of 4 KiB. The output is read in small pieces, so that the reader can copy
/// only from its window.
fn inflate(stream: &[u8], len: usize) -> Vec<u8> {
    let mut reader = flate2::Decompress::new_with_window_bits(false, 12);
    let mut out = Vec::new();
    loop {
        let mut piece = [0; 300];
        let (taken, before) = (reader.total_in() as usize, reader.total_out());
        let status =
            reader.decompress(&stream[taken..], &mut piece, flate2::FlushDecompress::None).unwrap();
        let got = (reader.total_out() - before) as usize;
        out.extend_from_slice(&piece[..got]);
        if status == flate2::Status::StreamEnd {
            break;
        }
        assert!(got > 0, "stuck after {} of {len} bytes", out.len());
    }
    assert_eq!(reader.total_in(), stream.len() as u64, "bytes behind the end of the stream");
    out
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }

    /// Literals from alphabets of varying size, runs, and copies from near and far.
    fn mixture(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 70_000);
        while out.len() < len {
            let longest = if self.below(20) == 0 { 3000 } else { 40 };
            let count = 1 + self.below(longest);
            match self.below(4) {
                0 => {
                    let alphabet = 1 + self.below(256);
                    out.extend((0..count).map(|_| (self.next() as usize % alphabet) as u8));
                }
                1 => out.extend(std::iter::repeat_n(self.next() as u8, count)),
                _ if out.is_empty() => {}
                _ => {
                    let far = if self.below(3) == 0 { 9000 } else { 4200 };
                    let distance = 1 + self.below(out.len().min(far));
                    for _ in 0..count {
                        out.push(out[out.len() - distance]);
                    }
                }
            }
        }
        out.truncate(len);
        out
    }
}

fn round_trip(deflater: &mut Deflater, unit: &[u8]) -> Option<usize> {
    let mut out = b"kept".to_vec();
    let len = deflater.compress(unit, &mut out);
    assert_eq!(out[..4], *b"kept");
    assert_eq!(out.len(), 4 + len.unwrap_or(0));
    if let Some(len) = len {
        assert!(len < unit.len());
        assert!(inflate(&out[4..], unit.len()) == unit, "{} bytes differ", unit.len());
    }
    len
}

#[test]
fn everything_comes_back_at_every_level() {
    let mut random = Random(0x5eed);
    for level in LEVELS {
        let mut deflater = Deflater::new(level);
        for len in [0, 1, 2, 7, 8, 9, 100, 512, 4095, 4096, 4097, 65_535, 65_536, 65_537, 300_000] {
            let unit = random.mixture(len);
            round_trip(&mut deflater, &unit);
        }
    }
}

#[test]
fn extremes_come_back() {
    let mut deflater = Deflater::new(DEFAULT_LEVEL);
    let mut random = Random(7);
    // One symbol, so one code of length 1; and the longest matches.
    assert!(round_trip(&mut deflater, &vec![0; 65_536]).unwrap() < 200);
    assert!(round_trip(&mut deflater, &vec![0xff; 2 << 20]).unwrap() < 4000);
    // No match at all: an empty distance code.
    let mut no_match = Vec::new();
    for a in 0..16u8 {
        for b in 0..16u8 {
            no_match.extend([a, b + 16]);
        }
    }
    assert!(round_trip(&mut deflater, &no_match).is_some());
    // An incompressible part is stored between compressed ones.
    let mut mixed = vec![b'a'; 20_000];
    mixed.extend(random.bytes(30_000));
    mixed.extend(vec![b'b'; 20_000]);
    let len = round_trip(&mut deflater, &mixed).unwrap();
    assert!((30_000..30_500).contains(&len), "{len}");
}

#[test]
fn what_does_not_shrink_is_left_alone() {
    let mut deflater = Deflater::new(DEFAULT_LEVEL);
    for len in [0, 1, 3, 64, 65_536, 200_000] {
        assert_eq!(round_trip(&mut deflater, &Random(9).bytes(len)), None, "{len}");
    }
}

#[test]
fn no_distance_passes_the_window() {
    let mut deflater = Deflater::new(9);
    for (period, shrinks) in
        [(3000, true), (4090, true), (4095, true), (4096, false), (5000, false)]
    {
        let once = Random(period as u64).bytes(period);
        let unit = once.repeat(3);
        let len = round_trip(&mut deflater, &unit);
        assert_eq!(len.is_some(), shrinks, "period {period}: {len:?}");
    }
}

#[test]
fn the_window_reaches_across_segments() {
    let mut deflater = Deflater::new(DEFAULT_LEVEL);
    let unit = Random(3).bytes(1000).repeat(1000);
    let len = round_trip(&mut deflater, &unit).unwrap();
    // 1000 bytes of literals, and about four matches per further thousand.
    assert!(len < 20_000, "{len}");
}

#[test]
fn output_depends_on_the_unit_alone() {
    let mut random = Random(11);
    for level in [2, 3, 4] {
        let mut used = Deflater::new(level);
        for round in 0..300 {
            let len = 1 + random.below(10_000);
            let unit = random.mixture(len);
            let (mut fresh, mut again) = (Vec::new(), Vec::new());
            Deflater::new(level).compress(&unit, &mut fresh);
            used.compress(&unit, &mut again);
            assert!(fresh == again, "round {round} at level {level}");
        }
    }
}
