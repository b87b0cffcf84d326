//! Detects processes that use the image with flushes disabled.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A process, and the command-line option that disables flushes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unflushed {
    pub(super) pid: u32,
    pub(super) program: String,
    pub(super) word: String,
}

/// Searches the visible processes that have the file open: all for root, else the user's own.
pub(super) fn unflushed(image: &Path) -> Option<Unflushed> {
    let image = image.canonicalize().ok()?;
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let process = entry.path();
        let mut open = fs::read_dir(process.join("fd")).ok()?.flatten();
        open.find(|fd| fs::read_link(fd.path()).is_ok_and(|file| file == image))?;
        let line = fs::read(process.join("cmdline")).ok()?;
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let word = marker(&words, image.file_name()?)?;
        let program = Path::new(OsStr::from_bytes(words.first()?)).file_name()?;
        Some(Unflushed { pid, program: program.to_string_lossy().into_owned(), word })
    })
}

/// The option that disables flushes for a file. An option for one disk of several has the file name
/// in the same word; vdkit's own option is for its only image.
///
/// Sources: QEMU's manual: `-drive cache=unsafe`, `-blockdev cache.no-flush=on` and its JSON form,
/// which libvirt writes.
fn marker(words: &[&[u8]], file: &OsStr) -> Option<String> {
    const WITHIN: [&str; 4] =
        ["cache=unsafe", "cache.no-flush=on", "\"no-flush\":true", "\"no-flush\": true"];
    let words: Vec<_> = words.iter().map(|word| String::from_utf8_lossy(word)).collect();
    let name = file.to_string_lossy();
    for (i, word) in words.iter().enumerate() {
        let own = word == "--cache=unsafe"
            || ((word == "--cache" || word == "-t")
                && words.get(i + 1).is_some_and(|w| w == "unsafe"));
        if own {
            return Some("--cache unsafe".to_owned());
        }
        let found = WITHIN.iter().find(|marker| word.contains(**marker));
        if let Some(found) = found.filter(|_| word.contains(&*name)) {
            return Some((*found).to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_that_names_the_file_counts() {
        let said = |words: &[&str]| {
            let words: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
            marker(&words, OsStr::new("a.qcow2"))
        };
        assert_eq!(said(&["qemu", "-drive", "file=/x/a.qcow2,cache=none"]), None);
        assert_eq!(said(&["qemu", "-drive", "file=/x/b.qcow2,cache=unsafe", "a.qcow2"]), None);
        let drive = said(&["qemu", "-drive", "file=/x/a.qcow2,cache=unsafe"]);
        assert_eq!(drive.as_deref(), Some("cache=unsafe"));
        let json = r#"{"driver":"file","filename":"/a.qcow2","cache":{"no-flush":true}}"#;
        assert_eq!(said(&["qemu", "-blockdev", json]).as_deref(), Some("\"no-flush\":true"));
        let own = said(&["vdkit", "serve", "--cache", "unsafe", "a.qcow2"]);
        assert_eq!(own.as_deref(), Some("--cache unsafe"));
        assert_eq!(said(&["vdkit", "serve", "--cache", "none", "unsafe"]), None);
    }
}
