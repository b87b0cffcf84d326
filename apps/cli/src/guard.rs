//! Checks before a change: other images must not depend on the image, and a block device must not
//! hold anything else.

use std::path::{Path, PathBuf};

use vdkit::jobs::Occupied;
use vdkit::{CancelToken, Monitor, Progress, jobs};

use crate::failure::{Exit, Failure, Tone, print_line};

/// Prints warnings only: these checks end before a progress bar would appear.
struct Warnings;

impl Progress for Warnings {
    fn update(&self, _done: u64, _total: u64) {}

    fn message(&self, text: &str) {
        print_line(Tone::Warning, text);
    }
}

/// Refuses a change if an image in the same folder is based on `image` or has its data in it, unless
/// `force` is set. `doing` names the change in the message, such as "writing to it".
///
/// # Errors
/// Exit code 5, with the names of these images and how to go on.
pub fn refuse_dependents(
    image: &Path,
    force: bool,
    doing: &str,
    cancel: &CancelToken,
) -> Result<(), Failure> {
    if force { Ok(()) } else { refuse(&[image.to_owned()], doing, cancel) }
}

/// Refuses to replace `image` by a new image if another image depends on it or on one of its other
/// files.
///
/// # Errors
/// As [`refuse_dependents`].
pub fn refuse_replacing(image: &Path, cancel: &CancelToken) -> Result<(), Failure> {
    if !image.is_file() {
        return Ok(());
    }
    let images = jobs::replaced_files(&vdkit::registry(), image);
    refuse(&images, "replacing it", cancel)
}

/// Refuses to write a disk to a block device that already has content, unless `force` is set. `but`
/// names the one format that the device may hold: an image of this format is written into.
///
/// # Errors
/// Exit code 5, with what the device holds.
pub fn refuse_occupied(device: &Path, force: bool, but: Option<&str>) -> Result<(), Failure> {
    // Some servers end after their first connection, so an export is opened only to be written.
    if force || !super::commands::is_device(device) || super::commands::is_export(device) {
        return Ok(());
    }
    let Some(found) = jobs::occupied(&vdkit::registry(), device)? else { return Ok(()) };
    let but = but.and_then(|name| vdkit::format(name).ok()).map(|driver| driver.name());
    if matches!(found, Occupied::Image(format) if but == Some(format)) {
        return Ok(());
    }
    let name = device.display();
    Err(Failure::Told(
        Exit::Refused,
        format!("{name}: holds {found}, which would be overwritten"),
        Some(
            "is it the right device? 'lsblk -f' shows what is where; --force overwrites it"
                .to_owned(),
        ),
    ))
}

fn refuse(images: &[PathBuf], doing: &str, cancel: &CancelToken) -> Result<(), Failure> {
    let monitor = Monitor::new(&Warnings).cancelled_by(cancel.clone());
    Ok(jobs::refuse_dependents(&vdkit::registry(), images, &[], doing, &monitor)?)
}
