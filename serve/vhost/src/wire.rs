//! Messages of the protocol. All integers are in native byte order.

use std::fmt::Display;
use std::io;

/// Bytes of a message header: request, flags, body size.
pub const HEADER_BYTES: usize = 12;
/// Maximum body; all known messages are far smaller.
pub const BODY_MAX: usize = 4096;
/// Maximum file descriptors per message.
pub const FDS_MAX: usize = 32;
/// Maximum size of the configuration space.
pub const CONFIG_MAX: u32 = 256;

/// Requests of the monitor.
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// Requests to the monitor, on a separate socket.
pub mod backend_request {
    pub const CONFIG_CHANGE_MSG: u32 = 2;
}

/// Header flags.
pub mod flag {
    pub const VERSION: u32 = 1;
    pub const VERSION_MASK: u32 = 3;
    pub const REPLY: u32 = 1 << 2;
    pub const NEED_REPLY: u32 = 1 << 3;
}

/// Protocol features.
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

    /// All offered protocol features.
    pub const OFFERED: u64 =
        MQ | REPLY_ACK | BACKEND_REQ | CONFIG | INFLIGHT_SHMFD | CONFIGURE_MEM_SLOTS;
}

/// A message body, read in order. Reading past its end is an error.
pub struct Fields<'a>(pub &'a [u8]);

/// The body is too short for its message.
#[derive(Debug, PartialEq)]
pub struct TooShort;

/// The error of a message that makes no sense.
pub fn invalid(what: impl Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

impl From<TooShort> for io::Error {
    fn from(_: TooShort) -> Self {
        invalid("a message that is too short")
    }
}

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], TooShort> {
        let (front, rest) = self.0.split_first_chunk().ok_or(TooShort)?;
        self.0 = rest;
        Ok(*front)
    }

    pub fn u16(&mut self) -> Result<u16, TooShort> {
        self.take().map(u16::from_ne_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, TooShort> {
        self.take().map(u32::from_ne_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, TooShort> {
        self.take().map(u64::from_ne_bytes)
    }
}

/// A region of guest memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryRegion {
    /// Guest address.
    pub guest_address: u64,
    /// Bytes.
    pub size: u64,
    /// Monitor address; ring addresses use these.
    pub user_address: u64,
    /// Offset in the attached file.
    pub file_offset: u64,
}

impl MemoryRegion {
    pub fn parse(fields: &mut Fields<'_>) -> Result<Self, TooShort> {
        Ok(Self {
            guest_address: fields.u64()?,
            size: fields.u64()?,
            user_address: fields.u64()?,
            file_offset: fields.u64()?,
        })
    }
}

/// Addresses of a ring's three parts, as monitor addresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RingAddresses {
    pub index: u32,
    pub descriptors: u64,
    pub used: u64,
    pub available: u64,
}

impl RingAddresses {
    pub fn parse(fields: &mut Fields<'_>) -> Result<Self, TooShort> {
        let index = fields.u32()?;
        let _flags = fields.u32()?;
        Ok(Self {
            index,
            descriptors: fields.u64()?,
            used: fields.u64()?,
            available: fields.u64()?,
        })
    }
}

/// The memory of in-flight records.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InflightArea {
    pub size: u64,
    pub file_offset: u64,
    pub queues: u16,
    pub queue_size: u16,
}

impl InflightArea {
    pub fn parse(fields: &mut Fields<'_>) -> Result<Self, TooShort> {
        Ok(Self {
            size: fields.u64()?,
            file_offset: fields.u64()?,
            queues: fields.u16()?,
            queue_size: fields.u16()?,
        })
    }

    /// Writes the reply into the request's body, whose padding depends on the monitor.
    pub fn put(&self, body: &mut [u8]) {
        let mut bytes = Vec::with_capacity(20);
        bytes.extend(self.size.to_ne_bytes());
        bytes.extend(self.file_offset.to_ne_bytes());
        bytes.extend(self.queues.to_ne_bytes());
        bytes.extend(self.queue_size.to_ne_bytes());
        let len = bytes.len().min(body.len());
        body[..len].copy_from_slice(&bytes[..len]);
    }
}
