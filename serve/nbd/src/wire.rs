//! The protocol's structures, as a server reads and writes them. Its numbers are those of
//! `vdkit_nbd_wire`. All integers are big-endian.

use vdkit_block::bytes::be16;
pub(crate) use vdkit_block::bytes::{be32, be64};
pub use vdkit_nbd_wire::*;

/// A request header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    /// Payload bytes if a payload follows, else bytes of the effect.
    pub len: u64,
}

impl Request {
    /// Parses [`REQUEST_BYTES`] or [`EXTENDED_REQUEST_BYTES`] bytes; `None` if the magic number is
    /// wrong, after which the stream is unusable.
    pub fn parse(bytes: &[u8], extended: bool) -> Option<Self> {
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        (be32(bytes, 0) == magic).then(|| Self {
            flags: be16(bytes, 4),
            command: be16(bytes, 6),
            cookie: be64(bytes, 8),
            offset: be64(bytes, 16),
            len: if extended { be64(bytes, 24) } else { u64::from(be32(bytes, 24)) },
        })
    }

    /// Payload bytes after the header.
    pub fn payload(&self, extended: bool) -> u64 {
        match self.command {
            command::WRITE => self.len,
            _ if extended && self.flags & request_flag::PAYLOAD_LEN != 0 => self.len,
            _ => 0,
        }
    }

    /// Whether the request changes the disk's bytes.
    pub fn is_change(&self) -> bool {
        matches!(self.command, command::WRITE | command::TRIM | command::WRITE_ZEROES)
    }

    /// Whether a flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// Writes a simple reply's header.
pub fn put_simple(out: &mut [u8], error: u32, cookie: u64) {
    out[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&error.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
}

/// A chunk's header.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    pub flags: u16,
    pub kind: u16,
    pub cookie: u64,
    /// Offset of the request; only in extended headers.
    pub offset: u64,
    /// Bytes of the payload.
    pub len: u64,
}

impl Chunk {
    /// Writes the header and returns its length.
    pub fn put(&self, out: &mut [u8], extended: bool) -> usize {
        let magic = if extended { EXTENDED_CHUNK_MAGIC } else { CHUNK_MAGIC };
        out[..4].copy_from_slice(&magic.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.to_be_bytes());
        out[6..8].copy_from_slice(&self.kind.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        if extended {
            out[16..24].copy_from_slice(&self.offset.to_be_bytes());
            out[24..32].copy_from_slice(&self.len.to_be_bytes());
            EXTENDED_CHUNK_BYTES
        } else {
            // A payload exceeds `PAYLOAD_MAX` by at most a few words.
            out[16..20].copy_from_slice(&(self.len as u32).to_be_bytes());
            CHUNK_BYTES
        }
    }
}

/// Bytes of a chunk's header.
pub fn chunk_bytes(extended: bool) -> usize {
    if extended { EXTENDED_CHUNK_BYTES } else { CHUNK_BYTES }
}
