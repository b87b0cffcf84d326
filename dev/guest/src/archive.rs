//! Initial RAM file system archives: cpio, "newc" (the kernel's buffer-format.rst).

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use crate::modules::Modules;

/// Initial files. The kernel accepts several concatenated archives.
#[derive(Clone, Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    there: BTreeSet<String>,
}

impl Archive {
    /// Adds a folder at an absolute path, and its parents; each once.
    pub fn folder(&mut self, path: &str) {
        self.folders_above(&format!("{}/", path.trim_start_matches('/')));
    }

    /// Adds an executable at an absolute path, and its parents; the first one at a path stays.
    pub fn file(&mut self, path: &str, content: &[u8]) {
        let name = path.trim_start_matches('/');
        self.folders_above(name);
        if self.there.insert(name.to_owned()) {
            self.entry(name, 0o100_755, content);
        }
    }

    /// Adds a program of this host at the same path, with its libraries.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn program(&mut self, path: &Path) -> io::Result<()> {
        for file in crate::libraries(path)?.iter().map(|file| &**file).chain([path]) {
            self.file(&file.to_string_lossy(), &crate::read(file)?);
        }
        Ok(())
    }

    /// Adds modules in `/modules`, and `/modules/list` with their file names in load order.
    pub fn modules(&mut self, modules: &Modules) {
        let mut names = String::new();
        for (name, bytes) in modules.loaded() {
            self.file(&format!("/modules/{name}.ko"), bytes);
            names.push_str(name);
            names.push_str(".ko\n");
        }
        self.file("/modules/list", names.as_bytes());
    }

    /// The archive's bytes, a multiple of 4.
    pub fn end(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, b"");
        self.bytes
    }

    fn folders_above(&mut self, name: &str) {
        for (end, _) in name.match_indices('/') {
            if self.there.insert(name[..end].to_owned()) {
                self.entry(&name[..end], 0o040_755, b"");
            }
        }
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor,
        // namesize, check
        let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
        let numbers = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend(b"070701");
        for number in numbers {
            self.bytes.extend(format!("{number:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The names and contents of an archive.
    fn entries(mut bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
        let mut found = Vec::new();
        while !bytes.is_empty() {
            assert_eq!(&bytes[..6], b"070701");
            let number = |i: usize| {
                let text = std::str::from_utf8(&bytes[6 + 8 * i..14 + 8 * i]).unwrap();
                usize::from_str_radix(text, 16).unwrap()
            };
            let (size, name_size) = (number(6), number(11));
            let content = (110 + name_size).next_multiple_of(4);
            let name = std::str::from_utf8(&bytes[110..110 + name_size - 1]).unwrap();
            found.push((name.to_owned(), bytes[content..content + size].to_vec()));
            bytes = &bytes[(content + size).next_multiple_of(4)..];
        }
        found
    }

    #[test]
    fn folders_come_before_what_is_in_them_and_nothing_comes_twice() {
        let mut archive = Archive::default();
        archive.folder("dev");
        archive.file("/usr/lib/a.so", b"12345");
        archive.file("usr/lib/a.so", b"another");
        archive.file("/usr/b", b"");
        let bytes = archive.end();
        assert_eq!(bytes.len() % 4, 0);
        let found = entries(&bytes);
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["dev", "usr", "usr/lib", "usr/lib/a.so", "usr/b", "TRAILER!!!"]);
        assert_eq!(found[3].1, b"12345");
    }

    #[test]
    fn a_program_has_its_loader_beside_it() {
        let mut archive = Archive::default();
        let program = std::env::current_exe().unwrap();
        archive.program(&program).unwrap();
        let found = entries(&archive.end());
        let there = |part: &str| found.iter().any(|(name, _)| name.contains(part));
        assert!(there("/ld-") && there(&program.to_string_lossy()[1..]));
        let error = Archive::default().program(Path::new("/nothing-here")).unwrap_err();
        assert!(error.to_string().contains("/nothing-here"), "{error}");
    }
}
