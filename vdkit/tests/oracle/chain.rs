//! The tested chains: axes, compatible values, and a chain of one value per axis.

use std::path::Path;

use tempfile::TempDir;
use vdkit::{Disk, GuestOffset, OpenOptions, Repair};
use vdkit_block::Codec;
use vdkit_testkit::{Choice, Rng, qemu};

use super::layer::{CLUSTERS, Data, Kind, Layer, REFCOUNT_BITS};
use super::support::disks::load;
use super::support::guest::{Guest, assert_same};
use super::support::qemu::scratch;

/// Axes of one layer: kind, cluster size, extended L2, refcount width, data file, compression, lazy
/// refcounts, and a property of its position (preallocation of the base, size of the others).
const AXES: usize = 8;
const KIND: usize = 0;
const CLUSTER: usize = 1;
const EXTENDED: usize = 2;
const BITS: usize = 3;
const DATA: usize = 4;
const PACKED: usize = 5;
const LAZY: usize = 6;
const PLACE: usize = 7;
/// Base, middle and top in turn. Value 0 of the kind is a raw base, or no middle.
pub const SIZES: [usize; 3 * AXES] =
    [3, 4, 2, 3, 3, 3, 2, 4, 3, 4, 2, 3, 2, 3, 2, 3, 3, 4, 2, 3, 2, 3, 2, 3];

const PREALLOCATION: [&str; 4] = ["off", "metadata", "falloc", "full"];
const OVERLAY_SIZES: [Overlay; 3] = [Overlay::Equal, Overlay::Shorter, Overlay::Longer];

/// Size of an overlay relative to its backing disk.
#[derive(Clone, Copy, Debug)]
enum Overlay {
    Equal,
    Shorter,
    Longer,
}

/// Whether two values are compatible; values of different layers always are.
pub fn allowed(a: Choice, b: Choice) -> bool {
    let whole_layer = |(axis, value): Choice| !(axis == 2 * AXES + KIND && value == 0);
    if !whole_layer(a) || !whole_layer(b) {
        return false; // there is always a top
    }
    if a.0 / AXES != b.0 / AXES {
        return true;
    }
    let base = a.0 / AXES == 0;
    match ((a.0 % AXES, a.1), (b.0 % AXES, b.1)) {
        // A raw or absent image has no options.
        ((KIND, 0), (_, value)) => value == 0,
        // Version 2 supports neither these nor zstd.
        ((KIND, 1), (EXTENDED | BITS | DATA | LAZY, value)) => value == 0,
        ((KIND, 1), (PACKED, codec)) => codec < 2,
        // Subclusters have at least a sector.
        ((CLUSTER, cluster), (EXTENDED, 1)) => CLUSTERS[cluster] >= 16 << 10,
        // A data file holds no compressed clusters.
        ((DATA, 1..), (PACKED, codec)) => codec == 0,
        // QEMU compresses only into unallocated clusters.
        ((PACKED, 1..), (PLACE, preallocation)) if base => preallocation == 0,
        _ => true,
    }
}

/// One chain.
#[derive(Clone, Debug)]
pub struct Case {
    /// The base first.
    pub layers: Vec<Layer>,
    /// Bytes of each layer's disk.
    pub sizes: Vec<u64>,
}

impl Case {
    /// The chain with one value per axis.
    pub fn new(values: &[usize]) -> Self {
        let mut case = Self { layers: Vec::new(), sizes: Vec::new() };
        for (place, name) in ["base", "middle", "top"].into_iter().enumerate() {
            let values = &values[place * AXES..][..AXES];
            let kind = match (place, values[KIND]) {
                (0, 0) => Kind::Raw,
                (_, 0) => continue,
                (_, 1) => Kind::V2,
                _ => Kind::V3,
            };
            case.layers.push(Layer {
                name,
                kind,
                cluster: CLUSTERS[values[CLUSTER]],
                extended: values[EXTENDED] == 1,
                refcount_bits: REFCOUNT_BITS[values[BITS]],
                data: [Data::Inside, Data::Outside, Data::OutsideRaw][values[DATA]],
                compressed: [None, Some(Codec::Deflate), Some(Codec::Zstd)][values[PACKED]],
                lazy: values[LAZY] == 1,
                preallocation: if place == 0 { PREALLOCATION[values[PLACE]] } else { "off" },
            });
            let beneath = case.sizes.last().copied();
            let overlay = (place > 0).then(|| OVERLAY_SIZES[values[PLACE]]);
            case.sizes.push(size(beneath, overlay));
        }
        case
    }

    /// The backing reference of layer `index`.
    pub fn backing(&self, index: usize) -> Option<(String, &'static str)> {
        let base = &self.layers[index.checked_sub(1)?];
        Some((base.file(), base.format()))
    }
}

/// Never a multiple of a cluster size, but of a sector: QEMU rounds raw images to sectors.
fn size(beneath: Option<u64>, overlay: Option<Overlay>) -> u64 {
    let beneath = beneath.unwrap_or((4 << 20) + 3 * 512);
    match overlay {
        None | Some(Overlay::Equal) => beneath,
        Some(Overlay::Shorter) => beneath * 3 / 5 / 1024 * 1024 + 512,
        Some(Overlay::Longer) => beneath * 7 / 5 / 1024 * 1024 + 512,
    }
}

/// A folder with a chain.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Self {
        Self(scratch())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self, layer: &Layer) -> std::path::PathBuf {
        self.path().join(layer.file())
    }

    /// Opens an image with its backing chain.
    pub fn open(&self, layer: &Layer, writable: bool) -> Disk {
        let options = OpenOptions::default().writable(writable).format(layer.format());
        Disk::open(&vdkit::registry(), self.file(layer), &options)
            .unwrap_or_else(|error| panic!("opening {}: {error}", layer.name))
    }

    /// The content of an image read by QEMU.
    pub fn qemu_view(&self, layer: &Layer) -> Guest {
        let view = self.path().join("view.raw");
        qemu::convert((&self.file(layer), layer.format()), (&view, "raw"), &[]);
        Guest(load(&view))
    }

    /// An image must have this content: as a whole, and in small pieces anywhere.
    pub fn reads_as(&self, layer: &Layer, guest: &Guest, rng: &mut Rng, what: &str) {
        let disk = self.open(layer, false);
        let size = guest.len();
        assert_eq!(disk.guest_bytes(), size, "{what}: {}", layer.name);
        let read = |at: u64, len: u64| {
            let mut buf = vec![0xee; len as usize];
            disk.read_at(&mut buf, GuestOffset(at))
                .unwrap_or_else(|error| panic!("{what}: reading {}: {error}", layer.name));
            assert_same(&format!("{what}: {}", layer.name), at, &buf, &guest.read(at, len));
        };
        read(0, size);
        for _ in 0..30 {
            let at = rng.below(size);
            read(at, 1 + rng.below((size - at).min(5000)));
        }
    }

    /// Both programs find the image consistent.
    pub fn is_sound(&self, layer: &Layer, what: &str) {
        if layer.kind == Kind::Raw {
            return;
        }
        let path = self.file(layer);
        let theirs = qemu::check(&path, "qcow2", None);
        assert!(theirs.clean(), "{what}: qemu-img check {}: {}", layer.name, theirs.text);
        let ours = vdkit::jobs::check(
            &vdkit::registry(),
            &path,
            &OpenOptions::default(),
            Repair::Nothing,
            &vdkit::Monitor::default(),
        );
        let report = ours.unwrap_or_else(|error| panic!("{what}: {}: {error}", layer.name)).report;
        let faults = report.corruptions + report.leaks;
        assert_eq!(faults, 0, "{what}: {}: {:#?}", layer.name, report.findings);
    }
}
