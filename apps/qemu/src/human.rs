//! Numbers and values as QEMU prints them for people.

use std::fmt::Write;

use serde_json::Value;

use crate::json::in_order;

/// A byte count with three significant digits and a binary unit: `192 KiB`, `1.21 MiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    // The unit changes at 1000, not at 1024, so that three digits suffice.
    let mut unit = 0;
    while unit < 6 && bytes as f64 / (1_u64 << (unit * 10)) as f64 >= 1000.0 {
        unit += 1;
    }
    let value = bytes as f64 / (1_u64 << (unit * 10)) as f64;
    format!("{} {}B", three_digits(value), UNITS[unit])
}

/// A number with three significant digits and no zeroes at the end, as C's `%0.3g` prints it.
pub fn three_digits(value: f64) -> String {
    if value >= 999.5 {
        return "1e+03".to_owned();
    }
    let whole = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else if value >= 1.0 || value == 0.0 {
        2
    } else {
        3
    };
    let text = format!("{value:.whole$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Prints the members of a value, one a line, at `depth` steps of four spaces.
pub fn dump(out: &mut String, value: &Value, depth: usize) {
    match value {
        Value::Object(members) => {
            for (key, value) in in_order(members) {
                dump_item(out, &key.replace('-', " "), value, depth);
            }
        }
        Value::Array(items) => {
            for (i, value) in items.iter().enumerate() {
                dump_item(out, &format!("[{i}]"), value, depth);
            }
        }
        Value::String(text) => out.push_str(text),
        Value::Null | Value::Bool(_) | Value::Number(_) => {
            let _ = write!(out, "{value}");
        }
    }
}

fn dump_item(out: &mut String, name: &str, value: &Value, depth: usize) {
    out.extend(std::iter::repeat_n(' ', depth * 4));
    let _ = write!(out, "{name}:");
    if matches!(value, Value::Object(_) | Value::Array(_)) {
        out.push('\n');
        dump(out, value, depth + 1);
    } else {
        out.push(' ');
        dump(out, value, depth);
        out.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (1024, "1 KiB"),
            (2560, "2.5 KiB"),
            (197_120, "192 KiB"),
            (10_457_088, "9.97 MiB"),
            (8 << 20, "8 MiB"),
            (1_023_488, "1e+03 KiB"),
            (1000 << 10, "0.977 MiB"),
            (1 << 60, "1 EiB"),
        ] {
            assert_eq!(size(bytes), text, "{bytes}");
        }
    }
}
