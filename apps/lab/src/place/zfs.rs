//! The lab's own data sets and volumes below the data set of a place: data sets for record sizes,
//! and volumes because many hosts with ZFS use one as a guest's disk.
//!
//! Both are below one data set that is named after the round's folder and mounted in it. Removing
//! the folder destroys all of them ([`release`]).

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Context, Result};
use vdkit_block::CancelToken;
use vdkit_storage::mounts::{self, Mount};

use crate::engine::Bench;
use crate::model::PlaceInfo;
use crate::peers::{find, need, skip};
use crate::process::Line;

/// Mount point of the lab's data set in the round's folder.
const MOUNTED: &str = "zfs";
/// Longest time until udev has created a volume's device.
const DEVICE: Duration = Duration::from_secs(20);
/// Longest time for which a data set may stay busy after its last user has ended.
const DESTROY: Duration = Duration::from_secs(20);

/// Whether a file system type is ZFS: OpenZFS or zfs-fuse.
pub fn is_zfs(kind: &str) -> bool {
    kind == "zfs" || kind == "fuse.zfs"
}

/// Whether a place is a data set.
pub fn is_data_set(place: &PlaceInfo) -> bool {
    place.file_system.as_deref().is_some_and(is_zfs)
}

/// The record size of the cell; none if it uses the place's.
fn record<'a>(bench: &'a Bench<'_>) -> Option<&'a str> {
    bench.axis("record").filter(|record| *record != "inherited")
}

/// The folder for this round's image files: the lab's folder, or a data set mounted in it.
///
/// # Errors
/// [`crate::peers::Skip`] if the data set cannot be created.
pub fn folder(bench: &mut Bench<'_>) -> Result<PathBuf> {
    match record(bench).map(str::to_owned) {
        None => Ok(bench.folder.clone()),
        Some(record) => Ok(own(bench, Some(&record))?.1),
    }
}

/// The data set of this round, created if necessary. Returns its name and its mount point.
fn own(bench: &mut Bench<'_>, record: Option<&str>) -> Result<(String, PathBuf)> {
    let at = bench.folder.join(MOUNTED);
    let Some(name) = own_name(&mounts::all(), &bench.folder) else {
        return skip("this place is not a ZFS data set");
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

/// Creates a volume of `bytes` bytes and returns its device.
///
/// # Errors
/// [`crate::peers::Skip`] if this ZFS has no volumes.
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
        // Leave out the volume's name, so that the reason is the same in each round.
        let told = ended.stderr.trim().replace(&name, "the volume");
        return skip(format!("ZFS cannot create a volume here (zfs create -V): {told}"));
    }
    let until = std::time::Instant::now() + DEVICE;
    while !device.exists() {
        bench.cancel.check()?;
        if std::time::Instant::now() > until {
            return skip(format!("{}: no device for the volume was made", device.display()));
        }
        // udev creates the link and sends no notification.
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(device.canonicalize().unwrap_or(device))
}

/// Destroys the data set of a folder of the lab, with all volumes below it.
///
/// # Errors
/// ZFS refuses for longer than a server takes to end.
pub fn release(folder: &Path) -> Result<()> {
    let Some(name) = own_name(&mounts::all(), folder) else { return Ok(()) };
    if !folder.join(MOUNTED).exists() {
        return Ok(());
    }
    let zfs = find("zfs").with_context(|| format!("zfs, to destroy the data set {name}"))?;
    let until = std::time::Instant::now() + DESTROY;
    loop {
        let line = Line::new(&zfs).args(["destroy", "-r"]).arg(&name);
        let Err(error) = line.run(&CancelToken::default()) else { return Ok(()) };
        // The data set may be unmounted already, or may never have been created.
        let list = Line::new(&zfs).args(["list", "-H", "-o", "name"]).arg(&name);
        if !list.run_any(&CancelToken::default())?.status.success() {
            return Ok(());
        }
        if std::time::Instant::now() > until {
            return Err(error);
        }
        // The data set is busy until the kernel has released the last file, and no event reports
        // that.
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The data set of a folder of the lab. It is below the data set that contains the folder and has
/// the folder's name, so it cannot be anyone else's.
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
            options: Vec::new(),
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
