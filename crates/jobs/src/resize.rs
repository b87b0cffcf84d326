//! Another size for a disk.

use vdkit_block::{Error, Fill, GuestOffset, Monitor, Place, Result, ZeroMode};
use vdkit_chain::Disk;

/// What space the new part of a disk gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// None: it is found when the guest writes.
    #[default]
    Off,
    /// The map is made; the file system has not promised the space yet.
    Metadata,
    /// The file system has promised it.
    Falloc,
    /// Zeroes are written. (In an encrypted image, each of the others but none means this too.)
    Full,
}

/// How a disk is resized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResizeOptions {
    /// It may become smaller.
    pub shrink: bool,
    /// Space for the new part.
    pub preallocation: Preallocation,
}

/// Bytes between two looks at the cancel token.
const STEP: u64 = 8 << 20;
/// Bytes of one write of zeroes.
const WRITE_STEP: usize = 1 << 20;

/// Changes the size of a disk that is open for writing. The new size is durable afterwards.
///
/// Where preallocation fails or is cancelled the disk has its old size again, unless the disk was
/// meant to become smaller: that is done first, and for good.
///
/// # Errors
/// [`Error::Invalid`] for a smaller size without [`ResizeOptions::shrink`], or preallocation
/// without a larger one; what the format and its storages return; [`Error::Interrupted`].
pub fn resize(
    disk: &Disk,
    guest_bytes: u64,
    options: &ResizeOptions,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let before = disk.guest_bytes();
    if guest_bytes < before && !options.shrink {
        return Err(Error::Invalid(format!(
            "{}: {guest_bytes} bytes are fewer than the {before} it has; what lies beyond would \
             be lost",
            disk.name()
        )));
    }
    if guest_bytes <= before && options.preallocation != Preallocation::Off {
        return Err(Error::Invalid(format!(
            "{}: only a disk that grows has a new part to preallocate",
            disk.name()
        )));
    }
    disk.resize_watched(guest_bytes, monitor)?;
    // A format may round the size up to its sectors.
    let after = disk.guest_bytes();
    let mut allocated = Ok(());
    // Where new space does not read as zero, it has been written already.
    if options.preallocation != Preallocation::Off && disk.top().new_reads_zero() {
        allocated = preallocate(disk, before, after, options.preallocation, monitor);
        if allocated.is_err() {
            disk.resize(before)?;
        }
    }
    disk.flush()?;
    allocated
}

fn preallocate(
    disk: &Disk,
    from: u64,
    to: u64,
    how: Preallocation,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let mut at = from;
    while at < to {
        monitor.cancel.check()?;
        monitor.progress.update(at - from, to - from);
        at += preallocate_some(disk, GuestOffset(at), STEP.min(to - at), how)?;
    }
    monitor.progress.update(to - from, to - from);
    Ok(())
}

/// Gives the bytes from `at` their space; returns for how many it is done.
fn preallocate_some(disk: &Disk, at: GuestOffset, len: u64, how: Preallocation) -> Result<u64> {
    let format = disk.top();
    if format.encryption().is_some() {
        // Space that nobody has written reads as noise in an encrypted image.
        disk.write_at(&vec![0; len as usize], at)?;
        return Ok(len);
    }
    let Some(space) = format.reserve(at, len)? else {
        let _guard = disk.enter();
        // It has its place already (raw, or a preallocated cluster).
        let extent = format.resolve_for_io(at, len)?;
        if let Place::Data { file, offset, .. } = extent.place {
            let storage = format.file(file);
            match how {
                Preallocation::Off | Preallocation::Metadata => {}
                Preallocation::Falloc => storage.allocate(offset, extent.len)?,
                Preallocation::Full => write_zeroes(&**storage, offset, extent.len)?,
            }
        }
        return Ok(extent.len);
    };
    if space.head == Fill::Copy || space.tail == Fill::Copy {
        // A cluster that begins before the new part: the ordinary write path knows how.
        let end = space.write.end;
        drop(space);
        disk.write_at(&vec![0; (end - at.0) as usize], at)?;
        return Ok(end - at.0);
    }
    let (start, end) = (space.guest.start, space.guest.end);
    let (host, done) = (space.host, space.write.end - at.0);
    let storage = format.file(space.file);
    if how == Preallocation::Full {
        write_zeroes(&**storage, host, end - start)?;
    } else {
        // What was there before must not shine through.
        storage.write_zeroes(host, end - start, ZeroMode::MayUnmap)?;
        if how == Preallocation::Falloc {
            storage.allocate(host, end - start)?;
        }
    }
    space.publish()?;
    Ok(done)
}

fn write_zeroes(
    storage: &dyn vdkit_block::Storage,
    mut at: vdkit_block::HostOffset,
    mut len: u64,
) -> Result<()> {
    let zeroes = vec![0; WRITE_STEP.min(len as usize)];
    while len > 0 {
        let step = (WRITE_STEP as u64).min(len);
        storage.write_at(&zeroes[..step as usize], at)?;
        at += step;
        len -= step;
    }
    Ok(())
}
