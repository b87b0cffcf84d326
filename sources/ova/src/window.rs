//! Pieces of a file as a storage.

use std::ops::Range;
use std::sync::Arc;

use vdkit_block::{HostOffset, ReadPaths, Result, Storage, StorageCaps};

/// Concatenated ranges of another storage, read-only.
#[derive(Debug)]
pub struct Window {
    inner: Arc<dyn Storage>,
    name: String,
    /// Start of each piece in the window, and its range of `inner`.
    pieces: Vec<(u64, Range<u64>)>,
    len: u64,
}

impl Window {
    /// Concatenates ranges of `inner`, which must lie within it; `name` is for messages.
    pub fn new(inner: Arc<dyn Storage>, name: String, ranges: Vec<Range<u64>>) -> Self {
        let mut len = 0;
        let pieces = ranges
            .into_iter()
            .map(|range| {
                let start = len;
                len += range.end.saturating_sub(range.start);
                (start, range)
            })
            .collect();
        Self { inner, name, pieces, len }
    }

    /// Bytes of all pieces.
    pub(crate) fn bytes(&self) -> u64 {
        self.len
    }

    /// The piece at an offset: the offset within it, and its range.
    fn piece(&self, at: u64) -> Option<(u64, &Range<u64>)> {
        // The last piece that starts at or before it; empty pieces start where the next one does.
        let index = self.pieces.partition_point(|(start, _)| *start <= at).checked_sub(1)?;
        let (start, range) = &self.pieces[index];
        let within = at - start;
        (within < range.end - range.start).then_some((within, range))
    }

    /// The offset in `inner` of a range of the window, if it lies in one piece.
    fn alone(&self, offset: HostOffset, len: u64) -> Option<HostOffset> {
        let (within, range) = self.piece(offset.0)?;
        (len <= range.end - range.start - within).then_some(HostOffset(range.start + within))
    }
}

impl Storage for Window {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> StorageCaps {
        StorageCaps {
            // Members of a tar file are aligned to 512 bytes, whatever the file system's block
            // size.
            block_bytes: 512,
            ..StorageCaps::default()
        }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.len)
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            let Some((within, range)) = self.piece(offset.0 + done as u64) else { break };
            let there = range.end - range.start - within;
            let want = there.min((buf.len() - done) as u64) as usize;
            let to = &mut buf[done..done + want];
            // The file may have been truncated since its members were listed.
            self.inner.read_at(to, HostOffset(range.start + within))?;
            done += want;
        }
        Ok(done)
    }

    fn sync(&self) -> Result<()> {
        Ok(())
    }

    vdkit_block::capabilities!(read_paths: ReadPaths);
}

impl ReadPaths for Window {
    fn read_ready(&self, buf: &mut [u8], offset: HostOffset) -> Result<bool> {
        match self.alone(offset, buf.len() as u64) {
            Some(at) => self.inner.read_ready(buf, at),
            None => Ok(false),
        }
    }

    fn read_discard(&self, offset: HostOffset, len: u64) -> Result<()> {
        let end = offset.0.saturating_add(len).min(self.len);
        let mut at = offset.0;
        while at < end {
            let Some((within, range)) = self.piece(at) else { break };
            let run = (range.end - range.start - within).min(end - at);
            self.inner.read_discard(HostOffset(range.start + within), run)?;
            at += run;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use vdkit_block::Error;
    use vdkit_storage::MemoryStorage;

    use super::*;

    #[test]
    fn pieces_read_as_one() {
        let bytes: Vec<u8> = (0..100).collect();
        let inner = Arc::new(MemoryStorage::from_bytes("a", &bytes));
        let ranges = vec![10..20, 50..50, 40..45, 0..3];
        let window = Window::new(inner, "a:b".to_owned(), ranges);
        let wanted: Vec<u8> = (10..20).chain(40..45).chain(0..3).collect();
        assert_eq!(window.len().unwrap(), 18);
        for start in 0..20 {
            for len in 0..20 {
                let mut buf = vec![99; len];
                let got = window.read_up_to(&mut buf, HostOffset(start as u64)).unwrap();
                let end = wanted.len().min(start + len);
                assert_eq!(&buf[..got], &wanted[start.min(end)..end], "{start} {len}");
            }
        }
        let window: &dyn Storage = &window;
        window.read_discard(HostOffset(0), 100).unwrap();
        assert!(window.extent_at(HostOffset(17), 9).unwrap().data);
        assert_eq!(window.extent_at(HostOffset(17), 9).unwrap().len, 1);
        assert!(!window.extent_at(HostOffset(18), 9).unwrap().data);
        assert!(matches!(window.write_at(&[1], HostOffset(0)), Err(Error::ReadOnly { .. })));
    }

    #[test]
    fn a_file_that_was_cut_since_is_an_error() {
        let inner = Arc::new(MemoryStorage::from_bytes("a", &[1; 10]));
        let ranges = vec![2..5, 5..8];
        let window = Window::new(inner.clone(), "a:b".to_owned(), ranges);
        inner.set_len(5).unwrap();
        assert!(window.read_up_to(&mut [0; 6], HostOffset(0)).is_err());
        assert_eq!(window.read_up_to(&mut [0; 3], HostOffset(0)).unwrap(), 3);
    }
}
