//! Memory that a program finds at hand.

use std::fs::{self, File};
use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::MemfdFlags;

/// Linux gives free pages back this long after they became free (mm/page_reporting.c), with some to spare.
const REPORTING_DELAY: Duration = Duration::from_millis(2500);

/// Lets the next program find so many bytes of free memory, at most a quarter of all, that the machine really has.
///
/// A guest's kernel tells its host which pages are free, and the host takes them (free page reporting). Whoever
/// writes to one then waits until the host has found another: 3 to 10 µs a page here, where it is 0.3
/// otherwise. Which program meets that is chance, and what it costs is more than most of what is measured. So
/// such an amount is written to and given free just before a program starts, when the kernel has told
/// everything that was free before. Where there is no host, memory is always at hand, and nothing is done.
///
/// # Errors
/// Where that memory cannot be had.
pub fn put_at_hand(bytes: u64) -> Result<()> {
    if !taken_back() {
        return Ok(());
    }
    // No memory of this process's own: the kernel would count it to its children's peak.
    let memory =
        rustix::fs::memfd_create("at-hand", MemfdFlags::CLOEXEC).context("memfd_create")?;
    fill(File::from(memory), bytes.min(total()? / 4))
}

fn fill(mut memory: File, bytes: u64) -> Result<()> {
    let piece = vec![1; 1 << 20];
    for _ in 0..bytes.div_ceil(piece.len() as u64) {
        memory.write_all(&piece).context("cannot fill memory")?;
    }
    std::thread::sleep(REPORTING_DELAY);
    Ok(())
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
