//! `vdkit dd`.

use crate::common::{Scratch, peer};

fn source(scratch: &Scratch) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..1u32 << 20).map(|i| (i % 253) as u8).collect();
    bytes[262_144..524_288].fill(0);
    scratch.write("a.raw", &bytes);
    bytes
}

#[test]
fn into_a_new_image() {
    let scratch = Scratch::new();
    let bytes = source(&scratch);
    scratch.ok(&["dd", "if=a.raw", "of=b.raw", "bs=1000", "skip=3", "count=7"]);
    let made = std::fs::read(scratch.path("b.raw")).unwrap();
    assert!(made[..7000] == bytes[3000..10_000]);
    // A disk is made of whole sectors.
    assert!(made.len() == 7168 && made[7000..].iter().all(|&byte| byte == 0));
    let json = scratch.json_of("dd", 0, &["if=a.raw", "of=c.qcow2", "bs=64K", "seek=2"]);
    assert_eq!(json["copied-bytes"], 1 << 20);
    assert!(scratch.ok(&["read", "c.qcow2", "128K"]).bytes == bytes);
    assert!(scratch.ok(&["read", "c.qcow2", "0", "128K"]).bytes == vec![0; 131_072]);
    peer(&scratch.path(""), "qemu-img", &["check", "-q", "c.qcow2"]);
}

/// The calls of a run that make files durable or give them names, in their order, with what they are
/// about.
fn durable_calls(scratch: &Scratch, arguments: &[&str]) -> Vec<(String, String)> {
    let output = std::process::Command::new("strace")
        .args(["-f", "-qq", "-y", "-e", "trace=fdatasync,fsync,rename,renameat,renameat2"])
        .arg(env!("CARGO_BIN_EXE_vdkit"))
        .args(arguments)
        .current_dir(scratch.path(""))
        .output()
        .expect("strace; `make peers` installs it");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let begun = log.lines().filter(|line| line.contains('(') && !line.contains("resumed>"));
    begun
        .map(|line| {
            let (call, about) = line.split_once('(').unwrap();
            let call = call.rsplit(' ').next().unwrap();
            (call.to_owned(), about.to_owned())
        })
        .collect()
}

/// The bytes, then the name, then the folder: for each command that promises it, and each of an
/// image's files.
#[test]
fn a_new_file_of_dd_is_synced_and_so_is_its_folder() {
    let scratch = Scratch::new();
    source(&scratch);
    std::fs::create_dir(scratch.path("other")).unwrap();
    std::fs::write(scratch.path("other/real"), "x").unwrap();
    std::os::unix::fs::symlink("other/real", scratch.path("link.raw")).unwrap();
    let home = scratch.path("").canonicalize().unwrap();
    let home = home.to_str().unwrap();
    let other = format!("{home}/other");
    for (arguments, folder) in [
        (&["dd", "if=a.raw", "of=b.raw"][..], home),
        (&["dd", "if=a.raw", "of=c.qcow2", "conv=fsync"], home),
        (&["dd", "if=a.raw", "of=d.vmdk", "-o", "subformat=monolithicFlat"], home),
        (&["dd", "if=a.raw", "of=other/e.vdi"], &other),
        (&["create", "f.qcow2", "1M"], home),
        (&["create", "g.vmdk", "1M", "-o", "subformat=twoGbMaxExtentFlat"], home),
        (&["create", "other/h.qcow2", "1M", "-o", "data_file=../h.raw"], &other),
        (&["convert", "-t", "writeback", "a.raw", "-O", "vhdx", "i.vhdx"], home),
        (&["convert", "-t", "writeback", "a.raw", "-O", "raw", "link.raw"], &other),
    ] {
        let calls = durable_calls(&scratch, arguments);
        let renames = calls.iter().filter(|(call, _)| call.starts_with("rename"));
        let mut given = Vec::new();
        for (_, about) in renames {
            // The hidden name is quoted first.
            given.push(about.split('"').nth(1).unwrap().rsplit('/').next().unwrap().to_owned());
        }
        assert!(!given.is_empty(), "{arguments:?}: {calls:?}");
        for hidden in &given {
            let named = calls.iter().position(|(call, about)| {
                call.starts_with("rename") && about.contains(hidden.as_str())
            });
            let synced = calls
                .iter()
                .rposition(|(call, about)| call == "fdatasync" && about.contains(hidden.as_str()));
            assert!(synced.is_some() && synced < named, "{arguments:?}: {calls:#?}");
        }
        let last = calls.last().unwrap();
        let found = last.0 == "fsync" && last.1.contains(&format!("<{folder}>"));
        assert!(found, "{arguments:?}: {calls:#?}");
    }
}

#[test]
fn into_an_image_that_exists() {
    let scratch = Scratch::new();
    let bytes = source(&scratch);
    scratch.ok(&["create", "d.qcow2", "2M"]);
    scratch.ok(&["write", "d.qcow2", "0", "2M", "--pattern", "0xff"]);
    scratch.ok(&["dd", "if=a.raw", "of=d.qcow2", "bs=512K", "seek=1"]);
    let mut expected = vec![0xff; 2 << 20];
    expected[524_288..][..1 << 20].copy_from_slice(&bytes);
    assert!(scratch.ok(&["read", "d.qcow2", "0"]).bytes == expected);
    let answer = scratch.fails(2, "too few", &["dd", "if=a.raw", "of=d.qcow2", "bs=1M", "seek=2"]);
    assert!(answer.stderr.contains("d.qcow2"), "{answer:?}");
    scratch.write("e.raw", &vec![1; 1 << 20]);
    scratch.fails(2, "format was not detected", &["dd", "if=a.raw", "of=e.raw"]);
    scratch.ok(&["dd", "-O", "raw", "if=a.raw", "of=e.raw"]);
    assert!(std::fs::read(scratch.path("e.raw")).unwrap() == bytes);
}

#[test]
fn more_than_there_is_is_all_there_is() {
    let scratch = Scratch::new();
    source(&scratch);
    let json = scratch.json_of("dd", 0, &["if=a.raw", "of=b.raw", "bs=1M", "count=5"]);
    assert_eq!(json["copied-bytes"], 1 << 20);
    let json = scratch.json_of("dd", 0, &["if=a.raw", "of=c.raw", "bs=1M", "skip=5"]);
    assert_eq!(json["copied-bytes"], 0);
}

#[test]
fn the_operands_are_checked() {
    let scratch = Scratch::new();
    source(&scratch);
    for (words, operands) in [
        ("if=FILE", &["of=b"][..]),
        ("of=FILE", &["if=a.raw"]),
        ("at least one byte", &["if=a.raw", "of=b", "bs=0"]),
        ("'status'", &["if=a.raw", "of=b", "status=none"]),
        ("'ascii'", &["if=a.raw", "of=b", "conv=ascii"]),
        ("KEY=VALUE", &["a.raw"]),
        ("2^63", &["if=a.raw", "of=b", "bs=1E", "seek=1E"]),
    ] {
        scratch.fails(2, words, &[&["dd"][..], operands].concat());
    }
    scratch.fails(1, "no-such", &["dd", "if=a.raw", "of=no-such.raw", "conv=nocreat"]);
    scratch.fails(1, "no-such", &["dd", "if=no-such.raw", "of=b"]);
    assert_eq!(scratch.names(), ["a.raw"]);
}

#[test]
fn no_space_is_told_and_nothing_left() {
    let Some(small) = vdkit_testkit::fs::mounted("tmpfs", 256 << 10) else { return };
    let scratch = Scratch::new();
    source(&scratch);
    let of = format!("of={}", small.path().join("b.qcow2").display());
    scratch.fails(7, "b.qcow2", &["dd", "if=a.raw", &of]);
    assert_eq!(std::fs::read_dir(small.path()).unwrap().count(), 0);
}

/// What nobody wrote of a disk that is encrypted as a whole would be noise.
#[test]
fn an_encrypted_target_has_zeroes_around_what_is_copied() {
    let scratch = Scratch::new();
    let bytes = source(&scratch);
    scratch.write("key", b"secret");
    let target = ["if=a.raw", "of=b.luks", "-O", "luks", "-o", "iter-time=10"];
    let blocks = ["bs=1000", "count=1", "seek=2", "--target-key-file", "key"];
    scratch.ok(&[&["dd"][..], &target, &blocks].concat());
    let made = scratch.ok(&["read", "b.luks", "0", "3072", "--key-file", "key"]).bytes;
    assert!(made == [&[0; 2000][..], &bytes[..1000], &[0; 72]].concat());
}
