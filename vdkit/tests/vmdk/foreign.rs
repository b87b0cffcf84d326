//! ESX sparse extents, which no program here writes: handmade, and compared with QEMU's reads.

use std::path::Path;

use vdkit::GuestOffset;
use vdkit_testkit::{qemu, require_peer};

use super::oracle::open;

const SECTOR: usize = 512;
/// Bytes per grain, for both kinds.
const GRAIN: usize = 4096;
/// Sectors of the disks: two tables of 4096 grains, the second only partly used.
const SECTORS: u64 = 40_008;
/// Allocated grains, by disk position, in file order.
const GRAINS: [u64; 5] = [0, 1, 6, 4095, 5000];

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// Fills the grains at the end of an extent with nonzero bytes.
fn fill(bytes: &mut [u8], first: usize) {
    for (index, grain) in bytes[first..].chunks_mut(GRAIN).enumerate() {
        for (at, byte) in grain.iter_mut().enumerate() {
            *byte = (index + 1 + at / 97) as u8;
        }
    }
}

/// Header of 4 sectors, the grain directory, two tables of 32 sectors, grains.
fn cowd() -> Vec<u8> {
    let (directory, tables, grains) = (4, 5, 5 + 64);
    let mut bytes = vec![0; grains * SECTOR + GRAINS.len() * GRAIN];
    put(&mut bytes, 0, b"COWD");
    for (at, value) in [
        (4, 1),
        (8, 3),
        (12, SECTORS as u32),
        (16, (GRAIN / SECTOR) as u32),
        (20, directory as u32),
        (24, 2),
        (28, (grains + GRAINS.len() * 8) as u32),
    ] {
        put(&mut bytes, at, &value.to_le_bytes());
    }
    for table in 0..2 {
        let at = (tables + 32 * table) as u32;
        put(&mut bytes, directory * SECTOR + 4 * table, &at.to_le_bytes());
    }
    for (index, grain) in GRAINS.into_iter().enumerate() {
        let at = (grains + index * GRAIN / SECTOR) as u32;
        put(&mut bytes, tables * SECTOR + 4 * grain as usize, &at.to_le_bytes());
    }
    fill(&mut bytes, grains * SECTOR);
    bytes
}

/// Two headers, the grain directory, two tables of 64 sectors, grains.
fn se_sparse() -> Vec<u8> {
    let (tables, grains) = (3, 3 + 128);
    let mut bytes = vec![0; grains * SECTOR + GRAINS.len() * GRAIN];
    for (at, value) in [
        (0, 0xcafe_babe),
        (8, 0x2_0000_0001),
        (16, SECTORS),
        (24, 8),
        (32, 64),
        (80, 1),
        (88, 1),
        (128, 2),
        (136, 1),
        (144, tables as u64),
        (152, 128),
        (192, grains as u64),
        (200, GRAINS.len() as u64 * 8),
        (SECTOR, 0xcafe_cafe),
        (2 * SECTOR, 1 << 60),
        (2 * SECTOR + 8, 1 << 60 | 1),
    ] {
        put(&mut bytes, at, &value.to_le_bytes());
    }
    let mut entry = |grain: u64, value: u64| {
        put(&mut bytes, tables * SECTOR + 8 * grain as usize, &value.to_le_bytes());
    };
    for (index, grain) in (0..).zip(GRAINS) {
        entry(grain, 3 << 60 | index << 48);
    }
    entry(2, 1 << 60);
    entry(3, 2 << 60);
    fill(&mut bytes, grains * SECTOR);
    bytes
}

fn holds_what_was_put(image: &Path, what: &str) {
    let disk = open(image, false);
    assert_eq!(disk.guest_bytes(), SECTORS * SECTOR as u64, "{what}");
    let mut wanted = vec![0; GRAINS.len() * GRAIN];
    fill(&mut wanted, 0);
    for (grain, wanted) in GRAINS.into_iter().zip(wanted.chunks(GRAIN)) {
        let mut found = [0; GRAIN];
        disk.read_at(&mut found, GuestOffset(grain * GRAIN as u64)).unwrap();
        assert!(found == wanted, "{what}: grain {grain}");
    }
    for grain in [2, 3, 4, 4094, 4096] {
        let mut found = [1; GRAIN];
        disk.read_at(&mut found, GuestOffset(grain * GRAIN as u64)).unwrap();
        assert!(found == [0; GRAIN], "{what}: grain {grain}");
    }
}

#[test]
fn extents_of_esx_read_as_qemu_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    for (create_type, extent_type, extent) in
        [("vmfsSparse", "VMFSSPARSE", cowd()), ("seSparse", "SESPARSE", se_sparse())]
    {
        let image = folder.path().join(format!("{create_type}.vmdk"));
        let name = format!("{create_type}-extent.vmdk");
        std::fs::write(folder.path().join(&name), &extent).unwrap();
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\n\
             createType=\"{create_type}\"\nRW {SECTORS} {extent_type} \"{name}\"\n\
             ddb.adapterType = \"lsilogic\"\n"
        );
        std::fs::write(&image, text).unwrap();
        holds_what_was_put(&image, create_type);
        if require_peer("qemu-img") {
            let raw = folder.path().join("disk.raw");
            qemu::convert((&image, "vmdk"), (&raw, "raw"), &[]);
            let mut ours = vec![0; GRAIN];
            let disk = open(&image, false);
            let raw = std::fs::read(&raw).unwrap();
            assert_eq!(raw.len() as u64, disk.guest_bytes(), "{create_type}");
            for (at, wanted) in (0..).step_by(GRAIN).zip(raw.chunks(GRAIN)) {
                ours.resize(wanted.len(), 0);
                disk.read_at(&mut ours, GuestOffset(at)).unwrap();
                assert!(ours == wanted, "{create_type}: {at:#x}");
            }
        }
    }
}
