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
    let (mut found, complete) = search(folder, image, deep, FILES_MAX, cancel)?;
    found.sort();
    let mut findings: Vec<_> = found.into_iter().map(finding).collect();
    if !complete {
        findings.push(not_searched(folder, deep));
    }
    Ok(findings)
}

/// The unfinished files among the first `files_max` files, and whether there are no more files.
fn search(
    folder: &Path,
    image: Option<&Path>,
    deep: bool,
    files_max: usize,
    cancel: &CancelToken,
) -> Result<(Vec<PathBuf>, bool)> {
    let mut found = Vec::new();
    let mut looked_at = 0;
    let mut folders = vec![(folder.to_owned(), if deep { FOLDERS_DEEP_MAX } else { 0 })];
    while let Some((folder, deep)) = folders.pop() {
        let Ok(entries) = folder.read_dir() else { continue };
        for entry in entries.flatten() {
            cancel.check()?;
            if looked_at == files_max {
                return Ok((found, false));
            }
            looked_at += 1;
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
    Ok((found, true))
}

fn not_searched(folder: &Path, deep: bool) -> DoctorFinding {
    let message = format!(
        "'{}' has more than {FILES_MAX} files: not all were searched for files of killed commands",
        folder.display()
    );
    let depth: &[&str] = if deep { &[] } else { &["-maxdepth", "1"] };
    let word = word_of(folder);
    let mend = [&["find", word.as_str()][..], depth, &["-name", ".*.partial"]].concat();
    DoctorFinding::new(DoctorCode::NotSearched, message, command(&mend))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_that_stops_early_says_so() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("below")).unwrap();
        for name in ["a", ".a.1-0.partial", "below/.b.1-0.partial"] {
            std::fs::write(dir.path().join(name), b"x").unwrap();
        }
        let search = |deep, files_max| {
            let cancel = CancelToken::default();
            let (found, complete) = search(dir.path(), None, deep, files_max, &cancel).unwrap();
            (found.len(), complete)
        };
        assert_eq!(search(true, 4), (2, true));
        assert_eq!(search(false, 3), (1, true));
        assert!(!search(true, 3).1 && !search(false, 2).1);
        assert_eq!(search(true, 0), (0, false));
        let told = not_searched(Path::new("-x"), false);
        assert_eq!(told.mend.unwrap().join(" "), "find ./-x -maxdepth 1 -name .*.partial");
    }
}
