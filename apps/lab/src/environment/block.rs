//! Describes block devices, and reads their counters, from /sys.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vdkit_storage::mounts;

use crate::error::{Context, Result};
use crate::model::PlaceInfo;

/// Largest depth to which devices below devices are followed.
const DEPTH: usize = 8;

fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// Describes a folder's file system and the device below it.
pub fn folder(path: &Path) -> Result<PlaceInfo> {
    let found = rustix::fs::statvfs(path).with_context(|| path.display().to_string())?;
    let all = mounts::all();
    let mount = mounts::of(&all, path);
    let number = fs::metadata(path).with_context(|| path.display().to_string())?.dev();
    let mut info = match mount {
        // A file system without a device, or with several (btrfs), has an artificial device number.
        Some(mount) if rustix::fs::major(number) == 0 => {
            match fs::metadata(&mount.source).map(|found| found.rdev()) {
                Ok(number) if mount.source.starts_with("/dev/") => {
                    device(number, Path::new(&mount.source))
                }
                _ => PlaceInfo::default(),
            }
        }
        _ => device(number, Path::new(mount.map_or("", |mount| &mount.source))),
    };
    let kind = mount.map_or("unknown", |mount| mount.kind.as_str());
    info.name = kind.strip_prefix("fuse.").unwrap_or(kind).to_owned();
    info.file_system = mount.map(|mount| mount.kind.clone());
    info.mount_options = mount.map(|mount| mount.options.join(","));
    info.total_bytes = found.f_blocks * found.f_frsize;
    info.free_bytes = found.f_bavail * found.f_frsize;
    Ok(info)
}

/// Describes a device. `path` is the name that the user gave.
pub fn device(number: u64, path: &Path) -> PlaceInfo {
    System::host().device(number, path)
}

/// The folders through which the kernel describes devices.
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

    /// The folder in /sys of a place's device.
    fn named(&self, place: &PlaceInfo) -> Option<PathBuf> {
        let node = Path::new(place.device.as_deref()?).file_name()?;
        fs::canonicalize(self.sys.join("class/block").join(node)).ok()
    }

    fn identity(&self, place: &PlaceInfo) -> Option<String> {
        let folder = self.named(place)?;
        let found = identity_of(&folder)?;
        let all = fs::read_dir(self.sys.join("class/block")).ok()?.flatten();
        let mut others = all
            .filter_map(|entry| fs::canonicalize(entry.path()).ok())
            .filter(|one| *one != folder);
        let shared = others.any(|one| identity_of(&one).as_ref() == Some(&found));
        (!shared).then_some(found)
    }

    fn counts(&self, place: &PlaceInfo) -> Option<Counts> {
        let folder = self.named(place)?;
        let flushes = self.counts_flushes(&folder, 0);
        // Field 16 counts flushes, since Linux 5.5.
        Some(Counts {
            reads: counter(&folder, 0)?,
            flushes: flushes.and_then(|disk| counter(&disk, 15)),
        })
    }

    /// The disk whose counter has the flushes of a device. The kernel counts them for whole disks
    /// only, and only for those with a queue of requests (folder `mq`). A volume over one such disk
    /// passes its flushes on to it; over several, no counter has all of them and nothing else.
    fn counts_flushes(&self, folder: &Path, depth: usize) -> Option<PathBuf> {
        if folder.join("partition").exists() {
            return self.counts_flushes(folder.parent()?, depth);
        }
        if folder.join("mq").exists() {
            return Some(folder.to_owned());
        }
        let mut slaves = fs::read_dir(folder.join("slaves")).ok()?.flatten();
        let (only, more) = (slaves.next()?, slaves.next());
        if depth >= DEPTH || more.is_some() {
            return None;
        }
        self.counts_flushes(&fs::canonicalize(only.path()).ok()?, depth + 1)
    }

    fn device(&self, number: u64, path: &Path) -> PlaceInfo {
        let Some(folder) = self.folder_of(number) else { return PlaceInfo::default() };
        // A partition's queue is the whole disk's queue.
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

    /// The device's kind, as one word and as a description.
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

    /// The name of a ZFS volume: the name that the user gave, or the one in /dev/zvol that links to
    /// it.
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

    /// The device and the devices below it, from top to bottom.
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

/// Describes a device of the device mapper. The text before the first hyphen of its uuid names the
/// creator (the kernel's Documentation/ABI/testing/sysfs-block-dm).
fn mapped(node: &str, name: &str, uuid: &str) -> (&'static str, String) {
    match uuid.split('-').next() {
        Some("LVM") => ("lvm", format!("{node}: LVM volume {}", volume(name))),
        Some("CRYPT") => ("crypt", format!("{node}: encrypted volume {name}")),
        Some("mpath") => ("multipath", format!("{node}: multipath {name}")),
        _ => ("dm", format!("{node}: device mapper {name}")),
    }
}

/// Converts an LVM volume's device mapper name into the name that LVM's tools use. In a device
/// mapper name a hyphen separates group and volume, and a hyphen within either is doubled (lvm(8),
/// "VALID NAMES").
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

/// Counters of a device since boot (the kernel's Documentation/block/stat.rst).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of completed reads.
    pub reads: u64,
    /// Number of completed flushes; none if the kernel does not count them.
    pub flushes: Option<u64>,
}

impl Counts {
    /// The counters of a place's device, if it has any.
    pub fn of(place: &PlaceInfo) -> Option<Self> {
        System::host().counts(place)
    }
}

/// A field of a device's counters, from 0.
fn counter(folder: &Path, field: usize) -> Option<u64> {
    text(&folder.join("stat"))?.split_whitespace().nth(field)?.parse().ok()
}

/// What identifies a place's device after a restart, when it may have another name: the identifier
/// that its layer gives it. None if the kernel knows none, or if another device has the same one: some
/// hypervisors give all disks one serial number.
pub fn identity(place: &PlaceInfo) -> Option<String> {
    System::host().identity(place)
}

/// Files with an identifier: of the device mapper, of software RAID, of NVMe, of SCSI, of virtio.
const IDENTITIES: [&str; 7] =
    ["dm/uuid", "md/uuid", "wwid", "device/wwid", "serial", "device/serial", "loop/backing_file"];

fn identity_of(folder: &Path) -> Option<String> {
    let Some(partition) = text(&folder.join("partition")) else {
        let known = |name: &&str| Some(format!("{name} {}", text(&folder.join(name))?));
        return IDENTITIES.iter().find_map(known);
    };
    if let Some(disk) = folder.parent().and_then(identity_of) {
        return Some(format!("{disk}, partition {partition}"));
    }
    // Of a disk without an identifier, such as a guest's. Since Linux 6.4.
    let event = text(&folder.join("uevent"))?;
    event.lines().find(|line| line.starts_with("PARTUUID=")).map(str::to_owned)
}

#[cfg(test)]
mod tests;
