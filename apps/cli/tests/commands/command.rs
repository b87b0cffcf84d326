//! What holds for every subcommand.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::common::{Scratch, peer};
use vdkit_cli::commands::all;

#[test]
fn help_is_a_result_and_a_mistake_a_message() {
    let scratch = Scratch::new();
    for entry in all() {
        for arguments in [&[entry.name, "--help"][..], &[entry.name, "-h"], &["help", entry.name]] {
            let answer = scratch.ok(arguments);
            assert!(answer.stdout.contains(entry.about), "{arguments:?}: {answer:?}");
            assert!(answer.stdout.contains("Examples:"), "{arguments:?}: {answer:?}");
            assert_eq!(answer.stderr, "", "{arguments:?}");
        }
        let answer = scratch.run(&[entry.name, "--no-such-option"]);
        assert_eq!((answer.code, answer.stdout.as_str()), (Some(2), ""), "{}", entry.name);
        assert!(answer.stderr.starts_with("error: "), "{answer:?}");
    }
}

#[test]
fn a_newcomer_finds_every_command_and_where_to_start() {
    let scratch = Scratch::new();
    let answer = scratch.ok(&["help"]);
    for entry in all() {
        assert!(answer.stdout.contains(&format!("  {} ", entry.name)), "{}", entry.name);
    }
    assert!(answer.stdout.contains("Start here:"), "{answer:?}");
    assert_eq!(scratch.ok(&["--help"]).stdout, answer.stdout);
    let nothing = scratch.run(&[]);
    assert_eq!((nothing.code, nothing.stdout.as_str()), (Some(2), ""));
    assert!(nothing.stderr.contains("Start here:"), "{nothing:?}");
    let typo = scratch.run(&["covnert"]);
    assert!(typo.code == Some(2) && typo.stderr.contains("'convert'"), "{typo:?}");
    assert!(scratch.ok(&["--version"]).stdout.starts_with("vdkit "));
}

/// Runs on a terminal of its own, as a person would.
fn on_a_terminal(scratch: &Scratch, line: &str) -> String {
    let line = line.replace("vdkit", env!("CARGO_BIN_EXE_vdkit"));
    let output = Command::new("script")
        .args(["-qec", &line, "/dev/null"])
        .current_dir(scratch.path(""))
        .env("TERM", "xterm")
        .env_remove("NO_COLOR")
        .output()
        .expect("script, of the package bsdutils");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn colors_are_for_terminals_and_may_be_refused() {
    let scratch = Scratch::new();
    assert!(on_a_terminal(&scratch, "vdkit info no-such").contains('\x1b'));
    let refused = on_a_terminal(&scratch, "NO_COLOR=1 vdkit info no-such");
    assert!(refused.starts_with("error: no-such") && !refused.contains('\x1b'), "{refused:?}");
    assert!(!on_a_terminal(&scratch, "NO_COLOR=1 vdkit help info").contains('\x1b'));
    assert!(!scratch.run(&["info", "no-such"]).stderr.contains('\x1b'));
}

#[test]
fn a_bar_is_drawn_on_a_terminal_only() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &vec![1; 4 << 20]);
    let drawn = on_a_terminal(&scratch, "vdkit convert --progress bar a.raw b.raw");
    assert!(drawn.contains('%'), "{drawn:?}");
    assert_eq!(on_a_terminal(&scratch, "vdkit convert --progress none a.raw b.raw"), "");
    assert_eq!(scratch.ok(&["convert", "--progress", "bar", "a.raw", "b.raw"]).stderr, "");
}

#[test]
fn a_file_that_may_not_be_read_is_told() {
    let scratch = Scratch::new();
    scratch.write("secret.raw", &[1; 512]);
    std::fs::set_permissions(scratch.path("secret.raw"), PermissionsExt::from_mode(0o600)).unwrap();
    if !vdkit_testkit::require_root() {
        return;
    }
    let nobody = Nobody::new(&scratch);
    for arguments in [
        &["info", "secret.raw"][..],
        &["read", "secret.raw", "0"],
        &["convert", "secret.raw", "null:"],
        &["check", "secret.raw"],
        &["create", "new.raw", "1M"],
    ] {
        let output = nobody.run(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
        assert!(stderr.contains("Permission denied"), "{arguments:?}: {stderr}");
        assert!(stderr.contains(arguments[1]), "{arguments:?}: {stderr}");
    }
}

/// Runs the command as nobody, since root may read everything.
struct Nobody<'a> {
    scratch: &'a Scratch,
    /// A copy of the program, in a place that nobody reaches.
    binary: PathBuf,
}

impl<'a> Nobody<'a> {
    fn new(scratch: &'a Scratch) -> Self {
        let binary = scratch.path("vdkit");
        // By a process of its own: a child that another test starts meanwhile would inherit the open
        // file, and a program that somebody has open for writing cannot be started.
        let vdkit = env!("CARGO_BIN_EXE_vdkit");
        assert!(Command::new("cp").arg(vdkit).arg(&binary).status().unwrap().success());
        std::fs::set_permissions(&binary, PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::set_permissions(scratch.path(""), PermissionsExt::from_mode(0o755)).unwrap();
        Self { scratch, binary }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&self.binary)
            .args(arguments)
            .current_dir(self.scratch.path(""))
            .output()
            .expect("setpriv, of the package util-linux")
    }
}

/// A folder that cannot be opened cannot be synced either.
#[test]
fn no_file_of_an_image_stays_whose_name_is_not_durable() {
    let scratch = Scratch::new();
    if !vdkit_testkit::require_root() {
        return;
    }
    let nobody = Nobody::new(&scratch);
    let folder = scratch.path("drop");
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o733)).unwrap();
    for options in [&[][..], &["-o", "data_file=a.data"]] {
        let output = nobody.run(&[&["create", "drop/a.qcow2", "1M"], options].concat());
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let left: Vec<_> = std::fs::read_dir(&folder).unwrap().flatten().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn a_full_stdout_is_an_error() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &[1; 65536]);
    for arguments in [&["read", "a.raw", "0"][..], &["info", "a.raw"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = scratch.command(arguments).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{arguments:?}: {output:?}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("stdout"), "{arguments:?}: {stderr}");
    }
}

/// Runs a command whose stdout, or stderr too, is a pipe that nobody reads.
fn unread(scratch: &Scratch, arguments: &[&str], messages_too: bool) -> std::process::Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = scratch.command(arguments);
    if messages_too {
        command.stderr(writer.try_clone().unwrap());
    } else {
        command.stderr(Stdio::piped());
    }
    command.stdout(writer).spawn().unwrap().wait_with_output().unwrap()
}

#[test]
fn output_that_nobody_reads_changes_no_exit_code() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &[1; 65536]);
    scratch.write("b.raw", &[2; 65536]);
    scratch.write("empty.img", &[]);
    scratch.ok(&["create", "a.qcow2", "1M"]);
    let mut bytes = std::fs::read(scratch.path("a.qcow2")).unwrap();
    bytes[40..48].copy_from_slice(&(1u64 << 60).to_be_bytes());
    scratch.write("far.qcow2", &bytes);
    for (arguments, code) in [
        (&["--help"][..], 0),
        (&["info", "a.qcow2"], 0),
        (&["read", "a.raw", "0"], 0),
        (&["map", "--json", "a.qcow2"], 0),
        (&["compare", "a.raw", "b.raw"], 3),
        (&["inspect", "empty.img"], 5),
        (&["inspect", "--json", "empty.img"], 5),
        (&["info", "nothing"], 1),
        (&["nothing"], 2),
        (&["qemu-img", "--help"], 0),
        (&["qemu-img", "convert", "--help"], 0),
        (&["qemu-img", "info", "a.qcow2"], 0),
        (&["qemu-img", "info", "nothing"], 1),
        (&["qemu-img", "check", "far.qcow2"], 1),
        (&["qemu-img", "compare", "a.raw", "b.raw"], 1),
        (&["qemu-img", "create", "-f", "qcow2", "new.qcow2", "1M"], 0),
        (&["qemu-img", "convert", "-p", "a.raw", "copy.raw"], 0),
        (&["qemu-img", "dd", "if=a.raw", "of=part.raw", "bs=1M", "skip=9"], 0),
        (&["qemu-nbd", "--help"], 0),
        (&["qemu-nbd", "--version"], 0),
        (&["qemu-nbd", "nothing"], 1),
    ] {
        for messages_too in [false, true] {
            let output = unread(&scratch, arguments, messages_too);
            assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(!said.contains("panicked"), "{arguments:?}: {said}");
        }
    }
    assert!(scratch.path("new.qcow2").exists());
}

/// A byte that is not UTF-8 is a letter of a name like others; in JSON, which is UTF-8, it is replaced.
#[test]
fn names_that_are_not_text_are_names() {
    let scratch = Scratch::new();
    let name = |stem: &[u8]| OsStr::from_bytes(&[stem, b"\xe9.qcow2"].concat()).to_owned();
    let (base, over) = (name(b"base"), name(b"over"));
    let run = |arguments: &[&str], names: &[&OsStr]| {
        let done = scratch.command(arguments).args(names).output().unwrap();
        // Doctor and validate may find something.
        assert!(matches!(done.status.code(), Some(0 | 3)), "{arguments:?}: {done:?}");
        String::from_utf8(done.stdout).unwrap()
    };
    run(&["create"], &[&base, OsStr::new("1M")]);
    std::os::unix::fs::symlink(&base, scratch.path("base.qcow2")).unwrap();
    run(&["create", "--backing", "base.qcow2"], &[&over]);
    for arguments in [
        &["info", "--json"][..],
        &["doctor", "--json"],
        &["tree", "--json"],
        &["validate", "--json", "--for", "kvm"],
        &["rebase", "--json", "--backing", "base.qcow2"],
        &["amend", "--json", "-o", "lazy_refcounts=on"],
        &["commit", "--json", "--force"],
    ] {
        let said = run(arguments, &[&over]);
        assert!(said.contains("over\u{fffd}.qcow2"), "{arguments:?}: {said}");
    }
    let operand = |key: &str, name: &OsStr| {
        let mut word = OsString::from(key);
        word.push(name);
        word
    };
    let copy = name(b"copy");
    run(&["dd"], &[&operand("if=", &base), &operand("of=", &copy)]);
    assert!(scratch.path("").join(&copy).exists());
    // QEMU's syntax is text.
    for line in [&["qemu-img", "create", "-f", "qcow2"][..], &["qemu-img", "info"]] {
        let done = scratch.command(line).arg(name(b"new")).arg("1M").output().unwrap();
        assert_eq!(done.status.code(), Some(1), "{line:?}: {done:?}");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(said.contains("is not UTF-8"), "{said}");
    }
    let entries = std::fs::read_dir(scratch.path("")).unwrap().count();
    assert_eq!(entries, 4, "base, its link, over and copy");
}

#[test]
fn hostile_images_are_errors_of_every_reading_command() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "whole.qcow2", "1M"]);
    let whole = std::fs::read(scratch.path("whole.qcow2")).unwrap();
    // A header whose L1 table lies beyond the file, one cut short, and one with an unknown
    // incompatible feature.
    let mut far = whole.clone();
    far[40..48].copy_from_slice(&(1u64 << 60).to_be_bytes());
    scratch.write("far.qcow2", &far);
    scratch.write("cut.qcow2", &whole[..80]);
    let mut unknown = whole;
    unknown[72] = 0x80;
    scratch.write("unknown.qcow2", &unknown);
    for (name, codes) in [("far.qcow2", &[4][..]), ("cut.qcow2", &[4]), ("unknown.qcow2", &[1])] {
        for arguments in [
            &["convert", name, "null:"][..],
            &["map", name],
            &["read", name, "0"],
            &["compare", name, name],
            &["measure", name],
            &["resize", name, "2M"],
            &["write", name, "0", "1", "--zero"],
        ] {
            let answer = scratch.run(arguments);
            let code = answer.code.unwrap_or_default();
            assert!(codes.contains(&code), "{arguments:?}: {answer:?}");
            assert!(answer.stderr.contains(name), "{arguments:?}: {answer:?}");
            assert!(!answer.stderr.contains("panicked"), "{arguments:?}: {answer:?}");
        }
    }
    peer(&scratch.path(""), "qemu-img", &["info", "whole.qcow2"]);
}

#[test]
fn no_thread_is_started_for_a_description() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "disk.qcow2", "1G"]);
    let output = Command::new("strace")
        .args(["-f", "-e", "trace=clone,clone3,fork,vfork,io_uring_setup"])
        .args([env!("CARGO_BIN_EXE_vdkit"), "info", "disk.qcow2"])
        .current_dir(scratch.path(""))
        .output()
        .expect("strace; `make peers` installs it");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    assert!(!log.contains("clone") && !log.contains("io_uring"), "{log}");
}
