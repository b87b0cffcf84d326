//! Memory that a program finds at hand, and files that it finds in the page cache.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

const PIECE_BYTES: usize = 256 << 10;

/// Linux gives free pages back this long after they became free (mm/page_reporting.c), with some to spare.
const REPORTING_DELAY: Duration = Duration::from_millis(2500);

/// Memory that is in use until this is dropped: from then on the next program finds it at hand.
#[derive(Debug)]
pub struct Held {
    _memory: Option<File>,
}

/// Takes so many bytes of memory, at most a quarter of all, which the machine then really has.
///
/// A guest's kernel tells its host which pages are free, and the host takes them (free page reporting). Whoever
/// writes to one then waits until the host has found another: 3 to 10 µs a page here, where it is 0.3
/// otherwise. Which program meets that is chance, and what it costs is more than most of what is measured. So
/// such an amount is written to and given free just before a program starts, when the kernel has told
/// everything that was free before. Where there is no host, memory is always at hand, and nothing is done.
///
/// # Errors
/// If that memory cannot be had.
pub fn hold(bytes: u64) -> Result<Held> {
    if bytes == 0 || !taken_back() {
        return Ok(Held { _memory: None });
    }
    // No memory of this process's own: the kernel would count it to its children's peak.
    let memory =
        rustix::fs::memfd_create("at-hand", MemfdFlags::CLOEXEC).context("memfd_create")?;
    let mut memory = File::from(memory);
    fill(&mut memory, bytes.min(total()? / 4))?;
    std::thread::sleep(REPORTING_DELAY);
    Ok(Held { _memory: Some(memory) })
}

fn fill(memory: &mut File, bytes: u64) -> Result<()> {
    let piece = vec![1; PIECE_BYTES];
    for _ in 0..bytes.div_ceil(piece.len() as u64) {
        memory.write_all(&piece).context("cannot fill memory")?;
    }
    Ok(())
}

/// Brings a file's data into the page cache, and tells the kernel that they are in use: pages that no process
/// touched for some seconds may have been dropped, however much memory is free, where the kernel reclaims
/// ahead (DAMON). Holes are not read. Returns how many bytes were read.
///
/// # Errors
/// If the file cannot be read.
pub fn warm(path: &Path) -> Result<u64> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let mut piece = vec![0; PIECE_BYTES];
    let (mut offset, mut read) = (0, 0);
    loop {
        offset = match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(offset)) {
            Ok(data) => data,
            Err(Errno::NXIO) => return Ok(read),
            Err(error) => return Err(error).context("lseek"),
        };
        let end = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(offset)).context("lseek")?;
        while offset < end {
            let wanted = piece.len().min(usize::try_from(end - offset)?);
            let got = file.read_at(&mut piece[..wanted], offset).context("cannot read")?;
            if got == 0 {
                return Ok(read);
            }
            offset += got as u64;
            read += got as u64;
        }
    }
}

/// Whether a host may take free memory back from this machine.
fn taken_back() -> bool {
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let guest = processor.lines().any(|line| {
        line.starts_with("flags") && line.split_whitespace().any(|flag| flag == "hypervisor")
    });
    guest && fs::exists("/sys/module/page_reporting").unwrap_or(false)
}

/// All memory, in bytes.
fn total() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let kib = crate::machine::field(&text, "MemTotal")
        .and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
    Ok(kib.context("/proc/meminfo has no MemTotal")? << 10)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn data_are_read_and_holes_are_not() {
        let file = File::from(rustix::fs::memfd_create("in", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(&[1; 5000], 0).unwrap();
        file.write_all_at(&[1; 4097], 64 << 20).unwrap();
        file.set_len(128 << 20).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let read = warm(Path::new(&path)).unwrap();
        assert!((5000 + 4097..1 << 20).contains(&read), "{read}");
        assert!(warm(Path::new("/nowhere")).unwrap_err().to_string().contains("/nowhere"));
    }

    #[test]
    fn nothing_is_held_where_nothing_is_wanted() {
        assert!(hold(0).unwrap()._memory.is_none());
    }
}
