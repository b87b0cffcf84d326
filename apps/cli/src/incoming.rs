//! Sources that are more than names of files: standard input, URLs, packed files.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vdkit::jobs::{Incoming, receive};
use vdkit::ova::{Package, PackageLimits};
use vdkit::storage::{FileOptions, FileStorage, LockMode};
use vdkit::stream::{
    ByteStream, Checksum, Packing, Remote, Stdin, StorageReader, is_url, open_url, spool,
};
use vdkit::{Disk, HostOffset, Monitor, OpenOptions, Registry, Storage};

use crate::failure::Failure;

/// The name of standard input and standard output.
pub const STANDARD: &str = "-";

/// The format that users name an appliance by.
pub const OVA: &str = "ova";
/// Bytes that tell an appliance, and other things.
const HEAD_BYTES: usize = 64 << 10;
/// Bytes that tell that it cannot be one.
const SECTOR: usize = 512;

/// How sources are opened.
#[derive(Debug)]
pub struct Opening<'a> {
    /// The formats.
    pub registry: &'a Registry,
    /// As for files.
    pub options: &'a OpenOptions,
    /// What the bytes of the source must have.
    pub checksum: Option<&'a Checksum>,
    /// Where streams are spooled.
    pub spool: &'a Path,
    /// A source without a single byte is a disk of no bytes, and no mistake.
    pub allow_empty: bool,
}

impl Opening<'_> {
    /// Opens a source that the user named.
    pub fn open(&self, path: &Path, monitor: &Monitor<'_>) -> Result<Opened, Failure> {
        match self.stream(path, monitor)? {
            Found::Disk(disk) => {
                if disk.guest_bytes() == 0 && disk.top().name() == "raw" {
                    self.refuse_empty(path)?;
                }
                Ok(Opened::Image(Incoming::Disk(disk)))
            }
            Found::Package(storage) => self.package(storage),
            Found::Stream(stream) => {
                let stream = match self.checksum {
                    Some(checksum) => stream.checked(checksum.clone()),
                    None => stream,
                };
                let mut stream = if self.as_it_is() { stream } else { stream.unpack()?.0 };
                let head = stream.peek(HEAD_BYTES)?;
                if head.is_empty() {
                    self.refuse_empty(path)?;
                }
                if self.is_package(path, &head) {
                    // Its disks are read here and there.
                    return self.package(spool(stream, self.spool, monitor)?);
                }
                let incoming = receive(self.registry, stream, self.spool, self.options, monitor)?;
                Ok(Opened::Image(incoming))
            }
        }
    }

    /// A command that failed and should have sent a disk sends nothing.
    fn refuse_empty(&self, path: &Path) -> Result<(), Failure> {
        if self.allow_empty {
            return Ok(());
        }
        let name = match path == Path::new(STANDARD) {
            true => "standard input".to_owned(),
            false => path.display().to_string(),
        };
        Err(Failure::failed(format!("{name}: is empty: there is no disk in it"))
            .hint("if a disk of no bytes is wanted, say so with --allow-empty"))
    }

    fn package(&self, storage: Arc<dyn Storage>) -> Result<Opened, Failure> {
        let package = Package::open(storage, &PackageLimits::default())?;
        Ok(Opened::Package(Box::new(package)))
    }

    /// Whether a file that begins like this is an appliance, or is said to be one.
    fn is_package(&self, path: &Path, head: &[u8]) -> bool {
        is_package(self.options.format.as_deref(), path, head)
    }

    /// Raw bytes are the guest's, whatever they look like.
    fn as_it_is(&self) -> bool {
        self.options.format.as_deref() == Some("raw")
    }

    fn stream(&self, path: &Path, monitor: &Monitor<'_>) -> Result<Found, Failure> {
        if let Some(url) = path.to_str().filter(|name| is_url(name)) {
            return self.remote(url, monitor);
        }
        if path == Path::new(STANDARD) {
            let name = Path::new("/dev/stdin");
            // A file that the shell opened is a file.
            if !name.metadata().is_ok_and(|found| found.is_file()) {
                let input = Stdin::open(monitor.cancel.clone());
                let input = input.map_err(|error| {
                    Failure::failed(format!("standard input cannot be read: {error}"))
                })?;
                return Ok(Found::Stream(ByteStream::new("standard input", input)));
            }
            return self.file(name, monitor);
        }
        self.file(path, monitor)
    }

    fn remote(&self, url: &str, monitor: &Monitor<'_>) -> Result<Found, Failure> {
        let storage = match open_url(url, &monitor.cancel)? {
            Remote::Whole(stream) => return Ok(Found::Stream(stream)),
            Remote::Ranges(storage) => storage,
        };
        let mut head = vec![0; HEAD_BYTES];
        let got = storage.read_up_to(&mut head, HostOffset(0))?;
        head.truncate(got);
        let packed = !self.as_it_is() && Packing::of(&head).is_some();
        if self.checksum.is_none() && self.is_package(Path::new(url), &head) {
            return Ok(Found::Package(storage));
        }
        if self.checksum.is_none() && !packed {
            return Ok(Found::Disk(Box::new(Disk::open_storage(
                self.registry,
                storage,
                self.options,
            )?)));
        }
        let len = storage.len()?;
        Ok(Found::Stream(ByteStream::new(url, StorageReader::new(storage)).with_len(len)))
    }

    fn file(&self, path: &Path, monitor: &Monitor<'_>) -> Result<Found, Failure> {
        let kind = path.metadata().map(|found| (found.is_file(), found.file_type().is_fifo()));
        let (regular, pipe) = kind.unwrap_or((false, false));
        let name = path.display().to_string();
        let open = || {
            File::open(path)
                .map_err(|error| Failure::failed(format!("{name}: cannot open: {error}")))
        };
        if pipe {
            let input = Stdin::from_file(open()?, monitor.cancel.clone());
            return Ok(Found::Stream(ByteStream::new(name, input)));
        }
        let head = if regular { head_of(path) } else { Vec::new() };
        let packed = Packing::of(&head).is_some();
        if regular && self.checksum.is_none() && self.is_package(path, &head) {
            let lock = if self.options.lock { LockMode::Auto } else { LockMode::Off };
            let options = FileOptions::read_only().cache(self.options.cache).lock(lock);
            return Ok(Found::Package(Arc::new(FileStorage::open(path, &options)?)));
        }
        if !regular || (self.checksum.is_none() && (self.as_it_is() || !packed)) {
            return Ok(Found::Disk(Box::new(Disk::open(self.registry, path, self.options)?)));
        }
        let file = open()?;
        let len = file.metadata().map(|found| found.len()).unwrap_or(0);
        let input = Stdin::from_file(file, monitor.cancel.clone());
        Ok(Found::Stream(ByteStream::new(name, input).with_len(len)))
    }
}

enum Found {
    Disk(Box<Disk>),
    Package(Arc<dyn Storage>),
    Stream(ByteStream),
}

/// A source that was looked at.
#[derive(Debug)]
pub enum Opened {
    /// One disk.
    Image(Incoming),
    /// An appliance.
    Package(Box<Package>),
}

/// Whether a file that begins like this is an appliance: its first member is a descriptor, its name
/// promises one, or the user says so.
pub fn is_package(format: Option<&str>, path: &Path, head: &[u8]) -> bool {
    match format {
        Some(format) => format == OVA,
        None => Package::looks_like(&path.to_string_lossy(), head),
    }
}

/// Whether a name ends as those of appliances do.
pub fn names_package(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case(OVA))
}

/// The first bytes of a file: a sector, and more where it is that of a tar file. What cannot be read is
/// said by whoever opens it.
pub fn head_of(path: &Path) -> Vec<u8> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let mut head = vec![0; SECTOR];
        let got = file.read(&mut head)?;
        head.truncate(got);
        if Package::is_header(&head) {
            file.take((HEAD_BYTES - SECTOR) as u64).read_to_end(&mut head)?;
        }
        Ok(head)
    };
    read().unwrap_or_default()
}

/// Where streams are spooled: where TMPDIR says, else beside the target, else where large temporary
/// files go.
pub fn spool_folder(target: &Path) -> PathBuf {
    if let Some(folder) = std::env::var_os("TMPDIR").filter(|folder| !folder.is_empty()) {
        return folder.into();
    }
    if target.is_dir() {
        return target.to_owned();
    }
    let beside = match target.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => Path::new("/var/tmp"),
    };
    let file = target != Path::new(STANDARD)
        && target.as_os_str() != "null:"
        && !target.metadata().is_ok_and(|found| !found.is_file());
    if file { beside.to_owned() } else { PathBuf::from("/var/tmp") }
}
