//! A read-only format on top of a map, and its check.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use vdkit_block::{
    BackingRef, CheckReport, Compressed, CreateRequest, Error, Extent, FileIndex, Finding, Format,
    FormatCaps, GuestOffset, InFlight, IoAction, MapCacheStats, Monitor, Place, Reservation,
    Result, Severity, Storage,
};

use crate::inflate;
use crate::tables::Tables;

/// Locates guest bytes.
pub(crate) trait Map: Send + Sync + fmt::Debug {
    fn name(&self) -> &'static str;

    fn guest_bytes(&self) -> u64;

    /// Unit of the map in bytes.
    fn cluster_bytes(&self) -> u64;

    fn table_bytes(&self) -> u64;

    /// Whether units have the same alignment in the file as on the disk.
    fn host_aligned(&self) -> bool {
        false
    }

    /// The run at `at`, at most `len` bytes, within the disk. Reads the tables that it needs.
    fn run(&self, storage: &dyn Storage, tables: &Tables, at: u64, len: u64) -> Result<Extent>;
}

#[derive(Debug)]
pub(crate) struct ReadOnly<M> {
    storage: Arc<dyn Storage>,
    map: M,
    tables: Tables,
    backing: Option<BackingRef>,
    warnings: Vec<String>,
    in_flight: InFlight,
}

/// The error for writing.
pub(crate) fn refuse_writing<T>(file: &str, format: &str) -> Result<T> {
    Err(Error::unsupported(
        file,
        format!("writing a {format} image"),
        "this format is only read: convert it to qcow2 or another one",
    ))
}

/// As [`vdkit_block::FormatDriver::create`].
pub(crate) fn refuse_creating(request: &CreateRequest, format: &str) -> Result<()> {
    refuse_writing(request.storage.name(), format)
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
    let offset = vdkit_block::HostOffset(offset);
    Ok(Extent { len, place: Place::Data { file: FileIndex(0), offset, exclusive: false } })
}

impl<M: Map + 'static> ReadOnly<M> {
    /// Opens a validated image.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for writing.
    pub(crate) fn open(
        storage: Arc<dyn Storage>,
        map: M,
        writable: bool,
        backing: Option<BackingRef>,
        warnings: Vec<String>,
    ) -> Result<Arc<dyn Format>> {
        if writable {
            return refuse_writing(storage.name(), map.name());
        }
        let (tables, in_flight) = (Tables::default(), InFlight::default());
        Ok(Arc::new(Self { storage, map, tables, backing, warnings, in_flight }))
    }
}

impl<M: Map + 'static> Format for ReadOnly<M> {
    fn name(&self) -> &'static str {
        self.map.name()
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

    fn backing(&self) -> Option<&BackingRef> {
        self.backing.as_ref()
    }

    fn warnings(&self) -> &[String] {
        &self.warnings
    }

    fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    fn file(&self, _index: FileIndex) -> &Arc<dyn Storage> {
        &self.storage
    }

    fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }

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

    fn map_cache(&self) -> Option<MapCacheStats> {
        let used_bytes = self.tables.used_bytes();
        let map_bytes = self.map.table_bytes();
        Some(MapCacheStats { used_bytes, map_bytes, ..MapCacheStats::default() })
    }

    fn unpack(
        &self,
        compressed: &Compressed,
        compressed_bytes: &[u8],
        out: &mut [u8],
    ) -> Result<()> {
        inflate::unpack(self.storage.name(), compressed, compressed_bytes, out)
    }

    fn reserve(&self, _at: GuestOffset, _len: u64) -> Result<Option<Reservation<'_>>> {
        refuse_writing(self.storage.name(), self.map.name())
    }

    fn zero(&self, _at: GuestOffset, _len: u64, _may_unmap: bool) -> Result<Range<u64>> {
        refuse_writing(self.storage.name(), self.map.name())
    }

    fn discard(&self, _at: GuestOffset, _len: u64) -> Result<()> {
        refuse_writing(self.storage.name(), self.map.name())
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn close(&self) -> Result<()> {
        Ok(())
    }

    fn resize(&self, _guest_bytes: u64) -> Result<()> {
        refuse_writing(self.storage.name(), self.map.name())
    }
}

/// Walks the whole map and reports damage, which cannot be repaired here.
///
/// # Errors
/// [`Error::Interrupted`]; those of the storage.
pub(crate) fn check<M: Map>(
    storage: &dyn Storage,
    map: &M,
    monitor: &Monitor<'_>,
) -> Result<CheckReport> {
    let tables = Tables::default();
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
                report.add(Finding {
                    severity: Severity::Corruption,
                    offset: fault.offset,
                    structure: fault.structure,
                    message: format!("found {}, expected {}", fault.found, fault.expected),
                    repaired: false,
                });
                at = (at / cluster + 1) * cluster;
            }
            Err(error) => return Err(error),
        }
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

/// Merges runs that are contiguous on the disk and in the file.
///
/// # Errors
/// That of the first run; errors of later runs are left to a later call.
pub(crate) fn merged(
    at: u64,
    len: u64,
    mut one: impl FnMut(u64, u64) -> Result<Extent>,
) -> Result<Extent> {
    /// Maximum runs merged per call.
    const RUNS_MAX: u32 = 4096;
    let mut run = one(at, len)?;
    for _ in 0..RUNS_MAX {
        if run.len >= len {
            break;
        }
        let Some(joined) = one(at + run.len, len - run.len).ok().and_then(|next| run.merge(next))
        else {
            break;
        };
        run = joined;
    }
    Ok(run)
}
