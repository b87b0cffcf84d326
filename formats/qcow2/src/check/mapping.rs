//! Checks the L2 tables: reads each once, however many L1 entries name it.

use rustc_hash::FxHashSet;
use vdkit_block::CheckReport;

use super::balance::{Balance, METADATA, SINGLE};
use super::image::{Image, L2Faults};
use crate::entry::L2Entry;
use crate::layout::{COMPRESSED, COPIED, L2_RESERVED, OFFSET_MASK, ZERO};
use crate::structures::{self, words_mut};

/// An L2 table and the L1 entries that name it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct L2Table {
    pub(super) offset: u64,
    /// Entries of the active L1 table that name it.
    pub(super) active: u32,
    /// Entries of snapshots' L1 tables that name it.
    pub(super) inactive: u32,
    /// The first L1 entry that names it, active ones first.
    pub(super) l1_index: u32,
    /// Entries that are not empty.
    pub(super) used: u32,
    pub(super) faulty: u32,
    /// Entries with faults that a truncated file does not explain.
    pub(super) implausible: u32,
    /// Entries whose COPIED flag disagrees with the refcount.
    pub(super) copied_wrong: u32,
    /// A repair of some entry loses its data.
    pub(super) lossy: bool,
    /// Some entry is that of a compressed cluster.
    pub(super) compressed: bool,
}

impl L2Table {
    /// References that each of its entries makes.
    pub(super) fn weight(&self) -> i32 {
        i32::try_from(u64::from(self.active) + u64::from(self.inactive)).unwrap_or(i32::MAX)
    }

    /// As [`L2Table::weight`], which is never negative.
    pub(super) fn references(&self) -> u64 {
        self.weight().unsigned_abs().into()
    }

    /// Most of its entries are faulty: this is not an L2 table.
    pub(super) fn is_mostly_invalid(&self) -> bool {
        self.faulty * 2 > self.used
    }

    /// An L1 entry may as well be empty as name it.
    pub(super) fn maps_nothing(&self) -> bool {
        self.used == 0 || self.is_mostly_invalid()
    }

    /// Guest offset of the cluster of an entry.
    pub(super) fn guest(&self, index: u64, image: &Image) -> u64 {
        let geometry = image.geometry();
        ((u64::from(self.l1_index) << geometry.l2_bits()) + index) << geometry.cluster_bits
    }
}

pub(super) fn entry_at(table: &[u8], index: usize, extended: bool) -> L2Entry {
    let step = if extended { 2 } else { 1 };
    L2Entry::decode(&structures::words(table)[index * step..][..step])
}

/// Entries that are examined together.
const GROUP: usize = 64;

/// Counts what L2 tables refer to.
pub(super) struct Scan<'a> {
    pub(super) image: &'a Image,
    pub(super) balance: &'a mut Balance,
    pub(super) report: &'a mut CheckReport,
    /// Metadata clusters that something else uses too.
    pub(super) conflicts: &'a mut FxHashSet<u64>,
}

/// Counts one table's fragmentation as QEMU does.
#[derive(Default)]
struct Run {
    next: u64,
    allocated: u64,
    fragmented: u64,
    compressed: u64,
}

impl Run {
    fn cluster(&mut self, host: u64, cluster_bytes: u64) {
        self.allocated += 1;
        self.fragmented += u64::from(self.next != 0 && self.next != host);
        self.next = host.wrapping_add(cluster_bytes);
    }

    fn compressed(&mut self) {
        // As in QEMU, every compressed cluster counts as fragmented: its end is not sector-aligned.
        self.allocated += 1;
        self.compressed += 1;
        self.fragmented += 1;
    }
}

impl Scan<'_> {
    /// Counts the references of one table.
    pub(super) fn table(&mut self, table: &mut L2Table, bytes: &[u8]) {
        let mut run = Run::default();
        let image = self.image;
        if image.geometry().extended || image.header.has_data_file() {
            for (index, entry) in L2Entry::all(bytes, image.geometry()).enumerate() {
                if entry != L2Entry::default() {
                    self.entry(table, index, entry, &mut run);
                }
            }
        } else {
            self.standard_table(table, bytes, &mut run);
        }
        let active = u64::from(table.active);
        let report = &mut self.report;
        report.allocated_clusters += run.allocated * active;
        report.fragmented_clusters += run.fragmented * active;
        report.compressed_clusters += run.compressed * active;
    }

    /// Counts a standard table without a call per plain entry; other entries go to [`Self::entry`].
    fn standard_table(&mut self, table: &mut L2Table, bytes: &[u8], run: &mut Run) {
        let cluster_bytes = self.image.cluster_bytes();
        let cluster_bits = self.image.geometry().cluster_bits;
        let file_len = self.image.file_len;
        let weight = table.weight();
        let mut odd = COMPRESSED | L2_RESERVED | (OFFSET_MASK & (cluster_bytes - 1));
        if self.image.header.version < 3 {
            odd |= ZERO;
        }
        let (mut first, mut words) = (0, [0u64; GROUP]);
        for group in structures::words(bytes).chunks(GROUP) {
            let words = &mut words[..group.len()];
            for (word, raw) in words.iter_mut().zip(group) {
                *word = raw.get();
            }
            let index = first;
            first += words.len();
            if words.iter().all(|&word| word == 0) {
                continue;
            }
            if weight == 1 && table.active == 1 && self.single_run(words, odd, run) {
                table.used += words.len() as u32;
                continue;
            }
            for (index, &word) in (index..).zip(&*words) {
                let host = word & OFFSET_MASK;
                if word & odd != 0 || host >= file_len {
                    self.entry(table, index, L2Entry { word, bitmap: 0 }, run);
                    continue;
                }
                if host == 0 {
                    table.used += u32::from(word != 0);
                    continue;
                }
                let old = self.balance.refer(host >> cluster_bits, weight);
                let copied = word & COPIED != 0;
                if old & METADATA != 0 || copied != (old & SINGLE != 0) {
                    // Rare: undo the reference and take the slow path.
                    self.balance.refer(host >> cluster_bits, -weight);
                    self.entry(table, index, L2Entry { word, bitmap: 0 }, run);
                    continue;
                }
                table.used += 1;
                run.cluster(host, cluster_bytes);
            }
        }
    }

    /// Counts entries that name consecutive clusters, each with one reference and COPIED set, as in
    /// most of most images. Returns whether they matched.
    fn single_run(&mut self, words: &[u64], odd: u64, run: &mut Run) -> bool {
        let cluster_bytes = self.image.cluster_bytes();
        let (Some(&first), Some(&last)) = (words.first(), words.last()) else { return false };
        if first & (odd | COPIED) != COPIED
            || first & OFFSET_MASK == 0
            || !(first & OFFSET_MASK..self.image.file_len).contains(&(last & OFFSET_MASK))
            || !words.iter().zip(0u64..).all(|(&w, i)| w == first.wrapping_add(i * cluster_bytes))
        {
            return false;
        }
        let host = first & OFFSET_MASK;
        let cluster = host >> self.image.geometry().cluster_bits;
        if !self.balance.refer_singles(cluster, words.len()) {
            return false;
        }
        run.cluster(host, cluster_bytes);
        run.allocated += words.len() as u64 - 1;
        run.next = (last & OFFSET_MASK) + cluster_bytes;
        true
    }

    fn entry(&mut self, table: &mut L2Table, index: usize, entry: L2Entry, run: &mut Run) {
        let image = self.image;
        let guest = table.guest(index as u64, image);
        let (corrected, faults) = image.judge_l2(entry, guest);
        let at = table.offset + index as u64 * image.geometry().l2_entry_bytes();
        table.used += 1;
        table.compressed |= entry.is_compressed();
        if !faults.is_empty() {
            table.faulty += 1;
            table.implausible += u32::from(faults != L2Faults::BEYOND_END);
            table.lossy |= faults.lost();
            self.report_faults(at, guest, entry, faults);
        }
        if corrected.is_compressed() {
            let place = corrected.compressed_place(image.geometry());
            for cluster in image.clusters_of(place.offset.0, place.bytes) {
                self.refer(cluster, table.weight(), at, guest);
            }
            run.compressed();
        } else if corrected.has_space(image.header.has_data_file()) {
            let host = corrected.host().0;
            run.cluster(host, image.cluster_bytes());
            let single = if image.header.has_data_file() {
                true
            } else {
                let cluster = host >> image.geometry().cluster_bits;
                self.refer(cluster, table.weight(), at, guest) & SINGLE != 0
            };
            if table.active > 0 && single != corrected.is_copied() {
                table.copied_wrong += 1;
                self.report.corruption(at, "L2 entry", || {
                    wrong_copied(format_args!("guest offset {guest:#x}"), entry.word, single)
                });
            }
        }
    }

    fn refer(&mut self, cluster: u64, times: i32, at: u64, guest: u64) -> u16 {
        let old = self.balance.refer(cluster, times);
        if old & METADATA != 0 {
            self.conflicts.insert(cluster);
            let offset = cluster << self.image.geometry().cluster_bits;
            self.report.corruption(at, "L2 entry", || {
                format!(
                    "guest offset {guest:#x}: found a cluster of metadata at {offset:#x}, expected \
                     one that nothing else uses"
                )
            });
        }
        old
    }

    fn report_faults(&mut self, at: u64, guest: u64, entry: L2Entry, faults: L2Faults) {
        let cluster = self.image.cluster_bytes();
        for expected in faults.each() {
            self.report.corruption(at, "L2 entry", || {
                let bitmap = if entry.bitmap == 0 {
                    String::new()
                } else {
                    format!(" with bitmap {:#x}", entry.bitmap)
                };
                let lost = if faults.lost() {
                    format!("; the data of {cluster} guest bytes is lost")
                } else {
                    String::new()
                };
                format!(
                    "guest offset {guest:#x}: found {:#x}{bitmap}, expected {expected}{lost}",
                    entry.word
                )
            });
        }
    }
}

/// Describes an entry whose COPIED flag disagrees with the refcount, which is 1 if `single`.
pub(super) fn wrong_copied(place: impl std::fmt::Display, word: u64, single: bool) -> String {
    let (found, expected) = match single {
        true => ("without", "it, the refcount is 1"),
        false => ("with", "none, the refcount is not 1"),
    };
    format!("{place}: found {word:#x} {found} COPIED flag, expected {expected}")
}

/// Corrects each entry of a table.
pub(super) fn repair_table(image: &Image, table: &L2Table, bytes: &mut [u8]) {
    let step = image.geometry().l2_entry_words();
    for (index, words) in words_mut(bytes).chunks_exact_mut(step).enumerate() {
        let entry = L2Entry::decode(words);
        if entry == L2Entry::default() {
            continue;
        }
        let (corrected, faults) = image.judge_l2(entry, table.guest(index as u64, image));
        if !faults.is_empty() {
            corrected.encode(words);
        }
    }
}

/// Makes the COPIED flag of each entry agree with the refcount in the image.
pub(super) fn set_copied(image: &Image, balance: &Balance, bytes: &mut [u8]) {
    let geometry = image.geometry();
    for words in words_mut(bytes).chunks_exact_mut(geometry.l2_entry_words()) {
        let entry = L2Entry::decode(words);
        if entry.is_compressed() || !entry.has_space(image.header.has_data_file()) {
            continue;
        }
        let cluster = geometry.host_cluster(entry.host());
        let single = image.header.has_data_file() || balance.word(cluster) & SINGLE != 0;
        if single != entry.is_copied() {
            words[0].set(entry.word ^ COPIED);
        }
    }
}
