//! Refusing to change an image that others stand on.

use std::path::{Path, PathBuf};

use vdkit::{CancelToken, Monitor, Progress, jobs};

use crate::arguments::Force;
use crate::failure::{Failure, Tone, print_line};

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

fn refuse(images: &[PathBuf], doing: &str, cancel: &CancelToken) -> Result<(), Failure> {
    let monitor = Monitor { cancel: cancel.clone(), progress: &Warnings };
    Ok(jobs::refuse_dependents(&vdkit::registry(), images, &[], doing, &monitor)?)
}
