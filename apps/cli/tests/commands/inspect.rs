//! `vdkit inspect`.

use std::path::Path;

use crate::common::{Scratch, Writer, peer};
use serde_json::Value;
use vdkit::jobs::inspect::{Code, Weight};

/// The codes of an answer that are not mere notes.
fn codes(json: &Value) -> Vec<&str> {
    let findings = json["findings"].as_array().unwrap();
    let heavy = findings.iter().filter(|finding| finding["severity"] != "note");
    heavy.map(|finding| finding["code"].as_str().unwrap()).collect()
}

fn img(scratch: &Scratch, arguments: &[&str]) {
    peer(&scratch.path(""), "qemu-img", arguments);
}

/// The answer of an inspection, whose time no busy host may use up.
fn inspect(scratch: &Scratch, code: i32, arguments: &[&str]) -> Value {
    scratch.json_of("inspect", code, &[&["--timeout", "600"], arguments].concat())
}

/// A sound image of qcow2 as QEMU makes it, with data.
fn qcow2(scratch: &Scratch, name: &str) {
    img(scratch, &["create", "-q", "-f", "qcow2", name, "64M"]);
    peer(&scratch.path(""), "qemu-io", &["-f", "qcow2", "-c", "write -P 5 0 1M", name]);
}

#[test]
fn a_sound_image_is_accepted_within_a_whole_sandbox() {
    let scratch = Scratch::new();
    qcow2(&scratch, "disk.qcow2");
    let json = inspect(&scratch, 0, &["disk.qcow2"]);
    assert_eq!(
        (json["verdict"].as_str(), json["depth"].as_str()),
        (Some("accept"), Some("metadata"))
    );
    assert!(json["findings"].as_array().unwrap().is_empty(), "{json:#}");
    assert_eq!(json["data-bytes"], 1 << 20);
    assert!(json["reads"].as_u64() <= Some(20), "{json:#}");
    // The kernels that the tests run on have both; without, this test shall fail and say so.
    assert_eq!(json["sandbox"]["complete"], true, "{json:#}");
    assert!(json["sandbox"]["landlock-abi"].as_u64() >= Some(1), "{json:#}");
    let answer = scratch.ok(&["inspect", "disk.qcow2"]);
    assert_eq!(answer.stdout, "disk.qcow2: accepted (qcow2, a disk of 64 MiB)\n");
    assert_eq!(answer.stderr, "");
}

/// Images of all formats and kinds that QEMU makes, `a.qcow2` among them.
fn make_images_of_qemus_formats(scratch: &Scratch) {
    qcow2(scratch, "a.qcow2");
    let create = |format: &str, options: &[&str], name: &str| {
        let mut all = vec!["create", "-q", "-f", format];
        all.extend(options);
        all.extend([name, "16M"]);
        img(scratch, &all);
    };
    let secret = ["--object", "secret,id=s,data=abc"];
    create("raw", &[], "disk.raw");
    create("vmdk", &[], "sparse.vmdk");
    create("vmdk", &["-o", "subformat=monolithicFlat"], "flat.vmdk");
    create("vmdk", &["-o", "subformat=twoGbMaxExtentSparse"], "two.vmdk");
    create("vdi", &[], "disk.vdi");
    create("vpc", &[], "dynamic.vhd");
    create("vpc", &["-o", "subformat=fixed,force_size=on"], "fixed.vhd");
    create("vhdx", &[], "disk.vhdx");
    create("qed", &[], "disk.qed");
    create("luks", &[&secret[..], &["-o", "key-secret=s,iter-time=10"]].concat(), "disk.luks");
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    create("qcow2", &[&secret[..], &["-o", luks]].concat(), "luks.qcow2");
    create("qcow2", &["-o", "data_file=data.raw"], "data.qcow2");
    create("qcow2", &["-b", "a.qcow2", "-F", "qcow2"], "over.qcow2");
    create("qcow2", &["-b", "a.qcow2", "-F", "qcow2", "-u"], "over2.qcow2");
    create("qcow2", &["-o", "extended_l2=on"], "extended.qcow2");
    create("qcow2", &["-o", "compat=0.10"], "old.qcow2");
    create("qcow2", &["-o", "preallocation=metadata"], "full.qcow2");
    img(
        scratch,
        &["convert", "-O", "vmdk", "-o", "subformat=streamOptimized", "a.qcow2", "s.vmdk"],
    );
    img(scratch, &["convert", "-c", "-O", "qcow2", "a.qcow2", "small.qcow2"]);
    img(scratch, &["convert", "-f", "raw", "-O", "qcow2", "a.qcow2", "nested.qcow2"]);
    qcow2(scratch, "snap.qcow2");
    img(scratch, &["snapshot", "-c", "one", "snap.qcow2"]);
}

/// Asserts what the policy may say of the images of [`make_images_of_qemus_formats`].
fn assert_policies_hold(scratch: &Scratch) {
    for (name, what) in [
        ("over.qcow2", "backing"),
        ("data.qcow2", "data-file"),
        ("luks.qcow2", "encryption"),
        ("extended.qcow2", "extended-l2"),
        ("nested.qcow2", "nested"),
    ] {
        inspect(scratch, 0, &["--allow", what, name]);
    }
    inspect(scratch, 5, &["--strict", "snap.qcow2"]);
    inspect(scratch, 0, &["--strict", "--allow", "snapshots", "snap.qcow2"]);
    inspect(scratch, 5, &["--max-size", "32M", "a.qcow2"]);
}

#[test]
fn images_of_qemus_formats() {
    let scratch = Scratch::new();
    make_images_of_qemus_formats(&scratch);
    for (name, format, code, heavy) in [
        ("disk.raw", "raw", 0, &[][..]),
        ("sparse.vmdk", "vmdk", 0, &["contents-not-checked"]),
        ("s.vmdk", "vmdk", 0, &["contents-not-checked"]),
        ("flat.vmdk", "vmdk", 5, &["vmdk-create-type", "extent-file"]),
        ("two.vmdk", "vmdk", 5, &["vmdk-create-type", "extent-file"]),
        ("disk.vdi", "vdi", 0, &["contents-not-checked"]),
        ("dynamic.vhd", "vhd", 0, &["contents-not-checked"]),
        ("fixed.vhd", "vhd", 0, &["contents-not-checked"]),
        ("disk.vhdx", "vhdx", 0, &["contents-not-checked"]),
        ("disk.qed", "qed", 5, &["format-banned"]),
        ("disk.luks", "luks", 5, &["encrypted"]),
        ("luks.qcow2", "qcow2", 5, &["encrypted"]),
        ("data.qcow2", "qcow2", 5, &["data-file"]),
        ("over.qcow2", "qcow2", 5, &["backing-file"]),
        ("over2.qcow2", "qcow2", 5, &["backing-file"]),
        ("extended.qcow2", "qcow2", 5, &["extended-l2"]),
        ("old.qcow2", "qcow2", 0, &[]),
        ("full.qcow2", "qcow2", 0, &[]),
        ("small.qcow2", "qcow2", 0, &[]),
        ("nested.qcow2", "qcow2", 5, &["nested-format"]),
        ("snap.qcow2", "qcow2", 0, &["internal-snapshots"]),
    ] {
        let json = inspect(&scratch, code, &[name]);
        assert_eq!(json["format"], format, "{name}: {json:#}");
        assert_eq!(codes(&json), heavy, "{name}: {json:#}");
    }
    // As the tools of OpenStack are told what to expect.
    assert_eq!(codes(&inspect(&scratch, 5, &["-f", "raw", "a.qcow2"])), ["format-mismatch"]);
    inspect(&scratch, 0, &["-f", "qcow2", "a.qcow2"]);
    inspect(&scratch, 0, &["-f", "vpc", "dynamic.vhd"]);
    assert_policies_hold(&scratch);
    // A backing file need not be there to be told of, and is not opened.
    std::fs::remove_file(scratch.path("a.qcow2")).unwrap();
    assert_eq!(scratch.run(&["inspect", "over.qcow2"]).code, Some(5));
}

#[test]
fn much_metadata_is_read_by_two_threads_within_the_sandbox() {
    let scratch = Scratch::new();
    img(
        &scratch,
        &["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", "big.qcow2", "64G"],
    );
    let json = inspect(&scratch, 0, &["big.qcow2"]);
    assert_eq!((&json["depth"], &json["data-bytes"]), (&"metadata".into(), &(64u64 << 30).into()));
    let json = inspect(&scratch, 5, &["--max-read", "1M", "big.qcow2"]);
    assert_eq!(codes(&json), ["limit-reads"]);
}

/// An image whose tables take much memory: a mapping of 32 MiB, all of it empty.
fn large_tables(scratch: &Scratch) {
    let options = "cluster_size=512,compat=0.10";
    img(scratch, &["create", "-q", "-f", "qcow2", "-o", options, "big.qcow2", "120G"]);
}

#[test]
fn limits_on_memory_and_time_hold() {
    let scratch = Scratch::new();
    large_tables(&scratch);
    inspect(&scratch, 0, &["big.qcow2"]);
    let json = inspect(&scratch, 5, &["--max-memory", "16M", "big.qcow2"]);
    assert_eq!(codes(&json), ["limit-memory"], "{json:#}");
    let answer = scratch.run(&["inspect", "--max-memory", "16M", "big.qcow2"]);
    assert!(answer.stdout.contains("exceed its memory limit"), "{answer:?}");
    let json = scratch.json_of("inspect", 5, &["--timeout", "0", "big.qcow2"]);
    assert_eq!(codes(&json), ["limit-time"], "{json:#}");
}

#[test]
fn the_corpus_of_hostile_images_never_harms_the_command() {
    let scratch = Scratch::new();
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dev/fuzz/corpus/qcow2_open_read");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let answer = scratch.run(&["inspect", "--json", path.to_str().unwrap()]);
        assert!(matches!(answer.code, Some(0 | 5)), "{}: {answer:?}", path.display());
        let json: Value = serde_json::from_str(&answer.stdout).unwrap();
        for code in codes(&json) {
            let failed = code.starts_with("inspector") || code.starts_with("limit");
            assert!(!failed, "{}: {json:#}", path.display());
        }
        seen += 1;
    }
    assert!(seen >= 10, "{seen}");
}

#[test]
fn damaged_images_are_refused_with_the_place() {
    let scratch = Scratch::new();
    qcow2(&scratch, "disk.qcow2");
    let bytes = std::fs::read(scratch.path("disk.qcow2")).unwrap();
    scratch.write("cut.qcow2", &bytes[..bytes.len() - (192 << 10)]);
    let json = inspect(&scratch, 5, &["cut.qcow2"]);
    assert!(codes(&json).contains(&"outside-file"), "{json:#}");
    assert!(json["findings"][0]["where"].is_u64(), "{json:#}");
    let answer = scratch.run(&["inspect", "cut.qcow2"]);
    assert!(answer.stdout.contains("refuse: outside-file at offset 0x"), "{answer:?}");
    scratch.write("empty.img", b"");
    assert_eq!(codes(&inspect(&scratch, 5, &["empty.img"])), ["empty-file"]);
}

#[test]
fn names_from_an_image_make_no_lines_and_no_colors() {
    let scratch = Scratch::new();
    let evil = "x\x1b[2J\nverdict: accepted";
    img(&scratch, &["create", "-q", "-f", "qcow2", "-u", "-b", evil, "-F", "raw", "d.qcow2", "1M"]);
    let answer = scratch.run(&["inspect", "d.qcow2"]);
    assert_eq!(answer.code, Some(5), "{answer:?}");
    assert!(!answer.stdout.contains('\x1b'), "{answer:?}");
    assert!(!answer.stdout.lines().any(|line| line.starts_with("verdict")), "{answer:?}");
}

#[test]
fn what_cannot_be_judged_is_not_accepted() {
    let scratch = Scratch::new();
    scratch.fails(1, "no-such", &["inspect", "no-such.qcow2"]);
    scratch.fails(1, "is a directory", &["inspect", "."]);
    scratch.fails(2, "unknown format", &["inspect", "-f", "doc", "."]);
    for arguments in [&["inspect", "--allow", "all", "x"][..], &["inspect", "--timeout", "-1", "x"]]
    {
        assert_eq!(scratch.run(arguments).code, Some(2), "{arguments:?}");
    }
    // The child is for the parent.
    let answer = scratch.run(&["__inspect"]);
    assert_eq!((answer.code, answer.stdout.as_str()), (Some(2), ""), "{answer:?}");
    assert!(answer.stderr.contains("use 'vdkit inspect IMAGE'"), "{answer:?}");
}

#[test]
fn an_image_in_use_is_refused() {
    let scratch = Scratch::new();
    qcow2(&scratch, "disk.qcow2");
    let writer = Writer::start(&scratch.path(""), "disk.qcow2");
    scratch.fails(6, &writer.pid().to_string(), &["inspect", "disk.qcow2"]);
    assert!(matches!(scratch.run(&["inspect", "-U", "disk.qcow2"]).code, Some(0 | 5)));
}

#[test]
fn every_code_is_documented_and_in_the_schema() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/commands/inspect.md")).unwrap();
    let schema = std::fs::read_to_string(root.join("docs/schemas/inspect.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    for code in Code::ALL {
        let weight = match code.weight() {
            Weight::Refuse => "refuse",
            Weight::Warn => "warn",
            Weight::Note => "note",
        };
        let row = format!("| `{}` | {weight} | {} |", code.name(), code.meaning());
        assert!(page.contains(&row), "{row}");
    }
    let named = schema["$defs"]["finding"]["properties"]["code"]["enum"].as_array().unwrap();
    let all: Vec<&str> = Code::ALL.iter().map(|code| code.name()).collect();
    assert_eq!(named, &all);
}
