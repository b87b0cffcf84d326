//! Zero detection.

use std::ops::Range;

use vdkit_block::is_zero;

/// Finds the runs of `bytes` with data, in steps of `step` bytes. Zeroes shorter than `gap` bytes
/// (at least one step) stay within a run.
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
