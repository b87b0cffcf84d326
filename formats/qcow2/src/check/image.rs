//! An image before its metadata is walked, and the validation of single entries.

use std::ops::Range;
use std::sync::Arc;

use vdkit_block::{Fault, HostOffset, Limits, Result, Storage};

use super::repair::Kept;
use crate::entry::L2Entry;
use crate::header::Header;
use crate::layout::{self, COPIED, Geometry, L1_RESERVED, OFFSET_MASK, SECTOR, ZERO};

/// The image under check.
#[derive(Clone, Debug)]
pub(super) struct Image {
    pub(super) storage: Arc<dyn Storage>,
    pub(super) header: Header,
    /// Faults of the header's pointers; see [`Header::read_tolerant`].
    pub(super) header_faults: Vec<Fault>,
    pub(super) limits: Limits,
    pub(super) file_len: u64,
    /// Lost tables that a repair found and keeps.
    pub(super) kept: Arc<Kept>,
    /// Host ranges that no mapping entry may refer to: the header and the encryption header.
    protected: Vec<Range<u64>>,
}

/// The fault of an L1 entry: what was expected, and whether its correction loses an L2 table.
pub(super) type L1Fault = (&'static str, bool);

/// Faults of an L2 entry, as a set of bits; [`L2Faults::each`] says what each is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct L2Faults(pub(super) u16);

impl L2Faults {
    pub(super) const RESERVED: Self = Self(1);
    pub(super) const UNALIGNED: Self = Self(1 << 1);
    pub(super) const BEYOND_END: Self = Self(1 << 2);
    pub(super) const PROTECTED: Self = Self(1 << 3);
    pub(super) const COMPRESSED_COPIED: Self = Self(1 << 4);
    pub(super) const COMPRESSED_IN_DATA_FILE: Self = Self(1 << 5);
    pub(super) const COMPRESSED_BITMAP: Self = Self(1 << 6);
    pub(super) const SUBCLUSTER_BOTH: Self = Self(1 << 7);
    pub(super) const SUBCLUSTER_NO_SPACE: Self = Self(1 << 8);
    pub(super) const ZERO_IN_V2: Self = Self(1 << 9);
    pub(super) const MOVED_IN_DATA_FILE: Self = Self(1 << 10);

    fn set(&mut self, other: Self) {
        self.0 |= other.0;
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether the corrected entry loses its host cluster.
    pub(super) fn lost(self) -> bool {
        self.0 & (Self::UNALIGNED.0 | Self::BEYOND_END.0 | Self::PROTECTED.0) != 0
    }

    /// What was expected, for each fault.
    pub(super) fn each(self) -> impl Iterator<Item = &'static str> {
        const TEXTS: [&str; 11] = [
            "zero in the reserved bits",
            "a host offset at a cluster boundary",
            "a host offset within the file",
            "a host offset outside of the header and the encryption header",
            "no COPIED flag on a compressed cluster",
            "no compressed cluster in an image with a data file",
            "an empty subcluster bitmap on a compressed cluster",
            "no subcluster both allocated and zero",
            "no allocated subcluster in a cluster without host space",
            "no zero flag in a version 2 image",
            "the guest offset as offset in the data file",
        ];
        TEXTS.into_iter().enumerate().filter(move |(i, _)| self.0 >> i & 1 != 0).map(|(_, t)| t)
    }
}

impl Image {
    /// Reads the header, tolerating faults that a repair can fix.
    pub(super) fn open(storage: &Arc<dyn Storage>, limits: &Limits) -> Result<Self> {
        let mut header_faults = Vec::new();
        let header = Header::read_tolerant(&**storage, limits, &mut header_faults)?;
        let cluster = header.geometry.cluster_bytes();
        let mut image = Self {
            storage: Arc::clone(storage),
            header,
            header_faults,
            limits: *limits,
            file_len: storage.len()?,
            kept: Arc::default(),
            protected: Vec::new(),
        };
        image.protected.push(0..cluster);
        if let Some(Ok((offset, bytes))) = image.encryption_header() {
            image.protected.push(offset..offset + bytes);
        }
        Ok(image)
    }

    /// Rereads the image after a change.
    pub(super) fn again(&self) -> Result<Self> {
        let image = Self::open(&self.storage, &self.limits)?;
        Ok(Self { kept: Arc::clone(&self.kept), ..image })
    }

    /// Host offset and bytes of the encryption header, or, as an error, those of an impossible
    /// place.
    pub(super) fn encryption_header(&self) -> Option<std::result::Result<(u64, u64), (u64, u64)>> {
        let (offset, bytes) = self.header.encryption_header()?;
        let found = (offset.0, bytes);
        let fits = bytes > 0
            && bytes <= crate::encrypted::HEADER_BYTES_MAX
            && offset.0 != 0
            && offset.0 & (self.cluster_bytes() - 1) == 0
            && self.in_file(offset.0, bytes);
        Some(if fits { Ok(found) } else { Err(found) })
    }

    pub(super) fn name(&self) -> &str {
        self.storage.name()
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.header.geometry
    }

    pub(super) fn cluster_bytes(&self) -> u64 {
        self.header.geometry.cluster_bytes()
    }

    /// Number of clusters of the file; the last one may be partial.
    pub(super) fn file_clusters(&self) -> u64 {
        self.file_len.div_ceil(self.cluster_bytes())
    }

    /// Whether a range may be referred to. The last cluster may be partial, so a range may exceed
    /// the file by less than a cluster, as in QEMU.
    pub(super) fn in_file(&self, offset: u64, bytes: u64) -> bool {
        let end = u128::from(offset) + u128::from(bytes);
        end < u128::from(self.file_len) + u128::from(self.cluster_bytes())
    }

    /// The clusters that a range touches.
    pub(super) fn clusters_of(&self, offset: u64, bytes: u64) -> Range<u64> {
        let bits = self.geometry().cluster_bits;
        if bytes == 0 {
            return offset >> bits..offset >> bits;
        }
        offset >> bits..(offset.saturating_add(bytes - 1) >> bits) + 1
    }

    /// Reads a table; bytes beyond the end of the file are zero.
    pub(super) fn read_table(&self, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let mut table = vec![0; bytes as usize];
        self.storage.read_padded(&mut table, HostOffset(offset))?;
        Ok(table)
    }

    /// Reads the L2 table, or another cluster of metadata, at `offset`.
    pub(super) fn read_cluster(&self, offset: u64) -> Result<Vec<u8>> {
        self.read_table(offset, self.cluster_bytes())
    }

    /// Changes a table, not yet durably. Returns whether `change` changed anything.
    pub(super) fn change_table(
        &self,
        offset: u64,
        bytes: u64,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<bool> {
        let old = self.read_table(offset, bytes)?;
        let mut new = old.clone();
        change(&mut new);
        self.write_changed(offset, &old, &new)
    }

    /// [`Image::change_table`] of one cluster.
    pub(super) fn change_cluster(
        &self,
        offset: u64,
        change: impl FnOnce(&mut [u8]),
    ) -> Result<bool> {
        self.change_table(offset, self.cluster_bytes(), change)
    }

    /// Writes only the sectors of a table that differ: disks write a sector atomically, and
    /// unchanged sectors stay untouched.
    pub(super) fn write_changed(&self, offset: u64, old: &[u8], new: &[u8]) -> Result<bool> {
        let sectors = old.chunks(SECTOR).zip(new.chunks(SECTOR)).map(|(old, new)| old != new);
        let sectors: Vec<bool> = sectors.collect();
        let mut at = 0;
        for run in sectors.chunk_by(|a, b| a == b) {
            let end = (at + run.len() * SECTOR).min(new.len());
            if run[0] {
                self.storage.write_at(&new[at..end], HostOffset(offset + at as u64))?;
            }
            at = end;
        }
        Ok(sectors.contains(&true))
    }

    /// Discards unreferenced clusters in the file system.
    pub(super) fn punch(&self, run: Range<u64>) {
        let (end, cluster) = (run.end.min(self.file_clusters()), self.cluster_bytes());
        if run.start < end {
            let (at, bytes) = (HostOffset(run.start * cluster), (end - run.start) * cluster);
            // Errors are ignored: the space merely stays allocated.
            let _ = self.storage.discard(at, bytes);
        }
    }

    fn is_protected(&self, offset: u64, bytes: u64) -> bool {
        let clusters = self.clusters_of(offset, bytes);
        self.protected.iter().any(|range| {
            let taken = self.clusters_of(range.start, range.end - range.start);
            clusters.start < taken.end && taken.start < clusters.end
        })
    }

    /// The corrected L1 entry, and its fault.
    pub(super) fn judge_l1(&self, raw: u64) -> (u64, Option<L1Fault>) {
        if raw == 0 {
            return (0, None);
        }
        let offset = raw & OFFSET_MASK;
        if offset == 0 {
            (0, Some(("the offset of an L2 table, or zero", false)))
        } else if offset & (self.cluster_bytes() - 1) != 0 {
            (0, Some(("an L2 table at a cluster boundary", true)))
        } else if !self.in_file(offset, self.cluster_bytes()) {
            (0, Some(("an L2 table within the file", true)))
        } else if self.is_protected(offset, self.cluster_bytes()) {
            (0, Some(("an L2 table outside of the header", true)))
        } else if raw & L1_RESERVED != 0 {
            (raw & (OFFSET_MASK | COPIED), Some(("zero in the reserved bits", false)))
        } else {
            (raw, None)
        }
    }

    /// The corrected L2 entry of the cluster at `guest`, and its faults.
    pub(super) fn judge_l2(&self, entry: L2Entry, guest: u64) -> (L2Entry, L2Faults) {
        let mut faults = L2Faults::default();
        let corrected = if entry.is_compressed() {
            self.judge_compressed(entry, guest, &mut faults)
        } else {
            self.judge_standard(entry, guest, &mut faults)
        };
        (corrected, faults)
    }

    fn judge_compressed(&self, entry: L2Entry, guest: u64, faults: &mut L2Faults) -> L2Entry {
        if entry.is_copied() {
            faults.set(L2Faults::COMPRESSED_COPIED);
        }
        if self.header.has_data_file() {
            faults.set(L2Faults::COMPRESSED_IN_DATA_FILE);
            return self.at_identity(guest);
        }
        if self.geometry().extended && entry.bitmap != 0 {
            faults.set(L2Faults::COMPRESSED_BITMAP);
        }
        let place = entry.compressed_place(self.geometry());
        if place.offset.0 >= layout::HOST_OFFSET_END || !self.in_file(place.offset.0, place.bytes) {
            faults.set(L2Faults::BEYOND_END);
        } else if self.is_protected(place.offset.0, place.bytes) {
            faults.set(L2Faults::PROTECTED);
        }
        if faults.lost() {
            return self.detached(L2Entry { word: 0, bitmap: u64::from(u32::MAX) });
        }
        L2Entry { word: entry.word & !COPIED, bitmap: 0 }
    }

    fn judge_standard(&self, entry: L2Entry, guest: u64, faults: &mut L2Faults) -> L2Entry {
        let geometry = self.geometry();
        let data_file = self.header.has_data_file();
        let mut corrected = entry;
        if self.header.version < 3 && entry.word & ZERO != 0 {
            faults.set(L2Faults::ZERO_IN_V2);
            corrected.word &= !ZERO;
        }
        let reserved = corrected.reserved_bits(geometry);
        if reserved != 0 {
            faults.set(L2Faults::RESERVED);
            corrected.word &= !reserved;
        }
        if corrected.has_space(data_file) {
            let host = corrected.host().0;
            if host & (geometry.cluster_bytes() - 1) != 0 {
                faults.set(L2Faults::UNALIGNED);
            } else if data_file {
                if host != guest {
                    faults.set(L2Faults::MOVED_IN_DATA_FILE);
                }
            } else if host >= self.file_len {
                faults.set(L2Faults::BEYOND_END);
            } else if self.is_protected(host, geometry.cluster_bytes()) {
                faults.set(L2Faults::PROTECTED);
            }
            if data_file && (faults.lost() || host != guest) {
                corrected.word = guest | COPIED | (corrected.word & ZERO);
            } else if faults.lost() {
                return self.detached(corrected);
            }
        }
        if geometry.extended {
            let both = corrected.bitmap & (corrected.bitmap >> 32) & u64::from(u32::MAX);
            if both != 0 {
                // Reading such a subcluster fails. Keeps the data, since it is more likely wanted
                // than not.
                faults.set(L2Faults::SUBCLUSTER_BOTH);
                corrected.bitmap &= !(both << 32);
            }
            if corrected.bitmap & u64::from(u32::MAX) != 0 && !corrected.has_space(data_file) {
                faults.set(L2Faults::SUBCLUSTER_NO_SPACE);
                return self.detached(corrected);
            }
        }
        corrected
    }

    /// The entry without its host cluster. Its data reads as zeroes, or becomes a hole in version
    /// 2.
    fn detached(&self, entry: L2Entry) -> L2Entry {
        if self.geometry().extended {
            let allocated = entry.bitmap & u64::from(u32::MAX);
            L2Entry { word: 0, bitmap: (entry.bitmap | allocated << 32) & !u64::from(u32::MAX) }
        } else if self.header.version >= 3 {
            L2Entry { word: ZERO, bitmap: 0 }
        } else {
            L2Entry::default()
        }
    }

    /// The only valid entry of a data cluster in a data file.
    fn at_identity(&self, guest: u64) -> L2Entry {
        L2Entry::data(HostOffset(guest), self.geometry())
    }
}

/// Adds a cluster to runs, of which it may continue the last one or be in it.
pub(super) fn add_to_runs(runs: &mut Vec<Range<u64>>, cluster: u64) {
    match runs.last_mut() {
        Some(last) if last.end == cluster => last.end += 1,
        Some(last) if last.contains(&cluster) => {}
        _ => runs.push(cluster..cluster + 1),
    }
}
