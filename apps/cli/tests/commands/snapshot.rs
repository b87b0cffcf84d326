//! `vdkit snapshot`, and `--snapshot` of other commands.

use crate::common::{self, Scratch, peer};

/// An image with 2 MiB of ones, and a snapshot `first` of that; then 1 MiB of twos in front.
fn image(scratch: &Scratch, name: &str, options: &[&str]) {
    scratch.ok(&[&["create", name, "4M"], options].concat());
    scratch.ok(&["write", name, "0", "2M", "--pattern", "1"]);
    scratch.ok(&["snapshot", "create", name, "first"]);
    scratch.ok(&["write", name, "0", "1M", "--pattern", "2"]);
}

fn names(scratch: &Scratch, name: &str) -> Vec<(String, String)> {
    let json = scratch.json_of("snapshot", 0, &["list", name]);
    let rows = json["snapshots"].as_array().unwrap().iter();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    rows.map(|row| (text(&row["id"]), text(&row["name"]))).collect()
}

#[test]
fn the_life_of_a_snapshot() {
    let scratch = Scratch::new();
    for options in [&[][..], &["-o", "compat=0.10"], &["-o", "cluster_size=16K,extended_l2=on"]] {
        let _ = std::fs::remove_file(scratch.path("a.qcow2"));
        image(&scratch, "a.qcow2", options);
        scratch.sound("a.qcow2");
        let listed = scratch.ok(&["snapshot", "list", "a.qcow2"]).stdout;
        assert!(listed.contains("first") && listed.contains("4 MiB"), "{listed}");
        let made = scratch.json_of("snapshot", 0, &["create", "a.qcow2", "second"]);
        assert_eq!((&made["action"], &made["snapshots"][0]["id"]), (&"create".into(), &"2".into()));
        assert!(made["snapshots"][0]["date-seconds"].as_u64() > Some(1_700_000_000), "{made}");

        scratch.json_of("snapshot", 0, &["apply", "a.qcow2", "1"]);
        scratch.sound("a.qcow2");
        assert!(scratch.ok(&["read", "a.qcow2", "0", "2M"]).bytes == vec![1; 2 << 20]);
        scratch.ok(&["snapshot", "apply", "a.qcow2", "second"]);
        assert_eq!(scratch.ok(&["read", "a.qcow2", "1048575", "2"]).bytes, [2, 1]);

        scratch.ok(&["snapshot", "rename", "a.qcow2", "2", "the second"]);
        let row = |id: &str, name: &str| (id.to_owned(), name.to_owned());
        assert_eq!(names(&scratch, "a.qcow2"), [row("1", "first"), row("2", "the second")]);
        scratch.json_of("snapshot", 0, &["delete", "a.qcow2", "the second"]);
        scratch.ok(&["snapshot", "delete", "a.qcow2", "1"]);
        assert_eq!(names(&scratch, "a.qcow2"), []);
        scratch.sound("a.qcow2");
        assert_eq!(scratch.ok(&["read", "a.qcow2", "1048575", "2"]).bytes, [2, 1]);
    }
}

#[test]
fn qemu_lists_and_applies_them() {
    let scratch = Scratch::new();
    image(&scratch, "a.qcow2", &[]);
    let folder = scratch.path("");
    let listed = peer(&folder, "qemu-img", &["snapshot", "-l", "a.qcow2"]).stdout;
    assert!(String::from_utf8_lossy(&listed).contains("first"));
    peer(&folder, "qemu-img", &["snapshot", "-a", "first", "a.qcow2"]);
    assert!(scratch.ok(&["read", "a.qcow2", "0", "2M"]).bytes == vec![1; 2 << 20]);
    peer(&folder, "qemu-img", &["snapshot", "-c", "theirs", "a.qcow2"]);
    assert_eq!(names(&scratch, "a.qcow2")[1], ("2".to_owned(), "theirs".to_owned()));
    scratch.ok(&["snapshot", "delete", "a.qcow2", "theirs"]);
    scratch.sound("a.qcow2");
}

#[test]
fn a_deleted_snapshot_gives_its_space_back() {
    let scratch = Scratch::new();
    image(&scratch, "a.qcow2", &[]);
    let occupied = || scratch.json_of("info", 0, &["a.qcow2"])["actual-size"].as_u64().unwrap();
    let before = occupied();
    scratch.ok(&["snapshot", "delete", "a.qcow2", "first"]);
    assert!(occupied() + (1 << 20) <= before, "{before} {}", occupied());
    scratch.sound("a.qcow2");
}

#[test]
fn other_commands_read_a_snapshot() {
    let scratch = Scratch::new();
    image(&scratch, "a.qcow2", &[]);
    scratch.ok(&["resize", "a.qcow2", "+1M"]);
    assert_eq!(scratch.ok(&["read", "a.qcow2", "0", "2", "--snapshot", "first"]).bytes, [1, 1]);
    scratch.ok(&["convert", "--snapshot", "first", "a.qcow2", "old.raw"]);
    assert_eq!(scratch.path("old.raw").metadata().unwrap().len(), 4 << 20, "the size of then");
    scratch.ok(&["compare", "--strict", "--snapshot", "1", "a.qcow2", "old.raw"]);
    scratch.ok(&["compare", "--strict", "--snapshot-b", "first", "old.raw", "a.qcow2"]);
    assert_eq!(scratch.run(&["compare", "a.qcow2", "old.raw"]).code, Some(3));
    scratch.ok(&["dd", "-l", "first", "if=a.qcow2", "of=part.raw", "bs=64K", "count=1"]);
    assert!(std::fs::read(scratch.path("part.raw")).unwrap() == vec![1; 64 << 10]);
    let rows = |arguments: &[&str]| scratch.json_of("map", 0, arguments);
    let (old, new) = (rows(&["--snapshot", "first", "a.qcow2"]), rows(&["a.qcow2"]));
    assert_ne!(old[0]["offset"], new[0]["offset"]);
    let old_bytes = std::fs::read(scratch.path("a.qcow2")).unwrap();
    assert_eq!(old_bytes[old[0]["offset"].as_u64().unwrap() as usize], 1);
    for command in [
        &["convert", "-l", "no", "a.qcow2", "x.raw"][..],
        &["read", "a.qcow2", "0", "1", "--snapshot", "no"],
        &["map", "--snapshot", "no", "a.qcow2"],
        &["compare", "--snapshot", "no", "a.qcow2", "a.qcow2"],
        &["dd", "-l", "no", "if=a.qcow2", "of=x.raw"],
    ] {
        scratch.fails(2, "'no'", command);
    }
    assert!(!scratch.path("x.raw").exists());
    scratch.fails(2, "one source", &["convert", "-l", "1", "a.qcow2", "a.qcow2", "x.raw"]);
}

#[test]
fn two_of_one_name_are_told_apart_by_id() {
    let scratch = Scratch::new();
    image(&scratch, "a.qcow2", &[]);
    let answer = scratch.ok(&["snapshot", "create", "a.qcow2", "first"]);
    assert!(answer.stderr.contains("another snapshot is called 'first'"), "{answer:?}");
    let json = scratch.json_of("snapshot", 0, &["delete", "a.qcow2", "first"]);
    assert_eq!(json["snapshots"][0]["id"], "1");
    scratch.ok(&["snapshot", "apply", "a.qcow2", "2"]);
    assert_eq!(scratch.ok(&["read", "a.qcow2", "0", "1"]).bytes, [2]);
}

#[test]
fn an_overlay_keeps_what_it_holds_itself() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "4M"]);
    scratch.ok(&["write", "base.qcow2", "0", "4M", "--pattern", "9"]);
    scratch.ok(&["create", "a.qcow2", "--backing", "base.qcow2"]);
    scratch.ok(&["write", "a.qcow2", "0", "64K", "--pattern", "1"]);
    scratch.ok(&["snapshot", "create", "a.qcow2", "s"]);
    scratch.ok(&["write", "a.qcow2", "0", "4M", "--pattern", "2"]);
    let old = scratch.ok(&["read", "a.qcow2", "65535", "2", "--snapshot", "s"]).bytes;
    assert_eq!(old, [1, 9], "what lies beneath shows through");
    scratch.ok(&["snapshot", "apply", "a.qcow2", "s"]);
    assert_eq!(scratch.ok(&["read", "a.qcow2", "65535", "2"]).bytes, [1, 9]);
    scratch.sound("a.qcow2");
}

#[test]
fn what_cannot_be_is_refused() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.raw", "1M"]);
    scratch.fails(1, "raw", &["snapshot", "list", "a.raw"]);
    scratch.ok(&["create", "narrow.qcow2", "1M", "-o", "refcount_bits=1"]);
    scratch.ok(&["write", "narrow.qcow2", "0", "1M", "--pattern", "3"]);
    let before = std::fs::read(scratch.path("narrow.qcow2")).unwrap();
    scratch.fails(1, "1 bits", &["snapshot", "create", "narrow.qcow2", "s"]);
    assert!(std::fs::read(scratch.path("narrow.qcow2")).unwrap() == before, "nothing changed");
    scratch.ok(&["create", "split.qcow2", "1M", "-o", "data_file=split.data"]);
    scratch.fails(1, "data file", &["snapshot", "create", "split.qcow2", "s"]);
    scratch.ok(&["create", "a.qcow2", "1M"]);
    for arguments in [
        &["create", "a.qcow2"][..],
        &["list", "a.qcow2", "x"],
        &["rename", "a.qcow2", "x"],
        &["apply", "a.qcow2", "x", "y"],
    ] {
        scratch.fails(2, "snapshot", &[&["snapshot"], arguments].concat());
    }
    scratch.fails(2, "-U", &["snapshot", "create", "-U", "a.qcow2", "s"]);
    scratch.fails(2, "255", &["snapshot", "create", "a.qcow2", &"x".repeat(256)]);
    scratch.fails(2, "none", &["snapshot", "delete", "a.qcow2", "s"]);
    scratch.fails(1, "no-such", &["snapshot", "list", "no-such"]);
    scratch.write("bad.qcow2", b"QFI\xfb\0\0\0\x03 and then nothing that makes sense at all");
    scratch.fails(4, "bad.qcow2", &["snapshot", "create", "bad.qcow2", "s"]);
    let _writer = common::Writer::start(&scratch.path(""), "a.qcow2");
    scratch.fails(6, "a.qcow2", &["snapshot", "create", "a.qcow2", "s"]);
    scratch.ok(&["snapshot", "list", "-U", "a.qcow2"]);
}

/// QEMU leaves the marks as they are; a backup made by them would then miss what went back.
#[test]
fn bitmaps_know_of_an_applied_snapshot() {
    let scratch = Scratch::new();
    // With clusters of 512 bytes a larger disk needs larger tables of bitmaps.
    for options in ["cluster_size=64K", "cluster_size=512"] {
        let _ = std::fs::remove_file(scratch.path("a.qcow2"));
        image(&scratch, "a.qcow2", &["-o", options]);
        scratch.ok(&["bitmap", "add", "a.qcow2", "b", "-g", "512"]);
        scratch.ok(&["write", "a.qcow2", "3M", "64K", "--pattern", "3"]);
        let dirty = || -> (serde_json::Value, serde_json::Value) {
            let list = scratch.json_of("bitmap", 0, &["list", "a.qcow2"]);
            (list["bitmaps"][0]["dirty-bytes"].clone(), list["bitmaps"][0]["in-use"].clone())
        };
        for change in [
            &["create", "a.qcow2", "second"][..],
            &["rename", "a.qcow2", "second", "two"],
            &["delete", "a.qcow2", "two"],
        ] {
            scratch.ok(&[&["snapshot"], change].concat());
            assert_eq!(dirty(), ((64 << 10).into(), false.into()), "{change:?}");
        }
        scratch.ok(&["resize", "a.qcow2", "9M"]);
        scratch.ok(&["bitmap", "clear", "a.qcow2", "b"]);
        scratch.ok(&["snapshot", "apply", "a.qcow2", "first"]);
        assert_eq!(dirty(), ((4 << 20).into(), false.into()), "{options}");
        scratch.sound("a.qcow2");
        let theirs = peer(&scratch.path(""), "qemu-img", &["info", "a.qcow2"]).stdout;
        let theirs = String::from_utf8_lossy(&theirs).into_owned();
        assert!(theirs.contains("auto") && !theirs.contains("in-use"), "{theirs}");
    }
}

#[test]
fn a_base_of_overlays_does_not_go_back_unasked() {
    let scratch = Scratch::new();
    image(&scratch, "a.qcow2", &[]);
    scratch.ok(&["create", "over.qcow2", "--backing", "a.qcow2"]);
    scratch.fails(5, "over.qcow2", &["snapshot", "apply", "a.qcow2", "first"]);
    scratch.ok(&["snapshot", "create", "a.qcow2", "harmless"]);
    scratch.ok(&["snapshot", "apply", "--force", "a.qcow2", "first"]);
}
