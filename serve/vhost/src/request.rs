//! Parses a chain of descriptors in guest memory into a request.

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress, GuestMemory, Permissions};

use crate::memory::{Mem, Segment, copy_in};

/// Bytes of a descriptor.
const DESCRIPTOR_BYTES: u64 = 16;
/// Maximum descriptors per request; the limit announced to drivers is far lower.
const DESCRIPTORS_MAX: usize = 1024;
/// Header: type u32, unused u32, sector u64.
const HEADER_BYTES: usize = 16;

/// Type of request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Read,
    Write,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
    Unknown,
}

impl Kind {
    fn of(number: u32) -> Self {
        match number {
            0 => Self::Read,
            1 => Self::Write,
            4 => Self::Flush,
            8 => Self::GetId,
            11 => Self::Discard,
            13 => Self::WriteZeroes,
            _ => Self::Unknown,
        }
    }

    /// Whether its data goes to the guest.
    fn answers(self) -> bool {
        matches!(self, Self::Read | Self::GetId)
    }
}

/// A request. Its header was copied from guest memory; its data is still there.
#[derive(Debug)]
pub struct Request {
    /// Its head descriptor.
    pub head: u16,
    pub kind: Kind,
    pub sector: u64,
    /// The data, without header and status.
    pub data: Vec<Segment>,
    /// Bytes of the data.
    pub bytes: u64,
    /// Address of its status byte, within guest memory.
    pub status: GuestAddress,
}

/// Why a chain is invalid. Its ring becomes broken.
pub type InvalidChain = &'static str;

/// A descriptor table.
#[derive(Clone, Copy)]
pub struct Table {
    pub address: GuestAddress,
    pub size: u16,
}

/// Follows a chain; returns its segments, and the number of device-readable ones.
fn follow(
    mem: &Mem,
    mut table: Table,
    head: u16,
    segments: &mut Vec<Segment>,
) -> Result<usize, InvalidChain> {
    let mut index = head;
    let mut left = table.size;
    let mut indirect = false;
    let mut readable = 0;
    segments.clear();
    loop {
        if left == 0 {
            return Err("a chain of descriptors without an end");
        }
        left -= 1;
        if index >= table.size {
            return Err("a descriptor beyond its table");
        }
        let at = table.address.0.checked_add(DESCRIPTOR_BYTES * u64::from(index));
        let at =
            GuestAddress(at.ok_or("a table of descriptors past the end of the address space")?);
        let descriptor: Descriptor =
            mem.read_obj(at).map_err(|_| "a table of descriptors outside of memory")?;
        let len = descriptor.len();
        if descriptor.refers_to_indirect_table() {
            let entries = len as usize / DESCRIPTOR_BYTES as usize;
            let whole = len.is_multiple_of(DESCRIPTOR_BYTES as u32);
            if indirect || descriptor.has_next() || !whole {
                return Err("an indirect table where none may be");
            }
            if entries == 0 || entries > DESCRIPTORS_MAX {
                return Err("an indirect table that is empty or too large");
            }
            table = Table { address: descriptor.addr(), size: entries as u16 };
            (index, left, indirect) = (0, table.size, true);
            continue;
        }
        if segments.len() >= DESCRIPTORS_MAX {
            return Err("a request of too many pieces");
        }
        if descriptor.is_write_only() {
            segments.push(Segment { address: descriptor.addr(), len });
        } else if segments.len() == readable {
            segments.push(Segment { address: descriptor.addr(), len });
            readable += 1;
        } else {
            return Err("a descriptor to read behind one to write");
        }
        if !descriptor.has_next() {
            return Ok(readable);
        }
        index = descriptor.next();
    }
}

/// Removes bytes from the front.
fn skip_front(segments: &mut Vec<Segment>, mut bytes: u32) {
    let mut gone = 0;
    for segment in segments.iter_mut() {
        if segment.len > bytes {
            segment.address.0 = segment.address.0.saturating_add(u64::from(bytes));
            segment.len -= bytes;
            break;
        }
        bytes -= segment.len;
        gone += 1;
    }
    segments.drain(..gone);
}

impl Request {
    /// Parses the chain at `head`. `segments` provides reusable memory.
    ///
    /// # Errors
    /// For a chain without a valid status address.
    pub fn parse(
        mem: &Mem,
        table: Table,
        head: u16,
        mut segments: Vec<Segment>,
    ) -> Result<Self, InvalidChain> {
        let readable = follow(mem, table, head, &mut segments)?;
        let mut header = [0; HEADER_BYTES];
        copy_in(mem, &segments[..readable], 0, &mut header)
            .map_err(|_| "a request without a header")?;
        while segments.len() > readable && segments.last().is_some_and(|last| last.len == 0) {
            segments.pop();
        }
        let status = match segments[readable..].last_mut() {
            Some(last) => {
                last.len -= 1;
                GuestAddress(last.address.0.saturating_add(u64::from(last.len)))
            }
            None => return Err("a request without a place for its status"),
        };
        if !mem.check_range(status, 1, Permissions::Write) {
            return Err("a status outside of memory");
        }
        let word = |at: usize| std::array::from_fn(|byte| header[at + byte]);
        let kind = Kind::of(u32::from_le_bytes(word(0)));
        let sector = u64::from_le_bytes(std::array::from_fn(|byte| header[8 + byte]));
        if kind.answers() {
            segments.drain(..readable);
        } else {
            segments.truncate(readable);
            skip_front(&mut segments, HEADER_BYTES as u32);
        }
        let bytes = segments.iter().map(|segment| u64::from(segment.len)).sum();
        Ok(Self { head, kind, sector, data: segments, bytes, status })
    }
}
