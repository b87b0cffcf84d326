//! Streams that are decompressed while read, detected by their content.

use std::fmt;
use std::io::{self, BufReader, Cursor, Read};
use std::sync::Arc;

use flate2::read::MultiGzDecoder;
use liblzma::read::XzDecoder;
use liblzma::stream::{CONCATENATED, Stream};
use vdkit_block::{Error, HostOffset, IoAction, Result, Storage};

use crate::checksum::{Checked, Checksum};
use crate::stdin::is_interruption;

/// Bytes per read of compressed input.
const BUFFER_BYTES: usize = 256 << 10;
/// Memory limit of an xz stream; `xz -9` takes 65 MiB.
const XZ_MEMORY_MAX: u64 = 1 << 30;
/// Maximum window of a zstd frame, as a power of two: the default limit of `zstd -d`, and the
/// window of `zstd --long`.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// Compression of a whole file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// RFC 1952.
    Gzip,
    /// The .xz format, 1.2.
    Xz,
    /// RFC 8878.
    Zstd,
}

impl Packing {
    /// Bytes that [`Packing::of`] needs.
    pub const HEAD_BYTES: usize = 6;

    /// Detects the compression by a file's first bytes.
    pub fn of(head: &[u8]) -> Option<Self> {
        match head {
            // The method is always 8, and the flags' upper three bits are 0.
            [0x1f, 0x8b, 8, flags, ..] if flags & 0xe0 == 0 => Some(Self::Gzip),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Self::Xz),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Self::Zstd),
            _ => None,
        }
    }
}

impl fmt::Display for Packing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
        })
    }
}

/// A stream that is read once, in order.
pub struct ByteStream {
    name: String,
    reader: Box<dyn Read + Send>,
    /// Total bytes, if known.
    len: Option<u64>,
    at: u64,
    /// See [`ByteStream::close_delimited`].
    close_delimited: bool,
}

impl fmt::Debug for ByteStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByteStream").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ByteStream {
    /// A stream; `name` is for messages.
    pub fn new(name: impl Into<String>, reader: impl Read + Send + 'static) -> Self {
        let (name, reader) = (name.into(), Box::new(reader));
        Self { name, reader, len: None, at: 0, close_delimited: false }
    }

    /// Sets the length.
    pub fn with_len(self, len: u64) -> Self {
        Self { len: Some(len), ..self }
    }

    /// Declares that a connection which breaks off looks like the stream's end. Such a stream can be
    /// read only if a checksum or its compression tells whether it is whole.
    #[cfg(feature = "http")]
    pub(crate) fn close_delimited(self) -> Self {
        Self { close_delimited: true, ..self }
    }

    /// Checks the stream's hash: with a mismatch its end cannot be read.
    pub fn checked(self, checksum: Checksum) -> Self {
        let reader = Box::new(Checked::new(self.reader, checksum));
        Self { reader, close_delimited: false, ..self }
    }

    /// The name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Total bytes, if known.
    pub fn known_len(&self) -> Option<u64> {
        self.len
    }

    /// Peeks at the first bytes (fewer if the stream ends); they can still be read.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn peek(&mut self, bytes: usize) -> Result<Vec<u8>> {
        debug_assert_eq!(self.at, 0);
        let mut head = vec![0; bytes];
        let got = self.fill(&mut head)?;
        head.truncate(got);
        self.at = 0;
        let rest = std::mem::replace(&mut self.reader, Box::new(io::empty()));
        self.reader = Box::new(Cursor::new(head.clone()).chain(rest));
        Ok(head)
    }

    /// Reads until `buf` is full or the stream ends.
    ///
    /// # Errors
    /// [`Error::Io`], also if it cannot be decompressed or has another checksum;
    /// [`Error::Unsupported`] if nothing tells its end from a broken connection.
    pub fn read_full(&mut self, buf: &mut [u8]) -> Result<usize> {
        if self.close_delimited {
            // Refused before the bytes are fetched, since their end would be refused.
            return Err(Error::unsupported(
                &self.name,
                "the server does not say where the file ends, so a broken connection cannot be told \
                 from its end",
                "give the file's checksum, or get it from a server that sends its length",
            ));
        }
        self.fill(buf)
    }

    fn fill(&mut self, buf: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match self.reader.read(&mut buf[done..]) {
                Ok(0) => break,
                Ok(got) => done += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_interruption(&error) => return Err(Error::Interrupted),
                Err(error) => {
                    let (at, len) = (self.at + done as u64, (buf.len() - done) as u64);
                    return Err(Error::io(&self.name, IoAction::Read, at, len, error));
                }
            }
        }
        self.at += done as u64;
        Ok(done)
    }

    /// Decompresses the stream, once, if its first bytes say that it is compressed; also returns
    /// how.
    ///
    /// # Errors
    /// Errors of reading.
    pub fn unpack(mut self) -> Result<(Self, Option<Packing>)> {
        let head = self.peek(Packing::HEAD_BYTES)?;
        let Some(packing) = Packing::of(&head) else { return Ok((self, None)) };
        let packed = BufReader::with_capacity(BUFFER_BYTES, self.reader);
        let fail = |error: io::Error| Error::io(&self.name, IoAction::Read, 0, 0, error);
        let reader: Box<dyn Read + Send> = match packing {
            Packing::Gzip => Box::new(MultiGzDecoder::new(packed)),
            Packing::Xz => {
                let stream = Stream::new_stream_decoder(XZ_MEMORY_MAX, CONCATENATED)
                    .map_err(|error| fail(error.into()))?;
                Box::new(XzDecoder::new_stream(packed, stream))
            }
            Packing::Zstd => {
                let mut decoder = zstd::Decoder::with_buffer(packed).map_err(fail)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(fail)?;
                Box::new(decoder)
            }
        };
        // A decoder notices by itself that its input ends too early.
        let unpacked = Self { name: self.name, reader, len: None, at: 0, close_delimited: false };
        Ok((unpacked, Some(packing)))
    }
}

/// Reads a storage sequentially.
#[derive(Debug)]
pub struct StorageReader {
    storage: Arc<dyn Storage>,
    at: u64,
}

impl StorageReader {
    /// All of a storage.
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage, at: 0 }
    }
}

impl Read for StorageReader {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let got = self.storage.read_up_to(buf, HostOffset(self.at)).map_err(io::Error::other)?;
        self.at += got as u64;
        Ok(got)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn soft() -> Vec<u8> {
        (0..700_000u32).map(|i| (i / 5 % 251) as u8).collect()
    }

    fn packed(packing: Packing, bytes: &[u8]) -> Vec<u8> {
        match packing {
            Packing::Gzip => {
                let mut out = flate2::write::GzEncoder::new(Vec::new(), Default::default());
                out.write_all(bytes).unwrap();
                out.finish().unwrap()
            }
            Packing::Xz => {
                let mut out = liblzma::write::XzEncoder::new(Vec::new(), 6);
                out.write_all(bytes).unwrap();
                out.finish().unwrap()
            }
            Packing::Zstd => {
                let mut out = zstd::Encoder::new(Vec::new(), 3).unwrap();
                out.include_checksum(true).unwrap();
                out.write_all(bytes).unwrap();
                out.finish().unwrap()
            }
        }
    }

    fn unpacked(bytes: Vec<u8>) -> Result<(Vec<u8>, Option<Packing>)> {
        let (mut stream, packing) = ByteStream::new("s", Cursor::new(bytes)).unpack()?;
        let mut out = vec![0; 4 << 20];
        let got = stream.read_full(&mut out)?;
        out.truncate(got);
        Ok((out, packing))
    }

    #[test]
    fn packed_streams_are_told_by_their_content() {
        let soft = soft();
        for packing in [Packing::Gzip, Packing::Xz, Packing::Zstd] {
            let one = packed(packing, &soft);
            assert_eq!(unpacked(one.clone()).unwrap(), (soft.clone(), Some(packing)));
            // The concatenated output of several compressor runs is one file.
            let two = [one.clone(), packed(packing, b"end")].concat();
            let both = [&soft[..], b"end"].concat();
            assert_eq!(unpacked(two).unwrap(), (both, Some(packing)));
            let cut = one[..one.len() - 3].to_vec();
            assert!(unpacked(cut).is_err(), "{packing}");
            let mut damaged = one;
            let middle = damaged.len() / 2;
            damaged[middle] ^= 0x55;
            assert!(unpacked(damaged).is_err(), "{packing}");
        }
        assert_eq!(unpacked(soft.clone()).unwrap(), (soft, None));
        assert_eq!(unpacked(Vec::new()).unwrap(), (Vec::new(), None));
    }
}
