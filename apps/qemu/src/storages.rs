//! Storages that only QEMU's names ask for: a disk of nothing, a part of another storage, and the disk
//! of an image as bytes.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use vdkit::storage::{FileOptions, FileStorage, LockMode};
use vdkit::{
    CacheMode, Disk, Error, GuestOffset, HostOffset, Protocol, Result, SpaceMap, Storage,
    StorageCaps, StorageExtent, TruncationCheck, ZeroMode,
};

use crate::names::{Image, Place, TlsClient};
use crate::open::{Access, open_options, registry};
use crate::secrets::Objects;

/// Storages end with whole sectors.
const SECTOR_BYTES: u64 = 512;

/// What the names of these places begin with. No user can give such a name: to `names::parse` it is
/// an unknown protocol.
const PREFIX: &str = "vdkit-place:";

/// What the names of such places mean. The engine opens storages by name, so each name is a number
/// here.
static NOTED: Mutex<Noted> = Mutex::new(Noted { images: Vec::new(), objects: Objects::new() });

#[derive(Debug)]
struct Noted {
    images: Vec<Image>,
    /// The objects of the command line, which the images refer to by id.
    objects: Objects,
}

/// A name under which the engine opens the place of an image.
pub fn path(image: &Image) -> PathBuf {
    let images = &mut NOTED.lock().expect("no thread panics with it").images;
    let index = images.iter().position(|other| other == image).unwrap_or_else(|| {
        images.push(image.clone());
        images.len() - 1
    });
    format!("{PREFIX}{index}").into()
}

/// The image that such a name means.
pub fn noted(name: &str) -> Option<Image> {
    let index = name.strip_prefix(PREFIX)?.parse::<usize>().ok()?;
    NOTED.lock().expect("no thread panics with it").images.get(index).cloned()
}

/// Notes the objects of the command line, before an image is named.
pub fn note_objects(objects: &Objects) {
    NOTED.lock().expect("no thread panics with it").objects = objects.clone();
}

/// The objects that were noted.
pub fn objects() -> Objects {
    NOTED.lock().expect("no thread panics with it").objects.clone()
}

/// Opens the disk of an image that another image stands on.
pub fn open_disk(image: &Image, writable: bool, cache: CacheMode) -> Result<Disk> {
    let access = Access { writable, share: image.unlocked, cache, ..Access::default() };
    let options = open_options(image, access, &objects())
        .map_err(|why| Error::invalid(crate::failure::without_name(&image.typed, &why)))?;
    Disk::open(&registry(), image.opened(options.lock), &options)
}

/// The URI of an export with TLS.
fn secured(uri: &str, tls: &TlsClient) -> Result<String> {
    let (user, options) =
        crate::nbd::tls::client_options(&tls.id, tls.hostname.as_deref(), &objects())
            .map_err(|failure| Error::invalid(failure.text))?;
    let rest = uri.strip_prefix("nbd").unwrap_or(uri);
    let (scheme, rest) = rest.split_once("://").unwrap_or(("", rest));
    let sign = if rest.contains('?') { '&' } else { '?' };
    Ok(format!("nbds{scheme}://{user}{rest}{sign}{options}"))
}

/// The storage of a place, as a whole.
fn open_place(image: &Image, writable: bool, cache: CacheMode) -> Result<Arc<dyn Storage>> {
    match &image.place {
        Place::Null(bytes) => Ok(Arc::new(NullStorage::new(*bytes))),
        Place::Debug(debug) => debug.open(&image.typed, image.format.as_deref(), writable, cache),
        Place::File(file) => {
            let lock = if image.unlocked { LockMode::Off } else { LockMode::Auto };
            let options = FileOptions::default().writable(writable).cache(cache).lock(lock);
            Ok(Arc::new(FileStorage::open(file, &options)?))
        }
        Place::Nbd(uri) => {
            let secured = image.tls.as_ref().map(|tls| secured(uri, tls)).transpose()?;
            vdkit::nbd_client::NBD.open(secured.as_ref().unwrap_or(uri), writable, cache)
        }
        Place::Disk(image) => Ok(Arc::new(DiskStorage::new(open_disk(image, writable, cache)?))),
        Place::Reference => Err(Error::invalid("no overlay names this image")),
    }
}

/// Opens these names.
#[derive(Debug)]
pub struct Places;

impl Protocol for Places {
    fn matches(&self, name: &str) -> bool {
        name.starts_with(PREFIX)
    }

    fn open(&self, name: &str, writable: bool, cache: CacheMode) -> Result<Arc<dyn Storage>> {
        let image =
            noted(name).ok_or_else(|| Error::invalid(format!("{name}: is no name of an image")))?;
        let whole = open_place(&image, writable, cache)?;
        let Some((start, bytes)) = image.window else { return Ok(whole) };
        let len = whole.len()?;
        match PartOf::new(whole, start, bytes)? {
            Some(part) => Ok(Arc::new(part)),
            None => Err(Error::invalid(beyond(start, bytes, len).unwrap_or_default())),
        }
    }
}

/// Why a part of a storage of `len` bytes reaches past its last sector, if it does.
pub fn beyond(start: u64, bytes: Option<u64>, len: u64) -> Option<String> {
    let len = len.next_multiple_of(SECTOR_BYTES);
    match bytes {
        _ if start > len => Some(format!(
            "Offset ({start}) cannot be greater than size of the containing file ({len})"
        )),
        Some(bytes) if start.checked_add(bytes).is_none_or(|end| end > len) => Some(format!(
            "The sum of offset ({start}) and size ({bytes}) has to be smaller or equal to the  actual \
             size of the containing file ({len})"
        )),
        _ => None,
    }
}

/// Reads as zeroes, and drops what is written (`null-co`).
#[derive(Debug)]
pub struct NullStorage {
    bytes: u64,
}

impl NullStorage {
    /// A disk of this many bytes.
    pub fn new(bytes: u64) -> Self {
        Self { bytes }
    }
}

impl Storage for NullStorage {
    fn name(&self) -> &str {
        "null-co://"
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps {
            writable: true,
            volatile: true,
            prompt_writes: true,
            ..StorageCaps::default()
        }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.bytes)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let there = self.bytes.saturating_sub(offset.0).min(buf.len() as u64) as usize;
        buf[..there].fill(0);
        Ok(there)
    }

    fn write_at(&self, _buf: &[u8], _offset: HostOffset) -> Result<()> {
        Ok(())
    }

    fn write_zeroes(&self, _offset: HostOffset, _len: u64, _mode: ZeroMode) -> Result<()> {
        Ok(())
    }

    fn discard(&self, _offset: HostOffset, _len: u64) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, _offset: HostOffset, _len: u64) -> Result<()> {
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

/// A part of another storage, of fixed length (`driver=raw,offset=…,size=…`).
#[derive(Debug)]
pub struct PartOf {
    inner: Arc<dyn Storage>,
    start: u64,
    bytes: u64,
}

impl PartOf {
    /// The `bytes` from `start` on; `None` is all to the end. It may end within the last sector that
    /// the storage fills only in part; the rest of that sector reads as zero. Returns `None` if it
    /// would end later.
    pub fn new(inner: Arc<dyn Storage>, start: u64, bytes: Option<u64>) -> Result<Option<Self>> {
        let len = inner.len()?;
        let whole = len.next_multiple_of(SECTOR_BYTES);
        let Some(there) = whole.checked_sub(start) else { return Ok(None) };
        let bytes = bytes.unwrap_or(len.saturating_sub(start));
        Ok((bytes <= there).then_some(Self { inner, start, bytes }))
    }

    /// The part of a range that lies within, at its place in the inner storage.
    fn within(&self, offset: HostOffset, len: u64) -> (HostOffset, u64) {
        let there = self.bytes.saturating_sub(offset.0).min(len);
        (HostOffset(self.start + offset.0.min(self.bytes)), there)
    }

    /// As [`PartOf::within`], for a change: a change that reaches past the end is refused.
    fn to_change(&self, offset: HostOffset, len: u64) -> Result<HostOffset> {
        match self.within(offset, len) {
            (at, there) if there == len => Ok(at),
            _ => Err(vdkit::Error::invalid(format!(
                "{}: the part of it that was named ends before byte {}",
                self.inner.name(),
                offset.0.saturating_add(len)
            ))),
        }
    }
}

impl Storage for PartOf {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps { growable: false, ..self.inner.caps() }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.bytes)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let (at, there) = self.within(offset, buf.len() as u64);
        let buf = &mut buf[..there as usize];
        let mut read = 0;
        while read < buf.len() {
            match self.inner.read_up_to(&mut buf[read..], HostOffset(at.0 + read as u64))? {
                0 => break,
                more => read += more,
            }
        }
        buf[read..].fill(0);
        Ok(buf.len())
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.inner.write_at(buf, self.to_change(offset, buf.len() as u64)?)
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        self.inner.write_zeroes(self.to_change(offset, len)?, len, mode)
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        let (at, there) = self.within(offset, len);
        self.inner.discard(at, there)
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.inner.allocate(self.to_change(offset, len)?, len)
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }

    fn space_map(&self) -> Option<&dyn SpaceMap> {
        self.inner.space_map().map(|_| self as &dyn SpaceMap)
    }
}

impl SpaceMap for PartOf {
    fn may_have_holes(&self) -> Result<bool> {
        self.inner.space_map().map_or(Ok(false), SpaceMap::may_have_holes)
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        let (at, there) = self.within(offset, len);
        match self.inner.space_map() {
            Some(map) if there > 0 => map.extent_at(at, there),
            _ => Ok(StorageExtent { len, data: false }),
        }
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.inner.allocated_bytes()
    }
}

/// A disk as a storage of bytes.
#[derive(Debug)]
pub struct DiskStorage {
    disk: Disk,
    name: String,
}

impl DiskStorage {
    /// The bytes of this disk. The disk is closed with the storage.
    pub fn new(disk: Disk) -> Self {
        let name = disk.name().to_owned();
        Self { disk, name }
    }
}

impl Storage for DiskStorage {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps { writable: self.disk.writable(), device: true, ..StorageCaps::default() }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.disk.guest_bytes())
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let there = self.disk.guest_bytes().saturating_sub(offset.0).min(buf.len() as u64) as usize;
        self.disk.read_at(&mut buf[..there], GuestOffset(offset.0))?;
        Ok(there)
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        self.disk.write_at(buf, GuestOffset(offset.0))
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, mode: ZeroMode) -> Result<()> {
        self.disk.write_zeroes(GuestOffset(offset.0), len, mode == ZeroMode::MayUnmap)
    }

    fn discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        self.disk.discard(GuestOffset(offset.0), len)
    }

    fn allocate(&self, _offset: HostOffset, _len: u64) -> Result<()> {
        // The disk's format finds the space when bytes are written.
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.disk.flush()
    }

    vdkit::capabilities!(space_map: SpaceMap);
}

impl SpaceMap for DiskStorage {
    fn may_have_holes(&self) -> Result<bool> {
        Ok(true)
    }

    fn extent_at(&self, offset: HostOffset, len: u64) -> Result<StorageExtent> {
        let there = self.disk.guest_bytes().saturating_sub(offset.0).min(len);
        if there == 0 {
            return Ok(StorageExtent { len, data: false });
        }
        let extent = self.disk.extent_at(GuestOffset(offset.0), there)?;
        // Jobs ask what there is to copy. They see no truncated image beneath a disk themselves.
        TruncationCheck::default().refuse(&self.disk, &extent)?;
        Ok(StorageExtent { len: extent.len, data: !extent.place.reads_zero() })
    }

    fn allocated_bytes(&self) -> Result<u64> {
        Ok(self.disk.guest_bytes())
    }
}

impl Drop for DiskStorage {
    fn drop(&mut self) {
        // What was written was flushed; an unclean mark is all that an error could leave.
        let _ = self.disk.close();
    }
}

#[cfg(test)]
mod tests {
    use vdkit::storage::MemoryStorage;

    use super::*;

    #[test]
    fn a_part_begins_and_ends_where_it_was_told() {
        let bytes: Vec<u8> = (0..100).collect();
        let inner: Arc<dyn Storage> = Arc::new(MemoryStorage::from_bytes("a", &bytes));
        let part = PartOf::new(inner.clone(), 10, Some(20)).unwrap().unwrap();
        let mut buf = [0; 30];
        assert_eq!(part.read_up_to(&mut buf, HostOffset(5)).unwrap(), 15);
        assert_eq!(buf[..15], bytes[15..30]);
        assert_eq!(part.read_up_to(&mut buf, HostOffset(20)).unwrap(), 0);
        part.write_at(&[9; 20], HostOffset(0)).unwrap();
        assert!(part.write_at(&[9; 20], HostOffset(1)).is_err());
        let mut all = [0; 100];
        inner.read_up_to(&mut all, HostOffset(0)).unwrap();
        assert_eq!((all[9], all[10], all[29], all[30]), (9, 9, 9, 30));
        assert_eq!(all[..10], bytes[..10]);
        assert!(PartOf::new(inner.clone(), 90, Some(423)).unwrap().is_none());
        assert!(PartOf::new(inner.clone(), 513, None).unwrap().is_none());
        let last = PartOf::new(inner, 0, Some(512)).unwrap().unwrap();
        let mut sector = [1; 512];
        assert_eq!(last.read_up_to(&mut sector, HostOffset(0)).unwrap(), 512);
        assert_eq!((sector[99], sector[100], sector[511]), (99, 0, 0));
    }
}
