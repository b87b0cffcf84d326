//! Options of formats: definitions, parsing, sizes.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::encryption::Secret;
use crate::error::{Error, Result};

/// Methods of a struct of options that set the field of the same name.
#[macro_export]
macro_rules! setters {
    ($($(#[$doc:meta])* $field:ident: $kind:ty),+ $(,)?) => {
        $(
            $(#[$doc])*
            #[must_use]
            pub fn $field(self, $field: $kind) -> Self {
                Self { $field, ..self }
            }
        )+
    };
}

/// Type of an option's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptionKind {
    /// A byte count with an optional binary suffix (`64K`).
    Size,
    /// `on` or `off`.
    Switch,
    /// A whole number.
    Number,
    /// One of these words.
    Word(&'static [&'static str]),
    /// A file name or other text.
    Text,
}

/// One option of a format: the single definition behind parsing, help and documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OptionSpec {
    /// The key, as in `-o key=value`.
    pub key: &'static str,
    /// Type of its value.
    pub kind: OptionKind,
    /// The value if the option is not given.
    pub default: &'static str,
    /// One line of help.
    pub help: &'static str,
}

/// User-supplied options, checked against a format's [`OptionSpec`]s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    values: BTreeMap<String, String>,
    key: Option<Secret>,
    hints: FileHints,
}

/// Requests to the file system about the files of a new image. File systems without such a feature
/// ignore them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileHints {
    /// Write in place (btrfs: no copy-on-write, and so no checksums).
    pub no_cow: bool,
    /// Allocate in multiples of so many bytes (XFS).
    pub extent_bytes: Option<u32>,
}

impl Options {
    /// Parses `key=value[,key=value]` texts. A later value wins. A doubled comma is a literal
    /// comma.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown key (listing the known ones) or an ill-formed value.
    pub fn parse<'a>(
        format: &str,
        specs: &[OptionSpec],
        texts: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self> {
        let mut options = Self::default();
        for text in texts {
            for pair in split_commas(text) {
                if pair.is_empty() {
                    continue;
                }
                let (key, value) = pair.split_once('=').ok_or_else(|| {
                    Error::invalid(format!(
                        "'{pair}' is not of the form KEY=VALUE; {format} has these options:{}",
                        known(specs)
                    ))
                })?;
                options.set(format, specs, key.trim(), value)?;
            }
        }
        Ok(options)
    }

    /// Sets one option.
    ///
    /// # Errors
    /// As [`Options::parse`].
    pub fn set(
        &mut self,
        format: &str,
        specs: &[OptionSpec],
        key: &str,
        value: &str,
    ) -> Result<()> {
        let Some(spec) = specs.iter().find(|s| s.key == key) else {
            let known = known(specs);
            return Err(Error::invalid(format!(
                "unknown option '{key}' for {format}; the known ones are:{known}"
            )));
        };
        let (fits, wanted) = match spec.kind {
            OptionKind::Size => (parse_size(value).is_ok(), "a size such as 64K".to_owned()),
            OptionKind::Switch => (parse_switch(value).is_some(), "on or off".to_owned()),
            OptionKind::Number => (value.parse::<u64>().is_ok(), "a whole number".to_owned()),
            OptionKind::Word(words) => {
                (words.contains(&value), format!("one of {}", words.join(", ")))
            }
            OptionKind::Text => (true, "text".to_owned()),
        };
        if !fits {
            return Err(Error::invalid(format!(
                "option {key} of {format} is '{value}', expected {wanted}"
            )));
        }
        self.values.insert(key.to_owned(), value.to_owned());
        Ok(())
    }

    /// The value as given.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(String::as_str)
    }

    /// The value as a byte count.
    pub fn size(&self, key: &str) -> Option<u64> {
        self.text(key).and_then(|v| parse_size(v).ok())
    }

    /// The value as a switch.
    pub fn switch(&self, key: &str) -> Option<bool> {
        self.text(key).and_then(parse_switch)
    }

    /// The value as a number.
    pub fn number(&self, key: &str) -> Option<u64> {
        self.text(key).and_then(|v| v.parse().ok())
    }

    /// The encryption key of a new image. It is never parsed from text.
    pub fn key(&self) -> Option<&Secret> {
        self.key.as_ref()
    }

    /// Sets [`Options::key`].
    pub fn set_key(&mut self, key: Option<Secret>) {
        self.key = key;
    }

    /// Hints for the file system.
    pub fn hints(&self) -> FileHints {
        self.hints
    }

    /// Sets [`Options::hints`].
    pub fn set_hints(&mut self, hints: FileHints) {
        self.hints = hints;
    }

    /// Whether no option was given.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

/// The options, a line each.
fn known(specs: &[OptionSpec]) -> String {
    if specs.is_empty() {
        return " none".to_owned();
    }
    specs.iter().map(|spec| format!("\n  {:<18} {}", spec.key, spec.help)).collect()
}

fn split_commas(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let last = parts.len() - 1;
        if c == ',' {
            if chars.peek() == Some(&',') {
                chars.next();
                parts[last].push(',');
            } else {
                parts.push(String::new());
            }
        } else {
            parts[last].push(c);
        }
    }
    parts
}

fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "on" | "true" | "yes" => Some(true),
        "off" | "false" | "no" => Some(false),
        _ => None,
    }
}

/// Parses `512`, `64K`, `10G`, `1.5T`: binary units, also with a trailing `iB` or `B`.
///
/// # Errors
/// [`Error::Invalid`] if the text is not a size or exceeds 2^63.
pub fn parse_size(text: &str) -> Result<u64> {
    let bad = || Error::invalid(format!("'{text}' is not a size; write 512, 64K, 10G or 1.5T"));
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let shift = match suffix.trim_end_matches("iB").trim_end_matches('B') {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        "p" | "P" => 50,
        "e" | "E" => 60,
        _ => return Err(bad()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return Err(bad());
    }
    // Too many digits are still a number; the range check below rejects it.
    let whole: u128 = if whole.is_empty() { 0 } else { whole.parse().unwrap_or(u128::MAX) };
    if fraction.len() > 18 {
        return Err(bad());
    }
    let too_large = || {
        Error::invalid(format!(
            "'{text}' is too large: the largest size is 8E less one byte (2^63 - 1)"
        ))
    };
    if whole > u128::from(u64::MAX) {
        return Err(too_large());
    }
    let fraction_value: u128 =
        if fraction.is_empty() { 0 } else { fraction.parse().map_err(|_| bad())? };
    let part = (fraction_value << shift) / 10u128.pow(fraction.len() as u32);
    let bytes = (whole << shift) + part;
    if bytes > i64::MAX as u128 {
        return Err(too_large());
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("64K", 65536),
            ("10G", 10 << 30),
            ("1.5T", 3 << 39),
            ("1MiB", 1 << 20),
            (".5k", 512),
            ("7E", 7 << 60),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "K", "-1", "1X", "1.2.3", "8E", "99999999999999999999", "1 G", "0x10"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    const SPECS: &[OptionSpec] = &[
        OptionSpec { key: "size", kind: OptionKind::Size, default: "64K", help: "a size" },
        OptionSpec { key: "name", kind: OptionKind::Text, default: "", help: "a name" },
    ];

    #[test]
    fn options_name_the_known_keys_and_keep_doubled_commas() {
        let options = Options::parse("x", SPECS, ["size=1M,name=a,,b"]).unwrap();
        assert_eq!(options.size("size"), Some(1 << 20));
        assert_eq!(options.text("name"), Some("a,b"));
        let error = Options::parse("x", SPECS, ["sise=1M"]).unwrap_err().to_string();
        assert!(error.contains("'sise'") && error.contains("a size"), "{error}");
        assert!(Options::parse("x", SPECS, ["size=big"]).is_err());
    }
}
