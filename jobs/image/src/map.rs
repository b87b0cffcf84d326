//! The guest's map, in rows with the keys of `qemu-img map`.

use serde::Serialize;
use vdkit_block::{GuestOffset, Result};
use vdkit_chain::{Disk, DiskExtent, DiskPlace, Extents};

/// A run of guest bytes with the same properties.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct MapRow<'a> {
    /// Guest offset of the first byte.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// The layer that holds them, 0 being the top.
    pub depth: usize,
    /// A layer holds them (perhaps as zeroes); otherwise they were never written.
    pub present: bool,
    /// They read as zero by the map.
    pub zero: bool,
    /// They must be read.
    pub data: bool,
    /// They are compressed.
    pub compressed: bool,
    /// Host offset of the first byte, if the bytes are stored unchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<u64>,
    /// The file that holds them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filename: Option<&'a str>,
}

impl<'a> MapRow<'a> {
    fn new(extent: &DiskExtent<'a>, layers: usize) -> Self {
        let mut row = Self {
            start: extent.at.0,
            length: extent.len,
            depth: extent.depth.min(layers.saturating_sub(1)),
            present: true,
            ..Self::default()
        };
        match &extent.place {
            DiskPlace::Data { storage, offset } => {
                row.data = true;
                row.offset = Some(offset.0);
                row.filename = Some(storage.name());
            }
            DiskPlace::Compressed { storage, .. } => {
                row.data = true;
                row.compressed = true;
                row.filename = Some(storage.name());
            }
            DiskPlace::Zero { .. } => row.zero = true,
            DiskPlace::Hole => {
                row.zero = true;
                row.present = false;
            }
        }
        row
    }

    /// Guest offset of the end.
    pub fn end(&self) -> u64 {
        self.start + self.length
    }

    /// Merges the rows if `next` follows with the same properties.
    pub fn joined(&self, next: &Self) -> Option<Self> {
        let follows = match (self.offset, next.offset) {
            (Some(offset), Some(next)) => offset.checked_add(self.length) == Some(next),
            (None, None) => true,
            _ => false,
        };
        let continued = Self { start: next.start, length: next.length, ..self.clone() };
        let same = Self { offset: None, ..continued } == Self { offset: None, ..next.clone() };
        (follows && same).then(|| Self { length: self.length + next.length, ..self.clone() })
    }
}

/// The rows of a range, in order, equal neighbors merged.
#[derive(Debug)]
pub struct Map<'a> {
    extents: Option<Extents<'a>>,
    layers: usize,
    ahead: Option<MapRow<'a>>,
}

/// Maps `len` bytes of a disk from `at`.
///
/// # Errors
/// [`vdkit_block::Error::Invalid`] past the end of the disk.
pub fn map(disk: &Disk, at: u64, len: u64) -> Result<Map<'_>> {
    let extents = if len == 0 { None } else { Some(disk.extents(GuestOffset(at), len)?) };
    Ok(Map { extents, layers: disk.layers().len(), ahead: None })
}

impl<'a> Map<'a> {
    fn next_row(&mut self) -> Result<Option<MapRow<'a>>> {
        let found = self.extents.as_mut().and_then(Iterator::next).transpose()?;
        Ok(found.map(|extent| MapRow::new(&extent, self.layers)))
    }
}

impl<'a> Iterator for Map<'a> {
    type Item = Result<MapRow<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut row = self.ahead.take();
        loop {
            match (row, self.next_row()) {
                (None, Ok(Some(next))) => row = Some(next),
                (Some(this), Ok(Some(next))) => match this.joined(&next) {
                    Some(joined) => row = Some(joined),
                    None => {
                        self.ahead = Some(next);
                        return Some(Ok(this));
                    }
                },
                (last, Ok(None)) => return last.map(Ok),
                (_, Err(error)) => {
                    self.extents = None;
                    return Some(Err(error));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdkit_raw::RawDriver;
    use vdkit_testbase::disk_of;

    #[test]
    fn rows_follow_one_another_and_name_the_file() {
        let disk = disk_of(&RawDriver, 1 << 20, &[(65_536, &[1; 8192]), (131_072, &[2; 4096])]);
        let rows: Vec<_> = map(&disk, 0, 1 << 20).unwrap().map(Result::unwrap).collect();
        let said: Vec<_> = rows.iter().map(|r| (r.start, r.length, r.data, r.offset)).collect();
        assert_eq!(
            said,
            [
                (0, 65_536, false, None),
                (65_536, 8192, true, Some(65_536)),
                (73_728, 57_344, false, None),
                (131_072, 4096, true, Some(131_072)),
                (135_168, (1 << 20) - 135_168, false, None),
            ]
        );
        assert_eq!(rows[1].filename, Some("memory"));
        assert_eq!(map(&disk, 1 << 20, 0).unwrap().count(), 0);
        assert!(map(&disk, 1 << 20, 1).is_err());
    }

    #[test]
    fn rows_join_where_they_say_the_same() {
        let row = |start, length, offset| MapRow {
            start,
            length,
            depth: 0,
            present: true,
            zero: false,
            data: true,
            compressed: false,
            offset,
            filename: Some("f"),
        };
        let length = |a: &MapRow<'_>, b: &MapRow<'_>| a.joined(b).map(|row| row.length);
        assert_eq!(length(&row(0, 10, None), &row(10, 5, None)), Some(15));
        assert_eq!(length(&row(0, 10, Some(100)), &row(10, 5, Some(110))), Some(15));
        assert_eq!(length(&row(0, 10, Some(100)), &row(10, 5, Some(111))), None);
        assert_eq!(length(&row(0, 10, Some(100)), &row(10, 5, None)), None);
        let deeper = MapRow { depth: 1, ..row(10, 5, None) };
        assert_eq!(length(&row(0, 10, None), &deeper), None);
    }
}
