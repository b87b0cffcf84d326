//! Telling zeroes from data.

use std::ops::Range;

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Most blocks with data show it at once.
    if bytes.first().is_some_and(|&b| b != 0)
        || bytes.last().is_some_and(|&b| b != 0)
        || bytes.get(bytes.len() / 2).is_some_and(|&b| b != 0)
    {
        return false;
    }
    // A fixed-size fold becomes vector instructions; the loop ends at the first block with data.
    let (blocks, rest) = bytes.as_chunks::<256>();
    blocks.iter().all(|block| block.iter().fold(0, |seen, b| seen | b) == 0)
        && rest.iter().all(|&b| b == 0)
}

/// Finds the runs of `bytes` that hold data, looking in steps of `step` bytes from the front.
/// Zeroes shorter than `gap` bytes (at least one step) stay within a run.
pub fn data_runs(bytes: &[u8], step: usize, gap: usize, runs: &mut Vec<Range<usize>>) {
    runs.clear();
    let mut at = 0;
    while at < bytes.len() {
        let end = (at + step).min(bytes.len());
        if !is_zero(&bytes[at..end]) {
            match runs.last_mut() {
                Some(run) if run.end == at || at - run.end < gap => run.end = end,
                _ => runs.push(at..end),
            }
        }
        at = end;
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use super::*;

    #[test]
    fn one_byte_anywhere_is_seen() {
        for len in [1, 63, 64, 255, 256, 257, 4096, 5000] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes), "{at} of {len}");
                bytes[at] = 0;
            }
        }
        assert!(is_zero(&[]));
    }

    #[test]
    fn runs_join_over_short_gaps_only() {
        let mut bytes = vec![0; 10 * 512 + 100];
        bytes[0] = 1;
        bytes[3 * 512] = 1;
        bytes[10 * 512 + 99] = 1;
        let mut runs = Vec::new();
        data_runs(&bytes, 512, 512, &mut runs);
        assert_eq!(runs, [0..512, 1536..2048, 5120..5220]);
        data_runs(&bytes, 512, 2 * 512 + 1, &mut runs);
        assert_eq!(runs, [0..2048, 5120..5220]);
    }
}
