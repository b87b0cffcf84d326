//! Rebase: changes an image's backing image and keeps its content.
//!
//! ```text
//!   runs that the image does not hold:
//!     old chain ─┐
//!                ├─► the same place, or both zero: nothing to do
//!     new chain ─┘   else read and compared: differences are copied into the image, or shared if
//!                    the file system can; data that the new chain lacks is shared unread
//!   image durable ─► its header refers to the new backing image, by one write
//! ```
//!
//! Until that write the image shows its own data and the old chain's; from then on its own data and
//! the new chain's. The content is the same.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use serde::Serialize;
use vdkit_block::{
    AmendRequest, BackingRef, CopyMethod, Error, GuestOffset, HostOffset, Monitor, Options, Remedy,
    Result, Storage, align_down, is_zero,
};
use vdkit_chain::{
    BackingChoice, Disk, DiskPlace, OpenOptions, Registry, describe_chain, open_image, same_file,
};

use crate::compare::{Side, same_place};
use crate::convert::image_codec;
use crate::create::{FoundBacking, NewBacking};
use crate::crew::{Plan, work_off};
use crate::new_files::beside;
use crate::share::share;
use crate::units::UnitWriter;

/// Bytes per piece, or a cluster if that is larger.
const PIECE_BYTES: u64 = 256 << 10;
/// Bytes per piece that is shared without reading.
const SHARE_BYTES: u64 = 64 << 20;

/// Options of a rebase.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RebaseOptions {
    /// The new backing image; `None` for a standalone image.
    pub backing: Option<NewBacking>,
    /// Change only the header: the image's content may change.
    pub header_only: bool,
    /// Also if the content of the image's snapshots would change.
    pub force: bool,
    /// Store what is copied compressed, with the image's method: the clusters of which the image
    /// holds nothing yet.
    pub compress: bool,
    /// Threads; `None` for one per core.
    pub threads: Option<usize>,
    /// The new backing image is not locked: another program may be writing to it.
    pub share_backing: bool,
}

/// Result of a rebase.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct RebaseReport {
    /// The image.
    #[serde(serialize_with = "vdkit_block::lossy::path")]
    pub image: PathBuf,
    /// The old backing file name.
    pub old_backing: Option<String>,
    /// The new backing file name.
    pub backing: Option<String>,
    /// The new backing format.
    pub backing_format: Option<String>,
    /// Guest bytes read, of one chain or both.
    pub compared: u64,
    /// Guest bytes copied into the image.
    pub copied: u64,
    /// Guest bytes now shared with a file of the old chain.
    pub reflinked: u64,
    /// Guest bytes zeroed in the image.
    pub zeroed: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Rebases an image. After an interruption or a crash it can be repeated with the same result.
///
/// # Errors
/// [`Error::Invalid`] if the new backing image is an overlay of this one, or its format would have
/// to be guessed; [`Error::Dependents`] if the content of snapshots would change, without
/// [`RebaseOptions::force`]; [`Error::Unsupported`] for formats without backing files; errors of
/// the formats and storages.
pub fn rebase(
    registry: &Registry,
    image: &Path,
    opening: &OpenOptions,
    options: &RebaseOptions,
    monitor: &Monitor<'_>,
) -> Result<RebaseReport> {
    let started = Instant::now();
    let mut beside = opening.clone();
    if options.share_backing {
        beside.backing_lock = Some(false);
    }
    let found = match &options.backing {
        Some(backing) => {
            Some(find_backing(registry, image, backing, &beside, options.header_only)?)
        }
        None => None,
    };
    let counts = Counts::default();
    let old_backing = if options.header_only {
        let alone = opening.clone().backing(BackingChoice::Ignore);
        let opened = open_image(registry, image, &alone)?;
        let driver = opened.driver;
        let old = opened.info.backing_file.clone();
        let request = amendment(opened.storage, opened.files, found.as_ref(), opening);
        driver.amend(&request, monitor)?;
        old
    } else {
        let disk = Disk::open(registry, image, opening)?;
        disk.warnings().for_each(|warning| monitor.progress.message(warning));
        refuse_impossible(registry, &disk, found.is_some())?;
        if !options.force {
            refuse_for_snapshots(&disk, found.is_some())?;
        }
        let new = match &found {
            Some(found) => Some(open_new(registry, found, &beside)?),
            None => None,
        };
        if options.compress {
            image_codec(&disk)?;
        }
        let (threads, compress) = (options.threads, options.compress);
        let copied = copy_differences(&disk, new.as_ref(), threads, compress, &counts, monitor);
        let closed = disk.close();
        copied?;
        closed?;
        let layer = &disk.layers()[0];
        let driver = registry.driver(layer.info().format)?;
        let old = layer.info().backing_file.clone();
        // The storages stay open and locked from the comparison to the header change.
        let storage = disk.top().storage().clone();
        let files = disk.top().other_files();
        drop(disk);
        monitor.cancel.check()?;
        driver.amend(&amendment(storage, files, found.as_ref(), opening), monitor)?;
        old
    };
    let reference = found.map(|found| found.reference);
    Ok(RebaseReport {
        image: image.to_owned(),
        old_backing,
        backing: reference.as_ref().map(|reference| reference.name.clone()),
        backing_format: reference.and_then(|reference| reference.format),
        compared: counts.compared.into_inner(),
        copied: counts.copied.into_inner(),
        reflinked: counts.reflinked.into_inner(),
        zeroed: counts.zeroed.into_inner(),
        seconds: started.elapsed().as_secs_f64(),
    })
}

fn amendment(
    storage: Arc<dyn Storage>,
    files: Vec<Arc<dyn Storage>>,
    found: Option<&FoundBacking>,
    opening: &OpenOptions,
) -> AmendRequest {
    let backing: Option<BackingRef> = found.map(|found| found.reference.clone());
    let (backing, options) = (Some(backing), Options::default());
    AmendRequest { storage, files, backing, options, limits: opening.limits }
}

/// Examines the new backing image of an image, which must not be an overlay of that one. With
/// `header_only` it may be missing; then its format must be given.
///
/// # Errors
/// [`Error::Invalid`] for an overlay of the image; as [`NewBacking::find`].
pub fn find_backing(
    registry: &Registry,
    image: &Path,
    backing: &NewBacking,
    opening: &OpenOptions,
    header_only: bool,
) -> Result<FoundBacking> {
    let path = beside(image, &backing.name);
    if header_only && !(backing.open && path.exists()) {
        // It may be created later, or the caller knows better.
        return NewBacking { open: false, ..backing.clone() }.find(registry, image, opening);
    }
    let looking = opening.of_other(backing.format.clone()).lock(false);
    let chain = describe_chain(registry, &path, &looking)?;
    if let Some(link) = chain.links.iter().find(|link| same_file(&link.path, image)) {
        let why = match same_file(&path, image) {
            true => "an image cannot stand on itself".to_owned(),
            false => format!(
                "{} stands on it (as {}); neither could be read any more",
                path.display(),
                link.path.display()
            ),
        };
        return Err(Error::invalid_for(&image.display(), why));
    }
    backing.find(registry, image, opening)
}

fn open_new(registry: &Registry, found: &FoundBacking, opening: &OpenOptions) -> Result<Disk> {
    let cache = opening.backing_cache.unwrap_or_default();
    let opening = opening.of_other(found.reference.format.clone()).cache(cache);
    Disk::open(registry, &found.path, &opening)
}

/// Checks, before any copy, for errors that would occur only at the end.
fn refuse_impossible(registry: &Registry, disk: &Disk, backed: bool) -> Result<()> {
    let info = disk.layers()[0].info();
    if info.format == "raw" {
        return Err(Error::unsupported(
            disk.name(),
            "not supported: a backing file of a raw image",
            "convert it to qcow2 first",
        ));
    }
    if info.data_file_raw && backed {
        return Err(Error::invalid_for(
            &disk.name(),
            "a raw data file is the whole disk and cannot show what a backing file holds",
        ));
    }
    let top = info.format;
    if !registry.driver(top)?.amends_backing() {
        return Err(Error::unsupported(
            disk.name(),
            format!("not supported: putting a {top} image on another one in place"),
            "convert it to a new image: that one stands alone",
        ));
    }
    Ok(())
}

/// Snapshots show the backing image where they hold no data, and do not get the copied data.
/// Without a backing image they would read zeroes there.
fn refuse_for_snapshots(disk: &Disk, backed: bool) -> Result<()> {
    let info = disk.layers()[0].info();
    let old = info.backing_file.is_some();
    if info.snapshots.is_empty() || !(old || backed) {
        return Ok(());
    }
    let reads = if old { "the old backing image" } else { "zeroes" };
    let shows = if backed { "the new one" } else { "zeroes" };
    Err(Error::Dependents {
        file: disk.name().to_owned(),
        what: format!(
            "its snapshots read {reads} where they hold nothing themselves, and would show {shows}"
        ),
        dependents: info.snapshots.iter().take(8).map(|s| s.name.clone()).collect(),
        remedy: Remedy::forced(
            "the two backing images are the same or what the snapshots show does not matter",
            "delete the snapshots first",
        ),
    })
}

#[derive(Debug, Default)]
struct Counts {
    compared: AtomicU64,
    copied: AtomicU64,
    reflinked: AtomicU64,
    zeroed: AtomicU64,
}

fn add(counter: &AtomicU64, bytes: u64) {
    counter.fetch_add(bytes, Ordering::Relaxed);
}

/// Copies into the top image what it does not hold and where `new` differs. Guest data is the same
/// at every moment; durable after the disk's next flush.
///
/// # Errors
/// Errors of the formats and storages; [`Error::Interrupted`].
pub fn take_over(
    disk: &Disk,
    new: Option<&Disk>,
    threads: Option<usize>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    copy_differences(disk, new, threads, false, &Counts::default(), monitor)
}

fn copy_differences(
    disk: &Disk,
    new: Option<&Disk>,
    threads: Option<usize>,
    compress: bool,
    counts: &Counts,
    monitor: &Monitor<'_>,
) -> Result<()> {
    // What is shared is reserved in the map directly.
    disk.refuse_in_child("write to")?;
    let piece = PIECE_BYTES.max(disk.top().caps().cluster_bytes);
    let end = disk.guest_bytes();
    let sharing = Sharing::new(disk, compress);
    let caps = disk.top().caps();
    let (cell, unit) = match compress {
        true => (caps.cluster_bytes, caps.cluster_bytes),
        false => (1, caps.fill_bytes.max(512)),
    };
    let taking = Taking { disk, new, counts, piece, unit, compress, sharing };
    let plan = Differing {
        sharing: &taking.sharing,
        old: Side::new(disk)?,
        new: new.map(Side::new).transpose()?,
        monitor,
        at: 0,
        end,
        piece,
        cell,
    };
    work_off(plan, threads, monitor, |pair, buffers| {
        let done = taking.take(&pair, buffers);
        monitor.progress.update(pair.at + pair.len, end);
        done.map(|()| pair.len)
    })?;
    monitor.progress.update(end, end);
    Ok(())
}

/// Bytes that may differ between the chains.
#[derive(Clone, Debug)]
struct Pair {
    at: u64,
    len: u64,
    old_zero: bool,
    new_zero: bool,
    /// Location of the old bytes, if they are stored unchanged.
    source: Option<(Arc<dyn Storage>, HostOffset)>,
}

impl Pair {
    /// A part of it.
    fn part(&self, range: Range<u64>) -> Self {
        let skip = range.start - self.at;
        let source = self.source.as_ref().map(|(storage, at)| (storage.clone(), *at + skip));
        Self { at: range.start, len: range.end - range.start, source, ..*self }
    }
}

/// Sharing of file blocks with the image.
#[derive(Debug)]
struct Sharing {
    /// Block size in bytes.
    block: u64,
    /// Sharing has succeeded.
    works: AtomicBool,
    /// Sharing has failed.
    refused: AtomicBool,
}

impl Sharing {
    fn new(disk: &Disk, compress: bool) -> Self {
        let caps = disk.top().caps();
        let block = u64::from(disk.top().storage().caps().block_bytes).max(512);
        // Shared blocks would not be compressed.
        let possible = !compress && caps.host_aligned && caps.cluster_bytes >= block;
        Self { block, works: AtomicBool::new(false), refused: AtomicBool::new(!possible) }
    }

    /// Shares a piece as far as possible and returns the rest.
    fn share(&self, disk: &Disk, pair: &Pair, counts: &Counts) -> Result<Vec<Range<u64>>> {
        let all = pair.at..pair.at + pair.len;
        let start = all.start.next_multiple_of(self.block);
        let end = align_down(all.end, self.block);
        let (Some((storage, offset)), false) = (&pair.source, self.refused.load(Ordering::Relaxed))
        else {
            return Ok(vec![all]);
        };
        let offset = *offset + (start - all.start);
        if start >= end || !offset.0.is_multiple_of(self.block) {
            return Ok(vec![all]);
        }
        let shared = share(CopyMethod::Reflink, disk, start..end, &**storage, offset)?;
        add(&counts.reflinked, shared.bytes);
        let works = shared.bytes > 0 || self.works.load(Ordering::Relaxed);
        self.works.store(works, Ordering::Relaxed);
        if shared.refused && !works {
            self.refused.store(true, Ordering::Relaxed);
        }
        let (head, tail) = (all.start..start, end..all.end);
        let edges = std::iter::once(head).chain(shared.left).chain(std::iter::once(tail));
        Ok(edges.filter(|range| !range.is_empty()).collect())
    }
}

/// Combines the maps of the image and the new chain.
#[derive(Debug)]
struct Differing<'a> {
    old: Side<'a>,
    new: Option<Side<'a>>,
    sharing: &'a Sharing,
    monitor: &'a Monitor<'a>,
    at: u64,
    end: u64,
    piece: u64,
    /// Bytes that are compared together if any of them may differ.
    cell: u64,
}

impl Plan for Differing<'_> {
    type Piece = Pair;

    fn next_piece(&mut self) -> Result<Option<Pair>> {
        while self.at < self.end {
            self.monitor.cancel.check()?;
            let at = self.at;
            let old = self.old.run_at(at, self.end)?;
            let left = old.len.min(self.end - at);
            if old.depth == 0 {
                // The image's own data.
                self.at += left;
                continue;
            }
            let new = self.new.as_mut().map(|new| new.run_at(at, self.end)).transpose()?;
            let common = new.map_or(left, |new| new.len.min(left));
            let new_zero = new.is_none_or(|new| new.is_zero());
            let same = new.is_some_and(|new| same_place(&old, &new));
            // Whole cells, the disk's last one too.
            let whole = match at + common {
                end if end == self.end => common,
                end => align_down(end, self.cell).saturating_sub(at),
            };
            let unchanged = same || (old.is_zero() && new_zero);
            if unchanged && whole > 0 {
                self.at += whole;
                continue;
            }
            if whole == 0 {
                // Several runs meet in this cell.
                let len = (align_down(at, self.cell) + self.cell).min(self.end) - at;
                self.at += len;
                let (old_zero, new_zero) = (false, new.is_none());
                return Ok(Some(Pair { at, len, old_zero, new_zero, source: None }));
            }
            let source = match old.place {
                DiskPlace::Data { storage, offset } if old.is_plain() => {
                    Some((storage.clone(), offset))
                }
                _ => None,
            };
            let unread = source.is_some() && new_zero && self.sharing.works.load(Ordering::Relaxed);
            let piece = if unread { self.piece.max(SHARE_BYTES) } else { self.piece };
            let cut = (at / piece + 1) * piece;
            let len = whole.min(cut - at);
            self.at += len;
            return Ok(Some(Pair { at, len, old_zero: old.is_zero(), new_zero, source }));
        }
        Ok(None)
    }
}

/// Context of the copying threads.
struct Taking<'a> {
    disk: &'a Disk,
    new: Option<&'a Disk>,
    counts: &'a Counts,
    piece: u64,
    /// Bytes that are copied together.
    unit: u64,
    compress: bool,
    sharing: Sharing,
}

/// What a thread keeps from piece to piece.
#[derive(Default)]
struct Buffers {
    /// The old bytes, then the new ones.
    bytes: Vec<u8>,
    units: UnitWriter,
}

impl Taking<'_> {
    /// Copies what differs of a piece.
    fn take(&self, pair: &Pair, buffers: &mut Buffers) -> Result<()> {
        if !pair.new_zero || pair.source.is_none() {
            return self.compare(pair, buffers);
        }
        // The new chain has no data there: share the old data without reading.
        for left in self.sharing.share(self.disk, pair, self.counts)? {
            let mut at = left.start;
            while at < left.end {
                let end = ((at / self.piece + 1) * self.piece).min(left.end);
                self.compare(&pair.part(at..end), buffers)?;
                at = end;
            }
        }
        Ok(())
    }

    /// Reads both chains, and copies what differs.
    fn compare(&self, pair: &Pair, buffers: &mut Buffers) -> Result<()> {
        let Buffers { bytes, units } = buffers;
        let len = pair.len as usize;
        bytes.clear();
        bytes.resize(2 * len, 0);
        let (old_bytes, new_bytes) = bytes.split_at_mut(len);
        if !pair.old_zero {
            self.disk.read_at(old_bytes, GuestOffset(pair.at))?;
        }
        if let Some(new) = self.new.filter(|_| !pair.new_zero) {
            let here = new.guest_bytes().saturating_sub(pair.at).min(pair.len) as usize;
            // A cell in which several runs meet may be behind its end.
            if here > 0 {
                new.read_at(&mut new_bytes[..here], GuestOffset(pair.at))?;
            }
        }
        add(&self.counts.compared, pair.len);
        let unit = self.unit as usize;
        let mut from = 0;
        while from < len {
            let to = (from + unit - (pair.at as usize + from) % unit).min(len);
            let mut end = to;
            if old_bytes[from..to] != new_bytes[from..to] {
                let zero = is_zero(&old_bytes[from..to]);
                while end < len {
                    let next = (end + unit).min(len);
                    let piece = end..next;
                    if old_bytes[piece.clone()] == new_bytes[piece.clone()]
                        || is_zero(&old_bytes[piece]) != zero
                    {
                        break;
                    }
                    end = next;
                }
                let part = pair.part(pair.at + from as u64..pair.at + end as u64);
                self.put(&part, &old_bytes[from..end], zero, units)?;
            }
            from = end;
        }
        Ok(())
    }

    /// Writes bytes of the old chain into the image.
    fn put(&self, part: &Pair, bytes: &[u8], zero: bool, units: &mut UnitWriter) -> Result<()> {
        if zero {
            add(&self.counts.zeroed, part.len);
            return self.disk.write_zeroes_persistent(GuestOffset(part.at), part.len);
        }
        if self.compress {
            add(&self.counts.copied, part.len);
            return self.put_compressed(part.at, bytes, units);
        }
        // If the new chain has no data, sharing was already tried.
        let all = part.at..part.at + part.len;
        let left = match part.new_zero {
            true => vec![all],
            false => self.sharing.share(self.disk, part, self.counts)?,
        };
        for range in left {
            let from = (range.start - part.at) as usize;
            let len = (range.end - range.start) as usize;
            self.disk.write_at(&bytes[from..from + len], GuestOffset(range.start))?;
            add(&self.counts.copied, len as u64);
        }
        Ok(())
    }

    /// Writes whole clusters compressed where that is smaller, and parts as they are.
    fn put_compressed(&self, mut at: u64, mut bytes: &[u8], units: &mut UnitWriter) -> Result<()> {
        while !bytes.is_empty() {
            let next = (align_down(at, self.unit) + self.unit).min(self.disk.guest_bytes());
            let (piece, rest) = bytes.split_at(bytes.len().min((next - at) as usize));
            let whole = at.is_multiple_of(self.unit) && piece.len() as u64 == next - at;
            if !(whole && units.write(self.disk, GuestOffset(at), piece)?) {
                self.disk.write_at(piece, GuestOffset(at))?;
            }
            (at, bytes) = (at + piece.len() as u64, rest);
        }
        Ok(())
    }
}
