//! The registry of formats, and format probing.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use vdkit_block::{
    CacheMode, DriverInfo, Error, FormatDriver, HostOffset, Probe, Remedy, Result, Storage,
};
use vdkit_storage::{FileOptions, FileStorage};

use crate::options::BackingImage;
use crate::reference;

/// Bytes of the image's start for probing.
const HEAD_BYTES: usize = 64 << 10;
/// Bytes of the image's end for probing.
const TAIL_BYTES: u64 = 512;

/// Opens storages by names that are not file names, such as URIs.
pub trait Protocol: Send + Sync + fmt::Debug {
    /// Whether this protocol opens the name. A file that exists takes precedence, and a path with a
    /// slash before the colon, such as `./nbd:x`, is always a file.
    fn matches(&self, name: &str) -> bool;

    /// Opens a storage.
    ///
    /// # Errors
    /// Errors of the name, of the peer, and [`Error::ReadOnly`].
    fn open(&self, name: &str, writable: bool, cache: CacheMode) -> Result<Arc<dyn Storage>>;
}

/// A set of formats. The facade provides the one with all formats.
#[derive(Clone, Debug, Default)]
pub struct Registry {
    drivers: Vec<&'static dyn FormatDriver>,
    rejected_kinds: Vec<RejectedKind>,
    protocols: Vec<&'static dyn Protocol>,
    content_only: bool,
    reference_names: Option<ReferenceNames>,
}

/// Reads a name in an image's metadata that begins with a protocol. `None`: it is none that this
/// program follows.
pub type ReferenceNames = fn(name: &str) -> Result<Option<BackingImage>>;

/// A known file type that is no disk image. Without it, probing would return raw.
#[derive(Clone, Debug)]
pub struct RejectedKind {
    /// Matches the file by its name and its first 64 KiB.
    pub matches: fn(name: &str, head: &[u8]) -> bool,
    /// What it is, to follow the file's name in a message.
    pub what: &'static str,
    /// What to do instead.
    pub remedy: Remedy,
}

/// Result of probing.
#[derive(Clone, Copy, Debug)]
pub struct Probed {
    /// The format's driver.
    pub driver: &'static dyn FormatDriver,
    /// No magic number matched (raw).
    pub fallback: bool,
}

impl Registry {
    /// A registry of these formats. Probing without an explicit format rejects files whose extension is
    /// a format's name, or an alias of it, while their content is of no format.
    pub fn new(drivers: impl IntoIterator<Item = &'static dyn FormatDriver>) -> Self {
        Self { drivers: drivers.into_iter().collect(), ..Self::default() }
    }

    /// Probing looks at the content alone: a file whose extension says another format is raw.
    pub fn probing_content_only(mut self) -> Self {
        self.content_only = true;
        self
    }

    /// Follows names in metadata that are no plain file names, where this function reads them as an
    /// image. [`crate::OpenOptions::refs`] does not apply to these: the function decides.
    pub fn reading_reference_names(mut self, names: ReferenceNames) -> Self {
        self.reference_names = Some(names);
        self
    }

    /// The image that a name in metadata means, if it is no plain file name.
    pub(crate) fn reference_name(&self, name: &str) -> Result<Option<BackingImage>> {
        match self.reference_names {
            Some(names) if reference::protocol_of(name).is_some() => names(name),
            _ => Ok(None),
        }
    }

    /// Opens names of these protocols, where a user gives them. A name in an image's metadata never
    /// is one.
    pub fn with_protocols(
        mut self,
        protocols: impl IntoIterator<Item = &'static dyn Protocol>,
    ) -> Self {
        self.protocols.extend(protocols);
        self
    }

    /// The protocol of a name that a user gave; `None` for a file name, and for a file that exists.
    pub fn protocol_of(&self, path: &Path) -> Option<(&'static dyn Protocol, String)> {
        let name = path.to_str()?;
        let protocol = self.protocols.iter().find(|protocol| protocol.matches(name))?;
        path.symlink_metadata().is_err().then(|| (*protocol, name.to_owned()))
    }

    /// Opens the storage of a name that a user gave: by its protocol, or else as a file.
    ///
    /// # Errors
    /// Errors of the protocol, or of [`FileStorage::open`].
    pub fn open_storage(&self, path: &Path, options: &FileOptions) -> Result<Arc<dyn Storage>> {
        match self.protocol_of(path) {
            Some((protocol, name)) => protocol.open(&name, options.writable, options.cache),
            None => Ok(Arc::new(FileStorage::open(path, options)?)),
        }
    }

    /// Rejects these file types where probing would otherwise return raw. Does not apply to an
    /// explicit format.
    pub fn rejecting(mut self, rejected_kinds: impl IntoIterator<Item = RejectedKind>) -> Self {
        self.rejected_kinds.extend(rejected_kinds);
        self
    }

    /// The formats, in the order given.
    pub fn drivers(&self) -> impl Iterator<Item = &'static dyn FormatDriver> {
        self.drivers.iter().copied()
    }

    /// Finds a driver by its name or an alias.
    pub fn find(&self, name: &str) -> Option<&'static dyn FormatDriver> {
        self.drivers()
            .find(|driver| driver.info().name == name || driver.info().aliases.contains(&name))
    }

    /// The driver with this file name extension, without the dot, in any case.
    pub fn find_by_extension(&self, extension: &str) -> Option<&'static dyn FormatDriver> {
        self.drivers().find(|driver| {
            driver.info().extensions.iter().any(|known| known.eq_ignore_ascii_case(extension))
        })
    }

    /// The driver with the extension of this file name. Extents of a flat VMDK (`NAME-flat.vmdk`,
    /// `NAME-f001.vmdk`) are raw, although they have its extension.
    pub fn find_by_file_name(&self, name: &str) -> Option<&'static dyn FormatDriver> {
        let (stem, extension) = stem_and_extension(name);
        let extent = stem.rsplit_once('-').is_some_and(|(_, last)| {
            let number = last.strip_prefix('f').unwrap_or_default();
            last == "flat" || (number.len() >= 3 && number.bytes().all(|b| b.is_ascii_digit()))
        });
        self.find_by_extension(extension).filter(|_| !extent)
    }

    /// The driver of a user-supplied format name.
    ///
    /// # Errors
    /// [`Error::Invalid`], listing the known formats.
    pub fn driver(&self, name: &str) -> Result<&'static dyn FormatDriver> {
        self.find(name).ok_or_else(|| {
            Error::invalid(format!("unknown format '{name}'; known: {}", self.names()))
        })
    }

    /// The format names, for messages.
    pub(crate) fn names(&self) -> String {
        self.drivers().map(|driver| driver.name()).collect::<Vec<_>>().join(", ")
    }

    /// Probes an image's format by its first 64 KiB, with one read; unless they and the file's name
    /// say the same format, also by its last 512 bytes, with a second read.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if no format matches, for a [`RejectedKind`], for a file that is not what
    /// its extension says, or if several magic numbers match: a guess could expose the wrong bytes, so
    /// the user must name the format. Errors of reading.
    pub fn probe(&self, storage: &dyn Storage) -> Result<Probed> {
        let probed = self.probe_content(storage)?;
        // An export's name says nothing about its content.
        if probed.fallback && self.protocol_of(Path::new(storage.name())).is_none() {
            self.reject_misnamed(storage.name())?;
        }
        Ok(probed)
    }

    /// As [`Registry::probe`], also for a file that is not what its extension says.
    ///
    /// # Errors
    /// As [`Registry::probe`].
    pub fn probe_content(&self, storage: &dyn Storage) -> Result<Probed> {
        // On the stack, whose pages are reused.
        let mut head = [0; HEAD_BYTES];
        let got = storage.read_up_to(&mut head, HostOffset(0))?;
        let head = &head[..got];
        let len = storage.len()?;
        self.probe_parts(storage.name(), head, len, || tail_of(storage, head, len))
    }

    /// [`Registry::probe`] for bytes in memory: the first ones, the last ones (empty if not yet
    /// known) and the total length. `name` is for messages.
    ///
    /// # Errors
    /// As [`Registry::probe`].
    pub fn probe_bytes(&self, name: &str, head: &[u8], tail: &[u8], len: u64) -> Result<Probed> {
        let probed = self.probe_parts(name, head, len, || Ok(tail.to_vec()))?;
        if probed.fallback {
            self.reject_misnamed(name)?;
        }
        Ok(probed)
    }

    fn judge(&self, head: &[u8], tail: &[u8], len: u64) -> Judged {
        let mut judged = Judged::default();
        for driver in self.drivers() {
            match driver.probe(head, tail, len) {
                Probe::Yes => judged.certain.push(driver),
                Probe::Fallback => judged.fallback = judged.fallback.or(Some(driver)),
                Probe::No => {}
            }
        }
        judged
    }

    fn probe_parts(
        &self,
        file: &str,
        head: &[u8],
        len: u64,
        tail: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Probed> {
        let mut judged = self.judge(head, &[], len);
        // The guest of a format that is known by the file's end (a fixed VHD) writes the file's start,
        // so it could choose another format, one that names a backing file. The start alone decides
        // only where the file's name says the same.
        let named = self.find_by_file_name(file).map(|driver| driver.name());
        if !judged.certain.iter().any(|driver| Some(driver.name()) == named) {
            judged = self.judge(head, &tail()?, len);
        }
        let Judged { certain, fallback } = judged;
        if certain.is_empty()
            && let Some(known) =
                self.rejected_kinds.iter().find(|known| (known.matches)(file, head))
        {
            return Err(Error::unsupported(file, known.what, known.remedy.clone()));
        }
        match certain.as_slice() {
            [driver] => Ok(Probed { driver: *driver, fallback: false }),
            [] => fallback.map(|driver| Probed { driver, fallback: true }).ok_or_else(|| {
                Error::unsupported(
                    file,
                    "its format is not recognized",
                    format!("name its format; known: {}", self.names()),
                )
            }),
            several => {
                let names: Vec<_> = several.iter().map(|driver| driver.name()).collect();
                Err(Error::unsupported(
                    file,
                    format!("it looks like {} at once", names.join(" and ")),
                    "name its format",
                ))
            }
        }
    }
}

impl Registry {
    /// Rejects a file whose extension is a format's name while its content is of no known format:
    /// more often a damaged or empty image than a raw disk.
    fn reject_misnamed(&self, file: &str) -> Result<()> {
        let Some(format) = self.format_in_name(file).filter(|_| !self.content_only) else {
            return Ok(());
        };
        let what = format!(
            "its name says that it is a {format} image, but its content is not: it is damaged, \
             empty, or something else"
        );
        Err(Error::unsupported(file, what, Remedy::CheckAs { format }))
    }

    /// The format whose own name is the extension of this file name, or its end (`avhdx`). Other
    /// extensions are used for raw disks too (`hdd`).
    pub fn format_in_name(&self, file: &str) -> Option<String> {
        let (_, extension) = stem_and_extension(file);
        let driver = self.find_by_file_name(file)?;
        let DriverInfo { name, aliases, .. } = driver.info();
        let extension = extension.to_ascii_lowercase();
        let mut names = aliases.iter().copied().chain([name]);
        let format = names.find(|name| extension.ends_with(*name))?;
        (driver.probe(&[], &[], 0) != Probe::Fallback).then(|| format.to_owned())
    }
}

fn stem_and_extension(name: &str) -> (&str, &str) {
    let path = Path::new(name);
    (
        path.file_stem().and_then(OsStr::to_str).unwrap_or_default(),
        path.extension().and_then(OsStr::to_str).unwrap_or_default(),
    )
}

/// Probe results of all drivers.
#[derive(Default)]
struct Judged {
    certain: Vec<&'static dyn FormatDriver>,
    fallback: Option<&'static dyn FormatDriver>,
}

/// The last bytes of an image whose head was read.
fn tail_of(storage: &dyn Storage, head: &[u8], len: u64) -> Result<Vec<u8>> {
    let start = len.saturating_sub(TAIL_BYTES);
    if len == head.len() as u64 {
        return Ok(head[start as usize..].to_vec());
    }
    let mut tail = vec![0; (len - start) as usize];
    let got = storage.read_up_to(&mut tail, HostOffset(start))?;
    tail.truncate(got);
    Ok(tail)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vdkit_block::{CheckReport, Format, ImageInfo, Limits, OfflineImage, OpenRequest, Repair};
    use vdkit_storage::MemoryStorage;

    use super::*;

    /// Matches images by their first byte.
    #[derive(Debug)]
    struct ByByte(&'static str, Option<u8>);

    fn unused<T>() -> Result<T> {
        Err(Error::invalid("not a part of this test"))
    }

    impl FormatDriver for ByByte {
        fn info(&self) -> DriverInfo {
            let extensions: &[_] = match self.0 {
                "a" => &["a"],
                "end" => &["end"],
                _ => &[],
            };
            DriverInfo { name: self.0, aliases: &[], extensions, description: "for tests" }
        }
        fn probe(&self, head: &[u8], tail: &[u8], _len: u64) -> Probe {
            match self.1 {
                // Matches by the tail alone.
                known if tail.last().copied() == known && known == Some(b'E') => Probe::Yes,
                None => Probe::Fallback,
                known if head.first().copied() == known => Probe::Yes,
                Some(_) => Probe::No,
            }
        }
        fn describe(&self, _: &Arc<dyn Storage>, _: &Limits) -> Result<ImageInfo> {
            unused()
        }
        fn open(&self, _: OpenRequest) -> Result<Arc<dyn Format>> {
            unused()
        }
        fn check(&self, _: &OfflineImage<'_>, _: Repair) -> Result<CheckReport> {
            unused()
        }
    }

    fn probe(drivers: &[&'static dyn FormatDriver], bytes: &[u8]) -> Result<(&'static str, bool)> {
        let registry = Registry::new(drivers.iter().copied());
        let probed = registry.probe(&MemoryStorage::from_bytes("image", bytes))?;
        Ok((probed.driver.name(), probed.fallback))
    }

    #[test]
    fn a_magic_number_wins_over_the_fallback_whatever_the_order() {
        static RAW: ByByte = ByByte("raw", None);
        static A: ByByte = ByByte("a", Some(1));
        static B: ByByte = ByByte("b", Some(2));
        assert_eq!(probe(&[&RAW, &A, &B], &[2, 0]).unwrap(), ("b", false));
        assert_eq!(probe(&[&A, &B, &RAW], &[1]).unwrap(), ("a", false));
        assert_eq!(probe(&[&A, &RAW], &[2]).unwrap(), ("raw", true));
        assert_eq!(probe(&[&A, &RAW], &[]).unwrap(), ("raw", true));
        let error = probe(&[&A, &B], &[3]).unwrap_err().to_string();
        assert!(error.contains("not recognized") && error.contains("a, b"), "{error}");
    }

    #[test]
    fn the_end_is_asked_where_the_head_says_nothing() {
        static RAW: ByByte = ByByte("raw", None);
        static A: ByByte = ByByte("a", Some(1));
        static END: ByByte = ByByte("end", Some(b'E'));
        let all: [&'static dyn FormatDriver; 3] = [&RAW, &END, &A];
        for len in [2, 511, 512, 65536, 65537, 100_000] {
            let mut bytes = vec![0; len];
            bytes[len - 1] = b'E';
            assert_eq!(probe(&all, &bytes).unwrap(), ("end", false), "{len}");
        }
        assert_eq!(probe(&all, &[0; 70_000]).unwrap(), ("raw", true));
    }

    /// The guest of a format that is known by the file's end writes the file's start.
    #[test]
    fn a_head_decides_alone_only_where_the_name_says_the_same() {
        static RAW: ByByte = ByByte("raw", None);
        static A: ByByte = ByByte("a", Some(1));
        static END: ByByte = ByByte("end", Some(b'E'));
        let registry = Registry::new([&RAW as &'static dyn FormatDriver, &END, &A]);
        for len in [2, 511, 512, 65536, 65537, 100_000] {
            let mut bytes = vec![0; len];
            bytes[0] = 1;
            let plain = MemoryStorage::from_bytes("disk.end", &bytes);
            assert_eq!(registry.probe(&plain).unwrap().driver.name(), "a", "{len}");
            bytes[len - 1] = b'E';
            for name in ["disk.end", "disk", "disk.img", "nbd://host/disk"] {
                let storage = MemoryStorage::from_bytes(name, &bytes);
                let error = registry.probe(&storage).unwrap_err().to_string();
                assert!(error.contains("end and a at once"), "{name} {len}: {error}");
            }
            // One read.
            let head = &bytes[..len.min(HEAD_BYTES)];
            let unread = || unreachable!("the end is read");
            let probed = registry.probe_parts("disk.a", head, len as u64, unread).unwrap();
            assert_eq!(probed.driver.name(), "a", "{len}");
        }
    }

    #[test]
    fn what_is_known_to_be_no_image_is_not_raw() {
        static RAW: ByByte = ByByte("raw", None);
        static A: ByByte = ByByte("a", Some(b't'));
        let tar = RejectedKind {
            matches: |name, head| name == "image" && head.starts_with(b"tar"),
            what: "is a tar file",
            remedy: "unpack it".into(),
        };
        let probe = |drivers: &[&'static dyn FormatDriver], bytes: &[u8]| {
            let registry = Registry::new(drivers.iter().copied()).rejecting([tar.clone()]);
            let by_bytes = registry.probe_bytes("image", bytes, bytes, bytes.len() as u64);
            let probed = registry.probe(&MemoryStorage::from_bytes("image", bytes));
            assert_eq!(by_bytes.is_ok(), probed.is_ok());
            probed.map(|probed| probed.driver.name())
        };
        let error = probe(&[&RAW], b"tar\0").unwrap_err().to_string();
        assert!(error.contains("is a tar file") && error.contains("unpack it"), "{error}");
        assert_eq!(probe(&[&RAW], b"ta").unwrap(), "raw");
        // A magic number takes precedence.
        assert_eq!(probe(&[&RAW, &A], b"tar\0").unwrap(), "a");
    }

    #[test]
    fn an_image_that_looks_like_two_formats_is_not_guessed() {
        static RAW: ByByte = ByByte("raw", None);
        static A: ByByte = ByByte("a", Some(1));
        static B: ByByte = ByByte("b", Some(1));
        let error = probe(&[&A, &RAW, &B], &[1]).unwrap_err().to_string();
        assert!(error.contains("a and b") && error.contains("name its format"), "{error}");
    }
}
