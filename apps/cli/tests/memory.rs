//! How much memory a call may take, whatever the image. One test, because the system tells only
//! the most that any child took so far: the calls come in the order of their bounds.

mod common;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use common::Scratch;

/// The most memory that a child of this process has had, in KiB.
fn most_kib() -> i64 {
    // SAFETY: getrusage writes the structure that it is given, whose bytes may all be zero.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage), 0);
        usage
    };
    usage.ru_maxrss
}

/// 96 MiB of data that compresses, through little memory: a child counts what its parent had when
/// it was made.
fn fill(path: &Path) {
    let mut file = File::create(path).unwrap();
    let piece: Vec<u8> = (0..1u32 << 20).map(|i| (i / 3 % 251) as u8).collect();
    for _ in 0..96 {
        file.write_all(&piece).unwrap();
    }
}

/// Images with as many snapshots as there can be, whose table is a hole of the file.
fn many_snapshots(scratch: &Scratch, folder: &str, images: usize) {
    std::fs::create_dir(scratch.path(folder)).unwrap();
    for number in 0..images {
        let name = format!("{folder}/{number}.qcow2");
        scratch.ok(&["create", &name, "1M"]);
        let file = File::options().write(true).open(scratch.path(&name)).unwrap();
        file.write_all_at(&65536u32.to_be_bytes(), 60).unwrap();
        file.write_all_at(&(1u64 << 20).to_be_bytes(), 64).unwrap();
        file.set_len(4 << 20).unwrap();
    }
}

#[test]
fn memory_has_bounds_whatever_the_image() {
    let scratch = Scratch::new();
    let options = "preallocation=metadata";
    // 100 GiB with host space on a disk of 16 TiB.
    scratch.ok(&["create", "big.qcow2", "100G", "-o", options]);
    scratch.ok(&["resize", "big.qcow2", "16T"]);
    // Making it took more than asking about it may: a process of its own asks.
    let asked = || {
        let before = most_kib();
        scratch.ok(&["info", "big.qcow2"]);
        scratch.ok(&["info", "--json", "big.qcow2"]);
        (before, most_kib())
    };
    let limit = 16 << 10;
    let (before, after) = asked();
    assert!(after < limit || after == before, "info took {after} KiB");
    assert!(before < 64 << 10, "create or resize took {before} KiB");

    scratch.write("key", b"a key of the tests");
    fill(&scratch.path("full.raw"));
    std::fs::create_dir(scratch.path("out")).unwrap();
    for arguments in [
        &["convert", "big.qcow2", "null:"][..],
        &["convert", "full.raw", "plain.qcow2"],
        &["convert", "full.raw", "wide.qcow2", "-o", "cluster_size=2M"],
        &["convert", "--compress", "full.raw", "zlib.qcow2"],
        &["convert", "--compress=zstd", "full.raw", "zstd.qcow2", "-o", "cluster_size=2M"],
        &["convert", "--verify", "zstd.qcow2", "again.raw"],
        &[
            "convert",
            "full.raw",
            "sealed.qcow2",
            "-o",
            "encrypt.format=luks,encrypt.iter-time=10",
            "--target-key-file",
            "key",
        ],
        &["convert", "sealed.qcow2", "again.raw", "--key-file", "key"],
        &["convert", "full.raw", "full.luks", "-o", "iter-time=10", "--target-key-file", "key"],
        &["convert", "full.luks", "again.raw", "--key-file", "key"],
        &["convert", "full.raw", "plain.qcow2", "two.ova"],
        &["convert", "two.ova", "out"],
        &["compare", "big.qcow2", "big.qcow2"],
        &["map", "--json", "big.qcow2"],
    ] {
        scratch.ok(arguments);
        let most = most_kib();
        assert!(most < 64 << 10, "{arguments:?} took {most} KiB");
    }
    many_snapshots(&scratch, "many", 24);
    scratch.ok(&["tree", "many"]);
    let most = most_kib();
    assert!(most < 64 << 10, "tree took {most} KiB");
}
