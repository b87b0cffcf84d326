//! File systems that live for one measurement.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::options::FileSystem;
use crate::process::Program;

/// A mounted scratch file system; unmounted and removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    /// What it is.
    pub file_system: FileSystem,
    /// Where files go.
    pub folder: PathBuf,
    mounted: bool,
    device: Option<String>,
    backing: Option<PathBuf>,
}

impl Scratch {
    /// Makes one with room for `bytes` under `work`.
    ///
    /// # Errors
    /// Without the right to mount, and where a tool is missing.
    pub fn mount(file_system: FileSystem, work: &Path, bytes: u64) -> Result<Self> {
        let folder = work.join(format!("vdkit-bench-{}", file_system.name()));
        clear_stale(&folder)?;
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let folder = folder.canonicalize()?;
        let mut scratch = Self { file_system, folder, mounted: false, device: None, backing: None };
        let hint = || {
            format!(
                "cannot make a scratch {}; it takes root and mkfs, or choose --fs host",
                file_system.name()
            )
        };
        match file_system {
            FileSystem::Host => {}
            FileSystem::Tmpfs => {
                Program::new("mount")
                    .args(["-t", "tmpfs", "-o", &format!("size={bytes}"), "vdkit-bench"])
                    .arg(&scratch.folder)
                    .run()
                    .with_context(hint)?;
                scratch.mounted = true;
            }
            FileSystem::Xfs | FileSystem::Ext4 | FileSystem::Btrfs => {
                scratch.mount_loop(bytes).with_context(hint)?;
            }
        }
        Ok(scratch)
    }

    fn mount_loop(&mut self, bytes: u64) -> Result<()> {
        let backing = self.folder.with_extension("fs");
        fs::File::create(&backing)?.set_len(bytes)?;
        self.backing = Some(backing.clone());
        let flags: &[&str] = match self.file_system {
            // Nothing is left for the kernel to do in the background.
            FileSystem::Ext4 => &["-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
            _ => &["-q"],
        };
        Program::new(format!("mkfs.{}", self.file_system.name()))
            .args(flags)
            .arg(&backing)
            .run()?;
        self.device = Some(attach(&backing)?);
        Program::new("mount").args(&self.device).arg(&self.folder).run()?;
        self.mounted = true;
        Ok(())
    }

    /// A file's name on it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Ends it; dropping does the same without a word.
    pub fn unmount(mut self) -> Result<()> {
        self.remove()
    }

    fn remove(&mut self) -> Result<()> {
        if self.mounted {
            command("umount", &[self.folder.as_os_str()])?;
            self.mounted = false;
        }
        if let Some(device) = self.device.take() {
            command("losetup", &["-d".as_ref(), device.as_ref()])?;
        }
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder)?;
        }
        if let Some(backing) = self.backing.take() {
            fs::remove_file(backing)?;
        }
        Ok(())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("vdkit-bench: {} stays behind: {error:#}", self.folder.display());
        }
    }
}

/// A loop device for a file, which it reads and writes directly: otherwise each page would be
/// cached twice, and written back at the kernel's leisure during a later run.
fn attach(backing: &Path) -> Result<String> {
    let name = backing.as_os_str();
    let device = command(
        "losetup",
        &["--find".as_ref(), "--show".as_ref(), "--direct-io=on".as_ref(), name],
    )?;
    Ok(device.trim().to_owned())
}

/// Runs a command for what it says. Not through [`Program::run`], which refuses after an
/// interrupt, when there is still to unmount.
fn command(program: &str, arguments: &[&OsStr]) -> Result<String> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .with_context(|| format!("cannot start {program}"))?;
    if !output.status.success() {
        bail!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Clears what a killed run left at this place.
fn clear_stale(folder: &Path) -> Result<()> {
    let Ok(folder) = folder.canonicalize() else { return Ok(()) };
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let name = folder.to_string_lossy();
    if mounts.lines().any(|line| line.split(' ').nth(1) == Some(&*name)) {
        command("umount", &[folder.as_os_str()])?;
    }
    fs::remove_dir_all(&folder)?;
    let backing = folder.with_extension("fs");
    if backing.exists() {
        let devices = command("losetup", &["-j".as_ref(), backing.as_os_str()])?;
        for device in devices.lines().filter_map(|line| line.split(':').next()) {
            command("losetup", &["-d".as_ref(), device.as_ref()])?;
        }
        fs::remove_file(backing)?;
    }
    Ok(())
}
