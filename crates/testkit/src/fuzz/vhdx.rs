//! Changes of a sound VHDX image. An image has megabytes of zeroes between its structures, so the input
//! says what differs from a sound one, and checksums can be put right again.

use std::sync::{Arc, LazyLock};

use vdkit_block::{
    BackingRef, CreateRequest, FormatDriver, GuestOffset, HostOffset, ImageInfo, OpenRequest,
    Options, Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_storage::MemoryStorage;
use vdkit_vhdx::VhdxDriver;

use super::LIMITS;
use super::formats::judge;

const MIB: u64 = 1 << 20;
/// Changes reach so far: headers, log, metadata, table, and the first block.
const REACH: u64 = 5 * MIB;

/// A dynamic image, closed; one whose log has entries; and a child of another image.
static SOUND: LazyLock<[MemoryStorage; 3]> =
    LazyLock::new(|| [sound(false, true), sound(false, false), sound(true, false)]);

fn sound(child: bool, closed: bool) -> MemoryStorage {
    let memory = Arc::new(MemoryStorage::new("image"));
    let storage: Arc<dyn Storage> = memory.clone();
    let backing = child.then(|| BackingRef {
        identity: Some("01234567-89ab-cdef-0123-456789abcdef".to_owned()),
        ..BackingRef::new("parent.vhdx", Some("vhdx".to_owned()))
    });
    let options = Options::parse("vhdx", VhdxDriver.options(), ["block_size=1M"]).expect("options");
    let guest_bytes = 3 * MIB + 4096;
    let create = CreateRequest {
        storage: storage.clone(),
        files: Vec::new(),
        guest_bytes,
        options,
        backing,
        backing_bytes: None,
    };
    VhdxDriver.create(&create).expect("a new image");
    let open = OpenRequest { storage, files: Vec::new(), writable: true, limits: LIMITS };
    let format = VhdxDriver.open(open).expect("a sound image");
    let disk = Disk::from_format(format, ImageInfo::new("vhdx", 0), &OpenOptions::read_write());
    for at in [700, MIB + 4096] {
        disk.write_at(&[0x77; 9000], GuestOffset(at)).expect("writing");
        disk.flush().expect("flushing");
    }
    if closed {
        disk.close().expect("closing");
    }
    MemoryStorage::clone(&memory)
}

/// Takes the input for: which image, what to do about checksums (bit 0: headers, 1: region tables, 2: the
/// log's first entry), and changes, each an offset (3 bytes), a length (1) and bytes.
///
/// # Panics
/// As [`super::format_open`].
pub fn vhdx_open(input: &[u8]) {
    let Some((&[which, seals], mut rest)) = input.split_first_chunk::<2>() else { return };
    let image = SOUND[usize::from(which) % SOUND.len()].clone();
    while let Some((&[high, middle, low, len], more)) = rest.split_first_chunk::<4>() {
        let offset = u64::from(u32::from_be_bytes([0, high, middle, low])) % REACH;
        let (bytes, behind) = more.split_at(usize::from(len).min(more.len()));
        image.write_at(bytes, HostOffset(offset)).expect("memory");
        rest = behind;
    }
    let places: [(u8, u64, usize); 5] = [
        (1, 64 << 10, 4096),
        (1, 128 << 10, 4096),
        (2, 192 << 10, 64 << 10),
        (2, 256 << 10, 64 << 10),
        (4, MIB, 8192),
    ];
    for (bit, at, len) in places {
        if seals & bit != 0 {
            seal(&image, at, len);
        }
    }
    judge(&VhdxDriver, 11, || image.clone());
}

fn seal(image: &MemoryStorage, at: u64, len: usize) {
    let mut bytes = vec![0; len];
    image.read_padded(&mut bytes, HostOffset(at)).expect("memory");
    bytes[4..8].fill(0);
    let sum = crc32c::crc32c(&bytes);
    image.write_at(&sum.to_le_bytes(), HostOffset(at + 4)).expect("memory");
}
