//! Formats numbers and names for people, with units and significant digits.

use jiff::Timestamp;

use crate::model::{Axes, Metric, SURVIVED, metric};

/// Formats a value of a metric with its unit: `12.3k IOPS`, `181 MB/s`, `4.56 ms`, `2 min 36 s`.
///
/// Rates use powers of ten, as fio and vendors print them; space uses powers of two.
pub fn value(metric: &Metric, number: f64) -> String {
    match metric.unit {
        // A score is a throughput in MB/s.
        "" if metric.key == "score" => value(&Metric { unit: "B/s", ..*metric }, number * 1e6),
        "" if metric.key == SURVIVED => survived(number),
        "1/s" if metric.key.contains("iops") => format!("{} IOPS", counted(number)),
        "1/s" => format!("{}/s", counted(number)),
        "B/s" => scaled(number, 1000.0, &["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]),
        "ns" => time(number * 1e-9),
        "s" => time(number),
        "B" => size(number),
        "" => counted(number),
        unit => format!("{} {unit}", digits(number)),
    }
}

/// Formats a value of the metric with this key. A metric of a later version has no unit here.
pub fn value_of(key: &str, number: f64) -> String {
    metric(key).map_or_else(|| number.to_string(), |metric| value(metric, number))
}

/// Formats a number of bytes: `1.50 GiB`.
pub fn bytes(number: u64) -> String {
    size(number as f64)
}

fn size(number: f64) -> String {
    scaled(number, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// Formats the share of rounds that survived.
fn survived(part: f64) -> String {
    match part {
        0.0 => "no".to_owned(),
        1.0 => "yes".to_owned(),
        part => percent(part),
    }
}

/// Formats seconds: `435 ms`, `12.3 s`, `2 min 36 s`.
pub fn time(seconds: f64) -> String {
    let size = seconds.abs();
    if (119.5..1e9).contains(&size) {
        let whole = seconds.round() as i64;
        let (hours, minutes, rest) = (whole / 3600, whole / 60 % 60, whole % 60);
        return match (hours, minutes, rest) {
            (0, _, 0) => format!("{minutes} min"),
            (0, ..) => format!("{minutes} min {rest} s"),
            (_, 0, _) => format!("{hours} h"),
            _ => format!("{hours} h {minutes} min"),
        };
    }
    for (unit, factor) in [("s", 1.0), ("ms", 1e3), ("µs", 1e6)] {
        if size * factor >= 0.9995 {
            return format!("{} {unit}", digits(seconds * factor));
        }
    }
    if size == 0.0 { "0 s".to_owned() } else { format!("{} ns", digits(seconds * 1e9)) }
}

fn scaled(number: f64, step: f64, units: &[&str]) -> String {
    let mut number = number;
    let mut at = 0;
    // A number that rounds up to the next unit is printed in that unit.
    while number.abs() >= step * 0.9995 && at + 1 < units.len() {
        number /= step;
        at += 1;
    }
    format!("{} {}", digits(number), units[at])
}

/// Formats a count: `950`, `12.3k`, `1.20M`.
pub fn counted(number: f64) -> String {
    let size = number.abs();
    if size >= 999_500.0 {
        format!("{}M", digits(number / 1e6))
    } else if size >= 9_999.5 {
        format!("{}k", digits(number / 1e3))
    } else if size >= 999.5 {
        let whole = number.round() as i64;
        format!("{},{:03}", whole / 1000, (whole % 1000).abs())
    } else {
        digits(number)
    }
}

/// Formats three significant digits: `1.23`, `45.6`, `789`, `0.0123`. Whole numbers have no point.
pub fn digits(number: f64) -> String {
    let size = number.abs();
    if !number.is_finite() {
        return "–".to_owned();
    }
    // Rounding errors must not turn a whole number into a fraction.
    if (number - number.round()).abs() <= 1e-9 * size && size < 1000.0 {
        return format!("{number:.0}");
    }
    let places = match size {
        size if size >= 99.95 => 0,
        size if size >= 9.995 => 1,
        size if size >= 0.9995 => 2,
        size if size >= 0.0995 => 3,
        _ => 4,
    };
    format!("{number:.places$}")
}

/// Formats a ratio: `1.84`, `12.3`, `0.0040`.
pub fn times(ratio: f64) -> String {
    // With two places, a ratio of 1 to 250 would be 0.00.
    let far = ratio >= 9.95 || (ratio > 0.0 && ratio < 0.0995);
    if far { digits(ratio) } else { format!("{ratio:.2}") }
}

/// Formats a fraction as percent: `7 %`, `0.4 %`.
pub fn percent(part: f64) -> String {
    let hundred = part * 100.0;
    match hundred.abs() {
        size if !size.is_finite() => "–".to_owned(),
        size if size < 0.95 => format!("{hundred:.1} %"),
        _ => format!("{hundred:.0} %"),
    }
}

/// Formats a range of ratios for sentences: `1.70 to 1.95`.
pub fn span(low: f64, high: f64) -> String {
    format!("{} to {}", times(low), times(high))
}

/// Formats values of axes in a row: `ext4 · qcow2-8k · 8 images`.
pub fn label(axes: &Axes) -> String {
    axes.iter().map(|(axis, value)| alone(axis, value)).collect::<Vec<_>>().join(" · ")
}

/// Formats a value without its axis's name, which numbers and `none` need to be understood. Marks a
/// value that may lose data, wherever it is named: its speed must not be taken for advice.
pub fn alone(axis: &str, value: &str) -> String {
    match (axis, value) {
        ("cache", "unsafe") => "unsafe (may lose data)".to_owned(),
        ("content", "none") => "empty disk".to_owned(),
        ("content", "full") => "filled disk".to_owned(),
        ("images", "1") => "1 image".to_owned(),
        ("images", count) => format!("{count} images"),
        (_, value) => value.to_owned(),
    }
}

/// Turns a text into a sentence, with a capital letter and a full stop.
pub fn sentence(text: &str) -> String {
    let mut whole = capital(text);
    if !whole.is_empty() && !whole.ends_with(['.', '!', '?']) {
        whole.push('.');
    }
    whole
}

/// Formats a name for a heading: `queue_depth` as `Queue depth`.
pub fn title(name: &str) -> String {
    match name {
        "cache" => "Cache mode".to_owned(),
        "record" => "Record size".to_owned(),
        _ => capital(&name.replace('_', " ")),
    }
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(letters).collect()
}

/// The name of a metric in a column header.
pub fn heading(key: &str) -> String {
    title(metric(key).map_or(key, |metric| metric.title))
}

/// Formats a number of things: `1 cell`, `2 cells`.
pub fn plural(count: usize, thing: &str) -> String {
    format!("{count} {thing}{}", if count == 1 { "" } else { "s" })
}

/// Lists things in a sentence: `a, b and c`.
pub fn listed(things: &[String]) -> String {
    match things {
        [] => String::new(),
        [one] => one.clone(),
        [all @ .., last] => format!("{} and {last}", all.join(", ")),
    }
}

/// As [`listed`], but names at most this many, and counts the others.
pub fn listed_most(things: &[String], most: usize) -> String {
    match things.len().checked_sub(most) {
        Some(more @ 1..) => format!("{} and {more} more", things[..most].join(", ")),
        _ => listed(things),
    }
}

/// Names the first few configurations, and counts the others.
pub fn first_of(ways: &[Axes]) -> String {
    listed_most(&ways.iter().map(label).collect::<Vec<_>>(), 3)
}

/// Quotes a word for a shell if necessary.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// Formats seconds since 1970 in UTC: `2026-11-22 00:15 UTC`.
pub fn date(seconds: u64) -> String {
    let time = seconds.try_into().ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    time.unwrap_or(Timestamp::MAX).strftime("%Y-%m-%d %H:%M UTC").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_units_and_few_digits() {
        let said = |key: &str, number: f64| value(metric(key).unwrap(), number);
        assert_eq!(said("iops", 12_345.0), "12.3k IOPS");
        assert_eq!(said("iops", 1234.4), "1,234 IOPS");
        assert_eq!(said("iops", 999_600.0), "1.000M IOPS".replace("1.000", "1.00"));
        assert_eq!(said("bytes_per_second", 181.4e6), "181 MB/s");
        assert_eq!(said("bytes_per_second", 50.52e6), "50.5 MB/s");
        assert_eq!(said("bytes_per_second", 0.0), "0 B/s");
        assert_eq!(said("latency_p50_ns", 850.0), "850 ns");
        assert_eq!(said("latency_p50_ns", 85_000.0), "85 µs");
        assert_eq!(said("latency_p99_ns", 4_560_000.0), "4.56 ms");
        assert_eq!(said("elapsed_seconds", 0.4352), "435 ms");
        assert_eq!(said("elapsed_seconds", 156.0), "2 min 36 s");
        assert_eq!(said("elapsed_seconds", 7300.0), "2 h 1 min");
        assert_eq!(said("elapsed_seconds", 119.9), "2 min");
        assert_eq!(said("host_bytes", 1536.0), "1.50 KiB");
        assert_eq!(said("reads", 1935.0), "1,935");
        assert_eq!(said("requests_per_cpu_second", 250_000.0), "250k/s");
        assert_eq!(
            (said("score", 857.0), said("score", 1164.0)),
            ("857 MB/s".into(), "1.16 GB/s".into())
        );
        assert_eq!(
            (digits(f64::NAN), digits(0.01234), digits(-2.5)),
            ("–".into(), "0.0123".into(), "-2.50".into())
        );
        assert_eq!(
            [times(1.8449), times(12.34), times(0.5), times(0.004), times(0.0)],
            ["1.84", "12.3", "0.50", "0.0040", "0.00"]
        );
        assert_eq!((percent(0.071), percent(0.004)), ("7 %".into(), "0.4 %".into()));
        // The range of a window whose mean is 0: see `window_of`.
        assert_eq!((percent(f64::MAX), percent(f64::NAN)), ("–".into(), "–".into()));
    }

    #[test]
    fn values_say_what_they_are_alone() {
        let axes = [("layout", "raw"), ("content", "none"), ("size", "16G"), ("images", "8")];
        let axes = axes.map(|(axis, value)| (axis.to_owned(), value.to_owned())).to_vec();
        assert_eq!(label(&axes), "raw · empty disk · 16G · 8 images");
        assert_eq!(label(&crate::model::axes_of(&[("cache", "unsafe")])), "unsafe (may lose data)");
        let survived = crate::model::metric(SURVIVED).unwrap();
        let said = [0.0, 1.0, 0.5].map(|part| value(survived, part));
        assert_eq!(said, ["no", "yes", "50 %"]);
    }

    #[test]
    fn names_become_sentences() {
        assert_eq!(sentence("round 1: it was busy"), "Round 1: it was busy.");
        assert_eq!((sentence("It was."), sentence("")), ("It was.".into(), String::new()));
        let words = |all: &[&str]| listed(&all.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>());
        assert_eq!(
            (words(&[]), words(&["a"]), words(&["a", "b", "c"])),
            (String::new(), "a".into(), "a, b and c".into())
        );
        assert_eq!([0, 1, 2].map(|n| plural(n, "cell")), ["0 cells", "1 cell", "2 cells"]);
        assert_eq!((title("queue_depth"), title("")), ("Queue depth".into(), String::new()));
        assert_eq!(
            (quoted("a.qcow2"), quoted("it's"), quoted("")),
            ("a.qcow2".into(), "'it'\\''s'".into(), "''".into())
        );
    }

    #[test]
    fn dates_are_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00 UTC");
        assert_eq!(date(951_782_399), "2000-02-28 23:59 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(date(1_795_306_500), "2026-11-22 00:15 UTC");
        assert!(date(u64::MAX).ends_with("UTC"));
    }
}
