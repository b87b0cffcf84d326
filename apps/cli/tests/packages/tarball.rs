//! The static program, alone in an empty folder.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use vdkit_testkit::{Killed, missing, python, require_fuse};

use super::{must, root, said, text, validate};

/// What `make tarball` made, unpacked.
struct Unpacked {
    scratch: tempfile::TempDir,
    folder: PathBuf,
}

impl Unpacked {
    fn new() -> Self {
        let packages = std::env::var_os("VDKIT_PACKAGES").expect("make test-packages names them");
        let entries = std::fs::read_dir(packages).unwrap().map(|entry| entry.unwrap().path());
        let is_tarball = |path: &PathBuf| path.to_string_lossy().ends_with("-linux.tar.xz");
        let mut files = entries.into_iter().filter(is_tarball);
        let file = files.next().expect("a tarball");
        assert_eq!(files.next(), None, "an older tarball is there too");
        let scratch = tempfile::tempdir().unwrap();
        must(Command::new("tar").arg("-xf").arg(file).current_dir(scratch.path()));
        let mut folders = std::fs::read_dir(scratch.path()).unwrap();
        let folder = folders.next().unwrap().unwrap().path();
        assert!(folders.next().is_none(), "one folder");
        Self { scratch, folder }
    }
}

/// A folder that has the program and nothing else, as the whole file system.
struct Alone(tempfile::TempDir);

impl Alone {
    fn new(unpacked: &Unpacked) -> Self {
        let scratch = tempfile::tempdir_in(unpacked.scratch.path()).unwrap();
        std::fs::copy(unpacked.folder.join("vdkit"), scratch.path().join("vdkit")).unwrap();
        Self(scratch)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("/usr/sbin/chroot");
        command.arg(self.0.path()).arg("/vdkit").args(arguments).env_clear();
        command
    }

    fn ok(&self, arguments: &[&str]) -> Output {
        must(&mut self.command(arguments))
    }

    fn fails(&self, words: &str, arguments: &[&str]) {
        let done = self.command(arguments).output().unwrap();
        let errors = text(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{arguments:?}: {errors}");
        assert!(errors.contains(words), "{arguments:?}: {errors}");
    }

    fn serve(&self, arguments: &[&str]) -> Served {
        let mut command = self.command(&["serve"]);
        let mut child = command.args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("serving "), "{line}");
        Served { child: Killed(child), at: line.trim().rsplit(" at ").next().unwrap().to_owned() }
    }
}

struct Served {
    child: Killed,
    at: String,
}

impl Served {
    fn end(mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root() || missing("this test calls chroot", "run it as root")
}

#[test]
#[ignore = "needs the static program of a release build: make test-packages"]
fn the_tarball_is_complete() {
    let unpacked = Unpacked::new();
    must(Command::new("sha256sum").args(["--check", "SHA256SUMS"]).current_dir(&unpacked.folder));
    let sums = std::fs::read_to_string(unpacked.folder.join("SHA256SUMS")).unwrap();
    for file in ["vdkit", "man/vdkit-serve.1", "completions/_vdkit", "licenses/LICENSE-MIT"] {
        assert!(sums.lines().any(|line| line.ends_with(&format!("  {file}"))), "{file}");
    }
    let program = unpacked.folder.join("vdkit");
    let headers =
        said(Command::new("readelf").args(["--program-headers", "--dynamic"]).arg(&program));
    assert!(!headers.contains("INTERP") && !headers.contains("(NEEDED)"), "{headers}");
    // Nothing says where it was built.
    let strings = std::fs::read(&program).unwrap();
    for place in [root(), PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cargo")] {
        let place = place.to_str().unwrap().as_bytes().to_vec();
        assert!(!strings.windows(place.len()).any(|window| window == place), "{place:?}");
    }
    if let Some(mut validator) = python("cyclonedx") {
        validate(&mut validator, &unpacked.folder.join("bom.cdx.json"));
    }
}

#[test]
#[ignore = "needs the static program of a release build: make test-packages"]
fn the_static_program_needs_no_file() {
    if !is_root() {
        return;
    }
    let unpacked = Unpacked::new();
    let alone = Alone::new(&unpacked);
    alone.ok(&["create", "a.qcow2", "64M"]);
    alone.ok(&["write", "a.qcow2", "1M", "64K", "--pattern", "0xaa"]);
    alone.ok(&["convert", "a.qcow2", "a.vmdk"]);
    alone.ok(&["compare", "a.qcow2", "a.vmdk"]);
    alone.ok(&["check", "a.qcow2"]);
    let outside = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vdkit"));
        said(command.args(arguments).current_dir(alone.0.path()))
    };

    let served = alone.serve(&["a.qcow2", "--nbd", "unix:/s.sock"]);
    let socket = format!("nbd+unix:///?socket={}", alone.path("s.sock").display());
    assert!(outside(&["read", &socket, "1M", "4", "--hex"]).contains("aa aa aa aa"));
    served.end();

    let served = alone.serve(&["a.qcow2", "--read-only", "--nbd", "tcp:127.0.0.1:0"]);
    alone.ok(&["read", &served.at, "1M", "4", "--hex"]);
    let named = served.at.replace("127.0.0.1", "disk.test");
    assert_ne!(named, served.at);
    alone.fails("disk.test", &["read", &named, "1M", "4"]);
    std::fs::create_dir(alone.path("etc")).unwrap();
    std::fs::write(alone.path("etc/hosts"), "127.0.0.1 disk.test\n").unwrap();
    // A way that only a shared library has is not asked.
    std::fs::write(alone.path("etc/nsswitch.conf"), "hosts: mymachines resolve files\n").unwrap();
    alone.ok(&["read", &named, "1M", "4", "--hex"]);
    served.end();
}

#[test]
#[ignore = "needs the static program of a release build: make test-packages"]
fn the_static_program_mounts() {
    if !require_fuse() {
        return;
    }
    let unpacked = Unpacked::new();
    let image = unpacked.scratch.path().join("a.qcow2");
    let (file, image) = (unpacked.scratch.path().join("disk"), image.to_str().unwrap());
    let vdkit = || Command::new(unpacked.folder.join("vdkit"));
    must(vdkit().args(["create", image, "64M"]));
    must(vdkit().args(["write", image, "1M", "64K", "--pattern", "0xaa"]));
    let mut child =
        vdkit().args(["mount", image]).arg(&file).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(byte_at(&file, 1 << 20), 0xaa, "{line}");
    must(Command::new("umount").arg(&file));
    assert!(child.wait().unwrap().success());
}

fn byte_at(file: &Path, offset: u64) -> u8 {
    use std::os::unix::fs::FileExt;
    let mut byte = [0];
    std::fs::File::open(file).unwrap().read_exact_at(&mut byte, offset).unwrap();
    byte[0]
}
