//! Reads an image's own file: its descriptor, its header and the names of its other files.

use std::mem::offset_of;
use std::sync::Arc;

use parking_lot::RwLock;
use vdkit_block::{Error, FileIndex, HostOffset, Limits, Result, Storage, require_within};
use zerocopy::{FromZeros, IntoBytes, transmute_ref};

use crate::descriptor::{DESCRIPTOR_BYTES_MAX, Descriptor, ExtentType};
use crate::foreign::{self, COWD_MAGIC, SE_MAGIC};
use crate::header::{DIRECTORY_AT_END, MAGIC, SECTOR, SparseHeader, flag};
use crate::on_disk::{RawHeader, StreamEnd, mark};
use crate::sparse::{Flavor, Sparse};

/// A sparse extent's header of any kind.
#[derive(Clone, Debug)]
pub(crate) struct ExtentHeader {
    pub(crate) sectors: u64,
    pub(crate) grain_sectors: u64,
    /// First sector of the grain directory.
    pub(crate) directory: u64,
    pub(crate) directory_entries: u64,
    pub(crate) table_entries: u64,
    pub(crate) flavor: Flavor,
    /// All fields of a hosted extent's header.
    pub(crate) hosted: Option<SparseHeader>,
}

impl From<SparseHeader> for ExtentHeader {
    fn from(header: SparseHeader) -> Self {
        Self {
            sectors: header.capacity,
            grain_sectors: header.grain_sectors,
            directory: header.directory,
            directory_entries: header.directory_entries(),
            table_entries: header.table_entries.into(),
            flavor: header.flavor(),
            hosted: Some(header),
        }
    }
}

impl ExtentHeader {
    pub(crate) fn grain_bytes(&self) -> u64 {
        self.grain_sectors * SECTOR
    }

    /// The extent in a file, without its tables.
    pub(crate) fn sparse(&self, file: FileIndex) -> Sparse {
        let plain = self.hosted.as_ref().filter(|header| !header.is_compressed());
        let redundant = plain.filter(|header| header.has(flag::REDUNDANT));
        let redundant = redundant.map_or(0, |header| header.redundant_directory);
        Sparse {
            entry_bytes: if matches!(self.flavor, Flavor::Se { .. }) { 8 } else { 4 },
            flavor: self.flavor.clone(),
            file,
            grain_bytes: self.grain_bytes(),
            table_entries: self.table_entries,
            directory_at: self.directory.saturating_mul(SECTOR),
            directory: RwLock::default(),
            redundant_at: (redundant != 0).then(|| redundant.saturating_mul(SECTOR)),
            redundant: RwLock::default(),
            metadata: RwLock::default(),
            front: Vec::new(),
        }
    }
}

/// The descriptor and its place.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) descriptor: Descriptor,
    /// Byte offset in the image's own file.
    pub(crate) at: u64,
    /// Bytes reserved for it; `None` if it is a file of its own.
    pub(crate) room: Option<u64>,
}

/// Content of an image's own file.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// The descriptor; `None` for a single extent without one.
    pub(crate) placed: Option<Placed>,
    /// The header if the file is a sparse extent; `None` for a descriptor with extents in other
    /// files.
    pub(crate) header: Option<ExtentHeader>,
}

impl Source {
    /// Reads headers and descriptor: at most four reads, 1 MiB in total.
    ///
    /// # Errors
    /// Faults of the headers and the descriptor; I/O.
    pub(crate) fn read(storage: &Arc<dyn Storage>, limits: &Limits) -> Result<Self> {
        let mut head = [0; SECTOR as usize];
        let got = storage.read_up_to(&mut head, HostOffset(0))?;
        if let Some(header) = any_header(&**storage, &head, got, limits)? {
            let placed = match &header.hosted {
                Some(header) => embedded(&**storage, header)?,
                None => None,
            };
            return Ok(Self { placed, header: Some(header) });
        }
        let len = storage.len()?;
        require_within(storage.name(), "length of the descriptor", len, DESCRIPTOR_BYTES_MAX)?;
        let mut text = vec![0; len as usize];
        storage.read_padded(&mut text, HostOffset(0))?;
        let descriptor = Descriptor::parse(&text, 0, storage.name())?;
        Ok(Self { placed: Some(Placed { descriptor, at: 0, room: None }), header: None })
    }

    /// [`Self::files`], with `opened` files given for them.
    pub(crate) fn files_opened(&self, file: &str, opened: usize) -> Result<Vec<String>> {
        let names = self.files();
        if names.len() != opened {
            return Err(Error::invalid_for(
                &file,
                format!("its data is in {} other files, and {opened} were opened", names.len()),
            ));
        }
        Ok(names)
    }

    /// The other files that the descriptor names, each once, in the order of the extents.
    pub(crate) fn files(&self) -> Vec<String> {
        let Some(placed) = self.placed.as_ref().filter(|_| self.header.is_none()) else {
            return Vec::new();
        };
        let mut names: Vec<String> = Vec::new();
        let mut seen = rustc_hash::FxHashSet::default();
        for extent in &placed.descriptor.extents {
            if extent.kind != ExtentType::Zero && seen.insert(extent.name.as_str()) {
                names.push(extent.name.clone());
            }
        }
        names
    }

    pub(crate) fn guest_bytes(&self, file: &str) -> Result<u64> {
        let sectors = match (&self.header, &self.placed) {
            (Some(header), _) => Some(header.sectors),
            (None, Some(placed)) => {
                let mut extents = placed.descriptor.extents.iter();
                extents.try_fold(0u64, |sum, extent| sum.checked_add(extent.sectors))
            }
            (None, None) => Some(0),
        };
        sectors.filter(|&n| n <= i64::MAX as u64 / SECTOR).map(|n| n * SECTOR).ok_or_else(|| {
            Error::corrupt(file, 0, "extents", "more than 2^63 bytes together", "less")
        })
    }
}

/// The header of a sparse extent whose first sector (`got` bytes of it) is `head`; `None` without a
/// magic number.
///
/// # Errors
/// As [`Source::read`].
pub(crate) fn any_header(
    storage: &dyn Storage,
    head: &[u8; SECTOR as usize],
    got: usize,
    limits: &Limits,
) -> Result<Option<ExtentHeader>> {
    let file = storage.name();
    let known = head.starts_with(MAGIC)
        || head.starts_with(COWD_MAGIC)
        || head[..8] == SE_MAGIC.to_le_bytes();
    if !known {
        return Ok(None);
    }
    if (got as u64) < SECTOR {
        let found = format!("{got} bytes");
        return Err(Error::corrupt(file, 0, "sparse extent header", found, "512 bytes"));
    }
    if head.starts_with(MAGIC) {
        let header = SparseHeader::parse(head, 0, file, limits)?;
        let at_end = header.directory == DIRECTORY_AT_END;
        return Ok(Some(if at_end { footer(storage, limits)? } else { header }.into()));
    }
    if head.starts_with(COWD_MAGIC) {
        return foreign::cowd(head, file, limits).map(Some);
    }
    let header = foreign::se_sparse(head, file, limits)?;
    let mut volatile = [0; SECTOR as usize];
    let at = foreign::se_volatile_at(head);
    storage.read_padded(&mut volatile, HostOffset(at.min(i64::MAX as u64)))?;
    foreign::check_volatile(&volatile, at, file)?;
    Ok(Some(header))
}

/// The valid header of a stream: before its end marker, after the footer's marker.
fn footer(storage: &dyn Storage, limits: &Limits) -> Result<SparseHeader> {
    let file = storage.name();
    let len = storage.len()?;
    let start = (len / SECTOR * SECTOR).saturating_sub(3 * SECTOR);
    let mut stored = StreamEnd::new_zeroed();
    storage.read_padded(stored.as_mut_bytes(), HostOffset(start))?;
    let missing = |found: &str| {
        Error::corrupt(
            file,
            start,
            "footer",
            found,
            "a footer and an end mark: the stream was cut off; ask for it again",
        )
    };
    let marker = &stored.footer_marker;
    if marker.size != 0 || marker.kind != mark::FOOTER || stored.footer.magic != *MAGIC {
        return Err(missing("something else"));
    }
    if stored.end_marker.as_bytes()[..16] != [0; 16] {
        return Err(missing("no end mark"));
    }
    let header = SparseHeader::parse(transmute_ref!(&stored.footer), start + SECTOR, file, limits)?;
    if header.directory == DIRECTORY_AT_END {
        return Err(missing("a footer without the grain directory's place"));
    }
    Ok(header)
}

fn embedded(storage: &dyn Storage, header: &SparseHeader) -> Result<Option<Placed>> {
    if header.descriptor == 0 || header.descriptor_sectors == 0 {
        return Ok(None);
    }
    let file = storage.name();
    let (at, room) = (
        header.descriptor.saturating_mul(SECTOR),
        header.descriptor_sectors.saturating_mul(SECTOR),
    );
    let len = storage.len()?;
    if at >= len {
        let field = offset_of!(RawHeader, descriptor_offset) as u64;
        let found = format!("sector {}", header.descriptor);
        return Err(Error::corrupt(file, field, "descriptor", found, "a place within the file"));
    }
    let mut text = vec![0; room.min(DESCRIPTOR_BYTES_MAX).min(len - at) as usize];
    storage.read_padded(&mut text, HostOffset(at))?;
    if text.first().is_none_or(|&b| b == 0) {
        // Extents of split disks may reserve the space without using it.
        return Ok(None);
    }
    let descriptor = Descriptor::parse(&text, at, file)?;
    Ok(Some(Placed { descriptor, at, room: Some(text.len() as u64) }))
}
