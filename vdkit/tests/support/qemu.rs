//! Runs QEMU's programs in a separate directory, so that images refer to their neighbors by name.

use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;
use vdkit_storage::MemoryStorage;

use super::disks::load;

/// A scratch directory, in memory if possible.
pub fn scratch() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() {
        tempfile::Builder::new().prefix("vdkit-proof").tempdir_in(memory)
    } else {
        tempfile::tempdir()
    };
    made.expect("a scratch directory")
}

fn run(dir: &Path, program: &str, args: &[&str]) -> Output {
    Command::new(program)
        .args(args)
        .current_dir(dir)
        .output()
        .unwrap_or_else(|error| panic!("{program} must be installed: {error}"))
}

fn text(out: &Output) -> String {
    let (stdout, stderr) = (&out.stdout, &out.stderr);
    let (stdout, stderr) = (String::from_utf8_lossy(stdout), String::from_utf8_lossy(stderr));
    format!("{}\n{stdout}{stderr}", out.status)
}

/// QEMU's arguments to open the image of a rig, after the subcommand.
pub fn opening(encrypted: bool) -> &'static [&'static str] {
    if encrypted {
        &[
            "--object",
            "secret,id=s,file=key",
            "--image-opts",
            "driver=qcow2,encrypt.key-secret=s,file.filename=image.qcow2",
        ]
    } else {
        &["--image-opts", "driver=qcow2,file.filename=image.qcow2"]
    }
}

/// Runs a qemu-img subcommand on the image of a rig, with the arguments before and after its name;
/// it must succeed.
pub fn on_image(dir: &Path, encrypted: bool, before: &[&str], behind: &[&str]) {
    img(dir, &[before, opening(encrypted), behind].concat());
}

/// Runs qemu-img in a directory; it must succeed.
pub fn img(dir: &Path, args: &[&str]) {
    let out = run(dir, "qemu-img", args);
    assert!(out.status.success(), "qemu-img {args:?}: {}", text(&out));
}

/// Runs qemu-io commands on the image of a rig. QEMU refuses to compress over allocated clusters,
/// which is no failure; nothing else may fail.
pub fn io(dir: &Path, encrypted: bool, commands: &[String]) {
    let (packing, others): (Vec<_>, Vec<_>) =
        commands.iter().partition(|command| command.contains("write -c"));
    for (commands, may_fail) in [(packing, true), (others, false)] {
        if commands.is_empty() {
            continue;
        }
        let mut args = opening(encrypted).to_vec();
        for command in commands {
            args.extend(["-c", command]);
        }
        let out = run(dir, "qemu-io", &args);
        let said = text(&out);
        let fine = out.status.success() && !said.contains("failed") && !said.contains("rror");
        assert!(may_fail || fine, "qemu-io {args:?}: {said}");
    }
}

/// The verdict of `qemu-img check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Clean,
    Leaks,
    Corrupt,
}

/// Runs `qemu-img check` on the image of a rig.
pub fn check(dir: &Path, encrypted: bool) -> (Verdict, String) {
    let out = run(dir, "qemu-img", &[&["check"], opening(encrypted)].concat());
    let verdict = match out.status.code() {
        Some(0) => Verdict::Clean,
        Some(3) => Verdict::Leaks,
        _ => Verdict::Corrupt,
    };
    (verdict, text(&out))
}

/// The content of a rig's image read by QEMU.
pub fn guest_view(dir: &Path, encrypted: bool) -> MemoryStorage {
    on_image(dir, encrypted, &["convert", "-O", "raw"], &["qemu-view.raw"]);
    let view = load(&dir.join("qemu-view.raw"));
    std::fs::remove_file(dir.join("qemu-view.raw")).expect("removing scratch");
    view
}
