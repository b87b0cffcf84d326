//! A server in memory that follows the protocol, except where a test says otherwise.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vdkit_block::bytes::{be16, be32, be64};

use crate::wire::{self, answer, chunk, command, flag, option};

/// All that a server can do.
pub(super) const FLAGS: u16 = flag::HAS_FLAGS
    | flag::SEND_FLUSH
    | flag::SEND_FUA
    | flag::SEND_TRIM
    | flag::SEND_WRITE_ZEROES
    | flag::CAN_MULTI_CONN;

#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) flags: u16,
    pub(super) command: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) len: u32,
}

/// What a server does with a request.
pub(super) enum Act {
    /// As the protocol says.
    Follow,
    /// These bytes are the reply.
    Send(Vec<u8>),
    /// These bytes are the reply; then the connection ends.
    SendAndEnd(Vec<u8>),
    /// The connection ends.
    End,
    /// No reply.
    Ignore,
}

pub(super) type Script = Box<dyn Fn(&Asked) -> Act + Send + Sync>;

pub(super) struct Setup {
    pub(super) flags: u16,
    pub(super) structured: bool,
    /// Bytes of the option GO's block sizes: minimum, preferred, maximum.
    pub(super) sizes: Option<[u32; 3]>,
    pub(super) script: Script,
    /// Names that it lists. It describes them, each as of 7 bytes, and opens none of them.
    pub(super) exports: Vec<Vec<u8>>,
}

impl Default for Setup {
    fn default() -> Self {
        let script = Box::new(|_: &Asked| Act::Follow);
        let exports = [&b"disk"[..], b"other"].map(<[u8]>::to_vec).to_vec();
        Self { flags: FLAGS, structured: true, sizes: None, script, exports }
    }
}

/// A running server. It stops when it is dropped.
pub(super) struct Server {
    pub(super) disk: Arc<Mutex<Vec<u8>>>,
    pub(super) requests: Arc<Mutex<Vec<Asked>>>,
    sockets: Arc<Mutex<Vec<UnixStream>>>,
    /// Those that the client must have ended before it connects again, and how often it had not.
    ended: Arc<Mutex<Vec<UnixStream>>>,
    pub(super) overlaps: Arc<AtomicU64>,
    /// Further connections end at once.
    pub(super) is_full: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    /// How often connections were cut. A session from before a cut changes nothing any more.
    cuts: Arc<AtomicU64>,
    path: PathBuf,
    _folder: Option<tempfile::TempDir>,
}

impl Server {
    pub(super) fn start(bytes: usize, setup: Setup) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let mut server = Self::start_at(path, Arc::new(Mutex::new(vec![0; bytes])), setup);
        server._folder = Some(folder);
        server
    }

    pub(super) fn start_at(path: PathBuf, disk: Arc<Mutex<Vec<u8>>>, setup: Setup) -> Self {
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let server = Self {
            disk,
            requests: Arc::default(),
            sockets: Arc::default(),
            ended: Arc::default(),
            overlaps: Arc::default(),
            is_full: Arc::default(),
            stop: Arc::default(),
            cuts: Arc::default(),
            path,
            _folder: None,
        };
        let (setup, disk, requests) =
            (Arc::new(setup), server.disk.clone(), server.requests.clone());
        let (sockets, stop) = (server.sockets.clone(), server.stop.clone());
        let (cuts, is_full) = (server.cuts.clone(), server.is_full.clone());
        let (ended, overlaps) = (server.ended.clone(), server.overlaps.clone());
        std::thread::spawn(move || {
            for socket in listener.incoming().map_while(Result::ok) {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                if is_full.load(Ordering::SeqCst) {
                    continue;
                }
                let open = ended.lock().drain(..).filter(|old| !is_left(old)).count();
                overlaps.fetch_add(open as u64, Ordering::SeqCst);
                sockets.lock().push(socket.try_clone().unwrap());
                let (setup, disk, requests) = (setup.clone(), disk.clone(), requests.clone());
                let (cuts, since) = (cuts.clone(), cuts.load(Ordering::SeqCst));
                let session = Session { socket, setup, disk, requests, cuts, since };
                std::thread::spawn(move || session.run());
            }
        });
        server
    }

    pub(super) fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.path.display())
    }

    pub(super) fn count(&self, command: u16) -> usize {
        self.requests.lock().iter().filter(|asked| asked.command == command).count()
    }

    /// Ends all connections, and the server.
    pub(super) fn kill(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.path);
        let _ = std::fs::remove_file(&self.path);
        self.cut();
    }

    pub(super) fn connections(&self) -> usize {
        self.sockets.lock().len()
    }

    /// Ends one connection. The client must then end all others.
    pub(super) fn cut_one(&self) {
        let mut ended = self.ended.lock();
        ended.append(&mut self.sockets.lock());
        let first = ended.remove(0);
        drop(ended);
        let _ = first.shutdown(std::net::Shutdown::Both);
    }

    /// Ends all connections.
    pub(super) fn cut(&self) {
        self.crash(|_| ());
    }

    /// Ends all connections, after a change of the disk.
    pub(super) fn crash(&self, change: impl FnOnce(&mut Vec<u8>)) {
        // Under the lock, so that no change of an old session comes after it.
        let mut disk = self.disk.lock();
        change(&mut disk);
        self.cuts.fetch_add(1, Ordering::SeqCst);
        drop(disk);
        for socket in self.sockets.lock().drain(..) {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Whether the client has ended a connection.
fn is_left(socket: &UnixStream) -> bool {
    let mut asked = [PollFd::new(socket, PollFlags::RDHUP)];
    poll(&mut asked, Some(&Timespec::default())).unwrap() > 0
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Session {
    socket: UnixStream,
    setup: Arc<Setup>,
    disk: Arc<Mutex<Vec<u8>>>,
    requests: Arc<Mutex<Vec<Asked>>>,
    cuts: Arc<AtomicU64>,
    /// The number of cuts when the session began.
    since: u64,
}

pub(super) fn simple(cookie: u64, error: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = wire::SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend(error.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(data);
    bytes
}

pub(super) fn piece(cookie: u64, flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = wire::CHUNK_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes
}

pub(super) fn data(cookie: u64, flags: u16, offset: u64, bytes: &[u8]) -> Vec<u8> {
    piece(cookie, flags, chunk::OFFSET_DATA, &[&offset.to_be_bytes()[..], bytes].concat())
}

pub(super) fn hole(cookie: u64, flags: u16, offset: u64, len: u32) -> Vec<u8> {
    let payload = [&offset.to_be_bytes()[..], &len.to_be_bytes()].concat();
    piece(cookie, flags, chunk::OFFSET_HOLE, &payload)
}

pub(super) fn error(cookie: u64, flags: u16, errno: u32, message: &str) -> Vec<u8> {
    let mut payload = errno.to_be_bytes().to_vec();
    payload.extend((message.len() as u16).to_be_bytes());
    payload.extend(message.as_bytes());
    piece(cookie, flags, chunk::ERROR_BIT + 1, &payload)
}

pub(super) fn status(cookie: u64, flags: u16, id: u32, runs: &[(u32, u32)]) -> Vec<u8> {
    let mut payload = id.to_be_bytes().to_vec();
    for (len, state) in runs {
        payload.extend(len.to_be_bytes());
        payload.extend(state.to_be_bytes());
    }
    piece(cookie, flags, chunk::BLOCK_STATUS, &payload)
}

impl Session {
    fn take(&mut self, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.socket.read_exact(&mut bytes).ok().map(|()| bytes)
    }

    fn run(mut self) {
        let _ = self.session();
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
    }

    fn session(&mut self) -> Option<()> {
        self.socket.write_all(b"NBDMAGICIHAVEOPT\0\x03").ok()?;
        self.take(4)?;
        while !self.option()? {}
        loop {
            let head = self.take(wire::REQUEST_BYTES)?;
            assert_eq!(be32(&head, 0), wire::REQUEST_MAGIC);
            let (flags, command) = (be16(&head, 4), be16(&head, 6));
            let (cookie, offset, len) = (be64(&head, 8), be64(&head, 16), be32(&head, 24));
            let asked = Asked { flags, command, cookie, offset, len };
            let payload =
                if command == command::WRITE { self.take(len as usize)? } else { Vec::new() };
            self.requests.lock().push(asked);
            if command == command::DISC {
                return None;
            }
            let reply = match (self.setup.script)(&asked) {
                Act::Follow => self.follow(&asked, &payload),
                Act::Send(bytes) => bytes,
                Act::Ignore => continue,
                Act::End => return None,
                Act::SendAndEnd(bytes) => {
                    let _ = self.socket.write_all(&bytes);
                    return None;
                }
            };
            self.socket.write_all(&reply).ok()?;
        }
    }

    fn answer(&mut self, option: u32, kind: u32, data: &[u8]) -> Option<()> {
        let mut bytes = wire::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.socket.write_all(&bytes).ok()
    }

    /// Whether the negotiation is over.
    fn option(&mut self) -> Option<bool> {
        let head = self.take(16)?;
        let option = be32(&head, 8);
        let data = self.take(be32(&head, 12) as usize)?;
        match option {
            option::STRUCTURED_REPLY if self.setup.structured => {
                self.answer(option, answer::ACK, b"")?;
            }
            option::SET_META_CONTEXT => {
                for (id, name) in [(7u32, "base:allocation"), (9, "x:other")] {
                    if data.windows(name.len()).any(|window| window == name.as_bytes()) {
                        let data = [&id.to_be_bytes()[..], name.as_bytes()].concat();
                        self.answer(option, answer::META_CONTEXT, &data)?;
                    }
                }
                self.answer(option, answer::ACK, b"")?;
            }
            option::LIST => {
                for name in &self.setup.exports.clone() {
                    let data = [&(name.len() as u32).to_be_bytes()[..], name].concat();
                    self.answer(option, answer::SERVER, &data)?;
                }
                self.answer(option, answer::ACK, b"")?;
            }
            option::INFO => {
                let name = &data[4..][..be32(&data, 0) as usize];
                if !self.setup.exports.iter().any(|one| one == name) {
                    self.answer(option, answer::UNKNOWN, b"who?")?;
                    return Some(false);
                }
                let mut info = 0u16.to_be_bytes().to_vec();
                info.extend(7u64.to_be_bytes());
                info.extend(self.setup.flags.to_be_bytes());
                self.answer(option, answer::INFO, &info)?;
                self.answer(option, answer::ACK, b"")?;
            }
            option::GO if !data[4..].starts_with(b"disk") => {
                self.answer(option, answer::UNKNOWN, b"who?")?;
            }
            option::GO => {
                let bytes = self.disk.lock().len() as u64;
                let mut info = 0u16.to_be_bytes().to_vec();
                info.extend(bytes.to_be_bytes());
                info.extend(self.setup.flags.to_be_bytes());
                self.answer(option, answer::INFO, &info)?;
                if let Some(sizes) = self.setup.sizes {
                    let mut info = 3u16.to_be_bytes().to_vec();
                    sizes.iter().for_each(|size| info.extend(size.to_be_bytes()));
                    self.answer(option, answer::INFO, &info)?;
                }
                self.answer(option, answer::ACK, b"")?;
                return Some(true);
            }
            _ => self.answer(option, answer::UNSUPPORTED, b"")?,
        }
        Some(false)
    }

    fn follow(&self, asked: &Asked, payload: &[u8]) -> Vec<u8> {
        let mut disk = self.disk.lock();
        if self.cuts.load(Ordering::SeqCst) != self.since {
            let _ = self.socket.shutdown(std::net::Shutdown::Both);
            return Vec::new();
        }
        let range = asked.offset as usize..(asked.offset + u64::from(asked.len)) as usize;
        if let Some(sizes) = self.setup.sizes {
            let minimum = u64::from(sizes[0]);
            assert!(asked.offset.is_multiple_of(minimum), "{asked:?}");
            assert!(u64::from(asked.len).is_multiple_of(minimum), "{asked:?}");
        }
        match asked.command {
            command::READ if self.setup.structured => {
                data(asked.cookie, chunk::DONE, asked.offset, &disk[range])
            }
            command::READ => simple(asked.cookie, 0, &disk[range]),
            command::BLOCK_STATUS => status(asked.cookie, chunk::DONE, 7, &[(asked.len, 0)]),
            command => {
                match command {
                    command::WRITE => disk[range].copy_from_slice(payload),
                    command::WRITE_ZEROES => disk[range].fill(0),
                    _ => {}
                }
                simple(asked.cookie, 0, b"")
            }
        }
    }
}
