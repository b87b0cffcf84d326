//! Plans which bytes to move and how, before any data is read.
//!
//! The planner divides the source's map into cells of the target's cluster size. A cell is skipped
//! (it reads as zero), shared (it is one suitably aligned piece of a host file) or copied. Runs of
//! equal cells become one piece of [`Work`].

use std::collections::VecDeque;
use std::sync::Arc;

use vdkit_block::{HostOffset, Result, Storage, align_down};
use vdkit_chain::{Disk, DiskPlace};

use crate::runs::Runs;
use crate::source::Source;

/// A piece of a job, in bytes of the target disk.
#[derive(Clone, Debug)]
pub enum Work {
    /// Reads as zero.
    Zero {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// Must be read.
    Copy {
        /// First byte.
        at: u64,
        /// Bytes; at most a chunk.
        len: u64,
    },
    /// Bytes of a host file that the kernel may copy.
    CopyInKernel {
        /// First byte.
        at: u64,
        /// Bytes; at most a chunk.
        len: u64,
        /// The file.
        storage: Arc<dyn Storage>,
        /// Offset in it.
        offset: HostOffset,
    },
    /// Whole blocks of a host file.
    Share {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// The file.
        storage: Arc<dyn Storage>,
        /// Offset in it.
        offset: HostOffset,
    },
}

/// Options of a plan.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlanOptions {
    /// Cell size: the target's cluster size in bytes, a power of two.
    pub grid: u64,
    /// Maximum piece to copy, a multiple of `grid`.
    pub chunk: u64,
    /// Block size in bytes for sharing between files; `None` disables sharing.
    pub share: Option<u64>,
    /// Maximum piece to share, a multiple of `grid`.
    pub share_max: u64,
    /// The kernel may copy unshared pieces that are contiguous in a host file.
    pub in_kernel: bool,
    /// Maximum piece of zeroes, a multiple of `grid`.
    pub zero_max: u64,
    /// Number of layers of each source to map.
    pub layers: usize,
    /// Skip bytes that those layers do not hold, instead of zeroing them.
    pub skip_absent: bool,
    /// Copy zeroes like data, so that the target allocates space for them.
    pub fill: bool,
    /// What cannot be mapped is copied, so that the reads report which sectors are lost.
    pub salvage: bool,
}

/// Bytes that are copied unmapped where the map cannot be read.
const UNMAPPED_BYTES: u64 = 64 << 10;

/// A run of the source, with holes of host files distinguished from data.
#[derive(Clone, Debug)]
struct Piece {
    at: u64,
    end: u64,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    /// A hole in all mapped layers.
    Absent,
    Zero,
    Data {
        storage: Arc<dyn Storage>,
        offset: HostOffset,
    },
    /// Compressed or encrypted: the host's bytes are not the guest's.
    Coded,
}

/// Plans work from a source's map, incrementally in guest order.
#[derive(Debug)]
pub struct Planner<'a> {
    source: &'a Source,
    options: PlanOptions,
    /// The next disk of the source.
    disk: usize,
    /// The runs of the one before, and its start.
    runs: Option<(u64, Runs<'a>)>,
    /// Pieces not yet planned; contiguous.
    pieces: VecDeque<Piece>,
    /// End of the pieces.
    found: u64,
    at: u64,
}

impl<'a> Planner<'a> {
    /// A plan for a whole source.
    pub fn new(source: &'a Source, options: PlanOptions) -> Self {
        Self { source, options, disk: 0, runs: None, pieces: VecDeque::new(), found: 0, at: 0 }
    }

    /// A plan for everything after the first `from` bytes of a source, which must be one disk.
    ///
    /// # Errors
    /// Errors of the source's maps.
    pub fn from(source: &'a Source, options: PlanOptions, from: u64) -> Result<Self> {
        let mut planner = Self::new(source, options);
        let bytes = source.bytes();
        if let ([disk], 1..) = (source.disks(), from) {
            planner.disk = 1;
            (planner.found, planner.at) = (from.min(bytes), from.min(bytes));
            if from < bytes {
                planner.runs = Some((0, planner.runs_of(disk, from)?));
            }
        }
        Ok(planner)
    }

    /// Disables sharing, and returns the rest of the last piece from `at`, which could not be
    /// shared, to be copied.
    pub fn copy_from(&mut self, at: u64) {
        debug_assert!(at <= self.at && self.pieces.front().is_none_or(|piece| piece.at <= at));
        self.options.share = None;
        self.at = at;
    }

    /// The next piece of work; `None` at the end of the disk.
    ///
    /// # Errors
    /// Errors of the source's maps.
    pub fn next_work(&mut self) -> Result<Option<Work>> {
        loop {
            let Some((kind, end)) = self.run()? else { return Ok(None) };
            let at = self.at;
            let len = end - at;
            self.at = end;
            return Ok(Some(match kind {
                Cell::Absent if self.options.skip_absent => continue,
                Cell::Absent | Cell::Zero => Work::Zero { at, len },
                Cell::Copy => Work::Copy { at, len },
                Cell::Share(storage, offset) => Work::Share { at, len, storage, offset },
                Cell::InKernel(storage, offset) => Work::CopyInKernel { at, len, storage, offset },
            }));
        }
    }

    /// The run of cells from `self.at`: its kind and its end.
    fn run(&mut self) -> Result<Option<(Cell, u64)>> {
        let PlanOptions { grid, chunk, .. } = self.options;
        let Some((kind, mut end)) = self.cells(self.at)? else { return Ok(None) };
        match kind {
            Cell::Absent if self.options.skip_absent => return Ok(Some((kind, end))),
            // Copied like data, up to the end of the chunk.
            Cell::Absent | Cell::Zero if self.options.fill => {
                let limit = align_down(self.at, chunk) + chunk;
                return Ok(Some((Cell::Copy, end.min(limit))));
            }
            Cell::Absent | Cell::Zero => {
                let limit = self.at.saturating_add(self.options.zero_max);
                return Ok(Some((kind, end.min(limit))));
            }
            Cell::Share(..) => return Ok(Some((kind, end))),
            Cell::InKernel(..) | Cell::Copy => {}
        }
        let limit = align_down(self.at, chunk) + chunk;
        if matches!(kind, Cell::InKernel(..)) {
            return Ok(Some((kind, end.min(limit))));
        }
        while end < limit {
            match self.cells(end)? {
                Some((Cell::Copy, next)) => end = next,
                _ => break,
            }
        }
        debug_assert!(end.is_multiple_of(grid) || end == self.source.bytes());
        Ok(Some((kind, end.min(limit))))
    }

    /// The kind of the cell at `at`, and the end up to which one piece alone determines that kind.
    fn cells(&mut self, at: u64) -> Result<Option<(Cell, u64)>> {
        let bytes = self.source.bytes();
        if at >= bytes {
            return Ok(None);
        }
        let grid = self.options.grid;
        let cell_end = (at + grid).min(bytes);
        self.find_up_to(cell_end)?;
        while self.pieces.front().is_some_and(|p| p.end <= self.at) {
            self.pieces.pop_front();
        }
        let mut within = self.pieces.iter().filter(|p| p.end > at && p.at < cell_end);
        let Some(first) = within.next() else { return Ok(None) };
        if first.end >= cell_end {
            let whole = align_down(first.end, grid);
            let end = if first.end == bytes { bytes } else { whole };
            let blocks = align_down(first.end, grid.max(self.options.share.unwrap_or(1)));
            return Ok(Some(match self.alone(first, at) {
                // A short last block cannot be shared.
                Cell::Share(storage, offset) if blocks <= at && self.options.in_kernel => {
                    (Cell::InKernel(storage, offset), end.max(cell_end))
                }
                Cell::Share(..) if blocks <= at => (Cell::Copy, whole.max(cell_end)),
                share @ Cell::Share(..) => {
                    (share, blocks.min(at.saturating_add(self.options.share_max)))
                }
                other => (other, end.max(cell_end)),
            }));
        }
        let mut all_absent = matches!(first.kind, Kind::Absent);
        let mut any_absent = all_absent;
        let mut all_zero = all_absent || matches!(first.kind, Kind::Zero);
        for piece in within {
            let absent = matches!(piece.kind, Kind::Absent);
            all_absent &= absent;
            any_absent |= absent;
            all_zero &= absent || matches!(piece.kind, Kind::Zero);
        }
        let kind = if all_absent {
            Cell::Absent
        } else if all_zero && !(any_absent && self.options.skip_absent) {
            Cell::Zero
        } else {
            // Also a cell with both zeroes that must hide the backing image and absent bytes.
            Cell::Copy
        };
        Ok(Some((kind, cell_end)))
    }

    /// The kind of cells within one piece.
    fn alone(&self, piece: &Piece, at: u64) -> Cell {
        match &piece.kind {
            Kind::Absent => Cell::Absent,
            Kind::Zero => Cell::Zero,
            Kind::Coded => Cell::Copy,
            Kind::Data { storage, offset } => {
                let offset = *offset + (at - piece.at);
                match self.options.share {
                    Some(block) if offset.0.is_multiple_of(block) && at.is_multiple_of(block) => {
                        Cell::Share(storage.clone(), offset)
                    }
                    _ if self.options.in_kernel => Cell::InKernel(storage.clone(), offset),
                    _ => Cell::Copy,
                }
            }
        }
    }

    fn find_up_to(&mut self, end: u64) -> Result<()> {
        while self.found < end {
            let Some((start, runs)) = &mut self.runs else {
                let source = self.source;
                let Some((start, disk)) = source.pieces().nth(self.disk) else { return Ok(()) };
                self.disk += 1;
                self.runs = Some((start, self.runs_of(disk, 0)?));
                continue;
            };
            let start = *start;
            match runs.next_run() {
                Ok(Some(run)) => {
                    let kind = match run.place {
                        DiskPlace::Hole => Kind::Absent,
                        DiskPlace::Zero { .. } => Kind::Zero,
                        DiskPlace::Data { storage, offset } if run.is_plain() => {
                            Kind::Data { storage: storage.clone(), offset }
                        }
                        DiskPlace::Data { .. } | DiskPlace::Compressed { .. } => Kind::Coded,
                    };
                    self.push(start + run.at, start + run.end(), kind);
                }
                Ok(None) => self.runs = None,
                Err(error) if !self.options.salvage => return Err(error),
                Err(_) => self.push_unmapped(start)?,
            }
        }
        Ok(())
    }

    /// The runs of a disk from a byte on.
    fn runs_of(&self, disk: &'a Disk, from: u64) -> Result<Runs<'a>> {
        let bytes = disk.guest_bytes() - from;
        let runs = Runs::of_layers(disk, self.options.layers, from, bytes)?;
        Ok(runs.salvage(self.options.salvage))
    }

    /// Adds bytes that could not be mapped, of the disk at `start`, and maps on behind them.
    fn push_unmapped(&mut self, start: u64) -> Result<()> {
        let source = self.source;
        let Some(disk) = self.disk.checked_sub(1).and_then(|index| source.disks().get(index))
        else {
            return Ok(());
        };
        let here = self.found - start;
        let next = (align_down(here, UNMAPPED_BYTES) + UNMAPPED_BYTES).min(disk.guest_bytes());
        self.runs = Some((start, self.runs_of(disk, next)?));
        self.push(self.found, start + next, Kind::Coded);
        Ok(())
    }

    fn push(&mut self, at: u64, end: u64, kind: Kind) {
        debug_assert_eq!(at, self.found);
        self.found = end;
        match (self.pieces.back_mut(), &kind) {
            (Some(Piece { end: last, kind: Kind::Zero, .. }), Kind::Zero)
            | (Some(Piece { end: last, kind: Kind::Absent, .. }), Kind::Absent)
            | (Some(Piece { end: last, kind: Kind::Coded, .. }), Kind::Coded) => *last = end,
            _ => self.pieces.push_back(Piece { at, end, kind }),
        }
    }
}

/// Treatment of a cell.
#[derive(Clone, Debug)]
enum Cell {
    Absent,
    Zero,
    Copy,
    Share(Arc<dyn Storage>, HostOffset),
    InKernel(Arc<dyn Storage>, HostOffset),
}
