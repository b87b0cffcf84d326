//! A storage written in order: standard output, or a part of a file that is hashed.

use std::fmt;
use std::io::{self, Write};

use parking_lot::Mutex;
use vdkit_block::{Error, HostOffset, IoAction, Result, Storage, StorageCaps, ZeroMode};

use crate::stdin::is_interruption;

/// Zeroes for one write.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

struct State {
    to: Box<dyn Write + Send>,
    /// Bytes written.
    position: u64,
    /// Total length.
    len: u64,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { position, len, .. } = self;
        f.debug_struct("State").field("position", position).field("len", len).finish()
    }
}

/// A pipe or another sequential output. Writes must be in ascending order; gaps become zeroes.
/// [`OutPipe::finish`] writes the zeroes at the end.
#[derive(Debug)]
pub struct OutPipe {
    name: String,
    state: Mutex<State>,
}

impl OutPipe {
    /// Writes to `to`; `name` is for messages.
    pub fn new(name: impl Into<String>, to: impl Write + Send + 'static) -> Self {
        let state = State { to: Box::new(to), position: 0, len: 0 };
        Self { name: name.into(), state: Mutex::new(state) }
    }

    /// Writes the missing zeroes at the end, and returns the total bytes written.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn finish(&self) -> Result<u64> {
        let mut state = self.state.lock();
        let len = state.len;
        self.fill_up_to(&mut state, len)?;
        Ok(state.position)
    }

    fn fill_up_to(&self, state: &mut State, end: u64) -> Result<()> {
        while state.position < end {
            let run = (end - state.position).min(ZEROES.len() as u64) as usize;
            self.put(state, &ZEROES[..run])?;
        }
        Ok(())
    }

    fn put(&self, state: &mut State, bytes: &[u8]) -> Result<()> {
        let fail = |error: io::Error| {
            if is_interruption(&error) {
                return Error::Interrupted;
            }
            let (at, len) = (state.position, bytes.len() as u64);
            Error::io(&self.name, IoAction::Write, at, len, error)
        };
        state.to.write_all(bytes).map_err(fail)?;
        state.position += bytes.len() as u64;
        state.len = state.len.max(state.position);
        Ok(())
    }

    fn passed(&self, action: IoAction, offset: u64, len: u64, position: u64) -> Error {
        let why = format!("a pipe takes bytes in their order, and {position:#x} have left already");
        Error::io(&self.name, action, offset, len, io::Error::other(why))
    }
}

impl Storage for OutPipe {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps { writable: true, growable: true, sequential: true, ..StorageCaps::default() }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.state.lock().len)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let why = io::Error::other("what has left through a pipe cannot be read back");
        Err(Error::io(&self.name, IoAction::Read, offset.0, buf.len() as u64, why))
    }

    fn write_at(&self, buf: &[u8], offset: HostOffset) -> Result<()> {
        let mut state = self.state.lock();
        if offset.0 < state.position {
            let len = buf.len() as u64;
            return Err(self.passed(IoAction::Write, offset.0, len, state.position));
        }
        self.fill_up_to(&mut state, offset.0)?;
        self.put(&mut state, buf)
    }

    fn write_zeroes(&self, offset: HostOffset, len: u64, _mode: ZeroMode) -> Result<()> {
        let mut state = self.state.lock();
        if offset.0 < state.position {
            return Err(self.passed(IoAction::WriteZeroes, offset.0, len, state.position));
        }
        state.len = state.len.max(offset.0.saturating_add(len));
        Ok(())
    }

    fn discard(&self, _: HostOffset, _: u64) -> Result<()> {
        Ok(())
    }

    fn allocate(&self, offset: HostOffset, len: u64) -> Result<()> {
        let mut state = self.state.lock();
        state.len = state.len.max(offset.0.saturating_add(len));
        Ok(())
    }

    /// A pipe has nothing to make durable.
    fn sync(&self) -> Result<()> {
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<()> {
        let mut state = self.state.lock();
        if len < state.position {
            return Err(self.passed(IoAction::Resize, len, 0, state.position));
        }
        state.len = len;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    #[test]
    fn gaps_become_zeroes_and_nothing_goes_back() {
        let (mut reader, writer) = io::pipe().unwrap();
        let pipe = OutPipe::new("-", File::from(std::os::fd::OwnedFd::from(writer)));
        pipe.set_len(100_000).unwrap();
        let read = std::thread::spawn(move || {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).unwrap();
            all
        });
        pipe.write_at(b"abc", HostOffset(10)).unwrap();
        pipe.write_zeroes(HostOffset(13), 70_000, ZeroMode::MayUnmap).unwrap();
        pipe.write_at(b"d", HostOffset(80_000)).unwrap();
        assert!(pipe.write_at(b"e", HostOffset(79_999)).is_err());
        assert!(pipe.read_up_to(&mut [0], HostOffset(0)).is_err());
        assert!(pipe.set_len(5).is_err());
        assert_eq!(pipe.finish().unwrap(), 100_000);
        drop(pipe);
        let all = read.join().unwrap();
        let mut wanted = vec![0; 100_000];
        wanted[10..13].copy_from_slice(b"abc");
        wanted[80_000] = b'd';
        assert_eq!(all, wanted);
    }

    #[test]
    fn a_reader_that_went_away_is_an_error() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let pipe = OutPipe::new("-", File::from(std::os::fd::OwnedFd::from(writer)));
        let error = pipe.write_at(&[1; 10], HostOffset(0)).unwrap_err().to_string();
        assert!(error.contains("-: cannot write"), "{error}");
    }
}
