//! The flat disk.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use vdkit_block::{
    BitmapStatus, Bitmaps, CacheMode, Encryption, Error, Format, Gate, GuestOffset, ImageInfo,
    InFlightGuard, Inside, Limits, MapCache, MapCacheStats, NewBitmap, OpenRequest, OwnerProcess,
    Result, Storage, require_writable,
};

use crate::extent::{Cursor, DiskExtent, Extents, Purpose};
use crate::options::OpenOptions;
use crate::registry::Registry;
use crate::shown_size::ShownSize;
use crate::unit_cache::UnitCache;
use crate::walk::{Found, Walk};

/// Maximum layer lookups per [`Disk::extent_at`]; bounds the walk over a large, fully allocated
/// image.
const ANSWERS_MAX: u32 = 64;

/// One image of a chain. Clones are the same image.
#[derive(Clone, Debug)]
pub struct Layer {
    path: PathBuf,
    info: ImageInfo,
    probed: bool,
    format: Arc<dyn Format>,
}

impl Layer {
    /// Opens the map of an image, and its data file.
    pub(crate) fn open(
        walk: &mut Walk<'_>,
        found: Found,
        writable: bool,
        options: &OpenOptions,
    ) -> Result<Self> {
        let files = walk.open_files(&found, writable)?;
        let request =
            OpenRequest { storage: found.storage, files, writable, limits: options.limits };
        let format = found.driver.open_with_keys(request, &found.keys)?;
        Ok(Self { path: found.path, info: found.info, probed: found.probed, format })
    }

    /// The same image with another map.
    pub(crate) fn with_format(&self, format: Arc<dyn Format>) -> Self {
        Self { format, ..self.clone() }
    }

    /// The path by which it was opened: the user's own, or the overlay's reference joined to the
    /// overlay's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The image's metadata at open.
    pub fn info(&self) -> &ImageInfo {
        &self.info
    }

    /// Whether its format was probed.
    pub fn probed(&self) -> bool {
        self.probed
    }

    /// Its map.
    pub fn format(&self) -> &Arc<dyn Format> {
        &self.format
    }
}

/// Gates of the images that change while a disk is open: the top image's, and that of the image
/// beneath if it is written too. Requests enter them in this order.
pub(crate) type Gates<'a> = [Option<&'a Gate>; 2];

/// A request that has entered the gates of its disk; see [`Disk::begin`].
pub(crate) type Begun<'a> = [Option<Inside<'a>>; 2];

/// Enters gates. Waits while an image is resized whose format excludes requests meanwhile.
pub(crate) fn enter_all(gates: Gates<'_>) -> Begun<'_> {
    gates.map(|gate| gate.map(Gate::enter))
}

/// Requests in flight in the images that change: from a lookup in the map to the end of the I/O.
pub(crate) type Flights<'a> = (InFlightGuard<'a>, Option<InFlightGuard<'a>>);

/// A request of a caller that moves bytes itself; see [`Disk::enter`]. It stays on its thread.
#[derive(Debug)]
#[must_use = "the request ends when the guard is dropped"]
pub struct RequestGuard<'a> {
    // In the order in which they are left.
    _flights: Flights<'a>,
    _begun: Begun<'a>,
}

/// A disk as the guest sees it: an image and its backing chain. Shared by threads.
///
/// Requests of several threads may overlap; each byte then holds one request's data. Nothing is
/// durable before [`Disk::flush`] returns, unless the cache mode says so.
///
/// Dropping a disk without [`Disk::close`] leaves the state of a crash: consistent images, perhaps
/// with leaks.
#[derive(Debug)]
pub struct Disk {
    pub(crate) layers: Vec<Layer>,
    pub(crate) limits: Limits,
    pub(crate) units: UnitCache,
    /// See `crypto`.
    pub(crate) sectors: RwLock<()>,
    /// The backing image is written too; see [`Disk::share_beneath`].
    pub(crate) beneath_changes: bool,
    /// One resize at a time.
    pub(crate) resizing: Mutex<()>,
    /// What others see meanwhile.
    pub(crate) shown: ShownSize,
    name: String,
    cache: CacheMode,
    writable: bool,
    /// The process that opened it.
    owner: OwnerProcess,
}

/// A read-only view of an image's snapshot.
fn view(format: &dyn Format, which: &str, writable: bool) -> Result<Arc<dyn Format>> {
    if writable {
        let file = format.storage().name();
        return Err(Error::invalid_for(&file, "a snapshot can only be read; apply it first"));
    }
    format.require_snapshots("leave out the name of a snapshot")?.view(which)
}

impl Disk {
    /// Opens an image and its backing chain.
    ///
    /// # Errors
    /// [`Error::Refused`] for a reference that the policy forbids, naming the referring file and
    /// how to allow it; [`Error::Invalid`] for writing to an image that was probed as raw;
    /// [`Error::Corrupt`] for a chain with a loop and [`Error::Limit`] for one too long; errors of
    /// opening files and images.
    pub fn open(
        registry: &Registry,
        path: impl AsRef<Path>,
        options: &OpenOptions,
    ) -> Result<Self> {
        Self::open_walk(Walk::new(registry, path.as_ref(), options), options)
    }

    /// [`Disk::open`] of a storage that the caller opened, and locked if that is needed. It has no
    /// folder of its own, so its references reach only the folders that the policy lists.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub fn open_storage(
        registry: &Registry,
        storage: Arc<dyn Storage>,
        options: &OpenOptions,
    ) -> Result<Self> {
        Self::open_walk(Walk::of_storage(registry, storage, options), options)
    }

    fn open_walk(mut walk: Walk<'_>, options: &OpenOptions) -> Result<Self> {
        let mut layers = Vec::new();
        while let Some(found) = walk.step()? {
            let writable = options.writable && layers.is_empty();
            if writable {
                found.check_written_as_probed()?;
            }
            let mut layer = Layer::open(&mut walk, found, writable, options)?;
            if let Some(which) = &options.snapshot
                && layers.is_empty()
            {
                layer.format = view(&*layer.format, which, options.writable)?;
                // A snapshot holds no other snapshots, and the bitmaps describe the current disk.
                layer.info.snapshots.clear();
                layer.info.bitmaps.clear();
            }
            layers.push(layer);
        }
        Ok(Self::from_layers(layers, options))
    }

    /// A single open image: unallocated bytes are holes. For images that are being made.
    pub fn from_format(format: Arc<dyn Format>, info: ImageInfo, options: &OpenOptions) -> Self {
        let path = PathBuf::from(format.storage().name());
        let layer = Layer { path, info, probed: false, format };
        Self::from_layers(vec![layer], options)
    }

    /// Puts this disk on another one's layers, for an overlay that is being made. `base` should be
    /// read-only.
    pub fn over(mut self, base: Self) -> Self {
        self.layers.extend(base.layers);
        self
    }

    pub(crate) fn from_layers(layers: Vec<Layer>, options: &OpenOptions) -> Self {
        let name = layers.first().map(|top| top.path.display().to_string()).unwrap_or_default();
        let writable =
            options.writable && layers.first().is_some_and(|top| top.format.caps().writable);
        Self {
            layers,
            limits: options.limits,
            units: UnitCache::default(),
            sectors: RwLock::default(),
            beneath_changes: false,
            resizing: Mutex::default(),
            shown: ShownSize::default(),
            name,
            cache: options.cache,
            writable,
            owner: OwnerProcess::current(),
        }
    }

    /// The top image's name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The images, top first; never empty.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The top image's map.
    ///
    /// Publish compressed units that were reserved here with [`Disk::publish_compressed`]. If other
    /// threads may resize the disk, call [`Disk::enter`] before reserving here, or changing the
    /// image otherwise, and keep the guard until that is published. Where the caller may be a child
    /// of `fork`, call [`Disk::refuse_in_child`] before any change here.
    pub fn top(&self) -> &Arc<dyn Format> {
        &self.layers[0].format
    }

    /// Calls [`MapCache::expect_one_pass`](vdkit_block::MapCache::expect_one_pass) on all images.
    pub fn expect_one_pass(&self) {
        self.layers
            .iter()
            .filter_map(|layer| layer.format.map_cache())
            .for_each(MapCache::expect_one_pass);
    }

    /// Statistics of all map caches together; `None` if no image of the chain has one.
    pub fn map_cache(&self) -> Option<MapCacheStats> {
        let caches =
            self.layers.iter().filter_map(|layer| layer.format.map_cache()).map(MapCache::stats);
        caches.reduce(MapCacheStats::plus)
    }

    /// Warnings from opening the images.
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        self.layers.iter().flat_map(|layer| layer.format.warnings()).map(String::as_str)
    }

    /// Encryption of a layer's data extents. Callers that move the bytes of an encrypted extent
    /// themselves, without [`Disk::read_at`] and [`Disk::write_at`], move ciphertext.
    pub fn encryption(&self, depth: usize) -> Option<&Encryption> {
        self.layers.get(depth).and_then(|layer| layer.format.encryption())
    }

    /// Whether it may be written.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// The cache mode.
    pub fn cache(&self) -> CacheMode {
        self.cache
    }

    /// Bytes of the disk.
    pub fn guest_bytes(&self) -> u64 {
        self.shown.get(|| self.top().guest_bytes())
    }

    /// Begins a request. Callers that move the bytes of an extent themselves enter before the
    /// lookup and keep the guard until the bytes are moved, so that the space is not reused, and no
    /// block moves, meanwhile. (Only the top image changes while a disk is open, or the two on top:
    /// see [`Disk::share_beneath`].) The thread may make any request while it holds the guard, but
    /// must not resize or close the disk, which waits for the guard.
    pub fn enter(&self) -> RequestGuard<'_> {
        let begun = self.begin();
        RequestGuard { _flights: self.in_flight(), _begun: begun }
    }

    /// The image beneath, if it changes.
    fn changing_beneath(&self) -> Option<&Layer> {
        if self.beneath_changes { self.layers.get(1) } else { None }
    }

    /// The gates that each request enters first, and only once: all public methods that ask the map
    /// anything do so.
    pub(crate) fn gates(&self) -> Gates<'_> {
        [self.top().gate(), self.changing_beneath().and_then(|layer| layer.format.gate())]
    }

    /// Begins a request, before its range is compared with the size.
    pub(crate) fn begin(&self) -> Begun<'_> {
        enter_all(self.gates())
    }

    /// [`Disk::begin`] without waiting; `None` if it would wait.
    pub(crate) fn try_begin(&self) -> Option<Begun<'_>> {
        let enter = |gate| Option::map_or(gate, Some(None), |gate| Gate::try_enter(gate).map(Some));
        let [top, beneath] = self.gates();
        Some([enter(top)?, enter(beneath)?])
    }

    /// Keeps space that the map names from being reused. Within a request that has begun.
    pub(crate) fn in_flight(&self) -> Flights<'_> {
        let beneath = self.changing_beneath();
        (self.top().in_flight().enter(), beneath.map(|layer| layer.format.in_flight().enter()))
    }

    /// Fails within a request of this thread, for which a resize or a close would wait.
    pub(crate) fn refuse_within_request(&self) -> Result<()> {
        if self.gates().into_iter().flatten().any(Gate::is_inside) {
            let what = "the disk cannot be resized or closed within a request of the same thread";
            return Err(Error::invalid_for(&self.name, what));
        }
        Ok(())
    }

    /// Resource limits on images.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The extent at `at`, at most `len` bytes, through the whole chain. It is the longest run that
    /// is cheap to find: the next extent may continue it.
    ///
    /// # Errors
    /// [`Error::Invalid`] past the end of the disk and for `len` 0; damage; errors of storages.
    pub fn extent_at(&self, at: GuestOffset, len: u64) -> Result<DiskExtent<'_>> {
        let _guard = self.enter();
        self.check_range(at, len)?;
        self.walk(Purpose::Map, at.0, at.0 + len)
            .step_within(ANSWERS_MAX)?
            .ok_or_else(|| Error::invalid_for(&self.name, "an empty range has no map"))
    }

    /// The extents of a range, in order, through the whole chain. With concurrent writes, each
    /// extent is as of some moment during the walk.
    ///
    /// # Errors
    /// [`Error::Invalid`] past the end of the disk.
    pub fn extents(&self, at: GuestOffset, len: u64) -> Result<Extents<'_>> {
        self.extents_of(self.layers.len(), at, len)
    }

    /// As [`Disk::extents`] for the first `layers` images only: bytes that they do not hold are a
    /// [`crate::DiskPlace::Hole`].
    ///
    /// # Errors
    /// As [`Disk::extents`].
    pub fn extents_of(&self, layers: usize, at: GuestOffset, len: u64) -> Result<Extents<'_>> {
        self.check_range(at, len)?;
        let layers = &self.layers[..layers.min(self.layers.len())];
        let cursor = Cursor::new(layers, Purpose::Map, at.0, at.0 + len);
        Ok(Extents::new(cursor, self.gates()))
    }

    /// The extents of a range, for a request that has begun.
    pub(crate) fn walk(&self, purpose: Purpose, at: u64, end: u64) -> Extents<'_> {
        Extents::new(Cursor::new(&self.layers, purpose, at, end), [None; 2])
    }

    /// Fails for ranges beyond the disk.
    pub(crate) fn check_range(&self, at: GuestOffset, len: u64) -> Result<()> {
        let bytes = self.guest_bytes();
        match at.0.checked_add(len) {
            Some(end) if end <= bytes => Ok(()),
            _ => Err(Error::invalid_for(
                &self.name,
                format!("{len} bytes at {at} reach past the end of the disk at {bytes:#x}"),
            )),
        }
    }

    pub(crate) fn check_writable(&self) -> Result<()> {
        require_writable(self.writable, &self.name)?;
        self.refuse_in_child("change")
    }

    /// Flushes data and map in cache modes in which a change is durable on return. One flush serves
    /// all concurrent callers.
    pub(crate) fn flush_if_write_durable(&self) -> Result<()> {
        if self.cache.write_durable() { self.flush() } else { Ok(()) }
    }

    /// Makes every change before this call durable.
    ///
    /// # Errors
    /// Errors of the format and its storages. After a failed sync, data may be lost.
    /// [`Error::Invalid`] in a child of `fork`, which has a copy of its parent's map.
    pub fn flush(&self) -> Result<()> {
        if !self.writable {
            return Ok(());
        }
        self.refuse_in_child("flush")?;
        self.top().flush()
    }

    /// Whether this process is a child of `fork` whose parent opened it.
    pub fn is_inherited(&self) -> bool {
        !self.owner.is_current()
    }

    /// Refuses a change in a child of `fork`, whose copy of the map does not have what the parent has
    /// changed since: even a write in place could go to space that now holds other guest bytes. `act` is a verb for the message. The disk's own methods call this;
    /// code that changes the image through [`Disk::top`] calls it first.
    ///
    /// # Errors
    /// [`Error::Invalid`] in a child of `fork` whose parent opened the disk.
    pub fn refuse_in_child(&self, act: &str) -> Result<()> {
        if !self.is_inherited() {
            return Ok(());
        }
        let what =
            format!("the parent of this process opened it, and only the parent can {act} it");
        Err(Error::invalid_for(&self.name, what))
    }

    /// Flushes, and marks the image as closed. A change after that begins as after opening, so that only
    /// another close ends it.
    ///
    /// # Errors
    /// As [`Disk::flush`]; [`Error::Invalid`] within a request of the same thread ([`Disk::enter`]), in
    /// formats that move blocks.
    pub fn close(&self) -> Result<()> {
        if !self.writable {
            return Ok(());
        }
        self.refuse_in_child("close")?;
        self.refuse_within_request()?;
        let taken_back = {
            // Under the lock, a size that is not shown is none of a resize that still runs, but of
            // one that failed and could not be taken back. This is the last time to do that.
            let _no_resize = self.resizing.lock();
            let shown = self.guest_bytes();
            if self.top().guest_bytes() > shown { self.top().resize(shown) } else { Ok(()) }
        };
        self.top().close()?;
        taken_back
    }
}

impl Disk {
    /// The top image's bitmaps, for a change.
    fn bitmaps_to_change(&self) -> Result<&dyn Bitmaps> {
        self.refuse_in_child("change the bitmaps of")?;
        self.top().require_bitmaps()
    }
}

/// The bitmaps of the top image. A child of `fork` reads them, and changes none.
///
/// # Errors
/// Of each method also [`Error::Unsupported`] if the format has no bitmaps.
impl Bitmaps for Disk {
    fn list(&self) -> Result<Vec<BitmapStatus>> {
        self.top().require_bitmaps()?.list()
    }

    fn for_each_dirty(
        &self,
        name: &str,
        found: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        self.top().require_bitmaps()?.for_each_dirty(name, found)
    }

    fn check_new(&self, new: &NewBitmap<'_>) -> Result<()> {
        self.top().require_bitmaps()?.check_new(new)
    }

    fn add(&self, new: &NewBitmap<'_>) -> Result<()> {
        self.bitmaps_to_change()?.add(new)
    }

    fn remove(&self, name: &str) -> Result<()> {
        self.bitmaps_to_change()?.remove(name)
    }

    fn clear(&self, name: &str) -> Result<()> {
        self.bitmaps_to_change()?.clear(name)
    }

    fn set_enabled(&self, name: &str, enabled: bool) -> Result<()> {
        self.bitmaps_to_change()?.set_enabled(name, enabled)
    }

    fn merge(&self, name: &str, source: &dyn Bitmaps, source_name: &str) -> Result<()> {
        self.bitmaps_to_change()?.merge(name, source, source_name)
    }

    fn mark_all_dirty(&self) -> Result<()> {
        self.bitmaps_to_change()?.mark_all_dirty()
    }
}
