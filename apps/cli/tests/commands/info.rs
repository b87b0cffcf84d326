//! `vdkit info`.

use crate::common::{self, Scratch, peer};

#[test]
fn says_what_a_raw_image_is() {
    let scratch = Scratch::new();
    scratch.write("disk.raw", &[7; 65536]);
    let text = scratch.ok(&["info", "disk.raw"]).stdout;
    assert!(text.contains("format:") && text.contains("raw"), "{text}");
    assert!(text.contains("64 KiB (65536 bytes)"), "{text}");
    let json = scratch.json_of("info", 0, &["disk.raw"]);
    assert_eq!(json["virtual-size"], 65536);
    assert_eq!(json["file-length"], 65536);
    assert_eq!(json["format-probed"], true);
    assert_eq!(json["device"], false);
    assert_eq!(scratch.json_of("info", 0, &["-f", "raw", "disk.raw"])["format-probed"], false);
}

#[test]
fn says_what_qemu_says_of_a_qcow2_image() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    let options = "cluster_size=128K,lazy_refcounts=on,compression_type=zstd";
    peer(&dir, "qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", "3G"]);
    peer(&dir, "qemu-io", &["-c", "write 0 1M", "disk.qcow2"]);
    peer(&dir, "qemu-img", &["snapshot", "-c", "before", "disk.qcow2"]);
    peer(&dir, "qemu-img", &["bitmap", "--add", "disk.qcow2", "changes"]);
    let theirs = peer(&dir, "qemu-img", &["info", "--output", "json", "disk.qcow2"]);
    let theirs: serde_json::Value = serde_json::from_slice(&theirs.stdout).unwrap();
    let ours = scratch.json_of("info", 0, &["disk.qcow2"]);
    for key in ["filename", "format", "virtual-size", "actual-size", "cluster-size", "dirty-flag"] {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    assert_eq!(ours["compression-type"], "zstd");
    assert_eq!(ours["snapshots"][0]["name"], "before");
    assert_eq!(ours["snapshots"][0]["date-seconds"], theirs["snapshots"][0]["date-sec"]);
    assert_eq!(ours["bitmaps"][0]["name"], "changes");
    assert_eq!(ours["properties"]["lazy-refcounts"], "true");
    let text = scratch.ok(&["info", "disk.qcow2"]).stdout;
    for words in
        ["qcow2", "3 GiB (3221225472 bytes)", "before", "changes", "zstd", "lazy-refcounts"]
    {
        assert!(text.contains(words), "{words}: {text}");
    }
}

/// A chain of three.
fn chain(scratch: &Scratch) {
    let dir = scratch.path("");
    peer(&dir, "qemu-img", &["create", "-q", "-f", "qcow2", "base.qcow2", "1M"]);
    for (name, base) in [("middle.qcow2", "base.qcow2"), ("top.qcow2", "middle.qcow2")] {
        peer(&dir, "qemu-img", &["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", name]);
    }
}

#[test]
fn opens_no_other_file_without_chain() {
    let scratch = Scratch::new();
    chain(&scratch);
    std::fs::remove_file(scratch.path("middle.qcow2")).unwrap();
    let json = scratch.json_of("info", 0, &["top.qcow2"]);
    assert_eq!(json["backing-filename"], "middle.qcow2");
    assert_eq!(json["backing-filename-format"], "qcow2");
    let answer = scratch.run(&["info", "--chain", "top.qcow2"]);
    assert_eq!(answer.code, Some(1), "{answer:?}");
    assert!(answer.stdout.contains("top.qcow2"), "what is there is described: {answer:?}");
    assert!(answer.stderr.contains("middle.qcow2"), "{answer:?}");
}

#[test]
fn describes_a_chain() {
    let scratch = Scratch::new();
    chain(&scratch);
    let json = scratch.json_of("info", 0, &["--chain", "top.qcow2"]);
    let names: Vec<_> = json.as_array().unwrap().iter().map(|i| i["filename"].clone()).collect();
    assert_eq!(names, ["top.qcow2", "middle.qcow2", "base.qcow2"]);
    let answer = scratch.run(&["info", "--chain", "--no-refs", "top.qcow2"]);
    assert_eq!(answer.code, Some(5), "{answer:?}");
    assert!(
        answer.stderr.contains("error: refused: top.qcow2: names 'middle.qcow2'"),
        "{answer:?}"
    );
}

#[test]
fn a_reference_out_of_the_folder_is_refused_unless_it_is_allowed() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    std::fs::create_dir(scratch.path("images")).unwrap();
    std::fs::create_dir(scratch.path("bases")).unwrap();
    peer(&dir, "qemu-img", &["create", "-q", "-f", "qcow2", "bases/base.qcow2", "1M"]);
    let arguments = ["create", "-q", "-f", "qcow2", "-b", "../bases/base.qcow2", "-F", "qcow2"];
    peer(&dir, "qemu-img", &[&arguments[..], &["images/top.qcow2"]].concat());
    let refused = scratch.run(&["info", "--chain", "images/top.qcow2"]);
    assert_eq!(refused.code, Some(5), "{refused:?}");
    assert!(
        refused.stderr.contains("hint: ") && refused.stderr.contains("--allow-ref"),
        "{refused:?}"
    );
    scratch.ok(&["info", "--chain", "--allow-ref", "bases", "images/top.qcow2"]);
}

#[test]
fn hostile_input_is_a_clear_error() {
    let scratch = Scratch::new();
    scratch.fails(1, "no-such.qcow2", &["info", "no-such.qcow2"]);
    scratch.fails(1, ".", &["info", "."]);
    scratch.write("empty.qcow2", b"");
    scratch.fails(4, "empty.qcow2", &["info", "-f", "qcow2", "empty.qcow2"]);
    scratch.write("magic.qcow2", b"QFI\xfb\0\0\0\x03");
    scratch.fails(4, "magic.qcow2", &["info", "magic.qcow2"]);
    scratch.write("zeroes.qcow2", &[0; 4096]);
    scratch.fails(4, "zeroes.qcow2", &["info", "-f", "qcow2", "zeroes.qcow2"]);
    scratch.fails(2, "'vhdx2'", &["info", "-f", "vhdx2", "magic.qcow2"]);
}

#[test]
fn names_with_control_characters_do_not_reach_the_terminal() {
    let scratch = Scratch::new();
    let answer = scratch.fails(1, "\\u{1b}", &["info", "a\x1b[31m.img"]);
    assert!(!answer.stderr.contains('\x1b'), "{answer:?}");
}

#[test]
fn a_writer_elsewhere_locks_it_and_is_named() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    peer(&dir, "qemu-img", &["create", "-q", "-f", "qcow2", "disk.qcow2", "1M"]);
    let writer = common::Writer::start(&dir, "disk.qcow2");
    let answer = scratch.fails(6, "in use", &["info", "disk.qcow2"]);
    assert!(answer.stderr.contains(&writer.pid().to_string()), "{answer:?}");
    assert!(answer.stderr.contains("qemu-io"), "{answer:?}");
    assert!(answer.stderr.contains("hint: "), "{answer:?}");
    scratch.ok(&["info", "--force-share", "disk.qcow2"]);
    drop(writer);
    scratch.ok(&["info", "disk.qcow2"]);
}

/// How often `vdkit info` reads an image.
fn reads_of_info(scratch: &Scratch, image: &str) -> usize {
    let output = std::process::Command::new("strace")
        .args(["-f", "-y", "-e", "trace=read,pread64,preadv,preadv2,readv,io_uring_enter"])
        .args([env!("CARGO_BIN_EXE_vdkit"), "info", image])
        .current_dir(scratch.path(""))
        .output()
        .expect("strace; `make peers` installs it");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    log.lines().filter(|line| line.contains(&format!("{image}>"))).count()
}

#[test]
fn reads_a_bounded_number_of_times() {
    let scratch = Scratch::new();
    let dir = scratch.path("");
    for (name, size, options) in [
        ("empty.qcow2", "16T", "cluster_size=64K"),
        ("allocated.qcow2", "10G", "preallocation=metadata"),
        ("small.qcow2", "64M", "cluster_size=512"),
        ("large.qcow2", "1T", "cluster_size=2M"),
    ] {
        peer(&dir, "qemu-img", &["create", "-q", "-f", "qcow2", "-o", options, name, size]);
        let bare = reads_of_info(&scratch, name);
        assert!((1..=4).contains(&bare), "{name}: {bare} reads");
        // With all that is listed.
        for snapshot in 0..12 {
            peer(&dir, "qemu-img", &["snapshot", "-c", &format!("snapshot-{snapshot}"), name]);
        }
        for bitmap in ["one", "two", "three"] {
            peer(&dir, "qemu-img", &["bitmap", "--add", name, bitmap]);
        }
        let full = reads_of_info(&scratch, name);
        assert!((1..=4).contains(&full), "{name} with snapshots and bitmaps: {full} reads");
    }
}
