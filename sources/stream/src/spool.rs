//! Spools a stream to an unnamed file, for formats that need random access.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use vdkit_block::{Error, HostOffset, IoAction, Monitor, Result, Storage, is_zero};
use vdkit_storage::{FileOptions, FileStorage, LockMode};

use crate::unpack::ByteStream;

/// Bytes per read.
const STEP: usize = 1 << 20;
/// Aligned runs of zeroes of this size become holes.
const HOLE_BYTES: usize = 64 << 10;

/// Reads a stream to its end into an unnamed file in `folder`. The file disappears when the storage
/// is dropped or the process is killed.
///
/// # Errors
/// Errors of reading the stream and writing the file; [`Error::Interrupted`].
pub fn spool(
    mut stream: ByteStream,
    folder: &Path,
    monitor: &Monitor<'_>,
) -> Result<Arc<dyn Storage>> {
    let options = FileOptions::read_write().lock(LockMode::Off);
    let file = unnamed(folder)?;
    let storage = FileStorage::from_file(file, stream.name(), &options)?;
    let total = stream.known_len();
    let mut buf = vec![0; STEP];
    let mut at = 0u64;
    loop {
        monitor.cancel.check()?;
        let got = stream.read_full(&mut buf)?;
        put(&storage, &buf[..got], at)?;
        at += got as u64;
        monitor.progress.update(at, total.unwrap_or(at));
        if got < STEP {
            break;
        }
    }
    storage.set_len(at)?;
    Ok(Arc::new(storage))
}

fn put(storage: &FileStorage, bytes: &[u8], at: u64) -> Result<()> {
    for (index, piece) in bytes.chunks(HOLE_BYTES).enumerate() {
        if !is_zero(piece) {
            storage.write_at(piece, HostOffset(at + (index * HOLE_BYTES) as u64))?;
        }
    }
    Ok(())
}

/// A file without a name.
fn unnamed(folder: &Path) -> Result<File> {
    let fail = |errno: Errno| {
        let what =
            format!("no temporary file can be made there ({errno}); TMPDIR names another folder");
        let source = std::io::Error::new(errno.kind(), what);
        Error::file_io(&folder.display().to_string(), IoAction::Open, source)
    };
    let (flags, mode) = (OFlags::RDWR | OFlags::CLOEXEC, Mode::from_raw_mode(0o600));
    match rustix::fs::open(folder, flags | OFlags::TMPFILE, mode) {
        Ok(fd) => return Ok(File::from(fd)),
        // Some file systems (NFS, older FUSE) do not support unnamed files.
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
        Err(errno) => return Err(fail(errno)),
    }
    for number in 0..1000 {
        let path = folder.join(format!(".vdkit-{}-{number}.spool", std::process::id()));
        match rustix::fs::open(&path, flags | OFlags::CREATE | OFlags::EXCL, mode) {
            Ok(fd) => {
                rustix::fs::unlink(&path).map_err(fail)?;
                return Ok(File::from(fd));
            }
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(fail(errno)),
        }
    }
    Err(fail(Errno::EXIST))
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    #[test]
    fn a_spooled_stream_is_whole_sparse_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = vec![0; 5 << 20];
        bytes[3 << 20..(3 << 20) + 1000].fill(7);
        bytes.push(9);
        bytes.extend([0; 300_000]);
        let stream = ByteStream::new("s", Cursor::new(bytes.clone()));
        let storage = spool(stream, folder.path(), &Monitor::default()).unwrap();
        let mut read = vec![1; bytes.len()];
        storage.read_at(&mut read, HostOffset(0)).unwrap();
        assert!(read == bytes);
        assert_eq!(storage.len().unwrap(), bytes.len() as u64);
        assert!(storage.allocated_bytes().unwrap() < 1 << 20);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
