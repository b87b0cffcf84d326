//! What vdkit writes under the name `qemu-img`, and where: targets that are no new files, held against
//! QEMU's program.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use vdkit_testkit::fs::loop_device;
use vdkit_testkit::{Killed, require_peer, require_root};

use crate::common::{self, Scratch};

const PROGRAMS: [&str; 2] = ["qemu-img", "./qemu-img"];
/// An arbitrary unprivileged user.
const STRANGER: u32 = 1234;

/// A folder with vdkit as `qemu-img` and a raw image, `s.raw`, of 1 MiB; `None` without QEMU.
fn folder() -> Option<Scratch> {
    if !require_peer("qemu-img") || !require_peer("qemu-io") || !require_peer("qemu-nbd") {
        return None;
    }
    let scratch = Scratch::new();
    symlink(env!("CARGO_BIN_EXE_vdkit"), scratch.path("qemu-img")).unwrap();
    let mut bytes = vec![0; 1 << 20];
    bytes[..100_000].fill(7);
    scratch.write("s.raw", &bytes);
    Some(scratch)
}

fn shell(scratch: &Scratch, script: &str) -> Output {
    Command::new("bash").args(["-c", script]).current_dir(scratch.folder()).output().unwrap()
}

fn succeeds(scratch: &Scratch, script: &str) {
    let done = shell(scratch, script);
    assert!(done.status.success(), "{script}: {done:?}");
}

fn is_source(scratch: &Scratch, name: &str, format: &str) {
    succeeds(scratch, &format!("qemu-img compare -f raw -F {format} s.raw {name}"));
}

#[test]
fn a_descriptor_that_the_caller_holds_gets_the_image() {
    let Some(scratch) = folder() else { return };
    for program in PROGRAMS {
        for (line, format) in [
            ("convert -f raw -O raw s.raw /proc/self/fd/3", "raw"),
            ("convert -f raw -O qcow2 s.raw /dev/fd/3", "qcow2"),
            ("dd -f raw -O raw if=s.raw of=/proc/self/fd/3", "raw"),
        ] {
            // What the caller holds has no name by then.
            let script = format!(
                "rm -f t && exec 3<>t && rm t && {program} {line} && cat /proc/self/fd/3 >copy"
            );
            succeeds(&scratch, &script);
            is_source(&scratch, "copy", format);
        }
        succeeds(
            &scratch,
            &format!("rm -f t && exec 3<>t && {program} create -q -f qcow2 /dev/fd/3 1M"),
        );
        succeeds(&scratch, "qemu-img check -q -f qcow2 t");
    }
}

#[test]
fn other_names_and_links_lead_to_the_new_image() {
    let Some(scratch) = folder() else { return };
    for program in PROGRAMS {
        for line in [
            "convert -f raw -O qcow2 s.raw TARGET",
            "convert -f raw -O raw s.raw TARGET",
            "dd -f raw -O qcow2 if=s.raw of=TARGET",
        ] {
            let format = if line.contains("-O raw") { "raw" } else { "qcow2" };
            succeeds(&scratch, "rm -f t other && echo before >t && ln t other");
            succeeds(&scratch, &format!("{program} {}", line.replace("TARGET", "t")));
            is_source(&scratch, "other", format);
            succeeds(&scratch, "rm -f t dangling && ln -s t dangling");
            succeeds(&scratch, &format!("{program} {}", line.replace("TARGET", "dangling")));
            assert!(scratch.path("dangling").is_symlink());
            is_source(&scratch, "t", format);
        }
    }
}

/// Which extents are its own is read before it is emptied.
#[test]
fn an_image_of_several_files_and_names_is_written_again() {
    let Some(scratch) = folder() else { return };
    let convert = "convert -f raw -O vmdk -o subformat=twoGbMaxExtentFlat s.raw t.vmdk";
    for line in [convert, "create -q -f vmdk -o subformat=monolithicFlat t.vmdk 1M"] {
        succeeds(&scratch, "rm -f t.vmdk t-* other.vmdk");
        succeeds(&scratch, &format!("./qemu-img {line} && ln t.vmdk other.vmdk"));
        succeeds(&scratch, &format!("./qemu-img {line} && cmp t.vmdk other.vmdk"));
        if line == convert {
            is_source(&scratch, "t.vmdk", "vmdk");
        }
    }
    // Another's file has the name of an extent.
    succeeds(&scratch, "rm -f t.vmdk other.vmdk && echo before | tee t.vmdk >old && ln t.vmdk b");
    succeeds(&scratch, "echo theirs >t-f001.vmdk");
    let done = shell(&scratch, &format!("./qemu-img {convert}"));
    assert_eq!(done.status.code(), Some(1), "{done:?}");
    succeeds(&scratch, "cmp t.vmdk old");
}

/// A file with several names is written in place: its bytes are gone before they are read.
#[test]
fn an_image_is_not_made_of_its_own_ruins() {
    let Some(scratch) = folder() else { return };
    succeeds(&scratch, "cp s.raw a && ln a b");
    for line in [
        "convert -f raw -O raw a b",
        "convert -U -f raw -O raw a b",
        "dd -U -f raw if=a of=b",
        "create -q -f qcow2 -b a -F raw b",
    ] {
        let done = shell(&scratch, &format!("./qemu-img {line}"));
        assert_eq!(done.status.code(), Some(1), "{line}: {done:?}");
        succeeds(&scratch, "cmp s.raw b");
    }
}

#[test]
fn a_file_is_written_in_a_folder_that_takes_no_other() {
    let Some(scratch) = folder() else { return };
    if !require_root() {
        return;
    }
    // The programs are looked up and run as another user.
    let allow = |name: &str, mode| {
        std::fs::set_permissions(scratch.path(name), PermissionsExt::from_mode(mode)).unwrap();
    };
    let own = scratch.path("vdkit");
    std::fs::copy(env!("CARGO_BIN_EXE_vdkit"), &own).unwrap();
    allow("vdkit", 0o755);
    std::fs::create_dir(scratch.path("theirs")).unwrap();
    for mode in [0o755, 0o1777] {
        scratch.write("theirs/t", b"before");
        allow("", 0o755);
        allow("theirs", mode);
        allow("theirs/t", 0o666);
        for line in ["convert -f raw -O qcow2 s.raw theirs/t", "create -q -f qcow2 theirs/t 1M"] {
            let mut command = Command::new(&own);
            command.arg("qemu-img").args(line.split(' ')).current_dir(scratch.folder());
            let done = command.uid(STRANGER).gid(STRANGER).output().unwrap();
            assert!(done.status.success(), "{mode:o}, {line}: {done:?}");
            succeeds(&scratch, "qemu-img check -q -f qcow2 theirs/t");
            assert_eq!(scratch.path("theirs/t").metadata().unwrap().uid(), 0);
        }
        assert_eq!(std::fs::read_dir(scratch.path("theirs")).unwrap().count(), 1);
    }
}

#[test]
fn new_images_can_be_written_by_their_owner_only() {
    let Some(scratch) = folder() else { return };
    for (program, name) in PROGRAMS.into_iter().zip(["theirs", "ours"]) {
        for line in ["convert -f raw -O qcow2 s.raw", "create -q -f raw", "dd -f raw if=s.raw"] {
            let target =
                if line.starts_with("dd") { format!("of={name}") } else { name.to_owned() };
            let size = if line.starts_with("create") { "1M" } else { "" };
            succeeds(&scratch, &format!("umask 0; rm -f {name}; {program} {line} {target} {size}"));
            let mode = scratch.path(name).metadata().unwrap().mode() & 0o777;
            assert_eq!(mode, 0o644, "{program} {line}: {mode:o}");
        }
    }
}

/// An export of QEMU's server, for any number of clients in turn.
fn export(scratch: &Scratch, bytes: u64) -> (Killed, String) {
    let (file, socket) = (scratch.path("export.raw"), scratch.path("socket"));
    let _ = std::fs::remove_file(&socket);
    std::fs::File::create(&file).unwrap().set_len(bytes).unwrap();
    let mut server = Command::new("qemu-nbd");
    server.args(["-t", "-f", "raw", "-e", "0", "-k"]).arg(&socket).arg(&file);
    let server = Killed(server.spawn().unwrap());
    common::wait_until_connected(&socket);
    (server, format!("nbd+unix:///?socket={}", socket.display()))
}

#[test]
fn an_export_is_a_target_like_a_device() {
    let Some(scratch) = folder() else { return };
    succeeds(&scratch, "qemu-img create -q -f qcow2 base.qcow2 1M");
    let base = scratch.path("base.qcow2").display().to_string();
    for (line, format) in [
        ("convert -f raw -O raw s.raw TARGET", "raw"),
        ("convert -f raw -O qcow2 s.raw TARGET", "qcow2"),
        ("convert -c -f raw -O qcow2 s.raw TARGET", "qcow2"),
        ("convert -f raw -O qcow2 -B BASE -F qcow2 s.raw TARGET", "qcow2"),
        ("dd -f raw -O raw if=s.raw of=TARGET", "raw"),
        ("dd -f raw -O qcow2 if=s.raw of=TARGET", "qcow2"),
        ("create -q -f raw TARGET 1M", ""),
        ("create -q -f qcow2 TARGET 1M && PROGRAM amend -q -f qcow2 -o compat=0.10 TARGET", ""),
        ("create -q -f qcow2 -b BASE -F qcow2 TARGET", ""),
    ] {
        for program in PROGRAMS {
            let (_server, uri) = export(&scratch, 2 << 20);
            let line = line.replace("TARGET", &format!("'{uri}'")).replace("BASE", &base);
            succeeds(&scratch, &format!("{program} {}", line.replace("PROGRAM", program)));
            match format {
                "" => {}
                "raw" => succeeds(&scratch, "cmp -n 1048576 s.raw export.raw"),
                _ => is_source(&scratch, "-U export.raw", format),
            }
        }
    }
    for line in [
        "convert -f raw -O raw s.raw TARGET",
        "convert -f raw -O vhdx s.raw TARGET",
        "create -q -f raw TARGET 1M",
        "dd -f raw -O raw if=s.raw of=TARGET",
    ] {
        let (server, uri) = export(&scratch, 512 << 10);
        let line = line.replace("TARGET", &format!("'{uri}'"));
        let codes =
            PROGRAMS.map(|program| shell(&scratch, &format!("{program} {line}")).status.code());
        assert_eq!(codes, [Some(1); 2], "{line}");
        drop(server);
        let codes =
            PROGRAMS.map(|program| shell(&scratch, &format!("{program} {line}")).status.code());
        assert_eq!(codes, [Some(1); 2], "without a server: {line}");
    }
}

#[test]
fn an_overlay_on_a_device_keeps_its_backing_image() {
    let Some(scratch) = folder() else { return };
    succeeds(
        &scratch,
        "qemu-img convert -f raw -O qcow2 s.raw base.qcow2 && \
         qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2 && \
         qemu-io -c 'write -P 9 512k 64k' top.qcow2 && \
         qemu-img convert top.qcow2 -O raw top.raw",
    );
    let base = scratch.path("base.qcow2").display().to_string();
    let Some(device) = loop_device(4 << 20, 512) else { return };
    let on = device.path().display().to_string();
    let mapped = |name: &str| {
        let map =
            shell(&scratch, &format!("qemu-img map -f qcow2 {name} | awk '{{print $1,$2,$4}}'"));
        String::from_utf8(map.stdout).unwrap()
    };
    let mut maps = Vec::new();
    for program in PROGRAMS {
        for options in
            [format!("-B {base} -F qcow2"), format!("-o backing_file={base},backing_fmt=qcow2")]
        {
            succeeds(&scratch, &format!("{program} convert -O qcow2 {options} top.qcow2 {on}"));
            succeeds(&scratch, &format!("qemu-img compare -f raw -F qcow2 top.raw {on}"));
            maps.push(mapped(&on));
        }
        // An existing overlay gets what the source hides of the same backing image.
        succeeds(&scratch, "qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 into.qcow2");
        succeeds(
            &scratch,
            &format!("{program} convert -n -B base.qcow2 -O qcow2 top.qcow2 into.qcow2"),
        );
        succeeds(&scratch, "qemu-img compare -f raw -F qcow2 top.raw into.qcow2");
        maps.push(mapped("into.qcow2").replace("into.qcow2", &on));
    }
    assert!(maps[0].contains(&base) && maps[0].lines().count() == 3, "{}", maps[0]);
    assert_eq!(maps[..3], maps[3..]);
    // One that stands on something else gets everything, where QEMU's program loses what is beneath.
    succeeds(&scratch, "qemu-img create -q -f qcow2 alone.qcow2 1M");
    succeeds(&scratch, "./qemu-img convert -n -B base.qcow2 -O qcow2 top.qcow2 alone.qcow2");
    succeeds(&scratch, "qemu-img compare -f raw -F qcow2 top.raw alone.qcow2");
}

#[test]
fn a_driver_of_devices_makes_no_file() {
    let Some(scratch) = folder() else { return };
    scratch.write("file", b"precious");
    for line in [
        "convert -f raw -O host_device s.raw TARGET",
        "create -q -f host_device TARGET 1M",
        "dd -f raw -O host_device if=s.raw of=TARGET",
    ] {
        for target in ["missing", "file"] {
            let line = line.replace("TARGET", target);
            let [theirs, ours] =
                PROGRAMS.map(|program| shell(&scratch, &format!("{program} {line}")));
            assert_eq!((ours.status.code(), theirs.status.code()), (Some(1), Some(1)), "{line}");
            assert_eq!(ours.stderr, theirs.stderr, "{line}");
            assert!(!scratch.path("missing").exists());
        }
    }
    assert_eq!(std::fs::read(scratch.path("file")).unwrap(), b"precious");
}

/// Waits until a process catches SIGUSR1.
fn wait_until_asked_safely(pid: u32) {
    common::wait_until(|| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
        u64::from_str_radix(caught.trim(), 16).unwrap() & 0x200 != 0
    });
}

#[test]
fn progress_that_a_signal_asks_for_goes_to_stderr() {
    let Some(scratch) = folder() else { return };
    succeeds(&scratch, "truncate -s 8M big");
    let run = |program: &str, more: &[&str]| {
        let mut command = Command::new(program);
        command.args(["convert", "-r", "4M", "-S", "0", "-f", "raw", "big", "t"]).args(more);
        command.current_dir(scratch.folder()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        wait_until_asked_safely(child.id());
        kill_process(Pid::from_child(&child), Signal::USR1).unwrap();
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success(), "{program}: {done:?}");
        [done.stdout, done.stderr].map(|text| String::from_utf8(text).unwrap())
    };
    for program in PROGRAMS {
        let [out, err] = run(program, &[]);
        assert_eq!((out.as_str(), err.lines().count()), ("", 1), "{program}: {err}");
        assert!(err.starts_with("    (") && err.ends_with("/100%)\n"), "{program}: {err}");
    }
    // Whoever sees the progress anyway gets nothing more.
    let [out, err] = run("./qemu-img", &["-p"]);
    assert_eq!((out.lines().count(), err.as_str()), (1, ""), "{out}");
}
