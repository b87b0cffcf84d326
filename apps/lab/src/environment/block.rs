//! Block devices, from /sys: what one is, and what it counts.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Context, Result};

use super::mounts;
use crate::model::{PlaceInfo, PlaceKind};

/// Devices beneath devices are followed so far.
const DEPTH: usize = 8;

fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// What is known of a folder's file system and of the device beneath.
///
/// # Errors
/// The folder cannot be looked at.
pub fn folder(path: &Path) -> Result<PlaceInfo> {
    let found = rustix::fs::statvfs(path).with_context(|| path.display().to_string())?;
    let text = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let all = mounts::parse(&text);
    let mount = mounts::of(&all, path);
    let number = fs::metadata(path).with_context(|| path.display().to_string())?.dev();
    let mut info = match mount {
        // A file system without a device (or with several, as btrfs) has a made-up number.
        Some(mount) if rustix::fs::major(number) == 0 => {
            match fs::metadata(&mount.source).map(|found| found.rdev()) {
                Ok(device) if mount.source.starts_with("/dev/") => {
                    device_of(device, Path::new(&mount.source))
                }
                _ => PlaceInfo::default(),
            }
        }
        _ => device_of(number, Path::new(mount.map_or("", |mount| &mount.source))),
    };
    let kind = mount.map_or("unknown", |mount| mount.kind.as_str());
    info.name = kind.strip_prefix("fuse.").unwrap_or(kind).to_owned();
    info.kind = PlaceKind::Directory;
    info.file_system = mount.map(|mount| mount.kind.clone());
    info.mount_options = mount.map(|mount| mount.options.clone());
    info.total_bytes = found.f_blocks * found.f_frsize;
    info.free_bytes = found.f_bavail * found.f_frsize;
    Ok(info)
}

/// What is known of a device. `path` is how the user named it.
pub fn device(number: u64, path: &Path) -> PlaceInfo {
    PlaceInfo { kind: PlaceKind::Device, ..device_of(number, path) }
}

fn device_of(number: u64, path: &Path) -> PlaceInfo {
    System::host().device(number, path)
}

/// Where the kernel tells of devices.
struct System {
    sys: PathBuf,
    dev: PathBuf,
}

impl System {
    fn host() -> Self {
        Self { sys: "/sys".into(), dev: "/dev".into() }
    }

    /// The device's folder in /sys.
    fn folder_of(&self, number: u64) -> Option<PathBuf> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        fs::canonicalize(self.sys.join(format!("dev/block/{major}:{minor}"))).ok()
    }

    fn device(&self, number: u64, path: &Path) -> PlaceInfo {
        let Some(folder) = self.folder_of(number) else { return PlaceInfo::default() };
        // A partition's queue is that of the whole disk.
        let whole = if folder.join("partition").exists() { folder.parent() } else { None };
        let queue = whole.unwrap_or(&folder).join("queue");
        let active = |text: String| {
            let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
            chosen.map_or(text.clone(), |(chosen, _)| chosen.to_owned())
        };
        PlaceInfo {
            name: self.kind(&folder, path).0.to_owned(),
            device: Some(format!("/dev/{}", node(&folder))),
            beneath: self.beneath(&folder, path, 0),
            rotational: text(&queue.join("rotational")).map(|text| text == "1"),
            scheduler: text(&queue.join("scheduler")).map(active),
            write_cache: text(&queue.join("write_cache")),
            ..PlaceInfo::default()
        }
    }

    /// What a device is, in a word and at length.
    fn kind(&self, folder: &Path, path: &Path) -> (&'static str, String) {
        let node = node(folder);
        if folder.join("partition").exists() {
            return ("partition", format!("partition {node}"));
        }
        if let Some(file) = text(&folder.join("loop/backing_file")) {
            return ("loop", format!("{node}: loop device over {file}"));
        }
        if let Some(name) = text(&folder.join("dm/name")) {
            return mapped(&node, &name, &text(&folder.join("dm/uuid")).unwrap_or_default());
        }
        if node.starts_with("zd") {
            let name = self.zvol(&node, path).unwrap_or_default();
            return ("zvol", format!("{node}: ZFS volume {name}").trim_end().to_owned());
        }
        if folder.join("md/level").exists() {
            let level = text(&folder.join("md/level")).unwrap_or_default();
            return ("md", format!("{node}: software RAID {level}"));
        }
        let model = text(&folder.join("device/model")).unwrap_or_default();
        let word = match &node {
            name if name.starts_with("nvme") => "nvme",
            name if name.starts_with("vd") => "virtio-disk",
            name if name.starts_with("sd") => "disk",
            name if name.starts_with("nbd") => "nbd",
            name if name.starts_with("zram") => "zram",
            name if name.starts_with("ram") => "ramdisk",
            _ => "device",
        };
        (word, format!("{node}: {word} {model}").trim_end().to_owned())
    }

    /// The name of a ZFS volume: that by which the user named it, else the one in /dev/zvol whose
    /// link leads to it.
    fn zvol(&self, node: &str, path: &Path) -> Option<String> {
        let volumes = self.dev.join("zvol");
        if let Ok(name) = path.strip_prefix(&volumes) {
            return Some(name.display().to_string());
        }
        let mut folders = vec![(volumes.clone(), 0)];
        while let Some((folder, depth)) = folders.pop() {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                let link = fs::read_link(&path).ok();
                if link.is_some_and(|to| to.file_name().is_some_and(|name| name == node)) {
                    return Some(path.strip_prefix(&volumes).ok()?.display().to_string());
                }
                if depth < DEPTH && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push((path, depth + 1));
                }
            }
        }
        None
    }

    /// The device and what it stands on, from top to bottom.
    fn beneath(&self, folder: &Path, path: &Path, depth: usize) -> Vec<String> {
        let mut all = vec![self.kind(folder, path).1];
        if depth >= DEPTH {
            return all;
        }
        if folder.join("partition").exists() {
            if let Some(whole) = folder.parent() {
                all.extend(self.beneath(whole, Path::new(""), depth + 1));
            }
            return all;
        }
        for entry in fs::read_dir(folder.join("slaves")).into_iter().flatten().flatten() {
            if let Ok(slave) = fs::canonicalize(entry.path()) {
                all.extend(self.beneath(&slave, Path::new(""), depth + 1));
            }
        }
        if let Some(file) = text(&folder.join("loop/backing_file"))
            && let Ok(found) = fs::metadata(&file)
            && let Some(below) = self.folder_of(found.dev())
        {
            all.extend(self.beneath(&below, Path::new(""), depth + 1));
        }
        all
    }
}

/// The kernel's name of a device.
fn node(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// What a device of the device mapper is: who made it stands before the first hyphen of its uuid
/// (the kernel's Documentation/ABI/testing/sysfs-block-dm).
fn mapped(node: &str, name: &str, uuid: &str) -> (&'static str, String) {
    match uuid.split('-').next() {
        Some("LVM") => ("lvm", format!("{node}: LVM volume {}", volume(name))),
        Some("CRYPT") => ("crypt", format!("{node}: encrypted volume {name}")),
        Some("mpath") => ("multipath", format!("{node}: multipath {name}")),
        _ => ("dm", format!("{node}: device mapper {name}")),
    }
}

/// An LVM volume's name as its tools write it: in the device mapper's a hyphen parts group and
/// volume, and one that belongs to a name is doubled (lvm(8), "VALID NAMES").
fn volume(name: &str) -> String {
    let mut plain = String::new();
    let mut letters = name.chars().peekable();
    while let Some(c) = letters.next() {
        match c {
            '-' if letters.next_if_eq(&'-').is_some() => plain.push('-'),
            '-' => plain.push('/'),
            c => plain.push(c),
        }
    }
    plain
}

/// What a device has counted since the system started (the kernel's Documentation/block/stat.rst).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads that it has completed.
    pub reads: u64,
    /// Flushes that it has completed.
    pub flushes: u64,
}

impl Counts {
    /// Of a place's device, where it has one that counts.
    pub fn of(place: &PlaceInfo) -> Option<Self> {
        let node = Path::new(place.device.as_deref()?).file_name()?.to_str()?.to_owned();
        Self::parse(&text(&Path::new("/sys/class/block").join(node).join("stat"))?)
    }

    fn parse(text: &str) -> Option<Self> {
        let numbers: Vec<u64> = text.split_whitespace().map_while(|n| n.parse().ok()).collect();
        // Field 16 counts flushes, since Linux 5.5.
        Some(Self { reads: *numbers.first()?, flushes: *numbers.get(15)? })
    }
}

#[cfg(test)]
mod tests;
