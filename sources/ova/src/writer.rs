//! Writing an OVA.
//!
//! ```text
//!   descriptor (maximum) │ manifest │ disk 1 │ disk 2 │ … │ two blocks of zeroes
//!   └── written last: contain disk sizes and hashes ┘
//! ```
//!
//! DSP0243 requires the descriptor to come first, so space for its maximum length is reserved; XML
//! may be padded with blanks. The manifest's length is known in advance.

use std::io::{self, Write};
use std::sync::Arc;

use parking_lot::Mutex;
use vdkit_block::{Error, HostOffset, Result, Storage};
use vdkit_stream::Hasher;

use crate::descriptor::twice;
use crate::machine::{DescribedDisk, Machine, descriptor};
use crate::manifest;
use crate::tar::{BLOCK, header};

/// The length of a tar file is a multiple of this.
const RECORD: u64 = 20 * BLOCK;
/// Maximum bytes of a name in a plain tar header.
const NAME_BYTES_MAX: usize = 99;

/// A disk of a new appliance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDisk {
    /// Its file's name in the archive.
    pub file: String,
    /// Bytes of the disk.
    pub capacity: u64,
}

/// A written disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenDisk {
    /// Its file's name in the archive.
    pub file: String,
    /// Bytes of that file.
    pub file_bytes: u64,
    /// The file's hash.
    pub digest: Vec<u8>,
}

#[derive(Debug)]
struct SinkState {
    at: u64,
    len: u64,
    hasher: Hasher,
}

/// Writes a disk's file in order, and hashes it.
#[derive(Clone, Debug)]
pub struct DiskSink {
    storage: Arc<dyn Storage>,
    state: Arc<Mutex<SinkState>>,
}

impl Write for DiskSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.state.lock();
        self.storage.write_at(bytes, HostOffset(state.at)).map_err(as_io)?;
        state.hasher.update(bytes);
        state.at += bytes.len() as u64;
        state.len += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps the system's error, if any, so that "no space" is distinguishable from other errors.
fn as_io(error: Error) -> io::Error {
    match error {
        Error::Io { source, .. } => source,
        Error::NoSpace { .. } => io::Error::new(io::ErrorKind::StorageFull, error),
        _ => io::Error::other(error),
    }
}

/// Writes an appliance to an empty storage.
#[derive(Debug)]
pub struct PackageWriter {
    storage: Arc<dyn Storage>,
    machine: Machine,
    disks: Vec<NewDisk>,
    written: Vec<(WrittenDisk, u64)>,
    /// Base name of the descriptor and the manifest.
    stem: String,
    modified: u64,
    /// Reserved bytes for the descriptor.
    descriptor_bytes: u64,
    /// Offset of the next file's header.
    at: u64,
}

impl PackageWriter {
    /// An appliance of these disks, in this order. `stem` is the base name of its descriptor,
    /// `modified` the time of its files in seconds since 1970.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid or duplicate names, and for too many disks.
    pub fn new(
        storage: Arc<dyn Storage>,
        machine: Machine,
        disks: Vec<NewDisk>,
        stem: &str,
        modified: u64,
    ) -> Result<Self> {
        machine.check_disks(disks.len())?;
        let names = [format!("{stem}.ovf"), format!("{stem}.mf")];
        let all = || names.iter().map(String::as_str).chain(disks.iter().map(|d| d.file.as_str()));
        let bad = |name: &&str| {
            name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains(['/', '\0', '\n', '\\'])
        };
        if let Some(name) = all().find(bad) {
            return Err(Error::invalid(format!(
                "'{name}' cannot be the name of a file in an appliance: it has 1 to \
                 {NAME_BYTES_MAX} bytes and no separators"
            )));
        }
        if let Some(name) = twice(all()) {
            return Err(Error::invalid(format!("an appliance with two files called '{name}'")));
        }
        let (file_bytes, capacity, populated) = (u64::MAX, u64::MAX, u64::MAX);
        let longest = disks.iter().map(|disk| DescribedDisk {
            file: &disk.file,
            file_bytes,
            capacity,
            populated,
        });
        let longest: Vec<_> = longest.collect();
        let descriptor_bytes = descriptor(&machine, &longest).len() as u64;
        let digest = vec![0; machine.hash.digest_bytes()];
        let line = |name: &str| manifest::line(name, machine.hash, &digest).len() as u64;
        let manifest_bytes: u64 = all().filter(|name| *name != names[1]).map(line).sum();
        let padded = |bytes: u64| BLOCK + bytes.next_multiple_of(BLOCK);
        let at = padded(descriptor_bytes) + padded(manifest_bytes);
        let (stem, written) = (stem.to_owned(), Vec::new());
        Ok(Self { storage, machine, disks, written, stem, modified, descriptor_bytes, at })
    }

    /// The sink of the next disk's file; `None` after the last.
    pub fn next_sink(&self) -> Option<DiskSink> {
        self.disks.get(self.written.len())?;
        let state =
            SinkState { at: self.at + BLOCK, len: 0, hasher: Hasher::new(self.machine.hash) };
        Some(DiskSink { storage: self.storage.clone(), state: Arc::new(Mutex::new(state)) })
    }

    /// Ends the file of this sink; `populated` is the number of bytes of the disk with data.
    ///
    /// # Errors
    /// Errors of writing.
    pub fn end_disk(&mut self, sink: &DiskSink, populated: u64) -> Result<()> {
        let Some(disk) = self.disks.get(self.written.len()) else {
            return Err(Error::invalid("more disks than the appliance has"));
        };
        let (file_bytes, digest) = {
            let state = sink.state.lock();
            (state.len, state.hasher.clone().finish())
        };
        let header = header(&disk.file, file_bytes, self.modified);
        self.storage.write_at(&header, HostOffset(self.at))?;
        self.at = (self.at + BLOCK + file_bytes).next_multiple_of(BLOCK);
        let file = disk.file.clone();
        self.written.push((WrittenDisk { file, file_bytes, digest }, populated));
        Ok(())
    }

    /// Writes the descriptor, the manifest and the end; returns the written disks.
    ///
    /// # Errors
    /// Errors of writing.
    pub fn finish(self) -> Result<Vec<WrittenDisk>> {
        let disks = self.disks.iter().zip(&self.written);
        let described = disks.map(|(disk, (written, populated))| DescribedDisk {
            file: &disk.file,
            file_bytes: written.file_bytes,
            capacity: disk.capacity,
            populated: *populated,
        });
        let described: Vec<_> = described.collect();
        let mut text = descriptor(&self.machine, &described).into_bytes();
        text.pop();
        text.resize((self.descriptor_bytes - 1) as usize, b' ');
        text.push(b'\n');
        let ovf = format!("{}.ovf", self.stem);
        let mut hasher = Hasher::new(self.machine.hash);
        hasher.update(&text);
        let mut lines = manifest::line(&ovf, self.machine.hash, &hasher.finish());
        for (disk, _) in &self.written {
            lines.push_str(&manifest::line(&disk.file, self.machine.hash, &disk.digest));
        }
        let mut head = header(&ovf, text.len() as u64, self.modified).to_vec();
        head.extend(text);
        pad(&mut head);
        let name = format!("{}.mf", self.stem);
        head.extend(header(&name, lines.len() as u64, self.modified));
        head.extend(lines.as_bytes());
        pad(&mut head);
        // The end first: a file with a head is then complete.
        self.storage.set_len((self.at + 2 * BLOCK).next_multiple_of(RECORD))?;
        self.storage.write_at(&head, HostOffset(0))?;
        Ok(self.written.into_iter().map(|(disk, _)| disk).collect())
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(BLOCK as usize), 0);
}
