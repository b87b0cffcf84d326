//! What a measurement was made on.

use std::fs;
use std::process::Command;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::options::Options;

/// The machine and the programs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Machine {
    /// The processor's name and how many of it.
    pub cpu: String,
    /// GiB of memory.
    pub memory_gib: u64,
    /// Kernel release.
    pub kernel: String,
    /// The distribution.
    pub system: String,
    /// What the work directory is on, under the scratch file systems.
    pub host_file_system: String,
    /// Versions of the programs, as they say.
    pub programs: Vec<String>,
    /// The commit that the harness was built from, with a plus where the tree had changes.
    pub commit: String,
    /// When, in UTC.
    pub date: String,
    /// The harness's own command line.
    pub command: String,
}

/// Describes this machine.
pub fn describe(options: &Options) -> Result<Machine> {
    fs::create_dir_all(&options.work)?;
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = field(&cpuinfo, "model name").unwrap_or("unknown");
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib: u64 = field(&meminfo, "MemTotal")
        .and_then(|text| text.split(' ').next()?.parse().ok())
        .unwrap_or(0);
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let system = release
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="))
        .map_or("unknown", |text| text.trim_matches('"'));
    let work = options.work.to_string_lossy();
    let programs = [
        first_line(&options.vdkit.to_string_lossy(), &["--version"]),
        first_line(&options.qemu_img.to_string_lossy(), &["--version"]),
        first_line("cp", &["--version"]),
    ];
    let commit = first_line("git", &["describe", "--always", "--dirty=+", "--exclude=*"]);
    Ok(Machine {
        cpu: format!("{count} × {name}"),
        memory_gib: (kib + (1 << 19)) >> 20,
        kernel: first_line("uname", &["-sr"]),
        system: system.to_owned(),
        host_file_system: first_line("findmnt", &["-no", "FSTYPE", "-T", &work]),
        programs: programs.into_iter().filter(|line| !line.is_empty()).collect(),
        commit,
        date: first_line("date", &["-u", "+%Y-%m-%d %H:%M"]),
        command: std::iter::once("make bench BENCH='".to_owned())
            .chain([std::env::args().skip(1).collect::<Vec<_>>().join(" "), "'".to_owned()])
            .collect(),
    })
}

/// The value of a `name : value` line.
pub fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// What a program says first, or nothing where it cannot be asked.
fn first_line(program: &str, arguments: &[&str]) -> String {
    let Ok(output) = Command::new(program).args(arguments).output() else {
        return String::new();
    };
    String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned()
}
