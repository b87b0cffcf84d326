//! The manifest: a hash of each file (DSP0243, "OVF package structure").

use vdkit_block::bytes::hex;
use vdkit_block::{Error, Result, require_within};
use vdkit_stream::HashMethod;

/// Maximum lines of a manifest.
const LINES_MAX: usize = 1 << 16;

/// A manifest's entry for one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestEntry {
    /// The file's name.
    pub name: String,
    /// Hash method.
    pub method: HashMethod,
    /// The hash.
    pub digest: Vec<u8>,
}

/// A manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    entries: Vec<ManifestEntry>,
    /// Indices of the entries, sorted by name.
    by_name: Vec<usize>,
}

impl Manifest {
    /// Parses lines of the form `SHA256(name)= hex`. `file` and `offset` (the text's start in the
    /// file) are for messages.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for a line of another form and for an unknown hash.
    pub fn parse(file: &str, offset: u64, text: &[u8]) -> Result<Self> {
        let mut entries = Vec::new();
        let mut at = offset;
        for (number, line) in (1..).zip(text.split(|&byte| byte == b'\n')) {
            let corrupt = |found: String, expected: &str| {
                let found = format!("{found} in line {number}");
                Error::corrupt(file, at, "manifest", found, expected)
            };
            let form = "SHA256(name)= hexadecimal digits";
            let line_text = std::str::from_utf8(line)
                .map_err(|_| corrupt("bytes that are no text".to_owned(), form))?;
            if !line_text.trim().is_empty() {
                let entry = entry(line_text)
                    .map_err(|(found, expected)| corrupt(found, expected.unwrap_or(form)))?;
                entries.push(entry);
                let (what, found) = ("number of lines of a manifest", entries.len() as u64);
                require_within(file, what, found, LINES_MAX as u64)?;
            }
            at += line.len() as u64 + 1;
        }
        let mut by_name: Vec<usize> = (0..entries.len()).collect();
        by_name.sort_by(|&a, &b| entries[a].name.cmp(&entries[b].name));
        Ok(Self { entries, by_name })
    }

    /// The entries for a file: usually one, and all must match.
    pub fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a ManifestEntry> {
        let start = self.by_name.partition_point(|&index| self.entries[index].name.as_str() < name);
        let entries = self.by_name[start..].iter().map(move |&index| &self.entries[index]);
        entries.take_while(move |entry| entry.name == name)
    }

    /// All entries.
    pub fn entries(&self) -> &[ManifestEntry] {
        &self.entries
    }
}

/// Parses an entry, or returns the found and expected text.
fn entry(line: &str) -> std::result::Result<ManifestEntry, (String, Option<&'static str>)> {
    let other = || ("another text".to_owned(), None);
    // A name may contain any of the delimiters; digits may not.
    let (left, digits) = line.rsplit_once('=').ok_or_else(other)?;
    let left = left.trim().strip_suffix(')').ok_or_else(other)?;
    let (method, name) = left.split_once('(').ok_or_else(other)?;
    let method = method.trim();
    // OpenSSL 3 writes SHA2-256 where older versions write SHA256.
    let plain = method.to_ascii_lowercase().replacen("sha2-", "sha", 1);
    let method = HashMethod::of_name(&plain)
        .ok_or_else(|| (format!("the hash '{method}'"), Some("SHA1, SHA256 or SHA512")))?;
    let digest = method
        .parse_digest(digits.trim())
        .ok_or_else(|| (format!("a hash of another length than {method} has"), None))?;
    Ok(ManifestEntry { name: name.trim().trim_start_matches("./").to_owned(), method, digest })
}

/// The manifest line of a file.
pub(crate) fn line(name: &str, method: HashMethod, digest: &[u8]) -> String {
    format!("{}({name})= {}\n", method.name().to_ascii_uppercase(), hex(digest))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use vdkit_testkit::processor_time;

    use super::*;

    const SHA1: &str = "a9993e364706816aba3e25717850c26c9cd0d89d";
    const SHA256: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn parse(text: &str) -> Result<Manifest> {
        Manifest::parse("a.ova", 512, text.as_bytes())
    }

    #[test]
    fn lines_of_several_writers() {
        let upper = SHA1.to_uppercase();
        let text = format!(
            "SHA256(a.ovf)= {SHA256}\r\nSHA1 (disk (1).vmdk) = {SHA1}\n\n\
             SHA2-256(a=b)={SHA256}\nsha1(./c)= {upper}"
        );
        let manifest = parse(&text).unwrap();
        let names: Vec<_> = manifest.entries().iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["a.ovf", "disk (1).vmdk", "a=b", "c"]);
        assert_eq!(manifest.of("c").next().unwrap().digest[0], 0xa9);
        assert_eq!(manifest.of("a.ovf").count(), 1);
        assert_eq!(manifest.of("nobody").count(), 0);
        let line = line("a.ovf", HashMethod::Sha256, &manifest.of("a.ovf").next().unwrap().digest);
        assert_eq!(line, format!("SHA256(a.ovf)= {SHA256}\n"));
    }

    #[test]
    fn names_are_found_quickly_among_many() {
        let name = |number: usize| format!("disk.vmdk.{number:09}");
        let text: String = (0..LINES_MAX).map(|i| format!("SHA1({})= {SHA1}\n", name(i))).collect();
        let manifest = parse(&text).unwrap();
        let start = processor_time();
        assert!((0..LINES_MAX).all(|number| manifest.of(&name(number)).count() == 1));
        let took = processor_time() - start;
        assert!(took < Duration::from_secs(3), "{took:?}");
    }

    #[test]
    fn other_lines_are_refused_with_their_place() {
        let short = &SHA1[1..];
        let bad = [
            format!("SHA1(a)= {short}"),
            format!("SHA256(a)= {SHA1}"),
            format!("MD5(a)= {SHA1}"),
            format!("SHA1 a = {SHA1}"),
            "SHA1(a)".to_owned(),
            "hello".to_owned(),
            format!("SHA1(a)= {}", SHA1.replace('a', "\u{e4}")),
        ];
        for line in bad {
            let error = parse(&format!("SHA1(x)= {SHA1}\n{line}\n")).unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains("0x232"), "{line}: {error}");
        }
        assert!(parse("").unwrap().entries().is_empty());
        assert!(Manifest::parse("a", 0, b"\xff").is_err());
    }
}
