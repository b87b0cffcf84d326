//! Opens an image: reads headers and directories.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use vdkit_block::{
    BackingRef, DataRuns, Error, FileIndex, HostOffset, InFlight, Limits, OpenRequest, Remedy,
    Result, Storage, require_within, require_writable,
};
use vdkit_meta::{Engine, PageCache};

use crate::cid::ContentId;
use crate::copies::sync_copies;
use crate::descriptor::{Access, ExtentLine, ExtentType, NO_PARENT};
use crate::header::{SECTOR, SparseHeader};
use crate::image::{Flat, Kind, Meta, Piece, Vmdk};
use crate::map::CHUNKS_MIN;
use crate::on_disk;
use crate::source::{ExtentHeader, Source, any_header};
use crate::space::Space;
use crate::sparse::Sparse;

/// Most bytes of all grain directories of one disk.
const DIRECTORIES_BYTES_MAX: u64 = 16 << 20;

/// State while extents are opened.
struct Opening<'a> {
    request: &'a OpenRequest,
    files: Vec<Arc<dyn Storage>>,
    extents: Vec<Piece>,
    space: Vec<Space>,
    warnings: Vec<String>,
    at: u64,
    directory_bytes: u64,
    /// Files used by extents so far, and whether those extents are sparse.
    taken: Vec<(FileIndex, bool)>,
}

impl Vmdk {
    /// Opens an image: reads its descriptor, and the header and grain directories of each sparse
    /// extent.
    ///
    /// # Errors
    /// [`Error::Corrupt`] and [`Error::Unsupported`] for invalid headers and descriptors;
    /// [`Error::Invalid`] if the caller has not opened all files that the descriptor names;
    /// [`Error::ReadOnly`]; I/O.
    pub fn open(request: OpenRequest) -> Result<Arc<Self>> {
        let storage = request.storage.clone();
        let file = storage.name().to_owned();
        require_writable(!request.writable || storage.caps().writable, &file)?;
        let source = Source::read(&storage, &request.limits)?;
        let guest_bytes = source.guest_bytes(&file)?;
        let names = source.files_opened(&file, request.files.len())?;
        let files =
            if source.header.is_some() { vec![storage.clone()] } else { request.files.clone() };
        let mut opening = Opening {
            request: &request,
            files,
            extents: Vec::new(),
            space: Vec::new(),
            warnings: Vec::new(),
            at: 0,
            directory_bytes: 0,
            taken: Vec::new(),
        };
        match (&source.header, &source.placed) {
            (Some(header), _) => opening.sparse(header, FileIndex(0), None)?,
            (None, Some(placed)) => {
                let index: BTreeMap<&str, u16> =
                    names.iter().map(String::as_str).zip(0..).collect();
                for line in &placed.descriptor.extents {
                    opening.line(line, FileIndex(index.get(&*line.name).copied().unwrap_or(0)))?;
                }
            }
            (None, None) => {}
        }
        opening.finish(source, guest_bytes)
    }
}

impl Opening<'_> {
    fn limits(&self) -> &Limits {
        &self.request.limits
    }

    /// Opens an extent of the descriptor.
    fn line(&mut self, line: &ExtentLine, index: FileIndex) -> Result<()> {
        let len = line.sectors * SECTOR;
        if len == 0 {
            return Ok(());
        }
        if line.access == Access::None {
            let what = format!("not supported: reading the extent '{}' (NOACCESS)", line.name);
            let hint = "change NOACCESS to RDONLY in the descriptor if that is wrong";
            return Err(Error::unsupported(self.request.storage.name(), what, hint));
        }
        let writable = self.request.writable && line.access == Access::ReadWrite;
        if line.kind != ExtentType::Zero {
            self.take_file(line, index)?;
        }
        let storage = self.files.get(usize::from(index.0)).cloned();
        match (line.kind, storage) {
            (ExtentType::Zero, _) => self.push(len, false, Kind::Zero, 0, Space::default()),
            (ExtentType::Flat, Some(storage)) => {
                let at = line.offset * SECTOR;
                if at.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
                    return Err(Error::corrupt(
                        self.request.storage.name(),
                        0,
                        "extent line",
                        format!("sector {} of '{}'", line.offset, line.name),
                        "an extent that ends within 2^63 bytes",
                    ));
                }
                let found = storage.len()?;
                if found < at + len {
                    return Err(Error::corrupt(
                        storage.name(),
                        found,
                        "flat extent",
                        format!("{found} bytes"),
                        format!("at least {}, as its descriptor says", at + len),
                    ));
                }
                let writable = writable && storage.caps().writable;
                let flat = Flat { file: index, at, runs: DataRuns::default() };
                self.push(len, writable, Kind::Flat(flat), 0, Space::default());
            }
            (ExtentType::Sparse | ExtentType::SeSparse, Some(storage)) => {
                let mut head = [0; SECTOR as usize];
                let got = storage.read_up_to(&mut head, HostOffset(0))?;
                let header = any_header(&*storage, &head, got, self.limits())?;
                let Some(header) = header else {
                    return Err(Error::corrupt(
                        storage.name(),
                        0,
                        "magic number",
                        format!("{:02x?}", &head[..4]),
                        "that of a sparse extent",
                    ));
                };
                self.sparse(&header, index, Some(line))?;
            }
            (_, None) => {
                return Err(Error::invalid_for(
                    &self.request.storage.name(),
                    format!("the extent '{}' was not opened", line.name),
                ));
            }
        }
        Ok(())
    }

    /// Several flat extents may share a file; a sparse extent must not share its file.
    fn take_file(&mut self, line: &ExtentLine, index: FileIndex) -> Result<()> {
        let sparse = line.kind != ExtentType::Flat;
        if self.taken.iter().any(|&(other, s)| other == index && (sparse || s)) {
            return Err(Error::corrupt(
                self.request.storage.name(),
                0,
                "extent line",
                format!("'{}' once more", line.name),
                "a sparse extent's file in one line alone",
            ));
        }
        // Consecutive lines of one file are one item, so the list stays about as short as the
        // number of files.
        if self.taken.last() != Some(&(index, sparse)) {
            self.taken.push((index, sparse));
        }
        Ok(())
    }

    fn push(&mut self, len: u64, writable: bool, kind: Kind, limit: u64, space: Space) {
        let (start, limit) = (self.at, AtomicU64::new(limit));
        self.extents.push(Piece { start, len, writable, kind, limit });
        self.space.push(space);
        self.at += len;
    }

    /// Opens a sparse extent; `line` has its size on the disk if there is a descriptor.
    fn sparse(
        &mut self,
        header: &ExtentHeader,
        index: FileIndex,
        line: Option<&ExtentLine>,
    ) -> Result<()> {
        let storage = self.files[usize::from(index.0)].clone();
        let sectors = line.map_or(header.sectors, |line| line.sectors);
        if header.sectors < sectors {
            let found = format!("{} sectors", header.sectors);
            let expected = format!("{sectors}, as its descriptor says");
            return Err(Error::corrupt(storage.name(), 12, "capacity", found, expected));
        }
        if sectors == 0 {
            return Ok(());
        }
        let len = storage.len()?;
        let wanted = self.request.writable
            && line.is_none_or(|line| line.access == Access::ReadWrite)
            && storage.caps().writable;
        let writable = wanted && can_write(header);
        let mut sparse = header.sparse(index);
        if let Some(header) = &header.hosted {
            self.hosted(&mut sparse, header, &storage, len, writable)?;
        } else {
            let (at, entries) = (sparse.directory_at, header.directory_entries);
            sparse.directory = self.directory(&sparse, &storage, at, entries, len)?.into();
        }
        let marked = header.hosted.as_ref().is_some_and(|header| header.unclean);
        let unclean = marked && !(writable && sync_copies(&sparse, &*storage, len)?);
        if unclean {
            self.warnings.push(format!(
                "{}: was not closed cleanly; a check reports whether its tables and their \
                 copies agree",
                storage.name()
            ));
        }
        let space = if writable {
            Space { unclean: marked, ..Space::new(len, sparse.grain_bytes, unclean) }
        } else {
            Space::default()
        };
        self.push(sectors * SECTOR, writable, Kind::Sparse(sparse), len, space);
        Ok(())
    }

    /// Reads both directories of a hosted extent, and records its metadata.
    fn hosted(
        &mut self,
        sparse: &mut Sparse,
        header: &SparseHeader,
        storage: &Arc<dyn Storage>,
        len: u64,
        writable: bool,
    ) -> Result<()> {
        let entries = header.directory_entries();
        let primary = self.directory(sparse, storage, sparse.directory_at, entries, len);
        let second =
            sparse.redundant_at.map(|at| (at, self.directory(sparse, storage, at, entries, len)));
        let (directory, redundant) = match (primary, second) {
            (Ok(directory), None) => (directory, None),
            (Ok(directory), Some((_, Ok(copy)))) => (directory, Some(copy)),
            (Ok(directory), Some((_, Err(error)))) if !writable => {
                self.warnings.push(format!("{error}; the redundant grain directory is not used"));
                (directory, None)
            }
            (Err(error), Some((copy_at, Ok(copy)))) if !writable => {
                self.warnings.push(format!("{error}; the redundant grain directory is used"));
                sparse.directory_at = copy_at;
                (copy, None)
            }
            (Err(error), _) | (_, Some((_, Err(error)))) => {
                return Err(repairable(error, writable));
            }
        };
        if redundant.is_none() {
            sparse.redundant_at = None;
        }
        sparse.directory = directory.into();
        sparse.redundant = redundant.unwrap_or_default().into();
        let descriptor = header.descriptor.saturating_mul(SECTOR);
        let text = header.descriptor_sectors.saturating_mul(SECTOR);
        sparse.front = vec![0..SECTOR, descriptor..descriptor.saturating_add(text)];
        let directories = std::iter::once(sparse.directory_at).chain(sparse.redundant_at);
        sparse.front.extend(directories.map(|at| at..at.saturating_add(entries * 4)));
        if writable { note_metadata(sparse, storage.name()) } else { Ok(()) }
    }

    /// Reads a grain directory.
    fn directory(
        &mut self,
        sparse: &Sparse,
        storage: &Arc<dyn Storage>,
        at: u64,
        entries: u64,
        len: u64,
    ) -> Result<Vec<u32>> {
        let bytes = entries * sparse.entry_bytes;
        self.directory_bytes += entries * 4;
        let (file, what) = (self.request.storage.name(), "size of all grain directories");
        require_within(file, what, self.directory_bytes, 2 * DIRECTORIES_BYTES_MAX)?;
        if at == 0 || at.checked_add(bytes).is_none_or(|end| end > len) {
            let (found, expected) =
                (format!("{bytes} bytes at {at:#x}"), "a place within the file");
            return Err(Error::corrupt(storage.name(), at, "grain directory", found, expected));
        }
        let mut raw = vec![0; bytes as usize];
        storage.read_at(&mut raw, HostOffset(at))?;
        let words = on_disk::entries(&raw, sparse.entry_bytes);
        drop(raw);
        sparse.check_directory(&words, at, len, storage.name())
    }

    fn finish(self, source: Source, guest_bytes: u64) -> Result<Arc<Vmdk>> {
        let Opening { request, files, extents, space, mut warnings, .. } = self;
        let storage = request.storage.clone();
        let writable = request.writable;
        let descriptor = source.placed.as_ref().map(|placed| &placed.descriptor);
        let backing = descriptor.and_then(|d| {
            Some(BackingRef {
                name: d.parent()?.to_owned(),
                format: Some("vmdk".to_owned()),
                identity: Some(format!("{:08x}", d.parent_cid)),
                modified: None,
            })
        });
        if backing.is_none() && descriptor.is_some_and(|d| d.parent_cid != NO_PARENT) {
            warnings.push(format!(
                "{}: stands on a disk that it does not name (parentCID without \
                 parentFileNameHint): what is there reads as zero; store a reference to \
                 it",
                storage.name()
            ));
        }
        let cid = match source.placed.as_ref().filter(|_| writable) {
            Some(placed) => ContentId::of(&placed.descriptor, placed.at),
            None => ContentId::default(),
        };
        let grains = extents.iter().filter_map(|piece| piece.sparse().map(|s| s.grain_bytes)).max();
        let block = || {
            let caps = files.first().unwrap_or(&storage).caps();
            u64::from(caps.block_bytes.max(1))
        };
        let cluster_bytes = grains.unwrap_or_else(block);
        let words = extents.iter().filter_map(|p| p.sparse().map(Sparse::chunk_entries)).max();
        let meta = Meta { space, ..Meta::default() };
        let image = Vmdk {
            touched: files.iter().map(|_| AtomicBool::new(false)).collect(),
            tables: PageCache::new(request.limits.cache_bytes, words.unwrap_or(1) * 8, CHUNKS_MIN),
            meta: Engine::new(meta, ()),
            storage,
            files,
            extents,
            guest_bytes,
            writable,
            backing,
            warnings,
            in_flight: InFlight::default(),
            cid,
            cluster_bytes,
        };
        if writable
            && let Some(first) = image.extents.first()
            && image.extents.iter().all(|piece| !piece.writable)
        {
            return Err(image.refuse(first));
        }
        Ok(Arc::new(image))
    }
}

/// Whether extents with such a header can be written in place. Version 3 without compression has a
/// separate record of changes, which writes would invalidate.
fn can_write(header: &ExtentHeader) -> bool {
    header.hosted.as_ref().is_some_and(|header| !header.is_compressed() && header.version < 3)
}

/// Adds a repair hint to an error about a directory.
fn repairable(error: Error, writable: bool) -> Error {
    match error {
        Error::Corrupt(mut fault) if writable => {
            fault.remedy = Some(Remedy::REPAIR);
            Error::Corrupt(fault)
        }
        other => other,
    }
}

/// Records the places of the tables, which must not overlap.
fn note_metadata(sparse: &Sparse, file: &str) -> Result<()> {
    let mut sectors: Vec<u32> = sparse.directory.read().clone();
    sectors.extend_from_slice(&sparse.redundant.read());
    sectors.retain(|&sector| sector != 0);
    sectors.sort_unstable();
    let table = sparse.table_bytes().div_ceil(SECTOR);
    let place = |sector: u32| -> Range<u64> {
        let start = u64::from(sector);
        start * SECTOR..(start + table) * SECTOR
    };
    let twice = sectors.array_windows().find(|[a, b]| u64::from(b - a) < table).map(|[_, b]| *b);
    let over = sectors.iter().copied().find(|&sector| {
        let place = place(sector);
        sparse.front.iter().any(|r| r.start < place.end && place.start < r.end)
    });
    if let Some(sector) = twice.or(over) {
        return Err(Error::corrupt(
            file,
            place(sector).start,
            "grain table",
            "other metadata in the same place",
            "each table in a place of its own",
        )
        .with_remedy(Remedy::REPAIR));
    }
    *sparse.metadata.write() = sectors;
    Ok(())
}
