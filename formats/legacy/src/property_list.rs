//! A minimal property list (XML) parser: the data of the array `blkx`.

/// The decoded `<data>` elements after the key `blkx`, up to the end of its array.
pub(crate) fn block_tables(text: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let Some(start) = find(text, b"<key>blkx</key>") else { return found };
    let Some(array) = find(&text[start..], b"<array>") else { return found };
    let mut rest = &text[start + array..];
    if let Some(end) = find(rest, b"</array>") {
        rest = &rest[..end];
    }
    while let Some(open) = find(rest, b"<data>") {
        let inside = &rest[open + b"<data>".len()..];
        let Some(close) = find(inside, b"</data>") else { break };
        found.push(base64(&inside[..close]));
        rest = &inside[close..];
    }
    found
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    let first = what[0];
    let mut at = 0;
    while let Some(next) = text[at..].iter().position(|byte| *byte == first) {
        at += next;
        if text[at..].starts_with(what) {
            return Some(at);
        }
        at += 1;
    }
    None
}

/// Decodes base64 (RFC 4648, section 4); other characters are skipped, like white space.
fn base64(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len() / 4 * 3);
    let (mut bits, mut count) = (0_u32, 0);
    for byte in text {
        let value = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            b'=' => break,
            _ => continue,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_the_right_key_are_decoded() {
        let text = b"<plist><dict><key>plst</key><array><dict><data>AAAA</data></dict></array>\
            <key>blkx</key><array><dict><key>Data</key><data>\n\taGVs\n\tbG8=\n</data></dict>\
            <dict><data>d29ybGQ=</data></dict></array><key>x</key><array><data>AAAA</data></array>";
        assert_eq!(block_tables(text), [b"hello".to_vec(), b"world".to_vec()]);
        assert!(block_tables(b"<key>blkx</key>").is_empty());
        assert!(block_tables(b"<key>blkx</key><array><data>aGVs").is_empty());
        assert!(block_tables(b"").is_empty());
    }
}
