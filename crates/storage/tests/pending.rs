//! Files that take their name only when they are finished.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use vdkit_block::{ErrorKind, HostOffset, Storage};
use vdkit_storage::{CommitOptions, FileOptions, FileStorage, LockMode, PendingFile};

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<_> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn pending(target: &Path) -> PendingFile {
    let pending = PendingFile::create(target, &FileOptions::default()).unwrap();
    pending.storage().write_at(b"new", HostOffset(0)).unwrap();
    pending
}

#[test]
fn a_new_file_appears_when_it_is_committed() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("image");
    let file = pending(&target);
    assert!(!target.exists() && !file.replaces());
    let hidden = names(dir.path());
    assert_eq!(hidden.len(), 1);
    assert!(hidden[0].starts_with(".image."), "{hidden:?}");
    let storage = file.storage().clone();
    file.commit(CommitOptions { sync_file: true, sync_folder: true }).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
    assert_eq!(names(dir.path()), ["image"]);
    // A clone still writes to it, and holds it.
    storage.write_at(b"!", HostOffset(3)).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"new!");
    assert!(FileStorage::open(&target, &FileOptions::read_only()).is_err());
}

#[test]
fn a_dropped_file_leaves_what_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("image");
    drop(pending(&target));
    assert!(names(dir.path()).is_empty());
    std::fs::write(&target, "old").unwrap();
    let file = pending(&target);
    assert!(file.replaces());
    drop(file);
    assert_eq!(std::fs::read(&target).unwrap(), b"old");
    assert_eq!(names(dir.path()), ["image"]);
    // Also where the program unwinds.
    let unwound = std::panic::catch_unwind(|| {
        let _file = pending(&target);
        panic!("on purpose");
    });
    assert!(unwound.is_err());
    assert_eq!(names(dir.path()), ["image"]);
}

#[test]
fn a_replaced_file_passes_on_its_mode_and_owner() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("image");
    std::fs::write(&target, "old").unwrap();
    std::fs::set_permissions(&target, std::fs::Permissions::from_mode(0o640)).unwrap();
    let root = std::os::unix::fs::chown(&target, Some(1234), Some(4321)).is_ok();
    let before = std::fs::metadata(&target).unwrap();
    pending(&target).commit(CommitOptions::default()).unwrap();
    let after = std::fs::metadata(&target).unwrap();
    assert_eq!(after.mode(), before.mode());
    assert_ne!(after.ino(), before.ino());
    if root {
        assert_eq!((after.uid(), after.gid()), (1234, 4321));
    }
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
}

#[test]
fn a_file_in_use_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("image");
    std::fs::write(&target, "old").unwrap();
    let reader = FileStorage::open(&target, &FileOptions::read_only()).unwrap();
    let refused = PendingFile::create(&target, &FileOptions::default()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Locked);
    assert_eq!(names(dir.path()), ["image"]);
    let off = FileOptions::default().lock(LockMode::Off);
    drop(PendingFile::create(&target, &off).unwrap());
    drop(reader);
    // And nobody begins to use it meanwhile.
    let file = pending(&target);
    assert!(FileStorage::open(&target, &FileOptions::read_only()).is_err());
    drop(file);
    FileStorage::open(&target, &FileOptions::read_write()).unwrap();
}

#[test]
fn a_file_that_appears_meanwhile_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("image");
    let file = pending(&target);
    std::fs::write(&target, "somebody else's").unwrap();
    let error = file.commit(CommitOptions::default()).unwrap_err();
    assert!(error.to_string().contains("exists"), "{error}");
    assert_eq!(std::fs::read(&target).unwrap(), b"somebody else's");
    assert_eq!(names(dir.path()), ["image"]);
}

#[test]
fn a_symbolic_link_stays_one() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real"), dir.path().join("link"));
    std::fs::write(&real, "old").unwrap();
    symlink("real", &link).unwrap();
    pending(&link).commit(CommitOptions::default()).unwrap();
    assert!(link.is_symlink());
    assert_eq!(std::fs::read(&real).unwrap(), b"new");
    std::fs::remove_file(&real).unwrap();
    let dangling = PendingFile::create(&link, &FileOptions::default()).unwrap_err();
    assert_eq!(dangling.kind(), ErrorKind::Usage);
}

#[test]
fn names_of_any_length_and_left_overs_do_not_hinder() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("x".repeat(255));
    let first = pending(&target);
    // A left-over of a killed process with our number: the names that come next.
    let taken = first.temporary().file_name().unwrap().to_str().unwrap().to_owned();
    let count: u32 = taken.rsplit('.').nth(1).unwrap().split('-').nth(1).unwrap().parse().unwrap();
    for next in count + 1..count + 200 {
        std::fs::write(
            dir.path().join(taken.replace(&format!("-{count}."), &format!("-{next}."))),
            "",
        )
        .ok();
    }
    let second = pending(&target);
    second.commit(CommitOptions::default()).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
    drop(first);
}

#[test]
fn what_is_no_file_cannot_be_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let create = |path: &Path| PendingFile::create(path, &FileOptions::default()).unwrap_err();
    let folder = create(dir.path()).to_string();
    assert!(folder.contains("is a directory"), "{folder}");
    let null = create(Path::new("/dev/null")).to_string();
    assert!(null.contains("is a character device"), "{null}");
    assert_eq!(create(Path::new("/")).kind(), ErrorKind::Usage);
    assert_eq!(create(Path::new("..")).kind(), ErrorKind::Usage);
    let missing = create(&dir.path().join("no/folder")).to_string();
    assert!(missing.contains("no/folder: cannot open") && missing.contains("No such"), "{missing}");
}
