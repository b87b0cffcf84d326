//! Exports of NBD servers as source and target: of qemu-nbd, nbdkit and vdkit itself.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::pki::certificates;
use crate::common::{self, Scratch, peer};
use vdkit_testkit::{Killed, require_peer};

/// Starts a server, which is killed at the end, and waits until it listens.
fn start(mut command: Command, socket: &Path) -> Killed {
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let served = Killed(child);
    common::wait_until_connected(socket);
    served
}

fn in_folder(scratch: &Scratch, program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(scratch.path(""));
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin"));
    command
}

/// Serves a raw file by each of the servers.
fn serve(scratch: &Scratch, server: &str, file: &str, socket: &str) -> Killed {
    let command = match server {
        "qemu-nbd" => {
            let mut command = in_folder(scratch, server, &["-t", "-e", "8", "-f", "raw", "-k"]);
            // It takes absolute paths only.
            command.arg(scratch.path(socket)).arg(file);
            command
        }
        "nbdkit" => in_folder(scratch, server, &["-f", "-U", socket, "file", file]),
        _ => scratch.command(&["serve", "-f", "raw", file, "--nbd", &format!("unix:{socket}")]),
    };
    start(command, &scratch.path(socket))
}

const SERVERS: [&str; 3] = ["qemu-nbd", "nbdkit", "vdkit"];

fn peers() -> bool {
    ["qemu-nbd", "nbdkit", "qemu-img"].iter().all(|program| require_peer(program))
}

/// A sparse disk with data in it.
fn disk(scratch: &Scratch, name: &str) {
    let mut bytes = vec![0; 24 << 20];
    for (i, byte) in bytes[3 << 20..9 << 20].iter_mut().enumerate() {
        *byte = (i / 509) as u8 | 1;
    }
    bytes[20 << 20] = 7;
    scratch.write("full", &bytes);
    scratch.ok(&["convert", "-f", "raw", "full", name]);
}

#[test]
fn each_server_is_source_and_target() {
    if !peers() {
        return;
    }
    let scratch = Scratch::new();
    disk(&scratch, "a.raw");
    for server in SERVERS {
        scratch.ok(&["create", "b.raw", "24M", "--force"]);
        let (from, to) = (format!("{server}.from"), format!("{server}.to"));
        let _source = serve(&scratch, server, "a.raw", &from);
        let _target = serve(&scratch, server, "b.raw", &to);
        let (from, to) =
            (format!("nbd+unix:///?socket={from}"), format!("nbd+unix:///?socket={to}"));
        scratch.ok(&["convert", &from, "c.qcow2"]);
        scratch.ok(&["compare", "-f", "raw", "full", "-F", "qcow2", "c.qcow2"]);
        scratch.ok(&["convert", "--verify", "c.qcow2", &to]);
        scratch.ok(&["compare", &from, &to]);
        let map = scratch.ok(&["map", &from]).stdout;
        assert!(map.contains("0x300000") && !map.contains("\n0x0 "), "{server}: {map}");
        let info = scratch.ok(&["info", &from]).stdout;
        assert!(info.contains("an NBD server") && info.contains("24 MiB"), "{info}");
        // Writes need the format's name, as on files.
        scratch.fails(2, "format", &["write", &to, "1M", "4K", "--pattern", "0x5a"]);
        scratch.ok(&["write", "-f", "raw", &to, "1M", "4K", "--pattern", "0x5a"]);
        assert_eq!(scratch.ok(&["read", &to, "1M", "4K"]).bytes, [0x5a; 4096]);
        assert_eq!(scratch.run(&["compare", &from, &to]).code, Some(3));
        scratch.ok(&["dd", &format!("if={from}"), &format!("of={to}"), "bs=1M", "-O", "raw"]);
        scratch.ok(&["compare", &from, &to]);
        // A format within an export.
        scratch.ok(&["convert", "full", "-O", "qcow2", &to]);
        scratch.ok(&["check", &to]);
        scratch.ok(&["compare", &from, &to]);
    }
}

#[test]
fn an_export_is_served_on() {
    if !peers() {
        return;
    }
    let scratch = Scratch::new();
    disk(&scratch, "a.raw");
    let _first = serve(&scratch, "nbdkit", "a.raw", "one");
    let command =
        scratch.command(&["serve", "-f", "raw", "nbd+unix:///?socket=one", "--nbd", "unix:two"]);
    let _second = start(command, &scratch.path("two"));
    let io = ["-f", "raw", "-c", "write -P 9 1M 64K", "-c", "flush", "nbd:unix:two"];
    peer(&scratch.path(""), "qemu-io", &io);
    assert_eq!(scratch.ok(&["read", "a.raw", "1M", "64K"]).bytes, [9; 64 << 10]);
}

#[test]
fn filters_that_delay_and_end_connections_do_not_change_the_bytes() {
    if !peers() {
        return;
    }
    let scratch = Scratch::new();
    disk(&scratch, "a.raw");
    let arguments =
        ["-f", "-U", "s", "--filter=delay", "--filter=cow", "file", "a.raw", "rdelay=5ms"];
    let _served = start(in_folder(&scratch, "nbdkit", &arguments), &scratch.path("s"));
    scratch.ok(&["convert", "-m", "8", "nbd+unix:///?socket=s", "b.raw"]);
    scratch.ok(&["compare", "full", "b.raw"]);
    let failing =
        ["-f", "-U", "e", "--filter=error", "file", "a.raw", "error=EIO", "error-pread-rate=100%"];
    let _failing = start(in_folder(&scratch, "nbdkit", &failing), &scratch.path("e"));
    let uri = "nbd+unix:///?socket=e";
    let answer = scratch.fails(1, "input/output error", &["convert", "-f", "raw", uri, "c.raw"]);
    assert!(answer.stderr.contains(uri), "{}", answer.stderr);
    assert!(!scratch.path("c.raw").exists());
}

#[test]
fn a_server_that_was_killed_and_started_again_is_read_on() {
    if !peers() {
        return;
    }
    let scratch = Scratch::new();
    disk(&scratch, "a.raw");
    let first = serve(&scratch, "vdkit", "a.raw", "s");
    let uri = "nbd+unix:///?socket=s&reconnect=30";
    let slow = ["convert", "--progress", "json", "-r", "2M", "-f", "raw", uri, "b.raw"];
    let convert = scratch.command(&slow).stderr(Stdio::piped()).spawn();
    let mut convert = Killed(convert.unwrap());
    let mut errors = convert.stderr.take().unwrap();
    let under_way = loop {
        let line = common::next_line(&mut errors);
        if !line.contains("\"done\":0,") {
            break line;
        }
    };
    assert!(under_way.contains("\"done\":"), "{under_way}");
    drop(first);
    let _ = std::fs::remove_file(scratch.path("s"));
    let _second = serve(&scratch, "vdkit", "a.raw", "s");
    assert_eq!(convert.wait().unwrap().code(), Some(0));
    scratch.ok(&["compare", "full", "b.raw"]);
}

#[test]
fn names_that_cannot_be_opened_say_why() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "1M"]);
    scratch.fails(2, "no port", &["info", "nbd://localhost:0/"]);
    scratch.fails(2, "socket=PATH", &["info", "nbd+unix:///x"]);
    scratch.fails(1, "No such file", &["info", "nbd+unix:///x?socket=lacking"]);
    let refused = ["inspect", "nbd+unix:///x?socket=lacking"];
    scratch.fails(1, "does not use NBD exports", &refused);
    let both = ["convert", "nbd:unix:x", "nbd:unix:x"];
    scratch.fails(2, "source and target at once", &both);
    // An image that names an export as its backing file is refused by policy.
    if require_peer("qemu-img") {
        let create = [
            "create",
            "-q",
            "-u",
            "-f",
            "qcow2",
            "-F",
            "raw",
            "-b",
            "nbd:localhost:1",
            "o.qcow2",
            "1M",
        ];
        peer(&scratch.path(""), "qemu-img", &create);
        scratch.fails(5, "refused", &["map", "o.qcow2"]);
    }
}

#[test]
fn certificates_are_shown_and_verified() {
    let scratch = Scratch::new();
    if !certificates(&scratch) {
        return;
    }
    disk(&scratch, "a.raw");
    let serve = ["serve", "-f", "raw", "a.raw", "--nbd", "unix:s", "--tls", "pki"];
    let _served = start(scratch.command(&serve), &scratch.path("s"));
    let uri = "nbds+unix:///?socket=s&tls-certificates=pki";
    scratch.ok(&["convert", uri, "b.raw"]);
    scratch.ok(&["compare", "full", "b.raw"]);
    scratch.ok(&["write", "-f", "raw", uri, "1M", "4M", "--pattern", "7"]);
    assert!(scratch.ok(&["read", uri, "1M", "4M"]).bytes.iter().all(|byte| *byte == 7));
    scratch.fails(1, "TLS", &["info", "nbd+unix:///?socket=s"]);
    scratch.fails(1, "certificate", &["info", &format!("{uri}&tls-hostname=example.com")]);
    scratch.fails(1, "certificate", &["info", "nbds+unix:///?socket=s"]);
    scratch.fails(1, "ca-cert.pem", &["info", "nbds+unix:///?socket=s&tls-certificates=x"]);
}

#[test]
fn a_pre_shared_key_opens_the_exports_of_both_servers() {
    let scratch = Scratch::new();
    if !require_peer("qemu-nbd") {
        return;
    }
    disk(&scratch, "a.raw");
    std::fs::create_dir(scratch.path("psk")).unwrap();
    let keys = "alice:000102030405060708090a0b0c0d0e0f\nqemu:101112131415161718191a1b1c1d1e1f\n";
    scratch.write("psk/keys.psk", keys.as_bytes());
    scratch.write("wrong.psk", keys.replace(":0001", ":0002").as_bytes());
    let serve = ["serve", "-f", "raw", "a.raw", "--nbd", "unix:s", "--tls", "psk"];
    let _ours = start(scratch.command(&serve), &scratch.path("s"));
    let mut theirs = Command::new("qemu-nbd");
    theirs.current_dir(scratch.path("")).args(["-t", "-e", "0", "-r", "-f", "raw", "-k"]);
    let folder = scratch.path("psk").display().to_string();
    let object = format!("tls-creds-psk,id=t,dir={folder},endpoint=server");
    theirs.arg(scratch.path("q")).args(["--object", &object, "--tls-creds=t", "full"]);
    let _theirs = start(theirs, &scratch.path("q"));
    for socket in ["s", "q"] {
        let uri = |user: &str, file: &str| {
            format!("nbds+unix://{user}/?socket={socket}&tls-psk-file={file}")
        };
        scratch.ok(&["compare", "full", &uri("alice@", "psk/keys.psk")]);
        scratch.ok(&["compare", "full", &uri("", "psk/keys.psk")]);
        scratch.fails(1, "no key for 'bob'", &["info", &uri("bob@", "psk/keys.psk")]);
        scratch.fails(1, "cannot open", &["info", &uri("alice@", "wrong.psk")]);
    }
}
