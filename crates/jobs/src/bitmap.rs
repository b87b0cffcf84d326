//! Persistent dirty bitmaps of an image.

use vdkit_block::{Bitmaps, Error, Result};
use vdkit_chain::Disk;

/// The bitmaps of a disk's top image.
///
/// # Errors
/// [`Error::Unsupported`] where its format has none.
pub fn bitmaps(disk: &Disk) -> Result<&dyn Bitmaps> {
    disk.top().bitmaps().ok_or_else(|| {
        Error::unsupported(
            disk.name(),
            format!("dirty bitmaps in a {} image", disk.top().name()),
            "convert to qcow2",
        )
    })
}

/// Sets the bits in a bitmap that are set in another one, of the same image or of another of the
/// same size. Durable when it returns.
///
/// # Errors
/// [`Error::Invalid`] where the disks differ in size; what [`Bitmaps::merge`] returns.
pub fn merge_bitmap(disk: &Disk, name: &str, source: &Disk, source_name: &str) -> Result<()> {
    let (size, other) = (disk.guest_bytes(), source.guest_bytes());
    if size != other {
        return Err(Error::Invalid(format!(
            "{} has {size} bytes and {} has {other}: a bitmap of one says nothing of the other",
            disk.name(),
            source.name()
        )));
    }
    bitmaps(disk)?.merge(name, bitmaps(source)?, source_name)
}
