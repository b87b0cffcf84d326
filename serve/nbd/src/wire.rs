//! Constants and structures of the protocol. Source: the NBD project's `doc/proto.md`, whose
//! section names appear below. All integers are big-endian.

use vdkit_block::bytes::be16;
pub(crate) use vdkit_block::bytes::{be32, be64};

/// First word of a server ("NBDMAGIC").
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Before the server's flags and each option ("IHAVEOPT").
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Before each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Before a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Before a request with an extended header.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Before a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Before a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
/// Before a chunk with an extended header.
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

/// Handshake flags, of both sides.
pub mod handshake {
    /// Fixed newstyle.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// No padding after the answer to NBD_OPT_EXPORT_NAME.
    pub const NO_ZEROES: u16 = 2;
}

/// Options of the handshake.
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod answer {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    const ERROR: u32 = 1 << 31;
    pub const UNSUPPORTED: u32 = ERROR + 1;
    pub const POLICY: u32 = ERROR + 2;
    pub const INVALID: u32 = ERROR + 3;
    pub const TLS_REQUIRED: u32 = ERROR + 5;
    pub const UNKNOWN: u32 = ERROR + 6;
    pub const TOO_BIG: u32 = ERROR + 9;
}

/// Pieces of information about an export.
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags.
pub mod flag {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_CACHE: u16 = 1 << 10;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
    pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;
}

/// Requests.
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISC: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
    /// Number of request types.
    pub const KINDS: usize = 8;
}

/// Flags of requests.
pub mod request_flag {
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
    pub const PAYLOAD_LEN: u16 = 1 << 5;
}

/// Types of chunks.
pub mod chunk {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    pub const ERROR: u16 = (1 << 15) + 1;
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
    /// Flag of the last chunk of a reply.
    pub const DONE: u16 = 1;
}

/// Errors in replies.
pub mod errno {
    pub const PERM: u32 = 1;
    pub const IO: u32 = 5;
    pub const INVAL: u32 = 22;
    pub const NOSPC: u32 = 28;
    pub const OVERFLOW: u32 = 75;
    pub const NOTSUP: u32 = 95;
    pub const SHUTDOWN: u32 = 108;
}

/// The largest payload of a request or chunk.
pub const PAYLOAD_MAX: u32 = 32 << 20;
/// The longest name or other string.
pub const STRING_MAX: u32 = 4096;

/// Bytes of a request header.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a request with an extended header.
pub const EXTENDED_REQUEST_BYTES: usize = 32;
/// Bytes of a simple reply header.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes of a chunk header.
pub const CHUNK_BYTES: usize = 20;
/// Bytes of a chunk with an extended header.
pub const EXTENDED_CHUNK_BYTES: usize = 32;

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
