//! vdkit under the name `qemu-nbd`, held against QEMU's program and used by others' clients.

mod common;

use std::os::unix::fs::symlink;
use std::process::{Command, Output};

use common::Scratch;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use vdkit_testkit::require_peer;

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
        while test_kill_process(pid).is_ok() {
            std::thread::yield_now();
        }
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
    shop.serve(&["-f", "qcow2", "a.qcow2"]);
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
