//! QEMU's programs as oracles. Call [`crate::require_peer`] first.
//!
//! Calls about an image run in its folder: QEMU looks for a data file by a relative name in the
//! folder of the process.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// What a program answered.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The exit code; -1 for a signal.
    pub code: i32,
    /// What it printed on stdout.
    pub stdout: String,
    /// What it printed on stderr.
    pub stderr: String,
}

impl Answer {
    fn of(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// The output, for a call that must succeed.
    ///
    /// # Panics
    /// If it failed.
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.stdout, self.stderr);
        self.stdout
    }
}

/// A program that runs in the folder of this image.
fn beside(program: &str, image: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some(folder) = image.parent().filter(|folder| folder.is_absolute()) {
        command.current_dir(folder);
    }
    command
}

/// Runs `qemu-img` with these arguments.
///
/// # Panics
/// If it cannot be started.
#[track_caller]
pub fn img<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Answer {
    Answer::of(Command::new("qemu-img").args(args).output().expect("qemu-img"))
}

/// Runs `qemu-io` commands on an image, such as `write -P 1 0 64k`. A pattern that differs fails
/// the call: qemu-io itself only prints it.
///
/// # Panics
/// If it cannot be started, or a command fails.
#[track_caller]
pub fn io(path: &Path, format: &str, commands: &[&str]) -> String {
    let answer = try_io(path, format, commands);
    let printed = format!("{}{}", answer.stdout, answer.stderr);
    let failed = ["Pattern verification failed", "failed:", "error", "Could not open"];
    assert!(
        answer.code == 0 && !failed.iter().any(|word| printed.contains(word)),
        "qemu-io {commands:?} on {}: {printed}",
        path.display()
    );
    printed
}

/// As [`io`], for calls that may fail.
///
/// # Panics
/// If it cannot be started.
#[track_caller]
pub fn try_io(path: &Path, format: &str, commands: &[&str]) -> Answer {
    let mut command = beside("qemu-io", path);
    command.args(["-f", format]);
    for each in commands {
        command.args(["-c", each]);
    }
    Answer::of(command.arg(path).output().expect("qemu-io"))
}

/// Makes an image. `options` as for `-o`; `backing` is a name as it shall be stored, and its
/// format.
///
/// # Panics
/// If that fails.
#[track_caller]
pub fn create(
    path: &Path,
    format: &str,
    size: u64,
    options: &[&str],
    backing: Option<(&str, &str)>,
) {
    let mut args: Vec<String> = vec!["create".into(), "-q".into(), "-f".into(), format.into()];
    for option in options {
        args.extend(["-o".to_owned(), (*option).to_owned()]);
    }
    if let Some((name, format)) = backing {
        args.extend(["-b".to_owned(), name.to_owned(), "-F".to_owned(), format.to_owned()]);
    }
    args.extend([path.display().to_string(), size.to_string()]);
    img(args).ok();
}

/// Converts an image. `options` are further arguments, such as `-c`.
///
/// # Panics
/// If that fails.
#[track_caller]
pub fn convert(from: (&Path, &str), to: (&Path, &str), options: &[&str]) {
    let mut command = beside("qemu-img", from.0);
    command.args(["convert", "-f", from.1, "-O", to.1]).args(options).arg(from.0).arg(to.0);
    Answer::of(command.output().expect("qemu-img")).ok();
}

/// What `qemu-img info` says.
///
/// # Panics
/// If that fails.
#[track_caller]
pub fn info(path: &Path, format: &str) -> Value {
    json(&["info", "--output=json", "-f", format], path)
}

/// What `qemu-img map` says: a list of extents.
///
/// # Panics
/// If that fails.
#[track_caller]
pub fn map(path: &Path, format: &str) -> Vec<Value> {
    let value = json(&["map", "--output=json", "-f", format], path);
    value.as_array().cloned().expect("a list")
}

#[track_caller]
fn json(args: &[&str], path: &Path) -> Value {
    let output = beside("qemu-img", path).args(args).arg(path).output().expect("qemu-img");
    serde_json::from_str(&Answer::of(output).ok()).expect("JSON")
}

/// What `qemu-img check` found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// Its exit code: 0 clean, 2 corrupt, 3 leaks, 1 and others: not checked.
    pub code: i32,
    /// Corrupt entries.
    pub corruptions: u64,
    /// Leaked clusters.
    pub leaks: u64,
    /// Errors of the check itself.
    pub check_errors: u64,
    /// What it printed.
    pub text: String,
}

impl Checked {
    /// No corruptions and no leaks.
    pub fn clean(&self) -> bool {
        self.code == 0 && self.consistent() && self.leaks == 0
    }

    /// No corruptions; leaks are allowed.
    pub fn consistent(&self) -> bool {
        matches!(self.code, 0 | 3) && self.corruptions == 0 && self.check_errors == 0
    }
}

/// Checks an image. `repair` is `leaks` or `all`.
///
/// # Panics
/// If it cannot be started.
#[track_caller]
pub fn check(path: &Path, format: &str, repair: Option<&str>) -> Checked {
    let mut command = beside("qemu-img", path);
    command.args(["check", "--output=json", "-f", format]);
    if let Some(what) = repair {
        command.args(["-r", what]);
    }
    let answer = Answer::of(command.arg(path).output().expect("qemu-img"));
    let report: Value = serde_json::from_str(&answer.stdout).unwrap_or_default();
    let count = |key: &str| report.get(key).and_then(Value::as_u64).unwrap_or(0);
    Checked {
        code: answer.code,
        corruptions: count("corruptions"),
        leaks: count("leaks"),
        check_errors: count("check-errors"),
        text: format!("{}{}", answer.stdout, answer.stderr),
    }
}

/// Whether two images show the guest the same bytes.
///
/// # Panics
/// If they cannot be compared.
#[track_caller]
pub fn same(a: (&Path, &str), b: (&Path, &str)) -> bool {
    let mut command = beside("qemu-img", a.0);
    command.args(["compare", "-f", a.1, "-F", b.1]).arg(a.0).arg(b.0);
    let answer = Answer::of(command.output().expect("qemu-img"));
    assert!(matches!(answer.code, 0 | 1), "{}{}", answer.stdout, answer.stderr);
    answer.code == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::require_peer;

    #[test]
    fn the_oracle_answers() {
        if !require_peer("qemu-img") || !require_peer("qemu-io") {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a.qcow2"), dir.path().join("b.raw"));
        create(&a, "qcow2", 1 << 20, &["cluster_size=4096"], None);
        io(&a, "qcow2", &["write -P 7 4096 8192"]);
        assert_eq!(info(&a, "qcow2")["virtual-size"], 1 << 20);
        assert_eq!(map(&a, "qcow2")[1]["length"], 8192);
        assert!(check(&a, "qcow2", None).clean());
        convert((&a, "qcow2"), (&b, "raw"), &[]);
        assert!(same((&a, "qcow2"), (&b, "raw")));
        io(&b, "raw", &["read -P 7 4096 8192", "write -P 8 0 512"]);
        assert!(!same((&a, "qcow2"), (&b, "raw")));
        let top = dir.path().join("top.qcow2");
        create(&top, "qcow2", 1 << 20, &[], Some(("a.qcow2", "qcow2")));
        assert!(same((&a, "qcow2"), (&top, "qcow2")));
    }

    #[test]
    fn a_leak_is_consistent_and_not_clean() {
        if !require_peer("qemu-img") {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        create(&path, "qcow2", 1 << 20, &[], None);
        // A refcount of 1 for the cluster after the last one in use.
        let mut bytes = std::fs::read(&path).unwrap();
        let end = bytes.len().next_multiple_of(64 << 10);
        bytes.resize(end + (64 << 10), 0);
        let refcounts = 2 * (64 << 10);
        bytes[refcounts + 2 * (end >> 16) + 1] = 1;
        std::fs::write(&path, &bytes).unwrap();
        let found = check(&path, "qcow2", None);
        assert!(found.consistent() && !found.clean(), "{found:?}");
        assert_eq!(found.leaks, 1);
        assert!(check(&path, "qcow2", Some("leaks")).consistent());
        assert!(check(&path, "qcow2", None).clean());
    }

    #[test]
    #[should_panic(expected = "Pattern verification failed")]
    fn a_wrong_pattern_fails_the_call() {
        if !require_peer("qemu-io") {
            panic!("Pattern verification failed: skipped");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.raw");
        std::fs::write(&path, [1; 4096]).unwrap();
        io(&path, "raw", &["read -P 2 0 512"]);
    }
}
