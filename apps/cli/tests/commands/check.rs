//! `vdkit check`.

use crate::common::{self, Scratch, peer};

/// A qcow2 image with one leaked cluster at the end, made by raising a refcount.
fn leaking(scratch: &Scratch) {
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    scratch.ok(&["write", "disk.qcow2", "0", "64K", "--pattern", "1"]);
    let mut bytes = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    let field = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let table = field(48) as usize;
    let block = field(table) as usize;
    let clusters = bytes.len() / 65536;
    bytes.resize((clusters + 1) * 65536, 0);
    bytes[block + clusters * 2 + 1] = 1;
    scratch.write("disk.qcow2", &bytes);
}

/// Points the first L2 entry past the end of the image.
fn corrupt(scratch: &Scratch) {
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    scratch.ok(&["write", "disk.qcow2", "0", "128K", "--pattern", "1"]);
    let mut bytes = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    let field = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = field(&bytes, 40) as usize;
    let l2 = (field(&bytes, l1) & 0x00ff_ffff_ffff_fe00) as usize;
    bytes[l2..l2 + 8].copy_from_slice(&((1u64 << 63) | (1 << 40)).to_be_bytes());
    scratch.write("disk.qcow2", &bytes);
}

#[test]
fn a_sound_image() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    assert!(scratch.ok(&["check", "disk.qcow2"]).stdout.starts_with("sound"));
    let json = scratch.json_of("check", 0, &["disk.qcow2"]);
    assert_eq!((&json["leaks"], &json["corruptions"]), (&0.into(), &0.into()));
    scratch.write("disk.raw", &[1; 512]);
    scratch.ok(&["check", "disk.raw"]);
}

#[test]
fn leaks_are_told_and_given_back() {
    let scratch = Scratch::new();
    leaking(&scratch);
    let json = scratch.json_of("check", 3, &["disk.qcow2"]);
    assert_eq!((&json["leaks"], &json["corruptions"]), (&1.into(), &0.into()));
    let answer = scratch.run(&["check", "disk.qcow2"]);
    assert_eq!(answer.code, Some(3), "{answer:?}");
    assert!(answer.stdout.contains("leak: "), "{answer:?}");
    assert!(answer.stderr.contains("hint: 'vdkit check --repair leaks disk.qcow2'"), "{answer:?}");
    let json = scratch.json_of("check", 0, &["--repair", "leaks", "disk.qcow2"]);
    assert_eq!((&json["leaks"], &json["leaks-fixed"]), (&0.into(), &1.into()));
    scratch.ok(&["check", "disk.qcow2"]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "disk.qcow2"]);
}

#[test]
fn corruption_is_told_and_mended() {
    let scratch = Scratch::new();
    corrupt(&scratch);
    let json = scratch.json_of("check", 4, &["disk.qcow2"]);
    assert!(json["corruptions"].as_u64() >= Some(1), "{json}");
    let answer = scratch.run(&["check", "disk.qcow2"]);
    assert!(answer.stderr.contains("--repair all disk.qcow2"), "{answer:?}");
    assert_eq!(scratch.run(&["check", "--repair", "leaks", "disk.qcow2"]).code, Some(4));
    let json = scratch.json_of("check", 0, &["--repair", "all", "disk.qcow2"]);
    assert!(json["corruptions-fixed"].as_u64() >= Some(1), "{json}");
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "disk.qcow2"]);
}

#[test]
fn lost_tables_are_given_free_by_force_only() {
    use std::os::unix::fs::FileExt;
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    scratch.ok(&["write", "disk.qcow2", "0", "1M", "--pattern", "7"]);
    let bytes = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap());
    let file = std::fs::File::options().write(true).open(scratch.path("disk.qcow2")).unwrap();
    file.write_all_at(&[0xc0], l1).unwrap();
    file.write_all_at(&[0x7f], l1 + 2).unwrap();
    let answer = scratch.fails(4, "L2 tables", &["check", "--repair", "all", "disk.qcow2"]);
    assert!(answer.stderr.contains("--repair all --force disk.qcow2"), "{answer:?}");
    scratch.fails(2, "--repair", &["check", "--force", "disk.qcow2"]);
    scratch.fails(2, "--repair all", &["check", "--repair", "leaks", "--force", "disk.qcow2"]);
    scratch.ok(&["check", "--repair", "all", "--force", "disk.qcow2"]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "disk.qcow2"]);
    assert!(scratch.ok(&["read", "disk.qcow2", "0"]).bytes == vec![0; 1 << 20]);
}

#[test]
fn what_a_wiped_table_led_to_is_kept_and_named() {
    use std::os::unix::fs::FileExt;
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    scratch.ok(&["write", "disk.qcow2", "0", "1M", "--pattern", "7"]);
    let bytes = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap());
    let entry = &bytes[l1 as usize..][..8];
    let table = u64::from_be_bytes(entry.try_into().unwrap()) << 1 >> 1;
    let file = std::fs::File::options().write(true).open(scratch.path("disk.qcow2")).unwrap();
    file.write_all_at(&[0; 8], l1).unwrap();
    for repair in ["leaks", "all"] {
        let answer = scratch.run(&["check", "--repair", repair, "disk.qcow2"]);
        assert_eq!(answer.code, Some(3), "{answer:?}");
        let named = format!("leak: L2 table at offset {table:#x}");
        assert!(answer.stdout.contains(&named), "{answer:?}");
        assert!(answer.stdout.contains("17 of them were kept"), "{answer:?}");
        assert!(answer.stderr.contains("check --repair all --force disk.qcow2"), "{answer:?}");
        let json = scratch.json_of("check", 3, &["--repair", repair, "disk.qcow2"]);
        assert_eq!((&json["leaks"], &json["leaks-kept"]), (&17.into(), &17.into()));
    }
    let answer = scratch.fails(4, "L2 table", &["compact", "disk.qcow2"]);
    assert!(answer.stderr.contains("--repair all --force disk.qcow2"), "{answer:?}");
    file.write_all_at(entry, l1).unwrap();
    scratch.ok(&["check", "disk.qcow2"]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "disk.qcow2"]);
    assert!(scratch.ok(&["read", "disk.qcow2", "0"]).bytes == vec![7; 1 << 20]);
    file.write_all_at(&[0; 8], l1).unwrap();
    scratch.ok(&["check", "--repair", "all", "--force", "disk.qcow2"]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "disk.qcow2"]);
}

#[test]
fn an_image_that_is_hardly_one() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    let bytes = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    scratch.write("cut.qcow2", &bytes[..100]);
    scratch.fails(4, "cut.qcow2", &["check", "cut.qcow2"]);
    scratch.write("empty.qcow2", b"");
    scratch.fails(4, "empty.qcow2", &["check", "-f", "qcow2", "empty.qcow2"]);
    scratch.fails(1, "no-such.qcow2", &["check", "no-such.qcow2"]);
    // Clusters of its refcount table.
    let mut bytes = bytes;
    bytes[56..60].fill(0xff);
    scratch.write("large.qcow2", &bytes);
    let answer = scratch.fails(8, "more than the limit", &["check", "large.qcow2"]);
    assert!(answer.stderr.contains("cannot be checked"), "{answer:?}");
}

#[test]
fn an_image_in_use_is_refused() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    let writer = common::Writer::start(&scratch.path(""), "disk.qcow2");
    scratch.fails(6, &writer.pid().to_string(), &["check", "disk.qcow2"]);
    scratch.fails(6, "in use", &["check", "--repair", "all", "disk.qcow2"]);
    scratch.fails(2, "repaired", &["check", "-U", "--repair", "all", "disk.qcow2"]);
    scratch.ok(&["check", "--force-share", "disk.qcow2"]);
}

#[test]
fn what_it_stands_on_is_not_opened() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M", "-u", "-b", "/etc/no-such", "-F", "raw"]);
    scratch.ok(&["check", "--no-refs", "disk.qcow2"]);
}
