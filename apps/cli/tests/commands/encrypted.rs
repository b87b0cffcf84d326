//! Encrypted images through the commands, both ways with QEMU: what one program writes, takes,
//! marks, mends and measures, the other one reads.

use std::path::Path;
use std::process::Command;

use crate::common::{self, Scratch};

const LUKS: &str = "encrypt.format=luks,encrypt.iter-time=10";
const KEY: [&str; 2] = ["--key-file", "s.key"];
const KEYS: [&str; 4] = ["--key-file", "s.key", "--key-file", "t.key"];

/// A folder with two keys.
fn scratch() -> Scratch {
    let scratch = Scratch::new();
    scratch.write("s.key", b"the first key");
    scratch.write("t.key", b"the second key");
    scratch
}

fn ok(scratch: &Scratch, arguments: &[&str], keys: &[&str]) -> common::Answer {
    scratch.ok(&[arguments, keys].concat())
}

/// Runs a program of QEMU's, with the keys as the secrets `s` and `t`; returns what it says.
fn qemu(scratch: &Scratch, program: &str, arguments: &[&str]) -> String {
    let folder = scratch.path("");
    let (first, rest) = arguments.split_at(usize::from(program == "qemu-img"));
    let secrets = ["--object", "secret,id=s,file=s.key", "--object", "secret,id=t,file=t.key"];
    let mut command = Command::new(program);
    let output = command.args(first).args(secrets).args(rest).current_dir(&folder).output();
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    let silent = ["Pattern verification failed", "failed:", "Could not open"];
    let failed = program == "qemu-io" && silent.iter().any(|words| said.contains(words));
    assert!(output.status.success() && !failed, "{program} {arguments:?}: {said}");
    said
}

/// How QEMU opens an image.
fn spec(image: &str) -> String {
    if Path::new(image).extension().is_some_and(|e| e == "luks") {
        format!("driver=luks,key-secret=s,file.filename={image}")
    } else {
        format!("driver=qcow2,encrypt.key-secret=s,file.filename={image}")
    }
}

/// Commands of qemu-io on an image.
fn qemu_io(scratch: &Scratch, image: &str, commands: &[&str]) -> String {
    let spec = spec(image);
    let mut arguments = vec!["--image-opts", &spec];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    qemu(scratch, "qemu-io", &arguments)
}

fn qemu_img(scratch: &Scratch, before: &[&str], image: &str, behind: &[&str]) -> String {
    let spec = spec(image);
    qemu(scratch, "qemu-img", &[before, &["--image-opts", &spec], behind].concat())
}

/// An encrypted image of 4 MiB that we make, and one that QEMU makes.
fn images(scratch: &Scratch) -> [&'static str; 2] {
    ok(scratch, &["create", "ours.qcow2", "4M", "-o", LUKS], &KEY);
    let options = format!("{LUKS},encrypt.key-secret=s,cluster_size=4k");
    let arguments = ["create", "-q", "-f", "qcow2", "-o", &options, "theirs.qcow2", "4M"];
    qemu(scratch, "qemu-img", &arguments);
    ["ours.qcow2", "theirs.qcow2"]
}

fn write(scratch: &Scratch, image: &str, pattern: &str, at: &str, len: &str) {
    ok(scratch, &["write", image, "--pattern", pattern, at, len], &KEY);
}

fn sound(scratch: &Scratch, image: &str) {
    scratch.ok(&["check", image]);
    qemu_img(scratch, &["check", "-q"], image, &[]);
}

#[test]
fn snapshots_of_either_program() {
    let scratch = scratch();
    for image in images(&scratch) {
        write(&scratch, image, "1", "100", "1M");
        ok(&scratch, &["snapshot", "create", image, "one"], &KEY);
        qemu_io(&scratch, image, &["read -P 1 100 1M", "write -P 2 512K 1M"]);
        qemu_img(&scratch, &["snapshot", "-c", "two"], image, &[]);
        write(&scratch, image, "3", "0", "3M");
        let list = scratch.json_of("snapshot", 0, &[&["list", image], &KEY[..]].concat());
        let names: Vec<&str> = list["snapshots"]
            .as_array()
            .unwrap()
            .iter()
            .map(|s| s["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["one", "two"]);
        assert!(qemu_img(&scratch, &["snapshot", "-l"], image, &[]).contains("two"));

        for (name, at, value) in [("one", 100, 1), ("two", 700 << 10, 2)] {
            let convert = ["convert", "--snapshot", name, image, "view.raw"];
            ok(&scratch, &convert, &KEY);
            let bytes = std::fs::read(scratch.path("view.raw")).unwrap();
            assert_eq!((bytes[at], bytes[3 << 20]), (value, 0), "{image}: {name}");
            let compare = ["compare", "--snapshot", name, "-F", "raw", image, "view.raw"];
            ok(&scratch, &compare, &KEY);
            let map = [&["--snapshot", name, image], &KEY[..]].concat();
            let runs = scratch.json_of("map", 0, &map);
            assert!(runs.as_array().unwrap().iter().any(|run| run["data"] == true), "{runs}");
            let read = ["read", "--snapshot", name, image, &at.to_string(), "1"];
            assert_eq!(ok(&scratch, &read, &KEY).bytes, [value]);
        }
        ok(&scratch, &["snapshot", "apply", image, "one"], &KEY);
        qemu_io(&scratch, image, &["read -P 1 100 1M", "read -P 0 2M 2M"]);
        qemu_img(&scratch, &["snapshot", "-a", "two"], image, &[]);
        let bytes = ok(&scratch, &["read", image, "500K", "32K"], &KEY).bytes;
        assert_eq!((bytes[0], bytes[20 << 10]), (1, 2), "{image}");
        ok(&scratch, &["snapshot", "rename", image, "two", "zwei"], &KEY);
        ok(&scratch, &["snapshot", "delete", image, "one"], &KEY);
        sound(&scratch, image);
        qemu_img(&scratch, &["snapshot", "-d", "zwei"], image, &[]);
        sound(&scratch, image);
        qemu_io(&scratch, image, &["read -P 1 100 500K", "read -P 2 512K 1M"]);
        scratch.fails(1, "no key is given", &["snapshot", "create", image, "three"]);
    }
}

#[test]
fn bitmaps_of_either_program() {
    let scratch = scratch();
    for image in images(&scratch) {
        ok(&scratch, &["bitmap", "add", "-g", "64K", image, "ours"], &KEY);
        qemu_img(&scratch, &["bitmap", "--add", "-g", "64k"], image, &["theirs"]);
        qemu_io(&scratch, image, &["write -P 1 64K 64K"]);
        write(&scratch, image, "2", "1M", "100");
        for name in ["ours", "theirs"] {
            let dirty = [&["dirty", image, name], &KEY[..]].concat();
            let json = scratch.json_of("bitmap", 0, &dirty).to_string();
            assert!(json.contains("65536") && json.contains("1048576"), "{image}: {json}");
        }
        ok(&scratch, &["bitmap", "clear", image, "ours"], &KEY);
        ok(&scratch, &["bitmap", "disable", image, "ours"], &KEY);
        ok(&scratch, &["bitmap", "merge", image, "ours", "theirs"], &KEY);
        qemu_img(&scratch, &["bitmap", "--remove"], image, &["theirs"]);
        let dirty = [&["dirty", image, "ours"], &KEY[..]].concat();
        assert!(scratch.json_of("bitmap", 0, &dirty).to_string().contains("1048576"));
        ok(&scratch, &["bitmap", "remove", image, "ours"], &KEY);
        sound(&scratch, image);
        qemu_io(&scratch, image, &["read -P 1 64K 64K", "read -P 2 1M 100"]);
    }
}

#[test]
fn sizes_change_both_ways() {
    let scratch = scratch();
    ok(&scratch, &["create", "ours.luks", "4M", "-o", "iter-time=10"], &KEY);
    let [ours, theirs] = images(&scratch);
    for image in [ours, theirs, "ours.luks"] {
        write(&scratch, image, "7", "0", "4M");
        ok(&scratch, &["resize", image, "6M"], &KEY);
        ok(&scratch, &["resize", "--shrink", image, "3000000"], &KEY);
        if image == "ours.luks" {
            // QEMU leaves noise where a container is new.
            ok(&scratch, &["resize", image, "5M"], &KEY);
        } else {
            // QEMU trusts that a cut cluster holds zeroes behind the end of the disk.
            qemu_img(&scratch, &["resize", "-q"], image, &["5M"]);
        }
        // Up to the sector in which it was cut, and zeroes from there on.
        qemu_io(&scratch, image, &["read -P 7 0 3000000", "read -P 0 3000320 2242560"]);
        qemu_img(&scratch, &["resize", "-q"], image, &["6M"]);
        assert_eq!(ok(&scratch, &["read", image, "0", "1"], &KEY).bytes, [7]);
        let info = scratch.json_of("info", 0, &[image]);
        assert_eq!(info["virtual-size"], 6 << 20, "{image}");
        scratch.fails(2, "less than", &[&["resize", image, "1M"], &KEY[..]].concat());
    }
    sound(&scratch, ours);
    sound(&scratch, theirs);
}

#[test]
fn properties_change_without_a_key() {
    let scratch = scratch();
    for image in images(&scratch) {
        write(&scratch, image, "5", "300", "2M");
        let options = "refcount_bits=32,lazy_refcounts=on,encrypt.format=luks";
        scratch.ok(&["amend", image, "-o", options]);
        sound(&scratch, image);
        qemu_io(&scratch, image, &["read -P 5 300 2M", "write -P 6 3M 1M"]);
        assert_eq!(ok(&scratch, &["read", image, "3M", "1"], &KEY).bytes, [6]);
        ok(&scratch, &["amend", image, "-o", "size=5M"], &KEY);
        qemu_io(&scratch, image, &["read -P 0 4M 1M"]);
        // What cannot be, and what can instead.
        for (options, hint) in [
            ("compat=0.10,refcount_bits=16,lazy_refcounts=off", "convert instead"),
            ("encrypt.iter-time=10", "vdkit key change"),
            ("encrypt.cipher-alg=aes-128", "-o encrypt.format=luks,encrypt.cipher-alg=aes-128"),
            ("cluster_size=2M", "-o cluster_size=2M"),
            ("size=6M", "--key-file"),
        ] {
            let answer = scratch.run(&["amend", image, "-o", options]);
            assert_ne!(answer.code, Some(0), "{options}");
            assert!(answer.stderr.contains(hint), "{options}: {answer:?}");
        }
    }
    // Version 2, as both programs make it.
    let options = format!("{LUKS},compat=0.10");
    ok(&scratch, &["create", "old.qcow2", "1M", "-o", &options], &KEY);
    write(&scratch, "old.qcow2", "5", "300", "100K");
    scratch.ok(&["amend", "old.qcow2", "-o", "compat=1.1,lazy_refcounts=on"]);
    sound(&scratch, "old.qcow2");
    qemu_io(&scratch, "old.qcow2", &["read -P 5 300 100K"]);
}

/// A cluster more at the end of the file, with a reference that nobody has.
fn leak(scratch: &Scratch, image: &str) {
    let path = scratch.path(image);
    let mut bytes = std::fs::read(&path).unwrap();
    let be64 = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    // The header's words at 16 (bytes of the backing file's name) and 20 (bits of a cluster).
    let cluster = 1 << (be64(16) & 0xff);
    let (block, clusters) = (be64(be64(48)), bytes.len().div_ceil(cluster));
    bytes.resize((clusters + 1) * cluster, 0);
    bytes[block + 2 * clusters..][..2].copy_from_slice(&[0, 1]);
    std::fs::write(&path, bytes).unwrap();
}

#[test]
fn repairs_and_compaction_keep_the_data() {
    let scratch = scratch();
    for image in images(&scratch) {
        write(&scratch, image, "9", "100", "3M");
        leak(&scratch, image);
        let json = scratch.json_of("check", 3, &[image]);
        assert!(json["leaks"].as_u64() >= Some(1), "{json}");
        scratch.ok(&["check", "--repair", "leaks", image]);
        sound(&scratch, image);
        qemu_io(&scratch, image, &["read -P 9 100 3M", "discard 0 1M"]);
        scratch.ok(&["compact", image]);
        sound(&scratch, image);
        qemu_io(&scratch, image, &["read -P 9 1M 2M"]);
        let copy = ["convert", image, "copy.qcow2", "-o", LUKS, "--target-key-file", "t.key"];
        ok(&scratch, &copy, &KEY);
        ok(&scratch, &["compare", image, "copy.qcow2"], &KEYS);
        scratch.fails(1, "copy.qcow2", &[&["compare", image, "copy.qcow2"], &KEY[..]].concat());
    }
}

#[test]
fn overlays_change_their_base() {
    let scratch = scratch();
    ok(&scratch, &["create", "old.qcow2", "4M", "-o", LUKS], &KEY);
    ok(&scratch, &["create", "new.luks", "2M", "-o", "iter-time=10,preallocation=full"], &KEY);
    write(&scratch, "old.qcow2", "1", "0", "4M");
    write(&scratch, "new.luks", "2", "1M", "512K");
    let create = ["create", "top.qcow2", "--backing", "old.qcow2", "-o", LUKS];
    ok(&scratch, &create, &["--key-file", "t.key"]);
    ok(&scratch, &["write", "top.qcow2", "--pattern", "3", "3M", "100K"], &KEYS);
    ok(&scratch, &["convert", "top.qcow2", "before.raw"], &KEYS);
    let same = || ok(&scratch, &["compare", "-F", "raw", "top.qcow2", "before.raw"], &KEYS);

    ok(&scratch, &["rebase", "--backing", "new.luks", "top.qcow2"], &KEYS);
    same();
    scratch.ok(&["check", "top.qcow2"]);
    scratch.fails(1, "new.luks", &["rebase", "--no-backing", "top.qcow2", "--key-file", "t.key"]);
    // Only the name: no key.
    scratch.ok(&["rebase", "--unsafe", "--backing", "./new.luks", "top.qcow2"]);
    same();
    // The base is shorter, and what it grows by is noise until it is written.
    ok(&scratch, &["commit", "top.qcow2"], &KEYS);
    same();
    ok(&scratch, &["compare", "-F", "raw", "new.luks", "before.raw"], &KEY);
    qemu_io(&scratch, "new.luks", &["read -P 1 0 3M", "read -P 3 3M 100K"]);
    ok(&scratch, &["rebase", "--no-backing", "top.qcow2"], &KEYS);
    let key = ["--key-file", "t.key"];
    ok(&scratch, &["compare", "-F", "raw", "top.qcow2", "before.raw"], &key);

    // Kept as it is, the overlay cannot hide what a container grows by.
    ok(&scratch, &["create", "small.luks", "1M", "-o", "iter-time=10"], &KEY);
    let create = ["create", "kept.qcow2", "3M", "--backing", "small.luks", "-o", LUKS];
    ok(&scratch, &create, &["--key-file", "t.key"]);
    let commit = [&["commit", "--keep", "kept.qcow2"], &KEYS[..]].concat();
    let answer = scratch.fails(1, "small.luks", &commit);
    assert!(
        answer.stderr.contains("vdkit resize") && answer.stderr.contains("3145728"),
        "{answer:?}"
    );
    ok(&scratch, &["resize", "small.luks", "3145728"], &KEY);
    scratch.ok(&commit);
}

/// Into and out of each kind of encryption, by either program, with the other one reading.
#[test]
fn conversions_both_ways() {
    let scratch = scratch();
    let content: Vec<u8> =
        (0..3u32 << 20).map(|i| if i >> 19 & 1 == 0 { (i / 700) as u8 } else { 0 }).collect();
    scratch.write("flat.raw", &content);
    for (number, (image, format, options)) in [
        ("a.qcow2", "qcow2", "encrypt.format=luks,encrypt.iter-time=10"),
        ("b.luks", "luks", "iter-time=10,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256"),
        (
            "c.qcow2",
            "qcow2",
            "encrypt.format=luks,encrypt.iter-time=10,cluster_size=512,preallocation=metadata",
        ),
        (
            "d.qcow2",
            "qcow2",
            "encrypt.format=luks,encrypt.iter-time=10,extended_l2=on,encrypt.cipher-alg=aes-128",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let convert = ["convert", "-f", "raw", "flat.raw", image, "-O", format, "-o", options];
        ok(&scratch, &convert, &["--target-key-file", "s.key"]);
        qemu_img(&scratch, &["convert", "-O", "raw"], image, &["back.raw"]);
        assert!(std::fs::read(scratch.path("back.raw")).unwrap() == content, "{image} by QEMU");
        // A second of measuring for each that QEMU makes.
        if number > 1 {
            continue;
        }
        std::fs::remove_file(scratch.path(image)).unwrap();
        let prefix = if format == "luks" { "" } else { "encrypt." };
        let options = format!("{options},{prefix}key-secret=s");
        let convert = ["convert", "-f", "raw", "-O", format, "-o", &options, "flat.raw", image];
        qemu(&scratch, "qemu-img", &convert);
        ok(&scratch, &["convert", image, "back.raw", "--verify"], &KEY);
        assert!(std::fs::read(scratch.path("back.raw")).unwrap() == content, "QEMU's {image}");
        let dd = [
            "dd",
            &format!("if={image}"),
            "of=part.raw",
            "bs=1000",
            "skip=3",
            "count=2000",
            "-O",
            "raw",
        ];
        ok(&scratch, &dd, &KEY);
        let part = std::fs::read(scratch.path("part.raw")).unwrap();
        // As in qemu-img, what is skipped counts.
        assert!(part[..1_997_000] == content[3000..2_000_000], "{image}");
        let compare = ["compare", "-F", "raw", image, "part.raw"];
        let answer = scratch.run(&[&compare, &KEY[..]].concat());
        assert_eq!(answer.code, Some(3), "{answer:?}");
    }
}

/// What an image will take is what QEMU says, and what it takes.
#[test]
fn measured_as_qemu_measures() {
    let scratch = scratch();
    for (format, options, secret) in [
        ("qcow2", "encrypt.format=luks", "encrypt.key-secret=s"),
        (
            "qcow2",
            "encrypt.format=luks,cluster_size=4k,encrypt.cipher-alg=aes-128",
            "encrypt.key-secret=s",
        ),
        ("luks", "cipher-alg=aes-128", "key-secret=s"),
    ] {
        let ours = scratch.json_of("measure", 0, &["--size", "1G", "-O", format, "-o", options]);
        let all = format!("{options},{secret}");
        let arguments = ["measure", "--output", "json", "--size", "1G", "-O", format, "-o", &all];
        let theirs: serde_json::Value =
            serde_json::from_str(&qemu(&scratch, "qemu-img", &arguments)).unwrap();
        for key in ["required", "fully-allocated"] {
            assert_eq!(ours[key], theirs[key], "{format} {options}: {key}");
        }
    }
}

#[test]
fn without_a_key_or_with_another_one() {
    let scratch = scratch();
    let [image, _] = images(&scratch);
    ok(&scratch, &["create", "c.luks", "1M", "-o", "iter-time=10"], &KEY);
    for image in [image, "c.luks"] {
        for arguments in [
            &["read", image, "0", "1"][..],
            &["write", image, "--pattern", "1", "0", "1"],
            &["convert", image, "out.raw"],
            &["convert", image, "null:"],
            &["map", image],
            &["compare", image, image],
            &["resize", image, "8M"],
        ] {
            let answer = scratch.fails(1, image, arguments);
            assert!(answer.stderr.contains("--key-file"), "{arguments:?}: {answer:?}");
            let wrong = [arguments, &["--key-file", "t.key"]].concat();
            scratch.fails(1, "key slots", &wrong);
        }
        // What looks at metadata alone.
        scratch.ok(&["info", image]);
        scratch.ok(&["check", image]);
        scratch.ok(&["key", "list", image]);
        scratch.ok(&["tree", image]);
    }
    assert!(!scratch.path("out.raw").exists());
}

/// Takes the sizes out of the entries of an image's snapshots, as they were before version 3.
fn forget_sizes(path: &Path) {
    let mut image = std::fs::read(path).unwrap();
    let number = |bytes: &[u8]| bytes.iter().fold(0, |n, &b| n << 8 | usize::from(b));
    let (count, table) = (number(&image[60..64]), number(&image[64..72]));
    let (mut from, mut to) = (table, table);
    for _ in 0..count {
        let extra = number(&image[from + 36..from + 40]);
        let names = number(&image[from + 12..from + 14]) + number(&image[from + 14..from + 16]);
        assert!(extra >= 16, "it says its sizes");
        image.copy_within(from..from + 40, to);
        image[to + 36..to + 40].fill(0);
        image.copy_within(from + 40 + extra..from + 40 + extra + names, to + 40);
        from = (from + 40 + extra + names).next_multiple_of(8);
        to = (to + 40 + names).next_multiple_of(8);
    }
    std::fs::write(path, image).unwrap();
}

#[test]
fn old_snapshots_of_an_encrypted_image_get_their_sizes_without_a_key() {
    let scratch = scratch();
    let options = format!("compat=0.10,{LUKS}");
    ok(&scratch, &["create", "disk.qcow2", "1M", "-o", &options], &KEY);
    ok(&scratch, &["write", "disk.qcow2", "0", "300K", "--pattern", "7"], &KEY);
    ok(&scratch, &["snapshot", "create", "disk.qcow2", "first"], &KEY);
    ok(&scratch, &["write", "disk.qcow2", "64K", "100K", "--pattern", "8"], &KEY);
    ok(&scratch, &["snapshot", "create", "disk.qcow2", "second"], &KEY);
    let read =
        |more: &[&str]| ok(&scratch, &[&["read", "disk.qcow2", "0"], more].concat(), &KEY).bytes;
    let before = read(&[]);
    forget_sizes(&scratch.path("disk.qcow2"));
    scratch.ok(&["amend", "disk.qcow2", "-o", "compat=1.1"]);
    scratch.ok(&["check", "disk.qcow2"]);
    qemu(&scratch, "qemu-img", &["check", "-q", "--image-opts", &spec("disk.qcow2")]);
    assert!(read(&[]) == before);
    for (name, second) in [("first", 7), ("second", 8)] {
        ok(&scratch, &["snapshot", "apply", "disk.qcow2", name], &KEY);
        let bytes = read(&[]);
        assert_eq!((bytes[0], bytes[64 << 10], bytes[(300 << 10) - 1]), (7, second, 7), "{name}");
        assert_eq!(bytes[300 << 10], 0, "{name}");
    }
}
