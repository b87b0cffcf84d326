//! Condenses similar findings of a check into one line.
//!
//! A leak of 500 clusters gives 500 findings that differ only in their numbers. Each number, in the
//! offset and in the message, changes by a constant step from one finding to the next.

use vdkit::{Finding, Severity};

/// Largest number of lines printed.
const LINES_MAX: usize = 100;
/// Shortest run. Two findings always have a constant step, so they prove nothing.
const RUN_MIN: usize = 3;

/// A text split at its numbers.
#[derive(Debug, PartialEq, Eq)]
struct Cut<'a> {
    /// The text around the numbers; one element more than there are numbers.
    between: Vec<&'a str>,
    numbers: Vec<Number>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Number {
    value: u64,
    hexadecimal: bool,
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.hexadecimal { write!(f, "{:#x}", self.value) } else { write!(f, "{}", self.value) }
    }
}

/// The number at the start of a text, and its length.
fn number(text: &str) -> Option<(Number, usize)> {
    let digits = |text: &str, base: u32| text.chars().take_while(|c| c.is_digit(base)).count();
    let hexadecimal = text.strip_prefix("0x").filter(|rest| digits(rest, 16) > 0);
    let (rest, base, start) = hexadecimal.map_or((text, 10, 0), |rest| (rest, 16, 2));
    let len = digits(rest, base);
    let value = u64::from_str_radix(&rest[..len], base).ok()?;
    Some((Number { value, hexadecimal: base == 16 }, start + len))
}

fn cut(text: &str) -> Cut<'_> {
    let mut cut = Cut { between: Vec::new(), numbers: Vec::new() };
    let (mut from, mut at) = (0, 0);
    while at < text.len() {
        let word = text[..at].ends_with(|c: char| c.is_ascii_alphanumeric());
        match number(&text[at..]).filter(|_| !word) {
            Some((found, len)) => {
                cut.between.push(&text[from..at]);
                cut.numbers.push(found);
                at += len;
                from = at;
            }
            None => at += text[at..].chars().next().map_or(1, char::len_utf8),
        }
    }
    cut.between.push(&text[from..]);
    cut
}

/// The step of each number from one finding to the next; none if anything else differs.
fn step(a: &Finding, b: &Finding) -> Option<Vec<u64>> {
    let same = (a.severity, a.structure, a.repaired) == (b.severity, b.structure, b.repaired);
    let (before, after) = (cut(&a.message), cut(&b.message));
    if !same || before.between != after.between || b.offset <= a.offset {
        return None;
    }
    let pairs = before.numbers.iter().zip(&after.numbers);
    let steps = pairs.map(|(a, b)| b.value.wrapping_sub(a.value));
    Some(std::iter::once(b.offset - a.offset).chain(steps).collect())
}

/// Number of findings, from the first on, that continue by the same step.
fn run(findings: &[Finding]) -> usize {
    let [first, second, ..] = findings else { return 1 };
    let Some(wanted) = step(first, second) else { return 1 };
    let pairs = findings.windows(2);
    let len =
        1 + pairs.take_while(|pair| step(&pair[0], &pair[1]).as_ref() == Some(&wanted)).count();
    if len < RUN_MIN { 1 } else { len }
}

/// Formats a run as one line.
fn line(run: &[Finding]) -> String {
    let [first, .., last] = run else { return run.first().map(single).unwrap_or_default() };
    let (kind, repaired) = words(first);
    let each = run.get(1).map_or(0, |second| second.offset - first.offset);
    let (from, to) = (cut(&first.message), cut(&last.message));
    let mut message = String::new();
    for (index, text) in from.between.iter().enumerate() {
        message.push_str(text);
        if let (Some(from), Some(to)) = (from.numbers.get(index), to.numbers.get(index)) {
            message.push_str(&from.to_string());
            if from != to {
                message.push_str(&format!(" to {to}"));
            }
        }
    }
    format!(
        "{kind}: {} at offsets {:#x} to {:#x} ({} of them, one every {each:#x} bytes): {message}{repaired}",
        first.structure,
        first.offset,
        last.offset,
        run.len()
    )
}

fn single(finding: &Finding) -> String {
    let (kind, repaired) = words(finding);
    let Finding { structure, offset, message, .. } = finding;
    format!("{kind}: {structure} at offset {offset:#x}: {message}{repaired}")
}

fn words(finding: &Finding) -> (&'static str, &'static str) {
    let kind = match finding.severity {
        Severity::Leak => "leak",
        Severity::Corruption => "corruption",
        Severity::Warning => "warning",
    };
    (kind, if finding.repaired { " (repaired)" } else { "" })
}

/// The findings as at most [`LINES_MAX`] lines, and the number of findings that these cover.
pub(crate) fn lines(findings: &[Finding]) -> (Vec<String>, usize) {
    let (mut lines, mut done) = (Vec::new(), 0);
    while done < findings.len() && lines.len() < LINES_MAX {
        let len = run(&findings[done..]);
        lines.push(line(&findings[done..done + len]));
        done += len;
    }
    (lines, done)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(offset: u64, message: String) -> Finding {
        let severity = Severity::Corruption;
        Finding { severity, offset, structure: "entry", message, repaired: false }
    }

    #[test]
    fn numbers_are_cut_out_of_words() {
        let found = cut("L2 entry 7: 0x1f, 18446744073709551616, 0xg");
        let values: Vec<u64> = found.numbers.iter().map(|number| number.value).collect();
        assert_eq!(values, [7, 0x1f, 0]);
        assert_eq!(found.between[0], "L2 entry ");
        assert_eq!(cut("\u{e4}1").numbers.len(), 1);
    }

    #[test]
    fn what_only_goes_on_is_one_line() {
        let all: Vec<_> = (0..500)
            .map(|n| {
                finding(0x1000 + n * 8, format!("guest {:#x}: found {n}, expected 1", n << 16))
            })
            .collect();
        let (lines, told) = lines(&all);
        let line = "corruption: entry at offsets 0x1000 to 0x1f98 (500 of them, one every 0x8 bytes): guest \
                    0x0 to 0x1f30000: found 0 to 499, expected 1";
        assert_eq!((lines, told), (vec![line.to_owned()], 500));
    }

    #[test]
    fn what_does_not_is_told_one_by_one_up_to_a_limit() {
        let all: Vec<_> = (0..300u64).map(|n| finding(n * n, "broken".to_owned())).collect();
        let (listed, told) = lines(&all);
        assert_eq!((listed.len(), told), (LINES_MAX, LINES_MAX));
        assert_eq!(listed[2], "corruption: entry at offset 0x4: broken");
        let two = [finding(0, "a".to_owned()), finding(8, "a".to_owned())];
        assert_eq!(lines(&two).0.len(), 2);
        // A different text, or a step back, ends a run.
        let mut all: Vec<_> = (0..6).map(|n| finding(n * 8, "a".to_owned())).collect();
        all[3].message = "b".to_owned();
        assert_eq!(lines(&all).0.len(), 4);
        assert_eq!(lines(&[]), (vec![], 0));
    }
}
