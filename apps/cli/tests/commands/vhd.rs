//! VHD images on a parent: the time of the parent's file.

use std::fs::File;
use std::time::{Duration, SystemTime};

use crate::common::Scratch;

/// Seconds from 1970 to 2000, where the format's time stamps begin.
const EPOCH: u64 = 946_684_800;
/// Where the dynamic header of our images begins, and where the stamp and the sum are in it.
const HEADER: usize = 512;
const PARENT_TIME: usize = HEADER + 56;
const SUM: usize = HEADER + 36;

fn touch(scratch: &Scratch, name: &str, stamp: u32) {
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(EPOCH + u64::from(stamp));
    // Half a second is not in the header.
    let time = time + Duration::from_millis(500);
    File::options().write(true).open(scratch.path(name)).unwrap().set_modified(time).unwrap();
}

fn stamp_of_file(scratch: &Scratch, name: &str) -> u32 {
    let time = std::fs::metadata(scratch.path(name)).unwrap().modified().unwrap();
    (time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() - EPOCH) as u32
}

fn word(scratch: &Scratch, name: &str, at: usize) -> u32 {
    let bytes = std::fs::read(scratch.path(name)).unwrap();
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// The complement of the sum of the header's other bytes.
fn sum(scratch: &Scratch, name: &str) -> u32 {
    let mut header = std::fs::read(scratch.path(name)).unwrap()[HEADER..HEADER + 1024].to_vec();
    header[SUM - HEADER..SUM - HEADER + 4].fill(0);
    !header.iter().map(|byte| u32::from(*byte)).sum::<u32>()
}

fn with_base() -> Scratch {
    let scratch = Scratch::new();
    scratch.ok(&["create", "-f", "vpc", "-o", "force_size=on", "base.vhd", "8M"]);
    scratch.ok(&["write", "base.vhd", "0", "3M", "--pattern", "5"]);
    touch(&scratch, "base.vhd", 0x2bad_cafe);
    scratch
}

#[test]
fn a_child_notes_when_its_parent_was_changed() {
    let scratch = with_base();
    scratch.ok(&["create", "-f", "vpc", "--backing", "base.vhd", "child.vhd"]);
    scratch.ok(&["convert", "-O", "vpc", "--backing", "base.vhd", "child.vhd", "converted.vhd"]);
    for child in ["child.vhd", "converted.vhd"] {
        let header = &std::fs::read(scratch.path(child)).unwrap()[HEADER..];
        assert_eq!(header[56..60], [0x2b, 0xad, 0xca, 0xfe], "{child}");
        assert_eq!(word(&scratch, child, SUM), sum(&scratch, child), "{child}");
        let answer = scratch.ok(&["check", child]);
        assert!(!answer.stdout.contains("warning"), "{answer:?}");
        assert_eq!(scratch.ok(&["info", "--chain", child]).stderr, "");
    }
    // What stands on nothing notes nothing.
    assert_eq!(word(&scratch, "base.vhd", PARENT_TIME), 0);
}

#[test]
fn another_time_is_told_and_noted_anew() {
    let scratch = with_base();
    scratch.ok(&["create", "-f", "vpc", "--backing", "base.vhd", "child.vhd"]);
    touch(&scratch, "base.vhd", 0x2bad_cb00);
    let shown = scratch.ok(&["check", "child.vhd"]).stdout;
    let words = "warning: dynamic header at offset 0x238: Parent Time Stamp is 1679494782";
    assert!(shown.contains(words) && shown.contains("expected 1679494784"), "{shown}");
    assert!(shown.contains("base.vhd") && shown.contains("\nsound: "), "{shown}");
    let json = scratch.json_of("check", 0, &["child.vhd"]);
    assert_eq!((&json["leaks"], &json["corruptions"]), (&0.into(), &0.into()));
    assert_eq!(json["findings"][0]["severity"], "warning");
    assert_eq!(json["findings"][0]["offset"], PARENT_TIME);
    let told = scratch.ok(&["info", "--chain", "child.vhd"]).stderr;
    assert!(told.starts_with("warning: child.vhd: Parent Time Stamp"), "{told}");
    // Neither opens the parent where that is not wanted.
    assert_eq!(scratch.ok(&["info", "child.vhd"]).stderr, "");
    assert!(!scratch.ok(&["check", "--no-refs", "child.vhd"]).stdout.contains("warning"));
    // It is no error, for a repair too, which leaves it: the parent may be another disk by now.
    assert_eq!(scratch.ok(&["read", "child.vhd", "0", "1"]).bytes, [5]);
    assert!(scratch.ok(&["check", "--repair", "all", "child.vhd"]).stdout.contains("warning"));
    assert_eq!(word(&scratch, "child.vhd", PARENT_TIME), 0x2bad_cafe);

    let before = std::fs::read(scratch.path("child.vhd")).unwrap();
    scratch.ok(&["rebase", "--unsafe", "--backing", "./base.vhd", "child.vhd"]);
    assert_eq!(word(&scratch, "child.vhd", PARENT_TIME), 0x2bad_cb00);
    assert_eq!(word(&scratch, "child.vhd", SUM), sum(&scratch, "child.vhd"));
    assert!(!scratch.ok(&["check", "child.vhd"]).stdout.contains("warning"));
    let after = std::fs::read(scratch.path("child.vhd")).unwrap();
    let changed = (0..after.len()).filter(|at| before[*at] != after[*at]);
    let fields = [SUM..SUM + 4, PARENT_TIME..PARENT_TIME + 4];
    assert!(changed.into_iter().all(|at| fields.iter().any(|field| field.contains(&at))));
}

#[test]
fn another_parent_is_refused_and_nothing_written() {
    let scratch = with_base();
    scratch.ok(&["create", "-f", "vpc", "--backing", "base.vhd", "child.vhd"]);
    scratch.ok(&["create", "-f", "vpc", "-o", "force_size=on", "other.vhd", "8M"]);
    std::fs::copy(scratch.path("base.vhd"), scratch.path("copy.vhd")).unwrap();
    let before = std::fs::read(scratch.path("child.vhd")).unwrap();
    for backing in [&["--backing", "other.vhd"][..], &["--backing", "copy.vhd"], &["--no-backing"]]
    {
        let arguments = [&["rebase", "--unsafe"], backing, &["child.vhd"]].concat();
        scratch.fails(1, "another parent, or on none, in place", &arguments);
    }
    let arguments = ["rebase", "--unsafe", "--backing", "base.vhd", "other.vhd"];
    scratch.fails(1, "another parent, or on none, in place", &arguments);
    assert_eq!(std::fs::read(scratch.path("child.vhd")).unwrap(), before);
}

#[test]
fn a_commit_notes_the_time_anew() {
    let scratch = with_base();
    scratch.ok(&["create", "-f", "vpc", "--backing", "base.vhd", "child.vhd"]);
    scratch.ok(&["write", "child.vhd", "1M", "4K", "--pattern", "9"]);
    scratch.ok(&["commit", "--keep", "child.vhd"]);
    let now = stamp_of_file(&scratch, "base.vhd");
    assert_ne!(now, 0x2bad_cafe);
    assert_eq!(word(&scratch, "child.vhd", PARENT_TIME), now);
    assert_eq!(word(&scratch, "child.vhd", SUM), sum(&scratch, "child.vhd"));
    assert_eq!(scratch.ok(&["read", "child.vhd", "1M", "1"]).bytes, [9]);
    assert!(!scratch.ok(&["check", "child.vhd"]).stdout.contains("warning"));
}

/// The guest of a fixed image writes the start of the file. It must not choose a format that names a
/// file of the host.
#[test]
fn the_guest_of_a_fixed_image_does_not_choose_its_format() {
    let scratch = Scratch::new();
    std::fs::write(scratch.path("secret"), [7; 1 << 20]).unwrap();
    scratch.ok(&["create", "-f", "qcow2", "--backing", "secret", "-F", "raw", "o.qcow2"]);
    let header = std::fs::read(scratch.path("o.qcow2")).unwrap();
    for name in ["disk.vhd", "disk.img", "disk"] {
        let options = "subformat=fixed,force_size=on";
        scratch.ok(&["create", "-f", "vpc", "-o", options, name, "4M"]);
        let file = File::options().write(true).open(scratch.path(name)).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &header, 0).unwrap();
        scratch.fails(1, "it looks like qcow2 and vpc at once", &["info", name]);
        let answer = scratch.ok(&["info", "-f", "vpc", name]);
        assert!(answer.stdout.contains("vpc") && !answer.stdout.contains("secret"), "{answer:?}");
    }
}
