//! `vdkit ctl SOCKET snapshot-external` while clients write.

mod common;

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use common::{Scratch, peer};

const URI: &str = "nbd+unix:///?socket=s.sock";

/// A service in the background, killed at the end.
struct Service(Child);

impl Service {
    fn start(scratch: &Scratch, arguments: &[&str]) -> Self {
        let all = [&["serve", "--nbd", "unix:s.sock", "--control", "c.sock"], arguments].concat();
        let mut child = scratch.command(&all).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("serving"), "{line}");
        Self(child)
    }

    fn quit(mut self, scratch: &Scratch) {
        scratch.ok(&["ctl", "c.sock", "quit"]);
        assert_eq!(self.0.wait().unwrap().code(), Some(0));
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn folder(scratch: &Scratch) -> PathBuf {
    scratch.path("x").parent().unwrap().to_owned()
}

fn io(scratch: &Scratch, commands: &[&str]) {
    let mut arguments = vec!["-f", "raw", URI];
    for command in commands {
        arguments.extend(["-c", command]);
    }
    let said = String::from_utf8(peer(&folder(scratch), "qemu-io", &arguments).stdout).unwrap();
    assert!(!said.contains("failed"), "{said}");
}

/// fio over NBD: random writes, each verified after all are done.
fn fio(scratch: &Scratch, seconds: u32) -> Command {
    let mut command = Command::new("fio");
    command.current_dir(folder(scratch)).stdin(Stdio::null()).stdout(Stdio::piped()).args([
        "--name=v",
        "--ioengine=nbd",
        &format!("--uri={URI}"),
        "--rw=randwrite",
        "--bssplit=4k/60:12k/30:100k/10",
        "--iodepth=8",
        "--size=60M",
        "--verify=crc32c",
        "--verify_backlog=256",
        "--verify_fatal=1",
        "--time_based",
        &format!("--runtime={seconds}"),
    ]);
    command
}

fn verified(child: Child) {
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("err= 0"), "{said}");
}

fn check(scratch: &Scratch, image: &str) {
    scratch.ok(&["check", image]);
    peer(&folder(scratch), "qemu-img", &["check", "-q", image]);
}

#[test]
fn a_guest_goes_on_over_new_overlays() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "0.qcow2", "64M"]);
    let service = Service::start(&scratch, &["0.qcow2"]);
    io(&scratch, &["write -P 9 63M 64k", "flush"]);
    let client = fio(&scratch, 4).spawn().unwrap();
    for layer in 1..5 {
        std::thread::sleep(std::time::Duration::from_millis(600));
        let (old, new) = (format!("{}.qcow2", layer - 1), format!("{layer}.qcow2"));
        let answer = scratch.json_of("ctl", 0, &["c.sock", "snapshot-external", &new]);
        let path = folder(&scratch).canonicalize().unwrap().join(&new);
        assert_eq!(answer["filename"], path.to_str().unwrap());
        assert_eq!(answer["chain"].as_array().unwrap().len(), layer + 1);
        // The frozen image is closed, and is there for a backup.
        check(&scratch, &old);
        peer(&folder(&scratch), "qemu-img", &["convert", &old, "-O", "raw", &format!("{layer}")]);
        let status = scratch.json_of("ctl", 0, &["c.sock", "status"]);
        assert_eq!(status["chain"], answer["chain"]);
    }
    verified(client);
    let text = scratch.ok(&["ctl", "c.sock", "status"]).stdout;
    assert!(text.contains("4.qcow2 <- ") && text.contains("<- 0.qcow2\n"), "{text}");
    io(&scratch, &["read -P 9 63M 64k"]);
    service.quit(&scratch);
    // Named from the overlay's folder on, so that the folder can be moved.
    let info = scratch.json_of("info", 0, &["1.qcow2"]);
    assert_eq!(info["backing-filename"], "0.qcow2");
    assert_eq!(info["backing-filename-format"], "qcow2");
    for layer in 1..5 {
        let old = format!("{}.qcow2", layer - 1);
        let copy = format!("{layer}");
        peer(&folder(&scratch), "qemu-img", &["compare", &old, "-F", "raw", &copy]);
        check(&scratch, &format!("{layer}.qcow2"));
    }
}

#[test]
fn an_overlay_elsewhere_names_its_image_absolutely() {
    let scratch = Scratch::new();
    for folder in ["images", "images/new", "other"] {
        std::fs::create_dir(scratch.path(folder)).unwrap();
    }
    scratch.ok(&["create", "images/a:1.qcow2", "64M"]);
    let service = Service::start(&scratch, &["images/a:1.qcow2"]);
    io(&scratch, &["write -P 1 0 64k"]);
    for overlay in ["images/b.qcow2", "images/new/c.qcow2", "other/d.qcow2", "e.qcow2"] {
        scratch.ok(&["ctl", "c.sock", "snapshot-external", overlay]);
    }
    service.quit(&scratch);
    let backing = |image: &str| {
        let info = scratch.json_of("info", 0, &[image]);
        info["backing-filename"].as_str().unwrap().to_owned()
    };
    let real = folder(&scratch).canonicalize().unwrap();
    assert_eq!(backing("images/b.qcow2"), "./a:1.qcow2");
    assert_eq!(backing("images/new/c.qcow2"), real.join("images/b.qcow2").to_str().unwrap());
    assert_eq!(backing("other/d.qcow2"), real.join("images/new/c.qcow2").to_str().unwrap());
    assert_eq!(backing("e.qcow2"), "other/d.qcow2");
    let all = ["read", "e.qcow2", "--allow-ref", ".", "0", "1"];
    assert_eq!(scratch.ok(&all).bytes, [1]);
    peer(&folder(&scratch), "qemu-io", &["-r", "-c", "read -P 1 0 64k", "e.qcow2"]);
}

#[test]
fn an_overlay_that_must_not_be_is_refused() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "a.qcow2", "64M"]);
    scratch.write("key", b"secret");
    let secret = ["create", "-o", "encrypt.format=luks,encrypt.iter-time=10"];
    scratch.ok(&[&secret[..], &["--key-file", "key", "x.qcow2", "64M"]].concat());
    scratch.write("taken", b"precious");
    let snapshot = ["ctl", "c.sock", "snapshot-external"];
    let before = scratch.names();

    let service = Service::start(&scratch, &["a.qcow2"]);
    scratch.fails(1, "is there already", &[&snapshot[..], &["taken"]].concat());
    scratch.fails(1, "cannot", &[&snapshot[..], &["none/b.qcow2"]].concat());
    scratch.fails(2, "needs a FILE", &snapshot);
    service.quit(&scratch);
    let service = Service::start(&scratch, &["a.qcow2", "--read-only"]);
    scratch.fails(1, "read-only", &[&snapshot[..], &["b.qcow2"]].concat());
    service.quit(&scratch);
    let service = Service::start(&scratch, &["x.qcow2", "--key-file", "key"]);
    scratch.fails(1, "plain text", &[&snapshot[..], &["b.qcow2"]].concat());
    service.quit(&scratch);
    assert_eq!(scratch.names(), before);
    assert_eq!(std::fs::read(scratch.path("taken")).unwrap(), b"precious");
}
