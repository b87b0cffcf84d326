//! Resolves guest offsets to host offsets.

use std::sync::atomic::Ordering;

use vdkit_block::{Compressed, Extent, FileIndex, GuestOffset, HostOffset, Place, Remedy, Result};

use crate::entry::{L2Entry, State};
use crate::image::Qcow2;
use crate::layout::{COPIED, L1_RESERVED, OFFSET_MASK, SUBCLUSTERS};
use crate::slices::Seen;

/// Reads longer than any guest request (NBD's maximum, 32 MiB) are map scans. A scan does not cache
/// the slices that it passes; a request that is repeated must find all of its slices.
const REQUEST_BYTES_MAX: u64 = 32 << 20;
/// After a run of this many slices, a scan expects the next runs to be as long.
const PASSED_MANY: u32 = 8;

/// Result of decoding entries of one slice.
enum Look {
    /// The run from the requested offset; if `open`, it may continue in the next slice.
    Run { extent: Extent, open: bool },
    /// The first entry breaks a rule.
    Fault { word: u64, expected: &'static str },
}

/// A run that is assembled slice by slice.
struct Run {
    /// Bytes requested.
    len: u64,
    found: Option<Extent>,
    /// Slices that the run spans completely.
    passed: u32,
    ended: bool,
}

impl Run {
    /// Bytes found.
    fn done(&self) -> u64 {
        self.found.map_or(0, |extent| extent.len)
    }

    /// Whether this is a map scan.
    fn mapping(&self) -> bool {
        self.len > REQUEST_BYTES_MAX
    }

    /// Appends `next`; `open` if more may follow.
    fn add(&mut self, next: Extent, open: bool) {
        let joined = match self.found {
            None => Some(next),
            Some(sofar) => sofar.merge(next),
        };
        self.found = joined.or(self.found);
        self.ended = joined.is_none() || !open || self.done() >= self.len;
    }

    /// Adds the result of a slice after the first one.
    fn see(&mut self, look: Look) -> Seen {
        match look {
            Look::Run { extent, open } => self.add(extent, open),
            // The run found so far is still valid.
            Look::Fault { .. } => self.ended = true,
        }
        let mapping = self.mapping();
        if self.ended && mapping && self.passed >= PASSED_MANY {
            return Seen::Last;
        }
        if self.ended {
            return Seen::LastAndRest;
        }
        self.passed += 1;
        if mapping { Seen::Passed } else { Seen::Kept }
    }
}

impl Qcow2 {
    /// The L1 entry of an index: the table's offset and its COPIED flag, if there is a table.
    pub(crate) fn l2_table(&self, l1_index: u64) -> Result<Option<(HostOffset, bool)>> {
        let word = self.l1.read().get(l1_index as usize).copied().unwrap_or(0);
        let offset = word & OFFSET_MASK;
        if offset == 0 {
            return Ok(None);
        }
        if offset & (self.geometry.cluster_bytes() - 1) != 0 || word & L1_RESERVED != 0 {
            return Err(vdkit_block::Error::corrupt(
                self.storage.name(),
                self.l1_offset().0 + l1_index * 8,
                "L1 entry",
                format!("{word:#018x}"),
                "an L2 table at a cluster boundary and no reserved bits",
            ));
        }
        if let Some(cut) = self.cut {
            cut.refuse(&[word], self.l1_offset() + l1_index * 8, &*self.storage)?;
        }
        Ok(Some((HostOffset(offset), word & COPIED != 0)))
    }

    /// Guest bytes from `at` without an L2 table. The caller has found none for `at`; the result
    /// ignores a table that another thread has made for `at` since.
    fn absent_run(&self, at: GuestOffset, len: u64) -> u64 {
        let span = self.geometry.l2_span();
        let l1 = self.l1.read();
        let first = self.geometry.l1_index(at);
        let last = self.geometry.l1_index(GuestOffset(at.0 + len - 1));
        let mut index = first + 1;
        while index <= last && l1.get(index as usize).is_none_or(|w| w & OFFSET_MASK == 0) {
            index += 1;
        }
        // `index` is above `first`, so the product is beyond `at`. It cannot overflow: it is at
        // most one span beyond a guest size below 2^63.
        (index * span - at.0).min(len)
    }

    /// Host offset of the slice that holds the entry of `at`.
    pub(crate) fn slice_of(&self, table: HostOffset, at: GuestOffset) -> u64 {
        let byte = self.geometry.l2_index(at) * self.geometry.l2_entry_bytes();
        table.0 + (byte & !(self.slices.slice_bytes() - 1))
    }

    /// As [`vdkit_block::Format::resolve`], reading slices that are not cached.
    pub(crate) fn map_loading(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        let mut run = Run { len, found: None, passed: 0, ended: false };
        while !run.ended {
            let here = at + run.done();
            let rest = len - run.done();
            let table = match self.l2_table(self.geometry.l1_index(here)) {
                // The run found so far is still valid.
                Err(_) if run.found.is_some() => break,
                table => table?,
            };
            let Some((table, _)) = table else {
                let hole = Extent { len: self.absent_run(here, rest), place: Place::Hole };
                run.add(hole, true);
                continue;
            };
            let key = self.slice_of(table, here);
            let look = |words: &[u64]| self.look(words, here, rest);
            let passing = run.mapping() && self.one_pass.load(Ordering::Relaxed);
            let found = match passing {
                true => self.slices.peek(key, look),
                false => self.slices.with(key, look),
            };
            match found {
                Some(Look::Run { extent, open }) => {
                    run.add(extent, open);
                    // If the run has ended, the next run begins in this slice, so it stays cached.
                    if passing && !run.ended {
                        self.slices.pass(key);
                    }
                }
                // The run found so far is still valid.
                Some(Look::Fault { .. }) if run.found.is_some() => break,
                Some(Look::Fault { word, expected }) => {
                    let index = self.geometry.l2_index(here);
                    return Err(self.entry_fault(table, index, word, expected));
                }
                None if run.found.is_none() => self.slices.load(key, &*self.storage)?,
                // The request spans several slices: read the rest of the table at once.
                None => {
                    let rest = table.0 + self.geometry.cluster_bytes() - key;
                    let count = rest / self.slices.slice_bytes();
                    self.slices.walk(key, count, &*self.storage, |words| {
                        run.see(self.look(words, at + run.done(), len - run.done()))
                    })?;
                }
            }
        }
        let extent = run.found.unwrap_or(Extent { len, place: Place::Hole });
        self.guard_metadata(at, extent)
    }

    /// As [`vdkit_block::Format::resolve_cached`]: one slice, no I/O.
    pub(crate) fn map_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        let extent = match self.l2_table(self.geometry.l1_index(at)).ok()? {
            None => Extent { len: self.absent_run(at, len), place: Place::Hole },
            Some((table, _)) => {
                let key = self.slice_of(table, at);
                match self.slices.with(key, |words| self.look(words, at, len))? {
                    Look::Run { extent, .. } => extent,
                    Look::Fault { .. } => return None,
                }
            }
        };
        self.guard_metadata(at, extent).ok()
    }

    /// Fails if the space of an extent cannot be that of its guest bytes, see
    /// [`Qcow2::guard_space`]. Space that only reads use may overlap metadata. Space beyond the
    /// frontier cannot be written in place until [`Qcow2::regain`] has moved that.
    fn guard_metadata(&self, at: GuestOffset, mut extent: Extent) -> Result<Extent> {
        let Place::Data { offset, exclusive, .. } = &mut extent.place else { return Ok(extent) };
        let (offset, data_file) = (*offset, self.has_data_file());
        if !data_file && self.writable && *exclusive {
            let below = (self.frontier() << self.geometry.cluster_bits).saturating_sub(offset.0);
            match below {
                0 => *exclusive = false,
                _ => extent.len = extent.len.min(below),
            }
        }
        if data_file || (self.writable && *exclusive) {
            self.guard_space(at, offset, extent.len)?;
        }
        Ok(extent)
    }

    /// Fails if guest bytes have their space in the image's own metadata, which a write would
    /// destroy, or at another offset in the data file, where other guest bytes are.
    pub(crate) fn guard_space(&self, at: GuestOffset, host: HostOffset, len: u64) -> Result<()> {
        if self.has_data_file() {
            return if host.0 == at.0 { Ok(()) } else { Err(self.moved_in_data_file(at)?) };
        }
        let bits = self.geometry.cluster_bits;
        let metadata = self.metadata.read();
        let mut clusters = host.0 >> bits..=(host.0 + len - 1) >> bits;
        match clusters.find(|&c| metadata.contains(c)) {
            None => Ok(()),
            Some(cluster) => Err(vdkit_block::Error::corrupt(
                self.storage.name(),
                cluster << bits,
                "host cluster",
                format!("metadata that the data at guest offset {at} overlaps"),
                "data in clusters of its own",
            )
            .with_remedy(Remedy::REPAIR)),
        }
    }

    /// The error for an entry that names another offset in the data file than its guest offset.
    #[cold]
    fn moved_in_data_file(&self, at: GuestOffset) -> Result<vdkit_block::Error> {
        let word = self.entry_at(at)?.word;
        let table = self.l2_table(self.geometry.l1_index(at))?;
        let table = table.map_or(HostOffset(0), |(table, _)| table);
        let expected = "the guest offset as offset in the data file";
        Ok(self.entry_fault(table, self.geometry.l2_index(at), word, expected))
    }

    /// Entry `index` of the slice `words`.
    pub(crate) fn entry_in(&self, words: &[u64], index: usize) -> L2Entry {
        if self.geometry.extended {
            L2Entry { word: words[2 * index], bitmap: words[2 * index + 1] }
        } else {
            L2Entry { word: words[index], bitmap: 0 }
        }
    }

    pub(crate) fn slice_entries(&self) -> usize {
        (self.slices.slice_bytes() / self.geometry.l2_entry_bytes()) as usize
    }

    /// The longest run from `at` within one slice, at most `len` bytes.
    fn look(&self, words: &[u64], at: GuestOffset, len: u64) -> Look {
        let entries = self.slice_entries();
        let first = (self.geometry.l2_index(at) as usize) & (entries - 1);
        let bits = self.geometry.cluster_bits;
        let mut index = first;
        let mut offset = at;
        let end = at.0 + len;
        let mut found: Option<Extent> = None;
        while index < entries && offset.0 < end {
            let entry = self.entry_in(words, index);
            if let Some(expected) =
                entry.fault(&self.geometry, self.header.version(), self.has_data_file())
            {
                return match found {
                    None => Look::Fault { word: entry.word, expected },
                    Some(extent) => Look::Run { extent, open: false },
                };
            }
            let mut next = self.extent_of(entry, offset, end - offset.0);
            if self.geometry.in_cluster(offset + next.len) == 0 {
                let more = self.continued(words, index, next.place) << bits;
                next.len = (next.len + more).min(end - offset.0);
            }
            found = match found {
                None => Some(next),
                Some(sofar) => match sofar.merge(next) {
                    Some(joined) => Some(joined),
                    None => return Look::Run { extent: sofar, open: false },
                },
            };
            offset += next.len;
            index = first + ((offset.0 >> bits) - (at.0 >> bits)) as usize;
        }
        let open = index >= entries;
        // The loop ran at least once: `len` is never 0.
        let extent = found.unwrap_or(Extent { len, place: Place::Hole });
        Look::Run { extent, open: open && !matches!(extent.place, Place::Compressed(_)) }
    }

    /// Number of entries after `index` that continue its run.
    fn continued(&self, words: &[u64], index: usize, place: Place) -> u64 {
        if self.geometry.extended {
            return 0;
        }
        let word = words[index];
        let (step, most) = match place {
            Place::Data { .. } => {
                let step = self.geometry.cluster_bytes();
                // Host offsets must not overflow into the flags above them.
                (step, (OFFSET_MASK - (word & OFFSET_MASK)) / step)
            }
            Place::Compressed(_) => return 0,
            Place::Hole | Place::Zero { .. } => (0, u64::MAX),
        };
        let behind = &words[index + 1..];
        let most = usize::try_from(most).map_or(behind.len(), |most| most.min(behind.len()));
        steps(&behind[..most], word, step)
    }

    /// The extent of one entry from `at`, up to the end of a run of equal subclusters.
    fn extent_of(&self, entry: L2Entry, at: GuestOffset, len: u64) -> Extent {
        let geometry = &self.geometry;
        let in_cluster = geometry.in_cluster(at);
        let cluster_rest = geometry.cluster_bytes() - in_cluster;
        if entry.is_compressed() {
            let place = entry.compressed_place(geometry);
            return Extent {
                len: cluster_rest.min(len),
                place: Place::Compressed(Compressed {
                    file: FileIndex(0),
                    offset: place.offset,
                    len: place.bytes as u32,
                    codec: self.header.codec(),
                    unpacked_len: geometry.cluster_bytes() as u32,
                    skip: in_cluster as u32,
                }),
            };
        }
        let (subcluster, run) = if geometry.extended {
            let index = (in_cluster / geometry.subcluster_bytes()) as u32;
            debug_assert!(index < SUBCLUSTERS);
            (index, u64::from(index + entry.run(index)) * geometry.subcluster_bytes() - in_cluster)
        } else {
            (0, cluster_rest)
        };
        let place = match entry.state(subcluster, geometry, self.has_data_file()) {
            State::Hole | State::HoleAllocated => Place::Hole,
            State::ZeroPlain => Place::Zero { allocated: false },
            State::ZeroAllocated => Place::Zero { allocated: true },
            State::Data => Place::Data {
                file: FileIndex(0),
                offset: entry.host() + in_cluster,
                exclusive: entry.is_copied(),
            },
            State::Compressed => unreachable!("handled above"),
        };
        Extent { len: run.min(len), place }
    }
}

/// Number of leading words that continue `word` in steps of `step`. Compares a chunk of words per
/// branch, since a contiguous disk has thousands of such entries.
fn steps(words: &[u64], word: u64, step: u64) -> u64 {
    const AT_ONCE: usize = 32;
    let mut next = word + step;
    let mut count = 0;
    for words in words.chunks(AT_ONCE) {
        let differ = (0..).zip(words).fold(0, |all, (i, word)| all | (word ^ (next + i * step)));
        if differ != 0 {
            let same = (0..).zip(words).take_while(|&(i, &word)| word == next + i * step);
            return count + same.count() as u64;
        }
        count += words.len() as u64;
        next = next.wrapping_add(words.len() as u64 * step);
    }
    count
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vdkit_block::{Format, Limits, MapCache, OpenRequest, Storage};
    use vdkit_storage::MemoryStorage;
    use vdkit_testbase::{CountingStorage, create_image};

    use super::*;
    use crate::Qcow2Driver;
    use crate::layout::ZERO;

    /// A thread that found no L2 table may count the run after another thread has made one.
    /// Counting from the new table once returned an empty run or one of the full length.
    #[test]
    fn a_table_made_meanwhile_shortens_no_run_below_its_end_and_lengthens_none() {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        create_image(&Qcow2Driver, storage.clone(), 1 << 20, "cluster_size=512");
        let limits = Limits::default();
        let request = OpenRequest { storage, files: Vec::new(), writable: true, limits };
        let image = Qcow2::open(request).unwrap();
        let span = image.geometry.l2_span();
        for made in [0, 1] {
            let space = image.reserve(GuestOffset(made * span), 512).unwrap().unwrap();
            space.publish().unwrap();
        }
        assert!(image.l2_table(0).unwrap().is_some() && image.l2_table(2).unwrap().is_none());
        for (at, len, run) in [
            (0, 512, 512),
            (0, 4 * span, span),
            (span - 512, 4 * span, 512),
            (1000, 4 * span, span - 1000),
            (span + 512, 8 * span, 8 * span),
            (2 * span, 4 * span, 4 * span),
        ] {
            assert_eq!(image.absent_run(GuestOffset(at), len), run, "{at}");
        }
    }

    /// An image with one table; each run is (entries, host cluster of the first, step, flags).
    fn image_of(runs: &[(u64, u64, u64, u64)]) -> (Arc<CountingStorage>, Arc<Qcow2>) {
        let memory: Arc<dyn Storage> = Arc::new(MemoryStorage::new("image"));
        create_image(&Qcow2Driver, memory.clone(), 512 << 20, "");
        let words = runs.iter().flat_map(|&(count, first, step, flags)| {
            (0..count).map(move |i| ((first + i * step) << 16) | flags)
        });
        let table: Vec<u8> = words.flat_map(u64::to_be_bytes).collect();
        assert_eq!(table.len(), 65536);
        memory.write_at(&table, HostOffset(4 << 16)).unwrap();
        memory.write_at(&((4 << 16) | COPIED).to_be_bytes(), HostOffset(3 << 16)).unwrap();
        let storage = CountingStorage::new(memory);
        let limits = Limits::default();
        let request =
            OpenRequest { storage: storage.clone(), files: Vec::new(), writable: false, limits };
        let image = Qcow2::open(request).unwrap();
        storage.reset();
        (storage, image)
    }

    #[test]
    fn runs_end_where_the_host_offset_jumps_or_a_flag_changes() {
        let (_, image) = image_of(&[
            (700, 100, 1, COPIED),
            (300, 801, 1, COPIED),
            (1, 1101, 1, 0),
            (99, 0, 0, 0),
            (900, 0, 0, ZERO),
            (2, 5000, 1, ZERO),
            (6190, (1 << 40) - 7, 1, COPIED),
        ]);
        let mut at = GuestOffset(65536 / 2);
        let mut runs = Vec::new();
        while at.0 < image.guest_len() {
            let extent = image.map_loading(at, image.guest_len() - at.0).unwrap();
            runs.push((extent.len >> 15, extent.place));
            at += extent.len;
            // The last valid entry names the last host cluster below 2^56.
            if at.0 >> 16 == 2002 + 7 {
                break;
            }
        }
        let data = |half: u64, exclusive| Place::Data {
            file: FileIndex(0),
            offset: HostOffset(half << 15),
            exclusive,
        };
        assert_eq!(
            runs,
            [
                (1399, data(201, true)),
                (600, data(1602, true)),
                (2, data(2202, false)),
                (198, Place::Hole),
                (1800, Place::Zero { allocated: false }),
                (4, Place::Zero { allocated: true }),
                (14, data(((1 << 40) - 7) * 2, true)),
            ]
        );
    }

    #[test]
    fn going_through_a_table_reads_it_twice_whatever_its_length() {
        let (storage, image) = image_of(&[(8192, 5, 1, COPIED)]);
        let extent = image.map_loading(GuestOffset(0), 512 << 20).unwrap();
        assert_eq!(extent.len, 512 << 20);
        assert_eq!(storage.counts().reads, 2, "the first slice, then all others");
        // A request of one cluster reads one slice.
        let (storage, image) = image_of(&[(8192, 5, 1, COPIED)]);
        image.map_loading(GuestOffset(100 << 20), 65536).unwrap();
        assert_eq!((storage.counts().reads, storage.counts().bytes_read), (1, 4096));
    }

    /// Number of runs of an image, resolved as a conversion does.
    fn runs(image: &Qcow2) -> usize {
        let mut at = GuestOffset(0);
        let mut runs = 0;
        while at.0 < image.guest_len() {
            at += image.map_loading(at, image.guest_len() - at.0).unwrap().len;
            runs += 1;
        }
        runs
    }

    #[test]
    fn only_what_is_asked_for_again_is_kept() {
        // One run: keeps its first and last slice.
        let (storage, image) = image_of(&[(8192, 5, 1, COPIED)]);
        assert_eq!(runs(&image), 1);
        assert_eq!((storage.counts().reads, image.slices.stats().used_bytes), (2, 2 * 4096));
        // Two runs: also keeps the slice where they meet; the slices after it are read again.
        let (storage, image) = image_of(&[(6000, 5, 1, COPIED), (2192, 9000, 1, COPIED)]);
        assert_eq!(runs(&image), 2);
        assert_eq!((storage.counts().reads, image.slices.stats().used_bytes), (3, 3 * 4096));
        // A repeated request finds all of its slices.
        let (storage, image) = image_of(&[(8192, 5, 1, COPIED)]);
        for _ in 0..2 {
            image.map_loading(GuestOffset(31 << 20), 32 << 20).unwrap();
        }
        assert_eq!(storage.counts().reads, 2);
        // Many runs: each slice is read once, all but the first in one read.
        let (storage, image) = image_of(&[(8192, 5, 2, COPIED)]);
        assert_eq!(runs(&image), 8192);
        assert_eq!((storage.counts().reads, storage.counts().bytes_read), (2, 65536));
        assert_eq!(image.slices.stats().used_bytes, 65536);
        // The second scan reads nothing.
        assert_eq!(runs(&image), 8192);
        assert_eq!(storage.counts().reads, 2);
    }

    #[test]
    fn of_one_pass_nothing_is_kept_that_it_has_passed() {
        let (storage, image) = image_of(&[(8192, 5, 1, COPIED)]);
        image.expect_one_pass();
        assert_eq!(runs(&image), 1);
        assert_eq!((storage.counts().reads, image.slices.stats().used_bytes), (2, 4096));
        // Runs that end inside slices, at their ends, and one entry before and after.
        for count in [1, 2, 510, 511, 512, 513, 1000, 1024, 4096] {
            let all: Vec<_> = (0..8192 / count)
                .map(|i| (count, 5 + i * (count + 1), 1, COPIED))
                .chain([(8192 % count, 1 << 20, 1, COPIED)])
                .collect();
            let (storage, image) = image_of(&all);
            image.expect_one_pass();
            assert_eq!(runs(&image), (8192_u64.div_ceil(count)) as usize);
            let counts = storage.counts();
            // After long runs the following slices are read again, as without one-pass mode.
            let most = if count < 4096 { (2, 65536) } else { (3, 65536 + 32768) };
            let cost = (counts.reads, counts.bytes_read);
            assert!(cost <= most, "{count}: {cost:?}");
            // The last 32 MiB count as a request, not as a scan.
            let used = image.slices.stats().used_bytes;
            assert!(used <= 2 * 4096, "{count}: {used}");
        }
        // A map scan does not evict the slice that a request has used.
        let (storage, image) = image_of(&[(8192, 5, 2, COPIED)]);
        image.expect_one_pass();
        image.map_loading(GuestOffset(100 << 20), 65536).unwrap();
        assert_eq!(runs(&image), 8192);
        storage.reset();
        image.map_loading(GuestOffset(100 << 20), 65536).unwrap();
        assert_eq!(storage.counts().reads, 0);
    }

    /// A walk returns cached changes even if they were never written.
    #[test]
    fn a_walk_sees_slices_as_they_are_in_memory() {
        let (_, image) = image_of(&[(8192, 5, 1, COPIED)]);
        let key = (4 << 16) + 5 * 4096;
        image.slices.load(key, &*image.storage).unwrap();
        image.slices.change(key, |words| words[7] = 0).unwrap();
        let extent = image.map_loading(GuestOffset(0), 512 << 20).unwrap();
        assert_eq!(extent.len, (5 * 512 + 7) << 16);
    }
}
