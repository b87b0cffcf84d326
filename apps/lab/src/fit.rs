//! Decides what of a plan fits on a place: the size of the disk, the space that its image takes,
//! and the cells that are impossible there. Nothing has been written at this point.
//!
//! A folder must hold the largest image. A device holds one image at a time, including the format's
//! tables. If the device has exactly the size that the plan wants, all disks on it are a little
//! smaller, those of raw images too, so that all layouts have the same disk.

use vdkit_block::parse_size;

use crate::layout::{self, Layout, More};
use crate::model::{Axes, Effort, PlaceInfo, PlaceKind, value_of};
use crate::profile::{self, Kind, Load};

/// A cell on a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    pub disk: u64,
    /// Size of the disk in the plan; larger than `disk` if the place is too small for it.
    pub wanted: u64,
    /// Largest space that the image takes on the place.
    pub bytes: u64,
}

/// Why a cell is impossible on a place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The cell has no meaning on this kind of place.
    #[error("{0}")]
    Kind(String),
    /// The place is too small.
    #[error("{} MiB are needed, and the device has {} MiB", .needed.div_ceil(1 << 20), .there >> 20)]
    Small {
        /// The smallest sufficient size.
        needed: u64,
        /// The place's size.
        there: u64,
    },
}

/// The layout of a cell. Its preallocation may be a separate axis.
pub fn layout_of(axes: &Axes) -> Result<&'static Layout, String> {
    let name = value_of(axes, "layout").unwrap_or("qcow2");
    let name = match value_of(axes, "preallocation") {
        None | Some("off") => name.to_owned(),
        Some(kind) => format!("{name}-{kind}"),
    };
    layout::find(&name).ok_or_else(|| format!("unknown layout '{name}'"))
}

/// Number of images that a cell has at once.
pub fn images_of(axes: &Axes) -> u64 {
    value_of(axes, "images").and_then(|count| count.parse().ok()).unwrap_or(1)
}

/// The size of a disk in the plan.
fn wanted(axes: &Axes, effort: &Effort, kind: Kind) -> u64 {
    let size = value_of(axes, "size").and_then(|size| parse_size(size).ok());
    let size = size.unwrap_or(effort.disk);
    match kind {
        Kind::Load(Load { to_the_end: true, jobs, .. }) => {
            size.max(effort.bytes.saturating_mul(u64::from(jobs)))
        }
        _ => size,
    }
}

/// Upper bound of a format's tables: a 64th of the disk, and at least one cluster for each table.
fn tables(layout: &Layout, total: u64) -> u64 {
    let clusters = if layout.options.contains("cluster_size=2M") { 16 << 20 } else { 4 << 20 };
    total / 64 + clusters
}

/// Whether almost nothing is written to the image.
fn stays_empty(axes: &Axes, layout: &Layout, kind: Kind) -> bool {
    let filled = value_of(axes, "content") == Some("full")
        || matches!(layout.more, More::Fragmented | More::Aged);
    matches!(kind, Kind::Open | Kind::Convert) && !layout.is_reserved() && !filled
}

/// Computes the disk and the space of one cell.
///
/// # Errors
/// The cell is impossible on this place.
pub fn fit(axes: &Axes, effort: &Effort, place: &PlaceInfo) -> Result<Fit, Unfit> {
    let layout = layout_of(axes).map_err(Unfit::Kind)?;
    let profile = value_of(axes, "profile").and_then(profile::find);
    let Some(kind) = profile.map(|profile| profile.kind) else {
        return Err(Unfit::Kind("the cell has no load".to_owned()));
    };
    if layout.more == More::Volume && place.file_system.as_deref() == Some("fuse.zfs") {
        return Err(Unfit::Kind("zfs-fuse has no volumes: a zvol takes OpenZFS".to_owned()));
    }
    let wanted = wanted(axes, effort, kind);
    let disk = match place.kind {
        PlaceKind::Directory => wanted,
        PlaceKind::Device => on_device(axes, layout, kind, wanted, place.total_bytes)?,
    };
    let effort = Effort { disk, ..*effort };
    let empty = stays_empty(axes, layout, kind);
    let count = images_of(axes);
    let bytes = match kind {
        // Tables take 8 bytes per 64 KiB or less, in a few kinds; `sparse` writes a 512th of the
        // disk.
        Kind::Open | Kind::Convert if empty => disk / 256 * count,
        Kind::Open | Kind::Convert => disk * count,
        // One fully written base image, and overlays that are only read.
        Kind::Boot => disk + count * (1 << 20),
        // An aged image was written everywhere.
        _ if layout.is_reserved() || layout.more == More::Aged => disk,
        _ => profile.map_or(disk, |profile| profile.bytes(&effort)),
    };
    let backed = layout.more == More::Backing && kind != Kind::Boot;
    Ok(Fit { disk, wanted, bytes: if backed { bytes * 2 } else { bytes } })
}

/// The size of a disk on a device of `total` bytes.
fn on_device(
    axes: &Axes,
    layout: &Layout,
    kind: Kind,
    wanted: u64,
    total: u64,
) -> Result<u64, Unfit> {
    let refuse = |reason: &str| Err(Unfit::Kind(format!("{}: {reason}", layout.name)));
    if layout.more == More::Backing || layout.format == "vmdk" {
        return refuse("needs files, but this place is a device");
    }
    if layout.options.contains("=falloc") {
        return refuse("space cannot be preallocated on a device");
    }
    if images_of(axes) > 1 || kind == Kind::Boot {
        return Err(Unfit::Kind("a device holds one image".to_owned()));
    }
    if kind == Kind::NoSpace {
        return Err(Unfit::Kind("a device does not become full; use a folder".to_owned()));
    }
    let small = |needed| Err(Unfit::Small { needed, there: total });
    let empty = stays_empty(axes, layout, kind);
    if layout.format != "raw" && !layout.options.contains("preallocation") && empty {
        // Only the tables are written.
        let needed = wanted / 256 + (4 << 20);
        return if needed > total { small(needed) } else { Ok(wanted) };
    }
    if wanted > total {
        return small(wanted);
    }
    if layout.format == "raw" && empty {
        return Ok(wanted);
    }
    let room = total.saturating_sub(tables(layout, total)) >> 20 << 20;
    if room == 0 { small(wanted + tables(layout, wanted)) } else { Ok(wanted.min(room)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::axes_of as axes;

    const EFFORT: Effort = Effort { rounds: 3, seconds: 10.0, disk: 1 << 30, bytes: 1 << 20 };

    fn place(kind: PlaceKind, total_bytes: u64) -> PlaceInfo {
        PlaceInfo { kind, total_bytes, ..PlaceInfo::default() }
    }

    #[test]
    fn space_is_that_of_the_largest_image() {
        let folder = place(PlaceKind::Directory, 0);
        let of = |values: &[(&str, &str)]| fit(&axes(values), &EFFORT, &folder).unwrap().bytes;
        assert_eq!(of(&[("layout", "qcow2"), ("profile", "rnd4k-q1-read")]), 1 << 30);
        assert_eq!(of(&[("layout", "qcow2-overlay"), ("profile", "database")]), 2 << 30);
        assert_eq!(of(&[("layout", "qcow2"), ("profile", "sync16")]), 16 << 20);
        assert_eq!(of(&[("layout", "raw-full"), ("profile", "sync16")]), 1 << 30);
        let open = [("layout", "qcow2-metadata"), ("profile", "open"), ("size", "16G")];
        assert_eq!(of(&open), 64 << 20);
    }

    #[test]
    fn a_device_of_just_the_plans_size_holds_the_same_disk_of_each_layout() {
        let device = place(PlaceKind::Device, 1 << 30);
        let of =
            |layout| fit(&axes(&[("layout", layout), ("profile", "database")]), &EFFORT, &device);
        let raw = of("raw").unwrap();
        assert_eq!((raw.wanted, raw.disk), (1 << 30, (1024 - 16 - 4) << 20));
        for layout in ["qcow2", "qcow2-8k", "qcow2-ext", "qcow2-metadata", "qcow2-aged"] {
            assert_eq!(of(layout).unwrap().disk, raw.disk, "{layout}");
        }
        // A larger device holds a disk of the plan's size.
        let device = place(PlaceKind::Device, 2 << 30);
        let larger = fit(&axes(&[("layout", "qcow2"), ("profile", "database")]), &EFFORT, &device);
        assert_eq!(larger.unwrap().disk, 1 << 30);
    }

    #[test]
    fn what_cannot_be_on_a_device_is_told() {
        let of = |values: &[(&str, &str)], total| {
            fit(&axes(values), &EFFORT, &place(PlaceKind::Device, total))
        };
        let database = ("profile", "database");
        assert_eq!(
            of(&[("layout", "raw"), database], (1 << 30) - 512),
            Err(Unfit::Small { needed: 1 << 30, there: (1 << 30) - 512 })
        );
        for (values, word) in [
            (vec![("layout", "qcow2-overlay"), database], "needs files"),
            (vec![("layout", "vmdk"), database], "needs files"),
            (vec![("layout", "raw"), ("preallocation", "falloc"), database], "preallocated"),
            (vec![("layout", "raw"), ("images", "8"), ("profile", "open")], "one image"),
            (vec![("layout", "raw"), ("profile", "nospace")], "does not become full"),
        ] {
            let Err(Unfit::Kind(told)) = of(&values, 4 << 30) else { panic!("{values:?}") };
            assert!(told.contains(word), "{told}");
        }
        // An empty image takes only its tables, whatever the size of its disk.
        let open =
            |layout, size| of(&[("layout", layout), ("size", size), ("profile", "open")], 1 << 30);
        assert_eq!(open("qcow2", "16G").unwrap().disk, 16 << 30);
        assert!(matches!(open("raw", "16G"), Err(Unfit::Small { .. })));
        assert!(matches!(open("qcow2-metadata", "16G"), Err(Unfit::Small { .. })));
        assert_eq!(open("raw", "1G").unwrap().disk, 1 << 30);
        assert!(open("qcow2-metadata", "1G").unwrap().disk < 1 << 30);
    }

    #[test]
    fn an_aged_image_takes_the_whole_disk_whatever_its_load() {
        let aged = axes(&[("layout", "qcow2-aged"), ("profile", "install")]);
        assert_eq!(fit(&aged, &EFFORT, &PlaceInfo::default()).unwrap().bytes, 1 << 30);
    }

    #[test]
    fn zfs_fuse_has_no_volumes() {
        let of = |kind: &str| {
            let place = PlaceInfo { file_system: Some(kind.to_owned()), ..PlaceInfo::default() };
            fit(&axes(&[("layout", "zvol"), ("profile", "sync16")]), &EFFORT, &place)
        };
        assert!(matches!(of("fuse.zfs"), Err(Unfit::Kind(told)) if told.contains("OpenZFS")));
        assert_eq!(of("zfs").unwrap().disk, 1 << 30);
    }

    #[test]
    fn a_preallocation_of_its_own_axis_is_that_of_the_layout() {
        let name = |values: &[(&str, &str)]| layout_of(&axes(values)).map(|layout| layout.name);
        assert_eq!(name(&[("layout", "raw"), ("preallocation", "full")]), Ok("raw-full"));
        assert_eq!(name(&[("layout", "raw"), ("preallocation", "off")]), Ok("raw"));
        assert_eq!(name(&[]), Ok("qcow2"));
        let told = name(&[("layout", "raw"), ("preallocation", "metadata")]).unwrap_err();
        assert!(told.contains("raw-metadata"), "{told}");
    }
}
