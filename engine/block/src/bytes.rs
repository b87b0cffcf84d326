//! Numbers at fixed offsets of an on-disk structure, and bytes as text.
//!
//! Offsets beyond the end read as zero: callers check the length first where that matters.

/// The `N` bytes at `at`.
pub fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = at.checked_add(N).and_then(|end| bytes.get(at..end));
    found.and_then(|found| found.try_into().ok()).unwrap_or([0; N])
}

/// Hexadecimal digits, two a byte, in lower case.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

macro_rules! numbers {
    ($($name:ident $number:ident $from:ident $doc:literal)*) => {$(
        #[doc = concat!("The ", $doc, " number at `at`.")]
        pub fn $name(bytes: &[u8], at: usize) -> $number {
            $number::$from(array(bytes, at))
        }
    )*};
}

numbers! {
    be16 u16 from_be_bytes "big-endian 16-bit"
    be32 u32 from_be_bytes "big-endian 32-bit"
    be64 u64 from_be_bytes "big-endian 64-bit"
    le16 u16 from_le_bytes "little-endian 16-bit"
    le32 u32 from_le_bytes "little-endian 32-bit"
    le64 u64 from_le_bytes "little-endian 64-bit"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lie_where_they_are_said_to_and_are_zero_beyond_the_end() {
        let bytes: Vec<u8> = (1..=9).collect();
        assert_eq!((be16(&bytes, 1), le16(&bytes, 1)), (0x0203, 0x0302));
        assert_eq!((be32(&bytes, 2), le32(&bytes, 2)), (0x0304_0506, 0x0605_0403));
        assert_eq!(be64(&bytes, 1), 0x0203_0405_0607_0809);
        assert_eq!(le64(&bytes, 1), 0x0908_0706_0504_0302);
        for at in [2, 9, usize::MAX] {
            assert_eq!((be64(&bytes, at), le64(&bytes, at)), (0, 0), "{at}");
        }
    }
}
