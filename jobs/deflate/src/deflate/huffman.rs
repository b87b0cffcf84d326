//! Length-limited Huffman codes.

/// Maximum code length of literals, lengths and distances.
pub(super) const CODE_BITS_MAX: u32 = 15;

/// Computes code lengths of at most `max_bits` for `freqs`; unused symbols get 0. At least two
/// symbols get a code, because some readers refuse an incomplete code.
pub(super) fn code_lengths(freqs: &[u32], max_bits: u32, lens: &mut [u8]) {
    debug_assert!(freqs.len() == lens.len() && freqs.len() <= 288 && freqs.len() >= 2);
    lens.fill(0);
    let mut keys = [0u64; 288];
    let mut used = 0;
    for (symbol, &freq) in freqs.iter().enumerate() {
        if freq != 0 {
            keys[used] = u64::from(freq) << 16 | symbol as u64;
            used += 1;
        }
    }
    if used < 2 {
        let only = if used == 1 { (keys[0] & 0xffff) as usize } else { 0 };
        lens[only] = 1;
        lens[usize::from(only == 0)] = 1;
        return;
    }
    let keys = &mut keys[..used];
    keys.sort_unstable();
    let mut weights = [0u32; 288];
    for (weight, key) in weights.iter_mut().zip(keys.iter()) {
        *weight = (key >> 16) as u32;
    }
    depths(&mut weights[..used]);

    // Number of codes of each length, clamped to the maximum.
    let mut counts = [0u32; CODE_BITS_MAX as usize + 1];
    for &depth in &weights[..used] {
        counts[depth.min(max_bits) as usize] += 1;
    }
    limit(&mut counts, max_bits);
    // The rarest symbols get the longest codes.
    let mut keys = keys.iter();
    for bits in (1..=max_bits).rev() {
        for key in keys.by_ref().take(counts[bits as usize] as usize) {
            lens[(key & 0xffff) as usize] = bits as u8;
        }
    }
}

/// Converts ascending weights into the depths of an optimal tree, in place (Moffat and Katajainen,
/// "In-place calculation of minimum-redundancy codes", 1995).
fn depths(a: &mut [u32]) {
    let n = a.len();
    a[0] += a[1];
    let (mut root, mut leaf) = (0, 2);
    for next in 1..n - 1 {
        if leaf >= n || a[root] < a[leaf] {
            a[next] = a[root];
            a[root] = next as u32;
            root += 1;
        } else {
            a[next] = a[leaf];
            leaf += 1;
        }
        if leaf >= n || (root < next && a[root] < a[leaf]) {
            a[next] += a[root];
            a[root] = next as u32;
            root += 1;
        } else {
            a[next] += a[leaf];
            leaf += 1;
        }
    }
    a[n - 2] = 0;
    for next in (0..n - 2).rev() {
        a[next] = a[a[next] as usize] + 1;
    }
    let (mut available, mut depth) = (1usize, 0);
    let mut inner = n as isize - 2;
    let mut next = n as isize - 1;
    while available > 0 {
        let mut used = 0;
        while inner >= 0 && a[inner as usize] == depth {
            used += 1;
            inner -= 1;
        }
        while available > used {
            a[next as usize] = depth;
            next -= 1;
            available -= 1;
        }
        available = 2 * used;
        depth += 1;
    }
}

/// Adjusts the clamped counts so that the code is complete again (Kraft sum 1).
fn limit(counts: &mut [u32], max_bits: u32) {
    let max = max_bits as usize;
    let mut sum: u32 = (1..=max).map(|bits| counts[bits] << (max - bits)).sum();
    while sum > 1 << max {
        // Two codes of the maximum length become one that is a sibling of a shorter code, which
        // gets one bit longer: the Kraft sum shrinks by one unit.
        let Some(bits) = (1..max).rev().find(|&bits| counts[bits] > 0) else { break };
        counts[bits] -= 1;
        counts[bits + 1] += 2;
        counts[max] -= 1;
        sum -= 1;
    }
}

/// Assigns the codes of RFC 1951, section 3.2.2, bit-reversed for a writer with the lowest bit
/// first.
pub(super) fn assign(lens: &[u8], codes: &mut [u16]) {
    let mut counts = [0u16; CODE_BITS_MAX as usize + 2];
    for &len in lens {
        counts[len as usize] += 1;
    }
    counts[0] = 0;
    let mut next = [0u16; CODE_BITS_MAX as usize + 2];
    let mut code = 0u16;
    for bits in 1..=CODE_BITS_MAX as usize {
        code = (code + counts[bits - 1]) << 1;
        next[bits] = code;
    }
    for (code, &len) in codes.iter_mut().zip(lens) {
        if len != 0 {
            *code = next[len as usize].reverse_bits() >> (16 - u32::from(len));
            next[len as usize] += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kraft(lens: &[u8]) -> f64 {
        lens.iter().filter(|&&l| l > 0).map(|&l| 0.5f64.powi(i32::from(l))).sum()
    }

    #[test]
    fn codes_are_complete_and_short_enough() {
        // Fibonacci weights make the deepest tree.
        let mut fibonacci = vec![1u32, 1];
        for i in 2..30 {
            fibonacci.push(fibonacci[i - 1] + fibonacci[i - 2]);
        }
        for (freqs, max) in [
            (fibonacci.clone(), 15),
            (fibonacci[..19].to_vec(), 7),
            (vec![1; 286], 15),
            (vec![0, 0, 5], 15),
            (vec![0; 30], 15),
            (vec![7, 0, 7, 1], 15),
        ] {
            let mut lens = vec![0u8; freqs.len()];
            code_lengths(&freqs, max, &mut lens);
            assert!(lens.iter().all(|&l| u32::from(l) <= max), "{freqs:?} {lens:?}");
            assert!((kraft(&lens) - 1.0).abs() < 1e-9, "{freqs:?} {lens:?}");
            for (f, l) in freqs.iter().zip(&lens) {
                assert!(*f == 0 || *l > 0);
            }
        }
    }

    #[test]
    fn unlimited_codes_are_optimal() {
        // A textbook example: the weighted length of the optimal code is 224.
        let freqs = [45, 13, 12, 16, 9, 5];
        let mut lens = [0u8; 6];
        code_lengths(&freqs, 15, &mut lens);
        let total: u32 = freqs.iter().zip(&lens).map(|(f, &l)| f * u32::from(l)).sum();
        assert_eq!(total, 224);
    }
}
