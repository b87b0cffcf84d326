//! Changes of a sound VHDX image. An image has megabytes of zeroes between its structures, so the input
//! says what differs from a sound one, and checksums can be put right again.

use std::sync::{Arc, LazyLock};

use vdkit_block::{
    BackingRef, CreateRequest, Creation, FormatDriver, GuestOffset, HostOffset, ImageInfo,
    OpenRequest, Options, Storage, StorageExt,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_storage::MemoryStorage;
use vdkit_vhdx::VhdxDriver;

use super::LIMITS;
use super::formats::{Bytes, judge};

const MIB: u64 = 1 << 20;
/// Where entries of the log begin.
const PAGE: usize = 4096;
/// Changes reach so far: headers, log, metadata, table, and the first block.
const REACH: u64 = 5 * MIB;

/// A dynamic image, closed; one whose log has entries; a child of another image, whose log has entries
/// too; a fixed image; one with sectors of 4 KiB, whose log has entries.
static SOUND: LazyLock<[MemoryStorage; 5]> = LazyLock::new(|| {
    [
        sound("", false, true),
        sound("", false, false),
        sound("", true, false),
        sound("subformat=fixed", false, true),
        sound("logical_sector_size=4096", false, false),
    ]
});

fn sound(options: &str, child: bool, closed: bool) -> MemoryStorage {
    let memory = Arc::new(MemoryStorage::new("image"));
    let storage: Arc<dyn Storage> = memory.clone();
    let backing = child.then(|| BackingRef {
        identity: Some("01234567-89ab-cdef-0123-456789abcdef".to_owned()),
        ..BackingRef::new("parent.vhdx", Some("vhdx".to_owned()))
    });
    let options = ["block_size=1M", options];
    let options = Options::parse("vhdx", VhdxDriver.options(), options).expect("options");
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
/// log's entries), and changes, each an offset (3 bytes), a length (1) and bytes.
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
    let places: [(u8, u64, usize); 4] = [
        (1, 64 << 10, 4096),
        (1, 128 << 10, 4096),
        (2, 192 << 10, 64 << 10),
        (2, 256 << 10, 64 << 10),
    ];
    for (bit, at, len) in places {
        if seals & bit != 0 {
            seal(&image, at, len);
        }
    }
    if seals & 4 != 0 {
        seal_log(&image);
    }
    judge(&VhdxDriver, 11, || Bytes { image: image.clone(), others: None });
}

/// Puts the checksum of each entry right, as long as it says that it is. (What the log of an image
/// is made of after a change of its header is not followed: entries stay where they were.)
fn seal_log(image: &MemoryStorage) {
    let mut log = vec![0; MIB as usize];
    image.read_padded(&mut log, HostOffset(MIB)).expect("memory");
    for at in (0..log.len()).step_by(PAGE) {
        if !log[at..].starts_with(b"loge") {
            continue;
        }
        let len = u32::from_le_bytes([log[at + 8], log[at + 9], log[at + 10], log[at + 11]]);
        let len = (len as usize).next_multiple_of(PAGE).clamp(PAGE, log.len());
        log[at + 4..at + 8].fill(0);
        // An entry goes on at the start of the log.
        let (start, end) = (at, at + len);
        let sum = crc32c::crc32c(&log[start..end.min(MIB as usize)]);
        let sum = crc32c::crc32c_append(sum, &log[..end.saturating_sub(MIB as usize)]);
        log[at + 4..at + 8].copy_from_slice(&sum.to_le_bytes());
    }
    image.write_at(&log, HostOffset(MIB)).expect("memory");
}

fn seal(image: &MemoryStorage, at: u64, len: usize) {
    let mut bytes = vec![0; len];
    image.read_padded(&mut bytes, HostOffset(at)).expect("memory");
    bytes[4..8].fill(0);
    let sum = crc32c::crc32c(&bytes);
    image.write_at(&sum.to_le_bytes(), HostOffset(at + 4)).expect("memory");
}
