//! `vdkit validate`, and `--for` of `create` and `convert`.

use std::process::Command;

use crate::common::{Scratch, peer};
use serde_json::Value;
use vdkit::jobs::Preset;

/// The name of an image for a target.
fn named(preset: Preset, stem: &str) -> String {
    let ending = match preset.format() {
        "vpc" => "vhd",
        format => format,
    };
    format!("{stem}.{ending}")
}

/// Presets whose format can be made, and their formats' names.
fn makeable() -> impl Iterator<Item = Preset> {
    Preset::ALL.into_iter().filter(|preset| vdkit::format(preset.format()).is_ok())
}

fn rules(report: &Value) -> Vec<String> {
    let objections = report["objections"].as_array().unwrap();
    let rules = objections.iter().map(|found| found["rule"].as_str().unwrap().to_owned());
    rules.collect()
}

/// Asks for exactly these rules, runs the commands that mend it, and asks again.
fn mended(scratch: &Scratch, target: &str, arguments: &[&str], rules_wanted: &[&str]) {
    let ask = |code: i32, arguments: &[&str]| {
        scratch.json_of("validate", code, &[&["--for", target][..], arguments].concat())
    };
    let report = ask(3, arguments);
    assert_eq!(rules(&report), rules_wanted, "{target} {arguments:?}: {report:#}");
    assert_eq!(report["accepted"], false);
    let image = arguments.last().unwrap();
    let mut now = (*image).to_owned();
    for objection in report["objections"].as_array().unwrap() {
        let mend = objection["mend"].as_str().unwrap();
        let new = match image.rsplit_once('.') {
            Some((stem, _)) if target == "azure" => format!("{stem}-{target}.vhd"),
            _ => format!("{image}.{target}"),
        };
        if mend.contains("NEW") {
            now = new.clone();
        } else if let Some(renamed) = mend.strip_prefix(&format!("mv {image} ")) {
            now = renamed.to_owned();
        }
        if mend.contains("NEW") && scratch.path(&new).exists() {
            continue;
        }
        let line = mend.replace("NEW", &new).replace("vdkit ", "\"$VDKIT\" ");
        let done = Command::new("sh")
            .args(["-ec", &line])
            .env("VDKIT", env!("CARGO_BIN_EXE_vdkit"))
            .current_dir(scratch.path(""))
            .output()
            .unwrap();
        assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
    }
    let report = ask(0, &[&now]);
    assert_eq!(report["accepted"], true, "{target} {now}: {report:#}");
}

#[test]
fn what_is_made_for_a_target_is_taken_there() {
    let scratch = Scratch::new();
    // A size that fits no target's unit.
    std::fs::write(scratch.path("source.raw"), vec![7; (3 << 20) + 512]).unwrap();
    let mut made = 0;
    for preset in makeable() {
        let (name, new) = (preset.name(), named(preset, &format!("new-{preset}")));
        let copy = named(preset, &format!("copy-{preset}"));
        scratch.ok(&["create", "--for", name, &new, "1G"]);
        let report = scratch.json_of("convert", 0, &["--for", name, "source.raw", &copy]);
        let bytes = report["virtual-size"].as_u64().unwrap();
        assert!(bytes.is_multiple_of(preset.unit()) && bytes >= (3 << 20) + 512, "{preset}");
        for image in [&new, &copy] {
            let report = scratch.json_of("validate", 0, &["--for", name, image]);
            assert_eq!(rules(&report), [""; 0], "{preset} {image}: {report:#}");
        }
        assert_eq!(scratch.json_of("info", 0, &[&copy])["virtual-size"], bytes);
        let format = preset.format();
        let compare = ["compare", "-q", "-f", "raw", "-F", format, "source.raw", &copy];
        peer(&scratch.path(""), "qemu-img", &compare);
        made += 1;
    }
    assert!(made >= 6, "{made}");
    // From a pipe, whose length is known at its end only.
    let bytes = std::fs::read(scratch.path("source.raw")).unwrap();
    let arguments = ["convert", "--for", "azure", "-", "piped.vhd"];
    assert_eq!(scratch.run_with_input(&arguments, &bytes).code, Some(0));
    scratch.ok(&["validate", "--for", "azure", "piped.vhd"]);
    let compare = ["compare", "-q", "-f", "raw", "-F", "vpc", "source.raw", "piped.vhd"];
    peer(&scratch.path(""), "qemu-img", &compare);
}

#[test]
fn formats_that_a_target_does_not_read() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "3000K"]);
    scratch.ok(&["create", "a.vdi", "3M"]);
    mended(&scratch, "azure", &["a.qcow2"], &["format", "size-unit"]);
    mended(&scratch, "gcp", &["a.vdi"], &["format", "size-unit"]);
    mended(&scratch, "aws", &["a.qcow2"], &["format"]);
    mended(&scratch, "virtualbox", &["a.qcow2"], &["format"]);
    mended(&scratch, "kvm", &["a.vdi"], &["format"]);
}

#[test]
fn sizes_names_and_states() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.raw", "1M"]);
    mended(&scratch, "gcp", &["disk.raw"], &["size-unit"]);
    scratch.ok(&["create", "a disk; exit.raw", "1M"]);
    mended(&scratch, "gcp", &["a disk; exit.raw"], &["size-unit"]);
    // A fixed one of a size that Azure does not take, under a name that it does not take.
    scratch.ok(&["create", "-f", "vpc", "-o", "subformat=fixed,force_size=on", "b.img", "3000K"]);
    let report = scratch.json_of("validate", 3, &["--for", "azure", "b.img"]);
    assert_eq!(rules(&report), ["size-unit", "name"], "{report:#}");
    scratch.ok(&["create", "-f", "vpc", "dynamic.vhd", "3M"]);
    let report = scratch.json_of("validate", 3, &["--for", "azure", "dynamic.vhd"]);
    assert!(rules(&report).contains(&"footer".to_owned()), "{report:#}");
    scratch.ok(&["convert", "--for", "azure", "dynamic.vhd", "fixed.vhd"]);
    scratch.ok(&["validate", "--for", "azure", "fixed.vhd"]);
    // Memory has room for the length, if for nothing else.
    let memory = Scratch::new_in("/dev/shm");
    std::fs::File::create(memory.path("huge.raw")).unwrap().set_len(17 << 40).unwrap();
    let report = memory.json_of("validate", 3, &["--for", "aws", "huge.raw"]);
    assert_eq!(rules(&report), ["size-max"]);
    memory.ok(&["validate", "--for", "kvm", "huge.raw"]);
    // Marked corrupt: bit 1 of the incompatible features.
    scratch.ok(&["create", "bad.qcow2", "1M"]);
    let mut bytes = std::fs::read(scratch.path("bad.qcow2")).unwrap();
    bytes[79] |= 2;
    scratch.write("bad.qcow2", &bytes);
    mended(&scratch, "kvm", &["bad.qcow2"], &["sound"]);
}

#[test]
fn what_an_image_stands_on_and_is_encrypted_with() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "1G"]);
    scratch.ok(&["create", "top.qcow2", "-b", "base.qcow2"]);
    mended(&scratch, "openstack", &["top.qcow2"], &["backing"]);
    scratch.ok(&["validate", "--for", "kvm", "top.qcow2"]);
    scratch.ok(&["create", "outside.qcow2", "1G", "-o", "data_file=data.raw"]);
    mended(&scratch, "openstack", &["outside.qcow2"], &["other-files"]);
    // No other file is opened for that.
    std::fs::remove_file(scratch.path("data.raw")).unwrap();
    let report = scratch.json_of("validate", 3, &["--for", "openstack", "outside.qcow2"]);
    assert_eq!(rules(&report), ["other-files"]);
    scratch.write("key", b"secret");
    let secret = ["create", "-f", "luks", "--key-file", "key", "secret.img", "1M"];
    scratch.ok(&secret);
    let report = scratch.json_of("validate", 3, &["--for", "aws", "secret.img"]);
    assert_eq!(rules(&report), ["format", "encrypted"]);
}

#[test]
fn the_answer_for_people_names_what_to_do() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.raw", "1M"]);
    let answer = scratch.run(&["validate", "--for", "gcp", "disk.raw"]);
    assert_eq!(answer.code, Some(3));
    for words in ["would refuse it", "whole GiB", "vdkit resize -f raw disk.raw", "disk.tar.gz"] {
        assert!(answer.stdout.contains(words), "{words}: {answer:?}");
    }
    let answer = scratch.ok(&["validate", "--for", "kvm", "disk.raw"]);
    assert!(answer.stdout.contains("kvm takes it"), "{answer:?}");
    scratch.fails(2, "known: kvm", &["validate", "--for", "mainframe", "disk.raw"]);
    scratch.fails(1, "none.raw", &["validate", "--for", "kvm", "none.raw"]);
}

#[test]
fn a_preset_goes_with_its_own_format_only() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.raw", "1M"]);
    for command in ["create", "convert"] {
        let rest = if command == "create" { ["x", "1M"] } else { ["disk.raw", "x"] };
        let format = if command == "create" { "-f" } else { "-O" };
        let arguments = [&[command, "--for", "kvm", format, "raw"][..], &rest].concat();
        scratch.fails(2, "kvm takes qcow2", &arguments);
    }
    let into = ["convert", "--into", "--for", "kvm", "disk.raw", "disk.raw"];
    scratch.fails(2, "--for", &into);
    scratch.fails(2, "--for", &["convert", "--for", "kvm", "disk.raw", "null:"]);
}
