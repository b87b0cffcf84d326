//! vdkit under the name `qemu-img` beside QEMU's program, where the environment decides: the file system
//! and the time zone, and where vdkit refuses more. `qemu_differential.rs` has everything else.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::common::{Scratch, peer};
use vdkit_testkit::require_peer;

/// A folder with an image that has a snapshot, and vdkit as `qemu-img`.
fn folder() -> Scratch {
    let scratch = Scratch::new();
    symlink(env!("CARGO_BIN_EXE_vdkit"), scratch.path("qemu-img")).unwrap();
    peer(&scratch.folder(), "qemu-img", &["create", "-q", "-f", "qcow2", "a.qcow2", "4M"]);
    peer(&scratch.folder(), "qemu-img", &["snapshot", "-c", "first", "a.qcow2"]);
    scratch
}

/// What the file system keeps of an image's hints, as its own tools say.
fn hints(at: &Path, kind: &str) -> String {
    let (program, arguments): (_, &[&str]) = match kind {
        "xfs" => ("xfs_io", &["-c", "extsize"]),
        _ => ("lsattr", &[]),
    };
    let done = Command::new(program).args(arguments).arg(at).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap().split_whitespace().next().unwrap().to_owned()
}

#[test]
fn file_systems_get_the_hints_that_qemu_gives_them() {
    if !require_peer("qemu-img") {
        return;
    }
    let scratch = folder();
    for (kind, effect) in [("xfs", "[65536]"), ("btrfs", "---------------C------")] {
        let Some(fs) = vdkit_testkit::fs::mounted(kind, 320 << 20) else { continue };
        let mut seen = Vec::new();
        for line in [
            "create -q -f qcow2 AT 4M",
            "create -q -o nocow=on,extent_size_hint=64k AT 4M",
            "create -q -o extent_size_hint=0 AT 4M",
            "convert -o nocow=on,extent_size_hint=64k a.qcow2 AT",
            "create -q -f vmdk -o subformat=monolithicFlat,nocow=on AT 4M",
        ] {
            let said = ["qemu-img", "./qemu-img"].map(|program| {
                let at = fs.path().join("image.vmdk");
                let line = line.replace("AT", &at.display().to_string());
                peer(&scratch.folder(), program, &line.split(' ').collect::<Vec<_>>());
                let extent = fs.path().join("image-flat.vmdk");
                let all = [&at, &extent].map(|at| at.exists().then(|| hints(at, kind)));
                let _ = std::fs::remove_file(&extent);
                std::fs::remove_file(&at).unwrap();
                all
            });
            assert_eq!(said[1], said[0], "{kind}: {line}");
            seen.extend(said[1].clone().into_iter().flatten());
        }
        assert!(seen.iter().any(|one| one == effect), "{kind}: {seen:?}");
    }
}

#[test]
fn dates_are_in_the_time_zone_of_the_environment() {
    if !require_peer("qemu-img") {
        return;
    }
    let scratch = folder();
    let mut dates = Vec::new();
    for zone in [
        "",
        "UTC",
        "Asia/Kathmandu",
        ":America/St_Johns",
        "XYZ-3:30",
        "ABC5DEF,M3.2.0,M11.1.0",
        "/usr/share/zoneinfo/Asia/Tokyo",
        "Nowhere/None",
    ] {
        let listed = |program: &str| {
            let zone = format!("TZ={zone}");
            peer(&scratch.folder(), "env", &[&zone, program, "snapshot", "-l", "a.qcow2"]).stdout
        };
        let own = listed("./qemu-img");
        assert_eq!(own, listed("qemu-img"), "{zone}");
        dates.push(own);
    }
    assert_ne!(dates[1], dates[2]);
}

#[test]
fn a_format_in_a_part_of_a_file_is_described_from_there() {
    if !require_peer("qemu-img") {
        return;
    }
    let scratch = folder();
    peer(&scratch.folder(), "qemu-img", &["create", "-q", "-f", "qcow2", "other.qcow2", "8M"]);
    // Another image is at its beginning.
    let mut bytes = std::fs::read(scratch.path("other.qcow2")).unwrap();
    bytes.resize(1 << 20, 0);
    bytes.extend(std::fs::read(scratch.path("a.qcow2")).unwrap());
    scratch.write("both", &bytes);
    let part = "file.driver=raw,file.offset=1M,file.file.filename=both";
    for options in [format!("driver=qcow2,{part}"), part.to_owned()] {
        let [theirs, ours] = [Path::new("qemu-img"), &scratch.path("qemu-img")].map(|program| {
            let mut command = Command::new(program);
            command.args(["info", "--output=json", "--image-opts", &options]);
            let done = command.current_dir(scratch.folder()).output().unwrap();
            assert!(done.status.success(), "{done:?}");
            let all: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
            ["format", "virtual-size", "cluster-size", "snapshots"].map(|key| all[key].clone())
        });
        assert_eq!(ours, theirs, "{options}");
    }
}

/// QEMU copies zeroes for what is lost.
#[test]
fn a_truncated_image_is_refused_also_beneath_another_node() {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    let scratch = folder();
    let write = ["-f", "qcow2", "-c", "write -P 5 0 4M", "a.qcow2"];
    peer(&scratch.folder(), "qemu-io", &write);
    let image = std::fs::File::options().write(true).open(scratch.path("a.qcow2")).unwrap();
    image.set_len(1 << 20).unwrap();
    for node in ["driver=qcow2,file.filename", "driver=raw,file.driver=qcow2,file.file.filename"] {
        let mut command = Command::new(scratch.path("qemu-img"));
        let source = format!("{node}=a.qcow2");
        command.args(["convert", "-O", "raw", "--image-opts", &source, "new.raw"]);
        let done = command.current_dir(scratch.folder()).output().unwrap();
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(
            (done.status.code(), scratch.path("new.raw").exists()),
            (Some(1), false),
            "{node}"
        );
        assert!(said.contains("the file was truncated"), "{node}: {said}");
    }
}
