//! Sources that are not plain disk images: standard input, URLs, compressed files, appliances.

use std::fs::{File, FileType, Metadata};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
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
/// Standard input in messages.
pub const STANDARD_INPUT: &str = "standard input";

/// The format name of appliances on the command line.
pub const OVA: &str = "ova";
/// Bytes read to recognize an appliance and other formats.
const HEAD_BYTES: usize = 64 << 10;
/// Bytes that suffice to rule out an appliance.
const SECTOR: usize = 512;

#[derive(Debug)]
pub struct Opening<'a> {
    /// The known formats.
    pub registry: &'a Registry,
    pub options: &'a OpenOptions,
    /// The checksum that the source's file or stream must have.
    pub checksum: Option<&'a Checksum>,
    /// The folder into which streams are spooled.
    pub spool: &'a Path,
    /// Whether an empty source is accepted as a disk of zero bytes.
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
                if disk.top().name() == "raw" {
                    warn_cut(path, monitor);
                }
                disk.warnings().for_each(|warning| monitor.progress.message(warning));
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
                    // An appliance is read at random offsets, so a stream is spooled first.
                    return self.package(spool(stream, self.spool, monitor)?);
                }
                let incoming = receive(self.registry, stream, self.spool, self.options, monitor)?;
                if let Incoming::Disk(disk) = &incoming {
                    disk.warnings().for_each(|warning| monitor.progress.message(warning));
                }
                Ok(Opened::Image(incoming))
            }
        }
    }

    /// Refuses an empty source: a command that should have sent a disk has probably failed.
    fn refuse_empty(&self, path: &Path) -> Result<(), Failure> {
        if self.allow_empty {
            return Ok(());
        }
        let name = match path == Path::new(STANDARD) {
            true => STANDARD_INPUT.to_owned(),
            false => path.display().to_string(),
        };
        Err(Failure::failed(format!("{name}: is empty: there is no disk in it"))
            .hint("if a disk of no bytes is wanted, say so with --allow-empty"))
    }

    fn package(&self, storage: Arc<dyn Storage>) -> Result<Opened, Failure> {
        let package = Package::open(storage, &PackageLimits::default())?;
        Ok(Opened::Package(Box::new(package)))
    }

    /// Whether a file that begins like this is an appliance, or the user says so.
    fn is_package(&self, path: &Path, head: &[u8]) -> bool {
        is_package(self.options.format.as_deref(), path, head)
    }

    /// Whether the source is read as raw, without recognizing its format.
    fn as_it_is(&self) -> bool {
        self.options.format.as_deref() == Some("raw")
    }

    fn stream(&self, path: &Path, monitor: &Monitor<'_>) -> Result<Found, Failure> {
        if let Some(url) = path.to_str().filter(|name| is_url(name)) {
            return self.remote(url, monitor);
        }
        if self.checksum.is_some() && self.registry.protocol_of(path).is_some() {
            let text = "--checksum is for files and streams, not for NBD exports";
            return Err(Failure::usage(text));
        }
        if path == Path::new(STANDARD) {
            let name = Path::new("/dev/stdin");
            // If the shell redirected stdin from a regular file, use that file.
            if !name.metadata().is_ok_and(|found| found.is_file()) {
                let input = Stdin::open(monitor.cancel.clone());
                let input = input.map_err(|error| {
                    Failure::failed(format!("standard input cannot be read: {error}"))
                })?;
                return Ok(Found::Stream(ByteStream::new(STANDARD_INPUT, input)));
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
                &self.options.clone().writable(false),
            )?)));
        }
        let len = storage.len()?;
        Ok(Found::Stream(ByteStream::new(url, StorageReader::new(storage)).with_len(len)))
    }

    fn file(&self, path: &Path, monitor: &Monitor<'_>) -> Result<Found, Failure> {
        let kind = path.metadata().map(|found| found.file_type());
        let is = |test: fn(&FileType) -> bool| kind.as_ref().is_ok_and(test);
        let (regular, device) = (is(FileType::is_file), is(FileType::is_block_device));
        let name = path.display().to_string();
        let open = || {
            File::open(path)
                .map_err(|error| Failure::failed(format!("{name}: cannot open: {error}")))
        };
        if is(FileType::is_fifo) {
            // Opening would wait for a writer, whatever signal comes. Reading waits for both.
            let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let input = rustix::fs::open(path, flags, Mode::empty()).and_then(|input| {
                flags.remove(OFlags::NONBLOCK);
                rustix::fs::fcntl_setfl(&input, flags).map(|()| File::from(input))
            });
            let input = input.map_err(|error| {
                Failure::failed(format!("{name}: cannot open: {}", std::io::Error::from(error)))
            })?;
            let input = Stdin::from_file(input, monitor.cancel.clone());
            return Ok(Found::Stream(ByteStream::new(name, input)));
        }
        let head = if regular { head_of(path) } else { Vec::new() };
        let packed = Packing::of(&head).is_some();
        if regular && self.checksum.is_none() && self.is_package(path, &head) {
            let lock = if self.options.lock { LockMode::Auto } else { LockMode::Off };
            let options = FileOptions::read_only().cache(self.options.cache).lock(lock);
            return Ok(Found::Package(Arc::new(FileStorage::open(path, &options)?)));
        }
        let streamed = regular && packed && !self.as_it_is();
        if !streamed && (self.checksum.is_none() || !(regular || device)) {
            return Ok(Found::Disk(Box::new(Disk::open(self.registry, path, self.options)?)));
        }
        let mut file = open()?;
        let len = file
            .seek(SeekFrom::End(0))
            .and_then(|len| file.rewind().map(|()| len))
            .map_err(|error| Failure::failed(format!("{name}: cannot read: {error}")))?;
        let input = Stdin::from_file(file, monitor.cancel.clone());
        Ok(Found::Stream(ByteStream::new(name, input).with_len(len)))
    }
}

/// Reports a raw disk whose file ends within a sector: it may have been cut, or be no disk.
fn warn_cut(path: &Path, monitor: &Monitor<'_>) {
    let Some(found) = path.metadata().ok().filter(Metadata::is_file) else { return };
    if !found.len().is_multiple_of(SECTOR as u64) {
        monitor.progress.message(&format!(
            "{}: ends within a sector, after {} bytes: is it a disk, and complete? The last sector is filled \
             up with zeroes",
            path.display(),
            found.len()
        ));
    }
}

enum Found {
    Disk(Box<Disk>),
    Package(Arc<dyn Storage>),
    Stream(ByteStream),
}

/// A source after its format was recognized.
#[derive(Debug)]
pub enum Opened {
    Image(Incoming),
    Package(Box<Package>),
}

/// Whether a file is an appliance: its first member is a descriptor, its name ends like one, or the
/// user says so.
pub fn is_package(format: Option<&str>, path: &Path, head: &[u8]) -> bool {
    match format {
        Some(format) => format == OVA,
        None => Package::looks_like(&path.to_string_lossy(), head),
    }
}

/// Whether a name ends like an appliance's.
pub fn names_package(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case(OVA))
}

/// Reads the first bytes of a file: one sector, and more if it is a tar header. Errors are ignored,
/// because opening the file reports them.
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

/// The folder into which streams are spooled: TMPDIR, else the target's folder, else the system's
/// folder for large temporary files.
pub fn spool_folder(target: &Path) -> PathBuf {
    if let Some(folder) = std::env::var_os("TMPDIR").filter(|folder| !folder.is_empty()) {
        return folder.into();
    }
    if crate::commands::is_export(target) {
        return PathBuf::from("/var/tmp");
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
