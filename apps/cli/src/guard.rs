//! Refusing to change an image that others stand on, and to write over a device that is in use for something.

use std::path::{Path, PathBuf};

use vdkit::jobs::Occupied;
use vdkit::{CancelToken, Monitor, Progress, jobs};

use crate::arguments::Force;
use crate::failure::{Exit, Failure, Tone, print_line};

/// Prints messages; for what is over before a bar would show.
struct Warnings;

impl Progress for Warnings {
    fn update(&self, _done: u64, _total: u64) {}

    fn message(&self, text: &str) {
        print_line(Tone::Warning, text);
    }
}

/// Refuses where an image in the folder of `image` stands on it, unless that is forced. `doing`
/// says what would damage it, such as "writing to it".
///
/// # Errors
/// Exit code 5, naming the overlays and how to go on.
pub fn refuse_dependents(
    image: &Path,
    force: &Force,
    doing: &str,
    cancel: &CancelToken,
) -> Result<(), Failure> {
    if force.force { Ok(()) } else { refuse(&[image.to_owned()], doing, cancel) }
}

/// The same where a new image is to take the name of `image`: neither that one nor a file that goes
/// with it may be what another image stands on.
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

/// Refuses to write a disk onto a block device on which there is something else, unless that is forced.
/// `but` is what the device may hold: an image of this format, into which is written.
///
/// # Errors
/// Exit code 5, saying what is there.
pub fn refuse_occupied(device: &Path, force: bool, but: Option<&str>) -> Result<(), Failure> {
    if force || !super::commands::is_device(device) {
        return Ok(());
    }
    let Some(found) = jobs::occupied(&vdkit::registry(), device)? else { return Ok(()) };
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
    let monitor = Monitor { cancel: cancel.clone(), progress: &Warnings };
    Ok(jobs::refuse_dependents(&vdkit::registry(), images, &[], doing, &monitor)?)
}
