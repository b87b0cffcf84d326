//! Persistent dirty bitmaps of an image.

use vdkit_block::{BitmapInfo, Bitmaps, Error, Monitor, NewBitmap, Result};
use vdkit_chain::Disk;

use crate::source::Source;

/// What a conversion does with bitmaps that cannot be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokenBitmaps {
    /// It fails before anything is written.
    Refuse,
    /// It leaves them out, with a message.
    Skip,
}

/// The bitmaps of a disk's top image.
///
/// # Errors
/// [`Error::Unsupported`] where its format has none.
pub fn bitmaps(disk: &Disk) -> Result<&dyn Bitmaps> {
    disk.top().bitmaps().ok_or_else(|| {
        Error::unsupported(
            disk.name(),
            format!("not supported: dirty bitmaps in a {} image", disk.top().name()),
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
    refuse_other_size(disk, source)?;
    bitmaps(disk)?.merge(name, bitmaps(source)?, source_name)
}

/// The bitmaps of a conversion's source that are to be copied.
///
/// # Errors
/// [`Error::Invalid`] for several sources, or a bitmap that cannot be trusted where that is not
/// allowed; [`Error::Unsupported`] where source or target have no bitmaps.
pub(crate) fn bitmaps_to_copy(
    source: &Source,
    target: Option<&Disk>,
    broken: BrokenBitmaps,
    monitor: &Monitor<'_>,
) -> Result<Vec<BitmapInfo>> {
    let [disk] = source.disks() else {
        return Err(Error::Invalid("bitmaps are copied of one source, not of pieces".into()));
    };
    let Some(target) = target else {
        return Err(Error::Invalid("bitmaps need a target that is written".into()));
    };
    let targets = bitmaps(target)?;
    let there = targets.list()?;
    let mut wanted = Vec::new();
    for bitmap in bitmaps(disk)?.list()? {
        let BitmapInfo { name, in_use, .. } = &bitmap.info;
        if there.iter().any(|other| other.info.name == *name) {
            return Err(Error::Invalid(format!(
                "{}: has a bitmap '{name}' already; remove it first ('vdkit bitmap remove {} \
                 {name}')",
                target.name(),
                target.name()
            )));
        }
        match (in_use, broken) {
            (false, _) => wanted.push(bitmap.info),
            (true, BrokenBitmaps::Skip) => monitor.progress.message(&format!(
                "{}: bitmap '{name}' cannot be trusted and is left out",
                disk.name()
            )),
            (true, BrokenBitmaps::Refuse) => {
                return Err(Error::Invalid(format!(
                    "{}: bitmap '{name}' cannot be trusted; remove it, or leave such bitmaps out",
                    disk.name()
                )));
            }
        }
    }
    if !wanted.is_empty() {
        refuse_other_size(target, disk)?;
    }
    wanted.iter().try_for_each(|info| targets.check_new(&new_of(info)))?;
    Ok(wanted)
}

/// The request for a bitmap such as another one.
fn new_of(info: &BitmapInfo) -> NewBitmap<'_> {
    NewBitmap { name: &info.name, granularity: Some(info.granularity), enabled: info.enabled }
}

/// A bitmap of one disk says nothing of a disk of another size.
fn refuse_other_size(disk: &Disk, source: &Disk) -> Result<()> {
    let (size, other) = (disk.guest_bytes(), source.guest_bytes());
    if size == other {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "{} has {size} bytes and {} has {other}: a bitmap of one says nothing of the other",
        disk.name(),
        source.name()
    )))
}

/// Makes the same bitmaps in a target that has its content.
pub(crate) fn copy_bitmaps(source: &Disk, target: &Disk, wanted: &[BitmapInfo]) -> Result<()> {
    for info in wanted {
        let (name, all) = (&info.name, bitmaps(target)?);
        all.add(&new_of(info))?;
        if let Err(error) = merge_bitmap(target, name, source, name) {
            // Half a bitmap would be taken for a whole one. The first error is the one that tells.
            let _ = all.remove(name);
            return Err(error);
        }
    }
    Ok(())
}
