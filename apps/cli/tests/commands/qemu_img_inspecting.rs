//! `qemu-img` by vdkit beside QEMU's own: commands that look at images, and small changes in place.
//! Output and exit code must be the same.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use vdkit_testkit::require_peer;

const SECRET: &str = "--object secret,id=s,data=x";

/// Makes the images with QEMU's program.
fn images(folder: &Path) {
    for line in [
        "create -q -f qcow2 base.qcow2 10M",
        "create -q -f raw disk.raw 4M",
        "create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2",
        "create -q -f qcow2 -b gone.qcow2 -F qcow2 -u lost.qcow2 1M",
        "create -q -f qcow2 -o compat=0.10 old.qcow2 1M",
        "create -q -f vdi disk.vdi 4M",
        "create -q -f vmdk disk.vmdk 4M",
        "create -q -f vmdk -o subformat=monolithicFlat flat.vmdk 1M",
        "create -q -f vhdx disk.vhdx 4M",
        "create -q -f vpc disk.vpc 4M",
        "create -q -f qcow2 -o data_file=data.raw other.qcow2 1M",
        "create -q --object secret,id=s,data=x -f luks -o key-secret=s,iter-time=10 disk.luks 1M",
        "create -q --object secret,id=s,data=x -f qcow2 -o \
         encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 secret.qcow2 1M",
        "snapshot -c first base.qcow2",
        "snapshot -c second base.qcow2",
        "bitmap --add base.qcow2 map0",
    ] {
        // Some of them may be missing in other builds of QEMU; then both programs fail alike.
        let _ = Command::new("qemu-img").args(line.split_whitespace()).current_dir(folder).status();
    }
    std::fs::write(folder.join("odd.raw"), [7; 1000]).unwrap();
}

/// Standard output and exit code of one program.
fn answer(program: &Path, folder: &Path, line: &str) -> (String, Option<i32>) {
    let done = Command::new(program)
        .args(line.split_whitespace())
        .current_dir(folder)
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    (String::from_utf8_lossy(&done.stdout).into_owned(), done.status.code())
}

fn same_answers(lines: &[&str]) {
    if !require_peer("qemu-img") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bin = tempfile::tempdir().unwrap();
    let ours = bin.path().join("qemu-img");
    symlink(env!("CARGO_BIN_EXE_vdkit"), &ours).unwrap();
    images(folder.path());
    let mut differ = Vec::new();
    for line in lines {
        let line = line.replace("SECRET", SECRET);
        let theirs = answer(Path::new("qemu-img"), folder.path(), &line);
        let found = answer(&ours, folder.path(), &line);
        if theirs != found {
            differ.push(format!("{line}\nQEMU: {theirs:?}\nvdkit: {found:?}"));
        }
    }
    assert!(differ.is_empty(), "{}", differ.join("\n\n"));
}

#[test]
fn info_says_what_qemus_program_says() {
    const FILES: &[&str] = &[
        "base.qcow2",
        "top.qcow2",
        "lost.qcow2",
        "old.qcow2",
        "other.qcow2",
        "secret.qcow2",
        "disk.raw",
        "odd.raw",
        "disk.vdi",
        "disk.vmdk",
        "flat.vmdk",
        "disk.vhdx",
        "disk.vpc",
        "disk.luks",
        "null-co://",
        "gone.qcow2",
        "--backing-chain top.qcow2",
        "-b lost.qcow2",
        "-f raw base.qcow2",
        "-f file disk.raw",
        "--image-opts driver=qcow2,file.filename=top.qcow2",
        "--image-opts driver=raw,offset=512,size=1024,file.filename=disk.raw",
        "-U base.qcow2",
    ];
    let human = FILES.iter().map(|file| format!("info {file}"));
    let json = FILES.iter().map(|file| format!("info --output=json {file}"));
    let lines: Vec<String> = human.chain(json).collect();
    same_answers(&lines.iter().map(String::as_str).collect::<Vec<_>>());
}

#[test]
fn maps_checks_and_measures_are_qemus() {
    same_answers(&[
        "map base.qcow2",
        "map top.qcow2",
        "map --output=json top.qcow2",
        "map --output=json disk.raw",
        "map --output=json disk.vdi",
        "map --output=json disk.vmdk",
        "map --output=json disk.vhdx",
        "map --output=json flat.vmdk",
        "map --start-offset 1M --max-length 64k --output=json top.qcow2",
        "map --start-offset x top.qcow2",
        "map lost.qcow2",
        "check base.qcow2",
        "check --output=json top.qcow2",
        "check -r all top.qcow2",
        "check disk.raw",
        "check disk.vdi",
        "check lost.qcow2",
        "check -r some base.qcow2",
        "measure -O qcow2 --size 1G",
        "measure -O qcow2 base.qcow2",
        "measure -O qcow2 --output json disk.raw",
        "measure -O vdi --size 1G",
        "measure",
        "measure -O luks -o key-secret=s SECRET --size 1G",
    ]);
}

#[test]
fn comparisons_and_lists_are_qemus() {
    same_answers(&[
        "compare disk.raw disk.vdi",
        "compare -s disk.raw disk.vdi",
        "compare disk.raw base.qcow2",
        "compare odd.raw disk.raw",
        "compare -q odd.raw disk.raw",
        "compare disk.raw gone.raw",
        "compare disk.raw",
        "snapshot -l base.qcow2",
        "snapshot disk.raw",
        "snapshot -l -c x base.qcow2",
        "snapshot -d none base.qcow2",
        "snapshot -U -c x base.qcow2",
        "bitmap --add -g 1000 base.qcow2 b",
        "bitmap --remove base.qcow2 none",
        "bitmap base.qcow2 b",
        "amend -o cluster_size=4k base.qcow2",
        "amend -o foo=1 base.qcow2",
        "amend base.qcow2",
        "amend -o compat=1.1 disk.raw",
    ]);
}

/// Each program changes an image of its own; then QEMU's program describes both.
#[test]
fn changes_leave_the_same_image() {
    const CHANGES: &[&str] = &[
        "bitmap --add base.qcow2 map1",
        "bitmap --add --disable -g 32k base.qcow2 map2",
        "bitmap --merge map0 base.qcow2 map1",
        "bitmap --remove base.qcow2 map0",
        "snapshot -d first base.qcow2",
        "amend -o lazy_refcounts=on,refcount_bits=32 base.qcow2",
        "amend -o size=20M old.qcow2",
        "amend -o compat=1.1 old.qcow2",
        "amend SECRET --object secret,id=n,data=y --image-opts -o \
         state=active,new-secret=n,iter-time=10 driver=luks,file.filename=disk.luks,key-secret=s",
        "amend SECRET --object secret,id=n,data=y --image-opts -o state=inactive,old-secret=s \
         driver=luks,file.filename=disk.luks,key-secret=n",
    ];
    if !require_peer("qemu-img") {
        return;
    }
    let bin = tempfile::tempdir().unwrap();
    let ours = bin.path().join("qemu-img");
    symlink(env!("CARGO_BIN_EXE_vdkit"), &ours).unwrap();
    let described = |program: &Path| {
        let folder = tempfile::tempdir().unwrap();
        images(folder.path());
        for line in CHANGES {
            let line = line.replace("SECRET", SECRET);
            let (_, code) = answer(program, folder.path(), &line);
            assert_eq!(code, Some(0), "{} {line}", program.display());
        }
        let mut described = String::new();
        for file in ["base.qcow2", "old.qcow2", "disk.luks"] {
            let (check, _) = answer(Path::new("qemu-img"), folder.path(), &format!("check {file}"));
            described += check.lines().next().unwrap_or_default();
            let (info, _) = answer(Path::new("qemu-img"), folder.path(), &format!("info {file}"));
            // What depends on time, chance and layout is left out.
            let varies = ["disk size", "file length", "uuid", "iters", "first", "second"];
            let kept = info.lines().filter(|line| varies.iter().all(|word| !line.contains(word)));
            described.extend(kept.flat_map(|line| [line, "\n"]));
        }
        described
    };
    assert_eq!(described(Path::new("qemu-img")), described(&ours));
}

#[test]
fn dates_are_in_the_time_zone_of_the_environment() {
    if !require_peer("qemu-img") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let ours = folder.path().join("qemu-img");
    symlink(env!("CARGO_BIN_EXE_vdkit"), &ours).unwrap();
    for line in ["create -q -f qcow2 base.qcow2 1M", "snapshot -c first base.qcow2"] {
        assert_eq!(answer(Path::new("qemu-img"), folder.path(), line).1, Some(0));
    }
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
            let line = format!("TZ={zone} {program} snapshot -l base.qcow2");
            answer(Path::new("env"), folder.path(), &line)
        };
        let own = listed(ours.to_str().unwrap());
        assert_eq!(own, listed("qemu-img"), "{zone}");
        dates.push(own.0);
    }
    assert_ne!(dates[1], dates[2]);
}
