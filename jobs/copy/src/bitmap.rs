//! Persistent dirty bitmaps of an image.

use vdkit_block::{BitmapInfo, Bitmaps, Error, Monitor, NewBitmap, Remedy, Result};
use vdkit_chain::Disk;

use crate::source::Source;

/// How a conversion treats inconsistent bitmaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokenBitmaps {
    /// Fail before anything is written.
    Refuse,
    /// Skip them with a message.
    Skip,
}

/// The bitmaps of a disk's top image. In a child of `fork` whose parent opened the disk, they can
/// be read, and changes are [`Error::Invalid`].
///
/// # Errors
/// [`Error::Unsupported`] if its format has none.
pub fn bitmaps(disk: &Disk) -> Result<&dyn Bitmaps> {
    disk.top().require_bitmaps()?;
    // Not the format's own: the disk refuses changes in a child of fork.
    Ok(disk)
}

/// Merges a bitmap into another one, of the same image or of another of the same size. Durable on
/// return.
///
/// # Errors
/// [`Error::Invalid`] if the disks differ in size; errors of [`Bitmaps::merge`].
pub fn merge_bitmap(disk: &Disk, name: &str, source: &Disk, source_name: &str) -> Result<()> {
    refuse_other_size(disk, source)?;
    bitmaps(disk)?.merge(name, bitmaps(source)?, source_name)
}

/// The bitmaps of a conversion's source to copy.
///
/// # Errors
/// [`Error::Invalid`] for several sources, or for an inconsistent bitmap if that is refused;
/// [`Error::Unsupported`] if source or target do not support bitmaps.
pub(crate) fn bitmaps_to_copy(
    source: &Source,
    target: Option<&Disk>,
    broken: BrokenBitmaps,
    monitor: &Monitor<'_>,
) -> Result<Vec<BitmapInfo>> {
    let [disk] = source.disks() else {
        return Err(Error::invalid("bitmaps are copied of one source, not of pieces"));
    };
    let Some(target) = target else {
        return Err(Error::invalid("bitmaps need a target that is written"));
    };
    let targets = bitmaps(target)?;
    let there = targets.list()?;
    let mut wanted = Vec::new();
    for bitmap in bitmaps(disk)?.list()? {
        let BitmapInfo { name, in_use, .. } = &bitmap.info;
        if there.iter().any(|other| other.info.name == *name) {
            return Err(Error::invalid_for(
                &target.name(),
                format!("has a bitmap '{name}' already"),
            )
            .with_remedy(Remedy::RemoveBitmap {
                file: target.name().to_owned(),
                name: name.clone(),
            }));
        }
        match (in_use, broken) {
            (false, _) => wanted.push(bitmap.info),
            (true, BrokenBitmaps::Skip) => monitor.progress.message(&format!(
                "{}: bitmap '{name}' cannot be trusted and is left out",
                disk.name()
            )),
            (true, BrokenBitmaps::Refuse) => {
                return Err(Error::invalid_for(
                    &disk.name(),
                    format!(
                        "bitmap '{name}' cannot be trusted; remove it, or leave such bitmaps out"
                    ),
                ));
            }
        }
    }
    if !wanted.is_empty() {
        refuse_other_size(target, disk)?;
    }
    wanted.iter().try_for_each(|info| targets.check_new(&new_of(info)))?;
    Ok(wanted)
}

/// A new bitmap with the same properties.
fn new_of(info: &BitmapInfo) -> NewBitmap<'_> {
    NewBitmap { name: &info.name, granularity: Some(info.granularity), enabled: info.enabled }
}

/// A bitmap does not apply to a disk of another size.
fn refuse_other_size(disk: &Disk, source: &Disk) -> Result<()> {
    let (size, other) = (disk.guest_bytes(), source.guest_bytes());
    if size == other {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{} has {size} bytes and {} has {other}: a bitmap of one says nothing of the other",
        disk.name(),
        source.name()
    )))
}

/// Copies bitmaps to a target with the same content.
pub(crate) fn copy_bitmaps(source: &Disk, target: &Disk, wanted: &[BitmapInfo]) -> Result<()> {
    for info in wanted {
        let (name, all) = (&info.name, bitmaps(target)?);
        all.add(&new_of(info))?;
        if let Err(error) = merge_bitmap(target, name, source, name) {
            // Remove it: a partial bitmap would be taken for a complete one. Report the first
            // error.
            let _ = all.remove(name);
            return Err(error);
        }
    }
    Ok(())
}
