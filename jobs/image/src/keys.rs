//! Key slots of encrypted images.
//!
//! A key is removed only after another key was tried and is durable.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use vdkit_block::{Error, KeySlot, KeySlots, Monitor, Progress, Remedy, Result, Secret};
use vdkit_chain::{OpenOptions, Registry, open_image};

/// What the removal of a slot may do, to follow "if".
const UNREADABLE: &str = "all data may become unreadable for good";

/// The key slots of an image.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct ListedKeys {
    /// The image's format.
    pub format: &'static str,
    /// The encryption method.
    pub encryption: String,
    /// All slots, including free ones.
    pub slots: Vec<KeySlot>,
    /// Slots opened by the given keys.
    pub opened: Vec<u32>,
}

/// The key slots after a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct KeysAfter {
    /// The slot with the new key.
    #[serde(rename = "added-slot", skip_serializing_if = "Option::is_none")]
    pub added: Option<u32>,
    /// Wiped slots.
    #[serde(rename = "removed-slots")]
    pub removed: Vec<u32>,
    /// All slots now.
    pub slots: Vec<KeySlot>,
}

/// Progress over all keys: how many key slots were tried.
struct Tries<'a> {
    progress: &'a dyn Progress,
    tried: AtomicU64,
    total: u64,
}

impl<'a> Tries<'a> {
    /// `passes`: how often all slots are tried.
    fn new(monitor: &Monitor<'a>, image: &Image, passes: usize) -> Self {
        let total = (image.slots.slots().len() * passes) as u64;
        monitor.progress.update(0, total);
        Self { progress: monitor.progress, tried: AtomicU64::new(0), total }
    }

    fn monitor<'t>(&'t self, of: &Monitor<'_>) -> Monitor<'t> {
        Monitor::new(self).cancelled_by(of.cancel.clone())
    }
}

impl Progress for Tries<'_> {
    fn update(&self, _done: u64, _total: u64) {
        let tried = self.tried.fetch_add(1, Ordering::Relaxed) + 1;
        self.progress.update(tried, self.total.max(tried));
    }

    fn message(&self, text: &str) {
        self.progress.message(text);
    }
}

/// An image with key slots.
struct Image {
    file: String,
    slots: Box<dyn KeySlots>,
}

impl Image {
    fn open(
        registry: &Registry,
        path: &Path,
        options: &OpenOptions,
        writable: bool,
    ) -> Result<(Self, ListedKeys)> {
        let options = options.clone().writable(writable);
        let file = path.display().to_string();
        let image = open_image(registry, path, &options)?;
        let slots = match image.driver.keyed_images() {
            Some(keyed) => keyed.key_slots(&image.storage, &options.limits)?,
            None => None,
        };
        let Some(slots) = slots else {
            let what = match image.info.encryption {
                Some(method) => format!("its encryption ({method}) has no key slots"),
                None => "is not encrypted, so it has no key slots".to_owned(),
            };
            let target = Some(("qcow2", "encrypt.format=luks".to_owned()));
            let remedy = Remedy::Convert { file: file.clone(), target, new_key: true };
            return Err(Error::unsupported(&file, what, remedy));
        };
        let encryption = image.info.encryption.unwrap_or_default();
        let (format, all) = (image.driver.name(), slots.slots());
        let listed = ListedKeys { format, encryption, slots: all, opened: Vec::new() };
        Ok((Self { file, slots }, listed))
    }

    /// Slots opened by the keys, with the key for each.
    fn opened<'k>(
        &self,
        keys: &'k [Secret],
        monitor: &Monitor<'_>,
    ) -> Result<Vec<(u32, &'k Secret)>> {
        let tries = Tries::new(monitor, self, keys.len());
        let (mut opened, mut limit): (Vec<(u32, &Secret)>, _) = (Vec::new(), None);
        for key in keys {
            for slot in self.opened_within(key, &mut limit, &tries.monitor(monitor))? {
                if opened.iter().all(|(known, _)| *known != slot) {
                    opened.push((slot, key));
                }
            }
        }
        match limit.filter(|_| opened.is_empty()) {
            Some(error) => Err(error),
            None => Ok(opened),
        }
    }

    /// The slots that a key opens. An error of a slot that takes too long is kept in `limit`, since
    /// another key may open the image.
    fn opened_within(
        &self,
        key: &Secret,
        limit: &mut Option<Error>,
        monitor: &Monitor<'_>,
    ) -> Result<Vec<u32>> {
        match self.slots.opened_by(key, monitor) {
            Err(error @ Error::Limit { .. }) => {
                limit.get_or_insert(error);
                Ok(Vec::new())
            }
            other => other,
        }
    }

    /// The first key that opens the image.
    fn key<'k>(&self, keys: &'k [Secret], monitor: &Monitor<'_>) -> Result<&'k Secret> {
        if keys.is_empty() {
            return Err(Error::no_key(&self.file, "luks"));
        }
        let mut limit = None;
        for key in keys {
            if !self.opened_within(key, &mut limit, monitor)?.is_empty() {
                return Ok(key);
            }
        }
        Err(limit.unwrap_or_else(|| self.wrong_key()))
    }

    fn wrong_key(&self) -> Error {
        Error::Key {
            file: self.file.clone(),
            what: "the key opens none of its key slots".to_owned(),
            remedy: Box::new("give a key that opens the image".into()),
        }
    }

    fn after(&self, added: Option<u32>, removed: Vec<u32>) -> KeysAfter {
        KeysAfter { added, removed, slots: self.slots.slots() }
    }
}

/// The key slots of an image, and those that the keys in `options` open. Progress is the number of slots that
/// were tried.
///
/// # Errors
/// [`Error::Unsupported`] for an image without key slots; errors of opening; [`Error::Interrupted`].
pub fn list_keys(
    registry: &Registry,
    path: &Path,
    options: &OpenOptions,
    monitor: &Monitor<'_>,
) -> Result<ListedKeys> {
    let (image, mut listed) = Image::open(registry, path, options, false)?;
    let opened = image.opened(&options.keys, monitor)?;
    listed.opened = opened.into_iter().map(|(slot, _)| slot).collect();
    Ok(listed)
}

/// Adds a key, in this slot or the first free one. The new slot is durable on return.
///
/// # Errors
/// [`Error::Key`] if none of the keys in `options` opens the image; [`Error::Invalid`] if the slot
/// is in use, or none is free; [`Error::Interrupted`], and then the key is not added.
pub fn add_key(
    registry: &Registry,
    path: &Path,
    options: &OpenOptions,
    new: &Secret,
    slot: Option<u32>,
    milliseconds: u64,
    monitor: &Monitor<'_>,
) -> Result<KeysAfter> {
    let (mut image, _) = Image::open(registry, path, options, true)?;
    let tries = Tries::new(monitor, &image, options.keys.len() + 1);
    let monitor = &tries.monitor(monitor);
    let key = image.key(&options.keys, monitor)?;
    let added = image.slots.add_in(slot, key, new, milliseconds, monitor)?;
    Ok(image.after(Some(added), Vec::new()))
}

/// Wipes a slot. Without `force`, one of the keys in `options` must open another slot, so that the
/// image stays accessible.
///
/// # Errors
/// [`Error::Key`] if no key is known to open the image afterwards; [`Error::Invalid`] for a slot
/// that is already free, without `force`; [`Error::Interrupted`], and then no slot is wiped.
pub fn remove_key(
    registry: &Registry,
    path: &Path,
    options: &OpenOptions,
    slot: u32,
    force: bool,
    monitor: &Monitor<'_>,
) -> Result<KeysAfter> {
    let (mut image, _) = Image::open(registry, path, options, true)?;
    let file = image.file.clone();
    if !force {
        let active = |known: &KeySlot| known.number == slot && known.active;
        if !image.slots.slots().iter().any(active) {
            return Err(Error::invalid_for(&file, format!("key slot {slot} is not in use")));
        }
        if options.keys.is_empty() {
            return Err(Error::Key {
                file,
                what: "no key is given that shows that it can be opened afterwards".to_owned(),
                remedy: Remedy::forced(UNREADABLE, Remedy::GiveOtherKey),
            });
        }
        let opened = image.opened(&options.keys, monitor)?;
        if opened.is_empty() {
            return Err(image.wrong_key());
        }
        if opened.iter().all(|(opened, _)| *opened == slot) {
            return Err(Error::Key {
                file,
                what: format!("the key opens slot {slot} alone, which would go"),
                remedy: Remedy::forced(UNREADABLE, Remedy::GiveOtherKey),
            });
        }
    }
    monitor.cancel.check()?;
    image.slots.wipe(slot)?;
    Ok(image.after(None, vec![slot]))
}

/// Replaces an old key, the first in `options` that opens the image, by a new one. The new slot is
/// durable and was tried before the old one is wiped: `slot`, or all that the old key opens.
///
/// # Errors
/// [`Error::Key`] if none of the keys opens the image or `slot`; [`Error::Invalid`] if no slot is
/// free, or the new key is the old one; [`Error::Limit`] if, without `slot`, the old key cannot be
/// tried on all slots; [`Error::Interrupted`]. The keys are then as before.
pub fn change_key(
    registry: &Registry,
    path: &Path,
    options: &OpenOptions,
    new: &Secret,
    slot: Option<u32>,
    milliseconds: u64,
    monitor: &Monitor<'_>,
) -> Result<KeysAfter> {
    let (mut image, _) = Image::open(registry, path, options, true)?;
    if slot.is_none()
        && let Some(error) = image.slots.untried()
    {
        // The old key may open that slot too, and would go on to open the image.
        return Err(error);
    }
    let tries = Tries::new(monitor, &image, options.keys.len() + 2);
    let monitor = &tries.monitor(monitor);
    let key = image.key(&options.keys, monitor)?;
    if key == new {
        return Err(Error::invalid_for(&image.file, "the new key is the old one"));
    }
    let mut old = image.slots.opened_by(key, monitor)?;
    if let Some(slot) = slot {
        if !old.contains(&slot) {
            return Err(Error::Key {
                file: image.file,
                what: format!("the key does not open slot {slot}"),
                remedy: Box::new(format!("it opens {old:?}").into()),
            });
        }
        old = vec![slot];
    }
    let added = image.slots.add(key, new, milliseconds, monitor)?;
    for &slot in &old {
        image.slots.wipe(slot)?;
    }
    Ok(image.after(Some(added), old))
}
