//! vdkit under the name `qemu-nbd`, held against QEMU's program and used by others' clients.

use std::io::{ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Output};
use std::time::Duration;

use crate::common::{self, Scratch};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use vdkit_testkit::{Killed, require_peer};

/// A scratch folder with vdkit's link, and the servers in the background that run there.
struct Shop {
    scratch: Scratch,
    running: Option<Pid>,
}

impl Shop {
    fn new() -> Self {
        let scratch = Scratch::new();
        symlink(env!("CARGO_BIN_EXE_vdkit"), scratch.path("qemu-nbd")).unwrap();
        Self { scratch, running: None }
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Output {
        Command::new(program).current_dir(self.scratch.path("")).args(arguments).output().unwrap()
    }

    fn qemu_img(&self, arguments: &[&str]) {
        let done = self.run("qemu-img", arguments);
        assert!(done.status.success(), "{arguments:?}: {done:?}");
    }

    /// Both programs on the same command line.
    fn both(&self, arguments: &[&str]) -> [Output; 2] {
        ["qemu-nbd", "./qemu-nbd"].map(|program| self.run(program, arguments))
    }

    /// Starts the server in the background. It can be connected to when the command returns, and
    /// its process id is in the file by then.
    fn serve(&mut self, arguments: &[&str]) {
        let socket = self.scratch.path("s").display().to_string();
        let mut all = vec!["--fork", "-k", &socket, "--pid-file=pid"];
        all.extend(arguments);
        let done = self.run("./qemu-nbd", &all);
        assert!(done.status.success(), "{arguments:?}: {done:?}");
        let pid = std::fs::read_to_string(self.scratch.path("pid")).unwrap();
        self.running = Pid::from_raw(pid.trim().parse().unwrap());
        assert!(self.scratch.path("s").exists());
    }

    fn qemu_io(&self, commands: &[&str]) -> String {
        let mut arguments = vec!["-f", "raw"];
        for command in commands {
            arguments.extend(["-c", command]);
        }
        arguments.push("nbd+unix:///?socket=s");
        let done = self.run("qemu-io", &arguments);
        String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr)
    }

    /// Waits until the server in the background has ended.
    fn ended(&mut self) {
        let Some(pid) = self.running.take() else { return };
        common::wait_until(|| test_kill_process(pid).is_err());
        assert!(!self.scratch.path("s").exists(), "the socket is left behind");
    }

    fn end(&mut self) {
        kill_process(self.running.unwrap(), Signal::TERM).unwrap();
        self.ended();
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        if let Some(pid) = self.running {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

#[test]
fn a_forked_server_serves_until_the_last_client_leaves() {
    if !require_peer("qemu-img") {
        return;
    }
    let mut shop = Shop::new();
    shop.qemu_img(&["create", "-f", "qcow2", "a.qcow2", "8M"]);
    // Here `--fork` is a description.
    shop.serve(&["-D", "--fork", "-f", "qcow2", "a.qcow2"]);
    let said = shop.qemu_io(&["write -P 7 1M 64k", "read -P 7 1M 64k"]);
    assert!(!said.contains("failed"), "{said}");
    shop.ended();
    shop.qemu_img(&["check", "a.qcow2"]);
    let done = shop.run("qemu-io", &["-c", "read -P 7 1M 64k", "a.qcow2"]);
    assert!(!String::from_utf8_lossy(&done.stdout).contains("failed"), "{done:?}");
}

#[test]
fn writes_to_a_temporary_snapshot_are_gone_afterwards() {
    if !require_peer("qemu-img") {
        return;
    }
    let mut shop = Shop::new();
    shop.qemu_img(&["create", "-f", "raw", "a.raw", "8M"]);
    shop.serve(&["-t", "-f", "raw", "-s", "a.raw"]);
    let said = shop.qemu_io(&["write -P 7 0 64k"]);
    assert!(!said.contains("failed"), "{said}");
    let said = shop.qemu_io(&["read -P 7 0 64k"]);
    assert!(!said.contains("failed"), "a second client sees it: {said}");
    shop.end();
    assert!(std::fs::read(shop.scratch.path("a.raw")).unwrap().iter().all(|&byte| byte == 0));
}

#[test]
fn read_only_snapshots_and_bitmaps_are_served() {
    if !require_peer("qemu-img") || !require_peer("nbdinfo") {
        return;
    }
    let mut shop = Shop::new();
    shop.qemu_img(&["create", "-f", "qcow2", "a.qcow2", "8M"]);
    shop.run("qemu-io", &["-c", "write -P 1 0 64k", "a.qcow2"]);
    shop.qemu_img(&["snapshot", "-c", "old", "a.qcow2"]);
    shop.qemu_img(&["bitmap", "--add", "a.qcow2", "changes"]);
    shop.run("qemu-io", &["-c", "write -P 2 0 64k", "a.qcow2"]);

    shop.serve(&["-t", "-l", "snapshot.name=old", "a.qcow2"]);
    let said = shop.qemu_io(&["read -P 1 0 64k"]);
    assert!(!said.contains("failed"), "{said}");
    shop.end();

    shop.serve(&["-t", "-r", "-B", "changes", "-x", "e", "-D", "words", "a.qcow2"]);
    let map = "--map=qemu:dirty-bitmap:changes";
    let done = shop.run("nbdinfo", &[map, "--json", "nbd+unix:///e?socket=s"]);
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(text.contains("\"length\": 65536"), "{done:?}");
    let done = shop.run("nbdinfo", &["nbd+unix:///e?socket=s"]);
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(text.contains("is_read_only: true") && text.contains("words"), "{text}");
    shop.end();
}

#[test]
fn a_server_that_cannot_start_says_so_through_fork() {
    let shop = Shop::new();
    let socket = shop.scratch.path("s").display().to_string();
    let done = shop.run("./qemu-nbd", &["--fork", "-k", &socket, "nothing.raw"]);
    assert_eq!(done.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&done.stderr).contains("No such file"), "{done:?}");
    assert!(!shop.scratch.path("s").exists());
}

#[test]
fn wrong_command_lines_are_told_as_by_qemu() {
    if !require_peer("qemu-nbd") {
        return;
    }
    let shop = Shop::new();
    shop.qemu_img(&["create", "-f", "qcow2", "a.qcow2", "8M"]);
    shop.qemu_img(&["snapshot", "-c", "old", "a.qcow2"]);
    shop.qemu_img(&["bitmap", "--add", "a.qcow2", "bits"]);
    for line in [
        "nothing.qcow2",
        "",
        "a.qcow2 b.qcow2",
        "--cache=fast a.qcow2",
        "-n --cache=none a.qcow2",
        "-e x a.qcow2",
        "--aio=fast a.qcow2",
        "--discard=x a.qcow2",
        "--detect-zeroes=x a.qcow2",
        "-k s a.qcow2",
        "-k /nowhere/s -f qcow2 a.qcow2",
        "-k SOCKET -f qcow2 -B nothing a.qcow2",
        "-k SOCKET -f qcow2 -o 65536 -B bits a.qcow2",
        "-k SOCKET -f qcow2 -s -l old a.qcow2",
        "-f nothing a.qcow2",
        "--nothing a.qcow2",
        "-k",
        "-d /dev/nothing",
    ] {
        let line = line.replace("SOCKET", &shop.scratch.path("s").display().to_string());
        let arguments: Vec<_> = line.split_whitespace().collect();
        let [theirs, ours] = shop.both(&arguments);
        assert_eq!(ours.status.code(), theirs.status.code(), "{line}: {ours:?}");
        let first = |done: &Output| {
            String::from_utf8_lossy(&done.stderr)
                .lines()
                .next()
                .unwrap_or_default()
                .replace("./", "")
        };
        if line != "-d /dev/nothing" {
            assert_eq!(first(&ours), first(&theirs), "{line}");
        }
    }
}

impl Shop {
    fn server(&self, socket: &str, program: &str, arguments: &[&str]) -> Killed {
        let mut command = Command::new(program);
        command.current_dir(self.scratch.path("")).args(arguments);
        let server = Killed(command.spawn().unwrap());
        common::wait_until_connected(&self.scratch.path(socket));
        server
    }

    fn full(&self, name: &str) -> String {
        self.scratch.path(name).display().to_string()
    }
}

#[test]
fn exports_of_each_server_are_listed_as_by_qemu() {
    if !require_peer("qemu-nbd") || !require_peer("nbdkit") {
        return;
    }
    let shop = Shop::new();
    for image in ["a.qcow2", "b.qcow2"] {
        shop.qemu_img(&["create", "-q", "-f", "qcow2", image, "4M"]);
        shop.qemu_img(&["bitmap", "--add", image, "b0"]);
    }
    let [q, n, old, v] = ["q", "n", "old", "v"].map(|name| shop.full(name));
    let named = ["-x", "disk", "-D", "some text", "-A", "-B", "b0", "-e", "0", "-t", "-f", "qcow2"];
    let ours = [&named[..], &["-k", &v, "b.qcow2"]].concat();
    let theirs = [&named[..], &["-k", &q, "a.qcow2"]].concat();
    let two = ["exportname=a", "exportname=b", "exportname-list=explicit"];
    let sizes = ["blocksize-minimum=512", "blocksize-preferred=4096", "blocksize-maximum=1M"];
    let kit = ["-f", "-U", &n, "--filter=exportname", "--filter=blocksize-policy", "memory", "1M"];
    let kit = [&kit[..], &two, &sizes].concat();
    let _servers = [
        shop.server("q", "qemu-nbd", &theirs),
        shop.server("v", "./qemu-nbd", &ours),
        shop.server("n", "nbdkit", &kit),
        shop.server("old", "nbdkit", &["-f", "-r", "--no-sr", "-U", &old, "null", "5000"]),
    ];
    for socket in [&q, &v, &n, &old] {
        let [theirs, ours] = shop.both(&["-L", "-k", socket]);
        assert!(theirs.status.success() && !theirs.stdout.is_empty(), "{theirs:?}");
        assert_eq!(theirs, ours, "{socket}");
    }
    for wrong in [
        &["-L", "-k", "/nothere"][..],
        &["-L", "-b", "127.0.0.1", "-p", "1"],
        &["-L", "file"],
        &["-L", "-f", "raw"],
        &["-L", "--fork"],
        &["-L", "-k", "relative"],
        &["-L", "--tls-hostname", "x"],
        &["-L", "--tls-creds", "x"],
    ] {
        let [theirs, ours] = shop.both(wrong);
        assert_eq!(theirs, ours, "{wrong:?}");
    }
}

#[test]
fn a_part_of_a_disk_of_any_format_is_served() {
    if !require_peer("qemu-io") {
        return;
    }
    let mut shop = Shop::new();
    shop.qemu_img(&["create", "-q", "-f", "qcow2", "a.qcow2", "4M"]);
    let written = shop.run("qemu-io", &["-f", "qcow2", "-c", "write -P 17 1M 1M", "a.qcow2"]);
    assert!(written.status.success());
    shop.serve(&["-t", "-f", "qcow2", "-o", "1049088", "a.qcow2"]);
    let said = shop.qemu_io(&[
        "read -P 17 0 1048064",
        "read -P 0 1048064 2M",
        "write -P 5 0 512",
        "write -z 512 512",
        "discard 64k 64k",
        "flush",
        "length",
    ]);
    assert!(!said.contains("failed") && said.contains("\n3 MiB"), "{said}");
    shop.end();
    let commands = ["read -P 17 1M 512", "read -P 5 1049088 512", "read -P 0 1049600 512"];
    let mut line = vec!["-f", "qcow2"];
    commands.iter().for_each(|command| line.extend(["-c", command]));
    line.push("a.qcow2");
    let read = shop.run("qemu-io", &line);
    assert!(!String::from_utf8_lossy(&read.stdout).contains("failed"), "{read:?}");
    shop.qemu_img(&["check", "-q", "a.qcow2"]);
    let past = shop.run("./qemu-nbd", &["-f", "qcow2", "-o", "5000000", "a.qcow2"]);
    assert_eq!(past.status.code(), Some(1), "{past:?}");
}

/// The server writes the disk that a format shows to the format above it, not its container.
#[test]
fn a_format_on_a_format_is_served_as_a_disk() {
    if !require_peer("qemu-io") {
        return;
    }
    let mut shop = Shop::new();
    shop.qemu_img(&["create", "-q", "-f", "qcow2", "a.qcow2", "4M"]);
    let node = "driver=raw,offset=1M,size=2M,file.driver=qcow2,file.file.driver=file,file.file.filename=a.qcow2";
    shop.serve(&["-t", "--image-opts", node]);
    let said = shop.qemu_io(&["write -P 5 64k 64k", "read -P 0 0 64k", "flush", "length"]);
    assert!(!said.contains("failed") && said.contains("\n2 MiB"), "{said}");
    shop.end();
    shop.qemu_img(&["check", "-q", "a.qcow2"]);
    let line = ["-f", "qcow2", "-c", "read -P 5 1088k 64k", "-c", "read -P 0 0 1088k", "a.qcow2"];
    let read = shop.run("qemu-io", &line);
    assert!(!String::from_utf8_lossy(&read.stdout).contains("failed"), "{read:?}");
    for options in ["read-only=on", "force-share=on", "file.read-only=on"] {
        let node = format!("driver=qcow2,{options},file.filename=a.qcow2");
        let [theirs, ours] = shop.both(&["-k", &shop.full("t"), "--image-opts", &node]);
        assert_eq!(theirs, ours, "{node}");
    }
}

#[test]
fn a_temporary_snapshot_stands_on_all_that_was_said_of_the_image() {
    if !require_peer("qemu-io") {
        return;
    }
    let mut shop = Shop::new();
    let on = |base: &str, name: &str| {
        shop.qemu_img(&["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", name]);
    };
    shop.qemu_img(&["create", "-q", "-f", "qcow2", "a.qcow2", "4M"]);
    let written = shop.run("qemu-io", &["-f", "qcow2", "-c", "write -P 17 0 1M", "a.qcow2"]);
    assert!(written.status.success());
    on("a.qcow2", "b.qcow2");
    shop.serve(&["-t", "-s", "--image-opts", "driver=qcow2,backing=,file.filename=b.qcow2"]);
    let said = shop.qemu_io(&["read -P 0 0 1M"]);
    assert!(!said.contains("failed"), "{said}");
    shop.end();
    // Also that others write to it.
    let _writer = shop.server("w", "qemu-nbd", &["-t", "-k", &shop.full("w"), "b.qcow2"]);
    shop.serve(&["-t", "-s", "--image-opts", "driver=qcow2,force-share=on,file.filename=b.qcow2"]);
    let said = shop.qemu_io(&["read -P 17 0 1M"]);
    assert!(!said.contains("failed"), "{said}");
    shop.end();
}

#[test]
fn a_server_that_ends_after_one_connection_is_enough() {
    if !require_peer("qemu-nbd") {
        return;
    }
    let shop = Shop::new();
    shop.qemu_img(&["create", "-f", "qcow2", "a.qcow2", "4M"]);
    let (socket, uri) = (shop.full("s"), "nbd+unix:///?socket=s");
    for line in [
        "info URI",
        "convert -O raw URI out",
        "convert -n -f raw -O raw out URI",
        "convert -O raw --image-opts file.driver=nbd,file.path=s out",
    ] {
        let server = shop.run("qemu-nbd", &["--fork", "-k", &socket, "-f", "qcow2", "a.qcow2"]);
        assert!(server.status.success(), "{server:?}");
        let line = line.replace("URI", uri);
        let words: Vec<_> = ["qemu-img"].into_iter().chain(line.split_whitespace()).collect();
        shop.scratch.ok(&words);
        common::wait_until(|| !shop.scratch.path("s").exists());
    }
}

#[test]
fn a_part_of_an_export_is_an_image_and_nodes_take_credentials() {
    let shop = Shop::new();
    if !require_peer("qemu-nbd") || !common::pki::certificates(&shop.scratch) {
        return;
    }
    symlink(env!("CARGO_BIN_EXE_vdkit"), shop.scratch.path("qemu-img")).unwrap();
    shop.qemu_img(&["create", "-q", "-f", "raw", "a.raw", "1M"]);
    let written = shop.run("qemu-io", &["-f", "raw", "-c", "write -P 17 64k 64k", "a.raw"]);
    assert!(written.status.success());
    let dir = shop.full("pki");
    let of = |side: &str| format!("tls-creds-x509,id=t,dir={dir},endpoint={side}");
    for (socket, secured) in [("plain", false), ("secured", true)] {
        let path = shop.full(socket);
        let server = of("server");
        let mut line = vec!["-t", "-e0", "-f", "raw", "-k", &path];
        let mut node = format!(
            "driver=raw,offset=64k,size=64k,file.driver=nbd,file.server.type=unix,file.server.path={path},\
             file.reconnect-delay=1,file.open-timeout=1"
        );
        if secured {
            line.extend(["--object", &server, "--tls-creds=t"]);
            node += ",file.tls-creds=t,file.tls-hostname=localhost";
        }
        line.push("a.raw");
        let _server = shop.server(&path, "qemu-nbd", &line);
        for program in ["qemu-img", "./qemu-img"] {
            let copy =
                ["convert", "-O", "raw", "--object", &of("client"), "--image-opts", &node, "n"];
            let done = shop.run(program, &copy);
            assert!(done.status.success(), "{program} {socket}: {done:?}");
            let read = std::fs::read(shop.scratch.path("n")).unwrap();
            assert_eq!(read, [17; 64 << 10], "{program} {socket}");
            let beyond = node.replace("size=64k", "size=2M");
            let done =
                shop.run(program, &["info", "--object", &of("client"), "--image-opts", &beyond]);
            assert_eq!(done.status.code(), Some(1), "{program} {socket}: {done:?}");
        }
    }
}

#[test]
fn certificates_and_keys_decide_who_may_connect() {
    let shop = Shop::new();
    if !require_peer("qemu-nbd") || !common::pki::certificates(&shop.scratch) {
        return;
    }
    shop.qemu_img(&["create", "-q", "-f", "raw", "a.raw", "1M"]);
    std::fs::create_dir(shop.scratch.path("psk")).unwrap();
    shop.scratch.write("psk/keys.psk", b"alice:000102030405060708090a0b0c0d0e0f\n");
    let (pki, psk) = (shop.full("pki"), shop.full("psk"));
    let of = |kind: &str, dir: &str, side: &str| {
        format!("tls-creds-{kind},id=t,dir={dir},endpoint={side}")
    };
    let own = "authz-simple,id=a,identity=CN=localhost";
    let list = "authz-list,id=a,rules.0.match=CN=local*,rules.0.format=glob,rules.0.policy=allow";
    let (x509, keys) = (of("x509", &pki, "server"), of("psk", &psk, "server"));
    let unasked = format!("{x509},verify-peer=no");
    for (number, (object, authz, admitted)) in [
        (&x509, own, true),
        (&x509, list, true),
        (&x509, "authz-list,id=a", false),
        (&x509, "authz-simple,id=a,identity=CN=other", false),
        // As with QEMU, clients without a certificate are not asked about.
        (&unasked, "authz-list,id=a", true),
        (&keys, "authz-list,id=a", true),
    ]
    .into_iter()
    .enumerate()
    {
        let socket = shop.full(&format!("s{number}"));
        let options = ["-t", "-e0", "-r", "-f", "raw", "--tls-creds=t", "--tls-authz=a"];
        let line = [&options[..], &["-k", &socket, "--object", object, "--object", authz, "a.raw"]];
        let _server = shop.server(&socket, "./qemu-nbd", &line.concat());
        let client = match std::ptr::eq(object, &keys) {
            true => of("psk", &psk, "client") + ",username=alice",
            false => of("x509", &pki, "client"),
        };
        let ask = ["-L", "-k", &socket, "--tls-creds=t", "--tls-hostname=localhost", "--object"];
        for done in shop.both(&[&ask[..], &[&client]].concat()) {
            assert_eq!(done.status.success(), admitted, "{object} {authz}: {done:?}");
        }
    }
    for line in [
        &["--tls-authz=a", "a.raw"][..],
        &["--tls-creds=t", "a.raw"],
        &["--tls-creds=t", "--object", &of("x509", &pki, "client"), "a.raw"],
    ] {
        let [theirs, ours] = shop.both(line);
        assert_eq!(theirs, ours, "{line:?}");
    }
}

/// Reads the greeting of a server. `false` if none came within `time`.
fn is_greeted(client: &mut UnixStream, time: Duration) -> bool {
    client.set_read_timeout(Some(time)).unwrap();
    let mut greeting = [0; 8];
    match client.read_exact(&mut greeting) {
        Ok(()) => greeting == *b"NBDMAGIC",
        Err(error) if error.kind() == ErrorKind::WouldBlock => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_second_client_is_not_invited_and_waits_for_the_first_to_leave() {
    if !require_peer("qemu-nbd") {
        return;
    }
    let shop = Shop::new();
    for image in ["qemu-nbd.raw", "vdkit.raw"] {
        shop.qemu_img(&["create", "-q", "-f", "raw", image, "4M"]);
    }
    let mut listed = Vec::new();
    for (socket, program, image) in
        [("q", "qemu-nbd", "qemu-nbd.raw"), ("v", "./qemu-nbd", "vdkit.raw")]
    {
        // With the allocation depth, which vdkit's server always has.
        let line = ["-t", "-A", "-k", &shop.full(socket), "-f", "raw", image];
        let server = shop.server(socket, program, &line);
        listed.push(shop.run("qemu-nbd", &["-L", "-k", &shop.full(socket)]));
        let connect = || UnixStream::connect(shop.scratch.path(socket)).unwrap();
        let patience = Duration::from_secs(60);
        let (mut first, mut second) = (connect(), connect());
        assert!(is_greeted(&mut first, patience), "{program}");
        assert!(!is_greeted(&mut second, Duration::from_millis(200)), "{program}");
        drop(first);
        assert!(is_greeted(&mut second, patience), "{program}");
        // The server ends also while another client waits.
        let _third = connect();
        drop(server);
    }
    assert_eq!(listed[1], listed[0]);
    assert!(!String::from_utf8_lossy(&listed[1].stdout).contains("multi"), "{listed:?}");
}

#[test]
fn a_hangup_ends_a_server_as_it_should_end() {
    let shop = Shop::new();
    shop.scratch.ok(&["create", "a.qcow2", "8M"]);
    for line in [&["-t"][..], &["-t", "-s"]] {
        let of = |entry: &str| entry.starts_with("vl.");
        let left = || {
            let entries = std::fs::read_dir("/var/tmp").unwrap().flatten();
            entries.filter(|e| e.file_name().to_str().is_some_and(of)).count()
        };
        let before = left();
        let socket = shop.full("s");
        let arguments = [line, &["-k", &socket, "-f", "qcow2", "a.qcow2"]].concat();
        let mut server = shop.server("s", "./qemu-nbd", &arguments);
        kill_process(Pid::from_child(&server.0), Signal::HUP).unwrap();
        assert_eq!(server.0.wait().unwrap().code(), Some(0));
        assert!(!shop.scratch.path("s").exists() && left() <= before);
        shop.scratch.sound("a.qcow2");
    }
}

impl Shop {
    /// Runs a program as a service manager does that hands a listening socket over.
    fn activated(&self, listener: &UnixListener, program: &str, arguments: &str) -> Output {
        let script = format!(
            "exec 3<&{}; LISTEN_FDS=1 LISTEN_PID=$$ exec {program} {arguments}",
            listener.as_raw_fd()
        );
        let inherited = |flags| rustix::io::fcntl_setfd(listener, flags).unwrap();
        inherited(rustix::io::FdFlags::empty());
        let done = self.run("bash", &["-c", &script]);
        inherited(rustix::io::FdFlags::CLOEXEC);
        done
    }
}

/// The id of the process changes by `--fork`, and the socket must not be lost by that: the default is a
/// port that anybody can connect to.
#[test]
fn a_socket_that_was_handed_over_is_served_in_the_background() {
    if !require_peer("qemu-nbd") {
        return;
    }
    let mut shop = Shop::new();
    shop.qemu_img(&["create", "-q", "-f", "raw", "a.raw", "4M"]);
    let listener = UnixListener::bind(shop.scratch.path("s")).unwrap();
    let line = "--fork -t -f raw --pid-file=pid a.raw";
    let done = shop.activated(&listener, "./qemu-nbd", line);
    assert!(done.status.success(), "{done:?}");
    let pid = std::fs::read_to_string(shop.scratch.path("pid")).unwrap();
    shop.running = Pid::from_raw(pid.trim().parse().unwrap());
    drop(listener);
    let said = shop.qemu_io(&["length"]);
    assert!(said.contains("4 MiB"), "{said}");
    for line in ["-k /tmp/s a.raw", "-p 1 a.raw", "-b 127.0.0.1 a.raw", "-c /dev/nbd0 a.raw", "-L"]
    {
        let listener = UnixListener::bind(shop.scratch.path("other")).unwrap();
        let [theirs, ours] =
            ["qemu-nbd", "./qemu-nbd"].map(|program| shop.activated(&listener, program, line));
        let first = |done: &Output| String::from_utf8_lossy(&done.stderr).replace("./", "");
        assert_eq!((first(&ours), ours.status.code()), (first(&theirs), Some(1)), "{line}");
        std::fs::remove_file(shop.scratch.path("other")).unwrap();
    }
    kill_process(shop.running.unwrap(), Signal::TERM).unwrap();
    common::wait_until(|| test_kill_process(shop.running.unwrap()).is_err());
    shop.running = None;
}

#[test]
fn two_servers_do_not_share_a_pid_file() {
    if !require_peer("qemu-nbd") {
        return;
    }
    let mut shop = Shop::new();
    for image in ["a.raw", "b.raw"] {
        shop.qemu_img(&["create", "-q", "-f", "raw", image, "1M"]);
    }
    shop.serve(&["-t", "-f", "raw", "a.raw"]);
    let text = std::fs::read_to_string(shop.scratch.path("pid")).unwrap();
    let other = shop.full("other");
    for file in ["pid", "/nowhere/pid"] {
        let [theirs, ours] =
            shop.both(&["-t", "-k", &other, "-f", "raw", "--pid-file", file, "b.raw"]);
        assert_eq!(ours, theirs, "{file}");
        assert_eq!(ours.status.code(), Some(1));
        // QEMU's program leaves its socket.
        let _ = std::fs::remove_file(shop.scratch.path("other"));
    }
    assert_eq!(std::fs::read_to_string(shop.scratch.path("pid")).unwrap(), text);
    shop.end();
}

#[test]
fn an_encrypted_image_takes_temporary_writes() {
    if !require_peer("qemu-io") {
        return;
    }
    let mut shop = Shop::new();
    let secret = "secret,id=s,data=abc";
    let options = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    let create = ["create", "-q", "--object", secret, "-f", "qcow2", "-o", options];
    shop.qemu_img(&[&create[..], &["a.qcow2", "4M"]].concat());
    let image = "driver=qcow2,file.filename=a.qcow2,encrypt.key-secret=s";
    let write = ["--object", secret, "--image-opts", "-c", "write -P 5 0 64k", image];
    assert!(shop.run("qemu-io", &write).status.success());
    shop.serve(&["-t", "-s", "--object", secret, "--image-opts", image]);
    let said = shop.qemu_io(&["read -P 5 0 64k", "write -P 6 0 64k", "read -P 6 0 64k"]);
    assert!(!said.contains("failed"), "{said}");
    shop.end();
    let read = ["--object", secret, "--image-opts", "-c", "read -P 5 0 64k", image];
    let done = shop.run("qemu-io", &read);
    assert!(!String::from_utf8_lossy(&done.stdout).contains("failed"), "{done:?}");
}
