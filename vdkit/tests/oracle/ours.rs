//! vdkit makes a chain and writes to each image.

use vdkit::jobs::{CreateOptions, NewBacking, create};
use vdkit::{Disk, GuestOffset, Monitor, Options};
use vdkit_storage::MemoryStorage;
use vdkit_testkit::{Rng, qemu, save_sparse};

use super::chain::{Case, Folder};
use super::layer::{Data, Layer};
use super::support::guest::{Guest, pattern, soft_pattern};
use super::support::ops::{pack, settle_discard};

/// QEMU checks and reads every layer, then writes to the top one.
pub fn run(case: &Case, rng: &mut Rng) {
    let folder = Folder::new();
    let mut guests: Vec<Guest> = Vec::new();
    for (index, layer) in case.layers.iter().enumerate() {
        make(&folder, case, index);
        let size = case.sizes[index];
        let mut guest =
            guests.last().cloned().unwrap_or(Guest(MemoryStorage::with_len("guest", size)));
        guest.resize(size);
        qemu_agrees(&folder, layer, &guest, "just made");
        write(&folder, layer, &mut guest, index as u64 * 100, rng);
        qemu_agrees(&folder, layer, &guest, "written here");
        folder.reads_as(layer, &guest, rng, "written here");
        guests.push(guest);
    }
    for (layer, guest) in case.layers.iter().zip(&guests) {
        qemu_agrees(&folder, layer, guest, "overlays were written");
    }
    let (top, guest) = (case.layers.last().expect("a top"), guests.last().expect("a top"));
    let at = rng.below(guest.len() - 70_000) / 512 * 512;
    let commands = [format!("write -P 0xd7 {at} 69632"), format!("write -z -u {} 3072", at + 4096)];
    qemu::io(&folder.file(top), "qcow2", &commands.each_ref().map(String::as_str));
    let mut guest = guest.clone();
    guest.write(at, &[0xd7; 69632]);
    guest.zero(at + 4096, 3072);
    folder.reads_as(top, &guest, rng, "written here, then by QEMU");
    folder.is_sound(top, "written here, then by QEMU");
}

/// QEMU finds the image consistent, with the expected content.
pub fn qemu_agrees(folder: &Folder, layer: &Layer, guest: &Guest, what: &str) {
    folder.is_sound(layer, what);
    let flat = folder.path().join("flat.raw");
    save_sparse(&guest.0, &flat);
    let name = layer.name;
    let size = qemu::info(&folder.file(layer), layer.format())["virtual-size"].as_u64();
    assert_eq!(size, Some(guest.len()), "{what}: {name}");
    let same = qemu::same((&folder.file(layer), layer.format()), (&flat, "raw"));
    assert!(same, "{what}: QEMU reads something else from {name}");
    if layer.data == Data::OutsideRaw {
        let data = folder.path().join(format!("{name}-data.raw"));
        assert!(qemu::same((&data, "raw"), (&flat, "raw")), "{what}: the raw data file of {name}");
    }
}

fn make(folder: &Folder, case: &Case, index: usize) {
    let layer = &case.layers[index];
    let driver = vdkit::format(layer.format()).expect("a known format");
    let options = layer.options();
    let options = Some(options.as_str()).filter(|options| !options.is_empty());
    let backing =
        case.backing(index).map(|(name, format)| NewBacking::new(name, Some(format.to_owned())));
    let path = folder.file(layer);
    let request = CreateOptions::new(&path, driver)
        .guest_bytes(case.sizes[index])
        .options(Options::parse(layer.format(), driver.options(), options).expect("good options"))
        .backing(backing);
    create(&vdkit::registry(), &request, &Monitor::default())
        .unwrap_or_else(|error| panic!("making {}: {error}", layer.name));
}

/// A dozen operations of all kinds, with a reopen in between; `id` distinguishes the writes of
/// different calls.
pub fn write(folder: &Folder, layer: &Layer, guest: &mut Guest, id: u64, rng: &mut Rng) {
    let mut disk = folder.open(layer, true);
    for step in 0..14 {
        operate(&disk, layer, guest, id + step, rng)
            .unwrap_or_else(|error| panic!("step {step} on {}: {error}", layer.name));
        if step == 7 {
            disk.close().expect("closing");
            drop(disk);
            disk = folder.open(layer, true);
        }
    }
    disk.close().expect("closing");
}

fn operate(
    disk: &Disk,
    layer: &Layer,
    guest: &mut Guest,
    id: u64,
    rng: &mut Rng,
) -> vdkit::Result<()> {
    let size = guest.len();
    let at = rng.below(size);
    let len = 1 + rng.below((size - at).min(layer.cluster.clamp(8 << 10, 512 << 10) * 3));
    match rng.below(12) {
        0 => {
            disk.write_zeroes(GuestOffset(at), len, rng.chance(1, 2))?;
            guest.zero(at, len);
        }
        1 => {
            disk.discard(GuestOffset(at), len)?;
            settle_discard(disk, guest, at, len)?;
        }
        2 => disk.flush()?,
        3..=6 if layer.compressed.is_some() => {
            let first = at / layer.cluster * layer.cluster;
            let len = (layer.cluster * (1 + rng.below(5))).min(size - first);
            let bytes = soft_pattern(id, first, len, layer.cluster);
            let codec = disk.top().caps().compressed.expect("images without a data file pack");
            assert_eq!(Some(codec), layer.compressed);
            if let Some(units) = pack(codec, layer.cluster, &bytes) {
                disk.write_compressed(GuestOffset(first), &units)?;
                guest.write(first, &bytes);
            }
        }
        _ => {
            let bytes = pattern(id, at, len);
            disk.write_at(&bytes, GuestOffset(at))?;
            guest.write(at, &bytes);
        }
    }
    Ok(())
}
