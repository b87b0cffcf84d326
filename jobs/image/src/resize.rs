//! Resizing a disk.

use vdkit_block::{Error, Fill, GuestOffset, Monitor, Place, Result, ZeroMode};
use vdkit_chain::{Disk, NewPart};

/// Allocation of the new part of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// None: allocated on write.
    #[default]
    Off,
    /// The map is allocated, the data is not.
    Metadata,
    /// Allocated by the file system.
    Falloc,
    /// Zeroes are written. (In an encrypted image, the other modes except `Off` do this too.)
    Full,
}

/// A size of a disk, or a change of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeChange {
    /// This size.
    To(u64),
    /// So many bytes more.
    By(u64),
    /// So many bytes less.
    Less(u64),
}

impl SizeChange {
    /// Reads `40G`, `+10G` or `-5G`; `size` reads what follows the sign.
    ///
    /// # Errors
    /// Those of `size`.
    pub fn parse<E>(
        text: &str,
        size: impl Fn(&str) -> std::result::Result<u64, E>,
    ) -> std::result::Result<Self, E> {
        match (text.strip_prefix('+'), text.strip_prefix('-')) {
            (Some(more), _) => size(more).map(Self::By),
            (_, Some(less)) => size(less).map(Self::Less),
            _ => size(text).map(Self::To),
        }
    }

    /// The resulting size of a disk of `old` bytes; `None` below zero and beyond all numbers.
    pub fn applied_to(self, old: u64) -> Option<u64> {
        match self {
            Self::To(bytes) => Some(bytes),
            Self::By(bytes) => old.checked_add(bytes),
            Self::Less(bytes) => old.checked_sub(bytes),
        }
    }
}

/// Options of a resize.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ResizeOptions {
    /// Allow shrinking.
    pub shrink: bool,
    /// Allocation of the new part.
    pub preallocation: Preallocation,
}

/// Bytes between two checks of the cancel token.
const STEP: u64 = 8 << 20;
/// Bytes per write of zeroes.
const WRITE_STEP: usize = 1 << 20;

/// Resizes a disk that is open for writing. The new size is durable on return.
///
/// If preallocation fails or is cancelled, the old size is restored. Shrinking cannot be undone.
///
/// # Errors
/// [`Error::Invalid`] for a smaller size without [`ResizeOptions::shrink`], or preallocation
/// without growth; errors of the format and its storages; [`Error::Interrupted`].
pub fn resize(
    disk: &Disk,
    guest_bytes: u64,
    options: &ResizeOptions,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let allow = |before| {
        let why = if guest_bytes < before && !options.shrink {
            format!(
                "{guest_bytes} bytes are fewer than the {before} it has; what lies beyond would be lost"
            )
        } else if guest_bytes <= before && options.preallocation != Preallocation::Off {
            "only a disk that grows has a new part to preallocate".to_owned()
        } else {
            return Ok(());
        };
        Err(Error::invalid_for(&disk.name(), why))
    };
    // If new space does not read as zero, it is written by the disk itself.
    let preallocates = options.preallocation != Preallocation::Off && disk.top().new_reads_zero();
    let resized = disk.resize_with(guest_bytes, monitor, allow, |part| match preallocates {
        true => preallocate(disk, part, options.preallocation, monitor),
        false => Ok(()),
    });
    let flushed = disk.flush();
    resized.and(flushed)
}

fn preallocate(
    disk: &Disk,
    part: &NewPart<'_>,
    how: Preallocation,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let (mut done, len) = (0, part.len());
    while done < len {
        monitor.cancel.check()?;
        monitor.progress.update(done, len);
        done += preallocate_some(disk, part, part.start() + done, STEP.min(len - done), how)?;
    }
    monitor.progress.update(len, len);
    Ok(())
}

/// Allocates bytes from `at`; returns their number.
fn preallocate_some(
    disk: &Disk,
    part: &NewPart<'_>,
    at: GuestOffset,
    len: u64,
    how: Preallocation,
) -> Result<u64> {
    let format = disk.top();
    if format.encryption().is_some() {
        // Unwritten space of an encrypted image reads as noise.
        part.write_at(&vec![0; len as usize], at)?;
        return Ok(len);
    }
    let Some(space) = format.reserve(at, len)? else {
        let _guard = disk.enter();
        // Already mapped (raw, or a preallocated cluster).
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
        // The cluster begins before the new part: use the ordinary write path.
        let end = space.write.end;
        drop(space);
        part.write_at(&vec![0; (end - at.0) as usize], at)?;
        return Ok(end - at.0);
    }
    let (start, end) = (space.guest.start, space.guest.end);
    let (host, done) = (space.host, space.write.end - at.0);
    let storage = format.file(space.file);
    if how == Preallocation::Full {
        write_zeroes(&**storage, host, end - start)?;
    } else {
        // Old content of the space must not show.
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
