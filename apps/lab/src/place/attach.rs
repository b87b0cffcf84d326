//! Loop devices and mounts of our own, taken down whatever happens.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Context, Result};
use rustix::mount::{UnmountFlags, unmount};
use vdkit_block::CancelToken;

use crate::engine::Bench;
use crate::peers::need;
use crate::process::Line;

/// A loop device over a file.
#[derive(Debug)]
pub struct Attached {
    device: PathBuf,
}

impl Attached {
    /// Attaches a file.
    ///
    /// # Errors
    /// The system refuses.
    pub fn new(bench: &mut Bench<'_>, file: &Path) -> Result<Self> {
        let line = Line::new(need("losetup")?).args(["--find", "--show"]).arg(file);
        let ended = bench.run(&line)?;
        Ok(Self { device: ended.stdout.trim().into() })
    }

    /// The device.
    pub fn path(&self) -> &Path {
        &self.device
    }

    /// Detaches it.
    ///
    /// # Errors
    /// The system refuses.
    pub fn end(self, bench: &mut Bench<'_>) -> Result<()> {
        bench.commands.push(format!("losetup --detach {}", self.device.display()));
        detach(&self.device)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // Detached already when it has come to its own end; else nobody can be told.
        let _ = detach(&self.device);
    }
}

fn detach(device: &Path) -> Result<()> {
    if backing(device).is_none() {
        return Ok(());
    }
    Line::new(need("losetup")?).arg("--detach").arg(device).run(&CancelToken::default())?;
    // The kernel detaches when the last one has closed it, which may be udev.
    for _ in 0..100 {
        if backing(device).is_none() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The file beneath a loop device.
fn backing(device: &Path) -> Option<String> {
    let name = device.file_name()?.to_str()?;
    let text = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()?;
    Some(text.trim_end_matches('\n').to_owned())
}

/// A mounted file system.
#[derive(Debug)]
pub struct Mounted {
    at: Option<PathBuf>,
}

impl Mounted {
    /// Mounts a device with an ext4 file system.
    ///
    /// # Errors
    /// The system refuses.
    pub fn new(bench: &mut Bench<'_>, device: &Path, at: &Path) -> Result<Self> {
        let line = Line::new(need("mount")?).args(["-t", "ext4"]).arg(device).arg(at);
        bench.run(&line)?;
        Ok(Self { at: Some(at.to_owned()) })
    }

    /// Unmounts it, which writes back what is dirty.
    ///
    /// # Errors
    /// The system refuses.
    pub fn end(mut self, bench: &mut Bench<'_>) -> Result<()> {
        let Some(at) = self.at.take() else { return Ok(()) };
        bench.commands.push(format!("umount {}", at.display()));
        take_down(&at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(at) = &self.at {
            // Nobody can be told.
            let _ = take_down(at);
        }
    }
}

/// Unmounts; what is busy a little later, and in the end from its name only.
fn take_down(at: &Path) -> Result<()> {
    for _ in 0..50 {
        match unmount(at, UnmountFlags::empty()) {
            Err(rustix::io::Errno::BUSY) => std::thread::sleep(Duration::from_millis(20)),
            Err(error) => return Err(error).with_context(|| at.display().to_string()),
            Ok(()) => return Ok(()),
        }
    }
    unmount(at, UnmountFlags::DETACH).with_context(|| at.display().to_string())
}

/// Takes down all mounts beneath a folder and detaches all loop devices over files in it: what a
/// process has left that was killed.
///
/// # Errors
/// Something cannot be taken down.
pub fn release_all(folder: &Path) -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // The last one that was mounted goes first: it may stand on an earlier one.
    for at in crate::environment::mounts::parse(&mounts).iter().rev() {
        if at.point.starts_with(folder) && at.point != folder {
            take_down(&at.point)?;
        }
    }
    let Ok(devices) = fs::read_dir("/sys/block") else { return Ok(()) };
    for entry in devices.filter_map(std::result::Result::ok) {
        let device = Path::new("/dev").join(entry.file_name());
        let beneath = backing(&device);
        if beneath.is_some_and(|file| Path::new(&file).starts_with(folder)) {
            detach(&device)?;
        }
    }
    Ok(())
}
