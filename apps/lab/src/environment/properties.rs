//! Reads settings of file systems and volumes that affect images.

use std::path::Path;

use vdkit_block::CancelToken;
use vdkit_storage::mounts;

use crate::model::{PlaceInfo, PlaceKind};
use crate::peers;
use crate::place::zfs::is_data_set;
use crate::process::Line;

/// ZFS properties that affect images (zfsprops(7)): record size, compression, sync, caching.
const OF_ZFS: &[&str] = &[
    "recordsize",
    "volblocksize",
    "compression",
    "sync",
    "logbias",
    "primarycache",
    "checksum",
    "dedup",
];

/// The settings of a place as names and values, for people.
pub fn of(place: &PlaceInfo, cancel: &CancelToken) -> Vec<(String, String)> {
    let mut all = Vec::new();
    if place.kind == PlaceKind::Directory
        && let Ok(found) = rustix::fs::statvfs(Path::new(&place.path))
    {
        all.push(("block size".to_owned(), format!("{} bytes", found.f_bsize)));
    }
    if let Some(name) = zfs_name(place) {
        all.extend(zfs(&name, cancel).unwrap_or_default());
    }
    all
}

/// The data set or volume of a place on ZFS.
fn zfs_name(place: &PlaceInfo) -> Option<String> {
    if place.kind == PlaceKind::Device {
        let (_, name) = place.beneath.first()?.split_once("ZFS volume ")?;
        return Some(name.to_owned());
    }
    if !is_data_set(place) {
        return None;
    }
    let path = Path::new(&place.path).canonicalize().ok()?;
    Some(mounts::of(&mounts::all(), &path)?.source.clone())
}

fn zfs(name: &str, cancel: &CancelToken) -> Option<Vec<(String, String)>> {
    let program = peers::find("zfs")?;
    let line = Line::new(program).args(["get", "-H", "-o", "property,value", "all", name]);
    Some(parse_zfs(&line.run_any(cancel).ok()?.stdout))
}

/// Parses lines of `zfs get -H`: property, tab, value. `-` stands for no value.
fn parse_zfs(text: &str) -> Vec<(String, String)> {
    let all: Vec<(&str, &str)> = text.lines().filter_map(|line| line.split_once('\t')).collect();
    let of = |name: &&str| {
        let (_, value) = all.iter().find(|(known, _)| known == name)?;
        let value = value.trim();
        (value != "-").then(|| ((*name).to_owned(), value.to_owned()))
    };
    OF_ZFS.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_matters_of_zfs_is_told() {
        let text = "type\tfilesystem\nrecordsize\t128K\nvolblocksize\t-\ncompression\tlz4\n\
                    sync\tdisabled\nquota\tnone\n";
        let found = parse_zfs(text);
        let found: Vec<(&str, &str)> = found.iter().map(|(n, v)| (&**n, &**v)).collect();
        let wanted = [("recordsize", "128K"), ("compression", "lz4"), ("sync", "disabled")];
        assert_eq!(found, wanted);
        assert_eq!(parse_zfs("cannot open 'x': dataset does not exist\n"), []);
    }

    #[test]
    fn volumes_are_known_by_what_they_are() {
        let mut place = PlaceInfo {
            kind: PlaceKind::Device,
            beneath: vec!["zd0: ZFS volume pool/vm-1".to_owned()],
            ..PlaceInfo::default()
        };
        assert_eq!(zfs_name(&place).as_deref(), Some("pool/vm-1"));
        place.beneath = vec!["vda: virtio-disk".to_owned()];
        assert_eq!(zfs_name(&place), None);
    }

    #[test]
    fn folders_have_a_block_size() {
        let path = std::env::temp_dir().display().to_string();
        let place = PlaceInfo { path, ..PlaceInfo::default() };
        let found = of(&place, &CancelToken::default());
        assert!(found[0].0 == "block size" && found[0].1.ends_with(" bytes"), "{found:?}");
    }
}
