//! Chains made and written by QEMU and read by vdkit, and the reverse.
//!
//! The cases cover every pair of options, within one image and between the images of a chain:
//! format and version, cluster size, refcount width, extended L2, data file, compression, lazy
//! refcounts, preallocation, and sizes. The selection is random; `VDKIT_SEED` replays a failure.

#[path = "../support/mod.rs"]
mod support;

mod chain;
mod layer;
mod ours;
mod theirs;

use std::sync::LazyLock;

use chain::{Case, Folder};
use layer::{Data, Kind, Layer};
use support::guest::Guest;
use vdkit::GuestOffset;
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{Rng, explained, pairwise, qemu, require_peer};

/// Number of tests that share the cases, to run in parallel.
const SHARDS: usize = 4;

/// The cases of this process, and their seed.
static CASES: LazyLock<(u64, Vec<Case>)> = LazyLock::new(|| {
    let seed = support::seed();
    let mut rng = Rng::new(seed);
    let mut cases = Vec::new();
    for _ in 0..support::cases(1) {
        cases.extend(pairwise(&chain::SIZES, chain::allowed, &mut rng));
    }
    (seed, cases.iter().map(|values| Case::new(values)).collect())
});

fn shard(index: usize, try_case: impl Fn(&Case, &mut Rng)) {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    let (seed, cases) = &*CASES;
    for (number, case) in cases.iter().enumerate().skip(index).step_by(SHARDS) {
        let mut rng = Rng::new(seed ^ (number as u64) << 48);
        let about = || format!("case {number} of VDKIT_SEED={seed}: {case:#?}");
        explained(about, || try_case(case, &mut rng));
    }
}

macro_rules! shards {
    ($($name:ident: $index:literal $body:path;)*) => {
        $(#[test]
        fn $name() {
            shard($index, $body);
        })*
    };
}

shards! {
    what_qemu_writes_is_read_here_0: 0 theirs::run;
    what_qemu_writes_is_read_here_1: 1 theirs::run;
    what_qemu_writes_is_read_here_2: 2 theirs::run;
    what_qemu_writes_is_read_here_3: 3 theirs::run;
    what_is_written_here_is_read_by_qemu_0: 0 ours::run;
    what_is_written_here_is_read_by_qemu_1: 1 ours::run;
    what_is_written_here_is_read_by_qemu_2: 2 ours::run;
    what_is_written_here_is_read_by_qemu_3: 3 ours::run;
}

#[test]
fn each_option_of_each_layer_is_tried() {
    let cases = &CASES.1;
    let layers: Vec<_> = cases.iter().flat_map(|case| &case.layers).collect();
    for cluster in layer::CLUSTERS {
        for bits in layer::REFCOUNT_BITS {
            assert!(layers.iter().any(|l| l.cluster == cluster && l.refcount_bits == bits));
        }
    }
    let raw_base = |case: &&Case| case.layers[0].kind == Kind::Raw;
    assert!(cases.iter().filter(raw_base).any(|case| case.sizes[1] > case.sizes[0]));
    assert!(cases.iter().filter(raw_base).any(|case| case.sizes[1] < case.sizes[0]));
    assert!(cases.iter().any(|case| case.layers.len() == 3));
}

fn lazy_layers() -> [Layer; 4] {
    [(512, 1, false), (4096, 16, false), (65536, 64, true), (2 << 20, 16, false)].map(
        |(cluster, refcount_bits, extended)| Layer {
            name: "killed",
            kind: Kind::V3,
            cluster,
            extended,
            refcount_bits,
            data: Data::Inside,
            compressed: None,
            lazy: true,
            preallocation: "off",
        },
    )
}

/// With lazy refcounts, a killed writer leaves stale refcounts and the dirty bit.
#[test]
fn what_a_killed_qemu_leaves_dirty_is_mended_here() {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    for layer in lazy_layers() {
        let (folder, mut rng) = (Folder::new(), Rng::new(layer.cluster));
        let path = folder.file(&layer);
        qemu::create(&path, "qcow2", 8 << 20, &[&layer.options()], None);
        qemu::io(&path, "qcow2", &["write -P 1 3M 1000k"]);
        let last = ["write -P 5 1000 100k", "write -z 3500k 100k", "flush", "sigraise 9"];
        assert_eq!(qemu::try_io(&path, "qcow2", &last).code, -1, "a signal ends it");
        let mut guest = Guest(MemoryStorage::with_len("guest", 8 << 20));
        guest.write(3 << 20, &[1; 1000 << 10]);
        guest.write(1000, &[5; 100 << 10]);
        guest.zero(3500 << 10, 100 << 10);
        assert_eq!(qemu::check(&path, "qcow2", None).code, 2, "refcounts are behind");
        folder.reads_as(&layer, &guest, &mut rng, "dirty");
        ours::write(&folder, &layer, &mut guest, 1, &mut rng);
        ours::qemu_agrees(&folder, &layer, &guest, "mended and written");
    }
}

#[test]
fn what_was_not_closed_here_is_mended_by_qemu() {
    if !require_peer("qemu-img") || !require_peer("qemu-io") {
        return;
    }
    for layer in lazy_layers() {
        let folder = Folder::new();
        let path = folder.file(&layer);
        qemu::create(&path, "qcow2", 8 << 20, &[&layer.options()], None);
        let disk = folder.open(&layer, true);
        disk.write_at(&[7; 300_000], GuestOffset(12_345)).expect("writing");
        disk.write_zeroes(GuestOffset(100_000), 50_000, true).expect("zeroing");
        disk.flush().expect("flushing");
        // No close: the state of a crash.
        drop(disk);
        let info = qemu::info(&path, "qcow2");
        assert_eq!(info["dirty-flag"], true, "{info}");
        let commands = ["read -P 7 12345 87655", "read -P 0 100000 50000", "write -P 9 5M 5000"];
        qemu::io(&path, "qcow2", &commands);
        let checked = qemu::check(&path, "qcow2", None);
        assert!(checked.clean(), "QEMU rebuilds what the dirty bit says: {}", checked.text);
        let mut guest = Guest(MemoryStorage::with_len("guest", 8 << 20));
        guest.write(12_345, &[7; 300_000]);
        guest.zero(100_000, 50_000);
        guest.write(5 << 20, &[9; 5000]);
        folder.reads_as(&layer, &guest, &mut Rng::new(1), "mended by QEMU");
    }
}
