//! Unfinished files of killed commands.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use vdkit_block::{CancelToken, Result};
use vdkit_storage::{is_abandoned, unfinished_name};

use crate::{DoctorCode, DoctorFinding, command, word_of};

/// Maximum folder depth.
const FOLDERS_DEEP_MAX: usize = 16;
/// Maximum files examined.
const FILES_MAX: usize = 100_000;

/// Unfinished files in a folder, and in its subfolders if `deep`. With `image`, only those with
/// that target.
///
/// # Errors
/// [`vdkit_block::Error::Interrupted`]. Unreadable folders are skipped.
pub(super) fn leftovers(
    folder: &Path,
    image: Option<&Path>,
    deep: bool,
    cancel: &CancelToken,
) -> Result<Vec<DoctorFinding>> {
    let mut found = Vec::new();
    let mut looked_at = 0;
    let mut folders = vec![(folder.to_owned(), if deep { FOLDERS_DEEP_MAX } else { 0 })];
    while let Some((folder, deep)) = folders.pop() {
        let Ok(entries) = folder.read_dir() else { continue };
        for entry in entries.flatten() {
            cancel.check()?;
            looked_at += 1;
            if looked_at > FILES_MAX {
                break;
            }
            let path = entry.path();
            let Ok(kind) = entry.file_type() else { continue };
            let wanted = |name: &OsStr| image.is_none_or(|image| image.file_name() == Some(name));
            if kind.is_dir() && deep > 0 {
                folders.push((path, deep - 1));
            } else if kind.is_file()
                && unfinished_name(&path).is_some_and(|name| wanted(&name))
                && is_abandoned(&path)
            {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found.into_iter().map(finding).collect())
}

fn finding(path: PathBuf) -> DoctorFinding {
    use std::os::unix::fs::MetadataExt;
    let bytes = path.metadata().map_or(0, |found| found.blocks() * 512);
    let name = unfinished_name(&path).unwrap_or_default();
    let message = format!(
        "'{}' takes {} KiB: it was to become '{}', and the command that made it was killed",
        path.display(),
        bytes >> 10,
        name.display()
    );
    DoctorFinding::new(DoctorCode::Abandoned, message, command(&["rm", &word_of(&path)]))
}
