//! A stream as a storage that is read once, in order, by any number of threads.

use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use vdkit_block::{Error, HostOffset, IoAction, Result, Storage, StorageCaps};

use crate::unpack::ByteStream;

/// Bytes of the end that are kept for format probing.
const TAIL_BYTES: usize = 512;

#[derive(Debug)]
struct State {
    stream: ByteStream,
    position: u64,
    /// The stream ended at `position`.
    ended: bool,
    failed: bool,
    tail: Vec<u8>,
}

impl State {
    /// Keeps the last bytes read.
    fn keep_tail(&mut self, read: &[u8]) {
        if read.len() >= TAIL_BYTES {
            self.tail.clear();
            self.tail.extend(&read[read.len() - TAIL_BYTES..]);
        } else {
            self.tail.extend(read);
            let surplus = self.tail.len().saturating_sub(TAIL_BYTES);
            self.tail.drain(..surplus);
        }
    }
}

/// A stream whose bytes are each read once. A read waits until all earlier bytes are read; reading
/// a byte again is an error. Its length is the declared one: bytes beyond the stream's end do not
/// exist.
#[derive(Debug)]
pub struct InPipe {
    name: String,
    state: Mutex<State>,
    moved: Condvar,
}

impl InPipe {
    /// Wraps a stream.
    pub fn new(stream: ByteStream) -> Self {
        let name = stream.name().to_owned();
        let state = State { stream, position: 0, ended: false, failed: false, tail: Vec::new() };
        Self { name, state: Mutex::new(state), moved: Condvar::new() }
    }

    /// The stream's length, once it has ended.
    pub fn end(&self) -> Option<u64> {
        let state = self.state.lock();
        state.ended.then_some(state.position)
    }

    /// Whether the stream ends at the current position.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn at_end(&self) -> Result<bool> {
        let mut state = self.state.lock();
        if !state.ended {
            let got = state.stream.read_full(&mut [0]);
            state.ended = matches!(got, Ok(0));
            // A byte that was read is lost, so later reads must fail.
            state.failed |= !state.ended;
            self.moved.notify_all();
            got?;
        }
        Ok(state.ended)
    }

    /// The last bytes read, up to 512.
    pub fn tail(&self) -> Vec<u8> {
        self.state.lock().tail.clone()
    }

    /// This stream as a storage of `len` bytes.
    pub fn window(self: &Arc<Self>, len: u64) -> Arc<dyn Storage> {
        Arc::new(Window { pipe: self.clone(), len })
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> Result<usize> {
        let mut state = self.state.lock();
        while state.position < offset && !state.ended && !state.failed {
            self.moved.wait(&mut state);
        }
        let fail = |why: &str| {
            let source = std::io::Error::other(why.to_owned());
            Err(Error::io(&self.name, IoAction::Read, offset, buf.len() as u64, source))
        };
        if state.failed {
            return fail("an earlier read of this stream failed");
        }
        if offset < state.position {
            return fail("the bytes of a stream can be read only once, in their order");
        }
        if state.ended {
            return Ok(0);
        }
        let read = state.stream.read_full(buf);
        match &read {
            Ok(got) => {
                state.position += *got as u64;
                state.ended = *got < buf.len();
                state.keep_tail(&buf[..*got]);
            }
            Err(_) => state.failed = true,
        }
        drop(state);
        self.moved.notify_all();
        read
    }
}

/// See [`InPipe::window`].
#[derive(Debug)]
struct Window {
    pipe: Arc<InPipe>,
    len: u64,
}

impl Storage for Window {
    fn name(&self) -> &str {
        &self.pipe.name
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps { sequential: true, ..StorageCaps::default() }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.len)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let there = self.len.saturating_sub(offset.0).min(buf.len() as u64) as usize;
        self.pipe.read(&mut buf[..there], offset.0)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use vdkit_testbase::Watched;

    use super::*;

    fn pipe(bytes: Vec<u8>) -> Arc<InPipe> {
        Arc::new(InPipe::new(ByteStream::new("pipe", Cursor::new(bytes))))
    }

    #[test]
    fn threads_get_their_pieces_in_any_order_of_asking() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
        let pipe = pipe(bytes.clone());
        let window = pipe.window(1 << 20);
        std::thread::scope(|scope| {
            for first in (0..4u64).rev() {
                let (window, bytes) = (&window, &bytes);
                scope.spawn(move || {
                    for piece in (first..26).step_by(4) {
                        let at = piece * 4096;
                        let mut buf = [0; 4096];
                        let got = window.read_up_to(&mut buf, HostOffset(at)).unwrap();
                        let wanted = bytes.get(at as usize..).unwrap_or_default();
                        assert_eq!(&buf[..got], &wanted[..wanted.len().min(4096)]);
                    }
                });
            }
        });
        assert_eq!(pipe.end(), Some(100_000));
        assert_eq!(pipe.tail(), bytes[100_000 - 512..]);
    }

    #[test]
    fn a_byte_is_read_once() {
        let window = pipe(vec![1; 1000]).window(1000);
        let mut buf = [0; 100];
        window.read_at(&mut buf, HostOffset(0)).unwrap();
        let error = window.read_at(&mut buf, HostOffset(50)).unwrap_err().to_string();
        assert!(error.contains("only once"), "{error}");
    }

    /// Readers waiting for bytes after a failure get an error.
    #[test]
    fn a_failure_wakes_waiting_readers() {
        struct Broken;
        impl std::io::Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
                Err(std::io::Error::other("broken"))
            }
        }
        let watched = Arc::new(Watched::default());
        let pipe = Arc::new(InPipe::new(ByteStream::new("pipe", Broken)));
        let (tell, told) = std::sync::mpsc::channel();
        let (later, waits) = (pipe.window(1000), watched.clone());
        // Not joined: it would never end if nothing woke it.
        std::thread::spawn(move || {
            waits.is_me();
            tell.send(later.read_up_to(&mut [0; 10], HostOffset(100)).is_err()).unwrap();
        });
        watched.until_it_waits();
        assert!(pipe.window(1000).read_up_to(&mut [0; 100], HostOffset(0)).is_err());
        assert_eq!(told.recv_timeout(std::time::Duration::from_secs(60)), Ok(true));
    }
}
