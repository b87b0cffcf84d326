//! qcow2: checks of every header field, of the tables, and of the start of the guest's disk.
//!
//! Source: the qcow2 specification. Fields are checked one by one, so that all problems are
//! reported; the format's own parser then decides.

use std::sync::Arc;

use vdkit_block::{
    FormatDriver, GuestOffset, ImageInfo, Limits, OfflineImage, OpenRequest, Repair, Result,
    Severity,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_qcow2::Qcow2Driver;
use vdkit_qcow2::bitmaps::Bitmaps;
use vdkit_qcow2::header::{Encryption, Header};
use vdkit_qcow2::layout::{
    self, BACKING_NAME_BYTES_MAX, CLUSTER_BITS, V2_HEADER_BYTES, V3_HEADER_BYTES,
    V3_HEADER_BYTES_MIN, autoclear, compatible, extension, incompatible,
};
use vdkit_qcow2::snapshots::{SnapshotTable, TablePlace};

use super::code::{Code, InspectFinding, Weight, clip};
use super::mapping::Mapping;
use super::signature::{self, Kind};
use super::{Allow, Depth, InspectOptions, Inspection, reference};
use vdkit_block::bytes::{be32, be64};

/// Maximum kinds of damage reported individually.
const DAMAGE_REPORTED: usize = 8;
/// Maximum header extensions examined.
const EXTENSIONS_MAX: usize = 1000;

/// A used range of the header cluster.
type Used = std::ops::Range<u64>;

impl Inspection<'_> {
    pub(super) fn qcow2(&mut self, head: &[u8]) -> Result<()> {
        self.depth = Depth::Header;
        let version = be32(head, 4);
        let needed = if version >= 3 { V3_HEADER_BYTES_MIN } else { V2_HEADER_BYTES };
        if head.len() < needed as usize {
            self.header_truncated(head.len() as u64, needed.into());
            return Ok(());
        }
        if version > 3 {
            self.find(Code::UnknownVersion, 4, version.to_string(), "2 or 3");
            return Ok(());
        }
        let cluster_bits = be32(head, 20);
        let cluster: u64 = if CLUSTER_BITS.contains(&cluster_bits) { 1 << cluster_bits } else { 0 };
        // Header extensions may continue beyond the first read, to the end of a larger cluster.
        let more = if cluster > head.len() as u64 && self.len > head.len() as u64 {
            Some(self.read(0, cluster as usize)?)
        } else {
            None
        };
        let head = more.as_deref().unwrap_or(head);
        if version == 3 {
            self.features(head);
        }
        self.sizes(head, cluster_bits);
        self.backing(head, cluster);
        match be32(head, 32) {
            0 => {}
            1 => self.encrypted("AES, which is broken", 32),
            2 => self.encrypted("LUKS", 32),
            other => {
                self.header_invalid(32, format!("encryption method {other}"), "0, 1 or 2");
            }
        }
        self.extensions(head, version, cluster);
        let usual = Limits::default();
        let mut limits = usual;
        limits.check_bytes_max = self.options.memory_max / 2;
        limits.snapshots_bytes_max = usual.snapshots_bytes_max.min(self.options.memory_max / 8);
        let header = match Header::read(&*self.storage, &limits) {
            Ok(header) => header,
            // Problems already reported need no second report.
            Err(_) if self.findings.refused() => return Ok(()),
            Err(error) => return Err(error),
        };
        self.tables(&header, &limits)
    }

    fn features(&mut self, head: &[u8]) {
        let bits = be64(head, 72);
        let unknown = bits & !incompatible::KNOWN;
        if unknown != 0 {
            self.find(
                Code::UnknownIncompatible,
                72,
                format!("bits {unknown:#x}"),
                format!("none beside {:#x}", incompatible::KNOWN),
            );
        }
        if bits & incompatible::CORRUPT != 0 {
            self.find(Code::MarkedCorrupt, 72, "the corrupt bit", "a sound image");
        }
        if bits & incompatible::DIRTY != 0 {
            self.find(Code::NotClosed, 72, "the dirty bit", "an image that was closed");
        }
        if bits & incompatible::EXTENDED_L2 != 0 {
            InspectFinding::new(Code::ExtendedL2)
                .allowed(self.options.allows(Allow::ExtendedL2))
                .at(72)
                .found("incompatible feature bit 4")
                .expected("standard L2 entries")
                .add_to(&mut self.findings);
        }
        for (at, known, code) in [
            (80, compatible::LAZY_REFCOUNTS, Code::UnknownCompatible),
            (88, autoclear::BITMAPS | autoclear::DATA_FILE_RAW, Code::UnknownAutoclear),
        ] {
            let unknown = be64(head, at) & !known;
            if unknown != 0 {
                InspectFinding::new(code)
                    .at(at as u64)
                    .found(format!("bits {unknown:#x}"))
                    .add_to(&mut self.findings);
            }
        }
    }

    /// Checks the disk size, and the tables that the header refers to.
    fn sizes(&mut self, head: &[u8], cluster_bits: u32) {
        self.judge_size(be64(head, 24), 24);
        let refcounts = if CLUSTER_BITS.contains(&cluster_bits) {
            u64::from(be32(head, 56)) << cluster_bits
        } else {
            self.header_invalid(20, format!("cluster_bits {cluster_bits}"), "9 to 21");
            0 // there is no telling how long it is
        };
        for (what, at, start, bytes, most) in [
            ("L1 table", 36, be64(head, 40), u64::from(be32(head, 36)) * 8, layout::L1_BYTES_MAX),
            ("refcount table", 48, be64(head, 48), refcounts, layout::REFCOUNT_TABLE_BYTES_MAX),
            (
                "snapshot table",
                60,
                be64(head, 64),
                u64::from(be32(head, 60)) * 40,
                u64::from(layout::SNAPSHOTS_MAX) * 40,
            ),
        ] {
            self.judge_table(what, at, start, bytes, most);
        }
    }

    fn backing(&mut self, head: &[u8], cluster: u64) {
        let (offset, len) = (be64(head, 8), be32(head, 16));
        if offset == 0 {
            return;
        }
        let most = u64::from(len).min(BACKING_NAME_BYTES_MAX.into());
        let end = offset.saturating_add(most).min(cluster);
        let name = usize::try_from(offset)
            .ok()
            .zip(usize::try_from(end).ok())
            .and_then(|(start, end)| head.get(start..end))
            .map(|name| String::from_utf8_lossy(name).into_owned())
            .unwrap_or_default();
        InspectFinding::new(Code::BackingFile)
            .allowed(self.options.allows(Allow::Backing))
            .at(8)
            .found(format!("'{name}'"))
            .expected("an image that stands alone")
            .add_to(&mut self.findings);
        reference::judge(&mut self.findings, "backing file", &name, offset);
    }

    /// Walks the list of extensions, and searches for unreferenced bytes.
    fn extensions(&mut self, head: &[u8], version: u32, cluster: u64) {
        let fixed = if version == 3 { be32(head, 100) } else { V2_HEADER_BYTES };
        if cluster == 0 || u64::from(fixed) > cluster || (version == 3 && fixed < 104) {
            return; // the parser reports it
        }
        let backing = be64(head, 8);
        let list_end = if backing == 0 { cluster } else { backing.min(cluster) };
        let known_fields = if version == 3 { fixed.min(V3_HEADER_BYTES) } else { fixed };
        // Byte 104 is the compression type; padding follows up to byte 112.
        let fields: Used = 0..u64::from(known_fields.min(105));
        let mut used = vec![fields];
        let mut kinds: Vec<u32> = Vec::new();
        let mut at = u64::from(fixed);
        while at + 8 <= list_end && at + 8 <= head.len() as u64 && kinds.len() < EXTENSIONS_MAX {
            let (kind, len) = (be32(head, at as usize), u64::from(be32(head, at as usize + 4)));
            let data = at + 8;
            used.push(at..data);
            if kind == extension::END || data + len > list_end.min(head.len() as u64) {
                break;
            }
            used.push(data..data + len);
            self.extension(kind, &head[data as usize..(data + len) as usize], at, &kinds);
            kinds.push(kind);
            at = data + len.next_multiple_of(8);
        }
        if backing != 0 {
            let end = backing.saturating_add(be32(head, 16).into());
            used.push(backing..end);
            if !kinds.contains(&extension::BACKING_FORMAT) {
                InspectFinding::new(Code::BackingFormat)
                    .at(8)
                    .expected("the backing file's format by name")
                    .add_to(&mut self.findings);
            }
        }
        self.data_file(head, &kinds);
        self.padding(head, used, cluster);
    }

    fn extension(&mut self, kind: u32, data: &[u8], at: u64, before: &[u32]) {
        let known = [
            extension::BACKING_FORMAT,
            extension::FEATURE_NAMES,
            extension::BITMAPS,
            extension::ENCRYPTION,
            extension::DATA_FILE,
        ];
        let code = match kind {
            _ if before.contains(&kind) => Code::DuplicateExtension,
            _ if !known.contains(&kind) => Code::UnknownExtension,
            extension::DATA_FILE => {
                let name = String::from_utf8_lossy(data);
                return reference::judge(&mut self.findings, "data file", &name, at + 8);
            }
            extension::BACKING_FORMAT => {
                let name = String::from_utf8_lossy(data);
                let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || "_-.".contains(c));
                if name.is_empty() || !plain {
                    self.header_invalid(at + 8, clip(name), "the name of a format");
                }
                return;
            }
            _ => return,
        };
        self.find(
            code,
            at,
            format!("{} bytes of type {kind:#010x}", data.len()),
            "each known extension once",
        );
    }

    fn data_file(&mut self, head: &[u8], kinds: &[u32]) {
        let flagged = be32(head, 4) == 3 && be64(head, 72) & incompatible::DATA_FILE != 0;
        let named = kinds.contains(&extension::DATA_FILE);
        if !flagged && !named {
            return;
        }
        let found = match (flagged, named) {
            (true, true) => "the feature bit and a name",
            (true, false) => "the feature bit without a name",
            _ => "a name without the feature bit",
        };
        InspectFinding::new(Code::DataFile)
            .allowed(self.options.allows(Allow::DataFile))
            .at(72)
            .found(found)
            .expected("an image that holds its own data")
            .add_to(&mut self.findings);
    }

    /// Unreferenced bytes of the header cluster must be zero.
    fn padding(&mut self, head: &[u8], mut used: Vec<Used>, cluster: u64) {
        used.sort_by_key(|range| range.start);
        let end = cluster.min(head.len() as u64);
        let mut at = 0;
        let mut stray: Option<(u64, u64)> = None;
        for range in used.into_iter().chain(std::iter::once(end..end)) {
            for hole in at..range.start.min(end) {
                if head[hole as usize] != 0 {
                    let (first, count) = stray.unwrap_or((hole, 0));
                    stray = Some((first, count + 1));
                }
            }
            at = at.max(range.end);
        }
        if let Some((first, count)) = stray {
            self.find(
                Code::HeaderPadding,
                first,
                format!("{count} bytes that are not zero"),
                "zeroes",
            );
        }
    }

    /// Everything that the header refers to.
    fn tables(&mut self, header: &Header, limits: &Limits) -> Result<()> {
        match SnapshotTable::read(&*self.storage, TablePlace::of(header), limits) {
            Ok(table) => self.snapshots(header, &table),
            Err(error) => self.note_error_within(error)?,
        }
        match Bitmaps::read(&*self.storage, header, limits) {
            Ok(Bitmaps::None) => {}
            Ok(Bitmaps::Stale(count)) => self.bitmaps(format!("{count}, out of date")),
            Ok(Bitmaps::Valid(list)) => self.bitmaps(format!("{}", list.len())),
            Err(error) => self.note_error_within(error)?,
        }
        if self.findings.list.iter().any(|f| {
            f.severity == Weight::Refuse
                && matches!(f.code, Code::TableTooLarge | Code::HeaderInvalid)
        }) {
            return Ok(()); // the map is known to be invalid
        }
        let mapping = Mapping::read(&*self.storage, header, self.len)?;
        self.mapping(header, &mapping);
        self.check(header, limits)?;
        self.depth = Depth::Metadata;
        if !self.findings.refused() {
            self.nested(header, limits)?;
        }
        Ok(())
    }

    /// As [`Inspection::note_error`], unless the budget is used up.
    fn note_error_within(&mut self, error: vdkit_block::Error) -> Result<()> {
        match error {
            vdkit_block::Error::Limit { .. } => Err(error),
            other => self.note_error(other),
        }
    }

    fn snapshots(&mut self, header: &Header, table: &SnapshotTable) {
        if table.snapshots.is_empty() {
            return;
        }
        let at = header.snapshots_offset.0;
        let allowed = self.options.allows(Allow::Snapshots);
        let infos: Vec<_> = table.snapshots.iter().map(|snapshot| snapshot.info()).collect();
        let names: Vec<_> = infos.iter().take(8).map(|info| format!("'{}'", info.name)).collect();
        InspectFinding::new(Code::InternalSnapshots)
            .allowed(allowed)
            .at(at)
            .found(format!("{}: {}", infos.len(), names.join(", ")))
            .expected("none")
            .add_to(&mut self.findings);
        let state: u64 = infos.iter().map(|info| info.vm_state_bytes).fold(0, u64::saturating_add);
        if state > 0 {
            InspectFinding::new(Code::VmState)
                .allowed(allowed)
                .at(at)
                .found(format!("{state} bytes"))
                .expected("none")
                .add_to(&mut self.findings);
        }
        let largest = infos.iter().filter_map(|info| info.disk_bytes).max().unwrap_or(0);
        if largest > self.options.size_max {
            let own = self.virtual_size;
            self.judge_size(largest, at);
            self.virtual_size = own;
        }
    }

    fn bitmaps(&mut self, found: String) {
        InspectFinding::new(Code::Bitmaps).found(found).add_to(&mut self.findings);
    }

    fn mapping(&mut self, header: &Header, mapping: &Mapping) {
        for (index, &(at, to)) in mapping.first_outside.iter().enumerate() {
            let more = mapping.outside - mapping.first_outside.len() as u64;
            let rest =
                if index == 0 && more > 0 { format!("; {more} more") } else { String::new() };
            self.find(
                Code::OutsideFile,
                at,
                format!("an entry that leads to {to:#x}{rest}"),
                format!("a place within the file of {} bytes", self.len),
            );
        }
        if header.has_data_file() {
            return;
        }
        let bytes = mapping.clusters.saturating_mul(header.geometry.cluster_bytes());
        self.data_bytes = Some(bytes);
        let most = self.len.saturating_mul(self.options.ratio_max);
        if bytes > most.max(InspectOptions::EXPANSION_FREE) {
            self.find(
                Code::Expansion,
                header.l1_offset.0,
                format!("{bytes} bytes of data in a file of {}", self.len),
                format!("at most {} times the file", self.options.ratio_max),
            );
        }
    }

    /// The format's own check: overlaps, refcounts, flags, snapshots, bitmaps.
    fn check(&mut self, header: &Header, limits: &Limits) -> Result<()> {
        let image = OfflineImage { limits: *limits, ..OfflineImage::new(&self.storage) };
        let report = Qcow2Driver.check(&image, Repair::Nothing)?;
        // Refcounts of an image that was not closed may be too low or too high.
        let dirty = header.has(incompatible::DIRTY);
        let damage = report.findings.iter().filter(|f| f.severity == Severity::Corruption);
        for (index, finding) in damage.take(DAMAGE_REPORTED).enumerate() {
            let more = report.corruptions.saturating_sub(DAMAGE_REPORTED as u64);
            let rest =
                if index == 0 && more > 0 { format!("; {more} more") } else { String::new() };
            self.find(
                Code::MetadataCorrupt,
                finding.offset,
                format!("{}: {}{rest}", finding.structure, finding.message),
                "sound metadata",
            );
        }
        if report.leaks > 0 {
            let first = report.findings.iter().find(|f| f.severity == Severity::Leak);
            let mut finding = InspectFinding::new(Code::UnreferencedSpace)
                .allowed(dirty)
                .found(format!("{} clusters", report.leaks))
                .expected("none");
            finding.offset = first.map(|finding| finding.offset);
            finding.add_to(&mut self.findings);
        }
        Ok(())
    }

    /// A disk that begins with a disk image could be probed as that image after conversion to raw.
    fn nested(&mut self, header: &Header, limits: &Limits) -> Result<()> {
        if header.has_data_file() || header.encryption != Encryption::None {
            return Ok(());
        }
        let storage: Arc<dyn vdkit_block::Storage> = self.storage.clone();
        let format = match Qcow2Driver.open(OpenRequest {
            storage,
            files: Vec::new(),
            writable: false,
            limits: *limits,
        }) {
            Ok(format) => format,
            Err(error) => return self.note_error_within(error),
        };
        let options = OpenOptions::read_only().limits(*limits);
        let disk = Disk::from_format(format, ImageInfo::new("qcow2", header.guest_bytes), &options);
        let bytes = header.guest_bytes.min(signature::HEAD_BYTES as u64);
        let mut head = vec![0; bytes as usize];
        if let Err(error) = disk.read_at(&mut head, GuestOffset(0)) {
            return self.note_error_within(error);
        }
        let found = signature::recognize(&head, &[], header.guest_bytes);
        let names = signature::names(&found, Kind::Disk);
        // LUKS on a whole disk was put there by its owner, and causes no other file to be opened.
        if let Some(name) = names.iter().find(|&&name| name != "luks") {
            InspectFinding::new(Code::NestedFormat)
                .allowed(self.options.allows(Allow::Nested))
                .found(format!("a {name} header on the guest's disk"))
                .expected("a partition table, a file system or nothing")
                .add_to(&mut self.findings);
        }
        Ok(())
    }
}
