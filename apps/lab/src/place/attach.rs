//! Loop devices and mounts of the lab, which are removed in every case.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Context, Result};
use rustix::mount::{UnmountFlags, unmount};
use vdkit_block::CancelToken;
use vdkit_storage::mounts;

use crate::engine::Bench;
use crate::peers::need;
use crate::process::Line;

/// A loop device over a file.
#[derive(Debug)]
pub struct Attached {
    device: PathBuf,
    /// The file below it; none once the device was detached. Its name may belong to another
    /// program's file from then on.
    file: Option<String>,
}

impl Attached {
    pub fn new(bench: &mut Bench<'_>, file: &Path) -> Result<Self> {
        let line = Line::new(need("losetup")?).args(["--find", "--show"]).arg(file);
        let ended = bench.run(&line)?;
        let device = PathBuf::from(ended.stdout.trim());
        let file = backing(&device);
        Ok(Self { device, file })
    }

    /// Path of the device.
    pub fn path(&self) -> &Path {
        &self.device
    }

    /// Detaches the device.
    pub fn end(mut self, bench: &mut Bench<'_>) -> Result<()> {
        bench.commands.push(format!("losetup --detach {}", self.device.display()));
        self.file.take().map_or(Ok(()), |file| detach(&self.device, &file))
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Some(file) = self.file.take() {
            // A destructor cannot report errors.
            let _ = detach(&self.device, &file);
        }
    }
}

/// Detaches a loop device, if it is still one over this file.
fn detach(device: &Path, file: &str) -> Result<()> {
    let is_ours = || backing(device).is_some_and(|found| found == file);
    if !is_ours() {
        return Ok(());
    }
    Line::new(need("losetup")?).arg("--detach").arg(device).run(&CancelToken::default())?;
    // The kernel detaches the device when its last user closes it, which may be udev.
    for _ in 0..100 {
        if !is_ours() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// The file below a loop device.
fn backing(device: &Path) -> Option<String> {
    let name = device.file_name()?.to_str()?;
    let text = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()?;
    let name = text.trim_end_matches('\n');
    // The kernel marks a file that has no name any more.
    Some(name.strip_suffix(" (deleted)").unwrap_or(name).to_owned())
}

/// A mounted file system.
#[derive(Debug)]
pub struct Mounted {
    at: Option<PathBuf>,
}

impl Mounted {
    /// Mounts a device with an ext4 file system.
    pub fn new(bench: &mut Bench<'_>, device: &Path, at: &Path) -> Result<Self> {
        let line = Line::new(need("mount")?).args(["-t", "ext4"]).arg(device).arg(at);
        bench.run(&line)?;
        Ok(Self { at: Some(at.to_owned()) })
    }

    /// Unmounts the file system, which writes back its dirty pages.
    pub fn end(mut self, bench: &mut Bench<'_>) -> Result<()> {
        let Some(at) = self.at.take() else { return Ok(()) };
        bench.commands.push(format!("umount {}", at.display()));
        take_down(&at)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(at) = &self.at {
            // A destructor cannot report errors.
            let _ = take_down(at);
        }
    }
}

/// Unmounts a file system. Retries while it is busy, and finally detaches it lazily.
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

/// Unmounts everything below a folder, and detaches all loop devices over files in it. Cleans up
/// after a process that was killed.
pub fn release_all(folder: &Path) -> Result<()> {
    // Unmount in reverse order, because a later mount may use an earlier one.
    for at in mounts::all().iter().rev() {
        if at.point.starts_with(folder) && at.point != folder {
            take_down(&at.point)?;
        }
    }
    let Ok(devices) = fs::read_dir("/sys/block") else { return Ok(()) };
    for entry in devices.filter_map(std::result::Result::ok) {
        let device = Path::new("/dev").join(entry.file_name());
        if let Some(file) = backing(&device).filter(|file| Path::new(file).starts_with(folder)) {
            detach(&device, &file)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After it was detached, the kernel gives the number of a device to the next program.
    #[test]
    fn a_loop_device_of_another_program_is_not_detached() {
        let Some(other) = vdkit_testkit::fs::loop_device(1 << 20, 512) else { return };
        let device = other.path().to_owned();
        let file = backing(&device).unwrap();
        for file in [None, Some("/gone/disk.raw".to_owned())] {
            drop(Attached { device: device.clone(), file });
            assert!(backing(&device).is_some());
        }
        // A second one over the same file.
        let line = Line::new(need("losetup").unwrap()).args(["--find", "--show"]).arg(other.file());
        let own = PathBuf::from(line.run(&CancelToken::default()).unwrap().stdout.trim());
        drop(Attached { device: own.clone(), file: Some(file.clone()) });
        assert_ne!(backing(&own), Some(file));
    }
}
