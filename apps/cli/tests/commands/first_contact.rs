//! What a newcomer tries first: names, empty files, things that are no images.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Loop, Scratch, peer};
use vdkit_testkit::fs::loop_device;
use vdkit_testkit::require_root;

/// An image whose header was wiped, an empty file, and a text: with names that promise an image.
#[test]
fn what_is_not_the_image_that_its_name_says_is_told_by_every_command() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "x.qcow2", "64M"]);
    let mut bytes = std::fs::read(scratch.path("x.qcow2")).unwrap();
    bytes[..512].fill(0);
    std::fs::write(scratch.path("x.qcow2"), &bytes).unwrap();
    scratch.write("z.qcow2", b"");
    scratch.write("passwd.vmdk", b"root:x:0:0:root:/root:/bin/bash\n");
    for (name, format) in [("x.qcow2", "qcow2"), ("z.qcow2", "qcow2"), ("passwd.vmdk", "vmdk")] {
        let said = format!("its name says that it is a {format} image");
        scratch.fails(8, "it cannot be checked", &["check", name]);
        scratch.fails(8, &said, &["check", name]);
        for command in [
            &["info", name][..],
            &["map", name],
            &["read", name, "0"],
            &["convert", name, "y.raw"],
            &["compare", name, name],
            &["serve", name, "--nbd", "unix:socket"],
            &["serve", "--read-only", name, "--nbd", "unix:socket"],
            &["mount", "--read-only", name, "file"],
        ] {
            scratch.fails(1, &said, command);
        }
        let doctor = scratch.run(&["doctor", name]);
        assert!(doctor.stdout.contains(&said), "doctor {name}: {doctor:?}");
        let mend = format!("vdkit check -f {format} {name}");
        assert!(doctor.stdout.contains(&mend), "doctor {name}: {doctor:?}");
        assert_ne!(doctor.code, Some(0), "doctor {name}");
        let inspect = scratch.run(&["inspect", name]);
        assert!(!inspect.stdout.contains("accept"), "inspect {name}: {inspect:?}");
        assert_ne!(inspect.code, Some(0), "inspect {name}");
    }
    assert_eq!(scratch.names(), ["passwd.vmdk", "x.qcow2", "z.qcow2"]);
    // Who says what it is, is believed.
    scratch.ok(&["convert", "-f", "raw", "x.qcow2", "y.raw"]);
    assert!(std::fs::read(scratch.path("y.raw")).unwrap() == bytes);
}

/// The ending of every format whose name it is, also of those that are only read.
#[test]
fn each_name_of_a_format_is_a_promise() {
    let scratch = Scratch::new();
    for ending in [
        "qcow2", "qcow", "qed", "vmdk", "vdi", "vhd", "vpc", "avhd", "vhdx", "avhdx", "luks",
        "dmg", "cloop", "bochs", "QCOW2",
    ] {
        let name = format!("notes.{ending}");
        scratch.write(&name, &[b'x'; 4096]);
        scratch.fails(8, "its name says that it is a", &["check", &name]);
        let inspect = scratch.run(&["inspect", &name]);
        assert_eq!(inspect.code, Some(5), "{inspect:?}");
        assert!(inspect.stdout.contains("format-mismatch"), "{inspect:?}");
        let tree = scratch.run(&["tree", "."]);
        assert!(tree.stderr.contains(&name), "{tree:?}");
        std::fs::remove_file(scratch.path(&name)).unwrap();
    }
    // Parallels' ending is used for raw disks too.
    scratch.write("a.hdd", &[b'x'; 4096]);
    scratch.ok(&["inspect", "a.hdd"]);
    scratch.ok(&["create", "base.vhdx", "4M"]);
    scratch.ok(&["create", "next.avhdx", "--backing", "base.vhdx"]);
    assert_eq!(scratch.json_of("info", 0, &["next.avhdx"])["format"], "vhdx");
}

#[test]
fn a_check_of_a_raw_disk_says_that_there_is_nothing_to_check() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.raw", "1M"]);
    let said = scratch.ok(&["check", "a.raw"]).stdout;
    assert!(said.contains("nothing to check") && !said.contains("sound"), "{said}");
}

/// `ssh badhost cat disk | vdkit convert - disk.qcow2`.
#[test]
fn an_empty_stream_replaces_no_image() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    scratch.ok(&["write", "disk.qcow2", "0", "1M", "--pattern", "1"]);
    scratch.write("empty.raw", b"");
    let before = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    for source in
        [&["convert", "-", "disk.qcow2"][..], &["convert", "-f", "raw", "-", "disk.qcow2"]]
    {
        let answer = scratch.run_with_input(source, b"");
        assert_eq!(answer.code, Some(1), "{answer:?}");
        assert!(answer.stderr.contains("standard input: is empty"), "{answer:?}");
        assert!(answer.stderr.contains("--allow-empty"), "{answer:?}");
    }
    scratch.fails(1, "is empty", &["convert", "empty.raw", "disk.qcow2"]);
    assert!(before == std::fs::read(scratch.path("disk.qcow2")).unwrap());
    let answer = scratch.run_with_input(&["convert", "--allow-empty", "-", "new.qcow2"], b"");
    assert_eq!(answer.code, Some(0), "{answer:?}");
    scratch.ok(&["convert", "--allow-empty", "empty.raw", "also.qcow2"]);
}

#[test]
fn a_stream_that_ends_within_a_sector_is_told() {
    let scratch = Scratch::new();
    let answer = scratch.run_with_input(&["convert", "-", "new.qcow2"], &[7; 1000]);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    assert!(answer.stderr.contains("ends within a sector, after 1000 bytes"), "{answer:?}");
    let answer = scratch.run_with_input(&["convert", "-", "new.qcow2"], &[7; 1024]);
    assert!(!answer.stderr.contains("sector"), "{answer:?}");
    // What was read is not more than there was.
    let answer = scratch.run_with_input(&["convert", "--json", "-", "new.qcow2"], &[7; 1024]);
    let json: serde_json::Value = serde_json::from_str(&answer.stdout).unwrap();
    assert_eq!(json["moved"]["read"], 1024, "{json}");
    // A file may be cut too, or be no disk.
    scratch.write("notes", &[7; 1000]);
    let answer = scratch.ok(&["convert", "notes", "new.qcow2"]);
    assert!(answer.stderr.contains("notes: ends within a sector, after 1000 bytes"), "{answer:?}");
}

/// What is made is what the name says, or is told.
#[test]
fn a_target_is_never_raw_under_another_formats_name() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    for name in ["x.dmg", "z.iso", "x.qed", "x.qcow", "x.hdd", "X.DMG"] {
        scratch.fails(1, "does not write", &["convert", "a.qcow2", name]);
        scratch.fails(1, "does not write", &["create", name, "1M"]);
        assert!(!scratch.path(name).exists());
    }
    for name in ["x.raw.gz", "x.qcow2.xz", "x.zst", "x.bz2", "x.tar", "x.zip", "x.ovf"] {
        for command in [&["convert", "a.qcow2", name][..], &["create", name, "1M"]] {
            let told = scratch.fails(1, "its name asks for", command).stderr;
            assert!(told.contains("hint: "), "{told}");
        }
        assert!(!scratch.path(name).exists());
    }
    let told = scratch.run(&["convert", "a.qcow2", "x.raw.gz"]).stderr;
    assert!(told.contains("-O raw - | gzip > x.raw.gz"), "{told}");
    scratch.ok(&["convert", "-O", "raw", "a.qcow2", "z.iso"]);
    let told = "is the name of no format";
    for command in [&["convert", "a.qcow2", "y.qcow2.bak"][..], &["create", "x.qcow3", "1M"]] {
        let answer = scratch.run(command);
        assert_eq!(answer.code, Some(0), "{answer:?}");
        assert!(answer.stderr.contains(told), "{answer:?}");
    }
    for name in ["disk", "disk.raw", "disk.img", "disk.bin"] {
        let answer = scratch.run(&["convert", "a.qcow2", name]);
        assert!(answer.code == Some(0) && !answer.stderr.contains(told), "{answer:?}");
    }
    let answer = scratch.run(&["convert", "-O", "raw", "a.qcow2", "y.bak"]);
    assert!(!answer.stderr.contains(told), "{answer:?}");
}

#[test]
fn a_backing_name_that_would_be_a_protocol_is_refused() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a:b.qcow2", "1M"]);
    scratch.fails(2, "./a:b.qcow2", &["create", "ov.qcow2", "-b", "a:b.qcow2"]);
    scratch.ok(&["create", "alone.qcow2", "1M"]);
    scratch.fails(2, "./a:b.qcow2", &["rebase", "alone.qcow2", "-b", "a:b.qcow2"]);
    scratch.ok(&["create", "apart.qcow2", "1M", "-o", "data_file=d.raw"]);
    scratch.fails(2, "without a colon", &["amend", "apart.qcow2", "-o", "data_file=a:d.raw"]);
    scratch.ok(&["read", "apart.qcow2", "0", "512"]);
    assert!(!scratch.path("ov.qcow2").exists());
    scratch.ok(&["create", "ov.qcow2", "-b", "./a:b.qcow2"]);
    scratch.ok(&["read", "ov.qcow2", "0", "512"]);
}

/// A disk of 200 GiB with nothing in it is verified by its holes.
#[test]
fn verifying_reads_no_holes() {
    let scratch = Scratch::new();
    std::fs::File::create(scratch.path("empty.raw")).unwrap().set_len(200 << 30).unwrap();
    scratch.ok(&["write", "-f", "raw", "empty.raw", "100G", "1M", "--pattern", "1"]);
    let output = Command::new("strace")
        .args(["-f", "-qq", "-e", "trace=pread64,preadv,preadv2,read"])
        .args([env!("CARGO_BIN_EXE_vdkit"), "convert", "--verify", "empty.raw", "again.raw"])
        .current_dir(scratch.path(""))
        .output()
        .expect("strace; `make peers` installs it");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let reads = log.lines().filter(|line| line.contains("read")).count();
    assert!(reads < 1000, "{reads} reads");
}

/// Replacing the file leaves the mount on one without a name; writing to it damages the file system.
#[test]
fn the_file_behind_a_mounted_loop_device_is_not_changed() {
    if !require_root() {
        return;
    }
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.raw", "64M"]);
    scratch.ok(&["create", "a.qcow2", "1M"]);
    peer(&scratch.path(""), "mkfs.ext4", &["-q", "disk.raw"]);
    let before = std::fs::read(scratch.path("disk.raw")).unwrap();
    let device = Loop::over(&scratch.path("disk.raw"), &[]);
    std::fs::create_dir(scratch.path("mnt")).unwrap();
    let mounted = Mounted::new(&device.0, &scratch.path("mnt"));
    let said = format!("attached to {}, which is mounted at", device.0);
    for command in [
        &["convert", "a.qcow2", "disk.raw"][..],
        &["convert", "--into", "-O", "raw", "a.qcow2", "disk.raw"],
        &["create", "--force", "disk.raw", "1M"],
        &["write", "-f", "raw", "disk.raw", "0", "4K", "--zero"],
        &["resize", "-f", "raw", "disk.raw", "128M"],
        &["dd", "-O", "raw", "if=a.qcow2", "of=disk.raw"],
        &["serve", "-f", "raw", "disk.raw", "--nbd", "unix:socket"],
    ] {
        scratch.fails(6, &said, command);
    }
    scratch.ok(&["convert", "disk.raw", "copy.qcow2"]);
    drop(mounted);
    // Nothing holds the device: its bytes may change, its file may not go.
    scratch.fails(6, &format!("attached to {}", device.0), &["convert", "a.qcow2", "disk.raw"]);
    assert!(before.len() == std::fs::read(scratch.path("disk.raw")).unwrap().len());
    scratch.ok(&["write", "-f", "raw", "disk.raw", "32M", "4K", "--pattern", "1"]);
    drop(device);
    scratch.ok(&["convert", "a.qcow2", "disk.raw"]);
}

/// A file system that is unmounted at the end.
struct Mounted(PathBuf);

impl Mounted {
    fn new(what: &str, at: &Path) -> Self {
        let status = Command::new("mount").arg(what).arg(at).status().unwrap();
        assert!(status.success(), "mount {what}");
        Self(at.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_device_with_something_on_it_is_overwritten_only_when_that_is_said() {
    let Some(device) = loop_device(320 << 20, 512) else { return };
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    let name = device.path().to_str().unwrap();
    let of_device = format!("of={name}");
    for (what, maker, arguments) in [
        ("an ext2, ext3 or ext4 file system", "mkfs.ext4", &["-q", "-F"][..]),
        ("an XFS file system", "mkfs.xfs", &["-q", "-f"]),
        ("a btrfs file system", "mkfs.btrfs", &["-q", "-f"]),
        ("swap space", "mkswap", &["-q"]),
    ] {
        peer(&scratch.path(""), maker, &[arguments, &[name]].concat());
        for command in [
            &["create", "-f", "qcow2", name, "1M"][..],
            &["convert", "a.qcow2", name],
            &["convert", "-O", "qcow2", "a.qcow2", name],
            &["convert", "-O", "raw", "--into", "a.qcow2", name],
            &["dd", "if=a.qcow2", of_device.as_str()],
        ] {
            scratch.fails(5, &format!("holds {what}"), command);
        }
        let zeroes = vec![0; 8 << 20];
        std::fs::OpenOptions::new().write(true).open(name).unwrap().write_all(&zeroes).unwrap();
    }
    scratch.ok(&["create", "-f", "qcow2", name, "1M"]);
    // An image on a device is written into as the image that it is, and as nothing else.
    scratch.fails(5, "holds a qcow2 image", &["convert", "a.qcow2", name]);
    scratch.ok(&["convert", "-O", "qcow2", "--into", "a.qcow2", name]);
    scratch.fails(5, "holds a qcow2 image", &["dd", "if=a.qcow2", &of_device]);
    scratch.ok(&["dd", "-O", "qcow2", "if=a.qcow2", &of_device]);
    scratch.ok(&["convert", "--force", "a.qcow2", name]);
    scratch.ok(&["create", "--force", "-f", "qcow2", name, "1M"]);
}

/// The clusters of the write that failed are free again, and what was written before it is there.
#[test]
fn a_write_that_finds_the_disk_full_leaves_no_clusters_allocated() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("mnt")).unwrap();
    let status = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=8M", "tmpfs"])
        .arg(scratch.path("mnt"))
        .status();
    assert!(status.unwrap().success());
    let _mounted = Mounted(scratch.path("mnt"));
    scratch.write("input", &vec![0x5a; 32 << 20]);
    for (format, written) in
        [("qcow2", "6M"), ("vmdk", "6M"), ("vdi", "6M"), ("vhdx", "5M"), ("vhd", "6M")]
    {
        let image = format!("mnt/disk.{format}");
        scratch.ok(&["create", &image, "64M"]);
        let write = ["write", &image, "0", "--input", "input"];
        let dd = ["dd", "if=input", &format!("of={image}"), "seek=32768", "bs=512"];
        let convert = ["convert", "--into", "input", &image];
        for command in [&write[..], &dd, &convert] {
            scratch.fails(7, "No space left", command);
            let said = scratch.ok(&["check", &image]).stdout;
            assert!(said.contains("sound"), "{format} {command:?}: {said}");
            let bytes = scratch.ok(&["read", &image, "0", written]).bytes;
            assert!(bytes.iter().all(|byte| *byte == 0x5a), "{format} {command:?}");
        }
        std::fs::remove_file(scratch.path(&image)).unwrap();
    }
}

#[test]
fn what_only_goes_on_is_one_line_of_a_check() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1G"]);
    scratch.ok(&["write", "a.qcow2", "0", "31M", "--pattern", "1"]);
    let mut image = std::fs::read(scratch.path("a.qcow2")).unwrap();
    let at = |image: &[u8], offset: usize| {
        u64::from_be_bytes(image[offset..offset + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00
    };
    let table = at(&image, at(&image, 40) as usize) as usize;
    image[table..table + 496 * 8].fill(0);
    std::fs::write(scratch.path("a.qcow2"), &image).unwrap();
    let said = scratch.run(&["check", "a.qcow2"]);
    assert_eq!(said.code, Some(3));
    let lines: Vec<&str> = said.stdout.lines().filter(|line| line.starts_with("leak")).collect();
    assert_eq!(lines.len(), 1, "{}", said.stdout);
    assert!(lines[0].contains("(496 of them, one every 0x10000 bytes)"), "{}", lines[0]);
    let json = scratch.json_of("check", 3, &["a.qcow2"]);
    assert_eq!(json["findings"].as_array().unwrap().len(), 496);
}

/// What a killed command leaves behind is found; what a running one writes is not.
#[test]
fn a_file_that_a_killed_command_left_is_found_by_doctor() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    let left = scratch.write(".disk.qcow2.4711-0.partial", &[1; 8192]);
    scratch.write(".other.qcow2.4711-0.partial", &[1; 8192]);
    scratch.write(".disk.qcow2.partial", b"somebody else's");
    for (path, found) in [(".", 2), ("disk.qcow2", 1)] {
        let json = scratch.json_of("doctor", 3, &[path]);
        let findings = json["findings"].as_array().unwrap();
        assert_eq!(findings.len(), found, "{json}");
        assert!(findings.iter().all(|finding| finding["code"] == "abandoned-file"), "{json}");
        assert_eq!(json["images"].as_array().unwrap().len(), 1, "{json}");
    }
    let said = scratch.run(&["doctor", "disk.qcow2"]).stdout;
    assert!(
        said.contains("rm .disk.qcow2.4711-0.partial") || said.contains("rm ./.disk.qcow2"),
        "{said}"
    );
    let options = vdkit::storage::FileOptions::read_write();
    let held = vdkit::storage::FileStorage::open(&left, &options).unwrap();
    scratch.ok(&["doctor", "disk.qcow2"]);
    drop(held);
}

#[test]
fn snapshots_and_bitmaps_that_are_not_converted_are_told() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    scratch.ok(&["snapshot", "create", "a.qcow2", "before"]);
    scratch.ok(&["bitmap", "add", "a.qcow2", "monday"]);
    let answer = scratch.ok(&["convert", "a.qcow2", "b.qcow2"]);
    assert!(answer.stderr.contains("not converted (before)"), "{answer:?}");
    assert!(answer.stderr.contains("--snapshot NAME"), "{answer:?}");
    assert!(answer.stderr.contains("not copied (monday)"), "{answer:?}");
    assert!(answer.stderr.contains("--bitmaps"), "{answer:?}");
    let json = scratch.json_of("convert", 0, &["a.qcow2", "b.raw"]);
    assert_eq!(json["left-behind"]["snapshots"][0], "before");
    assert_eq!(json["left-behind"]["bitmaps"][0], "monday");
    let answer = scratch.ok(&["convert", "--bitmaps", "a.qcow2", "c.qcow2"]);
    assert!(!answer.stderr.contains("monday"), "{answer:?}");
    let json = scratch.json_of("convert", 0, &["--bitmaps", "a.qcow2", "c.qcow2"]);
    assert!(json["left-behind"]["bitmaps"].as_array().unwrap().is_empty(), "{json}");
    for quiet in [
        &["convert", "--snapshot", "before", "a.qcow2", "d.raw"][..],
        &["convert", "a.qcow2", "null:"],
    ] {
        assert_eq!(scratch.ok(quiet).stderr, "", "{quiet:?}");
    }
}
