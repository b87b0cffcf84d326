//! vdkit under the name `qemu-img` beside QEMU's program: a part of the command lines of
//! `dev/differential`. `cargo bench -p vdkit-cli --bench qemu_differential` runs all.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use vdkit_differential::cases::{self, Kind};
use vdkit_differential::{page, run};
use vdkit_testkit::fs::mounted;
use vdkit_testkit::require_peer;

/// Of the cases with one option and of the pairs, one in so many is run.
const PART: usize = 6;

fn reference() -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join("qemu-img"))
        .find(|program| program.exists())
        .expect("require_peer found it")
}

#[test]
fn command_lines_of_every_kind_give_the_same() {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // Another user runs it in some cases.
    let mode = PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), mode).unwrap();
    let candidate = folder.path().join("qemu-img");
    symlink(env!("CARGO_BIN_EXE_vdkit"), &candidate).unwrap();
    let mut cases = cases::all();
    let mut count = 0;
    cases.retain(|case| match case.kind {
        Kind::Single | Kind::Pair | Kind::Spelling => {
            count += 1;
            count % PART == 0
        }
        _ => true,
    });
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let summary = run(&reference(), &candidate, &cases, threads);
    assert!(summary.cases > 600, "{}", summary.cases);
    assert!(summary.differing.is_empty(), "{}", summary.report(3));
}

/// Programs tell a full disk, on which they may free space and try again, by these words.
#[test]
fn a_full_disk_is_told_in_the_same_words() {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    let Some(small) = mounted("tmpfs", 1 << 20) else { return };
    let folder = tempfile::tempdir().unwrap();
    let candidate = folder.path().join("qemu-img");
    symlink(env!("CARGO_BIN_EXE_vdkit"), &candidate).unwrap();
    let (small, large) = (small.path().join("image"), folder.path().join("image"));
    let reference = reference();
    let told = |program: &Path, command: &str, base: &Path, overlay: &Path| {
        let run = |program: &Path, words: &str, images: &[&Path]| {
            Command::new(program).args(words.split(' ')).args(images).output().unwrap()
        };
        let fill = ["-c", "write -P 7 0 4M"];
        let full = if command == "commit" { overlay } else { base };
        run(&reference, "create -q -f qcow2 -o size=8M", &[base]);
        run(&reference, "create -q -f qcow2 -F qcow2 -b", &[base, overlay]);
        assert!(Command::new("qemu-io").args(fill).arg(full).output().unwrap().status.success());
        let output = run(program, command, &[overlay]);
        std::fs::remove_file(base).unwrap();
        std::fs::remove_file(overlay).unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for (command, base, overlay) in [("commit", &small, &large), ("rebase -b ", &large, &small)] {
        let [expected, found] =
            [&reference, &candidate].map(|program| told(program, command, base, overlay));
        assert!(expected.1.contains("No space left on device"), "{command}: {expected:?}");
        assert_eq!(found, expected, "{command}");
    }
}

#[test]
fn the_page_for_users_is_up_to_date() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/qemu-compat.md");
    let found = std::fs::read_to_string(&file).unwrap_or_default();
    if std::env::var_os("VDKIT_UPDATE_PAGE").is_some() {
        std::fs::write(&file, page::text()).unwrap();
        return;
    }
    assert!(found == page::text(), "docs/qemu-compat.md: run 'make qemu-compat'");
}
