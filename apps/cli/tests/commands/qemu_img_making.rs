//! vdkit under the name `qemu-img`: the subcommands that make and change images, held against QEMU's
//! program.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::Scratch;
use vdkit_testkit::require_peer;

/// Bytes of each disk that the cases begin with.
const DISK_BYTES: u64 = 4 << 20;

/// A folder with the images that the cases begin with.
fn folder() -> Scratch {
    let scratch = Scratch::new();
    let mut bytes = vec![0; DISK_BYTES as usize];
    bytes[1 << 20..2 << 20].fill(7);
    std::fs::write(scratch.path("s.raw"), bytes).unwrap();
    for line in [
        "convert -f raw -O qcow2 s.raw s.qcow2",
        "create -f qcow2 b.qcow2 4M",
        "create -f qcow2 -b s.qcow2 -F qcow2 o.qcow2",
        "convert -f raw -O qcow2 s.raw n.qcow2",
        "snapshot -c one n.qcow2",
    ] {
        let done = run(&scratch, Path::new("qemu-img"), line);
        assert!(done.status.success(), "{line}: {done:?}");
    }
    scratch
}

fn run(scratch: &Scratch, program: &Path, line: &str) -> Output {
    let arguments = line.split(' ').map(|word| if word == "''" { "" } else { word });
    Command::new(program).current_dir(scratch.path("")).args(arguments).output().unwrap()
}

/// What QEMU's program says of an image, without what differs between any two images.
fn described(scratch: &Scratch, image: &str) -> String {
    let changing = ["disk size", "file length", "cid", "uuid", "iters"];
    let info = run(scratch, Path::new("qemu-img"), &format!("info {image}")).stdout;
    let info = String::from_utf8_lossy(&info).into_owned();
    let lines = info.lines().filter(|line| changing.iter().all(|word| !line.contains(word)));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Runs a line with both programs, each in a folder of its own, and compares the answers and the
/// images named.
fn same(line: &str, images: &[&str]) {
    let [theirs, ours] = [folder(), folder()];
    let link = ours.path("qemu-img");
    symlink(env!("CARGO_BIN_EXE_vdkit"), &link).unwrap();
    let wanted = run(&theirs, Path::new("qemu-img"), line);
    let got = run(&ours, &link, line);
    assert_eq!(got.status.code(), wanted.status.code(), "{line}: {got:?}");
    assert_eq!(
        String::from_utf8_lossy(&got.stdout),
        String::from_utf8_lossy(&wanted.stdout),
        "{line}"
    );
    for image in images {
        assert_eq!(described(&ours, image), described(&theirs, image), "{line}: {image}");
        let (a, b) = (ours.path(image), theirs.path(image));
        let compare = format!("compare {} {}", a.display(), b.display());
        let compared = run(&ours, Path::new("qemu-img"), &compare);
        assert!(compared.status.success(), "{line}: {image}: {compared:?}");
    }
}

#[test]
fn images_are_created_as_qemu_creates_them() {
    if !require_peer("qemu-img") {
        return;
    }
    for (line, images) in [
        ("create x 10M", &["x"][..]),
        ("create -f qcow2 x 10M", &["x"]),
        ("create -f vdi x 10M", &["x"]),
        ("create -f vpc x 10M", &["x"]),
        ("create -f vhdx x 10M", &["x"]),
        ("create -f vmdk x 10M", &["x"]),
        ("create -f qcow2 -b s.qcow2 -F qcow2 x", &["x"]),
        ("create -f qcow2 -o cluster_size=4k,compat=0.10,nocow=on x 1M", &["x"]),
        ("create -f qcow2 -o nolazy_refcounts -o size=1M x", &["x"]),
        ("create -q s.raw 1M", &["s.raw"]),
        ("create -f qcow2 -b s.qcow2 x", &[]),
        ("create -f qcow2 x", &[]),
        ("create -f qcow2 x -5", &[]),
        ("create -f nothing x 1M", &[]),
        ("create -f qcow2 -o foo=1 x 1M", &[]),
    ] {
        same(line, images);
    }
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
    let link = scratch.path("qemu-img");
    symlink(env!("CARGO_BIN_EXE_vdkit"), &link).unwrap();
    for (kind, effect) in [("xfs", "[65536]"), ("btrfs", "---------------C------")] {
        let Some(fs) = vdkit_testkit::fs::mounted(kind, 320 << 20) else { continue };
        let mut seen = Vec::new();
        for line in [
            "create -q -f qcow2 AT 4M",
            "create -q -o nocow=on,extent_size_hint=64k AT 4M",
            "create -q -o extent_size_hint=0 AT 4M",
            "convert -o nocow=on,extent_size_hint=64k s.raw AT",
            "create -q -f vmdk -o subformat=monolithicFlat,nocow=on AT 4M",
        ] {
            let said = [Path::new("qemu-img"), &link].map(|program| {
                let at = fs.path().join("image.vmdk");
                let line = line.replace("AT", &at.display().to_string());
                let done = run(&scratch, program, &line);
                assert!(done.status.success(), "{line}: {done:?}");
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
fn disks_are_copied_as_qemu_copies_them() {
    if !require_peer("qemu-img") {
        return;
    }
    for (line, images) in [
        ("convert -O qcow2 s.raw x", &["x"][..]),
        ("convert -c -O qcow2 -o compression_type=zstd s.raw x", &["x"]),
        ("convert -S 0 s.raw x", &["x"]),
        ("convert -O vmdk -o subformat=streamOptimized s.raw x", &["x"]),
        ("convert s.raw s.qcow2 -O qcow2 x", &["x"]),
        ("convert -n -O qcow2 s.raw b.qcow2", &["b.qcow2"]),
        ("convert -l one n.qcow2 x", &["x"]),
        ("convert -l two n.qcow2 x", &[]),
        ("convert -O qcow2 -B s.qcow2 -F qcow2 o.qcow2 x", &["x"]),
        ("convert s.raw s.raw", &["s.raw"]),
        ("convert -m 99 s.raw x", &[]),
        ("dd if=s.raw of=x bs=1M count=3 skip=1", &["x"]),
        ("dd if=s.raw of=x bs=1000 count=3", &["x"]),
        ("dd if=s.raw of=x bs=1M skip=9", &["x"]),
        ("dd if=s.raw of=x bs=0", &[]),
    ] {
        same(line, images);
    }
}

#[test]
fn images_are_changed_as_qemu_changes_them() {
    if !require_peer("qemu-img") {
        return;
    }
    for (line, images) in [
        ("resize s.qcow2 8M", &["s.qcow2"][..]),
        ("resize s.qcow2 -1M --shrink", &["s.qcow2"]),
        ("resize s.qcow2 1M", &["s.qcow2"]),
        ("resize -f raw s.raw +1000", &["s.raw"]),
        ("rebase -b b.qcow2 -F qcow2 o.qcow2", &["o.qcow2"]),
        ("rebase -u -b b.qcow2 -F qcow2 o.qcow2", &["o.qcow2"]),
        ("rebase -b '' o.qcow2", &["o.qcow2"]),
        ("rebase -b b.qcow2 o.qcow2", &["o.qcow2"]),
        ("commit o.qcow2", &["o.qcow2", "s.qcow2"]),
        ("commit -b nope o.qcow2", &["o.qcow2"]),
        ("commit b.qcow2", &["b.qcow2"]),
        ("bench -c 0 s.raw", &[]),
        ("bench --flush-interval 3 s.raw", &[]),
    ] {
        same(line, images);
    }
}
