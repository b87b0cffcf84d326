//! Changes the descriptor's text so that a power cut leaves the old or the new text.
//!
//! A disk writes a sector atomically, and bytes after a zero byte are not part of the text. So a
//! change of one sector is safe, and so is a change beyond the end of either text: bytes that must
//! not be visible yet are written first. If both texts continue after the changed sector, the rest
//! of the text must not move, so the sector makes room: blank lines and comments are removed or
//! added, and lines whose order does not matter move to the end of the text, where their copies
//! become durable first.

use std::ops::Range;

/// Bytes that a disk writes atomically.
const SECTOR: usize = 512;

/// A text to write, whose changed bytes are written in steps with a sync after each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rewrite {
    pub(crate) text: String,
    pub(crate) steps: Vec<Range<usize>>,
}

/// Texts to write one after the other to turn `old` into `new` or an equivalent text. `None` if
/// every way could be torn or needs more than `room` bytes.
pub(crate) fn rewrites(old: &str, new: &str, room: Option<u64>) -> Option<Vec<Rewrite>> {
    let fits = |text: &str| room.is_none_or(|room| text.len() as u64 <= room);
    let plain = Rewrite { text: new.to_owned(), steps: Vec::new() };
    if let Some(steps) = steps(old, new).filter(|_| fits(new)) {
        return Some(vec![Rewrite { steps, ..plain }]);
    }
    if let Some(fitted) = fitted(old, new, is_idle) {
        let steps = steps(old, &fitted)?;
        return Some(vec![Rewrite { text: fitted, steps }]);
    }
    let copies = moved_lines(old, new)?;
    let gap = if old.ends_with('\n') { "" } else { "\n" };
    let longer = format!("{old}{gap}{copies}");
    let fitted =
        fitted(&longer, &format!("{new}{gap}{copies}"), |line| is_idle(line) || moves(line))?;
    let (first, second) = (steps(old, &longer)?, steps(&longer, &fitted)?);
    let both = [(longer, first), (fitted, second)];
    let fit = both.iter().all(|(text, _)| fits(text));
    fit.then(|| both.into_iter().map(|(text, steps)| Rewrite { text, steps }).collect())
}

/// The differing sectors, in an order in which each prefix of the writes reads as the old or the
/// new text.
fn steps(old: &str, new: &str) -> Option<Vec<Range<usize>>> {
    let sector = |text: &str, n: usize| {
        let mut bytes = [0; SECTOR];
        let rest = text.as_bytes().get(n * SECTOR..).unwrap_or_default();
        let len = rest.len().min(SECTOR);
        bytes[..len].copy_from_slice(&rest[..len]);
        bytes
    };
    let count = old.len().max(new.len()).div_ceil(SECTOR);
    let differ: Vec<usize> = (0..count).filter(|n| sector(old, *n) != sector(new, *n)).collect();
    let (Some(first), Some(last)) = (differ.first(), differ.last()) else {
        return Some(Vec::new());
    };
    let end = (first + 1) * SECTOR;
    let (here, behind) = (first * SECTOR..end, end..(last + 1) * SECTOR);
    if first == last {
        Some(vec![here])
    } else if old.len() < end {
        Some(vec![behind, here])
    } else if new.len() < end {
        Some(vec![here, behind])
    } else {
        None
    }
}

/// Byte ranges of the difference, in `old` and in `new`.
fn change(old: &str, new: &str) -> (Range<usize>, Range<usize>) {
    let (a, b) = (old.as_bytes(), new.as_bytes());
    let start = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let most = a.len().min(b.len()) - start;
    let same = a.iter().rev().zip(b.iter().rev()).take(most).take_while(|(a, b)| a == b).count();
    (start..a.len() - same, start..b.len() - same)
}

/// The text with the change of `new` within one sector of constant length: lines that `goes`
/// selects make room in it. `None` if the change spans two sectors, or there is too little room.
fn fitted(old: &str, new: &str, goes: impl Fn(&str) -> bool) -> Option<String> {
    let (before, after) = change(old, new);
    let start = before.start / SECTOR * SECTOR;
    let end = start + SECTOR;
    if before.end > end || old.len() < end {
        return None;
    }
    // Works on bytes, since byte ranges may split characters.
    let (old, new) = (old.as_bytes(), new.as_bytes());
    let sector = [&new[start..after.end], &old[before.end..end]].concat();
    let changed = after.start - start..after.end - start;
    let mut kept = Vec::with_capacity(SECTOR);
    let mut excess = sector.len().saturating_sub(SECTOR);
    let mut at = 0;
    let mut padded = false;
    for line in sector.split_inclusive(|byte| *byte == b'\n') {
        let range = at..at + line.len();
        at = range.end;
        // The first line may be partial, or the one that identifies the text.
        let whole = range.start > 0 && line.ends_with(b"\n");
        let untouched = range.end <= changed.start || changed.end <= range.start;
        let named = std::str::from_utf8(line).is_ok_and(&goes);
        if excess > 0 && whole && untouched && named {
            let gone = line.len().min(excess);
            excess -= gone;
            kept.resize(kept.len() + line.len() - gone, b'\n');
            continue;
        }
        kept.extend_from_slice(line);
        if !padded && sector.len() < SECTOR && line.ends_with(b"\n") && changed.end <= range.end {
            kept.resize(kept.len() + SECTOR - sector.len(), b'\n');
            padded = true;
        }
    }
    if kept.len() != SECTOR {
        return None;
    }
    String::from_utf8([&old[..start], &kept, &old[end..]].concat()).ok()
}

/// Whether a line is blank or a comment.
fn is_idle(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#')
}

/// Whether a line may be moved or repeated without a change of meaning.
fn moves(line: &str) -> bool {
    let key = line.split_once('=').map(|(key, _)| key.trim().to_ascii_lowercase());
    key.is_some_and(|key| key.starts_with("ddb.") || key == "createtype" || key == "encoding")
}

/// The lines that can move out of the changed sector.
fn moved_lines(old: &str, new: &str) -> Option<String> {
    let (before, _) = change(old, new);
    let start = before.start / SECTOR * SECTOR;
    let mut lines = String::new();
    let mut at = 0;
    for line in old.split_inclusive('\n') {
        let range = at..at + line.len();
        at = range.end;
        let inside = range.start > start && range.end <= start + SECTOR;
        let untouched = range.end <= before.start || before.end <= range.start;
        if inside && untouched && line.ends_with('\n') && moves(line) {
            lines.push_str(line);
        }
    }
    (!lines.is_empty()).then_some(lines)
}
