//! JSON as QEMU prints it: four spaces of indentation, and members in the order in which QEMU's
//! dictionaries hold them.

use std::cmp::Reverse;
use std::fmt::Write;

use serde_json::{Map, Value};

/// Members of an object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dict(Map<String, Value>);

impl From<Dict> for Value {
    fn from(dict: Dict) -> Self {
        Self::Object(dict.0)
    }
}

impl Dict {
    /// Puts one member.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.put(key, value);
        self
    }

    /// Puts one member if it has a value.
    #[must_use]
    pub fn with_some(self, key: &str, value: Option<impl Into<Value>>) -> Self {
        match value {
            Some(value) => self.with(key, value),
            None => self,
        }
    }

    pub fn put(&mut self, key: &str, value: impl Into<Value>) {
        self.0.insert(key.to_owned(), value.into());
    }

    /// Whether there are no members.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The members in the order in which QEMU visits them: by bucket of its hash table.
pub fn in_order(members: &Map<String, Value>) -> Vec<(&str, &Value)> {
    let mut members: Vec<_> = members.iter().map(|(key, value)| (key.as_str(), value)).collect();
    // Within a bucket, QEMU visits the member first that was put last. Only two keys meet in one
    // bucket, `backing-filename-format` and then `children`: reverse alphabetical order suits them.
    members.sort_by_key(|(key, _)| (bucket(key), Reverse(*key)));
    members
}

/// The bucket of a key in QEMU's dictionaries: 512 buckets, and the hash function of Samba's tdb.
fn bucket(key: &str) -> u32 {
    let seed = 0x238F_13AF_u32.wrapping_mul(key.len() as u32);
    let sum = key
        .bytes()
        .enumerate()
        .fold(seed, |sum, (i, byte)| sum.wrapping_add(u32::from(byte) << (i * 5 % 24)));
    sum.wrapping_mul(1_103_515_243).wrapping_add(12345) % 512
}

/// The value as pretty JSON, without a newline at the end.
pub fn pretty(value: &Value) -> String {
    let mut out = String::new();
    write(&mut out, value, 0);
    out
}

fn write(out: &mut String, value: &Value, depth: usize) {
    match value {
        Value::String(text) => quote(out, text),
        Value::Array(items) => {
            let items = items.iter().map(|item| (None, item));
            write_items(out, ('[', ']'), items, depth);
        }
        Value::Object(members) => {
            let members = in_order(members).into_iter().map(|(key, value)| (Some(key), value));
            write_items(out, ('{', '}'), members, depth);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {
            let _ = write!(out, "{value}");
        }
    }
}

fn write_items<'a>(
    out: &mut String,
    (open, close): (char, char),
    items: impl Iterator<Item = (Option<&'a str>, &'a Value)>,
    depth: usize,
) {
    out.push(open);
    for (i, (key, value)) in items.enumerate() {
        if i > 0 {
            out.push(',');
        }
        indent(out, depth + 1);
        if let Some(key) = key {
            quote(out, key);
            out.push_str(": ");
        }
        write(out, value, depth + 1);
    }
    indent(out, depth);
    out.push(close);
}

fn indent(out: &mut String, depth: usize) {
    out.push('\n');
    out.extend(std::iter::repeat_n(' ', depth * 4));
}

/// Quotes text: everything but printable ASCII is escaped, with UTF-16 surrogates.
pub fn quote(out: &mut String, text: &str) {
    out.push('"');
    let mut units = [0; 2];
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            ' '..='~' => out.push(c),
            _ => {
                for unit in c.encode_utf16(&mut units) {
                    let _ = write!(out, "\\u{unit:04X}");
                }
            }
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_stand_in_the_order_of_qemus_hash_table() {
        let keys = [
            "dirty-flag",
            "full-backing-filename",
            "backing-filename",
            "format",
            "filename",
            "virtual-size",
            "format-specific",
            "cluster-size",
            "actual-size",
            "backing-filename-format",
            "children",
        ];
        let Dict(members) = keys.iter().fold(Dict::default(), |dict, key| dict.with(key, 1));
        let order: Vec<_> = in_order(&members).iter().map(|(key, _)| *key).collect();
        assert_eq!(
            order,
            [
                "children",
                "backing-filename-format",
                "virtual-size",
                "filename",
                "cluster-size",
                "format",
                "actual-size",
                "format-specific",
                "full-backing-filename",
                "backing-filename",
                "dirty-flag",
            ]
        );
    }

    #[test]
    fn empty_lists_take_two_lines_and_other_letters_are_escaped() {
        let dict =
            Dict::default().with("list", Value::Array(Vec::new())).with("text", "ä\u{1F600}\u{7f}");
        assert_eq!(
            pretty(&dict.into()),
            "{\n    \"text\": \"\\u00E4\\uD83D\\uDE00\\u007F\",\n    \"list\": [\n    ]\n}"
        );
    }
}
