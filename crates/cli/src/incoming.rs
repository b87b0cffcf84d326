//! Sources that are more than names of files: standard input, URLs, packed files.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use vdkit::jobs::{Incoming, receive};
use vdkit::stream::{
    ByteStream, Checksum, Packing, Remote, Stdin, StorageReader, is_url, open_url,
};
use vdkit::{Disk, HostOffset, Monitor, OpenOptions, Registry};

use crate::failure::Failure;

/// The name of standard input and standard output.
pub const STANDARD: &str = "-";

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
}

impl Opening<'_> {
    /// Opens a source that the user named.
    pub fn open(&self, path: &Path, monitor: &Monitor<'_>) -> Result<Incoming, Failure> {
        match self.stream(path, monitor)? {
            Found::Disk(disk) => Ok(Incoming::Disk(disk)),
            Found::Stream(stream) => {
                let stream = match self.checksum {
                    Some(checksum) => stream.checked(checksum.clone()),
                    None => stream,
                };
                let stream = if self.as_it_is() { stream } else { stream.unpack()?.0 };
                Ok(receive(self.registry, stream, self.spool, self.options, monitor)?)
            }
        }
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
                return Ok(Found::Stream(ByteStream::new(STANDARD, input)));
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
        use vdkit::Storage;
        let mut head = vec![0; Packing::HEAD_BYTES];
        let got = storage.read_up_to(&mut head, HostOffset(0))?;
        let packed = !self.as_it_is() && Packing::of(&head[..got]).is_some();
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
        if !regular || (self.checksum.is_none() && (self.as_it_is() || !is_packed(path))) {
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
    Stream(ByteStream),
}

/// What cannot be read is said by whoever opens it.
fn is_packed(path: &Path) -> bool {
    let mut head = [0; Packing::HEAD_BYTES];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut head));
    read.is_ok() && Packing::of(&head).is_some()
}

/// Where streams are spooled: where TMPDIR says, else beside the target, else where large temporary
/// files go.
pub fn spool_folder(target: &Path) -> PathBuf {
    if let Some(folder) = std::env::var_os("TMPDIR").filter(|folder| !folder.is_empty()) {
        return folder.into();
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
