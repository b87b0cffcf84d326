//! The array `blkx` of a property list in XML.
//!
//! The crate `plist` does not fit: it builds a tree of the whole text without a bound on its depth
//! or memory, and dropping a deep one overflows the stack. Its reader of single events is no stable
//! part of it.

use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{DecodeError, Engine};

/// Accepts what other readers accept: missing padding, and bits after the last byte.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_padding_mode(DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// The decoded `<data>` elements after the key `blkx`, up to the end of its array.
///
/// # Errors
/// Of the first element that is not base64.
pub(crate) fn block_tables(text: &str) -> Result<Vec<Vec<u8>>, DecodeError> {
    let array = text.split_once("<key>blkx</key>").and_then(|(_, rest)| rest.split_once("<array>"));
    let Some((_, rest)) = array else { return Ok(Vec::new()) };
    let array = rest.split_once("</array>").map_or(rest, |(array, _)| array);
    let elements = array.split("<data>").skip(1).filter_map(|data| data.split_once("</data>"));
    let digits = elements.map(|(data, _)| data.split_ascii_whitespace().collect::<String>());
    digits.map(|digits| BASE64.decode(digits)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_the_right_key_are_decoded() {
        let text = "<plist><dict><key>plst</key><array><dict><data>AAAA</data></dict></array>\
            <key>blkx</key><array><dict><key>Data</key><data>\n\taGVs\n\tbG8=\n</data></dict>\
            <dict><data>d29ybGQ=</data></dict></array><key>x</key><array><data>AAAA</data></array>";
        assert_eq!(block_tables(text).unwrap(), [b"hello".to_vec(), b"world".to_vec()]);
        for empty in ["", "<key>blkx</key>", "<key>blkx</key><array><data>aGVs"] {
            assert!(block_tables(empty).unwrap().is_empty(), "{empty}");
        }
        let of = |data| block_tables(&format!("<key>blkx</key><array><data>{data}</data>"));
        assert_eq!(of("aGVsbG9").unwrap(), [b"hello"]);
        assert_eq!(of("aG<!").unwrap_err(), DecodeError::InvalidByte(2, b'<'));
    }
}
