//! `vdkit resize`.

use crate::common::{self, Scratch, peer};

#[test]
fn sizes_absolute_and_relative() {
    let scratch = Scratch::new();
    for (name, arguments) in [("a.qcow2", &[][..]), ("a.raw", &["-f", "raw"])] {
        scratch.ok(&["create", name, "4M"]);
        scratch.ok(&[
            "write",
            name,
            "0",
            "4M",
            "--pattern",
            "8",
            arguments.first().unwrap_or(&"-f"),
            arguments.get(1).unwrap_or(&"qcow2"),
        ]);
        for (size, bytes) in [("6M", 6 << 20), ("+1M", 7 << 20)] {
            let json = scratch.json_of("resize", 0, &[arguments, &[name, size]].concat());
            assert_eq!(json["virtual-size"], bytes, "{name} {size}");
        }
        assert_eq!(scratch.ok(&["read", name, "4194303", "2"]).bytes, [8, 0]);
        let json = scratch.json_of("resize", 0, &[arguments, &["--shrink", name, "-5M"]].concat());
        assert_eq!(
            (&json["old-size"], &json["virtual-size"]),
            (&(7 << 20).into(), &(2 << 20).into())
        );
        assert!(scratch.ok(&["read", name, "0"]).bytes == vec![8; 2 << 20]);
    }
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "a.qcow2"]);
}

#[test]
fn shrinking_must_be_meant() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "4M"]);
    let answer = scratch.fails(2, "less than", &["resize", "a.qcow2", "1M"]);
    assert!(answer.stderr.contains("--shrink"), "{answer:?}");
    assert_eq!(scratch.json_of("info", 0, &["a.qcow2"])["virtual-size"], 4 << 20);
    scratch.fails(2, "by that much", &["resize", "--shrink", "a.qcow2", "-5M"]);
}

#[test]
fn the_new_part_gets_its_space() {
    let scratch = Scratch::new();
    for mode in ["metadata", "falloc", "full"] {
        for (name, format) in [("a.qcow2", "qcow2"), ("a.raw", "raw")] {
            scratch.ok(&["create", "--force", name, "1M"]);
            let before = scratch.json_of("info", 0, &[name])["actual-size"].as_u64().unwrap();
            scratch.ok(&["resize", "-f", format, name, "+3M", "--preallocation", mode]);
            let after = scratch.json_of("info", 0, &[name])["actual-size"].as_u64().unwrap();
            assert_eq!(
                after - before >= 3 << 20,
                mode != "metadata",
                "{mode} {name}: {before} {after}"
            );
            assert!(scratch.ok(&["read", name, "0"]).bytes == vec![0; 4 << 20], "{mode} {name}");
        }
        peer(&scratch.path(""), "qemu-img", &["check", "-q", "a.qcow2"]);
        let output = peer(&scratch.path(""), "qemu-img", &["map", "--output", "json", "a.qcow2"]);
        let map: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let placed = map.as_array().unwrap().iter().filter(|row| row["offset"].is_u64());
        let bytes: u64 = placed.map(|row| row["length"].as_u64().unwrap()).sum();
        assert_eq!(bytes, 3 << 20, "{mode}: {map}");
    }
    scratch.fails(2, "grows", &["resize", "a.qcow2", "4M", "--preallocation", "full"]);
    scratch.fails(2, "preallocation", &["resize", "a.qcow2", "5M", "--preallocation", "some"]);
}

#[test]
fn a_longer_backing_image_does_not_shine_through() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "4M"]);
    scratch.ok(&["write", "base.qcow2", "0", "4M", "--pattern", "1"]);
    scratch.ok(&["create", "top.qcow2", "1M", "--backing", "base.qcow2"]);
    for mode in ["off", "full"] {
        scratch.ok(&["resize", "top.qcow2", "+1M", "--preallocation", mode]);
    }
    let bytes = scratch.ok(&["read", "top.qcow2", "0"]).bytes;
    assert!(bytes == [vec![1; 1 << 20], vec![0; 2 << 20]].concat());
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "top.qcow2"]);
}

#[test]
fn no_space_leaves_the_old_size() {
    let Some(small) = vdkit_testkit::fs::mounted("tmpfs", 2 << 20) else { return };
    let scratch = Scratch::new();
    for (name, format) in [("a.raw", "raw"), ("a.qcow2", "qcow2")] {
        let image = small.path().join(name);
        let image = image.to_str().unwrap();
        scratch.ok(&["create", image, "512K"]);
        let grow = ["resize", "-f", format, image, "8M", "--preallocation"];
        for mode in ["falloc", "full"] {
            scratch.fails(7, name, &[&grow[..], &[mode]].concat());
            assert_eq!(scratch.json_of("info", 0, &[image])["virtual-size"], 512 << 10);
            scratch.ok(&["check", image]);
        }
        std::fs::remove_file(image).unwrap();
    }
}

/// The one writable format that keeps its size, offline and live, in one file and in several: nothing of
/// it changes, and the answer says what to do.
#[test]
fn a_vmdk_that_cannot_have_another_size_says_what_to_do_and_stays_as_it_is() {
    for kind in ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"]
    {
        let scratch = Scratch::new();
        scratch.ok(&["create", "a.vmdk", "4M", "-o", &format!("subformat={kind}")]);
        scratch.ok(&["write", "a.vmdk", "0", "1M", "--pattern", "7"]);
        let files = || {
            let folder = std::fs::read_dir(scratch.path("")).unwrap();
            let mut files: Vec<_> = folder
                .map(|entry| entry.unwrap().path())
                .map(|path| (std::fs::read(&path).unwrap(), path))
                .collect();
            files.sort_by(|a, b| a.1.cmp(&b.1));
            files
        };
        let before = files();
        for arguments in [&["resize", "a.vmdk", "8M"][..], &["resize", "--shrink", "a.vmdk", "2M"]]
        {
            let told = scratch.fails(1, "changing the size of a VMDK", arguments).stderr;
            assert!(told.contains("convert it"), "{told}");
            assert!(files() == before, "{kind}: {arguments:?}");
        }
    }
}

#[test]
fn sizes_beyond_a_format_are_the_callers_mistake() {
    let scratch = Scratch::new();
    for format in ["qcow2", "vhdx", "vpc", "vdi"] {
        scratch.ok(&["create", "-f", format, format, "8M"]);
        let before = scratch.json_of("info", 0, &["-f", format, format]);
        scratch.fails(2, "more than", &["resize", "-f", format, format, "7E"]);
        assert_eq!(scratch.json_of("info", 0, &["-f", format, format]), before);
    }
}

#[test]
fn hostile_input_is_a_clear_error() {
    let scratch = Scratch::new();
    scratch.fails(1, "no-such", &["resize", "no-such", "1M"]);
    scratch.write("a.raw", &[0; 512]);
    scratch.fails(2, "format was not detected", &["resize", "a.raw", "1M"]);
    scratch.fails(2, "not a size", &["resize", "a.raw", "1Z"]);
    scratch.ok(&["create", "a.qcow2", "1M"]);
    let _writer = common::Writer::start(&scratch.path(""), "a.qcow2");
    scratch.fails(6, "in use", &["resize", "a.qcow2", "2M"]);
}
