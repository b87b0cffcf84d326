//! A running `vdkit mount`, for the tests.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::io::Errno;
use serde_json::Value;

use super::{Scratch, peer, signal};

pub const MIB: u64 = 1 << 20;

/// A running `vdkit mount`.
pub struct Mount {
    pub child: Child,
    pub file: PathBuf,
    pub answer: Value,
}

/// Starts the command, and holds what it says against its schema.
pub fn json_of(name: &str, scratch: &Scratch, arguments: &[&str]) -> (Child, Value) {
    let mut all = vec![name, "--json"];
    all.extend_from_slice(arguments);
    let mut child =
        scratch.command(&all).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let stdout = BufReader::new(child.stdout.take().unwrap());
    let Some(Ok(value)) = serde_json::Deserializer::from_reader(stdout).into_iter().next() else {
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        panic!("vdkit {all:?}: {:?}: {said}", child.wait().unwrap());
    };
    let faults = super::faults_against_schema(name, &value);
    assert!(faults.is_empty(), "{faults:?}");
    (child, value)
}

impl Mount {
    /// Mounts; the last argument is the file.
    pub fn start(scratch: &Scratch, arguments: &[&str]) -> Self {
        let (child, answer) = json_of("mount", scratch, arguments);
        let file = scratch.path(arguments.last().unwrap());
        Self { child, file, answer }
    }

    pub fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(&self.file).unwrap()
    }

    pub fn wait(&mut self) -> (Option<i32>, String) {
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap().code(), said)
    }

    /// Waits for a line on stderr, which must begin so.
    pub fn says(&mut self, words: &str) {
        let line = super::next_line(self.child.stderr.as_mut().unwrap());
        assert!(line.starts_with(words), "{line}");
    }

    /// Ends it as a user does.
    pub fn stop(mut self) {
        signal(self.child.id(), "TERM");
        let (code, said) = self.wait();
        assert_eq!((code, said.as_str()), (Some(0), ""));
    }

    /// As [`Mount::stop`], whatever it said before.
    pub fn stop_saying(mut self, words: &str) {
        signal(self.child.id(), "TERM");
        let (code, said) = self.wait();
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains(words), "{said}");
    }

    /// Ends it as a crash does, and takes the mount away that is left.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        unmount(&self.file, &["--lazy"]);
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            // A test failed: nothing of it shall stay.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        let _ = Command::new("umount").args(["--lazy", "--quiet"]).arg(&self.file).output();
    }
}

pub fn unmount(file: &Path, how: &[&str]) {
    let output = Command::new("umount").args(how).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

pub fn errno(error: &std::io::Error) -> Option<Errno> {
    Errno::from_io_error(error)
}

/// The image must be sound and hold exactly these bytes, as QEMU sees it.
pub fn holds(scratch: &Scratch, image: &str, format: &str, model: &[u8]) {
    if format == "qcow2" {
        super::chains::sound(scratch, image, false);
    }
    scratch.write("model.raw", model);
    let args = ["compare", "-f", format, "-F", "raw", image, "model.raw"];
    peer(&scratch.path(""), "qemu-img", &args);
}
