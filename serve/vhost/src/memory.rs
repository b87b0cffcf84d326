//! Guest memory: its regions, and copying from and to it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion,
};

use crate::wire::{MemoryRegion, invalid};

/// The memory as seen by requests. It stays mapped while a request holds it.
pub type Mem = GuestMemoryMmap<()>;

/// Maximum memory regions.
pub const REGIONS_MAX: usize = 509;

/// A run of guest memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Segment {
    pub address: GuestAddress,
    pub len: u32,
}

/// An address outside guest memory.
#[derive(Debug, PartialEq)]
pub struct Outside;

/// Walks the parts of `segments` within `len` bytes from `skip`, counted over all segments. Calls
/// `each` with the address and the range within these `len` bytes.
fn walk(
    segments: &[Segment],
    mut skip: u64,
    len: usize,
    mut each: impl FnMut(GuestAddress, std::ops::Range<usize>) -> Result<(), Outside>,
) -> Result<(), Outside> {
    let mut done = 0;
    for segment in segments {
        let here = u64::from(segment.len);
        if skip >= here {
            skip -= here;
            continue;
        }
        if done == len {
            break;
        }
        let step = (here - skip).min((len - done) as u64) as usize;
        let address = segment.address.0.checked_add(skip).ok_or(Outside)?;
        each(GuestAddress(address), done..done + step)?;
        done += step;
        skip = 0;
    }
    if done == len { Ok(()) } else { Err(Outside) }
}

/// Copies `buf.len()` bytes from the guest, starting `skip` bytes into `segments`.
pub fn copy_in(mem: &Mem, segments: &[Segment], skip: u64, buf: &mut [u8]) -> Result<(), Outside> {
    walk(segments, skip, buf.len(), |address, range| {
        mem.read_slice(&mut buf[range], address).map_err(|_| Outside)
    })
}

/// Copies to the guest.
pub fn copy_out(mem: &Mem, segments: &[Segment], skip: u64, buf: &[u8]) -> Result<(), Outside> {
    walk(segments, skip, buf.len(), |address, range| {
        mem.write_slice(&buf[range], address).map_err(|_| Outside)
    })
}

struct Mapped {
    region: MemoryRegion,
    mapping: Arc<GuestRegionMmap<()>>,
}

/// The memory shared by the monitor.
#[derive(Default)]
pub struct Memory {
    pieces: Vec<Mapped>,
    mem: Arc<Mem>,
}

fn map(region: MemoryRegion, file: OwnedFd) -> io::Result<Mapped> {
    let size = usize::try_from(region.size).map_err(invalid)?;
    if region.user_address.checked_add(region.size).is_none() {
        return Err(invalid("a memory region past the end of the address space"));
    }
    let file = FileOffset::new(file.into(), region.file_offset);
    let mapping = MmapRegion::from_file(file, size).map_err(invalid)?;
    let mapping = GuestRegionMmap::new(mapping, GuestAddress(region.guest_address))
        .ok_or_else(|| invalid("a memory region past the end of the address space"))?;
    Ok(Mapped { region, mapping: Arc::new(mapping) })
}

impl Memory {
    pub fn mem(&self) -> Arc<Mem> {
        self.mem.clone()
    }

    /// Replaces all regions.
    pub fn set(&mut self, regions: Vec<(MemoryRegion, OwnedFd)>) -> io::Result<()> {
        let pieces = regions.into_iter().map(|(region, file)| map(region, file));
        self.take(pieces.collect::<io::Result<_>>()?)
    }

    pub fn add(&mut self, region: MemoryRegion, file: OwnedFd) -> io::Result<()> {
        if self.pieces.len() >= REGIONS_MAX {
            return Err(invalid("too many memory regions"));
        }
        let mut pieces = self.copies();
        pieces.push(map(region, file)?);
        self.take(pieces)
    }

    pub fn remove(&mut self, region: MemoryRegion) -> io::Result<()> {
        let mut pieces = self.copies();
        let same = |piece: &Mapped| {
            piece.region.guest_address == region.guest_address
                && piece.region.size == region.size
                && piece.region.user_address == region.user_address
        };
        let before = pieces.len();
        pieces.retain(|piece| !same(piece));
        if pieces.len() == before {
            return Err(invalid("no such memory region"));
        }
        self.take(pieces)
    }

    fn copies(&self) -> Vec<Mapped> {
        let copy = |piece: &Mapped| Mapped { region: piece.region, mapping: piece.mapping.clone() };
        self.pieces.iter().map(copy).collect()
    }

    fn take(&mut self, mut pieces: Vec<Mapped>) -> io::Result<()> {
        pieces.sort_by_key(|piece| piece.mapping.start_addr());
        let mappings = pieces.iter().map(|piece| piece.mapping.clone()).collect();
        self.mem = Arc::new(if pieces.is_empty() {
            Mem::new()
        } else {
            Mem::from_arc_regions(mappings).map_err(invalid)?
        });
        self.pieces = pieces;
        Ok(())
    }

    /// The guest address of a monitor address.
    pub fn guest_address(&self, user_address: u64) -> Option<u64> {
        self.pieces.iter().find_map(|piece| {
            let into = user_address.checked_sub(piece.region.user_address)?;
            (into < piece.region.size).then(|| piece.region.guest_address + into)
        })
    }
}
