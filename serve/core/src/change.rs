//! Changes that an export can keep and try again.

use vdkit_block::Result;

/// Approximate memory of a request that waits for a flush.
const WAITING_BYTES: u64 = 64;

/// A change that owns its data.
#[derive(Debug)]
pub enum Change {
    /// Write these bytes.
    Write(Vec<u8>),
    /// Write these bytes, growing the disk if needed.
    Append(Vec<u8>),
    /// Grow the disk at least to the offset.
    Grow,
    /// Write zeroes.
    Zero {
        /// Bytes.
        len: u64,
        /// The space may be freed.
        may_unmap: bool,
    },
    /// Flush.
    Flush {
        /// Number of requests to answer after it.
        requests: u64,
    },
}

impl Change {
    /// Bytes of memory that it holds.
    pub(crate) fn held_bytes(&self) -> u64 {
        match self {
            Self::Write(data) | Self::Append(data) => data.len() as u64,
            Self::Zero { .. } | Self::Grow => 0,
            Self::Flush { requests } => requests * WAITING_BYTES,
        }
    }

    /// Number of requests that wait for it.
    pub(crate) fn requests(&self) -> u64 {
        match self {
            Self::Write(_) | Self::Append(_) | Self::Zero { .. } | Self::Grow => 1,
            Self::Flush { requests } => *requests,
        }
    }
}

/// Called once when a kept change has been done or given up. It must not wait for a client, since
/// changes of all clients wait for its return.
pub type Done = Box<dyn FnOnce(Result<()>) + Send>;
