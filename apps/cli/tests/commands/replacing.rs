//! Images that others stand on, and files that go with an image: who may change, replace or remove
//! them.

use crate::common::{self, Scratch, Writer};

/// `base.qcow2` with an overlay, `over.qcow2`.
fn with_overlay() -> Scratch {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "4M"]);
    scratch.ok(&["write", "base.qcow2", "0", "4M", "--pattern", "1"]);
    scratch.ok(&["create", "over.qcow2", "--backing", "base.qcow2"]);
    scratch.ok(&["create", "a.raw", "4M"]);
    scratch
}

/// All commands that write to an image, by its name.
#[test]
fn what_an_overlay_stands_on_is_changed_by_no_command_unasked() {
    let scratch = with_overlay();
    let before = std::fs::read(scratch.path("base.qcow2")).unwrap();
    for command in [
        &["write", "base.qcow2", "0", "512", "--pattern", "2"][..],
        &["dd", "if=a.raw", "of=base.qcow2", "conv=notrunc", "count=1"],
        &["dd", "if=a.raw", "of=base.qcow2", "count=1"],
        &["convert", "a.raw", "base.qcow2"],
        &["convert", "--into", "a.raw", "base.qcow2"],
        &["convert", "-O", "vmdk", "a.raw", "base.qcow2"],
        &["create", "--force", "base.qcow2", "1M"],
        &["create", "--force", "-f", "raw", "base.qcow2", "1M"],
        &["resize", "--shrink", "base.qcow2", "1M"],
        &["serve", "base.qcow2", "--nbd", "unix:socket"],
        &["mount", "base.qcow2", "file"],
    ] {
        scratch.fails(5, "over.qcow2", command);
    }
    assert!(before == std::fs::read(scratch.path("base.qcow2")).unwrap());
    scratch.ok(&["convert", "--force", "a.raw", "base.qcow2"]);
}

/// A data file and an extent are images that others stand on too.
#[test]
fn what_holds_another_images_data_is_changed_by_no_command_unasked() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "apart.qcow2", "4M", "-o", "data_file=data.raw"]);
    scratch.ok(&["create", "-f", "vmdk", "-o", "subformat=monolithicFlat", "disk.vmdk", "4M"]);
    scratch.ok(&["write", "apart.qcow2", "0", "4M", "--pattern", "1"]);
    scratch.ok(&["write", "disk.vmdk", "0", "4M", "--pattern", "1"]);
    scratch.ok(&["create", "a.qcow2", "1M"]);
    for (file, image) in [("data.raw", "apart.qcow2"), ("disk-flat.vmdk", "disk.vmdk")] {
        for command in [
            &["write", "-f", "raw", file, "0", "512", "--pattern", "2"][..],
            &["dd", "if=a.qcow2", "-O", "raw", &format!("of={file}")],
            &["convert", "-O", "raw", "a.qcow2", file],
            &["convert", "--into", "-O", "raw", "a.qcow2", file],
            &["create", "--force", "-f", "raw", file, "1M"],
            &["resize", "--shrink", "-f", "raw", file, "1M"],
            &["serve", "-f", "raw", file, "--nbd", "unix:socket"],
            &["mount", "-f", "raw", file, "mounted"],
        ] {
            let told = scratch.fails(5, image, command).stderr;
            assert!(told.contains("whose data it holds"), "{told}");
        }
        let told = scratch.fails(5, image, &["convert", "-O", "raw", "a.qcow2", file]).stderr;
        assert!(told.contains("by their own names") && !told.contains("rebase"), "{told}");
        let bytes = std::fs::read(scratch.path(file)).unwrap();
        assert!(bytes.len() == 4 << 20 && bytes.iter().all(|byte| *byte == 1), "{file}");
    }
    // The image itself is changed and replaced with its own files.
    scratch.ok(&["write", "apart.qcow2", "0", "512", "--pattern", "2"]);
    scratch.ok(&["convert", "a.qcow2", "disk.vmdk"]);
    scratch.ok(&["write", "--force", "-f", "raw", "data.raw", "0", "512", "--pattern", "3"]);
}

/// Who only reads it, and who writes to another image of the folder, is not in the way.
#[test]
fn an_overlay_keeps_nobody_from_serving_what_nobody_writes() {
    let scratch = with_overlay();
    scratch.ok(&["write", "over.qcow2", "0", "512", "--pattern", "2"]);
    for image in [&["--read-only", "base.qcow2"][..], &["over.qcow2"]] {
        let (mut child, _) = scratch.serve(&[image, &["--nbd", "unix:socket"]].concat());
        common::signal(child.id(), "TERM");
        assert!(child.wait().unwrap().success(), "{image:?}");
    }
}

/// The old image's extent file is what the new one is made from.
#[test]
fn a_conversion_to_a_vmdk_name_removes_no_file_that_is_its_source() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "-f", "vmdk", "-o", "subformat=monolithicFlat", "disk.vmdk", "4M"]);
    scratch.ok(&["write", "disk.vmdk", "0", "4M", "--pattern", "7"]);
    let names = scratch.names();
    let before = std::fs::read(scratch.path("disk-flat.vmdk")).unwrap();
    for force in [&[][..], &["--force"]] {
        let convert = ["convert", "-f", "raw", "disk-flat.vmdk", "disk.vmdk", "-O", "vmdk"];
        let told = scratch.fails(6, "disk-flat.vmdk", &[&convert[..], force].concat()).stderr;
        assert!(told.contains("this command uses it") && told.contains("another name"), "{told}");
        assert_eq!(scratch.names(), names);
    }
    assert!(before == std::fs::read(scratch.path("disk-flat.vmdk")).unwrap());
    assert!(scratch.ok(&["read", "disk.vmdk", "0", "512"]).bytes.iter().all(|byte| *byte == 7));
}

#[test]
fn a_conversion_to_a_vmdk_name_removes_no_file_that_an_overlay_stands_on() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "-f", "vmdk", "-o", "subformat=monolithicFlat", "disk.vmdk", "4M"]);
    let over = ["create", "over.qcow2", "--backing", "disk-flat.vmdk", "--backing-format", "raw"];
    scratch.ok(&over);
    scratch.ok(&["create", "a.raw", "1M"]);
    let names = scratch.names();
    let convert = ["convert", "a.raw", "disk.vmdk", "-O", "vmdk"];
    scratch.fails(5, "over.qcow2", &convert);
    assert_eq!(scratch.names(), names);
    // The image was to go; what the overlay stands on stays.
    scratch.ok(&[&convert[..], &["--force"]].concat());
    assert_eq!(scratch.names(), names);
    scratch.ok(&["check", "over.qcow2"]);
    scratch.ok(&["read", "over.qcow2", "0", "512"]);
    // Without the overlay it is a leftover.
    std::fs::remove_file(scratch.path("over.qcow2")).unwrap();
    scratch.ok(&[
        "create",
        "--force",
        "-f",
        "vmdk",
        "-o",
        "subformat=monolithicFlat",
        "b.vmdk",
        "1M",
    ]);
    scratch.ok(&["convert", "a.raw", "b.vmdk", "-O", "vmdk"]);
    assert!(!scratch.path("b-flat.vmdk").exists());
}

/// A file that somebody has open is not removed either.
#[test]
fn a_conversion_to_a_vmdk_name_removes_no_file_that_is_in_use() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "-f", "vmdk", "-o", "subformat=monolithicFlat", "disk.vmdk", "4M"]);
    scratch.ok(&["create", "a.raw", "1M"]);
    let names = scratch.names();
    let held = Writer::start(&scratch.path(""), "disk-flat.vmdk");
    scratch.fails(6, "disk-flat.vmdk", &["convert", "a.raw", "disk.vmdk", "-O", "vmdk"]);
    drop(held);
    assert_eq!(scratch.names(), names);
    scratch.ok(&["convert", "a.raw", "disk.vmdk", "-O", "vmdk"]);
}
