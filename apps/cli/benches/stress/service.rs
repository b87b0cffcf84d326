//! The service, and those who disturb it.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use vdkit_testkit::{Killed, Rng};

use crate::client::Tally;
use crate::{DISK_BYTES, PATIENCE};

/// Images in a chain, at most.
const CHAIN_MAX: usize = 4;

/// A running `vdkit serve`.
pub struct Service {
    program: PathBuf,
    folder: PathBuf,
    child: Mutex<Killed>,
    pid: u32,
}

impl Service {
    /// Makes a disk in a folder, and serves it.
    pub fn start(program: &Path, folder: &Path, rng: &mut Rng) -> Self {
        let sizes = ["4K", "64K", "512K"];
        let option = format!("cluster_size={}", sizes[rng.below(3) as usize]);
        let cache = ["writeback", "writethrough", "none"][rng.below(3) as usize];
        let size = DISK_BYTES.to_string();
        let created = Command::new(program)
            .args(["create", "0.qcow2", &size, "-o", &option])
            .current_dir(folder)
            .output();
        assert!(created.is_ok_and(|output| output.status.success()));
        let child = Command::new(program)
            .args(["serve", "0.qcow2", "-f", "qcow2", "--nbd", "unix:n.sock"])
            .args(["--control", "c.sock", "--cache", cache])
            .current_dir(folder)
            .stdout(Stdio::null())
            .stderr(File::create(folder.with_extension("log")).expect("a log"))
            .spawn()
            .expect("the service starts");
        let pid = child.id();
        while !folder.join("c.sock").exists() || !folder.join("n.sock").exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        let child = Mutex::new(Killed(child));
        Self { program: program.to_owned(), folder: folder.to_owned(), child, pid }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Gives the service a command, which may be refused but must be answered.
    pub fn ctl(&self, arguments: &[&str]) -> Output {
        let child = Command::new(&self.program)
            .arg("ctl")
            .arg("c.sock")
            .args(arguments)
            .arg("--json")
            .current_dir(&self.folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ctl starts");
        let mut child = Killed(child);
        // The answer fits into a pipe.
        let ended = ends_within(&mut child, PATIENCE);
        assert!(ended, "'ctl {arguments:?}' has no answer");
        let mut output =
            Output { status: Default::default(), stdout: Vec::new(), stderr: Vec::new() };
        output.status = child.wait().expect("it has ended");
        for (pipe, text) in [
            (
                child.stdout.take().map(|pipe| Box::new(pipe) as Box<dyn std::io::Read>),
                &mut output.stdout,
            ),
            (
                child.stderr.take().map(|pipe| Box::new(pipe) as Box<dyn std::io::Read>),
                &mut output.stderr,
            ),
        ] {
            if let Some(mut pipe) = pipe {
                let _ = pipe.read_to_end(text);
            }
        }
        output
    }

    fn status(&self) -> Value {
        serde_json::from_slice(&self.ctl(&["status"]).stdout).expect("a status")
    }

    /// Says what each thread of the service waits for.
    pub fn explain(&self) {
        eprintln!("--- its log");
        let log = fs::read_to_string(self.folder.with_extension("log")).unwrap_or_default();
        log.lines().rev().take(20).for_each(|line| eprintln!("{line}"));
        eprintln!("--- its threads");
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid));
        for thread in threads.into_iter().flatten().flatten() {
            let of = |what: &str| {
                fs::read_to_string(thread.path().join(what)).unwrap_or_default().trim().to_owned()
            };
            let (name, call) = (of("comm"), of("syscall"));
            let stack: Vec<String> = of("stack").lines().take(4).map(str::to_owned).collect();
            eprintln!("{name}: {} at {stack:?}, system call {call}", of("wchan"));
        }
        eprintln!("--- its status");
        let status = Command::new("timeout")
            .args(["5"])
            .arg(&self.program)
            .args(["ctl", "c.sock", "status"])
            .current_dir(&self.folder)
            .output();
        eprintln!("{}", String::from_utf8_lossy(&status.map(|o| o.stdout).unwrap_or_default()));
    }

    /// Ends the service at once, and gives its file system back.
    pub fn kill(&self) {
        let _ = Command::new("kill").args(["-9", &self.pid.to_string()]).status();
        let _ = Command::new("umount").arg("--lazy").arg(&self.folder).status();
    }

    /// Ends the service and checks its image.
    pub fn end(&self) {
        let top = self.status()["filename"].as_str().expect("a name").to_owned();
        self.ctl(&["quit"]);
        let mut child = self.child.lock().expect("one thread ends it");
        assert!(ends_within(&mut child, PATIENCE), "the service does not end");
        let log = fs::read_to_string(self.folder.with_extension("log")).unwrap_or_default();
        let _ = fs::remove_file(self.folder.with_extension("log"));
        let status = child.wait().expect("it has ended");
        assert!(status.success(), "the service ended with {status}: {log}");
        let check = Command::new(&self.program)
            .args(["check", &top])
            .current_dir(&self.folder)
            .output()
            .expect("check starts");
        // 3: leaks, which a commit that found no space leaves.
        let sound = matches!(check.status.code(), Some(0 | 3));
        assert!(sound, "{top}: {check:?}\n{log}");
    }
}

fn ends_within(child: &mut Child, most: Duration) -> bool {
    let until = Instant::now() + most;
    while child.try_wait().expect("a child").is_none() {
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// Gives commands in any order until it is over.
pub fn administer(service: &Service, seed: u64, over: &AtomicBool) -> Tally {
    let mut rng = Rng::new(seed);
    let mut tally = Tally::default();
    let mut number = 0;
    while !over.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(rng.below(400)));
        let done = match rng.below(10) {
            0..3 if chain_of(service).len() < CHAIN_MAX => {
                number += 1;
                let overlay = service.folder().join(format!("{number}.qcow2"));
                let done = service.ctl(&["snapshot-external", &overlay.display().to_string()]);
                tally.overlays += u64::from(done.status.success());
                done
            }
            0..6 => commit(service, &mut rng, &mut tally),
            6 => {
                service.ctl(&["pause"]);
                std::thread::sleep(Duration::from_millis(rng.below(1500)));
                service.ctl(&["resume"])
            }
            7 => service.ctl(&["snapshot", "s"]),
            8 => service.ctl(&["snapshot-delete", "s"]),
            _ => service.ctl(&["flush"]),
        };
        tally.refused += u64::from(!done.status.success());
        remove_unused(service);
    }
    tally.kept = service.status()["parked"]["total"].as_u64().expect("a number");
    tally
}

fn commit(service: &Service, rng: &mut Rng, tally: &mut Tally) -> Output {
    let cancels = rng.chance(1, 2);
    let after = Duration::from_millis(rng.below(300));
    let done = std::thread::scope(|scope| {
        let committing = scope.spawn(|| service.ctl(&["commit", "--force"]));
        if cancels {
            std::thread::sleep(after);
            service.ctl(&["commit-cancel"]);
        }
        committing.join()
    });
    let done = done.expect("a commit is answered");
    tally.commits += u64::from(done.status.success());
    tally.cancelled += u64::from(cancels && !done.status.success());
    done
}

fn chain_of(service: &Service) -> Vec<String> {
    let status = service.status();
    let chain = status["chain"].as_array().expect("a chain");
    let name = |image: &Value| {
        let path = Path::new(image.as_str().expect("a name"));
        path.file_name().expect("a file").to_string_lossy().into_owned()
    };
    chain.iter().map(name).collect()
}

/// Removes overlays that were committed.
fn remove_unused(service: &Service) {
    let chain = chain_of(service);
    for file in fs::read_dir(service.folder()).into_iter().flatten().flatten() {
        let name = file.file_name().to_string_lossy().into_owned();
        if name.ends_with(".qcow2") && !chain.contains(&name) {
            let _ = fs::remove_file(file.path());
        }
    }
}

/// Fills the file system, more or less, for a while, and empties it, until it is to stay empty.
pub fn fill_and_empty(folder: &Path, seed: u64, empty: &AtomicBool) {
    let mut rng = Rng::new(seed);
    let file = File::create(folder.join("filler")).expect("a file");
    while !empty.load(Ordering::SeqCst) {
        let piece = vec![1; 64 << 10];
        let mut bytes = 0;
        while file.write_at(&piece, bytes).is_ok() {
            bytes += piece.len() as u64;
        }
        // What is left for the service: nothing, or a little.
        let left = rng.below(4) * rng.below(1 << 20);
        file.set_len(bytes.saturating_sub(left)).expect("a shorter file");
        std::thread::sleep(Duration::from_millis(rng.below(4000)));
        file.set_len(bytes * rng.below(50) / 100).expect("a shorter file");
        std::thread::sleep(Duration::from_millis(rng.below(3000)));
    }
    file.set_len(0).expect("a shorter file");
}
