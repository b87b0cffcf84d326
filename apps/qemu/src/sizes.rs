//! Sizes on QEMU's command lines.

use crate::failure::Failure;

/// Why a text is no size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadSize {
    /// It is not a number with at most one suffix.
    Form,
    /// It is 2^64 or more.
    Range,
}

/// Reads `512`, `64k`, `1.5G`, `.5G`, `0x200`, with or without a plus; suffixes b, k, m, g, t, p, e in
/// either case mean powers of 1024.
pub fn parse(text: &str) -> Result<u64, BadSize> {
    let text = text.trim_start();
    let text = text.strip_prefix('+').unwrap_or(text);
    if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        // A hexadecimal number takes no suffix.
        if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(BadSize::Form);
        }
        return u64::from_str_radix(digits, 16).map_err(|_| BadSize::Range);
    }
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let multiple: u64 = match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        "t" => 1 << 40,
        "p" => 1 << 50,
        "e" => 1 << 60,
        _ => return Err(BadSize::Form),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() || fraction.contains('.') {
        return Err(BadSize::Form);
    }
    let whole: u64 =
        if whole.is_empty() { "0" } else { whole }.parse().map_err(|_| BadSize::Range)?;
    // A fraction of a byte is no size.
    let part = match fraction.trim_end_matches('0') {
        "" => 0.0,
        _ if multiple == 1 => return Err(BadSize::Form),
        digits => format!("0.{digits}").parse::<f64>().map_err(|_| BadSize::Form)?,
    };
    let part = (part * multiple as f64 + 0.5) as u64;
    whole.checked_mul(multiple).and_then(|bytes| bytes.checked_add(part)).ok_or(BadSize::Range)
}

/// A size that a command takes as an option or operand called `what`.
pub fn size(what: &str, text: &str) -> Result<u64, Failure> {
    within(what, text, 0, i64::MAX as u64)
}

/// A size that a command takes as an option or operand called `what`, within bounds.
pub fn within(what: &str, text: &str, least: u64, most: u64) -> Result<u64, Failure> {
    // Of negative numbers, QEMU reads only decimal ones without a suffix.
    let digits = text.trim_start().strip_prefix('-').unwrap_or_default();
    let negative = !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    match parse(text) {
        Ok(value) if (least..=most).contains(&value) => Ok(value),
        Err(BadSize::Form) if !negative => Err(bad_form(what, text)),
        _ => Err(Failure::new(format!(
            "Invalid {what} specified. Must be between {least} and {most}."
        ))),
    }
}

/// A number that a command takes as an option or operand called `what`, within bounds: it has no suffix.
pub fn number(what: &str, text: &str, least: u64, most: u64) -> Result<u64, Failure> {
    let suffix = text.ends_with(|letter: char| letter.is_ascii_alphabetic());
    if suffix && !text.starts_with("0x") {
        return Err(bad_form(what, text));
    }
    within(what, text, least, most)
}

fn bad_form(what: &str, text: &str) -> Failure {
    Failure::new(format!("Invalid {what} specified: '{text}'."))
}

/// A whole number as C's `strtoull` with base 0 reads it: decimal, `0x` hexadecimal, `0` octal.
pub fn integer(text: &str) -> Option<u64> {
    let text = text.trim_start();
    let digits = text.strip_prefix('+').unwrap_or(text);
    let hexadecimal = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X"));
    let (digits, radix) = match hexadecimal {
        Some(digits) => (digits, 16),
        None if digits.starts_with('0') => (digits, 8),
        None => (digits, 10),
    };
    // A second sign is none of C's, but Rust takes it.
    if digits.starts_with('+') { None } else { u64::from_str_radix(digits, radix).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_qemu_reads_them() {
        for (text, bytes) in [
            ("0", Ok(0)),
            ("512", Ok(512)),
            ("64k", Ok(64 << 10)),
            ("1.5G", Ok(3 << 29)),
            ("0x200", Ok(512)),
            ("+5M", Ok(5 << 20)),
            ("+0x10", Ok(16)),
            (".5G", Ok(1 << 29)),
            ("+.5M", Ok(1 << 19)),
            ("5.", Ok(5)),
            ("020", Ok(20)),
            (".M", Err(BadSize::Form)),
            (".5", Err(BadSize::Form)),
            ("++5", Err(BadSize::Form)),
            ("+-5", Err(BadSize::Form)),
            ("16E", Err(BadSize::Range)),
            ("xx", Err(BadSize::Form)),
            ("1kk", Err(BadSize::Form)),
            ("-1", Err(BadSize::Form)),
            ("1.5", Err(BadSize::Form)),
            ("", Err(BadSize::Form)),
        ] {
            assert_eq!(parse(text), bytes, "{text}");
        }
    }

    #[test]
    fn wrong_sizes_are_reported_in_qemus_words() {
        let words = |found: Result<u64, Failure>| found.unwrap_err().text;
        let form = |text: &str| format!("Invalid n specified: '{text}'.");
        let range = "Invalid n specified. Must be between 1 and 9.";
        for text in ["0", "10", "-1", "-0", "16E"] {
            assert_eq!(words(within("n", text, 1, 9)), range, "{text}");
        }
        for text in ["", "x", "-", "-1k", "-0x1", "-1.5"] {
            assert_eq!(words(within("n", text, 1, 9)), form(text), "{text}");
        }
        assert_eq!(words(number("n", "1k", 0, 9999)), form("1k"));
        assert_eq!(number("n", "0x1b", 0, 9999).unwrap(), 27);
    }
}
