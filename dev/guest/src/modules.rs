//! Kernel modules: found by name, decompressed, with their dependencies.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Maximum bytes of a module; Debian's largest have some 10 MiB.
const BYTES_MAX: u64 = 256 << 20;

/// The modules of a kernel, and those to load in a guest.
#[derive(Debug, Default)]
pub struct Modules {
    files: HashMap<String, PathBuf>,
    built_in: BTreeSet<String>,
    loaded: Vec<(String, Vec<u8>)>,
}

impl Modules {
    /// All modules beneath a folder.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn beneath(folder: &Path) -> io::Result<Self> {
        let list = fs::read_to_string(folder.join("modules.builtin")).unwrap_or_default();
        let file_name = |line: &str| stem(line.rsplit('/').next().unwrap_or_default());
        let mut all =
            Self { built_in: list.lines().filter_map(file_name).collect(), ..Self::default() };
        all.find(folder)?;
        Ok(all)
    }

    fn find(&mut self, folder: &Path) -> io::Result<()> {
        for entry in fs::read_dir(folder).map_err(|error| crate::about(folder, &error))? {
            let path = entry?.path();
            if path.is_symlink() {
                continue;
            }
            if path.is_dir() {
                self.find(&path)?;
            } else if let Some(name) = path.file_name().and_then(|name| stem(name.to_str()?)) {
                self.files.insert(name, path);
            }
        }
        Ok(())
    }

    /// Whether a module of this name exists.
    pub fn has(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    /// Adds a module to load, after its dependencies, unless it is built in.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`] if the kernel has no such module; it cannot be read.
    pub fn load(&mut self, name: &str) -> io::Result<()> {
        if self.built_in.contains(name) || self.loaded.iter().any(|(there, _)| there == name) {
            return Ok(());
        }
        let Some(path) = self.files.get(name) else {
            let text = format!("the guest's kernel has no driver '{name}'");
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        };
        let bytes = unpacked(path)?;
        let info = bytes.split(|byte| *byte == 0).find_map(|text| text.strip_prefix(b"depends="));
        let depends = String::from_utf8_lossy(info.unwrap_or_default()).replace('-', "_");
        for needed in depends.split(',').filter(|needed| !needed.is_empty()) {
            self.load(needed)?;
        }
        self.loaded.push((name.to_owned(), bytes));
        Ok(())
    }

    /// Names and contents of the modules to load, in order.
    pub fn loaded(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.loaded.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
    }
}

/// A module's name, in the kernel's spelling, from its file name.
fn stem(file: &str) -> Option<String> {
    file.split_once(".ko").map(|(stem, _)| stem.replace('-', "_"))
}

/// The decompressed module.
fn unpacked(path: &Path) -> io::Result<Vec<u8>> {
    let packed = crate::read(path)?;
    match path.extension().unwrap_or_default().to_str() {
        Some("xz") => whole(liblzma::read::XzDecoder::new(&*packed)),
        Some("zst") => zstd::Decoder::new(&*packed).and_then(whole),
        Some("gz") => whole(flate2::read::GzDecoder::new(&*packed)),
        _ => return Ok(packed),
    }
    .map_err(|error| crate::about(path, &error))
}

fn whole(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    if from.take(BYTES_MAX + 1).read_to_end(&mut bytes)? as u64 > BYTES_MAX {
        return Err(io::Error::other(format!("unpacked, it has more than {BYTES_MAX} bytes")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn modules_are_unpacked_and_come_after_what_they_need() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join("kernel").join(name);
        fs::create_dir(folder.path().join("kernel")).unwrap();
        fs::write(folder.path().join("modules.builtin"), "kernel/fs/ext4.ko\n").unwrap();
        fs::write(at("crc.ko"), b"crc\0depends=\0").unwrap();
        let mut xz = liblzma::write::XzEncoder::new(Vec::new(), 1);
        xz.write_all(b"virtio\0depends=crc\0").unwrap();
        fs::write(at("virtio-ring.ko.xz"), xz.finish().unwrap()).unwrap();
        let zst = zstd::encode_all(&b"blk\0depends=virtio-ring,crc\0"[..], 1).unwrap();
        fs::write(at("virtio_blk.ko.zst"), zst).unwrap();
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(b"nbd\0depends=virtio_blk\0").unwrap();
        fs::write(at("nbd.ko.gz"), gz.finish().unwrap()).unwrap();

        let mut modules = Modules::beneath(folder.path()).unwrap();
        for name in ["nbd", "ext4", "crc"] {
            modules.load(name).unwrap();
        }
        let loaded: Vec<(&str, usize)> = modules.loaded().map(|(n, b)| (n, b.len())).collect();
        assert_eq!(loaded, [("crc", 13), ("virtio_ring", 19), ("virtio_blk", 28), ("nbd", 23)]);
        assert!(modules.has("nbd") && !modules.has("ext4"));
        assert_eq!(modules.load("none").unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(at("broken.ko.xz"), b"no").unwrap();
        let mut modules = Modules::beneath(folder.path()).unwrap();
        assert!(modules.load("broken").unwrap_err().to_string().contains("broken.ko.xz"));
    }
}
