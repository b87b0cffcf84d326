//! Replies: simple, in chunks, or with extended headers, as was agreed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::channel::Channel;
use crate::wire::{self, Chunk, Request, chunk};

/// A thread sends what it has gathered when it has so much.
const GATHER_BYTES: usize = 256 << 10;

/// The leader waits at most so long for another thread that sends.
const BRIEFLY: Duration = Duration::from_millis(2);

/// Replies of one thread that are not sent yet.
#[derive(Default)]
pub struct Outbox {
    /// Zeroed once; only `buf[..used]` means something.
    buf: Vec<u8>,
    used: usize,
    /// A part of what was here is still to be sent: see [`Replier::send_all_ready`].
    torn: bool,
}

impl Outbox {
    /// Room for a payload behind a header of `head` bytes, at the place where
    /// [`Replier::put_data`] expects it.
    pub fn data_room(&mut self, head: usize, len: usize) -> &mut [u8] {
        let start = self.used + head;
        &mut self.buf[start..start + len]
    }

    fn free(&mut self, len: usize) -> &mut [u8] {
        let start = self.used;
        self.used += len;
        &mut self.buf[start..start + len]
    }

    /// Makes room for so many bytes.
    fn reserve(&mut self, len: usize) {
        if self.buf.len() < self.used + len {
            self.buf.resize((self.used + len).max(GATHER_BYTES), 0);
        }
    }
}

/// What the thread that sends has to itself.
#[derive(Default)]
struct Sending {
    /// The end of what was sent in part, which goes out before anything else.
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
    /// Replies of this kind to this channel.
    pub fn new(channel: Arc<dyn Channel>, structured: bool, extended: bool) -> Self {
        Self {
            channel,
            structured,
            extended,
            sending: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Nothing is sent from now on.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Bytes before the data of a read's reply.
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
            // A reply may be cut in the middle: nothing after it would be understood.
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

    /// Sends what was gathered.
    pub fn send_all(&self, out: &mut Outbox) -> io::Result<()> {
        if out.used == 0 && !out.torn {
            return Ok(());
        }
        let used = std::mem::take(&mut out.used);
        out.torn = false;
        self.send(&out.buf[..used])
    }

    /// As [`Replier::send_all`], for the leader, which must not wait for a client that does not read:
    /// such a client may be sending, and read when somebody has received that. Where it returns
    /// `false`, the caller gives the lead away and calls [`Replier::send_all`].
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

    /// Bytes that a reply takes, about.
    fn reply_bytes(&self, payload: usize) -> usize {
        payload + self.head() + wire::EXTENDED_CHUNK_BYTES
    }

    /// Makes room for a reply with `payload` bytes, sending what was gathered where it must.
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

    /// Finishes a read's reply whose data stand in [`Outbox::data_room`].
    pub fn put_data(&self, out: &mut Outbox, request: &Request, len: usize) {
        if self.structured {
            self.put_data_chunk(out, request, request.offset, len, chunk::DONE);
        } else {
            wire::put_simple(&mut out.buf[out.used..], 0, request.cookie);
            out.used += wire::SIMPLE_REPLY_BYTES + len;
        }
    }

    fn put_data_chunk(&self, out: &mut Outbox, request: &Request, at: u64, len: usize, flags: u16) {
        let head = self.put_chunk(out, request, chunk::OFFSET_DATA, flags, 8 + len as u64);
        let start = out.used + head;
        out.buf[start..start + 8].copy_from_slice(&at.to_be_bytes());
        out.used = start + 8 + len;
    }

    /// Writes a chunk's header behind what was gathered, without counting it.
    fn put_chunk(
        &self,
        out: &mut Outbox,
        request: &Request,
        kind: u16,
        flags: u16,
        len: u64,
    ) -> usize {
        let (cookie, offset) = (request.cookie, request.offset);
        let header = Chunk { flags, kind, cookie, offset, len };
        header.put(&mut out.buf[out.used..], self.extended)
    }

    /// A chunk that says: zeroes.
    fn put_hole(&self, out: &mut Outbox, request: &Request, at: u64, len: u64, flags: u16) {
        let head = self.put_chunk(out, request, chunk::OFFSET_HOLE, flags, 12);
        let start = out.used + head;
        out.buf[start..start + 8].copy_from_slice(&at.to_be_bytes());
        // Pieces of reads are far below 4 GiB.
        out.buf[start + 8..start + 12].copy_from_slice(&(len as u32).to_be_bytes());
        out.used = start + 12;
    }

    /// The reply to a read of nothing but zeroes.
    pub fn put_zero(&self, out: &mut Outbox, request: &Request) {
        if self.structured {
            self.put_hole(out, request, request.offset, request.len, chunk::DONE);
        } else {
            let len = request.len as usize;
            out.data_room(self.head(), len).fill(0);
            self.put_data(out, request, len);
        }
    }

    /// Sends what was read at an offset, as a simple reply or a chunk, which may be the last one.
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

    /// Sends a chunk that says: zeroes.
    pub fn hole(&self, request: &Request, at: u64, len: u64, last: bool) -> io::Result<()> {
        let mut payload = [0; 12];
        payload[..8].copy_from_slice(&at.to_be_bytes());
        // Pieces of reads are far below 4 GiB.
        payload[8..].copy_from_slice(&(len as u32).to_be_bytes());
        let flags = if last { chunk::DONE } else { 0 };
        self.chunk(request, chunk::OFFSET_HOLE, flags, &payload)
    }

    /// The reply to a request that went well and answers nothing else. There are at most as many as
    /// a leader receives requests at once, so they are never sent to make room.
    pub fn put_ok(&self, out: &mut Outbox, request: &Request) {
        out.reserve(self.reply_bytes(0));
        if self.extended {
            let head = self.put_chunk(out, request, chunk::NONE, chunk::DONE, 0);
            out.used += head;
        } else {
            let cookie = request.cookie;
            wire::put_simple(out.free(wire::SIMPLE_REPLY_BYTES), 0, cookie);
        }
    }

    /// Sends the reply to a request that went well.
    pub fn ok(&self, request: &Request) -> io::Result<()> {
        let mut bytes = [0; wire::EXTENDED_CHUNK_BYTES];
        if self.extended {
            return self.end(request);
        }
        wire::put_simple(&mut bytes, 0, request.cookie);
        self.send(&bytes[..wire::SIMPLE_REPLY_BYTES])
    }

    /// Sends the last chunk of a reply, empty.
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
            let mut bytes = [0; wire::SIMPLE_REPLY_BYTES];
            wire::put_simple(&mut bytes, errno, request.cookie);
            return self.send(&bytes);
        }
        self.chunk(request, chunk::ERROR, chunk::DONE, &error_payload(errno, text))
    }

    /// As [`Replier::error`], gathered.
    pub fn put_error(&self, out: &mut Outbox, request: &Request, errno: u32, text: &str) {
        let payload = error_payload(errno, text);
        out.reserve(self.reply_bytes(payload.len()));
        if self.structured {
            let len = payload.len() as u64;
            out.used += self.put_chunk(out, request, chunk::ERROR, chunk::DONE, len);
            out.free(payload.len()).copy_from_slice(&payload);
        } else {
            wire::put_simple(out.free(wire::SIMPLE_REPLY_BYTES), errno, request.cookie);
        }
    }

    /// Sends an error as the end of a reply in chunks, and from which offset of the disk on it holds.
    pub fn error_at(&self, request: &Request, errno: u32, text: &str, at: u64) -> io::Result<()> {
        let mut payload = error_payload(errno, text);
        payload.extend(at.to_be_bytes());
        self.chunk(request, chunk::ERROR_OFFSET, chunk::DONE, &payload)
    }
}

/// What all chunks about errors begin with.
fn error_payload(errno: u32, text: &str) -> Vec<u8> {
    let text = &text.as_bytes()[..text.len().min(wire::STRING_MAX as usize)];
    let mut payload = Vec::with_capacity(14 + text.len());
    payload.extend(errno.to_be_bytes());
    payload.extend((text.len() as u16).to_be_bytes());
    payload.extend(text);
    payload
}
