//! Programmatic units of byte counts (DSP0004, annex C), and the unit names of OVF 0.9.

/// Bytes per unit: `byte`, `byte * 2^30`, `byte * 10^6`, `MegaBytes`.
pub(crate) fn bytes_of_unit(text: &str) -> Option<u64> {
    let words = ["byte", "bytes", "kilobytes", "megabytes", "gigabytes", "terabytes"];
    let text = text.trim().to_ascii_lowercase();
    match words.iter().position(|&word| word == text) {
        Some(index) => return Some(1 << (10 * index.saturating_sub(1))),
        None if ["kb", "mb", "gb", "tb"].contains(&text.as_str()) => {
            let power = "kmgt".find(&text[..1])? + 1;
            return Some(1 << (10 * power));
        }
        None => {}
    }
    let mut factors = text.split('*').map(str::trim);
    if factors.next() != Some("byte") {
        return None;
    }
    factors.try_fold(1u64, |bytes, factor| bytes.checked_mul(value(factor)?))
}

/// `2^30`, `10^6` or `1024`.
fn value(factor: &str) -> Option<u64> {
    match factor.split_once('^') {
        Some((base, power)) => {
            let base: u64 = base.trim().parse().ok()?;
            base.checked_pow(power.trim().parse().ok()?)
        }
        None => factor.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_the_specification_and_of_older_files() {
        let known = [
            ("byte", 1),
            ("byte * 2^10", 1 << 10),
            ("byte*2^40", 1 << 40),
            ("byte * 10^9", 1_000_000_000),
            ("byte * 1024 * 2^10", 1 << 20),
            (" MegaBytes ", 1 << 20),
            ("GB", 1 << 30),
            ("bytes", 1),
        ];
        for (text, bytes) in known {
            assert_eq!(bytes_of_unit(text), Some(bytes), "{text}");
        }
        for text in ["", "bit", "byte * 2^64", "byte * 2^-1", "byte *", "byte / 2", "XB", "é"] {
            assert_eq!(bytes_of_unit(text), None, "{text}");
        }
    }
}
