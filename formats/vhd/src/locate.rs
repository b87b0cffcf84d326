//! Finds the footer of an image, and its copy.

use vdkit_block::{Error, HostOffset, Result, Storage, is_zero};

use crate::footer::{DiskType, FOOTER_BYTES, Footer, NoFooter, SECTOR};

/// Bytes before the end of a file's data that are searched for a footer: the largest file system
/// block.
const BLOCK_MAX: u64 = 64 << 10;

/// Where a footer goes: to `end` of what is before it, or to the end of a device, where readers
/// expect it.
///
/// # Errors
/// Those of the storage.
pub(crate) fn footer_at(storage: &dyn Storage, end: u64) -> Result<HostOffset> {
    let growable = storage.caps().growable;
    let end = if growable { end } else { storage.len()?.saturating_sub(FOOTER_BYTES as u64) };
    Ok(HostOffset(end))
}

/// The footers of a file, valid or not.
#[derive(Debug)]
pub(crate) struct Footers {
    /// The copy at the start; fixed images have none.
    pub(crate) front: std::result::Result<Footer, NoFooter>,
    /// The footer at the end.
    pub(crate) back: std::result::Result<Footer, NoFooter>,
    /// Offset of the footer at the end, whose last byte is missing in images of Virtual PC before
    /// 2004.
    pub(crate) back_at: u64,
    /// Unexpected bytes after that footer, all zero.
    pub(crate) behind: u64,
}

impl Footers {
    /// Reads both footers in two reads.
    ///
    /// # Errors
    /// Those of the storage.
    pub(crate) fn read(storage: &dyn Storage) -> Result<Self> {
        let mut bytes = [0; FOOTER_BYTES];
        let got = storage.read_up_to(&mut bytes, HostOffset(0))?;
        let mut front = Footer::parse(&bytes[..got]);
        let len = storage.len()?;
        let back_at = len.saturating_sub(FOOTER_BYTES as u64);
        let got = storage.read_up_to(&mut bytes, HostOffset(back_at))?;
        let (mut back, mut back_at) = (Footer::parse(&bytes[..got]), back_at);
        if back.is_err() && got == FOOTER_BYTES && bytes[1..].starts_with(crate::footer::COOKIE) {
            back = Footer::parse(&bytes[1..]);
            back_at += 1;
        }
        // The guest of a fixed image writes its start, so what is there decides nothing: neither a
        // footer of that type nor, if the file ends as a fixed image does, another one. No dynamic
        // image ends so.
        let fixed = |footer: &Footer| footer.disk_type == DiskType::Fixed;
        let ends_fixed = |footer: &Footer| fixed(footer) && footer.disk_bytes() <= back_at;
        if front.as_ref().is_ok_and(fixed) || back.as_ref().is_ok_and(ends_fixed) {
            front = Err(NoFooter { at: 0, found: "a fixed disk's".to_owned(), expected: "a copy" });
        }
        let mut footers = Self { front, back, back_at, behind: 0 };
        if footers.back.is_err() && footers.front.is_err() && is_zero(&bytes[..got]) {
            footers.find_interrupted(storage, len)?;
        }
        Ok(footers)
    }

    /// Finds the footer of a fixed image after a power cut that left the new file length, but none
    /// of the new bytes. The old footer is then the last nonzero data of the file.
    fn find_interrupted(&mut self, storage: &dyn Storage, len: u64) -> Result<()> {
        // A device has a constant length.
        if storage.caps().device {
            return Ok(());
        }
        let end = end_of_data(storage, len)?.next_multiple_of(SECTOR).min(len);
        let begin = end.saturating_sub(BLOCK_MAX) / SECTOR * SECTOR;
        let mut bytes = vec![0; (end - begin) as usize];
        let got = storage.read_up_to(&mut bytes, HostOffset(begin))?;
        bytes.truncate(got);
        let Some(last) = bytes.chunks(FOOTER_BYTES).rposition(|sector| !is_zero(sector)) else {
            return Ok(());
        };
        let at = begin + last as u64 * SECTOR;
        let found = Footer::parse(&bytes[last * FOOTER_BYTES..]).ok();
        if let Some(footer) = found.filter(|footer| footer.disk_type == DiskType::Fixed)
            && footer.disk_bytes() <= at
        {
            self.behind = len.saturating_sub(at + SECTOR);
            (self.back, self.back_at) = (Ok(footer), at);
        }
        Ok(())
    }

    /// Whether both footers are valid but of two images, which no crash leaves.
    pub(crate) fn contradict(&self) -> bool {
        let key = |footer: &Footer| (footer.disk_type, footer.uuid());
        matches!((&self.front, &self.back), (Ok(front), Ok(back)) if key(front) != key(back))
    }

    /// The footer to use: the copy at the start if there is one, as in QEMU.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if neither is valid.
    pub(crate) fn best(&self, file: &str) -> Result<&Footer> {
        match (&self.front, &self.back) {
            (Ok(front), _) => Ok(front),
            (Err(_), Ok(back)) => Ok(back),
            (Err(_), Err(no)) => Err(Error::corrupt(
                file,
                self.back_at + no.at as u64,
                "footer",
                no.found.clone(),
                no.expected,
            )),
        }
    }

    /// A warning for users if only one of two footers is valid.
    pub(crate) fn warning(&self, file: &str) -> Option<String> {
        let footer = self.best(file).ok()?;
        if footer.disk_type == DiskType::Fixed {
            let behind = self.behind;
            return (behind > 0).then(|| {
                format!(
                    "{file}: {behind} bytes behind the footer, left by a power cut while the image \
                     grew: the disk has its old size"
                )
            });
        }
        let repair = "a repair restores it";
        match (&self.front, &self.back) {
            (Err(_), _) => {
                Some(format!("{file}: the footer's copy at its start is damaged; {repair}"))
            }
            (_, Err(_)) => {
                Some(format!("{file}: the footer at its end is damaged or gone; {repair}"))
            }
            (Ok(front), Ok(back)) if front != back => {
                Some(format!("{file}: the footer and its copy differ; a repair makes them equal"))
            }
            _ => None,
        }
    }
}

/// End of the last data of a file; after that it is zero. A binary search, since storages only
/// report whether there is data after an offset.
fn end_of_data(storage: &dyn Storage, len: u64) -> Result<u64> {
    let (mut begin, mut end) = (0, len);
    while begin < end {
        let middle = begin + (end - begin) / 2;
        let run = storage.extent_at(HostOffset(middle), len - middle)?;
        if run.data || run.len < len - middle {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    Ok(end)
}
