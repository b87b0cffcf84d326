//! Files that get their name only when they are finished.

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::XattrFlags;
use rustix::io::Errno;
use rustix::process::Uid;
use rustix::thread::set_thread_res_uid;
use vdkit_block::{ErrorKind, HostOffset, Storage};
use vdkit_storage::{CommitOptions, CreateMode, FileOptions, FileStorage, LockMode, PendingFile};
use vdkit_testbase::{impossible_here, in_child, require_peer, require_root};

const ACCESS_LIST: &str = "system.posix_acl_access";
const DEFAULT_LIST: &str = "system.posix_acl_default";
/// An arbitrary unprivileged user.
const STRANGER: u32 = 1234;

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
    // A clone still writes to it, and keeps it locked.
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
fn a_child_of_fork_removes_nothing_that_its_parent_makes() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("image");
    let mut file = Some(pending(&target));
    assert!(in_child(|| (), || file.take().is_some()));
    file.take().unwrap().commit(CommitOptions::default()).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
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
    // The target cannot be opened meanwhile.
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

/// A file that was renamed to the target's name, and may be somebody's disk by now.
#[test]
fn a_file_that_took_the_place_of_the_replaced_one_stays() {
    let dir = tempfile::tempdir().unwrap();
    let [target, other] = ["image", "other"].map(|name| dir.path().join(name));
    std::fs::write(&target, "old").unwrap();
    let file = pending(&target);
    std::fs::write(&other, "somebody else's").unwrap();
    std::fs::rename(&other, &target).unwrap();
    let users = FileStorage::open(&target, &FileOptions::read_write()).unwrap();
    let error = file.commit(CommitOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    assert!(users.is_at(&target));
    assert_eq!(std::fs::read(&target).unwrap(), b"somebody else's");
    assert_eq!(names(dir.path()), ["image"]);
    drop(users);
    // A target that was removed is nobody's.
    let file = pending(&target);
    std::fs::remove_file(&target).unwrap();
    file.commit(CommitOptions::default()).unwrap();
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
}

/// One thread puts new files into the place of an image, another opens it as often as it can. Once
/// it has the lock, nobody may replace what it has.
#[test]
fn what_is_opened_and_locked_is_what_the_name_leads_to() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("image");
    std::fs::write(&target, "old").unwrap();
    let done = AtomicBool::new(false);
    let opened = std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..3000 {
                if let Ok(file) = PendingFile::create(&target, &FileOptions::default()) {
                    let _ = file.commit(CommitOptions::default());
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        let mut opened = 0;
        while !done.load(Ordering::Relaxed) {
            let Ok(file) = FileStorage::open(&target, &FileOptions::read_write()) else { continue };
            assert!(file.is_at(&target), "a file without a name was opened");
            opened += 1;
        }
        opened
    });
    assert!(opened > 0, "it was always in use");
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
fn links_to_links_are_followed_and_circles_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::create_dir(at("sub")).unwrap();
    std::fs::write(at("sub/real"), "old").unwrap();
    symlink("../second", at("sub/first")).unwrap();
    symlink(at("sub/real"), at("second")).unwrap();
    pending(&at("sub/first")).commit(CommitOptions::default()).unwrap();
    assert_eq!(std::fs::read(at("sub/real")).unwrap(), b"new");
    assert_eq!(names(&at("sub")), ["first", "real"]);
    symlink("circle", at("circle")).unwrap();
    PendingFile::create(at("circle"), &FileOptions::default()).unwrap_err();
}

/// A sticky world-writable folder like `/tmp`.
fn shared_folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o1777)).unwrap();
    dir
}

#[test]
fn a_strangers_link_in_a_shared_folder_is_not_followed() {
    if !require_root() {
        return;
    }
    let (own, shared) = (tempfile::tempdir().unwrap(), shared_folder());
    let precious = own.path().join("precious");
    std::fs::write(&precious, "old").unwrap();
    let link = shared.path().join("disk");
    symlink(&precious, &link).unwrap();
    // The user's own link is followed.
    drop(PendingFile::create(&link, &FileOptions::default()).unwrap());
    lchown(&link, Some(STRANGER), None).unwrap();
    let refused = PendingFile::create(&link, &FileOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("disk") && refused.contains("user 1234"), "{refused}");
    // Nor is another user's link behind the user's own.
    let second = own.path().join("second");
    symlink(&link, &second).unwrap();
    PendingFile::create(&second, &FileOptions::default()).unwrap_err();
    // Nor is a link to a missing file.
    std::fs::remove_file(&precious).unwrap();
    PendingFile::create(&link, &FileOptions::default()).unwrap_err();
    assert_eq!(names(own.path()), ["second"]);
    // The folder owner's link is followed.
    chown(shared.path(), Some(STRANGER), None).unwrap();
    std::fs::write(&precious, "old").unwrap();
    drop(PendingFile::create(&link, &FileOptions::default()).unwrap());
}

#[test]
fn a_strangers_file_in_a_shared_folder_is_not_replaced_and_given_to_the_stranger() {
    if !require_root() {
        return;
    }
    let shared = shared_folder();
    let target = shared.path().join("disk");
    std::fs::write(&target, "").unwrap();
    drop(PendingFile::create(&target, &FileOptions::default()).unwrap());
    chown(&target, Some(STRANGER), None).unwrap();
    let refused = PendingFile::create(&target, &FileOptions::default()).unwrap_err().to_string();
    assert!(refused.contains("user 1234"), "{refused}");
    // In a folder that only its owner can write to, every file is accepted.
    std::fs::set_permissions(shared.path(), PermissionsExt::from_mode(0o755)).unwrap();
    drop(PendingFile::create(&target, &FileOptions::default()).unwrap());
}

/// An access control list in the kernel's format: owner rw, group none, user 1234 r, mask rw,
/// others none.
fn list() -> Vec<u8> {
    let entry = |tag: u16, may: u16, id: u32| {
        [&tag.to_le_bytes()[..], &may.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let nobody = u32::MAX;
    [
        2_u32.to_le_bytes().to_vec(),
        entry(1, 6, nobody),
        entry(2, 4, STRANGER),
        entry(4, 0, nobody),
        entry(0x10, 6, nobody),
        entry(0x20, 0, nobody),
    ]
    .concat()
}

fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 4096];
    match rustix::fs::getxattr(path, name, &mut value[..]) {
        Ok(len) => Some(value[..len].to_vec()),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => None,
        Err(errno) => panic!("{name}: {errno}"),
    }
}

/// Sets an attribute; prints a note and returns `false` if the file system has none.
fn set(path: &Path, name: &str, value: &[u8]) -> bool {
    match rustix::fs::setxattr(path, name, value, XattrFlags::empty()) {
        Ok(()) => true,
        Err(Errno::OPNOTSUPP) => {
            impossible_here(&format!("no {name} on the file system of {}", path.display()));
            false
        }
        Err(errno) => panic!("{name}: {errno}"),
    }
}

#[test]
fn a_replaced_file_passes_on_its_access_list_and_attributes() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("image");
    std::fs::write(&target, "old").unwrap();
    if !set(&target, ACCESS_LIST, &list()) || !set(&target, "user.purpose", b"backup") {
        return;
    }
    let before = std::fs::metadata(&target).unwrap().mode();
    assert_eq!(before & 0o777, 0o660, "the mask, not what the group may");
    pending(&target).commit(CommitOptions::default()).unwrap();
    assert_eq!(attribute(&target, ACCESS_LIST), Some(list()));
    assert_eq!(attribute(&target, "user.purpose").as_deref(), Some(&b"backup"[..]));
    assert_eq!(std::fs::metadata(&target).unwrap().mode(), before);
    assert_eq!(std::fs::read(&target).unwrap(), b"new");
}

#[test]
fn a_file_without_an_access_list_gets_none_from_its_folder_when_it_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("image");
    std::fs::write(&target, "old").unwrap();
    std::fs::set_permissions(&target, PermissionsExt::from_mode(0o640)).unwrap();
    if !set(dir.path(), DEFAULT_LIST, &list()) {
        return;
    }
    pending(&target).commit(CommitOptions::default()).unwrap();
    assert_eq!(attribute(&target, ACCESS_LIST), None);
    assert_eq!(std::fs::metadata(&target).unwrap().mode() & 0o777, 0o640);
}

#[test]
#[ignore = "run by a_private_files_successor_is_private_from_its_first_moment_on"]
fn traced_replacing() {
    let dir = std::path::PathBuf::from(std::env::var_os("VDKIT_TRACED").unwrap());
    std::fs::write(dir.join("image"), "old").unwrap();
    std::fs::set_permissions(dir.join("image"), PermissionsExt::from_mode(0o600)).unwrap();
    pending(&dir.join("image")).commit(CommitOptions::default()).unwrap();
    pending(&dir.join("fresh")).commit(CommitOptions::default()).unwrap();
}

#[test]
fn a_private_files_successor_is_private_from_its_first_moment_on() {
    if !require_peer("strace") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let run = Command::new("strace")
        .args(["-f", "-e", "trace=open,openat", "-o"])
        .arg(&log)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "traced_replacing", "--ignored", "--nocapture"])
        .env("VDKIT_TRACED", dir.path())
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
    let calls = std::fs::read_to_string(&log).unwrap();
    let made = |name: &str| {
        let hidden = format!("/.{name}.");
        let mut found = calls.lines().filter(|c| c.contains(&hidden) && c.contains("O_EXCL"));
        found.next().unwrap_or_else(|| panic!("{calls}")).to_owned()
    };
    assert!(made("image").contains(", 0600)"), "{}", made("image"));
    assert!(made("fresh").contains(", 0644)"), "{}", made("fresh"));
}

#[test]
fn a_private_file_is_its_owners_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let options = FileOptions::default().create(CreateMode::Private);
    FileStorage::create(&path, &options).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    FileStorage::create(&path, &options).unwrap_err();
}

#[test]
fn names_of_any_length_and_left_overs_do_not_hinder() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("x".repeat(255));
    let first = pending(&target);
    // A left-over of a killed process with our process id: the next names are taken.
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
    assert!(
        missing.contains("no/folder: cannot create") && missing.contains("No such"),
        "{missing}"
    );
}

fn if_needed() -> FileOptions {
    FileOptions::default().in_place_if_needed(true)
}

/// What `options` make of a target: the file that its name led to before has the new bytes.
fn is_written_in_place(target: &Path, options: &FileOptions) -> bool {
    std::fs::write(target, "what was there").unwrap();
    let before = std::fs::File::open(target).unwrap();
    let pending = PendingFile::create(target, options).unwrap();
    pending.storage().write_at(b"new", HostOffset(0)).unwrap();
    pending.commit(CommitOptions::default()).unwrap();
    assert_eq!(std::fs::read(target).unwrap(), b"new");
    std::io::read_to_string(before).unwrap() == "new"
}

#[test]
fn other_names_of_a_file_lead_to_the_new_bytes_if_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (target, other) = (dir.path().join("image"), dir.path().join("other"));
    std::fs::write(&target, "").unwrap();
    assert!(!is_written_in_place(&target, &if_needed()));
    std::fs::hard_link(&target, &other).unwrap();
    assert!(is_written_in_place(&target, &if_needed()));
    assert_eq!(std::fs::read(&other).unwrap(), b"new");
    // Half of an image is not left, and one in use is not touched.
    let half = PendingFile::create(&target, &if_needed()).unwrap();
    half.storage().write_at(b"half", HostOffset(0)).unwrap();
    let refused = PendingFile::create(&other, &if_needed()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Locked);
    drop(half);
    assert_eq!(std::fs::read(&other).unwrap(), b"");
    // Otherwise the other name keeps the old bytes.
    assert!(!is_written_in_place(&target, &FileOptions::default()));
    assert_eq!(std::fs::read(&other).unwrap(), b"what was there");
}

#[test]
fn an_open_descriptor_is_written_and_not_the_name_that_it_had() {
    use std::os::fd::AsRawFd;
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("image");
    let link = dir.path().join("link");
    for kept in [true, false] {
        std::fs::write(&target, "what was there").unwrap();
        let file = std::fs::File::open(&target).unwrap();
        if !kept {
            std::fs::remove_file(&target).unwrap();
        }
        let _ = std::fs::remove_file(&link);
        symlink(format!("/dev/fd/{}", file.as_raw_fd()), &link).unwrap();
        for path in [format!("/proc/self/fd/{}", file.as_raw_fd()).as_ref(), link.as_path()] {
            pending(path).commit(CommitOptions::default()).unwrap();
            assert_eq!(file.metadata().unwrap().len(), 3, "{path:?}, {kept}");
        }
        assert_eq!(target.exists(), kept);
    }
    let memory = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    pending(format!("/proc/self/fd/{}", memory.as_raw_fd()).as_ref())
        .commit(CommitOptions::default())
        .unwrap();
    assert_eq!(std::io::read_to_string(std::fs::File::from(memory)).unwrap(), "new");
}

#[test]
fn a_link_to_a_missing_file_makes_that_file_if_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (real, link) = (dir.path().join("real"), dir.path().join("link"));
    symlink("real", &link).unwrap();
    let pending = PendingFile::create(&link, &if_needed()).unwrap();
    pending.commit(CommitOptions::default()).unwrap();
    assert!(link.is_symlink() && real.metadata().unwrap().is_file());
    if !require_root() {
        return;
    }
    // Another user's link in a shared folder decides nothing here either.
    let shared = shared_folder();
    let theirs = shared.path().join("disk");
    symlink(dir.path().join("missing"), &theirs).unwrap();
    lchown(&theirs, Some(STRANGER), None).unwrap();
    let refused = PendingFile::create(&theirs, &if_needed()).unwrap_err().to_string();
    assert!(refused.contains("user 1234"), "{refused}");
    assert!(!dir.path().join("missing").exists());
}

#[test]
fn a_mounted_file_is_written_in_place_if_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (real, place) = (dir.path().join("real"), dir.path().join("place"));
    std::fs::write(&real, "").unwrap();
    std::fs::write(&place, "").unwrap();
    if !require_root() || rustix::mount::mount_bind(&real, &place).is_err() {
        impossible_here("bind mounts");
        return;
    }
    let mounted = std::panic::catch_unwind(|| {
        assert!(is_written_in_place(&place, &if_needed()));
        let old = PendingFile::create(&place, &FileOptions::default()).unwrap();
        old.commit(CommitOptions::default()).unwrap_err();
        assert_eq!(names(dir.path()), ["place", "real"]);
        std::fs::read(&real).unwrap()
    });
    rustix::mount::unmount(&place, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(mounted.unwrap(), b"new");
}

/// In a folder where the user may make files but not take away those of others, and in one where it
/// may make none.
#[test]
fn a_file_in_anothers_folder_is_written_in_place_if_asked_for() {
    if !require_root() {
        return;
    }
    for mode in [0o755, 0o1777] {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("image");
        std::fs::write(&target, "").unwrap();
        let allow = |path: &Path, mode| {
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        };
        allow(dir.path(), mode);
        allow(&target, 0o666);
        let stranger = Uid::from_raw(STRANGER);
        let write = |options: FileOptions| {
            in_child(
                || (),
                || {
                    set_thread_res_uid(stranger, stranger, stranger).unwrap();
                    PendingFile::create(&target, &options).is_ok_and(|pending| {
                        pending.storage().write_at(b"new", HostOffset(0)).unwrap();
                        pending.commit(CommitOptions::default()).is_ok()
                    })
                },
            )
        };
        assert!(!write(FileOptions::default()) && std::fs::read(&target).unwrap().is_empty());
        assert!(write(if_needed()), "{mode:o}");
        assert_eq!(std::fs::read(&target).unwrap(), b"new");
        assert_eq!(target.metadata().unwrap().uid(), 0);
        assert_eq!(names(dir.path()), ["image"]);
    }
}
