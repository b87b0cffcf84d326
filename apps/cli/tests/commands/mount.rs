//! `vdkit mount`: what the file is, and how it comes and goes. What becomes of the bytes is in
//! `mount_data.rs`.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use crate::common::mounted::{MIB, Mount, errno, json_of, run, unmount};
use crate::common::{self, Scratch, peer, signal};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use vdkit_testkit::{require_fuse, require_peer};

#[test]
fn the_file_is_the_disk() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "64M"]);
    scratch.ok(&["write", "disk.qcow2", "1M", "64K", "--pattern", "0xaa"]);
    let mount = Mount::start(&scratch, &["disk.qcow2", "disk.raw"]);
    assert_eq!(mount.answer["virtual-size"], 64 * MIB);
    assert_eq!(mount.answer["read-only"], false);
    assert!(mount.answer["file"].as_str().unwrap().ends_with("/disk.raw"));
    let stat = std::fs::metadata(&mount.file).unwrap();
    assert!(stat.is_file());
    assert_eq!(stat.len(), 64 * MIB);
    assert!(stat.blocks() > 0 && stat.blocks() * 512 < MIB, "{}", stat.blocks());
    let mut bytes = [0; 4];
    mount.open().read_exact_at(&mut bytes, MIB + (64 << 10) - 2).unwrap();
    assert_eq!(bytes, [0xaa, 0xaa, 0, 0]);
    // QEMU, too, finds the same bytes in the image and in the file.
    let args = ["compare", "-U", "-f", "qcow2", "-F", "raw", "disk.qcow2", "disk.raw"];
    peer(&scratch.path(""), "qemu-img", &args);
    mount.stop();
    // What was made for it is gone.
    assert_eq!(scratch.names(), ["disk.qcow2"]);
    let (child, answer) = json_of("mount", &scratch, &["--read-only", "disk.qcow2", "again"]);
    assert_eq!((&answer["read-only"], &answer["filename"]), (&true.into(), &"disk.qcow2".into()));
    Mount { child, file: scratch.path("again"), answer }.stop();
}

#[test]
fn nobody_writes_what_is_read_only() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    scratch.ok(&["write", "disk.qcow2", "0", "64K", "--pattern", "1"]);
    scratch.ok(&["snapshot", "create", "disk.qcow2", "before"]);
    scratch.ok(&["write", "disk.qcow2", "0", "64K", "--pattern", "2"]);
    let before = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    for (arguments, byte) in [
        (&["--read-only", "disk.qcow2", "mounted"][..], 2),
        (&["--snapshot", "before", "disk.qcow2", "mounted"], 1),
    ] {
        let mount = Mount::start(&scratch, arguments);
        assert_eq!(mount.answer["read-only"], true);
        assert_eq!(std::fs::metadata(&mount.file).unwrap().mode() & 0o222, 0);
        let open = OpenOptions::new().write(true).open(&mount.file);
        assert_eq!(errno(&open.unwrap_err()), Some(Errno::ROFS));
        let mut bytes = [0];
        File::open(&mount.file).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [byte]);
        mount.stop();
    }
    assert!(std::fs::read(scratch.path("disk.qcow2")).unwrap() == before);
}

#[test]
fn an_image_is_mounted_once_and_a_file_covered_once() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    scratch.ok(&["create", "other.qcow2", "16M"]);
    let mount = Mount::start(&scratch, &["disk.qcow2", "mounted"]);
    scratch.fails(6, "disk.qcow2: is in use", &["mount", "disk.qcow2", "second"]);
    let answer = scratch.fails(1, "mounted there already", &["mount", "other.qcow2", "mounted"]);
    assert!(answer.stderr.contains("hint: umount "), "{}", answer.stderr);
    mount.stop();
    assert_eq!(scratch.names(), ["disk.qcow2", "other.qcow2"]);
}

#[test]
fn the_mount_of_a_dead_server_is_recognized() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    let mut mount = Mount::start(&scratch, &["disk.qcow2", "mounted"]);
    mount.child.kill().unwrap();
    mount.child.wait().unwrap();
    let answer = scratch.fails(1, "mounted: is still mounted", &["mount", "disk.qcow2", "mounted"]);
    assert!(answer.stderr.contains("hint: umount mounted"), "{}", answer.stderr);
    assert!(answer.stderr.contains("fusermount3 -u mounted"), "{}", answer.stderr);
    unmount(&mount.file, &[]);
    // An empty file is left, which serves as well.
    assert_eq!(std::fs::metadata(&mount.file).unwrap().len(), 0);
    Mount::start(&scratch, &["disk.qcow2", "mounted"]).stop();
}

#[test]
fn a_file_that_is_there_is_covered_and_comes_to_no_harm() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    scratch.write("mine", b"precious");
    let mount = Mount::start(&scratch, &["disk.qcow2", "mine"]);
    mount.open().write_all_at(b"to the disk", 0).unwrap();
    mount.stop();
    assert_eq!(std::fs::read(scratch.path("mine")).unwrap(), b"precious");
    // Over the image itself: its name then shows the disk.
    let mount = Mount::start(&scratch, &["disk.qcow2", "disk.qcow2"]);
    let mut bytes = [0; 11];
    mount.open().read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"to the disk");
    mount.open().write_all_at(b"TO", 0).unwrap();
    mount.stop();
    assert_eq!(scratch.ok(&["read", "disk.qcow2", "0", "11"]).bytes, b"TO the disk");
    common::chains::sound(&scratch, "disk.qcow2", false);
}

#[test]
fn umount_ends_it() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    let mut mount = Mount::start(&scratch, &["disk.qcow2", "mounted"]);
    mount.open().write_all_at(b"kept", 0).unwrap();
    unmount(&mount.file, &[]);
    let (code, said) = mount.wait();
    assert_eq!((code, said.as_str()), (Some(0), ""));
    assert_eq!(scratch.names(), ["disk.qcow2"]);
    assert_eq!(scratch.ok(&["read", "disk.qcow2", "0", "4"]).bytes, b"kept");
    common::chains::sound(&scratch, "disk.qcow2", false);
}

#[test]
fn who_has_it_open_may_end_in_peace() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    let mut mount = Mount::start(&scratch, &["disk.qcow2", "mounted"]);
    let file = mount.open();
    file.write_all_at(b"first", 0).unwrap();
    signal(mount.child.id(), "TERM");
    // The name goes at once; the open file stays.
    common::wait_until(|| !mount.file.exists() || mount.file.metadata().unwrap().len() == 0);
    // timeout(1) sends it twice.
    signal(mount.child.id(), "TERM");
    file.write_all_at(b"later", MIB).unwrap();
    file.sync_all().unwrap();
    assert!(mount.child.try_wait().unwrap().is_none(), "it waits for us");
    drop(file);
    let (code, said) = mount.wait();
    assert_eq!((code, said.as_str()), (Some(0), ""));
    assert_eq!(scratch.ok(&["read", "disk.qcow2", "0", "5"]).bytes, b"first");
    assert_eq!(scratch.ok(&["read", "disk.qcow2", "1M", "5"]).bytes, b"later");
    common::chains::sound(&scratch, "disk.qcow2", false);
}

#[test]
fn the_size_changes_only_where_that_is_asked_for() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    let mount = Mount::start(&scratch, &["disk.qcow2", "mounted"]);
    let file = mount.open();
    // As a block device: what fits is written, and then there is no space.
    assert_eq!(file.write_at(&[1; 4096], MIB - 512).unwrap(), 512);
    let error = file.write_at(&[1; 512], MIB).unwrap_err();
    assert_eq!(errno(&error), Some(Errno::NOSPC));
    assert_eq!(file.read_at(&mut [0; 512], MIB).unwrap(), 0);
    for len in [0, MIB - 1, MIB + 1] {
        assert_eq!(errno(&file.set_len(len).unwrap_err()), Some(Errno::PERM), "{len}");
    }
    file.set_len(MIB).unwrap();
    let truncated = OpenOptions::new().write(true).truncate(true).open(&mount.file);
    assert_eq!(errno(&truncated.unwrap_err()), Some(Errno::PERM));
    let preallocated = fallocate(&file, FallocateFlags::empty(), 0, 4096);
    assert_eq!(preallocated, Err(Errno::OPNOTSUPP));
    drop(file);
    mount.stop();

    let mount = Mount::start(&scratch, &["--growable", "disk.qcow2", "mounted"]);
    let file = mount.open();
    file.set_len(2 * MIB).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 2 * MIB);
    file.write_all_at(&[2; 4096], 3 * MIB - 100).unwrap();
    // (A qcow2 disk is a whole number of sectors.)
    assert_eq!(file.metadata().unwrap().len(), 3 * MIB + 4096);
    assert_eq!(errno(&file.set_len(MIB).unwrap_err()), Some(Errno::PERM));
    let mut bytes = vec![9; (2 * MIB) as usize];
    file.read_exact_at(&mut bytes, MIB).unwrap();
    assert!(bytes[..(2 * MIB - 100) as usize].iter().all(|byte| *byte == 0));
    assert!(bytes[(2 * MIB - 100) as usize..].iter().all(|byte| *byte == 2));
    drop(file);
    mount.stop();
    common::chains::sound(&scratch, "disk.qcow2", false);
    let info = scratch.json_of("info", 0, &["disk.qcow2"]);
    assert_eq!(info["virtual-size"], 3 * MIB + 4096);
}

#[test]
fn direct_io_and_statistics_of_the_file_system_work() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    let mount = Mount::start(&scratch, &["disk.qcow2", "mounted"]);
    let file = mount.file.to_str().unwrap();
    let (to, from) = (format!("of={file}"), format!("if={file}"));
    scratch.write("data", &[5; 65536]);
    let data = format!("if={}", scratch.path("data").display());
    run("dd", &[&data, &to, "bs=4096", "oflag=direct", "conv=notrunc,fsync", "status=none"]);
    let back = format!("of={}", scratch.path("back").display());
    run("dd", &[&from, &back, "bs=4096", "count=16", "iflag=direct", "status=none"]);
    assert!(std::fs::read(scratch.path("back")).unwrap() == [5; 65536]);
    let found = rustix::fs::statvfs(&mount.file).unwrap();
    assert_eq!(found.f_blocks * found.f_frsize, 16 * MIB);
    assert!(found.f_bfree < found.f_blocks);
    // Owner, permissions and times can be set, for as long as it is mounted.
    run("chmod", &["640", file]);
    run("touch", &["-d", "2020-02-02 02:02:02 UTC", file]);
    let stat = std::fs::metadata(&mount.file).unwrap();
    assert_eq!((stat.mode() & 0o777, stat.mtime()), (0o640, 1_580_608_922));
    mount.stop();
}

#[test]
fn other_users_only_where_they_are_let_in() {
    if !require_fuse() || !require_peer("setpriv") {
        return;
    }
    let scratch = Scratch::new();
    run("chmod", &["755", scratch.path("").to_str().unwrap()]);
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    scratch.write("open", b"");
    run("chmod", &["644", scratch.path("open").to_str().unwrap()]);
    let nobody = |file: &Path| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "head", "-c", "1"]);
        command.arg(file).output().unwrap().status.success()
    };
    let mount = Mount::start(&scratch, &["disk.qcow2", "open"]);
    assert!(!nobody(&mount.file));
    mount.stop();
    let mount = Mount::start(&scratch, &["--allow-other", "disk.qcow2", "open"]);
    assert!(nobody(&mount.file));
    mount.stop();
    // A file that was made for it is its owner's.
    let mount = Mount::start(&scratch, &["--allow-other", "disk.qcow2", "made"]);
    assert!(!nobody(&mount.file));
    mount.stop();
}

#[test]
fn one_export_is_a_file_and_an_nbd_disk() {
    if !require_fuse() || !require_peer("qemu-io") {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    let socket = format!("unix:{}", scratch.path("socket").display());
    let arguments = ["disk.qcow2", "--nbd", &socket, "--fuse", "mounted"];
    let (child, answer) = json_of("serve", &scratch, &arguments);
    let mount = Mount { child, file: scratch.path("mounted"), answer };
    assert_eq!(mount.answer["file"], mount.file.to_str().unwrap());
    let uri = mount.answer["uris"][0].as_str().unwrap();
    let nbd =
        |command: &str| peer(&scratch.path(""), "qemu-io", &["-f", "raw", "-c", command, uri]);
    // Each sees at once what comes by the other.
    let file = mount.open();
    let mut bytes = [0; 512];
    file.read_exact_at(&mut bytes, MIB).unwrap();
    nbd("write -P 5 1M 64K");
    file.read_exact_at(&mut bytes, MIB).unwrap();
    assert_eq!(bytes, [5; 512]);
    file.write_all_at(&[6; 512], MIB).unwrap();
    let said = nbd("read -P 6 1M 512");
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(!said.contains("verification failed"), "{said}");
    drop(file);
    mount.stop();
    assert_eq!(scratch.names(), ["disk.qcow2"]);
    common::chains::sound(&scratch, "disk.qcow2", false);
    // A file is enough, and when it is unmounted nothing is left to serve.
    let (child, answer) = json_of("serve", &scratch, &["disk.qcow2", "--fuse", "mounted"]);
    let mut mount = Mount { child, file: scratch.path("mounted"), answer };
    unmount(&mount.file, &[]);
    assert_eq!(mount.wait().0, Some(0));
    scratch.fails(2, "nowhere to serve", &["serve", "disk.qcow2"]);
    // Where something else cannot be had, the mount goes too.
    let arguments = ["serve", "disk.qcow2", "--fuse", "mounted", "--control", "no/such"];
    scratch.fails(1, "--control no/such", &arguments);
    assert_eq!(scratch.names(), ["disk.qcow2"]);
}

#[test]
fn hostile_input_is_a_clear_error() {
    let scratch = Scratch::new();
    scratch.fails(1, "no-such.qcow2", &["mount", "no-such.qcow2", "mounted"]);
    assert!(scratch.names().is_empty());
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    let mut bytes = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    bytes[20] = 0xff;
    scratch.write("damaged.qcow2", &bytes);
    scratch.fails(4, "damaged.qcow2", &["mount", "damaged.qcow2", "mounted"]);
    assert_eq!(scratch.names(), ["damaged.qcow2", "disk.qcow2"]);
    if !require_fuse() {
        return;
    }
    let answer = scratch.fails(1, "no regular file", &["mount", "disk.qcow2", "."]);
    assert!(answer.stderr.contains("hint: name a regular file"), "{}", answer.stderr);
    scratch.fails(1, "cannot make", &["mount", "disk.qcow2", "no/such"]);
    // The image is as it was.
    common::chains::sound(&scratch, "disk.qcow2", false);
}

#[test]
fn a_mount_tells_its_counts() {
    if !require_fuse() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "16M"]);
    let arguments = ["--metrics", "unix:m.sock", "disk.qcow2", "mounted"];
    let mount = Mount::start(&scratch, &arguments);
    assert_eq!(mount.answer["metrics"], "unix:m.sock");
    mount.open().write_all_at(&[1; 4096], 0).unwrap();
    let curl = ["-sS", "--unix-socket", "m.sock", "http://vdkit/metrics"];
    let text = String::from_utf8(peer(&scratch.path(""), "curl", &curl).stdout).unwrap();
    assert!(text.contains("vdkit_bytes_total{export=\"\",op=\"write\"} 4096\n"), "{text}");
    mount.stop();
    assert!(!scratch.path("m.sock").exists());
}
