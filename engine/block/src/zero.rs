//! Zero detection.

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Most blocks with data have a nonzero first or last byte.
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

#[cfg(test)]
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
}
