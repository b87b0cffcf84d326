//! Creating, opening and damaging containers; changing key slots, also under power cuts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vdkit_block::{
    CancelToken, CreateRequest, Creation, Error, Format, FormatDriver, HostOffset, KeySlots,
    KeyedImages, Limits, Monitor, OpenRequest, Options, Progress, Result, Secret, Storage,
    StorageExt,
};
use vdkit_luks::{HEADER_BYTES, Header, HeaderPlace, LuksDriver, LuksSlots, NewHeader, SLOTS};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CountingStorage, CrashStorage, FaultKind, FaultPlan, FaultyStorage, Rng};

/// Low limits, to be fast; new slots get a thousand iterations.
const LIMITS: Limits = {
    let mut limits = Limits::DEFAULT;
    limits.table_bytes_max = 1 << 20;
    limits.check_bytes_max = 16 << 20;
    limits.key_rounds_max = 1 << 15;
    limits
};

fn secret(text: &str) -> Secret {
    Secret::new(text.as_bytes().to_vec())
}

fn made(guest_bytes: u64, text: &str) -> Result<Arc<MemoryStorage>> {
    let storage = Arc::new(MemoryStorage::with_len("image", 0));
    let mut options = Options::parse("luks", LuksDriver.options(), [text, "iter-time=0"])?;
    options.set_key(Some(secret("first")));
    LuksDriver.create(&CreateRequest::new(storage.clone(), guest_bytes, options))?;
    Ok(storage)
}

fn open(storage: Arc<dyn Storage>, key: &str) -> Result<Arc<dyn Format>> {
    let request = OpenRequest { storage, files: Vec::new(), writable: false, limits: LIMITS };
    LuksDriver.open_with_keys(request, &[secret(key)])
}

fn slots(storage: Arc<dyn Storage>) -> LuksSlots {
    let place = HeaderPlace { offset: HostOffset(0), room: storage.len().unwrap() };
    LuksSlots::read(storage, place, &LIMITS).unwrap()
}

fn opens(storage: &Arc<dyn Storage>, key: &str) -> bool {
    match open(storage.clone(), key) {
        Ok(_) => true,
        Err(Error::Key { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_container_opens_with_its_key_alone() {
    let storage = made(1 << 20, "").unwrap();
    let format = open(storage.clone(), "first").unwrap();
    assert_eq!((format.name(), format.guest_bytes()), ("luks", 1 << 20));
    for key in ["second", "firs", "first\n", ""] {
        let error = open(storage.clone(), key).unwrap_err();
        assert!(matches!(error, Error::Key { .. }), "{error}");
    }
    let request = OpenRequest {
        storage: storage.clone(),
        files: Vec::new(),
        writable: false,
        limits: LIMITS,
    };
    let error = LuksDriver.open(request).unwrap_err();
    assert_eq!(error.remedy(), Some(vdkit_block::Remedy::GiveKey));
}

#[test]
fn a_new_container_needs_a_key_and_sensible_options() {
    let storage = Arc::new(MemoryStorage::with_len("image", 0));
    let options = Options::parse("luks", LuksDriver.options(), ["iter-time=0"]).unwrap();
    let request = CreateRequest::new(storage, 512, options);
    assert!(matches!(LuksDriver.create(&request), Err(Error::Key { .. })));
    for text in ["cipher-alg=serpent-256", "ivgen-hash-alg=sha256", "hash-alg=md5"] {
        assert!(made(512, text).is_err(), "{text}");
    }
    assert!(made(u64::MAX, "").is_err());
}

#[test]
fn preallocated_in_full_reads_as_zero() {
    let storage = made(3 << 20, "preallocation=full").unwrap();
    let format = open(storage.clone(), "first").unwrap();
    let extent = format.resolve(vdkit_block::GuestOffset(512), 4096).unwrap();
    let vdkit_block::Place::Data { offset, .. } = extent.place else { panic!("{extent:?}") };
    let mut bytes = vec![1; 4096];
    storage.read_at(&mut bytes, offset).unwrap();
    assert!(bytes.iter().any(|b| *b != 0));
    format.encryption().unwrap().decrypt(&mut bytes, vdkit_block::GuestOffset(512), offset);
    assert!(bytes.iter().all(|b| *b == 0));
}

#[test]
fn a_sparse_file_says_how_long_the_disk_is() {
    let storage = made(1 << 20, "cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=essiv").unwrap();
    let storage: Arc<dyn Storage> = storage;
    let info = LuksDriver.describe(&storage, &LIMITS).unwrap();
    assert_eq!((info.virtual_size, info.encryption.as_deref()), (1 << 20, Some("luks")));
    let text =
        |key: &str| info.properties.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone()).unwrap();
    assert_eq!(text("encryption-cipher"), "aes-cbc-essiv:sha256");
    assert_eq!(text("encryption-key-bits"), "128");
    assert_eq!(text("encryption-slots"), "1 of 8 active");
    let header = info.key_header.unwrap();
    assert_eq!((header.cipher.as_str(), header.mode.as_str()), ("aes", "cbc-essiv:sha256"));
    assert_eq!((header.key_bits, header.slots.len()), (128, 8));
    assert!(header.slots[0].active && header.slots[0].iterations > 0);
    assert!(!header.slots[1].active);
    assert_eq!(header.slots[0].material_offset, 4096);
    assert!(header.payload_offset > header.slots[7].material_offset);
    let options = Options::parse("luks", LuksDriver.options(), ["cipher-alg=aes-128"]).unwrap();
    let measured = LuksDriver.measure(1 << 20, &options, 0).unwrap();
    let made = made(1 << 20, "cipher-alg=aes-128").unwrap();
    assert_eq!(measured.required, made.len().unwrap());
}

/// A header with some bytes overwritten.
fn damaged(header: &[u8], at: usize, bytes: &[u8]) -> Result<Header> {
    let mut header = header.to_vec();
    header[at..at + bytes.len()].copy_from_slice(bytes);
    Header::parse("image", &header, HeaderPlace { offset: HostOffset(0), room: 8 << 20 })
}

fn header_of(storage: &dyn Storage) -> Vec<u8> {
    let mut header = vec![0; HEADER_BYTES];
    storage.read_at(&mut header, HostOffset(0)).unwrap();
    header
}

#[test]
fn every_field_of_a_header_is_checked() {
    let header = header_of(&*made(1 << 20, "").unwrap());
    let be = |n: u32| n.to_be_bytes();
    for (at, bytes, words) in [
        (0, &b"LUKZ"[..], "magic"),
        (6, &[0, 2], "cryptsetup"),
        (6, &[1, 1], "version 257"),
        (8, &[b'x'; 32], "cipher-name"),
        (40, b"\xff\xff", "cipher-mode"),
        (72, b"a b\0", "hash-spec"),
        (104, &be(9), "key material"),
        (104, &be(u32::MAX), ""),
        (108, &be(0), "key-bytes"),
        (108, &be(u32::MAX), "key-bytes"),
        (108, &be(512), "key material"),
        (164, &be(0), "mk-digest-iter"),
        (168, &[7; 40], "uuid"),
        (208, &be(1), "state of a key slot"),
        (208 + 4, &be(0), "iterations"),
        (208 + 40, &be(0), "key material"),
        (208 + 40, &be(1), "key material"),
        (208 + 40, &be(u32::MAX), "key material"),
        (208 + 48 + 40, &be(8), "slot 0 has as well"),
        (208 + 7 * 48 + 40, &be(9), "slot 0 has as well"),
        (208 + 44, &be(0), "stripes"),
        (208 + 48 + 44, &be(4001), "stripes"),
    ] {
        match damaged(&header, at, bytes) {
            Ok(_) => assert_eq!(words, "", "{at}: {bytes:?}"),
            Err(error) => {
                let error = error.to_string();
                assert!(!words.is_empty() && error.contains(words), "{at}: {error}");
            }
        }
    }
    for len in 0..HEADER_BYTES {
        let place = HeaderPlace { offset: HostOffset(0), room: 8 << 20 };
        assert!(Header::parse("image", &header[..len], place).is_err());
    }
}

/// Sets every number of the header to boundary values: the container opens or reports an error,
/// both at low cost.
#[test]
fn any_number_in_any_field_is_an_answer_at_little_cost() {
    let storage = made(64 << 10, "cipher-alg=aes-128").unwrap();
    let good = header_of(&*storage);
    let slots = (0..SLOTS).flat_map(|slot| [0, 4, 40, 44].map(|field| 208 + slot * 48 + field));
    let (mut opened, mut refused) = (0, 0);
    for field in [104, 108, 164].into_iter().chain(slots) {
        let was = u32::from_be_bytes(good[field..field + 4].try_into().unwrap());
        let near = [was.wrapping_sub(1), was.wrapping_add(1), was ^ (1 << 31), was << 1];
        for number in [0, 1, 2, 7, 8, 0x7fff_ffff, 0x8000_0000, u32::MAX].into_iter().chain(near) {
            let mut header = good.clone();
            header[field..field + 4].copy_from_slice(&number.to_be_bytes());
            storage.write_at(&header, HostOffset(0)).unwrap();
            let counting = CountingStorage::new(storage.clone());
            let answer = open(counting.clone(), "first");
            let read = counting.counts().bytes_read;
            assert!(read <= (HEADER_BYTES + SLOTS * 32 * 4000) as u64, "{read} bytes read");
            match answer {
                Ok(_) => opened += 1,
                Err(error) => {
                    let text = error.to_string();
                    assert!(text.contains("image"), "{field}: {number:#x}: {text}");
                    refused += 1;
                }
            }
        }
    }
    // For instance, the iterations of a free slot are ignored.
    assert!(opened > 50 && refused > 200, "{opened} opened, {refused} refused");
}

#[test]
fn work_is_bounded_before_it_is_done() {
    let storage = made(1 << 20, "").unwrap();
    for at in [208 + 4, 164] {
        let before = header_of(&*storage);
        storage.write_at(&u32::MAX.to_be_bytes(), HostOffset(at)).unwrap();
        let error = open(storage.clone(), "first").unwrap_err();
        assert!(matches!(error, Error::Limit { .. }), "{error}");
        assert!(error.to_string().contains("the work of trying a key"), "{error}");
        storage.write_at(&before, HostOffset(0)).unwrap();
    }
    // The cost of all slots together is limited.
    for slots in [2, 8] {
        let storage = made(1 << 20, "cipher-alg=aes-128").unwrap();
        for number in 1..slots {
            let (state, iterations) = (0x00ac_71f3u32.to_be_bytes(), 6000u32.to_be_bytes());
            storage.write_at(&[state, iterations].concat(), HostOffset(208 + number * 48)).unwrap();
        }
        let error = open(storage, "another").unwrap_err();
        let limit = matches!(error, Error::Limit { .. });
        assert_eq!(limit, slots == 8, "{slots} slots: {error}");
    }
    // A cheap slot still opens.
    let mut all = slots(storage.clone());
    assert_eq!(all.add(&secret("first"), &secret("second"), 0, &Monitor::default()).unwrap(), 1);
    storage.write_at(&u32::MAX.to_be_bytes(), HostOffset(208 + 4)).unwrap();
    let storage: Arc<dyn Storage> = storage;
    assert!(opens(&storage, "second"));
    // Also after another key that opens no slot.
    let request = OpenRequest { storage, files: Vec::new(), writable: false, limits: LIMITS };
    LuksDriver.open_with_keys(request, &[secret("another"), secret("second")]).unwrap();
}

/// Makes slots active that have so many iterations.
fn activate(storage: &dyn Storage, slots: std::ops::Range<u64>, iterations: u32) {
    for number in slots {
        let fields = [0x00ac_71f3u32.to_be_bytes(), iterations.to_be_bytes()].concat();
        storage.write_at(&fields, HostOffset(208 + number * 48)).unwrap();
    }
}

#[test]
fn an_expensive_slot_does_not_block_changes_of_the_others() {
    let quiet = Monitor::default();
    let storage = made(64 << 10, "cipher-alg=aes-128").unwrap();
    activate(&*storage, 1..2, u32::MAX);
    let mut all = slots(storage);
    assert_eq!(all.opened_by(&secret("first"), &quiet).unwrap(), [0]);
    let error = all.opened_by(&secret("another"), &quiet).unwrap_err();
    assert!(matches!(error, Error::Limit { .. }), "{error}");
    assert_eq!(all.add(&secret("first"), &secret("second"), 0, &quiet).unwrap(), 2);
    assert_eq!(all.opened_by(&secret("second"), &quiet).unwrap(), [2]);
    assert!(matches!(all.untried(), Some(Error::Limit { .. })));
    all.wipe(1).unwrap();
    assert!(all.untried().is_none());
    assert!(all.opened_by(&secret("another"), &quiet).unwrap().is_empty());
}

#[test]
fn slots_that_are_allowed_each_are_all_tried() {
    let storage = made(64 << 10, "cipher-alg=aes-128").unwrap();
    activate(&*storage, 1..SLOTS as u64, 6000);
    let all = slots(storage);
    for (key, opened) in [("first", &[0][..]), ("another", &[])] {
        assert_eq!(all.opened_by(&secret(key), &Monitor::default()).unwrap(), opened);
    }
}

#[test]
fn what_is_made_within_the_limits_opens_within_them() {
    const HOUR: u64 = 3_600_000;
    for hash in ["sha1", "sha224", "sha256", "sha384", "sha512", "ripemd160"] {
        let text = format!("cipher-alg=aes-128,iter-time={HOUR},hash-alg={hash}");
        let options = Options::parse("luks", LuksDriver.options(), [text.as_str()]).unwrap();
        let new = NewHeader::from_options(&options, "").unwrap();
        // The digest has the minimum of iterations, or an eighth of the slot's.
        for rounds in [1 << 12, 1 << 16] {
            let mut limits = LIMITS;
            limits.key_rounds_max = rounds;
            let header = new.make("image", &secret("first"), &limits).unwrap();
            let storage = Arc::new(MemoryStorage::with_len("image", new.payload_offset()));
            storage.write_at(&header.bytes, HostOffset(0)).unwrap();
            let place = HeaderPlace { offset: HostOffset(0), room: new.payload_offset() };
            let all = LuksSlots::read(storage, place, &limits).unwrap();
            if let Err(error) = all.unlock(&[secret("first")]) {
                panic!("{hash}, {rounds} rounds: {error}");
            }
        }
    }
    // A new slot has the digest of its header.
    let mut all = slots(made(64 << 10, "cipher-alg=aes-128").unwrap());
    assert_eq!(all.add(&secret("first"), &secret("second"), HOUR, &Monitor::default()).unwrap(), 1);
    assert_eq!(all.opened_by(&secret("second"), &Monitor::default()).unwrap(), [1]);
}

#[test]
fn unknown_ciphers_and_hashes_are_described_and_not_opened() {
    for (at, name) in [(8, "serpent\0"), (40, "ctr-plain64\0"), (72, "sm3\0")] {
        let storage = made(1 << 20, "").unwrap();
        storage.write_at(name.as_bytes(), HostOffset(at)).unwrap();
        let error = open(storage.clone(), "first").unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert!(error.to_string().contains("cryptsetup"), "{error}");
        let storage: Arc<dyn Storage> = storage;
        LuksDriver.describe(&storage, &LIMITS).unwrap();
    }
}

#[test]
fn a_payload_beyond_the_file_and_a_detached_header_are_refused() {
    let storage = made(1 << 20, "").unwrap();
    storage.write_at(&u32::MAX.to_be_bytes(), HostOffset(104)).unwrap();
    let error = open(storage.clone(), "first").unwrap_err();
    assert!(matches!(error, Error::Corrupt(_)), "{error}");
    storage.write_at(&0u32.to_be_bytes(), HostOffset(104)).unwrap();
    let error = open(storage, "first").unwrap_err();
    assert!(error.to_string().contains("apart from its disk"), "{error}");
}

#[test]
fn any_damage_is_an_answer_and_never_a_panic() {
    let good = header_of(&*made(64 << 10, "cipher-alg=aes-128").unwrap());
    let mut rng = Rng::new(7);
    let storage = made(64 << 10, "cipher-alg=aes-128").unwrap();
    let mut opened = 0;
    for _ in 0..300 {
        let mut header = good.clone();
        for _ in 0..=rng.below(3) {
            let at = rng.below(HEADER_BYTES as u64) as usize;
            header[at] = rng.below(256) as u8;
        }
        storage.write_at(&header, HostOffset(0)).unwrap();
        opened += u32::from(open(storage.clone(), "first").is_ok());
    }
    // The valid header belongs to another file.
    assert_eq!(opened, 0);
}

#[test]
fn a_key_gets_the_slot_that_is_named() {
    let storage: Arc<dyn Storage> = made(64 << 10, "cipher-alg=aes-128").unwrap();
    let mut all = slots(storage.clone());
    assert_eq!(
        all.add_in(Some(5), &secret("first"), &secret("fifth"), 0, &Monitor::default()).unwrap(),
        5
    );
    assert_eq!(all.opened_by(&secret("fifth"), &Monitor::default()).unwrap(), [5]);
    assert_eq!(all.add(&secret("fifth"), &secret("next"), 0, &Monitor::default()).unwrap(), 1);
    assert_eq!(
        slots(storage.clone()).opened_by(&secret("fifth"), &Monitor::default()).unwrap(),
        [5]
    );
    for (number, why) in [(5, "is in use"), (0, "is in use"), (8, "from 0 to 7")] {
        let error = all
            .add_in(Some(number), &secret("first"), &secret("x"), 0, &Monitor::default())
            .unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    assert!(!opens(&storage, "x"));
}

#[test]
fn eight_keys_open_and_a_ninth_has_no_place() {
    let storage: Arc<dyn Storage> = made(64 << 10, "cipher-alg=aes-128").unwrap();
    let mut all = slots(storage.clone());
    for number in 1..SLOTS as u32 {
        let key = format!("key {number}");
        assert_eq!(
            all.add(&secret("first"), &secret(&key), 0, &Monitor::default()).unwrap(),
            number
        );
    }
    let error = all
        .add(&secret("first"), &secret("ninth"), 0, &Monitor::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("remove the key of one first"), "{error}");
    for number in 1..SLOTS as u32 {
        assert!(opens(&storage, &format!("key {number}")));
        assert_eq!(
            all.opened_by(&secret(&format!("key {number}")), &Monitor::default()).unwrap(),
            [number]
        );
    }
    assert!(matches!(
        all.add(&secret("ninth"), &secret("x"), 0, &Monitor::default()),
        Err(Error::Key { .. })
    ));
    all.wipe(3).unwrap();
    assert!(!opens(&storage, "key 3") && opens(&storage, "key 4") && opens(&storage, "first"));
    assert!(all.wipe(8).is_err());
    assert_eq!(slots(storage.clone()).slots(), all.slots());
    // The wiped material must not be the old material with another state.
    storage.write_at(&0x00ac_71f3u32.to_be_bytes(), HostOffset(208 + 3 * 48)).unwrap();
    storage.write_at(&1000u32.to_be_bytes(), HostOffset(208 + 3 * 48 + 4)).unwrap();
    assert!(!opens(&storage, "key 3"));
}

/// Key slot changes with a power cut at every step: an unchanged key always opens; a key being
/// added or removed may or may not.
#[test]
fn power_cuts_lock_nobody_out() {
    // Slot 6 straddles two sectors.
    for in_use in [1, 6] {
        let first: Arc<dyn Storage> = made(4096, "cipher-alg=aes-128").unwrap();
        let mut all = slots(first.clone());
        for number in 1..in_use {
            all.add(&secret("first"), &secret(&format!("key {number}")), 0, &Monitor::default())
                .unwrap();
        }
        let crash = CrashStorage::holding(&*first);
        let storage: Arc<dyn Storage> = crash.clone();
        let mut all = slots(storage);
        let added = all.add(&secret("first"), &secret("new"), 0, &Monitor::default()).unwrap();
        assert_eq!(added, in_use);
        let told_added = crash.ops();
        all.wipe(0).unwrap();
        let told_wiped = crash.ops();
        let mut rng = Rng::new(u64::from(in_use));
        crash.for_each_crash(|ops, image| {
            let mut survivors = vec![image.only_durable(), image.everything()];
            survivors.extend((0..2).map(|_| image.survivor(&mut rng)));
            for survivor in survivors {
                let survivor: Arc<dyn Storage> = Arc::new(survivor);
                let (old, new) = (opens(&survivor, "first"), opens(&survivor, "new"));
                assert!(old || ops > told_added, "the old key is gone at {ops}");
                assert!(new || ops < told_added, "the new key is not there at {ops}");
                assert!(!old || ops < told_wiped, "the old key still opens at {ops}");
                for number in 1..in_use {
                    assert!(opens(&survivor, &format!("key {number}")), "key {number} at {ops}");
                }
            }
        });
    }
}

/// Cancels a job with its `left`th report.
struct CancelsAfter {
    left: AtomicU64,
    cancel: CancelToken,
}

impl Progress for CancelsAfter {
    fn update(&self, _done: u64, _total: u64) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.cancel.cancel();
        }
    }

    fn message(&self, _text: &str) {}
}

#[test]
fn a_key_that_is_cancelled_is_not_added() {
    let (first, second, new) = (secret("first"), secret("second"), secret("new"));
    let mut cancelled = 0;
    for left in 1.. {
        let storage: Arc<dyn Storage> = made(4096, "cipher-alg=aes-128").unwrap();
        let mut all = slots(storage.clone());
        all.add(&first, &second, 0, &Monitor::default()).unwrap();
        let before = all.slots();
        let cancels = CancelsAfter { left: left.into(), cancel: CancelToken::default() };
        let monitor = Monitor::new(&cancels).cancelled_by(cancels.cancel.clone());
        let added = all.add(&second, &new, 0, &monitor);
        assert!(opens(&storage, "first") && opens(&storage, "second"), "{left}");
        assert_eq!(opens(&storage, "new"), added.is_ok(), "{left}");
        if added.is_ok() {
            break;
        }
        assert!(matches!(added, Err(Error::Interrupted)), "{added:?}");
        assert_eq!(slots(storage).slots(), before, "{left}");
        cancelled += 1;
    }
    // The slots tried by the old key, and the new one's.
    assert_eq!(cancelled, 3);
}

#[test]
fn a_failed_change_of_keys_leaves_the_old_ones() {
    let kinds = [FaultKind::Write, FaultKind::Sync, FaultKind::Read];
    for change in ["add", "wipe"] {
        let mut nth = 0;
        loop {
            let first: Arc<dyn Storage> = made(4096, "cipher-alg=aes-128").unwrap();
            slots(first.clone())
                .add(&secret("first"), &secret("second"), 0, &Monitor::default())
                .unwrap();
            let faulty = FaultyStorage::new(first.clone());
            let mut all = slots(faulty.clone());
            faulty.arm(FaultPlan::nth(&kinds, nth).torn(1));
            let changed = match change {
                "add" => {
                    all.add(&secret("first"), &secret("new"), 0, &Monitor::default()).map(|_| ())
                }
                _ => all.wipe(1),
            };
            assert_eq!(changed.is_err(), faulty.fired() > 0, "{change} {nth}");
            faulty.heal();
            assert!(opens(&first, "first"), "{change} {nth}");
            assert!(change == "wipe" || opens(&first, "second"), "{change} {nth}");
            // An interrupted change can be repeated.
            let mut again = slots(first.clone());
            match change {
                "add" if !opens(&first, "new") => {
                    again.add(&secret("first"), &secret("new"), 0, &Monitor::default()).unwrap();
                    assert!(opens(&first, "new"), "{change} {nth}");
                }
                "wipe" => {
                    again.wipe(1).unwrap();
                    assert!(!opens(&first, "second"), "{change} {nth}");
                }
                _ => {}
            }
            if changed.is_ok() {
                break;
            }
            nth += 1;
        }
        assert!(nth >= 4, "{change} has {nth} steps");
    }
}
