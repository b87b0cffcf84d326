//! Writes the commands and libvirt's element that set up the advised way.

use std::path::{Path, PathBuf};

use serde::Serialize;
use vdkit_libvirt::{CachePlace, DiskSource, LibvirtDisk, cache_for};

use crate::fit::layout_of;
use crate::front;
use crate::layout::{LAYOUTS, Layout, More};
use crate::lists::{distinct, grouped};
use crate::model::{Axes, Cell, PlaceInfo, PlaceKind, Run, value_of};
use crate::profile::{self, Kind};
use crate::words::{listed, quoted};

/// The cache mode if a run does not name one: QEMU's default.
const CACHE: &str = "writeback";
/// The server's socket and the mounted file. libvirt only accepts absolute paths.
const SOCKET: &str = "/run/vdkit-disk.sock";
const MOUNTED: &str = "/run/vdkit-disk.raw";

/// Commands to type, and the disk's element in a guest's definition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Setup {
    /// Commands in order. The user replaces the words in capitals.
    pub commands: Vec<String>,
    /// libvirt's `<disk>` element.
    #[serde(rename = "libvirt-xml", skip_serializing_if = "String::is_empty")]
    pub xml: String,
    /// Why this cache mode was chosen, if the run did not compare cache modes.
    #[serde(rename = "cache-mode", skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
}

/// The command that creates an image at `name`, which is already quoted. The user supplies the
/// name of a backing image.
fn create_command(layout: &Layout, name: &str) -> String {
    let options = match layout.options {
        "" => String::new(),
        options => format!(" -o {options}"),
    };
    let (base, size) = match layout.more {
        More::Backing => (" -b BASE -F qcow2", ""),
        _ => ("", " SIZE"),
    };
    format!("vdkit create -f {}{options}{base} {name}{size}", layout.format)
}

/// The command that creates a ZFS volume, or a data set with a chosen record size, mounted at `at`.
fn zfs_command(volume: bool, record: Option<&str>, at: &Path) -> Option<String> {
    match (volume, record) {
        (true, None) => Some("zfs create -V SIZE POOL/DISK".to_owned()),
        (true, Some(record)) => Some(format!("zfs create -V SIZE -b {record} POOL/DISK")),
        (false, Some(record)) => {
            let at = quoted(&format!("mountpoint={}", at.display()));
            Some(format!("zfs create -o recordsize={record} -o {at} POOL/DATASET"))
        }
        (false, None) => None,
    }
}

/// The folder of the disk, or its device. A record size needs a data set of its own, as in the run:
/// it does not apply to the files that a data set has already.
fn folder_of(place: Option<&PlaceInfo>, record: Option<&str>) -> PathBuf {
    let own = Path::new(place.map_or("DIR", |place| place.path.as_str()));
    if record.is_some() { own.join("DATASET") } else { own.to_owned() }
}

pub(super) fn setup(run: &Run, axes: &Axes) -> Setup {
    let value = |name: &str| value_of(axes, name);
    // A layout of a later version is taken for raw, which is the first.
    let layout = layout_of(axes).unwrap_or(&LAYOUTS[0]);
    let place = value("backend")
        .and_then(|name| run.environment.places.iter().find(|place| place.name == name));
    let volume = layout.more == More::Volume;
    let device = volume || place.is_some_and(|place| place.kind == PlaceKind::Device);
    let record = value("record").filter(|record| *record != "inherited");
    let folder = folder_of(place, record);
    let disk: PathBuf = match (volume, device) {
        (true, _) => "/dev/zvol/POOL/DISK".into(),
        (false, true) => folder.clone(),
        (false, false) => folder.join(format!("disk.{}", layout.format)),
    };
    let front = value("front").unwrap_or("");
    // The cache mode of a vdkit server: the one that was compared, or else the one that was used.
    let used_mode = front::find(front).map_or(CACHE, |front| front.default_cache());
    let cache = value("cache").unwrap_or(used_mode);
    let bus = ["ide", "scsi"].into_iter().find(|bus| front.contains(bus));

    let mut typed: Vec<String> = zfs_command(volume, record, &folder).into_iter().collect();
    let name = quoted(&disk.to_string_lossy());
    // A raw disk on a device is the device.
    if !(device && layout.format == "raw") {
        typed.push(create_command(layout, &name));
    }
    // No header tells that a disk is raw, and only a named format is written to.
    let named = if layout.format == "raw" { " -f raw" } else { "" };
    let (source, format) = if front.contains("vhost") {
        typed.push(format!("vdkit serve {name}{named} --vhost-user {SOCKET} --cache {cache}"));
        (DiskSource::VhostUser(SOCKET.into()), "raw")
    } else if front.contains("nbd") {
        typed.push(format!("vdkit serve {name}{named} --nbd unix:{SOCKET} --cache {cache}"));
        (DiskSource::Nbd(SOCKET.into(), String::new()), "raw")
    } else if front.contains("fuse") {
        typed.push(format!("vdkit mount {name} {MOUNTED}{named} --cache {cache}"));
        (DiskSource::File(MOUNTED.into()), "raw")
    } else if device {
        (DiskSource::Device(disk.clone()), layout.format)
    } else {
        (DiskSource::File(disk.clone()), layout.format)
    };
    // If the run did not compare cache modes, an image that QEMU opens itself gets the mode that
    // `doctor` advises.
    let opened =
        matches!(&source, DiskSource::File(path) | DiskSource::Device(path) if *path == disk);
    let (suited, because) = cache_for(cache_place(place));
    let compared = value("cache").is_some();
    let mode = if compared || !opened { cache } else { suited };
    let mut element = LibvirtDisk::new(source, format);
    element.cache = mode.to_owned();
    element.allocated = layout.is_reserved();
    if let Some(bus) = bus {
        element.bus = bus.to_owned();
    }
    let because = if opened { because } else { "the mode of this measurement" };
    let used = used(run);
    let cache = (!compared).then(|| {
        format!(
            "Cache mode {mode}: {because}. {used}. The plan cache-modes measures which mode is \
             fastest here."
        )
    });
    Setup { commands: typed, xml: element.xml(), cache }
}

/// Properties of a place that decide the cache mode.
fn cache_place(place: Option<&PlaceInfo>) -> CachePlace {
    match place.map(|place| (place.kind, place.file_system.as_deref().unwrap_or_default())) {
        Some((PlaceKind::Device, _)) => CachePlace::Device,
        Some((_, "tmpfs" | "ramfs")) => CachePlace::Memory,
        Some((_, "btrfs")) => CachePlace::Checksums,
        _ => CachePlace::Direct,
    }
}

/// The cache modes that the run used without comparing them.
fn used(run: &Run) -> String {
    let front = |cell: &Cell| cell.axis("front").unwrap_or_default().to_owned();
    let found = grouped(run.cells.iter().filter_map(|cell| Some((mode_of(cell)?, front(cell)))));
    let mut modes: Vec<(&str, Vec<String>)> =
        found.into_iter().map(|(mode, fronts)| (mode, distinct(fronts))).collect();
    // The mode of most fronts comes first. Among equals, QEMU's default comes first.
    modes.sort_by_key(|(mode, fronts)| (std::cmp::Reverse(fronts.len()), *mode != CACHE));
    match &modes[..] {
        [] => "No command of this run sets a cache mode".to_owned(),
        [(mode, _)] => format!("The whole run was measured with {mode}"),
        [(most, _), others @ ..] => {
            let other =
                |(mode, fronts): &(&str, Vec<String>)| format!("{mode} for {}", listed(fronts));
            let others: Vec<String> = others.iter().map(other).collect();
            format!("This run was measured with {most}, but with {}", others.join(", "))
        }
    }
}

/// The cache mode of the program that opened the image in this cell. None if no program kept the
/// image open, and for a cell without results.
fn mode_of(cell: &Cell) -> Option<&str> {
    let kind = profile::find(cell.axis("profile")?)?.kind;
    if cell.samples.is_empty() || matches!(kind, Kind::Convert | Kind::Open | Kind::Boot) {
        return None;
    }
    let front = front::find(cell.axis("front").unwrap_or("nbd"))?;
    Some(cell.axis("cache").unwrap_or(front.default_cache()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::axes_of as axes;
    use crate::model::tests::measured;

    fn commands(values: &[(&str, &str)]) -> Vec<String> {
        setup(&Run::default(), &axes(values)).commands
    }

    #[test]
    fn an_image_has_the_options_of_its_layout() {
        let mut run = Run::default();
        let path = "/srv/a b".into();
        run.environment.places.push(PlaceInfo {
            name: "ext4".into(),
            path,
            ..PlaceInfo::default()
        });
        let chosen = [("backend", "ext4"), ("layout", "qcow2-8k"), ("cache", "none")];
        let found = setup(&run, &axes(&chosen));
        let command = "vdkit create -f qcow2 -o cluster_size=8K '/srv/a b/disk.qcow2' SIZE";
        assert_eq!(found.commands, [command]);
        assert!(found.xml.contains("cache='none' io='threads' discard='unmap'"), "{}", found.xml);
        assert!(found.xml.contains("file='/srv/a b/disk.qcow2'"));
        // Preallocation as a part of the layout and as a separate axis.
        let full = ["vdkit create -f qcow2 -o preallocation=full DIR/disk.qcow2 SIZE"];
        assert_eq!(commands(&[("layout", "qcow2-full")]), full);
        assert_eq!(commands(&[("layout", "qcow2"), ("preallocation", "full")]), full);
        // The size of the clusters too, which was once left out.
        let extended = commands(&[("layout", "qcow2-ext")]);
        assert!(extended[0].contains("-o extended_l2=on,cluster_size=128K "), "{extended:?}");
        let overlay = commands(&[("layout", "qcow2-overlay")]);
        assert_eq!(overlay, ["vdkit create -f qcow2 -b BASE -F qcow2 DIR/disk.qcow2"]);
        // A layout of a later version.
        assert_eq!(commands(&[("layout", "new")]), ["vdkit create -f raw DIR/disk.raw SIZE"]);
    }

    #[test]
    fn servers_and_devices() {
        let mut run = Run::default();
        run.environment.places.push(PlaceInfo {
            name: "zvol".into(),
            path: "/dev/zvol/p/v".into(),
            kind: PlaceKind::Device,
            ..PlaceInfo::default()
        });
        let choose = |values: &[(&str, &str)]| setup(&run, &axes(values));
        let raw = choose(&[("backend", "zvol"), ("layout", "raw-sparse"), ("cache", "none")]);
        assert_eq!(raw.commands, [""; 0]);
        assert!(raw.xml.contains("type='block'") && raw.xml.contains("io='native'"));
        let nbd = choose(&[("layout", "qcow2"), ("front", "nbd"), ("cache", "writeback")]);
        assert!(nbd.commands[1].contains("--nbd unix:/run/vdkit-disk.sock --cache writeback"));
        assert!(nbd.xml.contains("protocol='nbd'"));
        let fuse = choose(&[("layout", "qcow2"), ("front", "fuse")]);
        assert!(fuse.commands[1].ends_with("/run/vdkit-disk.raw --cache writeback"), "{fuse:?}");
        assert!(fuse.xml.contains("<source file='/run/vdkit-disk.raw'/>"), "{}", fuse.xml);
        // A raw disk is written to only if its format is named.
        for front in ["nbd", "fuse", "vhost-user"] {
            let raw = choose(&[("layout", "raw"), ("front", front)]);
            assert!(raw.commands[1].contains(" -f raw "), "{raw:?}");
        }
        let guest = choose(&[("layout", "qcow2"), ("front", "guest-ide")]);
        assert!(guest.xml.contains("bus='ide'") && guest.commands[0].contains("DIR/disk.qcow2"));
    }

    #[test]
    fn volumes_and_record_sizes_of_zfs_are_made_by_zfs() {
        let choose = |values: &[(&str, &str)]| setup(&Run::default(), &axes(values));
        let volume = choose(&[("layout", "zvol"), ("record", "8K")]);
        assert_eq!(volume.commands, ["zfs create -V SIZE -b 8K POOL/DISK"]);
        assert!(volume.xml.contains("dev='/dev/zvol/POOL/DISK'"), "{}", volume.xml);
        let file = choose(&[("layout", "qcow2-8k"), ("record", "8K")]);
        assert_eq!(
            file.commands[0],
            "zfs create -o recordsize=8K -o mountpoint=DIR/DATASET POOL/DATASET"
        );
        assert!(file.commands[1].contains("cluster_size=8K"), "{file:?}");
        // The disk was once created in the old data set, which has another record size.
        assert!(file.commands[1].ends_with("DIR/DATASET/disk.qcow2 SIZE"), "{file:?}");
        assert!(file.xml.contains("file='DIR/DATASET/disk.qcow2'"), "{}", file.xml);
        let plain = choose(&[("layout", "qcow2"), ("record", "inherited")]);
        assert!(plain.commands[0].starts_with("vdkit create"), "{plain:?}");
    }

    #[test]
    fn the_cache_mode_is_the_one_that_doctor_advises() {
        let mut run = Run::default();
        for (name, file_system) in [("ext4", "ext4"), ("memory", "tmpfs")] {
            run.environment.places.push(PlaceInfo {
                name: name.into(),
                file_system: Some(file_system.into()),
                ..PlaceInfo::default()
            });
        }
        let mut choose = |load: &str, values: &[(&str, &str)]| {
            run.cells = vec![measured(&[("profile", load)], "iops", &[1.0])];
            setup(&run, &axes(values))
        };
        let (advised, because) = cache_for(CachePlace::Direct);
        let served = choose("database", &[("backend", "ext4"), ("layout", "qcow2")]);
        assert!(served.xml.contains(&format!("cache='{advised}'")), "{}", served.xml);
        let told = served.cache.unwrap();
        assert!(told.contains(because) && told.contains("measured with writeback"), "{told}");
        let memory = choose("convert", &[("backend", "memory"), ("layout", "qcow2")]);
        assert!(memory.xml.contains("cache='writeback'"));
        assert!(memory.cache.unwrap().contains("No command of this run sets a cache mode"));
        // A served disk gets the mode that was measured.
        let nbd = choose("database", &[("layout", "qcow2"), ("front", "nbd")]);
        assert!(nbd.xml.contains("cache='writeback'"), "{}", nbd.xml);
        let compared = choose("database", &[("cache", "directsync")]);
        assert!(compared.xml.contains("cache='directsync'") && compared.cache.is_none());
    }

    /// The report once said that everything was measured with writeback, although QEMU's daemon had
    /// cache.direct.
    #[test]
    fn the_cache_modes_that_a_run_used_are_those_of_its_fronts() {
        let fronts = ["nbd-qsd-native", "nbd-qsd-uring", "fuse", "fuse-qsd", "nbd-qemu-nbd"];
        let cell = |axes: [(&str, &str); 2]| measured(&axes, "iops", &[1.0]);
        let mut cells = fronts.map(|front| cell([("front", front), ("profile", "sync16")]));
        // It was skipped.
        cells[2].samples.clear();
        let told = |cells: &[Cell], advised: &[(&str, &str)]| {
            let run = Run { cells: cells.to_vec(), ..Run::default() };
            setup(&run, &axes(advised))
        };
        let advised = told(&cells, &[("layout", "qcow2")]).cache.unwrap();
        assert!(
            advised.contains(
                "This run was measured with writeback, but with none for nbd-qsd-native and \
                 nbd-qsd-uring."
            ),
            "{advised}"
        );
        // A server gets the mode with which it was measured.
        let native = told(&cells, &[("layout", "qcow2"), ("front", "nbd-qsd-native")]);
        assert!(native.commands[1].ends_with("--cache none"), "{native:?}");
        assert!(
            native.cache.unwrap().starts_with("Cache mode none: the mode of this measurement.")
        );
        let advised = told(&cells[2..], &[("layout", "qcow2")]).cache.unwrap();
        assert!(advised.contains("The whole run was measured with writeback."), "{advised}");
        let named = cell([("cache", "unsafe"), ("profile", "sync16")]);
        assert_eq!((mode_of(&named), mode_of(&cells[2])), (Some("unsafe"), None));
    }
}
