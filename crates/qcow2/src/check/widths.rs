//! Refcounts of 1 to 64 bits in a refcount block.
//!
//! Source: qcow2 specification, "Refcount block entry": big endian, and within a byte the entry
//! with the lower index has the lower bits.

/// The refcount at `index` in a block whose refcounts have `1 << order` bits.
pub(super) fn get(block: &[u8], order: u32, index: usize) -> u64 {
    match order {
        0..=2 => {
            let bits = 1 << order;
            let at = index << order;
            u64::from(block[at / 8] >> (at % 8)) & ((1 << bits) - 1)
        }
        3 => block[index].into(),
        4 => u16::from_be_bytes([block[index * 2], block[index * 2 + 1]]).into(),
        _ => {
            let bytes = 1 << (order - 3);
            let at = index * bytes;
            block[at..at + bytes].iter().fold(0, |value, &b| value << 8 | u64::from(b))
        }
    }
}

/// Sets the refcount at `index`; `value` must fit.
pub(super) fn set(block: &mut [u8], order: u32, index: usize, value: u64) {
    match order {
        0..=2 => {
            let mask = (1u8 << (1 << order)) - 1;
            let at = index << order;
            let byte = &mut block[at / 8];
            *byte = *byte & !(mask << (at % 8)) | (value as u8 & mask) << (at % 8);
        }
        _ => {
            let bytes = 1 << (order - 3);
            let at = index * bytes;
            block[at..at + bytes].copy_from_slice(&value.to_be_bytes()[8 - bytes..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_width_keeps_its_values_and_its_neighbours() {
        for order in 0..=6u32 {
            let mut block = [0u8; 64];
            let entries = 512 >> order;
            let max = if order == 6 { u64::MAX } else { (1 << (1u32 << order)) - 1 };
            let value = |i: usize| max & (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            for i in 0..entries {
                set(&mut block, order, i, max);
            }
            assert!(block.iter().all(|&b| b == 0xff), "order {order}");
            for i in 0..entries {
                set(&mut block, order, i, value(i));
            }
            for i in 0..entries {
                assert_eq!(get(&block, order, i), value(i), "order {order} index {i}");
            }
        }
    }

    #[test]
    fn lower_indexes_have_the_lower_bits_of_a_byte() {
        assert_eq!(get(&[0b0000_0001], 0, 0), 1);
        assert_eq!(get(&[0b1000_0000], 0, 7), 1);
        assert_eq!(get(&[0b0000_1101], 1, 0), 1);
        assert_eq!(get(&[0b0000_1101], 1, 1), 3);
        assert_eq!(get(&[0x12, 0x34], 4, 0), 0x1234);
    }
}
