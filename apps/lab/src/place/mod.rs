//! Places for images: folders, and devices that the user has released for overwriting.
//!
//! The lab changes nothing of the user's. In a folder it creates everything below one new folder,
//! `vdkit-lab-XXXX`, which it removes at the end, also after an interrupt or a failure. It uses a
//! device only if nothing else uses the device and the user has confirmed its name.

pub mod attach;
pub mod device;
pub mod zfs;

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Context, Result, bail};
use rustix::process::geteuid;
use vdkit_block::{HostOffset, Storage};
use vdkit_storage::{FileOptions, FileStorage};

use crate::cells::Rng;
use crate::environment::block;
use crate::model::{PlaceInfo, PlaceKind};

/// Name prefix of the lab's folders.
pub const PREFIX: &str = "vdkit-lab-";
/// A file that marks a folder as the lab's.
const MARKER: &str = ".vdkit-lab";

#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    pub info: PlaceInfo,
    path: PathBuf,
}

impl Place {
    /// Uses an existing folder as a place.
    ///
    /// # Errors
    /// The path is no folder, or is not writable.
    pub fn directory(path: &Path) -> Result<Self> {
        let full = path.canonicalize().with_context(|| path.display().to_string())?;
        if !full.is_dir() {
            bail!("{}: not a folder; a block device is named with --device", path.display());
        }
        let mut info = block::folder(&full)?;
        info.path = path.display().to_string();
        Ok(Self { info, path: full })
    }

    /// Uses a device as a place. [`device::check_unused`] and [`device::confirm`] decide whether it
    /// may be used.
    pub fn on_device(path: &Path) -> Result<Self> {
        let full = path.canonicalize().with_context(|| path.display().to_string())?;
        // Keep the name that the user gave: a zvol's name identifies it.
        let mut info = device::describe(path)?;
        info.path = path.display().to_string();
        Ok(Self { info, path: full })
    }

    /// A folder of the lab that represents another place.
    pub fn scratch(path: &Path, like: &PlaceInfo) -> Self {
        let info = PlaceInfo { kind: PlaceKind::Directory, ..like.clone() };
        Self { info, path: path.to_owned() }
    }

    /// The folder or device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn device(&self) -> Option<&Path> {
        (self.info.kind == PlaceKind::Device).then_some(&self.path)
    }
}

/// Free bytes of a file system.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let found = rustix::fs::statvfs(path).with_context(|| path.display().to_string())?;
    Ok(found.f_bavail * found.f_frsize)
}

/// Gives each place a unique name: its kind, and its path if two places would have the same name.
pub fn name_all(places: &mut [Place]) -> Result<()> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for place in places.iter() {
        *counts.entry(place.info.name.clone()).or_default() += 1;
    }
    for place in places.iter_mut().filter(|place| counts[&place.info.name] > 1) {
        let path = place.info.path.trim_start_matches('/').replace(['/', '='], "-");
        place.info.name = format!("{}:{path}", place.info.name);
    }
    let mut names: Vec<&str> = places.iter().map(|place| place.info.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!("{}: named twice", pair[0]);
    }
    Ok(())
}

fn parent_of(place: &Place) -> PathBuf {
    match place.device() {
        Some(_) => std::env::temp_dir(),
        None => place.path.clone(),
    }
}

/// Creates a folder below a place, or in the system's temporary folder for a device.
pub fn new_folder(place: &Place, rng: &mut Rng) -> Result<PathBuf> {
    let path = parent_of(place).join(format!("{PREFIX}{:08x}", rng.next_u64() as u32));
    let made = DirBuilder::new().mode(0o700).create(&path);
    made.with_context(|| format!("{}: cannot make a folder for images", path.display()))?;
    let marked = fs::write(path.join(MARKER), "made by 'vdkit lab run', which removes it\n");
    if let Err(error) = marked {
        let _ = fs::remove_dir_all(&path);
        return Err(error).with_context(|| path.display().to_string());
    }
    Ok(path)
}

/// Content of the marker in a folder of a trial.
const TRIAL: &[u8] = b"trial\n";

/// Creates a folder for a trial, which no results file records. The lock is held while the folder is
/// in use: [`remove_dead_trials`] removes the folder of a process that was killed.
pub fn trial_folder(place: &Place, rng: &mut Rng) -> Result<(PathBuf, Option<FileStorage>)> {
    let folder = new_folder(place, rng)?;
    let lock = FileStorage::open(folder.join(MARKER), &FileOptions::read_write()).ok();
    // Marked only once it is locked. Without locks, nobody can tell whether it is in use.
    if let Some(lock) = &lock {
        lock.write_at(TRIAL, HostOffset(0))?;
    }
    Ok((folder, lock))
}

/// Removes this user's folders of trials that no process uses any more.
pub fn remove_dead_trials(place: &Place) {
    let parent = parent_of(place);
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let (folder, marker) = (entry.path(), entry.path().join(MARKER));
        let own = entry.metadata().is_ok_and(|found| found.uid() == geteuid().as_raw());
        let named = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if own && named && fs::read(&marker).is_ok_and(|text| text.starts_with(TRIAL)) {
            // A process that uses the folder holds this lock.
            if let Ok(_lock) = FileStorage::open(&marker, &FileOptions::read_write()) {
                // What cannot be removed now may be removed by the next run.
                let _ = remove_folder(&folder);
            }
        }
    }
}

/// Unmounts and detaches everything in a folder of the lab, and removes the folder.
///
/// # Errors
/// Something in the folder is in use, or the folder is not the lab's.
pub fn remove_folder(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if !name.starts_with(PREFIX) || !path.join(MARKER).is_file() {
        bail!("{}: not a folder of the lab; nothing was removed", path.display());
    }
    zfs::release(path)?;
    attach::release_all(path)?;
    for _ in 0..50 {
        match fs::remove_dir_all(path) {
            // A server that is shutting down may still create a file.
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {
                std::thread::sleep(Duration::from_millis(100));
            }
            other => return other.with_context(|| path.display().to_string()),
        }
    }
    bail!("{}: somebody makes files in it; it was not removed", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_new_and_go_with_all_that_is_in_them() {
        let parent = tempfile::tempdir().unwrap();
        let place = Place::directory(parent.path()).unwrap();
        let mut rng = Rng::new(1);
        let one = new_folder(&place, &mut rng).unwrap();
        let two = new_folder(&place, &mut rng).unwrap();
        assert_ne!(one, two);
        fs::write(one.join("disk.raw"), "x").unwrap();
        remove_folder(&one).unwrap();
        assert!(!one.exists() && two.exists());
        // Removing it a second time does nothing.
        remove_folder(&one).unwrap();
    }

    /// A process that was killed during a trial once left up to 64 MiB behind.
    #[test]
    fn a_trial_of_a_killed_process_is_removed_by_the_next_run() {
        let parent = tempfile::tempdir().unwrap();
        let place = Place::directory(parent.path()).unwrap();
        let mut rng = Rng::new(1);
        let run = new_folder(&place, &mut rng).unwrap();
        let (trial, lock) = trial_folder(&place, &mut rng).unwrap();
        fs::write(trial.join("disk.raw"), "x").unwrap();
        remove_dead_trials(&place);
        assert!(run.exists() && trial.exists(), "it is in use");
        // The kernel releases the lock of a killed process.
        drop(lock);
        remove_dead_trials(&place);
        assert!(run.exists() && !trial.exists());
    }

    #[test]
    fn folders_of_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        for name in ["precious", "vdkit-lab-precious"] {
            let path = parent.path().join(name);
            fs::create_dir(&path).unwrap();
            assert!(remove_folder(&path).is_err());
            assert!(path.exists());
        }
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(Place::directory(&file).unwrap_err().to_string().contains("--device"));
        assert!(Place::directory(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn places_of_one_kind_are_told_apart_by_their_paths() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut places =
            vec![Place::directory(a.path()).unwrap(), Place::directory(b.path()).unwrap()];
        let plain = places[0].info.name.clone();
        name_all(&mut places).unwrap();
        assert!(places[0].info.name.starts_with(&format!("{plain}:")), "{}", places[0].info.name);
        assert_ne!(places[0].info.name, places[1].info.name);
        let mut twice = vec![places[0].clone(), places[0].clone()];
        assert!(name_all(&mut twice).unwrap_err().to_string().contains("named twice"));
    }
}
