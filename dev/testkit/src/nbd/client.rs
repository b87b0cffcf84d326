//! A client that sends exactly what a test wants, valid or not.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub use vdkit_nbd_wire::OPTION_MAGIC;
pub use vdkit_nbd_wire::command::{
    BLOCK_STATUS, CACHE, DISC, FLUSH, READ, TRIM, WRITE, WRITE_ZEROES,
};
pub use vdkit_nbd_wire::errno::INVAL as EINVAL;
pub use vdkit_nbd_wire::request_flag::{DF, FAST_ZERO, FUA, NO_HOLE, PAYLOAD_LEN, REQ_ONE};
use vdkit_nbd_wire::{
    CHUNK_MAGIC, EXTENDED_CHUNK_MAGIC, EXTENDED_REQUEST_MAGIC, OPTION_REPLY_MAGIC, REQUEST_MAGIC,
    SIMPLE_REPLY_MAGIC, answer, chunk, info, option,
};

/// How replies come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Simple replies.
    Simple,
    /// Structured replies.
    Structured,
    /// Extended headers.
    Extended,
}

/// All of them.
pub const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

/// A reply to an option: its type and data.
pub type OptionReply = (u32, Vec<u8>);

/// One chunk of a reply, or a simple reply as one.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// Bit 0: the last one.
    pub flags: u16,
    /// Type of the chunk.
    pub kind: u16,
    /// The request's.
    pub cookie: u64,
    /// All behind the header.
    pub payload: Vec<u8>,
}

/// A connection. Every method panics where the server breaks the protocol.
#[derive(Debug)]
pub struct Client {
    /// The connection.
    pub socket: UnixStream,
    /// What was agreed on.
    pub style: Style,
    /// Bytes of the export.
    pub size: u64,
    /// Its transmission flags.
    pub flags: u16,
    cookie: u64,
}

fn be64(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().unwrap())
}

fn be32(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().unwrap())
}

fn be16(bytes: &[u8]) -> u16 {
    u16::from_be_bytes(bytes[..2].try_into().unwrap())
}

impl Client {
    /// Connects, and receives the server's greeting.
    pub fn dial(path: &Path) -> Self {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        socket.set_write_timeout(Some(Duration::from_secs(120))).unwrap();
        let mut client = Self { socket, style: Style::Simple, size: 0, flags: 0, cookie: 0 };
        let hello = client.take(18);
        assert_eq!(&hello[..16], b"NBDMAGICIHAVEOPT");
        assert_eq!(be16(&hello[16..]), 3);
        client
    }

    /// Connects and goes to the export of this name.
    pub fn open(path: &Path, name: &str, style: Style) -> Self {
        let mut client = Self::dial(path);
        client.put(&3u32.to_be_bytes());
        client.agree(style);
        client.go(name);
        client
    }

    /// Asks for a style of replies.
    pub fn agree(&mut self, style: Style) {
        let option = match style {
            Style::Simple => return,
            Style::Structured => option::STRUCTURED_REPLY,
            Style::Extended => option::EXTENDED_HEADERS,
        };
        assert_eq!(self.option(option, b""), vec![(answer::ACK, vec![])]);
        self.style = style;
    }

    /// Sends bytes.
    pub fn put(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).unwrap();
    }

    /// Receives so many bytes.
    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.socket.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Whether the server has closed the connection and sent nothing more.
    pub fn is_ended(&mut self) -> bool {
        let mut byte = [0];
        match self.socket.read(&mut byte) {
            Ok(got) => got == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// Sends an option.
    pub fn send_option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.put(&bytes);
    }

    /// One reply to an option.
    pub fn option_reply(&mut self, option: u32) -> OptionReply {
        let head = self.take(20);
        assert_eq!(be64(&head), OPTION_REPLY_MAGIC);
        assert_eq!(be32(&head[8..]), option);
        let data = self.take(be32(&head[16..]) as usize);
        (be32(&head[12..]), data)
    }

    /// An option and all replies up to the last one.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Vec<OptionReply> {
        self.send_option(option, data);
        let mut replies = Vec::new();
        loop {
            let (kind, data) = self.option_reply(option);
            let last = kind == answer::ACK || kind >= answer::ERROR;
            replies.push((kind, data));
            if last {
                return replies;
            }
        }
    }

    /// Ends the handshake with NBD_OPT_GO.
    pub fn go(&mut self, name: &str) {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend(0u16.to_be_bytes());
        let replies = self.option(option::GO, &data);
        assert_eq!(replies.last().unwrap().0, answer::ACK, "{replies:?}");
        let export =
            |(kind, data): &&OptionReply| *kind == answer::INFO && be16(data) == info::EXPORT;
        let (_, data) = replies.iter().find(export).unwrap();
        self.size = be64(&data[2..]);
        self.flags = be16(&data[10..]);
    }

    /// Sends a request and returns its cookie.
    pub fn request(&mut self, command: u16, flags: u16, at: u64, len: u64, payload: &[u8]) -> u64 {
        self.cookie += 1;
        let extended = self.style == Style::Extended;
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(at.to_be_bytes());
        if extended {
            bytes.extend(len.to_be_bytes());
        } else {
            bytes.extend((len as u32).to_be_bytes());
        }
        bytes.extend(payload);
        self.put(&bytes);
        self.cookie
    }

    /// The next chunk or simple reply. Simple replies have no length: `reads` tells that of the
    /// request with a cookie.
    pub fn chunk(&mut self, reads: impl Fn(u64) -> usize) -> Chunk {
        let magic = be32(&self.take(4));
        match (self.style, magic) {
            (Style::Simple | Style::Structured, SIMPLE_REPLY_MAGIC) => {
                let head = self.take(12);
                let (error, cookie) = (be32(&head), be64(&head[4..]));
                let read = if error == 0 { reads(cookie) } else { 0 };
                assert!(self.style == Style::Simple || read == 0, "a read's reply in one piece");
                let payload = self.take(read);
                let (kind, payload) = match error {
                    0 => (0, payload),
                    error => (chunk::ERROR, error.to_be_bytes().into()),
                };
                Chunk { flags: chunk::DONE, kind, cookie, payload }
            }
            (Style::Structured, CHUNK_MAGIC) => {
                let head = self.take(16);
                let payload = self.take(be32(&head[12..]) as usize);
                let (flags, kind) = (be16(&head), be16(&head[2..]));
                Chunk { flags, kind, cookie: be64(&head[4..]), payload }
            }
            (Style::Extended, EXTENDED_CHUNK_MAGIC) => {
                let head = self.take(28);
                let payload = self.take(be64(&head[20..]) as usize);
                let (flags, kind) = (be16(&head), be16(&head[2..]));
                Chunk { flags, kind, cookie: be64(&head[4..]), payload }
            }
            (style, magic) => panic!("{magic:#x} as a {style:?} reply"),
        }
    }

    /// All chunks of the answer to the one request that is under way.
    pub fn answer(&mut self, cookie: u64, reads: usize) -> Result<Vec<Chunk>, u32> {
        let mut chunks = Vec::new();
        loop {
            let chunk = self.chunk(|_| reads);
            assert_eq!(chunk.cookie, cookie);
            let last = chunk.flags & chunk::DONE != 0;
            if chunk.kind & chunk::ERROR_BIT != 0 {
                assert!(last);
                return Err(be32(&chunk.payload));
            }
            chunks.push(chunk);
            if last {
                return Ok(chunks);
            }
        }
    }

    /// A request without data in its answer.
    pub fn run(
        &mut self,
        command: u16,
        flags: u16,
        at: u64,
        len: u64,
        payload: &[u8],
    ) -> Result<(), u32> {
        let flags = if self.style == Style::Extended && command == WRITE {
            flags | PAYLOAD_LEN
        } else {
            flags
        };
        let cookie = self.request(command, flags, at, len, payload);
        self.answer(cookie, 0).map(drop)
    }

    /// Writes; the server's error otherwise.
    pub fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), u32> {
        self.run(WRITE, 0, at, bytes.len() as u64, bytes)
    }

    /// Reads.
    pub fn read(&mut self, at: u64, len: usize) -> Result<Vec<u8>, u32> {
        self.read_with(0, at, len).map(|(bytes, _)| bytes)
    }

    /// The bytes, and of how many data chunks they were made.
    pub fn read_with(&mut self, flags: u16, at: u64, len: usize) -> Result<(Vec<u8>, usize), u32> {
        let cookie = self.request(READ, flags, at, len as u64, b"");
        let chunks = self.answer(cookie, len)?;
        let mut bytes = vec![0xee; len];
        let mut covered = 0;
        let mut data = 0;
        for chunk in chunks {
            match chunk.kind {
                chunk::NONE if self.style == Style::Simple => {
                    bytes.copy_from_slice(&chunk.payload);
                    covered = len;
                }
                chunk::NONE => {}
                chunk::OFFSET_DATA => {
                    let from = (be64(&chunk.payload) - at) as usize;
                    let piece = &chunk.payload[8..];
                    bytes[from..from + piece.len()].copy_from_slice(piece);
                    covered += piece.len();
                    data += 1;
                }
                chunk::OFFSET_HOLE => {
                    let from = (be64(&chunk.payload) - at) as usize;
                    let zeroes = be32(&chunk.payload[8..]) as usize;
                    bytes[from..from + zeroes].fill(0);
                    covered += zeroes;
                }
                kind => panic!("chunk {kind}"),
            }
        }
        assert_eq!(covered, len);
        Ok((bytes, data))
    }

    /// Length and flags of the runs of the first context, and of how many contexts there were some.
    pub fn status(&mut self, flags: u16, at: u64, len: u64) -> Result<Vec<Vec<(u64, u64)>>, u32> {
        let cookie = self.request(BLOCK_STATUS, flags, at, len, b"");
        self.status_answer(cookie)
    }

    /// The answer to a block status request.
    pub fn status_answer(&mut self, cookie: u64) -> Result<Vec<Vec<(u64, u64)>>, u32> {
        let mut contexts = Vec::new();
        for chunk in self.answer(cookie, 0)? {
            let runs = match chunk.kind {
                chunk::NONE => continue,
                chunk::BLOCK_STATUS => {
                    let runs = chunk.payload[4..].chunks(8);
                    runs.map(|run| (be32(run).into(), be32(&run[4..]).into())).collect()
                }
                chunk::BLOCK_STATUS_EXT => {
                    let count = be32(&chunk.payload[4..]) as usize;
                    let runs: Vec<_> = chunk.payload[8..]
                        .chunks(16)
                        .map(|run| (be64(run), be64(&run[8..])))
                        .collect();
                    assert_eq!(runs.len(), count);
                    runs
                }
                kind => panic!("chunk {kind}"),
            };
            contexts.push(runs);
        }
        Ok(contexts)
    }

    /// Chooses metadata contexts; returns their names.
    pub fn contexts(
        &mut self,
        option: u32,
        name: &str,
        queries: &[&str],
    ) -> Result<Vec<String>, u32> {
        let mut data = (name.len() as u32).to_be_bytes().to_vec();
        data.extend(name.as_bytes());
        data.extend((queries.len() as u32).to_be_bytes());
        for query in queries {
            data.extend((query.len() as u32).to_be_bytes());
            data.extend(query.as_bytes());
        }
        let mut replies = self.option(option, &data);
        let (last, _) = replies.pop().unwrap();
        if last != answer::ACK {
            return Err(last);
        }
        Ok(replies.iter().map(|(_, data)| String::from_utf8(data[4..].to_vec()).unwrap()).collect())
    }
}
