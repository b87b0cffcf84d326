//! Findings from the header and the format's own check.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vdkit_block::{
    CheckReport, Error, ImageInfo, Limits, Monitor, OfflineImage, Repair, Result, Severity,
    SnapshotInfo, Storage,
};
use vdkit_chain::{OpenOptions, OpenedImage, open_image};

use crate::evidence::{allocation, shuffled};
use crate::{DoctorCode, Examination, METADATA_BYTES_MAX};
use vdkit_inspect::BudgetStorage;

/// Maximum reads and time for the check of one image.
const READS_MAX: u64 = 100_000;
const TIME_MAX: Duration = Duration::from_secs(10);
/// Memory of the check's reference table: 2 bytes per host cluster.
const MEMORY_MAX: u64 = 64 << 20;
/// Unused bytes that are not reported.
const UNUSED_MIN: u64 = 16 << 20;
/// The default of qemu-img and vdkit.
const CLUSTER_BYTES_USUAL: u64 = 64 << 10;
/// Number of internal snapshots that is reported.
const SNAPSHOTS_REMARKABLE: usize = 8;
const REFCOUNT_BITS_USUAL: u64 = 16;

impl Examination<'_> {
    pub(super) fn examine_header(&mut self) {
        let info = self.link().info.clone();
        let repair = self.vdkit(&["check", "--repair", "all"], &[]);
        if info.corrupt {
            let message = "marked as corrupt; make a copy first";
            self.add(DoctorCode::MarkedCorrupt, message, repair.clone());
        }
        if info.dirty && !self.in_use {
            self.add(DoctorCode::NotClosed, "not closed cleanly: the dirty bit is set", repair);
        }
        if info.encryption.as_deref() == Some("aes") {
            let options = ["-o", "encrypt.format=luks", "--target-key-file", "KEY"];
            let mend = self.vdkit(&[&["convert", "-O", "qcow2"], &options[..]].concat(), &["NEW"]);
            let message = "encrypted with AES as QEMU did at first; LUKS is what it does now";
            self.add(DoctorCode::LegacyAes, message, mend);
        }
        self.examine_size(&info);
        let unused = !self.in_use;
        for bitmap in info.bitmaps.iter().filter(|bitmap| bitmap.in_use && unused) {
            let name = &bitmap.name;
            let words: &[&str] = if name.starts_with('-') { &["--", name] } else { &[name] };
            let mend = self.vdkit(&["bitmap", "remove"], words);
            self.add(DoctorCode::BitmapStale, format!("bitmap '{name}'"), mend);
        }
        if info.format == "qcow2" {
            self.examine_qcow2(&info);
        }
    }

    /// A raw disk has its file's size, rounded up to whole sectors.
    fn examine_size(&mut self, info: &ImageInfo) {
        let host = self.link().host;
        let as_its_file = info.format == "raw" && !host.device;
        let bytes = if as_its_file { host.file_bytes } else { info.virtual_size };
        let Some(whole) = bytes.checked_next_multiple_of(512).filter(|whole| *whole > bytes) else {
            return;
        };
        let mend = self.vdkit(&["resize", "-f", info.format], &[&whole.to_string()]);
        let message = format!("{bytes} bytes are no whole sectors of 512");
        self.add(DoctorCode::OddSize, message, mend);
    }

    fn examine_qcow2(&mut self, info: &ImageInfo) {
        let property = |key: &str| {
            info.properties.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
        };
        if property("compat") == Some("0.10") {
            let mend = self.vdkit(&["amend", "-o", "compat=1.1"], &[]);
            self.add(DoctorCode::VersionTwo, "version 2 (compat=0.10)", mend);
        }
        let bits = property("refcount-bits").and_then(|bits| bits.parse::<u64>().ok());
        if let Some(bits) = bits.filter(|bits| *bits < 8) {
            // One reference is the disk's own.
            let snapshots = (1u64 << bits) - 2;
            let message = format!(
                "refcount_bits={bits}: a cluster can be in {snapshots} snapshots at most; \
                 {REFCOUNT_BITS_USUAL} is usual"
            );
            let option = format!("refcount_bits={REFCOUNT_BITS_USUAL}");
            let mend = self.vdkit(&["amend", "-o", &option], &[]);
            self.add(DoctorCode::NarrowRefcounts, message, mend);
        }
        self.examine_map(info, property("extended-l2") == Some("true"));
        self.examine_snapshots(info);
    }

    fn examine_snapshots(&mut self, info: &ImageInfo) {
        let snapshots = &info.snapshots;
        let Some(oldest) = snapshots.iter().min_by_key(|snapshot| snapshot.date_seconds) else {
            return;
        };
        if snapshots.len() < SNAPSHOTS_REMARKABLE {
            return;
        }
        let states = snapshots.iter().map(|snapshot| snapshot.vm_state_bytes);
        let states = states.fold(0, u64::saturating_add);
        let kept = match states {
            0 => String::new(),
            bytes => format!(", with {} MiB of VM state", bytes.div_ceil(1 << 20)),
        };
        let message =
            format!("{} snapshots{kept}; the oldest is '{}'", snapshots.len(), oldest.name);
        let mend = word_of_snapshot(snapshots, oldest)
            .and_then(|word| self.vdkit(&["snapshot", "delete"], &[word]));
        self.add(DoctorCode::ManySnapshots, message, mend);
    }

    /// Compares the size of the whole map with its cache.
    fn examine_map(&mut self, info: &ImageInfo, extended: bool) {
        let Some(cluster) = info.cluster_size.filter(|bytes| *bytes > 0) else { return };
        let entry = if extended { 16 } else { 8 };
        let map = map_bytes(info.virtual_size, cluster, entry);
        self.evidence.map_bytes = Some(map);
        let default = Limits::default().cache_bytes;
        if map <= default {
            return;
        }
        let mib = map.div_ceil(1 << 20);
        let covered = default / entry * cluster;
        let message = format!(
            "with clusters of {} KiB a disk of {} GiB has {mib} MiB of L2 tables once all of it is \
             used; the default cache of {} MiB covers {} GiB. (QEMU: l2-cache-size={mib}M)",
            cluster as f64 / 1024.0,
            info.virtual_size >> 30,
            default >> 20,
            covered >> 30,
        );
        let options = ["--nbd", "unix:SOCKET", "--l2-cache", &format!("{mib}M")];
        let mend = self.vdkit(&["serve"], &options);
        self.add(DoctorCode::MapCache, message, mend);
        // The smallest sufficient size, as larger clusters make first writes slower.
        let mut better = cluster;
        while map_bytes(info.virtual_size, better, entry) > default && better < 2 << 20 {
            better *= 2;
        }
        if cluster < CLUSTER_BYTES_USUAL && better > cluster {
            let better = better.max(CLUSTER_BYTES_USUAL);
            let map = map_bytes(info.virtual_size, better, entry).div_ceil(1 << 20);
            let option = format!("cluster_size={}K", better >> 10);
            let message = format!("with {option} the tables would take {map} MiB");
            let mend = self.vdkit(&["convert", "-O", "qcow2", "-o", &option], &["NEW"]);
            self.add(DoctorCode::SmallClusters, message, mend);
        }
    }

    /// Runs the format's check within the budget.
    pub(super) fn check(&mut self, open: &OpenOptions, monitor: &Monitor<'_>) -> Result<()> {
        let opened = match open_image(self.registry, self.path, open) {
            Ok(opened) => opened,
            Err(error) => {
                // The image itself was described, so the data file is missing.
                self.add(DoctorCode::DataFileMissing, error.to_string(), None);
                return Ok(());
            }
        };
        if self.in_use {
            return Ok(());
        }
        let OpenedImage { storage, files, driver, .. } = opened;
        let deadline = Instant::now().checked_add(TIME_MAX);
        let budget = BudgetStorage::new(storage, READS_MAX, METADATA_BYTES_MAX, deadline);
        let limited: Arc<dyn Storage> = budget.clone();
        // Extents have tables of their own.
        let files = files.into_iter().map(|file| budget.share_with(file) as Arc<dyn Storage>);
        let files: Vec<_> = files.collect();
        let mut limits = Limits::default();
        limits.check_bytes_max = MEMORY_MAX;
        // It ends soon, so its own progress would be misleading.
        let monitor = monitor.quiet();
        let image = OfflineImage { storage: &limited, files: &files, limits, monitor };
        let checked = driver.check(&image, Repair::Nothing);
        // A guest that started meanwhile changed what was read.
        self.examine_use();
        match checked {
            Err(error @ Error::Interrupted) => return Err(error),
            _ if self.in_use => {}
            _ if budget.exceeded().is_some() => self.not_checked(),
            Ok(report) => {
                self.checked = true;
                self.add_check(&report);
            }
            Err(Error::Limit { .. }) => self.not_checked(),
            Err(Error::Unsupported { .. }) => {}
            Err(error) => {
                let mend = self.vdkit(&["check", "--repair", "all"], &[]);
                self.add(DoctorCode::Corrupt, error.to_string(), mend);
            }
        }
        Ok(())
    }

    fn not_checked(&mut self) {
        let message = format!(
            "there is more metadata than {} MiB, or reading it takes longer than {} s",
            METADATA_BYTES_MAX >> 20,
            TIME_MAX.as_secs()
        );
        let mend = self.vdkit(&["check"], &[]);
        self.add(DoctorCode::NotChecked, message, mend);
    }

    fn add_check(&mut self, report: &CheckReport) {
        // The corrupt flag counts as one, and is reported already.
        let marked = u64::from(self.link().info.corrupt);
        if report.corruptions > marked {
            let mut damage = report.findings.iter().filter(|f| f.severity == Severity::Corruption);
            let first = damage.next().map_or_else(String::new, |finding| {
                format!("; {} at {:#x}: {}", finding.structure, finding.offset, finding.message)
            });
            let errors = if report.corruptions == 1 { "error" } else { "errors" };
            let message = format!("{} {errors}{first}; make a copy first", report.corruptions);
            let mend = self.vdkit(&["check", "--repair", "all"], &[]);
            self.add(DoctorCode::Corrupt, message, mend);
        }
        let cluster = self.link().info.cluster_size.unwrap_or(0);
        if report.leaks > 0 {
            let message = format!(
                "{} clusters, {} bytes",
                report.leaks,
                report.leaks.saturating_mul(cluster)
            );
            let mend = self.vdkit(&["check", "--repair", "leaks"], &[]);
            self.add(DoctorCode::Leaks, message, mend);
        }
        if report.compressed_clusters > 0 {
            let message = format!(
                "{} of {} allocated clusters are compressed; where a guest runs on the image, \
                 convert it",
                report.compressed_clusters, report.allocated_clusters
            );
            let mend = self.vdkit(&["convert", "-O", self.link().info.format], &["NEW"]);
            self.add(DoctorCode::Compressed, message, mend);
        }
        self.examine_order(report);
        self.examine_unused(report, cluster);
    }

    /// Whether clusters are in guest order in the file.
    fn examine_order(&mut self, report: &CheckReport) {
        if report.total_clusters == 0 {
            return;
        }
        let (fragmented, allocated) = (report.fragmented_clusters, report.allocated_clusters);
        self.evidence.fragmented_clusters = Some(fragmented);
        self.evidence.allocated_clusters = Some(allocated);
        let link = self.link();
        let (size, format, host) = (link.info.virtual_size, link.info.format, link.host);
        // (This count does not cover a separate data file.)
        if link.info.files.is_empty() && !host.device {
            let mapped = allocated >= report.total_clusters;
            self.evidence.allocation = allocation(size, host.allocated_bytes, mapped);
        }
        if !shuffled(fragmented, allocated) {
            return;
        }
        let message = format!(
            "{fragmented} of {allocated} allocated clusters do not follow the one before them; a \
             new image has them in order"
        );
        let mend = self.vdkit(&["convert", "-O", format], &["NEW"]);
        self.add(DoctorCode::FragmentedMap, message, mend);
    }

    /// Reports space that no cluster in use accounts for.
    fn examine_unused(&mut self, report: &CheckReport, cluster: u64) {
        let link = self.link();
        let info = &link.info;
        let tellable = info.format == "qcow2"
            && !link.host.device
            && info.snapshots.is_empty()
            && info.files.is_empty()
            && report.corruptions == 0
            && cluster > 0;
        if !tellable {
            return;
        }
        let used = used_at_most(report, info, cluster);
        let unused = link.host.allocated_bytes.saturating_sub(used);
        if unused < UNUSED_MIN.max(link.host.allocated_bytes / 10) {
            return;
        }
        let message = format!(
            "the file takes {} bytes on the host; its clusters in use take {used} at most",
            link.host.allocated_bytes
        );
        let mend = self.vdkit(&["compact"], &[]);
        self.add(DoctorCode::UnusedSpace, message, mend);
    }
}

/// Bytes of the L2 entries of a whole disk.
fn map_bytes(virtual_size: u64, cluster: u64, entry: u64) -> u64 {
    virtual_size.div_ceil(cluster).saturating_mul(entry)
}

/// Upper bound of bytes in use: data, leaks (reported separately), and metadata.
fn used_at_most(report: &CheckReport, info: &ImageInfo, cluster: u64) -> u64 {
    let clusters = report.allocated_clusters.saturating_add(report.leaks);
    let data = clusters.saturating_mul(cluster);
    // All L2 tables may exist, even unallocated. An entry takes at most 16 bytes, a refcount 8.
    let map = map_bytes(info.virtual_size, cluster, 16).saturating_add(cluster);
    let refcounts = report.image_end_offset.div_ceil(cluster).saturating_mul(8);
    let tables = map.saturating_add(refcounts);
    // Header, L1 table, refcount table, bitmaps (at most a bit per 512 bytes), encryption.
    let bitmap = (info.virtual_size / 512 / 8).saturating_mul(info.bitmaps.len() as u64);
    let small = (4 << 20) + 16 * cluster;
    data.saturating_add(tables).saturating_add(bitmap).saturating_add(small)
}

/// The word by which a command finds this snapshot and no other: commands take a word for a name
/// first, and then for an id.
fn word_of_snapshot<'a>(snapshots: &[SnapshotInfo], wanted: &'a SnapshotInfo) -> Option<&'a str> {
    let named = |word: &str| snapshots.iter().find(|snapshot| snapshot.name == word);
    let plain = !wanted.name.is_empty() && !wanted.name.starts_with('-');
    if plain && named(&wanted.name).is_some_and(|first| first.id == wanted.id) {
        return Some(&wanted.name);
    }
    named(&wanted.id).is_none().then_some(&wanted.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_named_by_what_no_other_answers_to() {
        let of = |names: &[&str], wanted: usize| {
            let snapshots: Vec<_> = (1..)
                .zip(names)
                .map(|(id, name)| SnapshotInfo {
                    id: format!("{id}"),
                    name: (*name).to_owned(),
                    ..SnapshotInfo::default()
                })
                .collect();
            word_of_snapshot(&snapshots, &snapshots[wanted]).map(str::to_owned)
        };
        assert_eq!(of(&["0", "1", "2"], 0).as_deref(), Some("0"));
        assert_eq!(of(&["a", "a"], 1).as_deref(), Some("2"));
        assert_eq!(of(&["", "1"], 0), None);
        assert_eq!(of(&["-f", "b"], 0).as_deref(), Some("1"));
    }

    #[test]
    fn the_map_of_a_disk() {
        assert_eq!(map_bytes(256 << 30, 64 << 10, 8), 32 << 20);
        assert_eq!(map_bytes(1 << 40, 8 << 10, 8), 1 << 30);
        assert_eq!(map_bytes(1, 64 << 10, 16), 16);
        assert_eq!(map_bytes(u64::MAX, 512, 16), 1 << 59);
    }
}
