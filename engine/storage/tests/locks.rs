//! Locks against real QEMU processes, in both directions.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use vdkit_block::{Error, ErrorKind, LockHolder, Storage};
use vdkit_storage::{FileOptions, FileStorage, LockMode};
use vdkit_testbase::{qemu, require_peer};

/// A qemu-io that holds an image open until it is dropped.
struct QemuIo {
    child: Child,
    stdin: Option<ChildStdin>,
}

impl QemuIo {
    fn open(path: &Path, args: &[&str]) -> Self {
        let mut child = Command::new("qemu-io")
            .args(args)
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        // It answers a command only after it has opened the image.
        writeln!(stdin, "length").unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let opened = lines.any(|line| line.is_ok_and(|l| l.contains("MiB")));
        assert!(opened, "qemu-io did not open {}", path.display());
        Self { child, stdin: Some(stdin) }
    }
}

impl Drop for QemuIo {
    fn drop(&mut self) {
        // Closing its input ends it.
        drop(self.stdin.take());
        let _ = self.child.wait();
    }
}

fn open(path: &Path, writable: bool) -> Result<FileStorage, Error> {
    let options = FileOptions::default().writable(writable);
    FileStorage::open(path, &options)
}

fn holder(result: Result<FileStorage, Error>) -> LockHolder {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    let text = error.to_string();
    let Error::Locked { holder: Some(holder), .. } = error else { panic!("{text}") };
    let named = match holder.is_this_process() {
        true => "by this program itself".to_owned(),
        false => format!("by process {} (", holder.pid),
    };
    assert!(text.contains(&named), "{text}");
    holder
}

fn image(folder: &Path) -> std::path::PathBuf {
    let path = folder.join("image.qcow2");
    qemu::create(&path, "qcow2", 64 << 20, &[], None);
    path
}

#[test]
fn a_writing_qemu_keeps_us_out_and_is_named() {
    if !require_peer("qemu-io") || !require_peer("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path());
    let writer = QemuIo::open(&path, &["-f", "qcow2"]);
    for writable in [false, true] {
        let found = holder(open(&path, writable));
        assert_eq!(found.pid, writer.child.id());
        assert!(found.command.starts_with("qemu-io -f qcow2"), "{}", found.command);
    }
    // Opening without locks succeeds.
    let off = FileOptions::read_only().lock(LockMode::Off);
    assert!(FileStorage::open(&path, &off).is_ok());
    drop(writer);
    open(&path, true).unwrap();
}

#[test]
fn a_reading_qemu_keeps_our_writers_out_only() {
    if !require_peer("qemu-io") || !require_peer("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path());
    let reader = QemuIo::open(&path, &["-r", "-f", "qcow2"]);
    assert_eq!(holder(open(&path, true)).pid, reader.child.id());
    let _ours = open(&path, false).unwrap();
    drop(reader);
    // A QEMU that shares all permissions excludes nobody.
    drop(_ours);
    let _sharing = QemuIo::open(&path, &["-r", "-U", "-f", "qcow2"]);
    open(&path, true).unwrap();
}

#[test]
fn a_writing_raw_qemu_keeps_our_readers_out_too() {
    if !require_peer("qemu-io") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image.raw");
    File::create(&path).unwrap().set_len(64 << 20).unwrap();
    let writer = QemuIo::open(&path, &["-f", "raw"]);
    assert_eq!(holder(open(&path, false)).pid, writer.child.id());
    assert_eq!(holder(open(&path, true)).pid, writer.child.id());
}

/// Whether a qemu program was refused because the image is locked.
#[track_caller]
fn refused(answer: qemu::Answer) -> bool {
    let text = format!("{}{}", answer.stdout, answer.stderr);
    let locked = text.contains("lock") && text.contains("Is another process using the image");
    assert!(locked || answer.code == 0, "{text}");
    locked
}

#[test]
fn our_locks_keep_qemu_out_as_its_own_would() {
    if !require_peer("qemu-io") || !require_peer("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path());
    let name = path.to_str().unwrap();
    let write = || qemu::try_io(&path, "qcow2", &["write -P 1 0 512"]);
    let read = || qemu::img(["check", "-f", "qcow2", name]);
    let look = || qemu::img(["info", "-U", name]);
    let raw_write = || qemu::try_io(&path, "raw", &["write -P 1 60000 1"]);

    let ours = open(&path, true).unwrap();
    assert!(refused(write()));
    assert!(refused(raw_write()));
    assert!(refused(read()));
    assert!(!refused(look()));
    drop(ours);
    assert!(!refused(write()));

    let ours = open(&path, false).unwrap();
    let beside = open(&path, false).unwrap();
    assert!(refused(write()));
    assert!(refused(raw_write()));
    assert!(!refused(read()));
    drop(ours);
    assert!(refused(write()), "the other reader still holds it");
    drop(beside);
    assert!(!refused(write()));
}

#[test]
fn the_bytes_are_those_of_two_qemus() {
    if !require_peer("qemu-io") || !require_peer("qemu-img") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path());
    // The bytes that each process locks, from its own fdinfo.
    let locks = |pid: u32| {
        let mut bytes: Vec<u64> = Vec::new();
        for info in std::fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap().flatten() {
            let same = std::fs::read_link(format!(
                "/proc/{pid}/fd/{}",
                info.file_name().to_str().unwrap()
            ))
            .is_ok_and(|target| target == path);
            let text = std::fs::read_to_string(info.path()).unwrap_or_default();
            for line in text.lines().filter(|l| same && l.starts_with("lock:")) {
                let fields: Vec<&str> = line.split_whitespace().collect();
                let number =
                    |from_end: usize| fields[fields.len() - from_end].parse::<u64>().unwrap();
                bytes.extend(number(2)..=number(1));
            }
        }
        bytes.sort_unstable();
        bytes
    };
    for (writable, args) in [(true, &["-f", "qcow2"][..]), (false, &["-r", "-f", "qcow2"])] {
        let theirs = {
            let qemu = QemuIo::open(&path, args);
            locks(qemu.child.id())
        };
        let ours = open(&path, writable).unwrap();
        assert_eq!(locks(std::process::id()), theirs);
        drop(ours);
        assert!(locks(std::process::id()).is_empty());
    }
}

#[test]
fn one_process_is_kept_from_itself() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let writer = FileStorage::create(&path, &FileOptions::default()).unwrap();
    let found = holder(open(&path, true));
    assert_eq!(found.pid, std::process::id());
    assert!(found.command.contains("locks"), "{}", found.command);
    holder(open(&path, false));
    drop(writer);
    let first = open(&path, false).unwrap();
    let second = open(&path, false).unwrap();
    assert_eq!(first.len().unwrap() + second.len().unwrap(), 0);
    holder(open(&path, true));
    drop((first, second));
    open(&path, true).unwrap();
}

#[test]
fn a_question_names_the_writer_and_refuses_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let writer = FileStorage::create(&path, &FileOptions::default()).unwrap();
    let asker = FileStorage::open(&path, &FileOptions::read_only().lock(LockMode::Off)).unwrap();
    let found = holder(asker.ask_for_writers().map(|()| unreachable!()));
    assert_eq!(found.pid, std::process::id());
    drop(writer);
    let reader = open(&path, false).unwrap();
    asker.ask_for_writers().unwrap();
    drop(reader);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let _ = asker.ask_for_writers();
            }
        });
        let opened = (0..1000).try_for_each(|_| open(&path, true).map(drop));
        done.store(true, Ordering::Relaxed);
        opened.unwrap();
    });
}

#[test]
fn a_refused_opener_leaves_no_lock_behind() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let reader = FileStorage::create(&path, &FileOptions::default()).map(drop);
    reader.unwrap();
    let reader = open(&path, false).unwrap();
    // The descriptor outlives the refusal, so only unlocking can free the bytes.
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let kept = file.try_clone().unwrap();
    assert!(FileStorage::from_file(file, "f", &FileOptions::read_write()).is_err());
    drop(reader);
    open(&path, true).unwrap();
    drop(kept);
}

#[test]
fn a_duplicate_of_the_descriptor_does_not_keep_the_locks() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let _duplicate = file.try_clone().unwrap();
    let storage = FileStorage::from_file(file, "f", &FileOptions::read_write()).unwrap();
    holder(open(&path, false));
    drop(storage);
    open(&path, true).unwrap();
}

#[test]
fn a_long_command_line_is_shortened_and_cannot_reach_the_terminal() {
    if !require_peer("qemu-io") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("x".repeat(200)).join("\u{1b}[31mred\n");
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("f");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let _writer = QemuIo::open(&path, &["-f", "raw"]);
    let found = holder(open(&path, true));
    assert!(found.command.chars().count() <= 81, "{}", found.command);
    assert!(found.command.ends_with('…'));
    let short = dir.path().join("\u{1b}[31mred");
    std::fs::hard_link(&path, &short).unwrap();
    drop(_writer);
    let _writer = QemuIo::open(&short, &["-f", "raw"]);
    let found = holder(open(&short, true));
    assert!(!found.command.chars().any(char::is_control), "{:?}", found.command);
}
