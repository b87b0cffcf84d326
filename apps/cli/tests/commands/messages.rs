//! What is said when something cannot be done, to somebody who reads it for the first time.

use std::io::Read;
use std::process::Stdio;

use crate::common::{Answer, Scratch, peer};
use vdkit_testkit::Killed;

fn says(answer: &Answer, words: &[&str]) {
    for word in words {
        assert!(answer.stderr.contains(word), "no '{word}': {}", answer.stderr);
    }
}

/// By whatever name: a link's, another one of the same file.
#[test]
fn source_and_target_in_one_are_told_as_such() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a", "1M"]);
    std::os::unix::fs::symlink("a", scratch.path("link")).unwrap();
    std::fs::hard_link(scratch.path("a"), scratch.path("hard")).unwrap();
    for target in ["a", "link", "hard", "./a"] {
        let answer = scratch.fails(2, "are one file", &["convert", "a", target]);
        assert!(!answer.stderr.contains("in use"), "{answer:?}");
    }
    scratch.fails(2, "are one file", &["dd", "if=a", "of=link"]);
    // Where the same file is used twice in another way.
    scratch.ok(&["create", "base.qcow2", "1M"]);
    scratch.ok(&["create", "top.qcow2", "-b", "base.qcow2"]);
    let answer = scratch.run(&["dd", "if=top.qcow2", "of=base.qcow2", "--force"]);
    says(&answer, &["this command uses it already"]);
}

#[test]
fn the_format_of_a_target_is_asked_for_by_its_own_option() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    scratch.ok(&["create", "a.img", "1M"]);
    for command in [&["convert", "-n", "a.qcow2", "a.img"][..], &["dd", "if=a.qcow2", "of=a.img"]] {
        says(&scratch.fails(2, "format was not detected", command), &["'-O raw'"]);
    }
    scratch.ok(&["convert", "-n", "-O", "raw", "a.qcow2", "a.img"]);
    says(
        &scratch.fails(2, "format was not detected", &["write", "a.img", "0", "1", "--zero"]),
        &["'-f raw'"],
    );
}

#[test]
fn an_image_of_another_format_is_not_damaged() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    let answer =
        scratch.fails(1, "is a qcow2 image", &["convert", "-f", "qcow", "a.qcow2", "o.raw"]);
    says(&answer, &["opened as qcow", "leave the format out"]);
    // A damaged one is, and is checked as what it was opened as.
    scratch.write("b.qcow2", &[0; 65536]);
    let answer = scratch.fails(4, "magic at offset", &["info", "-f", "qcow2", "b.qcow2"]);
    says(&answer, &["'vdkit check -f qcow2 b.qcow2'"]);
    // Nothing can be checked in a pipe.
    let bytes = std::fs::read(scratch.path("a.qcow2")).unwrap();
    let answer = scratch.run_with_input(&["convert", "-", "o.raw"], &bytes[..100_000]);
    assert_eq!(answer.code, Some(4), "{answer:?}");
    says(&answer, &["once it is in a file"]);
    assert!(!answer.stderr.contains("check 'standard input'"), "{answer:?}");
}

#[test]
fn a_format_that_is_not_written_is_not_supported() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    for command in [
        &["convert", "-O", "dmg", "a.qcow2", "b"][..],
        &["create", "-f", "qed", "b", "1M"],
        &["create", "-f", "raw", "-b", "a.qcow2", "b"],
    ] {
        says(&scratch.fails(1, "not supported: ", command), &["hint: "]);
    }
}

#[test]
fn sizes_and_ports_say_what_is_wrong_with_them() {
    let scratch = Scratch::new();
    for size in ["16E", "8E", "99999999999999999999"] {
        says(
            &scratch.run(&["create", "-f", "raw", "b", size]),
            &["is too large", "8E less one byte"],
        );
    }
    says(&scratch.run(&["create", "b", "10XB"]), &["is not a size"]);
    scratch.ok(&["create", "a.qcow2", "1M"]);
    let serve = |address| scratch.run(&["serve", "a.qcow2", "--nbd", address]);
    says(&serve("tcp:127.0.0.1:99999"), &["'99999' is no port", "65535"]);
    says(&serve("tcp:127.0.0.1"), &["no port"]);
    says(&serve("tcp:[::1]"), &["has no port"]);
}

#[test]
fn sizes_that_mean_something_else_elsewhere_are_noted() {
    let scratch = Scratch::new();
    let answer = scratch.ok(&["create", "a.qcow2", "10GB"]);
    says(&answer, &["note: '10GB' is 10 GiB (10737418240 bytes)"]);
    assert_eq!(answer.stderr.lines().count(), 1, "{answer:?}");
    let answer = scratch.ok(&["create", "x", "1"]);
    says(&answer, &["note: 1 byte was asked for, and the disk has 512", "20G is 20 GiB"]);
    // It has a unit.
    assert!(!scratch.ok(&["create", "y", "10kB"]).stderr.contains("without a unit"));
    for size in ["10G", "10GiB", "64M", "4K"] {
        assert_eq!(scratch.ok(&["create", "--force", "a.qcow2", size]).stderr, "", "{size}");
    }
}

#[test]
fn names_of_protocols_are_answered_with_the_pipe_that_does_it() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    for (name, tool) in [
        ("s3://bucket/key", "aws s3 cp"),
        ("gs://bucket/key", "gcloud storage"),
        ("rbd:pool/image", "rbd"),
        ("ssh://host/file", "ssh HOST cat"),
        ("ftp://host/file", "curl"),
        ("iscsi://host/target", "iscsiadm"),
        ("nfs://host/file", "mount it"),
        ("json:{}", "QEMU"),
        ("file:a.qcow2", "leave out 'file:'"),
    ] {
        for command in [&["info", name][..], &["convert", name, "o.raw"], &["check", name]] {
            says(&scratch.fails(1, "vdkit does not read", command), &["hint: ", tool]);
        }
    }
    for name in ["s3://bucket/key", "rbd:pool/image", "ssh:x"] {
        for command in [
            &["convert", "a.qcow2", name][..],
            &["create", name, "1M"],
            &["dd", "if=a.qcow2", &format!("of={name}")],
        ] {
            scratch.fails(2, "vdkit does not write to", command);
        }
    }
    assert_eq!(scratch.names(), ["a.qcow2"]);
    scratch.ok(&["convert", "a.qcow2", "./nbd:x"]);
    scratch.ok(&["info", "nbd:x"]);
}

#[test]
fn standard_streams_are_known_by_their_names_in_dev() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.raw", "1M"]);
    let answer = scratch.ok(&["convert", "-f", "raw", "-O", "raw", "a.raw", "/dev/stdout"]);
    assert_eq!(answer.bytes.len(), 1 << 20);
    let answer = scratch.run_with_input(&["convert", "/dev/stdin", "b.raw"], &[7; 512]);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    assert_eq!(std::fs::read(scratch.path("b.raw")).unwrap(), [7; 512]);
    scratch.ok(&["create", "w.qcow2", "1M"]);
    let answer = scratch.run_with_input(&["write", "w.qcow2", "0", "--input", "-"], &[7; 512]);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    assert_eq!(scratch.ok(&["read", "w.qcow2", "0", "512"]).bytes, [7; 512]);
    peer(&scratch.path(""), "mkfifo", &["pipe"]);
    for command in [&["convert", "a.raw", "pipe"][..], &["create", "--force", "pipe", "1M"]] {
        says(&scratch.fails(1, "pipe: is a pipe", command), &["vdkit convert SOURCE -"]);
    }
    let answer = scratch.run_with_input(&["convert", "-", "b.raw"], &[7; 100]);
    says(&answer, &["standard input: ends within a sector"]);
    says(
        &scratch.fails(2, "/dev/stdout", &["create", "/dev/stdout", "1M"]),
        &["vdkit convert SOURCE -"],
    );
    says(&scratch.fails(1, "reads standard input", &["info", "-"]), &["vdkit convert - FILE"]);
}

#[test]
fn a_raw_backing_file_is_named_by_its_option() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.raw", "1M"]);
    scratch.ok(&["create", "a.qcow2", "1M"]);
    for command in
        [&["create", "o.qcow2", "-b", "a.raw"][..], &["rebase", "a.qcow2", "-b", "a.raw"]]
    {
        let answer = scratch.fails(2, "its format was not detected", command);
        says(&answer, &["-F raw"]);
    }
}

#[test]
fn what_is_missing_is_named_without_numbers_of_errors() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    for command in [&["create", "no/dir/x.raw", "1M"][..], &["convert", "a.qcow2", "no/dir/x.raw"]]
    {
        says(&scratch.fails(1, "the folder no is not there", command), &["mkdir -p no/dir"]);
    }
    scratch.fails(1, "nofile: there is no such file", &["info", "nofile"]);
    // What is read would not be there either, if its folder were.
    let answer = scratch.fails(1, "the folder no is not there", &["info", "no/x.raw"]);
    assert!(!answer.stderr.contains("mkdir"), "{answer:?}");
    for command in [
        &["serve", "a.qcow2", "--nbd", "unix:no/socket"][..],
        &["serve", "a.qcow2", "--vhost-user", "no/socket"],
        &["serve", "a.qcow2", "--nbd", "unix:socket", "--control", "no/socket"],
        &["mount", "a.qcow2", "no/file"],
    ] {
        says(&scratch.fails(1, "the folder no is not there", command), &["mkdir -p no"]);
    }
    let write = ["write", "a.qcow2", "0", "--input", "nofile"];
    scratch.fails(1, "nofile: there is no such file", &write);
    says(&scratch.fails(1, "there is no such socket", &["ctl", "no", "status"]), &["--control"]);
    says(&scratch.fails(1, "it is no socket", &["ctl", "a.qcow2", "status"]), &["--control"]);
    says(&scratch.fails(2, "is a command", &["man", "convert"]), &["vdkit man --page convert"]);
    assert_eq!(scratch.names(), ["a.qcow2"]);
    for command in [
        &["info", "nofile"][..],
        &["ctl", "nosocket", "status"],
        &["write", "a.qcow2", "0", "--input", "nofile"],
        &["tree", "nofile"],
        &["doctor", "nofile"],
        &["top", "nosocket"],
        &["check", "a.qcow2/x"],
        &["info", "--key-file", "nofile", "a.qcow2"],
        &["map", "--key-file", "nofile", "a.qcow2"],
    ] {
        let answer = scratch.run(command);
        assert!(!format!("{answer:?}").contains("os error"), "{command:?}: {answer:?}");
    }
}

#[test]
fn a_device_that_is_too_small_is_no_file_system_without_room() {
    let scratch = Scratch::new();
    let Some(device) = vdkit_testkit::fs::loop_device(1 << 20, 512) else { return };
    let device = device.path().display().to_string();
    std::fs::write(scratch.path("a.raw"), vec![7; 4 << 20]).unwrap();
    let answer = scratch.fails(2, "has 1048576 bytes", &["convert", "a.raw", &device]);
    says(&answer, &["it is a device: make it larger"]);
    assert!(!answer.stderr.contains("vdkit resize"), "{answer:?}");
    let answer = scratch.run(&["convert", "-O", "qcow2", "a.raw", &device]);
    assert_eq!(answer.code, Some(7), "{answer:?}");
    says(&answer, &["make it larger (LVM: lvextend)"]);
    assert!(!answer.stderr.contains("file system"), "{answer:?}");
}

/// The hint was to unmount it.
#[test]
fn a_folder_on_which_something_is_mounted_is_no_place_for_a_disk() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    let answer = scratch.fails(1, "/: is no regular file", &["mount", "a.qcow2", "/"]);
    assert!(!answer.stderr.contains("umount"), "{answer:?}");
}

/// `--force-share` only where the command has it, and `ctl` where our own server holds the image.
#[test]
fn somebody_who_is_kept_out_is_told_what_works() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    scratch.ok(&["create", "b.raw", "1M"]);
    let mut server = Killed(
        scratch
            .command(&["serve", "a.qcow2", "--nbd", "unix:nbd", "--control", "control"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    // It says when it is ready.
    server.0.stdout.take().unwrap().read_exact(&mut [0; 7]).unwrap();
    for (command, shared, action) in [
        (&["resize", "a.qcow2", "2M"][..], false, "resize SIZE"),
        (&["snapshot", "create", "a.qcow2", "s"], false, "snapshot NAME"),
        (&["convert", "b.raw", "a.qcow2"], false, "status"),
        (&["write", "a.qcow2", "0", "1", "--zero"], false, "status"),
        (&["info", "a.qcow2"], true, "status"),
        (&["snapshot", "list", "a.qcow2"], true, "snapshot NAME"),
        (&["convert", "a.qcow2", "c.raw"], true, "status"),
    ] {
        let answer = scratch.fails(6, "is in use by process", command);
        says(&answer, &[&format!("'vdkit ctl control {action}'")]);
        assert_eq!(answer.stderr.contains("--force-share"), shared, "{command:?}: {answer:?}");
    }
    let said = scratch.ok(&["ctl", "control", "snapshot", "s"]).stdout;
    assert!(!said.contains("nanoseconds") && !said.contains("date"), "{said}");
    assert!(said.contains("taken (UTC): 20") && said.contains("disk: 1 MiB"), "{said}");
    let said = scratch.ok(&["ctl", "control", "stats"]).stdout;
    assert!(!said.contains("nanoseconds"), "{said}");
    scratch.ok(&["ctl", "control", "quit"]);
    server.0.wait().unwrap();
}

/// What a command says that is interrupted when the first of its bytes have moved.
fn interrupted(scratch: &Scratch, command: &[&str]) -> String {
    let mut child = scratch.command(command).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    // The first line of progress.
    stderr.read_exact(&mut [0; 1]).unwrap();
    peer(&scratch.path(""), "kill", &["-INT", &child.id().to_string()]);
    let mut said = String::new();
    stderr.read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
    said
}

#[test]
fn a_target_that_is_half_written_is_told() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &vec![7; 8 << 20]);
    scratch.ok(&["create", "target.qcow2", "8M"]);
    let slowly = ["convert", "--rate", "1M", "--threads", "1", "--progress", "json", "a.raw"];
    let said = interrupted(&scratch, &[&slowly[..], &["--into", "target.qcow2"]].concat());
    assert!(said.contains("target.qcow2: is written in part"), "{said}");
    assert!(said.contains("run the command again"), "{said}");
    // A new target is removed, and there is nothing to say.
    let said = interrupted(&scratch, &[&slowly[..], &["new.qcow2"]].concat());
    assert!(!said.contains("written in part"), "{said}");
    assert_eq!(scratch.names(), ["a.raw", "target.qcow2"]);
}

/// `-p`, `--backing-chain`, `-b ""` and so on; the table itself is tested beside it.
#[test]
fn habits_of_qemus_programs_are_answered_with_what_does_it_here() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    for (command, answer) in [
        (&["convert", "-p", "a.qcow2", "b"][..], "--progress bar"),
        (&["convert", "-W", "a.qcow2", "b"], "out of order"),
        (&["info", "--backing-chain", "a.qcow2"], "vdkit info --chain"),
        (&["info", "--output=json", "a.qcow2"], "--json"),
        (&["snapshot", "-l", "a.qcow2"], "vdkit snapshot list IMAGE"),
        (&["commit", "-d", "a.qcow2"], "--keep"),
        (&["bitmap", "--add", "a.qcow2", "x"], "vdkit bitmap add"),
        (&["bench", "a.qcow2"], "vdkit lab"),
        (&["rebase", "-b", "", "a.qcow2"], "--no-backing"),
        (&["check", "-T", "none", "a.qcow2"], "page cache"),
        (&["create", "-o", "help", "b.qcow2", "1M"], "cluster_size"),
        (&["create", "-o", "nocow=on", "b.qcow2", "1M"], "chattr +C"),
        (&["create", "-f", "raw", "--options=extent_size_hint=1M", "b.raw", "1M"], "extsize"),
        (&["convert", "-l", "snapshot.name=one", "a.qcow2", "b"], "--snapshot NAME"),
        (&["convert", "-S", "0", "a.qcow2", "b"], "-o preallocation=full"),
        (&["dd", "-n", "if=a.qcow2", "of=b"], "conv=nocreat"),
        (&["serve", "--fork", "a.qcow2"], "vdkit qemu-nbd --fork"),
        (&["serve", "--offset=512", "a.qcow2"], "vdkit qemu-nbd --offset"),
        (&["serve", "-c", "/dev/nbd0", "a.qcow2"], "vdkit mount IMAGE FILE"),
        (&["serve", "-tk", "/run/a.sock", "a.qcow2"], "--once"),
        (&["serve", "-e", "3", "a.qcow2"], "--connections N"),
        (&["convert", "-6", "a.qcow2", "b"], "compat=1.1"),
        (&["create", "-e", "b.qcow2", "1M"], "encrypt.format=luks"),
        (&["info", "--limits", "a.qcow2"], "vdkit doctor IMAGE"),
        (&["create", "-f", "qcow2", "-o", "help"], "vdkit formats qcow2"),
    ] {
        let said = scratch.run(command);
        assert_eq!(said.code, Some(2), "{said:?}");
        says(&said, &[answer]);
        assert!(!said.stderr.contains("tip:"), "{said:?}");
    }
    // An option that nobody knows is no file name, unless there is such a file.
    let said = scratch.fails(2, "unexpected argument", &["info", "--bogus", "a.qcow2"]);
    assert!(!said.stderr.contains("tip:"), "{said:?}");
    scratch.write("-x", b"");
    let said = scratch.fails(2, "unexpected argument", &["info", "-x"]);
    says(&said, &["use '-- -x'"]);
    scratch.ok(&["snapshot", "create", "a.qcow2", "one"]);
    scratch.json_of("measure", 0, &["-l", "one", "a.qcow2"]);
    scratch.json_of("measure", 0, &["-s", "1M"]);
}
