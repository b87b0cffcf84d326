//! A read-only format and its driver, on top of a map.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use vdkit_block::{
    BackingRef, CheckReport, Compressed, CompressedUnits, DriverInfo, Error, Extent, FileIndex,
    Format, FormatCaps, FormatDriver, GuestOffset, HostOffset, ImageInfo, InFlight, IoAction,
    Limits, MapCache, MapCacheStats, Monitor, OfflineImage, OpenRequest, Place, Probe, Repair,
    Reservation, Result, Severity, Storage,
};

use crate::inflate;
use crate::tables::Tables;

/// Maximum runs merged per lookup.
const RUNS_MAX: u32 = 4096;
/// QEMU's limit: longer names of backing files are refused.
const NAME_BYTES_MAX: u32 = 1023;

/// A validated image: locates guest bytes and describes itself.
pub(crate) trait Map: Send + Sync + fmt::Debug + Sized + 'static {
    const INFO: DriverInfo;

    /// What the file begins with; one of them.
    const MAGICS: &'static [&'static [u8]];

    /// Whether a file has this format; arguments as for [`FormatDriver::probe`].
    fn matches(head: &[u8], tail: &[u8], len: u64) -> bool {
        let _ = (tail, len);
        Self::MAGICS.iter().any(|magic| head.starts_with(magic))
    }

    /// The first bytes of the file; fails without one of the magic numbers.
    fn header<const N: usize>(storage: &dyn Storage, expected: &str) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        let got = storage.read_up_to(&mut bytes, HostOffset(0))?;
        if got < N || !Self::MAGICS.iter().any(|magic| bytes.starts_with(magic)) {
            return Err(Error::corrupt(storage.name(), 0, "header", "other bytes", expected));
        }
        Ok(bytes)
    }

    /// Reads and validates the header.
    fn read(storage: &dyn Storage, limits: &Limits) -> Result<Self>;

    /// Fills in what the format records besides the size.
    fn describe(&self, info: &mut ImageInfo);

    /// Offset and name of the field that says that the image was not closed cleanly, if it says so.
    fn unclean(&self) -> Option<(u64, &'static str)> {
        None
    }

    fn guest_bytes(&self) -> u64;

    /// Unit of the map in bytes.
    fn cluster_bytes(&self) -> u64;

    fn table_bytes(&self) -> u64;

    /// Whether units have the same alignment in the file as on the disk.
    fn host_aligned(&self) -> bool {
        false
    }

    /// End of the range that a fault at `at` in this structure spoils. One field may map most of a
    /// huge disk, which no check could walk in single units.
    fn spoiled(&self, at: u64, structure: &str) -> u64 {
        let _ = structure;
        (at / self.cluster_bytes() + 1) * self.cluster_bytes()
    }

    /// The run at `at`, at most `len` bytes, within the disk and one unit of the map. Reads the
    /// tables that it needs.
    fn one(&self, storage: &dyn Storage, tables: &Tables, at: u64, len: u64) -> Result<Extent>;

    /// As [`Map::one`], merged with following runs that are contiguous on the disk and in the file.
    /// Errors of those are left to a later call.
    fn run(&self, storage: &dyn Storage, tables: &Tables, at: u64, len: u64) -> Result<Extent> {
        let mut run = self.one(storage, tables, at, len)?;
        for _ in 0..RUNS_MAX {
            if run.len >= len || matches!(run.place, Place::Compressed(_)) {
                break;
            }
            let next = self.one(storage, tables, at + run.len, len - run.len).ok();
            let Some(joined) = next.and_then(|next| run.merge(next)) else { break };
            run = joined;
        }
        Ok(run)
    }

    fn info(&self) -> ImageInfo {
        let mut info = ImageInfo::new(Self::INFO.name, self.guest_bytes());
        self.describe(&mut info);
        info.dirty = self.unclean().is_some();
        info
    }
}

/// The driver of images with this map.
#[derive(Debug)]
pub(crate) struct ReadOnlyDriver<M>(pub PhantomData<fn() -> M>);

impl<M: Map> FormatDriver for ReadOnlyDriver<M> {
    fn info(&self) -> DriverInfo {
        M::INFO
    }

    fn probe(&self, head: &[u8], tail: &[u8], len: u64) -> Probe {
        if M::matches(head, tail, len) { Probe::Yes } else { Probe::No }
    }

    fn describe(&self, storage: &Arc<dyn Storage>, limits: &Limits) -> Result<ImageInfo> {
        Ok(M::read(&**storage, limits)?.info())
    }

    fn open(&self, request: OpenRequest) -> Result<Arc<dyn Format>> {
        let OpenRequest { storage, writable, limits, .. } = request;
        let map = M::read(&*storage, &limits)?;
        let (file, info) = (storage.name(), map.info());
        if let Some(cipher) = info.encryption {
            return Err(Error::unsupported(
                file,
                format!("a {} image that is encrypted ({cipher})", info.format),
                "convert it with an older qemu-img that has the key",
            ));
        }
        if writable {
            return refuse_writing(file, info.format);
        }
        let warnings = info.dirty.then(|| {
            format!(
                "{file}: was not closed cleanly, or is in use; if no program has it open, QEMU \
                 repairs it: qemu-img check -r all"
            )
        });
        Ok(Arc::new(ReadOnly {
            backing: info.backing(),
            warnings: warnings.into_iter().collect(),
            tables: Tables::new(),
            in_flight: InFlight::default(),
            storage,
            map,
        }))
    }

    fn check(&self, image: &OfflineImage<'_>, _repair: Repair) -> Result<CheckReport> {
        let storage = &**image.storage;
        check(storage, &M::read(storage, &image.limits)?, &image.monitor)
    }
}

#[derive(Debug)]
struct ReadOnly<M> {
    storage: Arc<dyn Storage>,
    map: M,
    tables: Tables,
    backing: Option<BackingRef>,
    warnings: Vec<String>,
    in_flight: InFlight,
}

fn refuse_writing<T>(file: &str, format: &str) -> Result<T> {
    Err(Error::unsupported(
        file,
        format!("not supported: writing a {format} image"),
        "this format is only read: convert it to qcow2 or another one",
    ))
}

/// The name of a backing file, whose length is in the field at `len_at`.
pub(crate) fn name(storage: &dyn Storage, at: u64, len: u32, len_at: u64) -> Result<String> {
    if len > NAME_BYTES_MAX {
        let (what, found) = ("name of the backing file", format!("{len} bytes"));
        return Err(Error::corrupt(storage.name(), len_at, what, found, "at most 1023"));
    }
    let mut bytes = vec![0; len as usize];
    storage.read_at(&mut bytes, HostOffset(at))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// A data run of the file; fails if it begins beyond the end of the file.
pub(crate) fn data(
    storage: &dyn Storage,
    entry_at: u64,
    offset: u64,
    len: u64,
    first: u64,
) -> Result<Extent> {
    let end = storage.len()?;
    if offset < first || offset >= end {
        return Err(Error::corrupt(
            storage.name(),
            entry_at,
            "map entry",
            format!("data at {offset:#x}"),
            format!("an offset from {first:#x} to the end of the file at {end:#x}"),
        ));
    }
    let offset = HostOffset(offset);
    Ok(Extent { len, place: Place::Data { file: FileIndex(0), offset, exclusive: false } })
}

impl<M: Map> Format for ReadOnly<M> {
    fn name(&self) -> &'static str {
        M::INFO.name
    }

    fn caps(&self) -> FormatCaps {
        // Users of this value expect a power of two, which not all formats here have.
        let cluster_bytes = self.map.cluster_bytes();
        let cluster_bytes = if cluster_bytes.is_power_of_two() { cluster_bytes } else { 512 };
        FormatCaps {
            writable: false,
            cluster_bytes,
            fill_bytes: cluster_bytes,
            compressed: None,
            one_pass: false,
            cheap_zeroes: false,
            host_aligned: self.map.host_aligned(),
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.map.guest_bytes()
    }

    vdkit_block::accessors!(backing, warnings, storage, in_flight);

    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        let size = self.guest_bytes();
        if len == 0 || at.0.checked_add(len).is_none_or(|end| end > size) {
            let outside = std::io::Error::other("the range is not on the disk");
            return Err(Error::io(self.storage.name(), IoAction::Map, at.0, len, outside));
        }
        self.map.run(&*self.storage, &self.tables, at.0, len)
    }

    /// Does not search the table cache; these formats are not served to guests, for which that
    /// would matter.
    fn resolve_cached(&self, _at: GuestOffset, _len: u64) -> Option<Extent> {
        None
    }

    fn reserve(&self, _at: GuestOffset, _len: u64) -> Result<Option<Reservation<'_>>> {
        refuse_writing(self.storage.name(), M::INFO.name)
    }

    fn zero(&self, _at: GuestOffset, _len: u64, _may_unmap: bool) -> Result<Range<u64>> {
        refuse_writing(self.storage.name(), M::INFO.name)
    }

    fn discard(&self, _at: GuestOffset, _len: u64) -> Result<()> {
        refuse_writing(self.storage.name(), M::INFO.name)
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }

    fn resize(&self, _guest_bytes: u64) -> Result<()> {
        refuse_writing(self.storage.name(), M::INFO.name)
    }

    vdkit_block::capabilities!(map_cache: MapCache, compressed_units: CompressedUnits);
}

impl<M: Map> MapCache for ReadOnly<M> {
    fn stats(&self) -> MapCacheStats {
        self.tables.stats(self.map.table_bytes())
    }
}

impl<M: Map> CompressedUnits for ReadOnly<M> {
    fn unpack(
        &self,
        compressed: &Compressed,
        compressed_bytes: &[u8],
        out: &mut [u8],
    ) -> Result<()> {
        inflate::unpack(self.storage.name(), compressed, compressed_bytes, out)
    }
}

/// Walks the whole map and reports damage, which cannot be repaired here.
///
/// # Errors
/// [`Error::Interrupted`]; those of the storage.
fn check<M: Map>(storage: &dyn Storage, map: &M, monitor: &Monitor<'_>) -> Result<CheckReport> {
    let tables = Tables::new();
    let (size, cluster) = (map.guest_bytes(), map.cluster_bytes());
    let mut report =
        CheckReport { total_clusters: size.div_ceil(cluster), ..CheckReport::default() };
    let mut at = 0;
    let mut follows = None;
    while at < size {
        monitor.cancel.check()?;
        monitor.progress.update(at, size);
        match map.run(storage, &tables, at, size - at) {
            Ok(run) => {
                count(&mut report, &run, cluster, &mut follows);
                at += run.len;
            }
            Err(Error::Corrupt(fault)) => {
                let message = format!("found {}, expected {}", fault.found, fault.expected);
                let (offset, structure) = (fault.offset, fault.structure);
                report.note(Severity::Corruption, offset, structure, message, false);
                at = map.spoiled(at, structure);
            }
            Err(error) => return Err(error),
        }
    }
    if let Some((offset, structure)) = map.unclean() {
        let message = "the image was not closed cleanly, or is in use";
        report.note(Severity::Leak, offset, structure, message, false);
    }
    Ok(report)
}

fn count(report: &mut CheckReport, run: &Extent, cluster: u64, follows: &mut Option<u64>) {
    let clusters = run.len.div_ceil(cluster);
    let end = match run.place {
        Place::Data { offset, .. } => {
            report.fragmented_clusters += u64::from(follows.is_some_and(|end| end != offset.0));
            *follows = Some(offset.0 + run.len);
            offset.0 + run.len
        }
        Place::Compressed(compressed) => {
            report.compressed_clusters += clusters;
            compressed.offset.0 + u64::from(compressed.len)
        }
        Place::Zero { .. } | Place::Hole => return,
    };
    report.allocated_clusters += clusters;
    report.image_end_offset = report.image_end_offset.max(end);
}
