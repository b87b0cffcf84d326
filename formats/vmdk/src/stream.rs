//! Writes a stream-optimized image sequentially, as ESX and OVF tools read it.
//!
//! ```text
//!   header, directory at the end │ descriptor │ grains of table 0 │ marker, table 0 │ grains of …
//!   … │ marker, last table │ marker, directory │ marker, footer (copy of the header) │ end marker
//! ```
//!
//! Each grain follows a marker with its disk address, in ascending order; everything is padded to
//! sectors. Nothing is read back or written twice, so the target may be a pipe. Source: VMware,
//! "Virtual Disk Format 5.0", "Stream-Optimized Compressed Sparse Extents".

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use vdkit_block::{
    Codec, CompressedFrame, CompressedReservation, CompressedWriter, CreateRequest, Error, Extent,
    FileIndex, Format, FormatCaps, GuestOffset, HostOffset, InFlight, Limits, Place, Reservation,
    Reserver, Result, Storage, Ticket, require_within,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::create::{GRAIN_SECTORS, descriptor, descriptor_sectors};
use crate::header::{DIRECTORY_AT_END, SECTOR, SparseHeader, TABLE_ENTRIES, flag};
use crate::on_disk::{GrainMarker, MetadataMarker, mark};
use crate::options::{NewVmdk, whole_sectors};
use crate::space::HOST_BYTES_MAX;
use crate::unpack::MARKER_BYTES;

const GRAIN_BYTES: u64 = GRAIN_SECTORS * SECTOR;

/// A writer of a stream.
#[derive(Debug)]
pub struct StreamWriter {
    storage: Arc<dyn Storage>,
    guest_bytes: u64,
    header: SparseHeader,
    in_flight: InFlight,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Offset of the next byte.
    at: u64,
    /// Grains below this can no longer be written.
    next_grain: u64,
    /// Index and entries of the current table.
    table: u64,
    entries: Vec<u32>,
    /// First sectors of the written tables.
    directory: Vec<u32>,
    next_ticket: u64,
    /// A reserved grain was released: the stream cannot be completed.
    broken: bool,
    closed: bool,
}

impl StreamWriter {
    /// Writes header and descriptor of a new stream.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::Unsupported`] for invalid options; I/O.
    pub fn begin(request: &CreateRequest, limits: &Limits) -> Result<Arc<Self>> {
        let storage = request.storage.clone();
        let new = NewVmdk::new(&request.options)?;
        let remedy = "leave out the backing file, or create a monolithicSparse image";
        request.refuse_backing("a streamOptimized image", remedy)?;
        let guest_bytes = whole_sectors(request.guest_bytes, storage.name())?;
        let text = descriptor(request, &new, guest_bytes)?;
        let descriptor_sectors = descriptor_sectors(Some(&text));
        let header = SparseHeader {
            version: 3,
            flags: flag::LINE_ENDS | flag::COMPRESSED | flag::MARKERS,
            capacity: guest_bytes / SECTOR,
            grain_sectors: GRAIN_SECTORS,
            descriptor: 1,
            descriptor_sectors,
            table_entries: TABLE_ENTRIES,
            redundant_directory: 0,
            directory: DIRECTORY_AT_END,
            overhead: (1 + descriptor_sectors).next_multiple_of(GRAIN_SECTORS),
            unclean: false,
            compression: 1,
        };
        let (what, found) = ("size of the grain directory", header.directory_bytes());
        require_within(storage.name(), what, found, limits.table_bytes_max)?;
        let start = header.overhead * SECTOR;
        let mut front = header.encode().to_vec();
        front.extend(text.as_bytes());
        front.resize(start as usize, 0);
        storage.write_at(&front, HostOffset(0))?;
        let state = State {
            at: start,
            next_grain: 0,
            table: 0,
            entries: vec![0; TABLE_ENTRIES as usize],
            directory: vec![0; header.directory_entries() as usize],
            next_ticket: 0,
            broken: false,
            closed: false,
        };
        let state = Mutex::new(state);
        Ok(Arc::new(Self { storage, guest_bytes, header, in_flight: InFlight::default(), state }))
    }

    fn write(&self, state: &mut State, bytes: &[u8]) -> Result<()> {
        self.room(state, bytes.len() as u64)?;
        self.storage.write_at(bytes, HostOffset(state.at))?;
        state.at += bytes.len() as u64;
        Ok(())
    }

    fn room(&self, state: &State, bytes: u64) -> Result<()> {
        if state.at.checked_add(bytes).is_some_and(|end| end <= HOST_BYTES_MAX) {
            return Ok(());
        }
        Err(Error::no_space(self.storage.name(), "a stream ends within 2 TiB"))
    }

    /// Writes the current table, and begins the next one.
    fn end_table(&self, state: &mut State, next: u64) -> Result<()> {
        if state.entries.iter().any(|&entry| entry != 0) {
            let mut bytes = marker(u64::from(TABLE_ENTRIES) * 4 / SECTOR, mark::TABLE);
            bytes.extend(state.entries.iter().flat_map(|entry| entry.to_le_bytes()));
            state.directory[state.table as usize] = ((state.at + SECTOR) / SECTOR) as u32;
            self.write(state, &bytes)?;
            state.entries.fill(0);
        }
        state.table = next;
        Ok(())
    }

    fn finish(&self, state: &mut State) -> Result<()> {
        self.end_table(state, 0)?;
        let mut raw: Vec<u8> = state.directory.iter().flat_map(|s| s.to_le_bytes()).collect();
        raw.resize(raw.len().next_multiple_of(SECTOR as usize), 0);
        let mut bytes = marker(raw.len() as u64 / SECTOR, mark::DIRECTORY);
        bytes.extend(raw);
        let directory = (state.at + SECTOR) / SECTOR;
        bytes.extend(marker(1, mark::FOOTER));
        bytes.extend(SparseHeader { directory, ..self.header.clone() }.encode());
        bytes.extend(marker(0, mark::END));
        self.write(state, &bytes)
    }

    fn backwards(&self, at: GuestOffset) -> Error {
        Error::unsupported(
            self.storage.name(),
            format!("not supported: writing at guest offset {at} of a stream that is beyond it"),
            "a streamOptimized image is written in one pass, in the order of the disk",
        )
    }
}

/// The marker sector before `sectors` sectors of metadata.
fn marker(sectors: u64, kind: u32) -> Vec<u8> {
    let (num_sectors, kind) = (sectors.into(), kind.into());
    let marker = MetadataMarker { num_sectors, kind, ..FromZeros::new_zeroed() };
    marker.as_bytes().to_vec()
}

impl Format for StreamWriter {
    fn name(&self) -> &'static str {
        "vmdk"
    }

    fn caps(&self) -> FormatCaps {
        FormatCaps {
            writable: true,
            cluster_bytes: GRAIN_BYTES,
            fill_bytes: GRAIN_BYTES,
            compressed: Some(Codec::Zlib),
            one_pass: true,
            cheap_zeroes: true,
            host_aligned: false,
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes
    }

    vdkit_block::accessors!(storage, in_flight);

    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        if at.0 < self.state.lock().next_grain * GRAIN_BYTES {
            return Err(self.backwards(at));
        }
        Ok(Extent { len, place: Place::Hole })
    }

    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        self.resolve(at, len).ok()
    }

    fn reserve(&self, at: GuestOffset, _len: u64) -> Result<Option<Reservation<'_>>> {
        Err(self.backwards(at))
    }

    fn zero(&self, at: GuestOffset, len: u64, _may_unmap: bool) -> Result<Range<u64>> {
        // Unwritten grains read as zero.
        self.resolve(at, len).map(|_| at.0..at.0 + len)
    }

    fn discard(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.resolve(at, len).map(|_| ())
    }

    fn flush(&self) -> Result<()> {
        self.storage.sync()
    }

    fn close(&self) -> Result<()> {
        let mut state = self.state.lock();
        if !state.closed {
            if state.broken {
                return Err(Error::invalid_for(
                    &self.storage.name(),
                    "a part of the stream was not written, so it cannot be completed",
                ));
            }
            self.finish(&mut state)?;
            state.closed = true;
        }
        self.storage.sync()
    }

    fn resize(&self, _guest_bytes: u64) -> Result<()> {
        Err(Error::unsupported(
            self.storage.name(),
            "not supported: changing the size of a stream",
            "its size stands in the header that was written first",
        ))
    }

    vdkit_block::capabilities!(compressed_writer: CompressedWriter);
}

impl CompressedWriter for StreamWriter {
    fn compressed_frame(&self) -> CompressedFrame {
        CompressedFrame { head_bytes: MARKER_BYTES as u32, align: SECTOR as u32 }
    }

    fn frame_compressed(&self, at: GuestOffset, framed: &mut [u8], payload_bytes: u32) {
        let marker = GrainMarker { lba: (at.0 / SECTOR).into(), size: payload_bytes.into() };
        framed[..MARKER_BYTES].copy_from_slice(marker.as_bytes());
    }

    fn reserve_compressed(
        &self,
        at: GuestOffset,
        lens: &[u32],
    ) -> Result<CompressedReservation<'_>> {
        let grain = at.0 / GRAIN_BYTES;
        let mut state = self.state.lock();
        if grain < state.next_grain || state.closed {
            return Err(self.backwards(at));
        }
        let fits = at.0.is_multiple_of(GRAIN_BYTES)
            && !lens.is_empty()
            && lens.iter().all(|&len| len > MARKER_BYTES as u32 && len.is_multiple_of(512))
            && grain + lens.len() as u64 <= self.guest_bytes.div_ceil(GRAIN_BYTES);
        if !fits {
            return Err(Error::invalid_for(
                &self.storage.name(),
                format!(
                    "compressed grains at guest offset {at} must be whole, framed and on the disk"
                ),
            ));
        }
        let entries = u64::from(TABLE_ENTRIES);
        let (table, first) = (grain / entries, grain % entries);
        if table != state.table {
            self.end_table(&mut state, table)?;
        }
        let units = lens.len().min((entries - first) as usize);
        let total: u64 = lens[..units].iter().map(|&len| u64::from(len)).sum();
        self.room(&state, total)?;
        let host = HostOffset(state.at);
        for (index, &len) in (first as usize..).zip(&lens[..units]) {
            state.entries[index] = (state.at / SECTOR) as u32;
            state.at += u64::from(len);
        }
        state.next_grain = grain + units as u64;
        let ticket = Ticket(state.next_ticket);
        state.next_ticket += 1;
        Ok(CompressedReservation::new(self, ticket, FileIndex(0), host, units))
    }
}

impl Reserver for StreamWriter {
    fn publish(&self, _ticket: Ticket) -> Result<()> {
        Ok(())
    }

    fn release(&self, _ticket: Ticket) {
        self.state.lock().broken = true;
    }
}
