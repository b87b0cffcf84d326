//! Any bytes as a LUKS header: refused with an error, at little cost, or opened as it must be.

use std::sync::Arc;

use vdkit_block::{
    Error, FormatDriver, GuestOffset, HostOffset, ImageInfo, KeySlots, KeyedImages, Monitor,
    OpenRequest, Result, Secret, Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_luks::{HEADER_BYTES, Header, HeaderPlace, LuksDriver, LuksSlots, SLOTS};
use vdkit_storage::MemoryStorage;

use super::{LIMITS, key};
use crate::CountingStorage;

/// The input's first two bytes are the length of the file in these units.
const LEN_UNIT: u64 = 4096;
/// Where the rest of the input goes: the first slot's key material, as all tools lay it out.
const MATERIAL_AT: u64 = 4096;
/// Most bytes of a slot's material: 4000 stripes of the longest key that is accepted.
const MATERIAL_BYTES_MAX: u64 = 4000 * 512;
/// Where the header lies in a file that has other things before it.
const INSIDE_AT: u64 = 3 << 16;
const SECTOR: u64 = 512;

/// Takes the input for the length of a file, a header and key material; reads the header in a
/// container and inside another file, tries a key, changes the key slots and writes to the disk.
///
/// # Panics
/// If a promise is broken: a header is judged by where it lies, reading costs more than it may,
/// an error does not name the file, a disk does not hold what was written, or a change of keys
/// locks out a key that stays.
pub fn luks_open(input: &[u8]) {
    let Some((len, rest)) = input.split_first_chunk::<2>() else { return };
    let len = u64::from(u16::from_be_bytes(*len)) * LEN_UNIT;
    let (header, material) = rest.split_at(rest.len().min(HEADER_BYTES));
    let file = |at: u64| {
        let file = MemoryStorage::with_len("image", at + len);
        for (place, bytes) in [(0, header), (MATERIAL_AT, material)] {
            // What passes the end of the file is not in it.
            let bytes = &bytes[..bytes.len().min(len.saturating_sub(place) as usize)];
            file.write_at(bytes, HostOffset(at + place)).expect("memory");
        }
        CountingStorage::new(Arc::new(file))
    };
    let container = file(0);
    let judged = judge(&container, 0, len);
    let inside = judge(&file(INSIDE_AT), INSIDE_AT, len);
    assert_eq!(judged.is_ok(), inside.is_ok(), "{judged:?} at 0, {inside:?} inside");
    describe(&container, judged.is_ok());
    let opened = unlock(&container);
    if judged.is_err() {
        assert!(opened.is_err(), "opened in spite of {judged:?}");
    }
    if opened.is_ok() {
        write_and_read(&container);
        change_keys(&container, len);
    }
}

/// Reads and checks the header.
fn judge(storage: &Arc<CountingStorage>, at: u64, room: u64) -> Result<Header> {
    let place = HeaderPlace { offset: HostOffset(at), room };
    let before = storage.counts();
    let judged = Header::read(&**storage, place);
    let reads = storage.counts().reads - before.reads;
    assert_eq!(reads, 1, "a header is one read");
    named(&judged);
    if let Ok(header) = &judged {
        assert_eq!(header.properties().len(), 5);
    }
    judged
}

/// An error says which file it is about.
fn named<T>(result: &Result<T>) {
    if let Err(error) = result {
        let text = error.to_string();
        assert!(text.contains("image"), "'{text}' names no file");
    }
}

fn describe(storage: &Arc<CountingStorage>, sound: bool) {
    let counted: Arc<dyn Storage> = storage.clone();
    let before = storage.counts();
    let info = LuksDriver.describe(&counted, &LIMITS);
    assert!(storage.counts().reads - before.reads <= 1, "describing is one read");
    named(&info);
    assert!(sound || info.is_err(), "{info:?}");
    if let Ok(info) = info {
        assert!(info.virtual_size <= storage.len().expect("memory"));
    }
}

fn open(storage: &Arc<CountingStorage>, key: Secret) -> Result<Disk> {
    let request =
        OpenRequest { storage: storage.clone(), files: Vec::new(), writable: true, limits: LIMITS };
    let format = LuksDriver.open_with_keys(request, &[key])?;
    let options = OpenOptions::read_write().limits(LIMITS);
    Ok(Disk::from_format(format, ImageInfo::new("luks", 0), &options))
}

/// Trying a key reads each slot's material once, and what it derives is bounded.
fn unlock(storage: &Arc<CountingStorage>) -> Result<Disk> {
    let before = storage.counts();
    let opened = open(storage, key());
    let read = storage.counts().bytes_read - before.bytes_read;
    assert!(read <= HEADER_BYTES as u64 + SLOTS as u64 * MATERIAL_BYTES_MAX, "{read} bytes read");
    named(&opened);
    opened
}

/// What is written is there, also after the container is opened anew; its neighbors stay.
fn write_and_read(storage: &Arc<CountingStorage>) {
    let disk = open(storage, key()).expect("it was open a moment ago");
    let size = disk.guest_bytes();
    assert!(size.is_multiple_of(SECTOR));
    if size < 4 * SECTOR {
        return;
    }
    let window = size.min(64 << 10) as usize;
    let mut model = vec![0; window];
    disk.read_at(&mut model, GuestOffset(0)).expect("memory");
    for (number, (at, len)) in
        [(0, window / 2), (700, 900), (window - 600, 600)].into_iter().enumerate()
    {
        let len = len.min(window - at.min(window));
        let bytes = vec![0xc0 + number as u8; len];
        disk.write_at(&bytes, GuestOffset(at as u64)).expect("memory");
        model[at..at + len].copy_from_slice(&bytes);
    }
    disk.close().expect("memory");
    let disk = open(storage, key()).expect("writing to the disk leaves the header");
    let mut found = vec![0; window];
    disk.read_at(&mut found, GuestOffset(0)).expect("memory");
    assert!(found == model, "the disk does not hold what was written");
}

/// A second key opens when it was added; when it is wiped it does not, and the first one still does.
fn change_keys(storage: &Arc<CountingStorage>, len: u64) {
    let counted: Arc<dyn Storage> = storage.clone();
    let place = HeaderPlace { offset: HostOffset(0), room: len };
    // A new slot has the fewest iterations that there may be, which can be more than is left.
    let mut limits = LIMITS;
    limits.key_rounds_max = 1 << 15;
    let mut slots = LuksSlots::read(counted, place, &limits).expect("a header that is good");
    let opens = |key| open(storage, key).is_ok();
    let (second, quiet) = (Secret::new(b"second".to_vec()), Monitor::default());
    match slots.add(&key(), &second, 0, &quiet) {
        Ok(slot) => {
            let opened = slots.opened_by(&second, &quiet).expect("eight slots of little work");
            assert!(opened.contains(&slot), "slot {slot} does not open: {opened:?}");
            slots.wipe(slot).expect("memory");
            let opened = slots.opened_by(&second, &quiet).expect("eight slots of little work");
            assert!(!opened.contains(&slot), "a wiped slot opens");
        }
        // All slots are in use, or ask for much work each.
        Err(Error::Invalid { .. } | Error::Limit { .. }) => {}
        Err(error) => panic!("adding a key: {error}"),
    }
    assert!(opens(key()), "the first key is locked out");
}
