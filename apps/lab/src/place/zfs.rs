//! Data sets and volumes of our own, beneath the data set that a place is: of another record size, and
//! what a guest's disk is on many hosts that have ZFS.
//!
//! Both hang beneath one data set that has the name of the round's folder and is mounted in it, so that
//! whoever removes the folder destroys all of it ([`release`]).

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Context, Result};
use vdkit_block::CancelToken;

use crate::engine::Bench;
use crate::environment::mounts::{self, Mount};
use crate::model::PlaceInfo;
use crate::peers::{find, need, skip};
use crate::process::Line;

/// Where our data set is mounted in the round's folder.
const MOUNTED: &str = "zfs";
/// How long udev may take to make a volume's device.
const DEVICE: Duration = Duration::from_secs(20);
/// How long a data set may be busy after its last user has ended.
const DESTROY: Duration = Duration::from_secs(20);

/// Whether a kind of file system, as the kernel names it, is ZFS: OpenZFS's, or that of zfs-fuse.
pub fn is_zfs(kind: &str) -> bool {
    kind == "zfs" || kind == "fuse.zfs"
}

/// Whether a place is a data set.
pub fn is_data_set(place: &PlaceInfo) -> bool {
    place.file_system.as_deref().is_some_and(is_zfs)
}

fn all_mounts() -> Vec<Mount> {
    mounts::parse(&std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

/// The record size that the cell asks for; nothing where it takes that of the place.
fn record<'a>(bench: &'a Bench<'_>) -> Option<&'a str> {
    bench.axis("record").filter(|record| *record != "inherited")
}

/// Where images of this round are files: in our folder, or in a data set of its own in it.
///
/// # Errors
/// [`crate::peers::Skip`] where there is no such data set.
pub fn folder(bench: &mut Bench<'_>) -> Result<PathBuf> {
    match record(bench).map(str::to_owned) {
        None => Ok(bench.folder.clone()),
        Some(record) => Ok(own(bench, Some(&record))?.1),
    }
}

/// The data set of this round, which is made where it is not there: its name, and where it is.
fn own(bench: &mut Bench<'_>, record: Option<&str>) -> Result<(String, PathBuf)> {
    let at = bench.folder.join(MOUNTED);
    let Some(name) = own_name(&all_mounts(), &bench.folder) else {
        return skip("this place is no data set of ZFS");
    };
    if !at.exists() {
        let mut line = Line::new(need("zfs")?).arg("create");
        line = line.arg("-o").arg(format!("mountpoint={}", at.display()));
        if let Some(record) = record {
            line = line.arg("-o").arg(format!("recordsize={record}"));
        }
        bench.run(&line.arg(&name))?;
    }
    Ok((name, at))
}

/// A new volume of `bytes` bytes: its device.
///
/// # Errors
/// [`crate::peers::Skip`] where this ZFS has no volumes.
pub fn volume(bench: &mut Bench<'_>, bytes: u64) -> Result<PathBuf> {
    let record = record(bench).map(str::to_owned);
    let name = format!("{}/disk", own(bench, None)?.0);
    let device = Path::new("/dev/zvol").join(&name);
    let zfs = need("zfs")?;
    if device.exists() {
        bench.run(&Line::new(&zfs).arg("destroy").arg(&name))?;
    }
    let mut line = Line::new(&zfs).arg("create").arg("-V").arg(bytes.to_string());
    if let Some(record) = &record {
        line = line.arg("-b").arg(record);
    }
    let line = line.arg(&name);
    bench.commands.push(line.text());
    let ended = line.run_any(&bench.cancel)?;
    if !ended.status.success() {
        // (The same words in each round, so without the volume's name.)
        let told = ended.stderr.trim().replace(&name, "the volume");
        return skip(format!("ZFS gives no volume here (zfs create -V): {told}"));
    }
    let until = std::time::Instant::now() + DEVICE;
    while !device.exists() {
        bench.cancel.check()?;
        if std::time::Instant::now() > until {
            return skip(format!("{}: no device for the volume was made", device.display()));
        }
        // udev makes the link; it tells nobody.
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(device.canonicalize().unwrap_or(device))
}

/// Destroys the data set of a folder of ours, with all volumes beneath.
///
/// # Errors
/// ZFS refuses for longer than a server needs to be gone.
pub fn release(folder: &Path) -> Result<()> {
    let Some(name) = own_name(&all_mounts(), folder) else { return Ok(()) };
    if !folder.join(MOUNTED).exists() {
        return Ok(());
    }
    let zfs = find("zfs").with_context(|| format!("zfs, to destroy the data set {name}"))?;
    let until = std::time::Instant::now() + DESTROY;
    loop {
        let line = Line::new(&zfs).args(["destroy", "-r"]).arg(&name);
        let Err(error) = line.run(&CancelToken::default()) else { return Ok(()) };
        // (It may have been unmounted by then, or never have been made.)
        let list = Line::new(&zfs).args(["list", "-H", "-o", "name"]).arg(&name);
        if !list.run_any(&CancelToken::default())?.status.success() {
            return Ok(());
        }
        if std::time::Instant::now() > until {
            return Err(error);
        }
        // Busy until the kernel has given back the last file; nobody is told of that.
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The data set of a folder of ours: beneath the one that the folder is in, with the folder's name, so
/// it is none of others.
fn own_name(mounts: &[Mount], folder: &Path) -> Option<String> {
    let own = folder.file_name()?.to_str()?;
    let mount = mounts::of(mounts, folder).filter(|mount| is_zfs(&mount.kind))?;
    Some(format!("{}/{own}", mount.source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_set_of_a_folder_is_beneath_the_one_that_it_is_in() {
        let mount = |point: &str, kind: &str, source: &str| Mount {
            device: (0, 50),
            point: point.into(),
            kind: kind.to_owned(),
            source: source.to_owned(),
            options: String::new(),
        };
        let folder = Path::new("/tank/vm/vdkit-lab-1");
        let found = |kind: &str| {
            let root = mount("/", "ext4", "/dev/vda");
            let set = mount("/tank/vm", kind, "tank/vm");
            let own = mount("/tank/vm/vdkit-lab-1/zfs", kind, "tank/vm/vdkit-lab-1");
            own_name(&[root, set, own], folder)
        };
        assert_eq!(found("zfs").as_deref(), Some("tank/vm/vdkit-lab-1"));
        assert_eq!(found("fuse.zfs").as_deref(), Some("tank/vm/vdkit-lab-1"));
        assert_eq!(found("ext4"), None);
    }
}
