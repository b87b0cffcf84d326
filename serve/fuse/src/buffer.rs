//! A per-thread buffer for read data.

use std::cell::RefCell;

/// Maximum address alignment of direct I/O.
const ALIGNMENT: usize = 4096;

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Lends `len` bytes with undefined content, aligned for direct I/O. `work` must not call it again.
pub fn lend<T>(len: usize, work: impl FnOnce(&mut [u8]) -> T) -> T {
    BUFFER.with_borrow_mut(|buffer| {
        if buffer.len() < len + ALIGNMENT {
            buffer.resize(len + ALIGNMENT, 0);
        }
        let skip = buffer.as_ptr().align_offset(ALIGNMENT);
        let skip = if skip < ALIGNMENT { skip } else { 0 };
        work(&mut buffer[skip..skip + len])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lent_is_aligned_and_of_the_right_length() {
        for len in [1, 4096, 100_000, 512] {
            lend(len, |bytes| {
                assert_eq!(bytes.len(), len);
                assert!((bytes.as_ptr() as usize).is_multiple_of(ALIGNMENT));
            });
        }
    }
}
