//! `vdkit create`.

use std::io::BufRead;
use std::process::Stdio;

use crate::common::{self, Scratch, peer};

#[test]
fn the_name_tells_the_format() {
    let scratch = Scratch::new();
    for (name, format) in [("a.qcow2", "qcow2"), ("a.raw", "raw"), ("a.img", "raw"), ("a", "raw")] {
        scratch.ok(&["create", name, "3M"]);
        let json = scratch.json_of("info", 0, &[name]);
        assert_eq!((&json["format"], &json["virtual-size"]), (&format.into(), &(3 << 20).into()));
    }
    let told = scratch.json_of("create", 0, &["-f", "qcow2", "b.raw", "1M"]);
    assert_eq!(told["format"], "qcow2");
    for (name, format) in
        [("a.vhdx", "vhdx"), ("a.vhd", "vpc"), ("a.vdi", "vdi"), ("a.vmdk", "vmdk")]
    {
        assert_eq!(scratch.json_of("create", 0, &[name, "1M"])["format"], format);
    }
}

#[test]
fn qemu_takes_what_was_made_with_any_option() {
    let scratch = Scratch::new();
    for (i, options) in [
        "",
        "cluster_size=512",
        "cluster_size=2M,preallocation=metadata",
        "compat=0.10",
        "compat=1.1,lazy_refcounts=on,refcount_bits=64",
        "extended_l2=on,cluster_size=64K,preallocation=falloc",
        "compression_type=zstd,preallocation=full",
    ]
    .iter()
    .enumerate()
    {
        let name = format!("{i}.qcow2");
        let mut arguments = vec!["create", &name, "5M"];
        if !options.is_empty() {
            arguments.extend(["-o", options]);
        }
        scratch.ok(&arguments);
        peer(&scratch.path(""), "qemu-img", &["check", "-q", &name]);
        let zero = ["read -P 0 0 5M"];
        let output = peer(&scratch.path(""), "qemu-io", &["-r", "-c", zero[0], &name]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!text.contains("failed"), "{options}: {text}");
    }
}

#[test]
fn an_overlay_takes_size_and_format_from_what_it_stands_on() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "7M"]);
    let json = scratch.json_of("create", 0, &["--backing", "base.qcow2", "top.qcow2"]);
    assert_eq!(json["virtual-size"], 7 << 20);
    assert_eq!(json["backing-filename"], "base.qcow2");
    assert_eq!(json["backing-filename-format"], "qcow2");
    let output = peer(&scratch.path(""), "qemu-img", &["info", "--backing-chain", "top.qcow2"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("base.qcow2"), "{output:?}");
    let option = scratch.json_of("create", 0, &["-o", "backing_file=base.qcow2", "other.qcow2"]);
    assert_eq!(option["backing-filename"], "base.qcow2");
}

#[test]
fn the_backing_image_is_looked_at() {
    let scratch = Scratch::new();
    scratch.fails(1, "no-such.qcow2", &["create", "top.qcow2", "1M", "-b", "no-such.qcow2"]);
    scratch.write("guess.raw", &[0; 512]);
    let guess = ["create", "top.qcow2", "-b", "guess.raw"];
    scratch.fails(2, "format", &guess);
    scratch.ok(&[&guess[..], &["-F", "raw"]].concat());
    let answer = scratch.run(&["create", "x.qcow2", "1M", "-b", "no", "-u"]);
    assert_eq!(answer.code, Some(2), "{answer:?}");
    assert!(answer.stderr.contains("--backing-format"), "{answer:?}");
    scratch.ok(&["create", "x.qcow2", "1M", "-u", "-b", "no-such.qcow2", "-F", "qcow2"]);
    scratch.fails(1, "raw", &["create", "x.raw", "-b", "x.qcow2", "-u", "-F", "qcow2", "1M"]);
    assert_eq!(scratch.names(), ["guess.raw", "top.qcow2", "x.qcow2"]);
}

#[test]
fn a_relative_name_counts_from_the_new_images_folder() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("images")).unwrap();
    scratch.ok(&["create", "images/base.qcow2", "1M"]);
    scratch.ok(&["create", "images/top.qcow2", "-b", "base.qcow2"]);
    scratch.ok(&["info", "--chain", "images/top.qcow2"]);
}

#[test]
fn what_is_there_is_replaced_only_by_force() {
    let scratch = Scratch::new();
    scratch.write("disk.raw", b"precious");
    let answer = scratch.fails(1, "there already", &["create", "disk.raw", "1M"]);
    assert!(answer.stderr.contains("--force"), "{answer:?}");
    assert_eq!(std::fs::read(scratch.path("disk.raw")).unwrap(), b"precious");
    scratch.ok(&["create", "--force", "disk.raw", "1M"]);
    assert_eq!(std::fs::metadata(scratch.path("disk.raw")).unwrap().len(), 1 << 20);
    // mktemp and touch leave such a file.
    scratch.write("empty.raw", b"");
    scratch.ok(&["create", "empty.raw", "1M"]);
}

#[test]
fn mistakes_leave_nothing_behind() {
    let scratch = Scratch::new();
    scratch.fails(2, "size", &["create", "a.qcow2"]);
    scratch.fails(2, "sise", &["create", "a.qcow2", "1M", "-o", "cluster_sise=1M"]);
    let answer =
        scratch.fails(2, "cluster_size", &["create", "a.qcow2", "1M", "-o", "cluster_size=3K"]);
    assert!(answer.stderr.contains("power of two"), "{answer:?}");
    scratch.fails(2, "not a size", &["create", "a.qcow2", "1X"]);
    scratch.fails(2, "too large", &["create", "a.qcow2", "7E"]);
    scratch.fails(1, "no-such-folder", &["create", "no-such-folder/a.qcow2", "1M"]);
    std::fs::create_dir(scratch.path("folder")).unwrap();
    scratch.fails(1, "directory", &["create", "folder", "1M"]);
    assert_eq!(scratch.names(), ["folder"]);
}

#[test]
fn purposes_choose_the_format_or_say_why_not() {
    let scratch = Scratch::new();
    for (purpose, format) in [
        ("kvm", "qcow2"),
        ("openstack", "qcow2"),
        ("gcp", "raw"),
        ("aws", "raw"),
        ("vmware", "vmdk"),
        ("hyperv", "vhdx"),
    ] {
        let json = scratch.json_of("create", 0, &["--for", purpose, purpose, "1G"]);
        assert_eq!(json["format"], format, "{purpose}");
    }
    for (format, name) in [(None, "a"), (Some("vhd"), "b.vhd"), (Some("vpc"), "c.vhd")] {
        let format = format.map(|format| ["-f", format]).unwrap_or(["--progress", "none"]);
        let json =
            scratch.json_of("create", 0, &[&["--for", "azure", name, "3M"][..], &format].concat());
        assert_eq!((&json["format"], &json["virtual-size"]), (&"vpc".into(), &(3 << 20).into()));
        let info = scratch.json_of("info", 0, &[name]);
        assert_eq!(info["actual-size"].as_u64().map(|bytes| bytes < 64 << 10), Some(true));
        let bytes = std::fs::read(scratch.path(name)).unwrap();
        assert_eq!((bytes.len(), &bytes[3 << 20..][..8]), ((3 << 20) + 512, &b"conectix"[..]));
    }
    scratch.fails(2, "whole MiB", &["create", "--for", "azure", "disk.vhd", "3000K"]);
    scratch.fails(2, "whole GiB", &["create", "--for", "gcp", "disk.raw", "1M"]);
    scratch.fails(2, "kvm takes qcow2", &["create", "--for", "kvm", "-f", "raw", "disk", "1G"]);
}

#[test]
fn a_data_file_is_made_beside_the_image() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "2M", "-o", "data_file=disk.data,data_file_raw=on"]);
    assert_eq!(scratch.names(), ["disk.data", "disk.qcow2"]);
    scratch.ok(&["write", "disk.qcow2", "0", "1M", "--pattern", "7"]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "disk.qcow2"]);
    let data = std::fs::read(scratch.path("disk.data")).unwrap();
    assert!(data[..1 << 20].iter().all(|&byte| byte == 7));
}

#[test]
fn no_space_is_told_and_nothing_left() {
    let Some(small) = vdkit_testkit::fs::mounted("tmpfs", 2 << 20) else { return };
    let scratch = Scratch::new();
    let image = small.path().join("disk.qcow2");
    let image = image.to_str().unwrap();
    let answer =
        scratch.fails(7, "disk.qcow2", &["create", image, "8M", "-o", "preallocation=full"]);
    assert!(answer.stderr.contains("hint: make room"), "{answer:?}");
    assert_eq!(std::fs::read_dir(small.path()).unwrap().count(), 0);
}

#[test]
fn a_block_device_is_used_as_it_is() {
    let Some(device) = vdkit_testkit::fs::loop_device(8 << 20, 512) else { return };
    let scratch = Scratch::new();
    let name = device.path().to_str().unwrap();
    scratch.ok(&["create", "-f", "qcow2", name, "20M"]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "-f", "qcow2", name]);
    let json = scratch.json_of("info", 0, &[name]);
    assert_eq!((&json["format"], &json["device"]), (&"qcow2".into(), &true.into()));
    assert_eq!(scratch.json_of("create", 0, &["--force", name])["virtual-size"], 8 << 20);
}

#[test]
fn an_image_in_use_is_not_replaced() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1M"]);
    let writer = common::Writer::start(&scratch.path(""), "disk.qcow2");
    scratch.fails(6, &writer.pid().to_string(), &["create", "--force", "disk.qcow2", "1M"]);
}

#[test]
fn an_interrupt_leaves_nothing_half_made() {
    // Space for the zeroes of a file that takes long enough to be interrupted at any speed.
    let scratch = Scratch::new();
    scratch.write("key", b"secret");
    let luks = ["-f", "luks", "--key-file", "key", "-o", "iter-time=10"];
    let luks_in_qcow2 =
        ["-f", "qcow2", "--key-file", "key", "-o", "encrypt.format=luks,encrypt.iter-time=10"];
    for how in [&["-f", "raw"][..], &luks[..], &luks_in_qcow2[..]] {
        let common = ["create", "disk", "64G", "-o", "preallocation=full", "--progress", "json"];
        let mut child = scratch
            .command(&[&common[..], how].concat())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        common::wait_until_signals_are_handled(child.id());
        // It has begun to write, and says so.
        let mut told = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
        let begun = told.find(|line| {
            let line: serde_json::Value = serde_json::from_str(line.as_ref().unwrap()).unwrap();
            assert!(line["total"].as_u64() >= Some(64 << 30), "{line}");
            line["done"].as_u64() > Some(0)
        });
        assert!(begun.is_some(), "{how:?}");
        common::signal(child.id(), "TERM");
        assert_eq!(child.wait().unwrap().code(), Some(130), "{how:?}");
        assert_eq!(scratch.names(), ["key"], "{how:?}");
    }
}

#[test]
fn progress_of_a_full_preallocation_ends_at_the_whole() {
    let scratch = Scratch::new();
    scratch.write("key", b"secret");
    let luks = ["-f", "luks", "--key-file", "key", "-o", "iter-time=10"];
    for how in [&["-f", "raw"][..], &["-f", "qcow2"][..], &luks[..]] {
        let common =
            ["create", "--force", "disk", "8M", "-o", "preallocation=full", "--progress", "json"];
        let answer = scratch.ok(&[&common[..], how].concat());
        let last: serde_json::Value =
            serde_json::from_str(answer.stderr.lines().last().unwrap()).unwrap();
        assert_eq!((&last["event"], &last["job"]), (&"progress".into(), &"create".into()));
        assert_eq!(last["done"], last["total"], "{how:?}");
        assert!(last["total"].as_u64() >= Some(8 << 20), "{how:?}: {last}");
    }
}

#[test]
fn the_size_that_a_format_made_is_told() {
    let scratch = Scratch::new();
    let made = |arguments: &[&str]| scratch.json_of("create", 0, arguments)["virtual-size"].clone();
    // A VHD has whole cylinders, unless it is told otherwise.
    let rounded = made(&["-f", "vpc", "a.vhd", "10M"]);
    let found = scratch.json_of("info", 0, &["a.vhd"])["virtual-size"].clone();
    assert_eq!(rounded, found);
    assert!(rounded.as_u64().unwrap() > 10 << 20, "{rounded}");
    let shown = scratch.ok(&["create", "-f", "vpc", "b.vhd", "10M"]).stdout;
    assert!(shown.contains(&rounded.to_string()), "{shown}");
    assert_eq!(made(&["-f", "vpc", "-o", "force_size=on", "c.vhd", "10M"]), 10 << 20);
    assert_eq!(made(&["-f", "qcow2", "d.qcow2", "1000"]), 1024);
    // Of a conversion too.
    scratch.write("disk.raw", &vec![1; 10 << 20]);
    let converted = scratch.json_of("convert", 0, &["-O", "vpc", "disk.raw", "e.vhd"]);
    assert_eq!(converted["virtual-size"], rounded);
}

#[test]
fn sizes_beyond_a_format_are_the_callers_fault() {
    let scratch = Scratch::new();
    let file = std::fs::File::create(scratch.path("big.raw")).unwrap();
    file.set_len(3 << 40).unwrap();
    scratch.fails(2, "more than the limit", &["create", "-f", "vpc", "a.vhd", "3T"]);
    scratch.fails(2, "more than the limit", &["convert", "-O", "vpc", "big.raw", "a.vhd"]);
    assert_eq!(scratch.names(), ["big.raw"]);
}

#[test]
fn thousands_of_extents_are_given_up_when_told_so() {
    // 3,000 extents of 2 GiB, each a file. Where this process sleeps too long they are all made
    // before the signal comes: then again.
    let arguments = ["create", "a.vmdk", "6000G", "-o", "subformat=twoGbMaxExtentSparse"];
    let given_up = (0..20).any(|_| {
        let scratch = Scratch::new();
        let mut child = scratch.command(&arguments).stdout(Stdio::null()).spawn().unwrap();
        common::wait_until_signals_are_handled(child.id());
        common::wait_until(|| scratch.names().len() > 20);
        common::signal(child.id(), "TERM");
        let code = child.wait().unwrap().code();
        if code == Some(0) {
            return false;
        }
        assert_eq!(code, Some(130));
        assert_eq!(scratch.names(), [""; 0]);
        true
    });
    assert!(given_up, "it is never there to be ended");
}

#[test]
fn extents_of_an_image_that_is_replaced_go_with_it() {
    let scratch = Scratch::new();
    let split = ["-o", "subformat=twoGbMaxExtentSparse"];
    scratch.ok(&[&["create", "a.vmdk", "5G"][..], &split].concat());
    assert_eq!(scratch.names(), ["a-s001.vmdk", "a-s002.vmdk", "a-s003.vmdk", "a.vmdk"]);
    scratch.write("a-s009.vmdk", b"somebody else's");
    scratch.write("disk.raw", &vec![1; 1 << 20]);
    scratch.ok(&[&["convert", "disk.raw", "a.vmdk"][..], &split].concat());
    assert_eq!(scratch.names(), ["a-s001.vmdk", "a-s009.vmdk", "a.vmdk", "disk.raw"]);
    scratch.ok(&["create", "--force", "a.vmdk", "1M"]);
    assert_eq!(scratch.names(), ["a-s009.vmdk", "a.vmdk", "disk.raw"]);
    // What an image from a stranger names is not removed with it.
    scratch.write("b-flat.vmdk", &vec![0; 1 << 20]);
    let text = "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n\
                createType=\"twoGbMaxExtentFlat\"\nRW 2048 FLAT \"disk.raw\" 0\n";
    scratch.write("b.vmdk", text.as_bytes());
    scratch.ok(&["create", "--force", "b.vmdk", "1M"]);
    assert!(scratch.names().contains(&"disk.raw".to_owned()));
    assert!(scratch.names().contains(&"b-flat.vmdk".to_owned()));
}
