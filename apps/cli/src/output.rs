//! Results: buffered text, tables and JSON on stdout, and files.

use std::io::{self, StdoutLock, Write};
use std::path::Path;

use serde::Serialize;
use vdkit::storage::{CommitOptions, FileOptions, LockMode, PendingFile};
use vdkit::{HostOffset, Storage};

/// Buffered stdout. Results are small, so one write at the end is cheaper than many.
///
/// A command goes on when its results cannot be printed: its exit code is an answer too. A reader that
/// went away is no failure; [`Output::finish`] reports any other.
#[derive(Debug, Default)]
pub struct Output {
    buffer: Vec<u8>,
    /// Why nothing more is printed.
    failed: Option<io::Error>,
}

/// The buffer is written when it reaches this size, which bounds the memory of long maps.
const FLUSH_BYTES: usize = 64 << 10;

impl Output {
    /// Adds a line. Escapes control characters, because names come from untrusted images.
    pub fn line(&mut self, text: impl AsRef<str>) {
        self.bytes(crate::failure::printable(text.as_ref()).as_bytes());
        self.bytes(b"\n");
    }

    /// Adds a value as indented JSON and a newline.
    pub fn json(&mut self, value: &impl Serialize) {
        let written = serde_json::to_writer_pretty(&mut self.buffer, value);
        self.end_json(written);
    }

    /// Adds a value as JSON on one line, for a program that reads it while the command goes on.
    pub fn json_line(&mut self, value: &impl Serialize) {
        let written = serde_json::to_writer(&mut self.buffer, value);
        self.end_json(written);
    }

    fn end_json(&mut self, written: serde_json::Result<()>) {
        self.bytes(b"\n");
        self.note(written.map_err(io::Error::from));
    }

    /// Adds bytes as they are.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= FLUSH_BYTES {
            self.flush();
        }
    }

    /// A JSON array to which elements are added one at a time, so that a long array needs no
    /// memory. Nothing is printed before the first element or the end.
    pub fn json_array(&mut self) -> JsonArray<'_> {
        JsonArray { out: self, first: true }
    }

    /// Writes out what is buffered.
    pub fn flush(&mut self) {
        if !self.unread() && !self.buffer.is_empty() {
            let mut stdout: StdoutLock<'_> = io::stdout().lock();
            let written = stdout.write_all(&self.buffer).and_then(|()| stdout.flush());
            self.note(written);
        }
        self.buffer.clear();
    }

    fn note(&mut self, written: io::Result<()>) {
        self.failed = self.failed.take().or(written.err());
    }

    /// Whether nothing more is printed. A long answer, or one without an end, ends then.
    pub fn unread(&self) -> bool {
        self.failed.is_some()
    }

    /// Writes out the rest.
    ///
    /// # Errors
    /// Results could not be printed, though their reader is there.
    pub fn finish(&mut self) -> io::Result<()> {
        self.flush();
        match self.failed.take() {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }
}

/// A JSON array in progress, one element per line as with qemu-img.
#[derive(Debug)]
pub struct JsonArray<'a> {
    out: &'a mut Output,
    first: bool,
}

impl JsonArray<'_> {
    /// Adds an element; returns whether the array is read further.
    pub fn push(&mut self, value: &impl Serialize) -> bool {
        self.out.bytes(if std::mem::take(&mut self.first) { "[" } else { ",\n" }.as_bytes());
        let written = serde_json::to_writer(&mut self.out.buffer, value);
        self.out.note(written.map_err(io::Error::from));
        !self.out.unread()
    }

    pub fn end(self) {
        self.out.bytes(if self.first { "[]\n" } else { "]\n" }.as_bytes());
    }
}

/// Puts a file in place, complete or not at all.
pub fn write_file(path: &Path, bytes: &[u8]) -> vdkit::Result<()> {
    let pending = PendingFile::create(path, &FileOptions::read_write().lock(LockMode::Off))?;
    pending.storage().write_at(bytes, HostOffset(0))?;
    pending.commit(CommitOptions::default())
}

/// Formats bytes with the exact number: `64 KiB (65536 bytes)`.
pub fn bytes_long(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} bytes");
    }
    format!("{} ({bytes} bytes)", bytes_short(bytes))
}

/// Formats bytes, rounded: `64 KiB`, `1.5 TiB`.
pub fn bytes_short(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut exponent = ((63 - bytes.leading_zeros()) / 10).min(6);
    let mut value = bytes as f64 / (1u64 << (10 * exponent)) as f64;
    // Rounding must not print 1024 of a unit.
    if value >= 1023.95 && exponent < 6 {
        exponent += 1;
        value /= 1024.0;
    }
    let text = if value >= 100.0 && value.fract() < 0.05 {
        format!("{value:.0}")
    } else {
        format!("{value:.1}")
    };
    let text = text.strip_suffix(".0").unwrap_or(&text);
    format!("{text} {}", UNITS[exponent as usize - 1])
}

/// A count with its noun, in the singular for one.
pub fn counted(count: u64, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

/// Aligned `key: value` lines.
#[derive(Debug, Default)]
pub struct Fields(Vec<(String, String)>);

impl Fields {
    /// Adds a line. Further lines of a value are indented below the first.
    pub fn add(&mut self, key: impl Into<String>, value: impl Into<String>) -> &mut Self {
        self.0.push((key.into(), value.into()));
        self
    }

    /// Prints all lines, indented by `indent` spaces.
    pub fn print(&self, out: &mut Output, indent: usize) {
        let width = self.0.iter().map(|(key, _)| key.chars().count() + 1).max().unwrap_or(0);
        for (key, value) in &self.0 {
            let mut lines = value.lines();
            let first = lines.next().unwrap_or("");
            out.line(format!("{:indent$}{:<width$} {first}", "", format!("{key}:")));
            for line in lines {
                out.line(format!("{:indent$}{:<width$} {line}", "", ""));
            }
        }
    }
}

/// A table with a header. Each column is as wide as its widest cell.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// Sets the headers. A header that begins with `>` makes its column right-aligned.
    pub fn new(headers: &[&str]) -> Self {
        let right = headers.iter().map(|h| h.starts_with('>')).collect();
        let first = headers.iter().map(|h| h.trim_start_matches('>').to_owned()).collect();
        Self { rows: vec![first], right }
    }

    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// Prints the table, indented by `indent` spaces.
    pub fn print(&self, out: &mut Output, indent: usize) {
        let width = |i: usize| {
            self.rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.right.len()).map(width).collect();
        for row in &self.rows {
            let mut line = " ".repeat(indent);
            for (i, cell) in row.iter().enumerate() {
                let width = widths[i];
                if i > 0 {
                    line.push_str("  ");
                }
                if self.right[i] {
                    line.push_str(&format!("{cell:>width$}"));
                } else {
                    line.push_str(&format!("{cell:<width$}"));
                }
            }
            out.line(line.trim_end());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_for_people() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (10 << 30, "10 GiB"),
            ((1 << 40) - 1, "1 TiB"),
            (3 << 39, "1.5 TiB"),
            (196_608, "192 KiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(bytes_short(bytes), text, "{bytes}");
        }
        assert_eq!(bytes_long(65536), "64 KiB (65536 bytes)");
        assert_eq!(bytes_long(5), "5 bytes");
    }

    #[test]
    fn an_array_begins_with_its_first_element_or_its_end() {
        let mut out = Output::default();
        out.json_array();
        assert!(out.buffer.is_empty());
        out.json_array().end();
        let mut array = out.json_array();
        for number in [1, 2] {
            assert!(array.push(&number));
        }
        array.end();
        assert_eq!(out.buffer, b"[]\n[1,\n2]\n");
    }
}
