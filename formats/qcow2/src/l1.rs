//! Reads the L1 table, and detects files that end before the L2 tables that it names: truncated
//! ones.
//!
//! L1 entries become durable after their tables, so no crash leaves such an image (except one of a
//! writer without durability, such as QEMU's `cache=unsafe`). Treating missing tables as empty
//! would silently zero whole ranges of the disk.

use vdkit_block::{Error, HostOffset, Remedy, Result, Storage};

use crate::header::Header;
use crate::layout::{Geometry, OFFSET_MASK};
use crate::structures::decode_words;

/// Reads the L1 table: one read.
pub(crate) fn read_l1(header: &Header, storage: &dyn Storage) -> Result<Vec<u64>> {
    let mut raw = vec![0; header.l1_entries as usize * 8];
    storage.read_at(&mut raw, header.l1_offset)?;
    Ok(decode_words(&raw))
}

/// The length of a file that ends before some L2 tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    len: u64,
}

impl Cut {
    /// Compares an L1 table with the length of its file. A file that ends within a table may have
    /// been written that way or truncated, so that adds a warning.
    pub(crate) fn find(
        l1: &[u64],
        geometry: Geometry,
        storage: &dyn Storage,
        warnings: &mut Vec<String>,
    ) -> Result<Option<Self>> {
        let last = l1.iter().map(|word| word & OFFSET_MASK).max().unwrap_or(0);
        if last == 0 {
            return Ok(None);
        }
        let len = storage.len()?;
        if last < len && last + geometry.cluster_bytes() > len {
            warnings.push(format!(
                "{}: the file ends, after {len} bytes, within an L2 table at offset {last:#x}; what \
                 the rest of that table would map reads as zero",
                storage.name()
            ));
        }
        Ok((last >= len).then_some(Self { len }))
    }

    /// Fails on the first L1 entry of `words` whose table is missing; `offset` is that of the first
    /// word.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub(crate) fn refuse(
        self,
        words: &[u64],
        offset: HostOffset,
        storage: &dyn Storage,
    ) -> Result<()> {
        let missing = |word: &u64| word & OFFSET_MASK >= self.len;
        let Some(index) = words.iter().position(missing) else { return Ok(()) };
        Err(Error::corrupt(
            storage.name(),
            offset.0 + index as u64 * 8,
            "L1 entry",
            format!("{:#018x}", words[index]),
            format!(
                "an L2 table within the file of {} bytes: the file was truncated. Restore it from a \
                 complete copy",
                self.len
            ),
        )
        .with_remedy(Remedy::REPAIR))
    }
}
