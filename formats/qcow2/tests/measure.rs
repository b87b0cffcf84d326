//! `measure` against `qemu-img measure`.

mod common;

use common::{create, options, scratch};
use vdkit_block::{Creation, Measured};
use vdkit_qcow2::Qcow2Driver;
use vdkit_testbase::{qemu, require_peer};

fn ours(guest_bytes: u64, text: &str, data_clusters: u64) -> Measured {
    Qcow2Driver.measure(guest_bytes, &options(text), data_clusters).unwrap()
}

fn theirs(arguments: &[&str]) -> Option<Measured> {
    let answer = qemu::img(["measure", "--output=json", "-O", "qcow2"].iter().chain(arguments));
    if answer.code != 0 {
        return None;
    }
    let json: serde_json::Value = serde_json::from_str(&answer.stdout).unwrap();
    let field = |key: &str| json[key].as_u64().unwrap();
    Some(Measured { required: field("required"), fully_allocated: field("fully-allocated") })
}

#[test]
fn empty_disks_measure_as_in_qemu() {
    if !require_peer("qemu-img") {
        return;
    }
    let sizes = [0, 512, 1000, (1 << 20) + 512, (10 << 30) + 512, 3 << 40];
    for cluster_bits in 9..=21u32 {
        for refcount_bits in [1, 8, 16, 64] {
            for extended in [false, true] {
                if extended && cluster_bits < 14 {
                    continue;
                }
                // Every size with one width, one size with every width.
                let picked = match (refcount_bits, extended) {
                    (16, false) => &sizes[..],
                    (16, true) => &sizes[3..5],
                    _ => &sizes[4..5],
                };
                for &size in picked {
                    let text = format!(
                        "cluster_size={},refcount_bits={refcount_bits},extended_l2={}",
                        1 << cluster_bits,
                        if extended { "on" } else { "off" },
                    );
                    let options = options(&text);
                    let found = Qcow2Driver.measure(size, &options, 0).ok();
                    let wanted = theirs(&["--size", &size.to_string(), "-o", &text]);
                    assert_eq!(found, wanted, "{size} {text}");
                }
            }
        }
    }
}

#[test]
fn preallocation_and_data_files_measure_as_in_qemu() {
    if !require_peer("qemu-img") {
        return;
    }
    for text in [
        "preallocation=off",
        "preallocation=metadata",
        "preallocation=falloc",
        "preallocation=full",
        "preallocation=full,extended_l2=on,cluster_size=16K",
        "compat=0.10",
        "lazy_refcounts=on,compression_type=zstd",
        "data_file=x",
        "data_file=x,preallocation=falloc",
    ] {
        let wanted = theirs(&["--size", "1073742336", "-o", text]).unwrap();
        assert_eq!(ours((1 << 30) + 512, text, 0), wanted, "{text}");
    }
}

#[test]
fn data_counts_by_the_cluster_as_in_qemu() {
    if !require_peer("qemu-img") {
        return;
    }
    let (_dir, path) = scratch("source.qcow2");
    create(&path, 64 << 20, "cluster_size=4K").unwrap();
    qemu::io(&path, "qcow2", &["write 0 64k", "write 10M 4k", "write 33M 1M"]);
    let file = path.to_str().unwrap();
    for (text, clusters) in [
        ("cluster_size=64K", 1 + 1 + 16),
        ("cluster_size=4K", 16 + 1 + 256),
        ("cluster_size=2M", 3),
        ("cluster_size=2M,extended_l2=on", 3),
    ] {
        let wanted = theirs(&["-f", "qcow2", "-o", text, file]).unwrap();
        assert_eq!(ours(64 << 20, text, clusters), wanted, "{text}");
    }
}

#[test]
fn a_preallocated_image_is_as_large_as_measured() {
    let dir = tempfile::tempdir().unwrap();
    for (i, text) in [
        "preallocation=metadata",
        "preallocation=metadata,cluster_size=512,refcount_bits=64",
        "preallocation=metadata,cluster_size=2M,refcount_bits=1",
        "preallocation=metadata,extended_l2=on",
    ]
    .into_iter()
    .enumerate()
    {
        let path = dir.path().join(i.to_string());
        create(&path, (3 << 30) + 512, text).unwrap();
        let measured = ours((3 << 30) + 512, text, 0);
        assert_eq!(path.metadata().unwrap().len(), measured.fully_allocated, "{text}");
    }
}
