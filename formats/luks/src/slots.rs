//! Key slots: recovering the image's key with a passphrase, and storing it for another one.
//!
//! # Order of writes
//! Adding a key: material, salt and iterations must be durable before the four bytes that make the
//! slot active. (A slot can straddle two sectors; its state cannot.) Wiping a key: the material
//! must be overwritten before the state marks the slot as free, so that no passphrase can open a
//! slot that is marked free.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vdkit_block::{
    Error, HostOffset, KeySlot, KeySlots, Limits, Monitor, Result, Secret, SectorCipher, Storage,
    require_within,
};
use zerocopy::IntoBytes;
use zerocopy::big_endian::U32;
use zeroize::{Zeroize, Zeroizing};

use crate::af;
use crate::cipher::{AesSectors, CipherSpec};
use crate::hash::Hash;
use crate::header::{Header, HeaderPlace, SLOTS, STRIPES};
use crate::on_disk::{ACTIVE, INACTIVE, Slot, slot_at};

/// Minimum iterations of a new slot, by the specification.
const ITERATIONS_MIN: u32 = 1000;
/// Bytes of the digest that identifies the image's key.
const DIGEST_BYTES: usize = 20;

/// Iterations of a new header's digest: an eighth of its slot's, as in QEMU.
pub(crate) fn digest_iterations(slot: u32) -> u32 {
    (slot / 8).max(ITERATIONS_MIN)
}

/// The image's key.
pub(crate) type VolumeKey = Zeroizing<Vec<u8>>;

/// Maximum stack use of deriving and expanding a key.
const STACK_BYTES: usize = 32 << 10;

/// Overwrites stack left by returned calls: hash states and expanded keys are moved to the heap,
/// and moves leave copies behind.
#[inline(never)]
pub(crate) fn wipe_stack() {
    std::hint::black_box(&mut [0u8; STACK_BYTES]).zeroize();
}

/// Random bytes from the system.
pub(crate) fn random(file: &str, out: &mut [u8]) -> Result<()> {
    getrandom::fill(out).map_err(|error| Error::Key {
        file: file.to_owned(),
        what: format!("the system gives no random numbers: {error}"),
        remedy: Box::new("try again later".into()),
    })
}

/// Parameters of key derivation and splitting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Method {
    pub(crate) spec: CipherSpec,
    pub(crate) hash: Hash,
}

impl Method {
    fn of(header: &Header, file: &str) -> Result<Self> {
        Ok(Self { spec: header.cipher(file)?, hash: header.hash(file)? })
    }

    /// The cipher of a slot's material, derived from a passphrase.
    fn cipher(&self, passphrase: &Secret, slot: &Slot) -> Option<AesSectors> {
        let mut key = Zeroizing::new(vec![0; self.spec.key_bytes()]);
        self.hash.derive(passphrase.bytes(), &slot.salt, slot.iterations.get(), &mut key);
        self.spec.with_key(&key)
    }

    /// Key material that stores the image's key for a passphrase.
    pub(crate) fn lock(
        &self,
        file: &str,
        key: &VolumeKey,
        passphrase: &Secret,
        slot: &Slot,
    ) -> Result<Vec<u8>> {
        let mut noise = Zeroizing::new(vec![0; key.len() * (STRIPES - 1)]);
        random(file, &mut noise)?;
        let mut material = af::split(key, STRIPES, self.hash, &noise);
        if let Some(cipher) = self.cipher(passphrase, slot) {
            cipher.encrypt(&mut material, 0);
        }
        Ok(material.to_vec())
    }

    /// The number of iterations that takes this time on this machine, within the limits; the
    /// minimum for 0. `digest` is the header's digest iterations; `None` for a new header.
    pub(crate) fn iterations(
        &self,
        milliseconds: u64,
        limits: &Limits,
        digest: Option<u32>,
    ) -> u32 {
        if milliseconds == 0 {
            return ITERATIONS_MIN;
        }
        let wanted = Duration::from_millis(milliseconds);
        let enough = (wanted / 8).clamp(Duration::from_millis(1), Duration::from_millis(50));
        let mut key = vec![0; self.spec.key_bytes()];
        let mut tried = 1024;
        let taken = loop {
            let started = Instant::now();
            self.hash.derive(b"a passphrase", &[0x5a; 32], tried, &mut key);
            let taken = started.elapsed();
            if taken >= enough || tried >= 1 << 30 {
                break taken;
            }
            tried *= 2;
        };
        let ratio = wanted.as_secs_f64() / taken.as_secs_f64().max(1e-6);
        let most = self.iterations_max(limits.key_rounds_max, digest);
        let most = most.clamp(ITERATIONS_MIN.into(), u32::MAX.into()) as f64;
        (f64::from(tried) * ratio).clamp(ITERATIONS_MIN.into(), most) as u32
    }

    /// Maximum iterations of a slot whose key and digest together take at most `limit` rounds, as
    /// [`Header::rounds`] counts them. `digest` is as in [`Method::iterations`].
    fn iterations_max(&self, limit: u64, digest: Option<u32>) -> u64 {
        let of_slot = self.hash.rounds(self.spec.key_bytes());
        let of_digest = self.hash.rounds(DIGEST_BYTES);
        let beside = |digest: u32| limit.saturating_sub(u64::from(digest) * of_digest) / of_slot;
        match digest {
            Some(digest) => beside(digest),
            // `digest_iterations`: at least the minimum, and one for every eight of the slot.
            None => beside(ITERATIONS_MIN).min(limit / (8 * of_slot + of_digest) * 8),
        }
    }

    /// The digest that identifies the image's key.
    pub(crate) fn digest(
        &self,
        key: &VolumeKey,
        salt: &[u8; 32],
        iterations: u32,
    ) -> [u8; DIGEST_BYTES] {
        let mut digest = [0; DIGEST_BYTES];
        self.hash.derive(key, salt, iterations, &mut digest);
        digest
    }
}

/// Work of trying one key, on one slot or on several together.
struct Work<'a> {
    limit: u64,
    done: u64,
    monitor: &'a Monitor<'a>,
}

impl<'a> Work<'a> {
    fn new(limits: &Limits, monitor: &'a Monitor<'a>) -> Self {
        Self { limit: limits.key_rounds_max, done: 0, monitor }
    }

    /// Counts rounds before they run; fails if the work is cancelled.
    fn take(&mut self, file: &str, rounds: u64) -> Result<()> {
        self.monitor.cancel.check()?;
        let found = self.done.saturating_add(rounds);
        let what = "the work of trying a key, in rounds of its derivation,";
        require_within(file, what, found, self.limit)?;
        self.done = found;
        Ok(())
    }
}

/// Keeps the first refusal of a slot's work in `too_much`, since another slot may open.
fn unless_too_much<T>(tried: Result<Option<T>>, too_much: &mut Option<Error>) -> Result<Option<T>> {
    match tried {
        Err(error @ Error::Limit { .. }) => {
            too_much.get_or_insert(error);
            Ok(None)
        }
        other => other,
    }
}

fn tell_tried(monitor: &Monitor<'_>, number: usize) {
    monitor.progress.update(number as u64 + 1, SLOTS as u64);
}

/// A header in a file, with its key slots.
#[derive(Debug)]
pub struct LuksSlots {
    storage: Arc<dyn Storage>,
    place: HeaderPlace,
    header: Header,
    limits: Limits,
}

impl LuksSlots {
    /// Reads a header.
    ///
    /// # Errors
    /// As [`Header::read`].
    pub fn read(storage: Arc<dyn Storage>, place: HeaderPlace, limits: &Limits) -> Result<Self> {
        let header = Header::read(&*storage, place)?;
        Ok(Self { storage, place, header, limits: *limits })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The image's cipher, opened by the first matching key.
    ///
    /// # Errors
    /// [`Error::Key`] if no key matches; [`Error::Unsupported`] for unknown ciphers and hashes;
    /// [`Error::Limit`] if a slot demands too much work.
    pub fn unlock(&self, keys: &[Secret]) -> Result<Arc<AesSectors>> {
        let file = self.storage.name();
        let method = Method::of(&self.header, file)?;
        if keys.is_empty() {
            return Err(Error::no_key(file, "luks"));
        }
        let found = self.find(&method, keys, &Monitor::default());
        let cipher = found.map(|found| found.and_then(|(_, key)| method.spec.with_key(&key)));
        wipe_stack();
        cipher?.map(Arc::new).ok_or_else(|| {
            self.wrong_key(if keys.len() == 1 { "the key" } else { "none of the keys" })
        })
    }

    fn wrong_key(&self, which: &str) -> Error {
        let opens = if which == "the key" { "opens none" } else { "opens any" };
        let active = self.header.raw.key_slots.iter().filter(|slot| slot.is_active()).count();
        Error::Key {
            file: self.storage.name().to_owned(),
            what: format!("{which} {opens} of its {active} active key slots"),
            remedy: Box::new(
                "a key file counts with every byte in it, also a line end at its end".into(),
            ),
        }
    }

    /// The first slot that one of these passphrases opens, and the image's key. Slots that exceed
    /// the work limit of one passphrase are skipped; that is an error only if no other slot opens.
    fn find(
        &self,
        method: &Method,
        passphrases: &[Secret],
        monitor: &Monitor<'_>,
    ) -> Result<Option<(usize, VolumeKey)>> {
        let mut too_much = None;
        for passphrase in passphrases {
            let mut work = Work::new(&self.limits, monitor);
            for number in 0..SLOTS {
                let tried = self.try_slot(method, number, passphrase, &mut work);
                tell_tried(monitor, number);
                if let Some(key) = unless_too_much(tried, &mut too_much)? {
                    return Ok(Some((number, key)));
                }
            }
        }
        too_much.map_or(Ok(None), Err)
    }

    fn try_slot(
        &self,
        method: &Method,
        number: usize,
        passphrase: &Secret,
        work: &mut Work<'_>,
    ) -> Result<Option<VolumeKey>> {
        let (header, raw, hash) = (&self.header, &self.header.raw, method.hash);
        let slot = &raw.key_slots[number];
        if !slot.is_active() {
            return Ok(None);
        }
        work.take(self.storage.name(), header.rounds(number, hash))?;
        let Some(cipher) = method.cipher(passphrase, slot) else { return Ok(None) };
        let mut material = Zeroizing::new(vec![0; header.material_bytes() as usize]);
        self.storage.read_padded(&mut material, self.at(header.material_area(number).start))?;
        cipher.decrypt(&mut material, 0);
        let key = af::merge(&material, STRIPES, hash);
        let digest = method.digest(&key, &raw.mk_digest_salt, raw.mk_digest_iterations.get());
        Ok((digest == raw.mk_digest).then_some(key))
    }

    /// The host offset of an offset from the header's start.
    fn at(&self, offset: u64) -> HostOffset {
        self.place.offset + offset
    }

    fn slot_at(&self, number: usize) -> HostOffset {
        self.at(slot_at(number) as u64)
    }

    /// A slot's number from a caller.
    fn checked(&self, number: u32) -> Result<usize> {
        let file = self.storage.name();
        Some(number as usize).filter(|number| *number < SLOTS).ok_or_else(|| {
            let last = SLOTS - 1;
            Error::invalid_for(
                &file,
                format!("key slots have numbers from 0 to {last}, not {number}"),
            )
        })
    }

    /// The slot that a new key gets: this one, or the first free one.
    fn free_slot(&self, wanted: Option<u32>) -> Result<usize> {
        let file = self.storage.name();
        if let Some(wanted) = wanted {
            let number = self.checked(wanted)?;
            return match self.header.raw.key_slots[number].is_active() {
                true => Err(Error::invalid_for(
                    &file,
                    format!("key slot {number} is in use; remove its key first"),
                )),
                false => Ok(number),
            };
        }
        self.header.raw.key_slots.iter().position(|slot| !slot.is_active()).ok_or_else(|| {
            Error::invalid_for(
                &file,
                format!("all {SLOTS} key slots are in use; remove the key of one first"),
            )
        })
    }

    /// Overwrites a slot's material durably.
    fn overwrite_material(&self, number: usize) -> Result<()> {
        let area = self.header.material_area(number);
        let mut noise = vec![0; (area.end - area.start) as usize];
        random(self.storage.name(), &mut noise)?;
        self.storage.write_at(&noise, self.at(area.start))?;
        self.storage.sync()
    }
}

impl KeySlots for LuksSlots {
    fn slots(&self) -> Vec<KeySlot> {
        let slot = |(number, slot): (usize, &Slot)| KeySlot {
            number: number as u32,
            active: slot.is_active(),
            iterations: if slot.is_active() { slot.iterations.into() } else { 0 },
        };
        self.header.raw.key_slots.iter().enumerate().map(slot).collect()
    }

    fn opened_by(&self, key: &Secret, monitor: &Monitor<'_>) -> Result<Vec<u32>> {
        let method = Method::of(&self.header, self.storage.name())?;
        let (mut opened, mut too_much) = (Vec::new(), None);
        for number in 0..SLOTS {
            // Each slot has its own budget: all eight are tried although an earlier one opened, and
            // the sum of slots that are allowed each must not refuse the image.
            let mut work = Work::new(&self.limits, monitor);
            let tried = self.try_slot(&method, number, key, &mut work);
            wipe_stack();
            if unless_too_much(tried, &mut too_much)?.is_some() {
                opened.push(number as u32);
            }
            tell_tried(monitor, number);
        }
        too_much.filter(|_| opened.is_empty()).map_or(Ok(opened), Err)
    }

    fn untried(&self) -> Option<Error> {
        let file = self.storage.name();
        let method = Method::of(&self.header, file).ok()?;
        let active = (0..SLOTS).filter(|number| self.header.raw.key_slots[*number].is_active());
        let rounds = active.map(|number| self.header.rounds(number, method.hash));
        let monitor = Monitor::default();
        rounds
            .map(|rounds| Work::new(&self.limits, &monitor).take(file, rounds))
            .find_map(Result::err)
    }

    fn add_in(
        &mut self,
        slot: Option<u32>,
        key: &Secret,
        new: &Secret,
        milliseconds: u64,
        monitor: &Monitor<'_>,
    ) -> Result<u32> {
        let file = self.storage.name().to_owned();
        let method = Method::of(&self.header, &file)?;
        let Some((_, volume_key)) = self.find(&method, std::slice::from_ref(key), monitor)? else {
            return Err(self.wrong_key("the key"));
        };
        let number = self.free_slot(slot)?;
        let digest = self.header.raw.mk_digest_iterations.get();
        let mut slot = Slot {
            iterations: method.iterations(milliseconds, &self.limits, Some(digest)).into(),
            ..self.header.raw.key_slots[number].clone()
        };
        random(&file, &mut slot.salt)?;
        monitor.cancel.check()?;
        let material = method.lock(&file, &volume_key, new, &slot)?;
        self.storage.write_at(&material, self.at(self.header.material_area(number).start))?;
        self.storage.write_at(slot.as_bytes(), self.slot_at(number))?;
        self.storage.sync()?;
        // Update the slot only after the new key is known to open it.
        slot.active = ACTIVE.into();
        let before = std::mem::replace(&mut self.header.raw.key_slots[number], slot.clone());
        let tried = self.try_slot(&method, number, new, &mut Work::new(&self.limits, monitor));
        tell_tried(monitor, number);
        match tried.and_then(|found| monitor.cancel.check().map(|()| found)) {
            Ok(Some(found)) if found == volume_key => {}
            other => {
                self.header.raw.key_slots[number] = before;
                other?;
                let (at, found) = (self.slot_at(number).0, "something else than what was written");
                return Err(Error::corrupt(&file, at, "new key slot", found, "the new key"));
            }
        }
        self.storage.write_at(slot.active.as_bytes(), self.slot_at(number))?;
        self.storage.sync()?;
        drop(volume_key);
        wipe_stack();
        Ok(number as u32)
    }

    fn wipe(&mut self, number: u32) -> Result<()> {
        let number = self.checked(number)?;
        self.overwrite_material(number)?;
        let mut slot = self.header.raw.key_slots[number].clone();
        slot.active = INACTIVE.into();
        self.storage.write_at(slot.active.as_bytes(), self.slot_at(number))?;
        self.storage.sync()?;
        // The rest of the slot is useless without the material.
        slot.iterations = U32::ZERO;
        slot.salt = [0; 32];
        self.storage.write_at(slot.as_bytes(), self.slot_at(number))?;
        self.header.raw.key_slots[number] = slot;
        self.storage.sync()
    }
}
