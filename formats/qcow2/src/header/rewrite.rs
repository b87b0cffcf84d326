//! Rewrites the header of an image that is not open, in one atomic step.
//!
//! A disk writes only the first sector atomically. So one write of that sector must change the
//! header, and everything that it refers to elsewhere in the header cluster (the rest of a long
//! extension list, the backing file name) must be durable before:
//!
//! | step | state after a crash |
//! |---|---|
//! | an extension list beyond the first sector is shortened: it fits without the feature name table, which is only for messages | the old header without that table |
//! | a backing name that the new list would overwrite is copied to after the list; barrier; the first sector names the copy; barrier | the old header |
//! | the rest of the new list and the new name are written to unreferenced bytes; barrier | the old header |
//! | the first sector; barrier | the new header |
//! | zeroes over what the old list and name left behind; barrier | the new header |
//!
//! Empty steps are skipped: most images need two, those with clusters of 512 bytes only that of the
//! first sector.

use std::mem::offset_of;
use std::ops::Range;

use vdkit_block::{Error, HostOffset, Limits, Result, Storage};
use zerocopy::IntoBytes;

use super::{Extension, Header};
use crate::layout::{BACKING_NAME_BYTES_MAX, SECTOR, V2_HEADER_BYTES, V3_HEADER_BYTES, extension};
use crate::structures::{self, ExtensionHead, FixedHeader};

/// Changes the image's header to `new`: version, feature bits, codec, table offsets, refcount
/// width, extensions and backing name. Keeps the cluster and disk sizes, and unknown bytes of the
/// fixed header. Durable on return.
///
/// # Errors
/// [`Error::Invalid`] if the header cluster has no room; I/O. After an error the header is the old
/// one, the new one, or the old one without feature names.
pub(crate) fn rewrite(storage: &dyn Storage, old: &Header, new: &Header) -> Result<()> {
    let mut area = Area::read(storage, old)?;
    let steps = area.plan(old, new)?;
    for (offset, bytes) in steps {
        storage.write_at(&bytes, HostOffset(offset as u64))?;
        storage.sync()?;
    }
    Ok(())
}

/// The part of the header cluster that may be in use.
struct Area<'a> {
    storage: &'a dyn Storage,
    bytes: Vec<u8>,
    /// Bytes of the whole cluster.
    cluster: usize,
    /// End of the extension list.
    list_end: usize,
    name: Range<usize>,
    /// Bytes from here on were never used.
    used_end: usize,
}

/// Bytes of the header cluster that are considered: enough for any sensible list and name.
const AREA_BYTES_MAX: u64 = 64 << 10;

impl<'a> Area<'a> {
    fn read(storage: &'a dyn Storage, old: &Header) -> Result<Self> {
        let cluster = old.geometry.cluster_bytes().min(AREA_BYTES_MAX) as usize;
        let mut bytes = vec![0; cluster];
        storage.read_padded(&mut bytes, HostOffset(0))?;
        let fixed: FixedHeader = structures::padded(&bytes);
        let start = fixed.backing_file_offset.get() as usize;
        let name = match old.backing_name {
            Some(_) => start..start + fixed.backing_file_size.get() as usize,
            None => 0..0,
        };
        let last = old.extensions.last().map(|e| e.offset as usize + padded(e.data.len()));
        let list_end = last.unwrap_or(old.header_bytes as usize) + 8;
        if name.end > cluster || list_end > cluster {
            return Err(no_room(storage));
        }
        let used_end = list_end.max(name.end);
        Ok(Self { storage, bytes, cluster, list_end, name, used_end })
    }

    /// The writes, each to be followed by a barrier. They are first applied to the copy in memory.
    fn plan(&mut self, old: &Header, new: &Header) -> Result<Vec<(usize, Vec<u8>)>> {
        let mut steps = Vec::new();
        let list = self.list(old, new);
        if list.len() > self.cluster {
            return Err(no_room(self.storage));
        }
        if self.list_end > SECTOR
            && list[SECTOR.min(list.len())..] != *self.rest_of_list(list.len())
        {
            self.cut_list(old, &mut steps)?;
        }
        let name = new.backing_name.as_deref().unwrap_or_default();
        check_name(name)?;
        let name = name.as_bytes();
        let moved = list.len().max(self.name.end) + name.len();
        if overlap(&beyond(0..list.len()), &beyond(self.name.clone())) {
            self.move_name(moved, &mut steps)?;
        }
        let at = self.room_for_name(list.len(), name.len())?;
        let mut whole = list;
        let list_end = whole.len();
        if !name.is_empty() {
            whole.resize(whole.len().max(at + name.len()), 0);
            place_name(&mut whole, at, name.len());
            whole[at..at + name.len()].copy_from_slice(name);
        }
        whole.resize(whole.len().max(SECTOR), 0);
        // Skips the bytes between the list and the name, which may hold the old name.
        for range in [beyond(0..list_end), beyond(at..at + name.len())] {
            self.put(range.start, whole[range].to_vec(), &mut steps);
        }
        self.put(0, whole[..SECTOR].to_vec(), &mut steps);
        whole.resize(whole.len().max(self.used_end), 0);
        self.put(SECTOR, whole[SECTOR..].to_vec(), &mut steps);
        self.check(new)?;
        Ok(steps)
    }

    /// Changes the copy, and records the write.
    fn put(&mut self, at: usize, bytes: Vec<u8>, steps: &mut Vec<(usize, Vec<u8>)>) {
        if !bytes.is_empty() && self.bytes[at..at + bytes.len()] != bytes {
            self.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
            steps.push((at, bytes));
        }
    }

    /// Bytes on disk where a list of `len` bytes continues beyond the first sector. Empty if the
    /// old list ends before that, since any bytes may be written there.
    fn rest_of_list(&self, len: usize) -> &[u8] {
        let end = len.min(self.list_end);
        if end < len { &[] } else { &self.bytes[SECTOR.min(end)..end] }
    }

    /// Fixed fields and extensions of `new`, with the end mark but no backing name.
    /// Unknown fixed fields stay as they are.
    fn list(&self, old: &Header, new: &Header) -> Vec<u8> {
        let longest = (old.header_bytes as usize).min(self.cluster);
        let bytes = match (old.version, new.version) {
            (_, 2) => V2_HEADER_BYTES as usize,
            (2, _) => V3_HEADER_BYTES as usize,
            _ if old.codec != new.codec => longest.max(V3_HEADER_BYTES as usize),
            _ => longest,
        };
        let mut out = self.bytes[..longest.min(bytes)].to_vec();
        out.resize(bytes, 0);
        let fixed = FixedHeader { header_length: (bytes as u32).into(), ..new.fixed() };
        let known = offset_of!(FixedHeader, padding).min(bytes);
        out[..known].copy_from_slice(&fixed.as_bytes()[..known]);
        push_extensions(&mut out, new.extensions.iter());
        out
    }

    /// The old header with a list that ends within the first sector.
    fn cut_list(&mut self, old: &Header, steps: &mut Vec<(usize, Vec<u8>)>) -> Result<()> {
        let mut out = self.bytes[..old.header_bytes as usize].to_vec();
        let needed = old.extensions.iter().filter(|e| e.kind != extension::FEATURE_NAMES);
        push_extensions(&mut out, needed);
        if out.len() > SECTOR || self.name.start < out.len() && !self.name.is_empty() {
            return Err(Error::unsupported(
                self.storage.name(),
                "not supported: a header whose extensions pass the first sector",
                "it cannot be changed in one step; convert to a new image instead",
            ));
        }
        self.list_end = out.len();
        out.resize(SECTOR, 0);
        self.put(0, out, steps);
        Ok(())
    }

    /// Copies the old name to `at` or after it.
    fn move_name(&mut self, at: usize, steps: &mut Vec<(usize, Vec<u8>)>) -> Result<()> {
        let name = self.bytes[self.name.clone()].to_vec();
        let at = padded(at).max(SECTOR);
        if at + name.len() > self.cluster {
            return Err(no_room(self.storage));
        }
        self.name = at..at + name.len();
        self.used_end = self.used_end.max(self.name.end);
        let mut first = self.bytes[..SECTOR].to_vec();
        place_name(&mut first, at, name.len());
        self.put(at, name, steps);
        self.put(0, first, steps);
        Ok(())
    }

    /// Offset of the new name: after the list, and not over the old name.
    fn room_for_name(&self, list: usize, len: usize) -> Result<usize> {
        [list, self.name.end.max(list)]
            .into_iter()
            .find(|&at| {
                at + len <= self.cluster
                    && !overlap(&beyond(at..at + len), &beyond(self.name.clone()))
            })
            .ok_or_else(|| no_room(self.storage))
    }

    /// Verifies that the changed copy parses to `new`.
    fn check(&self, new: &Header) -> Result<()> {
        let storage = self.storage;
        let len = storage.len()?;
        let parsed = match Header::parse(storage.name(), &self.bytes, len, &Limits::default(), None)
        {
            Ok(parsed) => parsed,
            Err(super::NeedMore::Fault(error)) => return Err(error),
            Err(super::NeedMore::Bytes(_)) => return Err(no_room(storage)),
        };
        let plain = |header: &Header| Header {
            header_bytes: 0,
            extensions: header
                .extensions
                .iter()
                .map(|e| Extension { offset: 0, ..e.clone() })
                .collect(),
            ..header.clone()
        };
        if plain(&parsed) == plain(new) {
            return Ok(());
        }
        Err(Error::unsupported(
            storage.name(),
            "not supported: this change of the header, which would be read differently",
            "convert to a new image instead",
        ))
    }
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(8)
}

pub(super) fn push_extensions<'e>(out: &mut Vec<u8>, list: impl Iterator<Item = &'e Extension>) {
    for e in list {
        out.extend_from_slice(ExtensionHead::new(e.kind, e.data.len() as u64).as_bytes());
        out.extend_from_slice(&e.data);
        out.resize(padded(out.len()), 0);
    }
    out.extend_from_slice(ExtensionHead::new(extension::END, 0).as_bytes());
}

/// Fails if a backing file name is too long.
pub(super) fn check_name(name: &str) -> Result<()> {
    if name.len() <= BACKING_NAME_BYTES_MAX as usize {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the backing file name has {} bytes, at most {BACKING_NAME_BYTES_MAX} are possible; use a \
         relative name",
        name.len()
    )))
}

/// Sets the place of the backing name in the bytes of a header.
fn place_name(header: &mut [u8], at: usize, len: usize) {
    let mut fixed: FixedHeader = structures::padded(header);
    fixed.backing_file_offset.set(at as u64);
    fixed.backing_file_size.set(len as u32);
    let changed = ..V2_HEADER_BYTES as usize;
    header[changed].copy_from_slice(&fixed.as_bytes()[changed]);
}

/// The part of a range beyond the first sector.
fn beyond(range: Range<usize>) -> Range<usize> {
    range.start.max(SECTOR)..range.end.max(SECTOR)
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end
}

fn no_room(storage: &dyn Storage) -> Error {
    Error::invalid_for(
        &storage.name(),
        "the header's cluster has no room for that; use a shorter name, or convert to a new \
         image with a larger cluster_size",
    )
}

#[cfg(test)]
mod tests;
