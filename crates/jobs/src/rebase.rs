//! Rebase: an image on another one, with the same content.
//!
//! ```text
//!   runs that the image does not hold:
//!     old chain ─┐
//!                ├─► the same place, or both zero: nothing to do
//!     new chain ─┘   else read and compared: what differs is copied into the image
//!   image durable ─► its header names the new one, by one write
//! ```
//!
//! Until that write the image shows what it holds and what the old chain has; from then on what it
//! holds and what the new one has. Both are the same bytes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::Serialize;
use vdkit_block::{
    AmendRequest, BackingRef, Error, FileIndex, GuestOffset, Monitor, Options, Result, Storage,
};
use vdkit_chain::{
    BackingChoice, Disk, OpenOptions, Registry, describe_chain, open_image, same_file,
};

use crate::compare::{Side, same_place};
use crate::create::{FoundBacking, NewBacking};
use crate::crew::{Plan, default_threads, work_off};
use crate::zero::is_zero;

/// Bytes of one piece, or a cluster where that is larger.
const PIECE_BYTES: u64 = 256 << 10;

/// How an image is rebased.
#[derive(Clone, Debug, Default)]
pub struct RebaseOptions {
    /// What it shall stand on; nothing, to hold everything itself.
    pub backing: Option<NewBacking>,
    /// Change the name only: what the image shows may change.
    pub header_only: bool,
    /// Threads; none takes one a core.
    pub threads: Option<usize>,
}

/// What a rebase did.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RebaseReport {
    /// The image.
    pub image: PathBuf,
    /// What it stood on, as it was stored.
    pub old_backing: Option<String>,
    /// What it stands on now, as it is stored.
    pub backing: Option<String>,
    /// That one's format.
    pub backing_format: Option<String>,
    /// Guest bytes that had to be read, of one chain or of both.
    pub compared: u64,
    /// Guest bytes copied into the image.
    pub copied: u64,
    /// Guest bytes that were made zero in it.
    pub zeroed: u64,
    /// Wall time.
    pub seconds: f64,
}

/// Rebases an image. Run again after an interruption or a crash it comes to the same end.
///
/// # Errors
/// [`Error::Invalid`] where the new image stands on this one, or has a format that would have to be
/// guessed; [`Error::Unsupported`] for formats without backing files; what the formats and
/// storages return.
pub fn rebase(
    registry: &Registry,
    image: &Path,
    opening: &OpenOptions,
    options: &RebaseOptions,
    monitor: &Monitor<'_>,
) -> Result<RebaseReport> {
    let started = Instant::now();
    let found = match &options.backing {
        Some(backing) => Some(find(registry, image, backing, opening, options.header_only)?),
        None => None,
    };
    let counts = Counts::default();
    let old_backing = if options.header_only {
        let alone = opening.clone().backing(BackingChoice::Ignore);
        let opened = open_image(registry, image, &alone)?;
        let driver = opened.driver;
        let old = opened.info.backing_file.clone();
        let request = amendment(opened.storage, opened.data_file, found.as_ref(), opening);
        driver.amend(&request, monitor)?;
        old
    } else {
        let disk = Disk::open(registry, image, opening)?;
        disk.warnings().for_each(|warning| monitor.progress.message(warning));
        refuse_impossible(&disk, found.is_some())?;
        let new = match &found {
            Some(found) => Some(open_new(registry, found, opening)?),
            None => None,
        };
        let copied = copy_differences(&disk, new.as_ref(), options.threads, &counts, monitor);
        let closed = disk.close();
        copied?;
        closed?;
        let layer = &disk.layers()[0];
        let driver = registry.driver(layer.info().format)?;
        let old = layer.info().backing_file.clone();
        // The storages stay open, and locked, from the comparison to the switch.
        let storage = disk.top().storage().clone();
        let data_file = disk.top().file(FileIndex(0)).clone();
        let data_file = layer.info().data_file.as_ref().map(|_| data_file);
        drop(disk);
        monitor.cancel.check()?;
        driver.amend(&amendment(storage, data_file, found.as_ref(), opening), monitor)?;
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
        zeroed: counts.zeroed.into_inner(),
        seconds: started.elapsed().as_secs_f64(),
    })
}

fn amendment(
    storage: Arc<dyn Storage>,
    data_file: Option<Arc<dyn Storage>>,
    found: Option<&FoundBacking>,
    opening: &OpenOptions,
) -> AmendRequest {
    let backing: Option<BackingRef> = found.map(|found| found.reference.clone());
    let (backing, options) = (Some(backing), Options::default());
    AmendRequest { storage, data_file, backing, options, limits: opening.limits }
}

/// Looks at the image to stand on, which must not stand on this one.
fn find(
    registry: &Registry,
    image: &Path,
    backing: &NewBacking,
    opening: &OpenOptions,
    header_only: bool,
) -> Result<FoundBacking> {
    let path = match image.parent() {
        Some(folder) => folder.join(&backing.name),
        None => PathBuf::from(&backing.name),
    };
    if !path.exists() && header_only {
        // It may come later.
        return NewBacking { open: false, ..backing.clone() }.find(registry, image, &opening.refs);
    }
    let looking = OpenOptions {
        format: backing.format.clone(),
        refs: opening.refs.clone(),
        lock: false,
        ..OpenOptions::read_only()
    };
    let chain = describe_chain(registry, &path, &looking)?;
    if let Some(link) = chain.links.iter().find(|link| same_file(&link.path, image)) {
        return Err(Error::Invalid(if same_file(&path, image) {
            format!("{}: an image cannot stand on itself", image.display())
        } else {
            format!(
                "{}: {} stands on it (as {}); neither could be read any more",
                image.display(),
                path.display(),
                link.path.display()
            )
        }));
    }
    backing.find(registry, image, &opening.refs)
}

fn open_new(registry: &Registry, found: &FoundBacking, opening: &OpenOptions) -> Result<Disk> {
    let options = OpenOptions {
        format: found.reference.format.clone(),
        refs: opening.refs.clone(),
        limits: opening.limits,
        keys: opening.keys.clone(),
        ..OpenOptions::read_only()
    };
    Disk::open(registry, &found.path, &options)
}

/// What could only fail at the end fails before anything is copied.
fn refuse_impossible(disk: &Disk, backed: bool) -> Result<()> {
    let info = disk.layers()[0].info();
    if info.format == "raw" {
        return Err(Error::unsupported(
            disk.name(),
            "a backing file of a raw image",
            "convert it to qcow2 first",
        ));
    }
    if info.data_file_raw && backed {
        return Err(Error::Invalid(format!(
            "{}: a raw data file is the whole disk and cannot show what a backing file holds",
            disk.name()
        )));
    }
    Ok(())
}

#[derive(Debug, Default)]
struct Counts {
    compared: AtomicU64,
    copied: AtomicU64,
    zeroed: AtomicU64,
}

fn add(counter: &AtomicU64, bytes: u64) {
    counter.fetch_add(bytes, Ordering::Relaxed);
}

/// Copies into the top image what it does not hold and `new` has not the same of. Nothing changes
/// for the guest, at any moment; durable after the disk's next flush.
///
/// # Errors
/// What the formats and storages return; [`Error::Interrupted`].
pub fn take_over(
    disk: &Disk,
    new: Option<&Disk>,
    threads: Option<usize>,
    monitor: &Monitor<'_>,
) -> Result<()> {
    copy_differences(disk, new, threads, &Counts::default(), monitor)
}

fn copy_differences(
    disk: &Disk,
    new: Option<&Disk>,
    threads: Option<usize>,
    counts: &Counts,
    monitor: &Monitor<'_>,
) -> Result<()> {
    let piece = PIECE_BYTES.max(disk.top().caps().cluster_bytes);
    let end = disk.guest_bytes();
    let plan = Differing {
        old: Side::new(disk)?,
        new: new.map(Side::new).transpose()?,
        monitor,
        at: 0,
        end,
        piece,
    };
    work_off(plan, threads.unwrap_or_else(default_threads), monitor, |pair, buffer| {
        let done = compare_and_copy(disk, new, &pair, buffer, counts);
        monitor.progress.update(pair.at + pair.len, end);
        done.map(|()| pair.len)
    })?;
    monitor.progress.update(end, end);
    Ok(())
}

/// Bytes that may differ between the chains.
#[derive(Clone, Copy, Debug)]
struct Pair {
    at: u64,
    len: u64,
    old_zero: bool,
    new_zero: bool,
}

/// Lays the map of the image over that of the new chain.
#[derive(Debug)]
struct Differing<'a> {
    old: Side<'a>,
    new: Option<Side<'a>>,
    monitor: &'a Monitor<'a>,
    at: u64,
    end: u64,
    piece: u64,
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
                // The image's own.
                self.at += left;
                continue;
            }
            let new = self.new.as_mut().map(|new| new.run_at(at, self.end)).transpose()?;
            let common = new.map_or(left, |new| new.len.min(left));
            let new_zero = new.is_none_or(|new| new.is_zero());
            let same = new.is_some_and(|new| same_place(&old, &new));
            if same || (old.is_zero() && new_zero) {
                self.at += common;
                continue;
            }
            let cut = (at / self.piece + 1) * self.piece;
            let len = common.min(cut - at);
            self.at += len;
            return Ok(Some(Pair { at, len, old_zero: old.is_zero(), new_zero }));
        }
        Ok(None)
    }
}

fn compare_and_copy(
    disk: &Disk,
    new: Option<&Disk>,
    pair: &Pair,
    buffer: &mut Vec<u8>,
    counts: &Counts,
) -> Result<()> {
    let len = pair.len as usize;
    buffer.clear();
    buffer.resize(2 * len, 0);
    let (old_bytes, new_bytes) = buffer.split_at_mut(len);
    if !pair.old_zero {
        disk.read_at(old_bytes, GuestOffset(pair.at))?;
    }
    if let Some(new) = new.filter(|_| !pair.new_zero) {
        let here = new.guest_bytes().saturating_sub(pair.at).min(pair.len) as usize;
        new.read_at(&mut new_bytes[..here], GuestOffset(pair.at))?;
    }
    add(&counts.compared, pair.len);
    // In steps of what the image keeps apart.
    let unit = disk.top().caps().fill_bytes.max(512) as usize;
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
            let at = GuestOffset(pair.at + from as u64);
            if zero {
                disk.write_zeroes_for_good(at, (end - from) as u64)?;
                add(&counts.zeroed, (end - from) as u64);
            } else {
                disk.write_at(&old_bytes[from..end], at)?;
                add(&counts.copied, (end - from) as u64);
            }
        }
        from = end;
    }
    Ok(())
}
