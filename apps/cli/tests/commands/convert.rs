//! `vdkit convert`.

use std::os::unix::fs::FileExt;
use std::process::Stdio;

use crate::common::{self, Scratch, peer};

/// Bytes with data here and there.
fn content(scratch: &Scratch, name: &str, bytes: u64) {
    std::fs::File::create(scratch.path(name)).unwrap().set_len(bytes).unwrap();
    let raw = ["write", "-f", "raw", name];
    for (offset, len, pattern) in
        [("0", "64K", "1"), ("1M", "100000", "0x5a"), ("3000000", "7", "9")]
    {
        scratch.ok(&[&raw[..], &[offset, len, "--pattern", pattern]].concat());
    }
}

#[test]
fn every_way_between_formats() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    for (source, target) in [
        ("disk.raw", "a.qcow2"),
        ("a.qcow2", "b.raw"),
        ("a.qcow2", "c.qcow2"),
        ("disk.raw", "d.raw"),
    ] {
        let answer = scratch.ok(&["convert", "--verify", source, target]);
        assert_eq!((answer.stdout.as_str(), answer.stderr.as_str()), ("", ""));
        scratch.same("disk.raw", target);
    }
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "a.qcow2"]);
}

#[test]
fn bytes_that_nobody_looks_at_are_copied_by_the_kernel() {
    // Memory shares no blocks and copies within itself; between two file systems nobody does.
    let memory = Scratch::new_in("/dev/shm");
    let raw = std::fs::File::create(memory.path("disk.raw")).unwrap();
    raw.set_len((4 << 20) + 512).unwrap();
    for (offset, len) in [(0, 64 << 10), (1 << 20, 1216 << 10), (3 << 20, 256 << 10)] {
        // No two words alike: bytes from a wrong place are seen.
        let words = (offset / 8..(offset + len) / 8).flat_map(|word: u64| (!word).to_le_bytes());
        raw.write_all_at(&words.collect::<Vec<u8>>(), offset).unwrap();
    }
    let data = (64 + 1216 + 256) << 10;
    let elsewhere = Scratch::new();
    let far = elsewhere.path("far.qcow2").display().to_string();
    for (source, target, in_kernel) in [
        ("disk.raw", "a.qcow2", true),
        ("a.qcow2", "b.raw", true),
        ("a.qcow2", "c.qcow2", true),
        ("disk.raw", "d.raw", true),
        ("disk.raw", &far, false),
    ] {
        let arguments = ["--detect-zeros", "off", "--verify", source, target];
        let moved = &memory.json_of("convert", 0, &arguments)["moved"];
        let number = |key: &str| moved[key].as_u64().unwrap();
        let (by, by_others) = match in_kernel {
            true => (number("kernel-copied"), number("read")),
            false => (number("read"), number("kernel-copied")),
        };
        assert_eq!((by, by_others), (data, 0), "{source} to {target}: {moved}");
        memory.same("disk.raw", target);
    }
    // Space in several pieces for one piece of the disk.
    for options in ["cluster_size=512", "cluster_size=512,refcount_bits=64", "cluster_size=4K"] {
        let off = ["--detect-zeros", "off", "-o", options, "disk.raw", "small.qcow2"];
        let moved = &memory.json_of("convert", 0, &off)["moved"];
        assert!(moved["kernel-copied"].as_u64().unwrap() > data / 2, "{options}: {moved}");
        memory.same("disk.raw", "small.qcow2");
        peer(&memory.path(""), "qemu-img", &["check", "-q", "small.qcow2"]);
    }
    // Whoever looks for zeroes reads.
    let moved = &memory.json_of("convert", 0, &["disk.raw", "e.qcow2"])["moved"];
    assert_eq!(moved["kernel-copied"], 0, "{moved}");
    // Into something that is there, whose bytes are of no use.
    memory.ok(&["write", "c.qcow2", "512K", "3M", "--pattern", "7"]);
    let into = ["--detect-zeros", "off", "--into", "disk.raw", "c.qcow2"];
    let moved = &memory.json_of("convert", 0, &into)["moved"];
    assert_eq!(moved["kernel-copied"].as_u64().unwrap(), data, "{moved}");
    for target in ["a.qcow2", "c.qcow2"] {
        memory.same("disk.raw", target);
        peer(&memory.path(""), "qemu-img", &["check", "-q", target]);
    }
}

#[test]
fn vdi_images_go_both_ways() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 5 << 20);
    for (source, target) in
        [("disk.raw", "a.vdi"), ("a.vdi", "b.raw"), ("a.vdi", "c.qcow2"), ("c.qcow2", "d.vdi")]
    {
        scratch.ok(&["convert", "--verify", source, target]);
        scratch.same("disk.raw", target);
    }
    scratch.ok(&["convert", "--verify", "-o", "static=on", "disk.raw", "e.vdi"]);
    scratch.same("disk.raw", "e.vdi");
    for image in ["a.vdi", "d.vdi", "e.vdi"] {
        peer(&scratch.path(""), "qemu-img", &["check", "-q", image]);
        scratch.ok(&["check", image]);
    }
    let backed = ["create", "f.vdi", "5M", "--backing", "disk.raw", "--backing-format", "raw"];
    scratch.fails(1, "VDI image with a backing file", &backed);
}

#[test]
fn vhd_images_go_both_ways() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 5 << 20);
    for (source, target) in
        [("disk.raw", "a.vhd"), ("a.vhd", "b.raw"), ("a.vhd", "c.qcow2"), ("c.qcow2", "d.vhd")]
    {
        scratch.ok(&["convert", "--verify", "-o", "", source, target]);
    }
    // Rounded up to whole cylinders: as much as QEMU makes of it, and zero behind the end.
    let size = |name: &str| scratch.json_of("info", 0, &[name])["virtual-size"].as_u64().unwrap();
    peer(&scratch.path(""), "qemu-img", &["convert", "-O", "vpc", "disk.raw", "q.vhd"]);
    assert_eq!(size("a.vhd"), size("q.vhd"));
    for image in ["a.vhd", "b.raw", "c.qcow2", "d.vhd"] {
        assert_eq!(size(image), size("a.vhd"), "{image}");
        scratch.same("q.vhd", image);
    }
    for (options, name) in [("force_size=on", "e.vhd"), ("force_size=on,subformat=fixed", "f.vhd")]
    {
        scratch.ok(&["convert", "--verify", "-O", "vpc", "-o", options, "disk.raw", name]);
        assert_eq!(size(name), 5 << 20);
        peer(
            &scratch.path(""),
            "qemu-img",
            &["compare", "-q", "-f", "vpc", "-F", "raw", name, "disk.raw"],
        );
        scratch.ok(&["check", name]);
        // Known by its footer, and neither taken for raw nor read with it.
        scratch.ok(&["convert", "--verify", name, "g.raw"]);
        scratch.same("disk.raw", "g.raw");
        scratch.ok(&["write", name, "1M", "64K", "--pattern", "0x5a"]);
        std::fs::remove_file(scratch.path("g.raw")).unwrap();
    }
}

/// What qemu-img can read, vdkit can convert away from; nothing half-made stays of what it cannot write.
#[test]
fn formats_that_are_only_read_are_converted_away_from() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 3 << 20);
    let dir = scratch.path("");
    for format in ["qcow", "qed", "parallels"] {
        let name = format!("image.{format}");
        peer(&dir, "qemu-img", &["convert", "-O", format, "disk.raw", &name]);
        let info = scratch.json_of("info", 0, &[&name]);
        assert_eq!((&info["format"], &info["virtual-size"]), (&format.into(), &(3 << 20).into()));
        scratch.ok(&["convert", "--verify", &name, &format!("{format}.qcow2")]);
        scratch.same("disk.raw", &format!("{format}.qcow2"));
        scratch.ok(&["compare", "-f", format, "-F", "raw", &name, "disk.raw"]);
        scratch.ok(&["check", &name]);
        let before = scratch.names();
        let only = "writing a";
        scratch.fails(1, only, &["write", &name, "0", "512", "--pattern", "1"]);
        scratch.fails(1, only, &["create", "-f", format, "x", "1M"]);
        scratch.fails(1, only, &["convert", "-O", format, "disk.raw", "x"]);
        scratch.fails(1, only, &["measure", "--size", "1G", "-O", format]);
        assert_eq!(scratch.names(), before, "{format}");
    }
}

/// A child of a VHD says whose it is and where that is; a parent that was exchanged is not taken.
#[test]
fn vhd_overlays_know_their_parents() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.vhd", "8M", "-o", "force_size=on"]);
    scratch.ok(&["write", "base.vhd", "0", "8M", "--pattern", "0x11"]);
    scratch.ok(&["create", "top.vhd", "--backing", "base.vhd", "--backing-format", "vpc"]);
    scratch.ok(&["write", "top.vhd", "1000", "3M", "--pattern", "0x22"]);
    scratch.ok(&["check", "top.vhd"]);
    scratch.ok(&["convert", "--verify", "top.vhd", "flat.raw"]);
    let mut wanted = vec![0x11; 8 << 20];
    wanted[1000..1000 + (3 << 20)].fill(0x22);
    assert!(std::fs::read(scratch.path("flat.raw")).unwrap() == wanted, "other bytes");
    let chain = scratch.ok(&["info", "--chain", "top.vhd"]).stdout;
    assert!(chain.contains("base.vhd"), "{chain}");
    std::fs::remove_file(scratch.path("base.vhd")).unwrap();
    scratch.ok(&["create", "base.vhd", "8M", "-o", "force_size=on"]);
    scratch.fails(4, "for its backing image", &["convert", "top.vhd", "x.raw"]);
}

/// A differencing VDI says whose child it is and not where that is.
#[test]
fn a_parent_that_no_name_tells_is_given_by_the_user() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.vdi", "3M"]);
    scratch.ok(&["write", "base.vdi", "0", "3M", "--pattern", "0x11"]);
    scratch.ok(&["create", "diff.vdi", "3M"]);
    scratch.ok(&["write", "diff.vdi", "1M", "1M", "--pattern", "0x22"]);
    let (base, path) = (std::fs::read(scratch.path("base.vdi")).unwrap(), scratch.path("diff.vdi"));
    let mut diff = std::fs::read(&path).unwrap();
    diff[76] = 4;
    diff[0x1a8..0x1c8].copy_from_slice(&base[0x188..0x1a8]);
    std::fs::write(&path, &diff).unwrap();

    let answer = scratch.fails(1, "names no file", &["convert", "diff.vdi", "x.raw"]);
    assert!(answer.stderr.contains("--parent"), "{answer:?}");
    scratch.ok(&["info", "diff.vdi"]);
    scratch.ok(&["check", "diff.vdi"]);
    scratch.ok(&["convert", "--parent", "base.vdi", "diff.vdi", "x.raw"]);
    let disk = std::fs::read(scratch.path("x.raw")).unwrap();
    let wanted = [[0x11; 1 << 20], [0x22; 1 << 20], [0x11; 1 << 20]].concat();
    assert!(disk == wanted, "other bytes");
    let hex = scratch.ok(&["read", "--hex", "--parent", "base.vdi", "diff.vdi", "2M", "4"]).stdout;
    assert!(hex.contains("11 11 11 11"), "{hex}");
    scratch.ok(&["map", "--parent", "base.vdi", "diff.vdi"]);

    // A parent that changed since is not taken.
    scratch.ok(&["write", "base.vdi", "0", "512", "--pattern", "0x33"]);
    let words = "is wanted";
    scratch.fails(2, words, &["convert", "--parent", "base.vdi", "diff.vdi", "y.raw"]);
}

#[test]
fn options_and_compression_are_handed_on() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    for (i, arguments) in [
        &["-o", "cluster_size=512,compat=0.10"][..],
        &["-o", "extended_l2=on", "-o", "preallocation=metadata"],
        &["--compress"],
        &["--compress=zlib:9"],
        &["--compress=zstd", "-m", "3"],
        &["--compress", "-o", "compression_type=zstd"],
        &["--detect-zeros", "off", "-t", "none"],
        &["-S", "64K", "-T", "none", "--cache", "directsync", "--rate", "1G"],
    ]
    .iter()
    .enumerate()
    {
        let name = format!("{i}.qcow2");
        scratch.ok(&[&["convert", "disk.raw", &name][..], arguments].concat());
        scratch.same("disk.raw", &name);
        peer(&scratch.path(""), "qemu-img", &["check", "-q", &name]);
        let info = scratch.json_of("info", 0, &[&name]);
        let zstd = arguments.iter().any(|argument| argument.contains("zstd"));
        assert_eq!(info["compression-type"] == "zstd", zstd, "{arguments:?}: {info}");
    }
}

#[test]
fn contradictions_are_usage_errors() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    for (words, arguments) in [
        (
            "contradict",
            &["disk.raw", "x.qcow2", "--compress=zstd", "-o", "compression_type=zlib"][..],
        ),
        ("no compressed data", &["disk.raw", "x.raw", "-c"]),
        ("no meaning", &["disk.raw", "null:", "-c"]),
        ("no meaning", &["disk.raw", "null:", "--verify"]),
        ("no meaning", &["disk.raw", "null:", "-o", "compat=1.1"]),
        ("zlib and zstd", &["disk.raw", "x.qcow2", "--compress=lz4"]),
        ("levels of zlib are 1 to 9", &["disk.raw", "x.qcow2", "--compress=zlib:10"]),
        ("powers of two", &["disk.raw", "x.qcow2", "-S", "5000"]),
        ("unknown format 'qcow3'", &["disk.raw", "x", "-O", "qcow3"]),
        ("TARGET", &["disk.raw"]),
    ] {
        let answer = scratch.run(&[&["convert"][..], arguments].concat());
        assert_eq!(answer.code, Some(2), "{arguments:?}: {answer:?}");
        assert!(answer.stderr.contains(words), "{arguments:?}: {answer:?}");
    }
    assert_eq!(scratch.names(), ["disk.raw"]);
}

#[test]
fn to_nothing_reads_what_must_be_read() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 1 << 30);
    let report = scratch.json_of("convert", 0, &["disk.raw", "null:"]);
    assert_eq!(report["virtual-size"], 1 << 30);
    let read = report["moved"]["read"].as_u64().unwrap();
    assert!((165_000..4 << 20).contains(&read), "{report}");
    assert_eq!(scratch.names(), ["disk.raw"]);
}

#[test]
fn pieces_make_one_disk() {
    let scratch = Scratch::new();
    content(&scratch, "a.raw", 1 << 22);
    content(&scratch, "b.raw", 1 << 22);
    scratch.ok(&["convert", "a.raw", "b.raw", "both.qcow2"]);
    scratch.ok(&["convert", "both.qcow2", "both.raw"]);
    let [a, b, both] =
        ["a.raw", "b.raw", "both.raw"].map(|name| std::fs::read(scratch.path(name)).unwrap());
    assert!([a, b].concat() == both);
}

#[test]
fn into_what_exists() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    scratch.ok(&["create", "old.qcow2", "8M", "-o", "cluster_size=4K"]);
    scratch.ok(&["write", "old.qcow2", "0", "8M", "--pattern", "0xff"]);
    scratch.ok(&["convert", "--into", "disk.raw", "old.qcow2"]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "old.qcow2"]);
    let head = scratch.ok(&["read", "old.qcow2", "0", "4M"]).bytes;
    assert!(head == std::fs::read(scratch.path("disk.raw")).unwrap());
    assert_eq!(scratch.json_of("info", 0, &["old.qcow2"])["cluster-size"], 4096);
    // A raw target has to be named as raw, and one that is too small is not cut.
    scratch.write("small.raw", &[1; 512]);
    scratch.fails(2, "format was not detected", &["convert", "--into", "disk.raw", "small.raw"]);
    let answer =
        scratch.fails(2, "512", &["convert", "--into", "-O", "raw", "disk.raw", "small.raw"]);
    assert!(answer.stderr.contains("resize"), "{answer:?}");
    assert_eq!(std::fs::read(scratch.path("small.raw")).unwrap(), [1; 512]);
}

#[test]
fn onto_a_block_device() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    for sector in [512, 4096] {
        let Some(device) = vdkit_testkit::fs::loop_device(16 << 20, sector) else { return };
        let name = device.path().to_str().unwrap();
        std::fs::write(device.path(), vec![0xee; 16 << 20]).unwrap();
        scratch.ok(&["convert", "disk.raw", name]);
        let head = scratch.ok(&["read", name, "0", "4M"]).bytes;
        assert!(head == std::fs::read(scratch.path("disk.raw")).unwrap(), "{sector}");
        assert_eq!(scratch.ok(&["read", name, "4M", "1"]).bytes, [0xee]);
        scratch.ok(&["convert", "disk.raw", "-O", "qcow2", name]);
        scratch.same("disk.raw", name);
        peer(&scratch.path(""), "qemu-img", &["check", "-q", "-f", "qcow2", name]);
    }
}

#[test]
fn onto_a_part_of_the_chain() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    scratch.ok(&["convert", "disk.raw", "base.qcow2"]);
    for (name, on) in [("middle.qcow2", "base.qcow2"), ("top.qcow2", "middle.qcow2")] {
        scratch.ok(&["create", name, "--backing", on]);
    }
    scratch.ok(&["write", "middle.qcow2", "2M", "64K", "--pattern", "0x22", "--force"]);
    scratch.ok(&["write", "top.qcow2", "1M", "64K", "--zero"]);
    scratch.ok(&["convert", "top.qcow2", "flat.qcow2", "--backing", "base.qcow2"]);
    scratch.same("top.qcow2", "flat.qcow2");
    assert_eq!(scratch.json_of("info", 0, &["flat.qcow2"])["backing-filename"], "base.qcow2");
    let map = scratch.json_of("map", 0, &["flat.qcow2"]);
    assert!(map.as_array().unwrap().iter().any(|row| row["depth"] == 1), "{map}");
}

#[test]
fn references_of_sources_are_held_to_the_policy() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    std::fs::create_dir(scratch.path("images")).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-b", "../disk.raw", "-F", "raw"];
    peer(&scratch.path(""), "qemu-img", &[&create[..], &["images/top.qcow2"]].concat());
    scratch.fails(5, "names '../disk.raw'", &["convert", "images/top.qcow2", "out.raw"]);
    scratch.fails(5, "disk.raw", &["convert", "--no-refs", "images/top.qcow2", "out.raw"]);
    scratch.ok(&["convert", "--allow-ref", ".", "images/top.qcow2", "out.raw"]);
    scratch.same("disk.raw", "out.raw");
}

#[test]
fn references_of_targets_are_held_to_the_policy() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    scratch.ok(&["create", "other.raw", "4M"]);
    scratch.ok(&["write", "-f", "raw", "other.raw", "1M", "64K", "--pattern", "0x5a"]);
    std::fs::create_dir(scratch.path("images")).unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    peer(
        &scratch.path(""),
        "qemu-img",
        &[&create[..], &["../other.raw", "images/top.qcow2"]].concat(),
    );
    peer(&scratch.path(""), "qemu-img", &[&create[..], &["other.raw", "near.qcow2"]].concat());
    let into =
        |more: &[&'static str]| [&["convert", "-f", "raw", "--into", "disk.raw"], more].concat();
    scratch.fails(5, "names '../other.raw'", &into(&["images/top.qcow2"]));
    scratch.fails(5, "other.raw", &into(&["near.qcow2", "--no-refs"]));
    scratch.ok(&into(&["near.qcow2"]));
    scratch.ok(&into(&["images/top.qcow2", "--allow-ref", "."]));
    scratch.same("disk.raw", "near.qcow2");
    scratch.ok(&["compare", "--allow-ref", ".", "disk.raw", "images/top.qcow2"]);
}

#[test]
fn failures_leave_what_was_there() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    scratch.ok(&["convert", "disk.raw", "whole.qcow2"]);
    let bytes = std::fs::read(scratch.path("whole.qcow2")).unwrap();
    scratch.write("cut.qcow2", &bytes[..100]);
    scratch.write("out.raw", b"precious");
    for (code, source) in [(4, "cut.qcow2"), (1, "no-such.raw"), (1, ".")] {
        scratch.fails(code, source, &["convert", source, "out.raw"]);
        scratch.fails(code, source, &["convert", source, "new.raw"]);
    }
    scratch.fails(1, "no-such", &["convert", "disk.raw", "no-such/out.raw"]);
    assert_eq!(std::fs::read(scratch.path("out.raw")).unwrap(), b"precious");
    assert_eq!(scratch.names(), ["cut.qcow2", "disk.raw", "out.raw", "whole.qcow2"]);
}

#[test]
fn an_image_in_use_is_refused() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    scratch.ok(&["convert", "disk.raw", "used.qcow2"]);
    let writer = common::Writer::start(&scratch.path(""), "used.qcow2");
    let pid = writer.pid().to_string();
    scratch.fails(6, &pid, &["convert", "used.qcow2", "out.raw"]);
    scratch.fails(6, &pid, &["convert", "disk.raw", "used.qcow2"]);
    scratch.ok(&["convert", "--force-share", "used.qcow2", "out.raw"]);
}

#[test]
fn no_space_is_told_and_nothing_left() {
    let Some(small) = vdkit_testkit::fs::mounted("tmpfs", 1 << 20) else { return };
    let scratch = Scratch::new();
    scratch.write("disk.raw", &vec![0x77; 4 << 20]);
    for name in ["out.raw", "out.qcow2"] {
        let target = small.path().join(name);
        let answer = scratch.fails(7, name, &["convert", "disk.raw", target.to_str().unwrap()]);
        assert!(answer.stderr.contains("hint: make room"), "{answer:?}");
        assert_eq!(std::fs::read_dir(small.path()).unwrap().count(), 0);
    }
}

#[test]
fn an_interrupt_leaves_what_was_there() {
    let scratch = Scratch::new();
    scratch.write("disk.raw", &vec![0x77; 8 << 20]);
    scratch.write("out.raw", b"precious");
    for name in ["INT", "TERM"] {
        // So slow that it cannot be over before the signal.
        let child = scratch
            .command(&["convert", "--rate", "1K", "disk.raw", "out.raw"])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        common::wait_until_signals_are_handled(child.id());
        common::wait_until(|| scratch.names().len() == 3);
        common::signal(child.id(), name);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("interrupted"), "{output:?}");
        assert_eq!(std::fs::read(scratch.path("out.raw")).unwrap(), b"precious");
        assert_eq!(scratch.names(), ["disk.raw", "out.raw"]);
    }
}

#[test]
fn progress_as_json_ends_at_the_whole() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    let answer = scratch.ok(&["convert", "--progress", "json", "disk.raw", "out.raw"]);
    let lines: Vec<serde_json::Value> =
        answer.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = lines.last().unwrap();
    assert_eq!((&last["event"], &last["job"]), (&"progress".into(), &"convert".into()));
    assert_eq!((&last["done"], &last["total"]), (&(4 << 20).into(), &(4 << 20).into()));
    assert_eq!(scratch.ok(&["convert", "disk.raw", "out.raw"]).stderr, "");
}

#[test]
fn vmdk_images_go_both_ways() {
    let scratch = Scratch::new();
    std::fs::File::create(scratch.path("disk.raw")).unwrap().set_len((5 << 20) + 512).unwrap();
    for (offset, len) in [("0", "64K"), ("1M", "1216K"), ("5M", "512")] {
        scratch.ok(&["write", "-f", "raw", "disk.raw", offset, len, "--pattern", "0x5a"]);
    }
    for subformat in [
        "monolithicSparse",
        "monolithicFlat",
        "twoGbMaxExtentSparse",
        "twoGbMaxExtentFlat",
        "streamOptimized",
    ] {
        let option = format!("subformat={subformat}");
        for pair in [["disk.raw", "a.vmdk"], ["a.vmdk", "b.qcow2"], ["b.qcow2", "c.vmdk"]] {
            let to_vmdk = pair[1].ends_with("vmdk");
            let options = if to_vmdk { &["-o", &option][..] } else { &[] };
            scratch.ok(&[&["convert", "--verify"], options, &pair[..]].concat());
            scratch.same("disk.raw", pair[1]);
        }
        peer(&scratch.path(""), "qemu-img", &["check", "-q", "c.vmdk"]);
        scratch.ok(&["check", "c.vmdk"]);
        scratch.ok(&["amend", "-o", "adapter_type=lsilogic,hwversion=10", "c.vmdk"]);
        let json = scratch.json_of("info", 0, &["c.vmdk"]);
        assert_eq!(json["properties"]["create-type"], subformat, "{json}");
        assert_eq!(json["properties"]["adapter-type"], "lsilogic", "{json}");
        for name in scratch.names() {
            if name != "disk.raw" {
                std::fs::remove_file(scratch.path(&name)).unwrap();
            }
        }
    }
}

/// What a format's naming happens to meet belongs to somebody else.
#[test]
fn files_of_others_are_not_replaced_by_extents() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    scratch.write("a-flat.vmdk", b"precious");
    fn convert(target: &str) -> [&str; 5] {
        ["convert", "disk.raw", target, "-o", "subformat=monolithicFlat"]
    }
    for before in [&[][..], &["create", "a.vmdk", "1M"]] {
        if !before.is_empty() {
            scratch.ok(before);
        }
        scratch.fails(2, "a-flat.vmdk: is there already", &convert("a.vmdk"));
        assert_eq!(std::fs::read(scratch.path("a-flat.vmdk")).unwrap(), b"precious");
    }
    let create = ["create", "--force", "a.vmdk", "1M", "-o", "subformat=monolithicFlat"];
    scratch.fails(2, "a-flat.vmdk: is there already", &create);
    // Its own it may replace.
    scratch.ok(&convert("b.vmdk"));
    scratch.ok(&convert("b.vmdk"));
    scratch.same("disk.raw", "b.vmdk");
    // A name that would not be opened again is not given.
    scratch.fails(2, "colon", &convert("./nbd:c.vmdk"));
    // What is cut short is no disk full of zeroes.
    let extent = std::fs::File::options().write(true).open(scratch.path("b-flat.vmdk"));
    extent.unwrap().set_len(1 << 20).unwrap();
    scratch.fails(4, "1048576 bytes", &["convert", "b.vmdk", "null:"]);
    let mut names = scratch.names();
    names.retain(|name| name.starts_with('.') || name.contains("nbd"));
    assert_eq!(names, [""; 0]);
}

/// A limit of the shell's is a failure like others: nothing half-made stays.
#[test]
fn a_file_that_may_not_be_so_large_is_cleaned_up() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    scratch.ok(&["write", "-f", "raw", "disk.raw", "0", "4M", "--pattern", "3"]);
    let script =
        format!("ulimit -f 1000; exec {} convert disk.raw a.qcow2", env!("CARGO_BIN_EXE_vdkit"));
    let done = std::process::Command::new("bash")
        .args(["-c", &script])
        .current_dir(scratch.path(""))
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    assert_eq!(scratch.names(), ["disk.raw"]);
}

/// The calls that make files durable or give them names, in their order.
fn calls_of_convert(scratch: &Scratch, arguments: &[&str]) -> Vec<String> {
    let output = std::process::Command::new("strace")
        .args([
            "-f",
            "-qq",
            "-e",
            "trace=fdatasync,fsync,sync_file_range,rename,renameat,renameat2",
        ])
        .args([env!("CARGO_BIN_EXE_vdkit"), "convert"])
        .args(arguments)
        .current_dir(scratch.path(""))
        .output()
        .expect("strace; `make peers` installs it");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let name = |line: &str| {
        let call = line.split('(').next().unwrap().rsplit(' ').next().unwrap();
        if call.starts_with("rename") { "rename".to_owned() } else { call.to_owned() }
    };
    log.lines().filter(|line| line.contains('(')).map(name).collect()
}

/// Nobody sees a new image before it has its name, so only what takes another one's place is made
/// durable, by one sync after everything.
#[test]
fn a_file_that_is_replaced_costs_one_sync() {
    let scratch = Scratch::new();
    content(&scratch, "disk.raw", 4 << 20);
    scratch.ok(&["write", "-f", "raw", "disk.raw", "0", "4M", "--pattern", "3"]);
    for format in ["qcow2", "raw", "vmdk", "vhdx", "vdi", "vpc"] {
        let plain = ["-O", format, "disk.raw", "image"];
        assert_eq!(calls_of_convert(&scratch, &plain), ["rename"], "{format}, new");
        let again = calls_of_convert(&scratch, &plain);
        assert_eq!(again, ["fdatasync", "rename"], "{format}, in the place of another");
        let unsafely = ["-t", "unsafe", "-O", format, "disk.raw", "image"];
        assert_eq!(calls_of_convert(&scratch, &unsafely), ["rename"], "{format}, unsafe");
        let durable =
            calls_of_convert(&scratch, &["-t", "writeback", "-O", format, "disk.raw", "image"]);
        assert_eq!(durable.last().unwrap(), "fsync", "{format}: {durable:?}");
        std::fs::remove_file(scratch.path("image")).unwrap();
    }
}
