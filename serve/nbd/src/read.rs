//! Reads that may block: small ones in one send, large ones in pieces, if replies are structured
//! and DF is not set. Data sent before an error stays valid: the error chunk gives the offset of
//! the failure.

use std::io;
use std::time::Instant;

use crate::buffer::Buffer;
use crate::reply::Outbox;
use crate::session::{ALONE_BYTES, INLINE_READ_MAX, Session, errno_of};
use crate::wire::{self, Request, errno, request_flag};

/// Piece of a large read: small enough to stay in the processor's cache until it is sent, and large
/// enough not to wake the client too often.
const PIECE_BYTES: u64 = 512 << 10;

impl Session {
    /// Runs a read and answers it.
    pub(crate) fn read(
        &self,
        request: &Request,
        began: Instant,
        buffer: &mut Buffer,
        out: &mut Outbox,
    ) -> io::Result<()> {
        let whole = !self.agreed.structured || request.has(request_flag::DF);
        if request.len > u64::from(wire::PAYLOAD_MAX) {
            return self.replier.error(request, errno::OVERFLOW, "more than 32 MiB in one read");
        }
        let done = if request.len == 0 && self.agreed.structured {
            // A data chunk must have at least one byte.
            self.replier.end(request).map(|()| true)?
        } else if request.len <= INLINE_READ_MAX {
            self.read_small(request, out)?
        } else if whole && request.len > ALONE_BYTES {
            let _one = self.large_reads.lock();
            // Freed before the next such request may begin.
            self.read_whole(request, &mut Buffer::default())?
        } else if whole {
            self.read_whole(request, buffer)?
        } else {
            self.read_pieces(request, buffer)?
        };
        self.count(request, began.elapsed(), done);
        Ok(())
    }

    /// Answers with one chunk or simple reply, header and data together. Returns whether the read
    /// succeeded.
    fn read_small(&self, request: &Request, out: &mut Outbox) -> io::Result<bool> {
        let len = request.len as usize;
        self.replier.make_room(out, len)?;
        let data = out.data_room(self.replier.head(), len);
        match self.export.requests(&self.client).read(data, request.offset) {
            Ok(()) => {
                self.replier.put_data(out, request, len);
                self.replier.send_all(out)?;
                Ok(true)
            }
            Err(error) => self.fail(request, &error).map(|()| false),
        }
    }

    /// Answers with one large chunk or simple reply.
    fn read_whole(&self, request: &Request, buffer: &mut Buffer) -> io::Result<bool> {
        let data = buffer.room(request.len as usize);
        match self.export.requests(&self.client).read(data, request.offset) {
            Ok(()) => self.replier.data(request, request.offset, data, true).map(|()| true),
            Err(error) => self.fail(request, &error).map(|()| false),
        }
    }

    /// Answers with a chunk per piece; zeroes become hole chunks.
    fn read_pieces(&self, request: &Request, buffer: &mut Buffer) -> io::Result<bool> {
        let mut done = 0;
        while done < request.len {
            let at = request.offset + done;
            let len = PIECE_BYTES.min(request.len - done);
            let data = buffer.room(len as usize);
            if let Err(error) = self.export.requests(&self.client).read(data, at) {
                self.warn(&error);
                let errno = errno_of(&error);
                self.replier.error_at(request, errno, &error.to_string(), at)?;
                return Ok(false);
            }
            done += len;
            let last = done == request.len;
            if vdkit_block::is_zero(data) {
                self.replier.hole(request, at, len, last)?;
            } else {
                self.replier.data(request, at, data, last)?;
            }
        }
        Ok(true)
    }
}
