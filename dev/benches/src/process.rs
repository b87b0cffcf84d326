//! One run of one program: how long it took, what it used.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

static STOPPED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// From now on SIGINT and SIGTERM end the run at the next step, so that scratch file systems are
/// unmounted.
pub fn stop_on_signals() -> Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&STOPPED)).context("signal handler")?;
    }
    Ok(())
}

/// Whether a signal asked for the end.
pub fn interrupted() -> bool {
    STOPPED.load(Ordering::Relaxed)
}

/// A program with its arguments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program(Vec<OsString>);

impl Program {
    /// A program without arguments.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self(vec![program.as_ref().to_owned()])
    }

    /// The same program without its arguments.
    pub fn bare(&self) -> Self {
        Self(self.0[..1].to_vec())
    }

    /// The files that its arguments name.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.0[1..].iter().map(Path::new).filter(|path| path.is_file())
    }

    /// With one more argument.
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.0.push(argument.as_ref().to_owned());
        self
    }

    /// With these arguments.
    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.0.extend(arguments.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    /// As one would type it, with `folder` cut from the names for a reader's sake.
    pub fn typed(&self, folder: &Path) -> String {
        let prefix = format!("{}/", folder.display());
        let mut words = self.0.iter().map(|word| word.to_string_lossy().replace(&prefix, ""));
        let program = words.next().unwrap_or_default();
        let program = program.rsplit('/').next().unwrap_or_default().to_owned();
        std::iter::once(program).chain(words).collect::<Vec<_>>().join(" ")
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// If it cannot be started, or ends with anything but 0: then with what it said.
    pub fn run(&self) -> Result<Usage> {
        if STOPPED.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        let (program, arguments) = self.0.split_first().context("empty command")?;
        let mut said = tempfile()?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::from(said.try_clone()?));
        let start = Instant::now();
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", program.to_string_lossy()))?;
        let (status, usage) = wait(child.id())?;
        let wall_seconds = start.elapsed().as_secs_f64();
        if STOPPED.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        if !(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0) {
            let mut text = String::new();
            said.seek(SeekFrom::Start(0))?;
            said.read_to_string(&mut text)?;
            let how = if libc::WIFEXITED(status) {
                format!("exit code {}", libc::WEXITSTATUS(status))
            } else {
                format!("signal {}", libc::WTERMSIG(status))
            };
            bail!("{how}: {}", text.trim().replace('\n', "; "));
        }
        let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
        Ok(Usage {
            wall_seconds,
            sync_seconds: 0.0,
            user_seconds: seconds(usage.ru_utime),
            system_seconds: seconds(usage.ru_stime),
            memory_bytes_max: u64::try_from(usage.ru_maxrss).unwrap_or(0) * 1024,
            syncs: None,
        })
    }
}

/// What one run took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Usage {
    /// From the start of the program to its end.
    pub wall_seconds: f64,
    /// What a sync of the file system took afterwards: the part of the work left behind in the
    /// page cache.
    pub sync_seconds: f64,
    /// CPU time in user mode.
    pub user_seconds: f64,
    /// CPU time in the kernel.
    pub system_seconds: f64,
    /// Peak resident memory.
    pub memory_bytes_max: u64,
    /// In the group durable: syncs a request, where they were counted.
    #[serde(default)]
    pub syncs: Option<f64>,
}

/// An unnamed file for what a program says.
fn tempfile() -> Result<File> {
    let fd = rustix::fs::memfd_create("stderr", rustix::fs::MemfdFlags::CLOEXEC)?;
    Ok(File::from(fd))
}

/// Waits for a child of ours and takes its resource usage, which std's own wait leaves out.
fn wait(pid: u32) -> Result<(i32, libc::rusage)> {
    let pid = libc::pid_t::try_from(pid)?;
    loop {
        let mut status = 0;
        // SAFETY: rusage is plain old data for which all zeroes is a valid value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to live locals of the right types; the child is ours and
        // nobody else waits for it (std's `Child` does not on drop).
        let got = unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) };
        if got == pid {
            return Ok((status, usage));
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error).context("wait4");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_the_childs_and_a_failure_says_what_it_said() {
        let usage = Program::new("sh")
            .args(["-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done"])
            .run()
            .unwrap();
        assert!(usage.user_seconds + usage.system_seconds > 0.0);
        assert!(usage.memory_bytes_max > 100 << 10);
        let error = Program::new("sh").args(["-c", "echo no room >&2; exit 3"]).run().unwrap_err();
        assert_eq!(error.to_string(), "exit code 3: no room");
        let error = Program::new("sh").args(["-c", "kill -9 $$"]).run().unwrap_err();
        assert!(error.to_string().starts_with("signal 9"), "{error}");
    }

    #[test]
    fn typed_is_short() {
        let program = Program::new("/a/bin/vdkit").args(["convert", "/w/x/in.raw", "null:"]);
        assert_eq!(program.typed(Path::new("/w/x")), "vdkit convert in.raw null:");
        assert_eq!(program.files().count(), 0);
        assert_eq!(
            program.arg("/proc/version").files().collect::<Vec<_>>(),
            [Path::new("/proc/version")]
        );
    }
}
