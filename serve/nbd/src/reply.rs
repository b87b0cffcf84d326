//! Replies: simple, structured, or with extended headers, as negotiated.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::channel::Channel;
use crate::wire::{self, Chunk, Request, chunk};

/// Size at which gathered replies are sent.
const GATHER_BYTES: usize = 256 << 10;

/// Maximum time the leader waits for another sending thread.
const BRIEFLY: Duration = Duration::from_millis(2);

/// Unsent replies of one thread.
#[derive(Default)]
pub struct Outbox {
    /// Zeroed once; only `buf[..used]` is valid.
    buf: Vec<u8>,
    used: usize,
    /// A part was sent and the rest is pending: see [`Replier::send_all_ready`].
    torn: bool,
}

impl Outbox {
    /// Space for a payload behind a header of `head` bytes, where [`Replier::put_data`] expects it.
    pub fn data_room(&mut self, head: usize, len: usize) -> &mut [u8] {
        let start = self.used + head;
        &mut self.buf[start..start + len]
    }

    fn free(&mut self, len: usize) -> &mut [u8] {
        let start = self.used;
        self.used += len;
        &mut self.buf[start..start + len]
    }

    fn reserve(&mut self, len: usize) {
        if self.buf.len() < self.used + len {
            self.buf.resize((self.used + len).max(GATHER_BYTES), 0);
        }
    }
}

/// State of the sending thread.
#[derive(Default)]
struct Sending {
    /// The rest of a partly sent reply, which must be sent first.
    rest: Vec<u8>,
    /// There is such a rest, here or in the channel.
    torn: bool,
}

/// Sends replies; shared by the threads of a connection.
pub struct Replier {
    channel: Arc<dyn Channel>,
    structured: bool,
    extended: bool,
    sending: Mutex<Sending>,
    closed: AtomicBool,
}

impl Replier {
    /// Replies of the negotiated kind on this channel.
    pub fn new(channel: Arc<dyn Channel>, structured: bool, extended: bool) -> Self {
        Self {
            channel,
            structured,
            extended,
            sending: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Stops sending.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Header bytes before the data of a read reply.
    pub fn head(&self) -> usize {
        if self.structured {
            wire::chunk_bytes(self.extended) + 8
        } else {
            wire::SIMPLE_REPLY_BYTES
        }
    }

    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.send_both(bytes, &[])
    }

    fn send_both(&self, head: &[u8], data: &[u8]) -> io::Result<()> {
        let mut sending = self.sending.lock();
        self.check_open()?;
        let sent = self.send_rest(&mut sending).and_then(|()| {
            if data.is_empty() {
                self.channel.send(head)
            } else {
                self.channel.send_both(head, data)
            }
        });
        if sent.is_err() {
            // A reply may be cut in the middle: the client could not parse anything after it.
            self.close();
        }
        sent
    }

    fn send_rest(&self, sending: &mut Sending) -> io::Result<()> {
        if std::mem::take(&mut sending.torn) {
            self.channel.send(&sending.rest)?;
            sending.rest.clear();
        }
        Ok(())
    }

    fn check_open(&self) -> io::Result<()> {
        match self.closed.load(Ordering::SeqCst) {
            true => Err(io::ErrorKind::BrokenPipe.into()),
            false => Ok(()),
        }
    }

    /// Sends the gathered replies.
    pub fn send_all(&self, out: &mut Outbox) -> io::Result<()> {
        if out.used == 0 && !out.torn {
            return Ok(());
        }
        let used = std::mem::take(&mut out.used);
        out.torn = false;
        self.send(&out.buf[..used])
    }

    /// As [`Replier::send_all`], for the leader. The leader must not wait for a client that does
    /// not read: such a client may be blocked on sending until its data is received. If it returns
    /// `false`, the caller must pass the lead and call [`Replier::send_all`].
    pub fn send_all_ready(&self, out: &mut Outbox) -> io::Result<bool> {
        if out.used == 0 {
            return Ok(!out.torn);
        }
        let Some(mut sending) = self.sending.try_lock_for(BRIEFLY) else { return Ok(false) };
        self.check_open()?;
        if sending.torn {
            return Ok(false);
        }
        let used = std::mem::take(&mut out.used);
        let (taken, all) =
            self.channel.send_ready(&out.buf[..used]).inspect_err(|_| self.close())?;
        if taken < used || !all {
            sending.rest.extend(&out.buf[taken..used]);
            (sending.torn, out.torn) = (true, true);
        }
        Ok(!out.torn)
    }

    /// Approximate bytes of a reply.
    fn reply_bytes(&self, payload: usize) -> usize {
        payload + self.head() + wire::EXTENDED_CHUNK_BYTES
    }

    /// Makes room for a reply with `payload` bytes, sending gathered replies if needed.
    pub fn make_room(&self, out: &mut Outbox, payload: usize) -> io::Result<()> {
        if out.used > 0 && out.used + self.reply_bytes(payload) > GATHER_BYTES {
            self.send_all(out)?;
        }
        out.reserve(self.reply_bytes(payload));
        Ok(())
    }

    /// As [`Replier::make_room`], for the leader; see [`Replier::send_all_ready`].
    pub fn make_room_ready(&self, out: &mut Outbox, payload: usize) -> io::Result<bool> {
        if out.used > 0
            && out.used + self.reply_bytes(payload) > GATHER_BYTES
            && !self.send_all_ready(out)?
        {
            return Ok(false);
        }
        out.reserve(self.reply_bytes(payload));
        Ok(true)
    }

    /// Finishes a read reply whose data is in [`Outbox::data_room`].
    pub fn put_data(&self, out: &mut Outbox, request: &Request, len: usize) {
        if self.structured {
            self.put_head(out, request, chunk::OFFSET_DATA, 8 + len);
            out.free(8).copy_from_slice(&request.offset.to_be_bytes());
        } else {
            wire::put_simple(out.free(wire::SIMPLE_REPLY_BYTES), 0, request.cookie);
        }
        out.used += len;
    }

    /// Adds the header of the one chunk of a reply.
    fn put_head(&self, out: &mut Outbox, request: &Request, kind: u16, len: usize) {
        let (cookie, offset, len) = (request.cookie, request.offset, len as u64);
        let header = Chunk { flags: chunk::DONE, kind, cookie, offset, len };
        header.put(out.free(wire::chunk_bytes(self.extended)), self.extended);
    }

    /// Adds the one chunk of a reply.
    fn put_chunk(&self, out: &mut Outbox, request: &Request, kind: u16, payload: &[u8]) {
        out.reserve(self.reply_bytes(payload.len()));
        self.put_head(out, request, kind, payload.len());
        out.free(payload.len()).copy_from_slice(payload);
    }

    /// Adds the reply to a read of zeroes.
    pub fn put_zero(&self, out: &mut Outbox, request: &Request) {
        if self.structured {
            let payload = hole_payload(request.offset, request.len);
            self.put_chunk(out, request, chunk::OFFSET_HOLE, &payload);
        } else {
            let len = request.len as usize;
            out.data_room(self.head(), len).fill(0);
            self.put_data(out, request, len);
        }
    }

    /// Sends data read at an offset, as a simple reply or a chunk; `last` ends the reply.
    pub fn data(&self, request: &Request, at: u64, data: &[u8], last: bool) -> io::Result<()> {
        let mut head = [0; wire::EXTENDED_CHUNK_BYTES + 8];
        let (cookie, offset) = (request.cookie, request.offset);
        if self.structured {
            let len = 8 + data.len() as u64;
            let flags = if last { chunk::DONE } else { 0 };
            let header = Chunk { flags, kind: chunk::OFFSET_DATA, cookie, offset, len };
            let start = header.put(&mut head, self.extended);
            head[start..start + 8].copy_from_slice(&at.to_be_bytes());
        } else {
            wire::put_simple(&mut head, 0, cookie);
        }
        self.send_both(&head[..self.head()], data)
    }

    /// Sends a hole chunk.
    pub fn hole(&self, request: &Request, at: u64, len: u64, last: bool) -> io::Result<()> {
        let flags = if last { chunk::DONE } else { 0 };
        self.chunk(request, chunk::OFFSET_HOLE, flags, &hole_payload(at, len))
    }

    /// Adds a success reply without data. There are at most as many as requests received at once,
    /// so this never has to send.
    pub fn put_ok(&self, out: &mut Outbox, request: &Request) {
        if self.extended {
            self.put_chunk(out, request, chunk::NONE, &[]);
        } else {
            self.put_simple(out, request, 0);
        }
    }

    /// Sends a success reply.
    pub fn ok(&self, request: &Request) -> io::Result<()> {
        if self.extended { self.end(request) } else { self.simple(request, 0) }
    }

    /// Sends a simple reply without data.
    fn simple(&self, request: &Request, errno: u32) -> io::Result<()> {
        let mut bytes = [0; wire::SIMPLE_REPLY_BYTES];
        wire::put_simple(&mut bytes, errno, request.cookie);
        self.send(&bytes)
    }

    /// As [`Replier::simple`], gathered.
    fn put_simple(&self, out: &mut Outbox, request: &Request, errno: u32) {
        out.reserve(self.reply_bytes(0));
        wire::put_simple(out.free(wire::SIMPLE_REPLY_BYTES), errno, request.cookie);
    }

    /// Sends the last, empty chunk of a reply.
    pub fn end(&self, request: &Request) -> io::Result<()> {
        self.chunk(request, chunk::NONE, chunk::DONE, &[])
    }

    /// Sends one chunk.
    pub fn chunk(
        &self,
        request: &Request,
        kind: u16,
        flags: u16,
        payload: &[u8],
    ) -> io::Result<()> {
        let (cookie, offset, len) = (request.cookie, request.offset, payload.len() as u64);
        let mut bytes = vec![0; wire::chunk_bytes(self.extended) + payload.len()];
        let head = Chunk { flags, kind, cookie, offset, len }.put(&mut bytes, self.extended);
        bytes[head..].copy_from_slice(payload);
        self.send(&bytes)
    }

    /// Sends an error as the end of a reply.
    pub fn error(&self, request: &Request, errno: u32, text: &str) -> io::Result<()> {
        if !self.structured {
            return self.simple(request, errno);
        }
        self.chunk(request, chunk::ERROR, chunk::DONE, &error_payload(errno, text))
    }

    /// As [`Replier::error`], gathered.
    pub fn put_error(&self, out: &mut Outbox, request: &Request, errno: u32, text: &str) {
        if self.structured {
            self.put_chunk(out, request, chunk::ERROR, &error_payload(errno, text));
        } else {
            self.put_simple(out, request, errno);
        }
    }

    /// Sends an error with its offset on the disk, as the end of a structured reply.
    pub fn error_at(&self, request: &Request, errno: u32, text: &str, at: u64) -> io::Result<()> {
        let mut payload = error_payload(errno, text);
        payload.extend(at.to_be_bytes());
        self.chunk(request, chunk::ERROR_OFFSET, chunk::DONE, &payload)
    }
}

/// Payload of a hole chunk.
fn hole_payload(at: u64, len: u64) -> [u8; 12] {
    let mut payload = [0; 12];
    payload[..8].copy_from_slice(&at.to_be_bytes());
    // Pieces of reads are far below 4 GiB.
    payload[8..].copy_from_slice(&(len as u32).to_be_bytes());
    payload
}

/// Common start of all error chunks.
fn error_payload(errno: u32, text: &str) -> Vec<u8> {
    let text = &text.as_bytes()[..text.len().min(wire::STRING_MAX)];
    let mut payload = Vec::with_capacity(14 + text.len());
    payload.extend(errno.to_be_bytes());
    payload.extend((text.len() as u16).to_be_bytes());
    payload.extend(text);
    payload
}
