//! `vdkit key`, and keys on the other commands.

use crate::common::{Scratch, peer};

const LUKS: &str = "encrypt.format=luks,encrypt.iter-time=10";

/// A scratch folder with keys and an encrypted image.
fn scratch() -> Scratch {
    let scratch = Scratch::new();
    scratch.write("a.key", b"first key");
    scratch.write("b.key", b"second key\n");
    scratch.write("c.key", b"third key");
    scratch.ok(&["create", "a.qcow2", "2M", "-o", LUKS, "--key-file", "a.key"]);
    let pattern = ["--pattern", "8", "--key-file", "a.key"];
    scratch.ok(&[&["write", "a.qcow2", "100", "1M"], &pattern[..]].concat());
    scratch
}

fn reads(scratch: &Scratch, image: &str, key: &str) -> bool {
    let answer = scratch.run(&["read", image, "99", "3", "--key-file", key]);
    match answer.code {
        Some(0) => {
            assert_eq!(answer.bytes, [0, 8, 8]);
            true
        }
        Some(1) => {
            assert!(answer.stderr.contains("key slots"), "{answer:?}");
            false
        }
        _ => panic!("{answer:?}"),
    }
}

fn active(json: &serde_json::Value) -> Vec<u64> {
    let slots = json["slots"].as_array().unwrap();
    let active = slots.iter().filter(|slot| slot["active"] == true);
    active.map(|slot| slot["slot"].as_u64().unwrap()).collect()
}

#[test]
fn keys_come_and_go() {
    let scratch = scratch();
    let json = scratch.json_of("key", 0, &["list", "a.qcow2"]);
    assert_eq!(active(&json), [0]);
    assert_eq!(json["slots"][0].get("opened"), None);

    let add = ["add", "a.qcow2", "--key-file", "a.key", "--new-key-file", "b.key"];
    let json = scratch.json_of("key", 0, &[&add[..], &["--iter-time", "10"]].concat());
    assert_eq!((&json["added-slot"], active(&json)), (&1.into(), vec![0, 1]));
    assert!(reads(&scratch, "a.qcow2", "a.key") && reads(&scratch, "a.qcow2", "b.key"));
    let json = scratch.json_of("key", 0, &["list", "a.qcow2", "--key-file", "b.key"]);
    assert_eq!(
        (&json["slots"][0]["opened"], &json["slots"][1]["opened"]),
        (&false.into(), &true.into())
    );

    let change = ["change", "a.qcow2", "--key-file", "a.key", "--new-key-file", "c.key"];
    let json = scratch.json_of("key", 0, &[&change[..], &["--iter-time", "10"]].concat());
    assert_eq!((&json["added-slot"], &json["removed-slots"][0]), (&2.into(), &0.into()));
    assert!(!reads(&scratch, "a.qcow2", "a.key") && reads(&scratch, "a.qcow2", "c.key"));

    let remove = ["remove", "a.qcow2", "--slot", "2", "--key-file", "b.key"];
    let json = scratch.json_of("key", 0, &remove);
    assert_eq!(active(&json), [1]);
    assert!(!reads(&scratch, "a.qcow2", "c.key") && reads(&scratch, "a.qcow2", "b.key"));
    scratch.ok(&["check", "a.qcow2"]);
    // QEMU agrees, line end and all.
    let opening = "driver=qcow2,encrypt.key-secret=s,file.filename=a.qcow2";
    let secret = ["--object", "secret,id=s,file=b.key", "--image-opts", opening];
    peer(&scratch.path(""), "qemu-io", &[&secret[..], &["-c", "read -P 8 100 1M"]].concat());
}

#[test]
fn nobody_is_locked_out() {
    let scratch = scratch();
    scratch.fails(1, "no key is given", &["key", "remove", "a.qcow2", "--slot", "0"]);
    let remove = ["key", "remove", "a.qcow2", "--slot", "0", "--key-file"];
    scratch.fails(1, "slot 0 alone", &[&remove[..], &["a.key"]].concat());
    scratch.fails(1, "none of its key slots", &[&remove[..], &["b.key"]].concat());
    scratch.fails(
        2,
        "slot 5 is not in use",
        &["key", "remove", "a.qcow2", "--slot", "5", "--key-file", "a.key"],
    );
    let change = ["key", "change", "a.qcow2", "--key-file", "a.key", "--new-key-file"];
    scratch.fails(2, "is the old one", &[&change[..], &["a.key"]].concat());
    scratch.fails(1, "does not open slot 1", &[&change[..], &["b.key", "--slot", "1"]].concat());
    assert!(reads(&scratch, "a.qcow2", "a.key"));
    scratch.ok(&["key", "remove", "a.qcow2", "--slot", "0", "--force"]);
    assert!(!reads(&scratch, "a.qcow2", "a.key"));
}

#[test]
fn mistakes_are_told() {
    let scratch = scratch();
    scratch.fails(2, "new key is missing", &["key", "add", "a.qcow2", "--key-file", "a.key"]);
    scratch.fails(2, "--slot N is missing", &["key", "remove", "a.qcow2", "--key-file", "a.key"]);
    scratch.fails(2, "no meaning with 'list'", &["key", "list", "a.qcow2", "--slot", "1"]);
    scratch.fails(2, "--key-file", &["key", "list", "a.qcow2", "--key-file", "missing"]);
    scratch.write("empty", b"");
    scratch.fails(2, "it is empty", &["key", "list", "a.qcow2", "--key-file", "empty"]);
    scratch.fails(2, "no such variable", &["key", "list", "a.qcow2", "--key-env", "VDKIT_NO_SUCH"]);
    scratch.ok(&["create", "plain.qcow2", "1M"]);
    scratch.fails(1, "not encrypted", &["key", "list", "plain.qcow2"]);
    let answer = scratch.fails(1, "no key is given", &["read", "a.qcow2", "0", "1"]);
    assert!(answer.stderr.contains("hint: give its key with --key-file"), "{answer:?}");
    scratch.fails(1, "no key is given for it", &["create", "b.qcow2", "1M", "-o", LUKS]);
    scratch.fails(2, "not encrypted", &["create", "b.qcow2", "1M", "--key-file", "a.key"]);
    scratch.fails(
        1,
        "compressed data",
        &["convert", "-c", "plain.qcow2", "c.qcow2", "-o", LUKS, "--target-key-file", "a.key"],
    );
    scratch.fails(
        2,
        "no meaning here",
        &["convert", "plain.qcow2", "c.qcow2", "--target-key-file", "a.key"],
    );
    // Into a target that exists and would keep the data readable.
    let key = ["--target-key-file", "a.key"];
    let convert = ["convert", "--into", "a.qcow2", "plain.qcow2", "--key-file", "a.key"];
    scratch.fails(2, "is not encrypted", &[&convert[..], &key].concat());
    let dd = ["dd", "if=a.qcow2", "of=plain.qcow2", "-O", "qcow2", "--key-file", "a.key"];
    scratch.fails(2, "is not encrypted", &[&dd[..], &key].concat());
    let answer = scratch.fails(
        4,
        "trying a key",
        &["read", "a.qcow2", "0", "1", "--key-file", "a.key", "--key-rounds", "10"],
    );
    assert!(answer.stderr.contains("hint: --key-rounds"), "{answer:?}");
}

#[test]
fn keys_come_from_descriptors_and_the_environment() {
    let scratch = scratch();
    let arguments = ["read", "a.qcow2", "99", "3", "--key-fd", "0"];
    assert_eq!(scratch.run_with_input(&arguments, b"first key").bytes, [0, 8, 8]);
    let mut command =
        scratch.command(&["read", "a.qcow2", "99", "3", "--key-env", "VDKIT_TEST_KEY"]);
    let output = command.env("VDKIT_TEST_KEY", "first key").output().unwrap();
    assert_eq!(output.stdout, [0, 8, 8], "{output:?}");
}

#[test]
fn every_command_works_with_keys() {
    let scratch = scratch();
    let key = ["--key-file", "a.key"];
    let with = |arguments: &[&'static str]| -> Vec<&'static str> { [arguments, &key[..]].concat() };
    // A chain of two encrypted images with two keys.
    let overlay =
        ["create", "top.qcow2", "--backing", "a.qcow2", "-o", LUKS, "--key-file", "b.key"];
    scratch.ok(&overlay);
    let both = ["--key-file", "b.key", "--key-file", "a.key"];
    scratch.ok(&[&["write", "top.qcow2", "1K", "1K", "--pattern", "9"], &both[..]].concat());
    scratch.ok(&[&["convert", "top.qcow2", "flat.raw"], &both[..]].concat());
    let flat = std::fs::read(scratch.path("flat.raw")).unwrap();
    assert_eq!((flat[99], flat[100], flat[1024], flat[2047], flat[2048]), (0, 8, 9, 9, 8));
    scratch.ok(&[&["compare", "-F", "raw", "top.qcow2", "flat.raw"], &both[..]].concat());
    // Into each kind of encrypted target, verified; nothing of the plain text is in the file.
    for (name, options) in [("flat.qcow2", LUKS), ("flat.luks", "iter-time=10")] {
        let convert = ["convert", "-f", "raw", "flat.raw", name, "-o", options, "--verify"];
        scratch.ok(&[&convert[..], &["--target-key-file", "c.key"]].concat());
        let bytes = std::fs::read(scratch.path(name)).unwrap();
        assert!(!bytes.windows(64).any(|w| w == [8; 64] || w == [9; 64]), "{name}");
        scratch.ok(&["compare", "-F", "raw", name, "flat.raw", "--key-file", "c.key"]);
        let into = ["convert", "--into", "top.qcow2", name, "--target-key-file", "c.key"];
        scratch.ok(&[&into[..], &both[..]].concat());
        scratch.ok(&["resize", name, "3M", "--key-file", "c.key"]);
        scratch.ok(&["compare", "-F", "raw", name, "flat.raw", "--key-file", "c.key"]);
        scratch.ok(&["check", name]);
        let info = scratch.json_of("info", 0, &[name]);
        assert_eq!(info["encryption"], "luks");
        assert_eq!(info["properties"]["encryption-cipher"], "aes-xts-plain64");
        let format = info["format"].as_str().unwrap();
        let measured =
            scratch.json_of("measure", 0, &["--size", "3M", "-O", format, "-o", options]);
        let most = measured["fully-allocated"].as_u64().unwrap();
        assert!(std::fs::metadata(scratch.path(name)).unwrap().len() <= most, "{name}");
    }
    scratch.ok(&with(&["map", "a.qcow2"]));
    scratch.ok(&with(&["measure", "a.qcow2", "-O", "qcow2"]));
    let dd =
        ["dd", "if=a.qcow2", "of=part.luks", "bs=1k", "count=9", "seek=3", "-o", "iter-time=10"];
    scratch.ok(&[&dd[..], &key, &["--target-key-file", "b.key"]].concat());
    let part = scratch.ok(&["read", "part.luks", "0", "--key-file", "b.key"]).bytes;
    assert!(
        part[..3072 + 100].iter().all(|b| *b == 0) && part[3072 + 100..].iter().all(|b| *b == 8)
    );
    scratch.ok(&["compact", "flat.qcow2"]);
    scratch.ok(&["compare", "-F", "raw", "flat.qcow2", "flat.raw", "--key-file", "c.key"]);
    let dd = ["dd", "--force", "if=flat.raw", "of=a.qcow2", "-f", "raw", "bs=1k", "count=5"];
    scratch.ok(&with(&dd));
    scratch.ok(&[&["commit", "top.qcow2"], &both[..]].concat());
    let committed = scratch.ok(&with(&["read", "a.qcow2", "0", "2049"])).bytes;
    assert_eq!((committed[99], committed[100], committed[1024], committed[2048]), (0, 8, 9, 8));
    scratch.ok(&with(&["resize", "a.qcow2", "+1M", "--preallocation", "metadata"]));
    let new = scratch.ok(&with(&["read", "a.qcow2", "2M"])).bytes;
    assert!(new.len() == 1 << 20 && new.iter().all(|b| *b == 0));
}
