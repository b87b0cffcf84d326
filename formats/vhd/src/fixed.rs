//! Fixed images: guest byte *n* is byte *n* of the file; the footer follows.

use std::mem::offset_of;
use std::sync::Arc;

use parking_lot::Mutex;
use vdkit_block::{Error, Flat, FlatFormat, HostOffset, Result, Storage, ZeroMode};

use crate::footer::{FOOTER_BYTES, Footer, size_of};
use crate::locate::Footers;
use crate::on_disk::RawFooter;

/// An open fixed image.
#[derive(Debug)]
pub(crate) struct FixedVhd {
    flat: Flat,
    warnings: Vec<String>,
    end: Mutex<End>,
}

/// The end of the file after the disk.
#[derive(Debug)]
struct End {
    footer: Footer,
    /// Host offset of the footer, which may have only 511 bytes.
    at: u64,
}

impl FixedVhd {
    /// Opens an image with these footers; `footer` is the valid one. If a power cut left the file
    /// too long, opening for writing truncates it.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Corrupt`] if the disk does not end before the footer.
    pub(crate) fn open(
        storage: Arc<dyn Storage>,
        footer: Footer,
        footers: &Footers,
        writable: bool,
    ) -> Result<Self> {
        let (guest_bytes, at) = (footer.disk_bytes(), footers.back_at);
        let flat = Flat::new(storage, writable, 0, guest_bytes)?;
        judge_size(flat.storage.name(), guest_bytes, at)?;
        if writable && footers.behind > 0 {
            cut_behind(&*flat.storage, at)?;
        }
        let warnings = footers.warning(flat.storage.name()).into_iter().collect();
        Ok(Self { flat, warnings, end: Mutex::new(End { footer, at }) })
    }

    /// Grows the disk: the footer keeps the old size until the added range is zero, so that no old
    /// footer becomes guest data. `at` is the offset of the footer in memory and in the file, also
    /// after an error.
    fn grow(&self, at: &mut u64, footer: &Footer, larger: &Footer) -> Result<()> {
        let storage = &*self.flat.storage;
        let (old, new) = (footer.disk_bytes(), larger.disk_bytes());
        let room_end = storage.len()?;
        if *at < new {
            let put = storage.write_at(footer.bytes(), HostOffset(new));
            if let Err(error) = put.and_then(|()| storage.sync()) {
                // Restores the end of the file, which has the old footer.
                let _ = storage.set_len(room_end);
                return Err(error);
            }
            *at = new;
        }
        // Zeroes the old footer, and bytes that other programs leave between disk and footer.
        let len = new.min(room_end) - old;
        storage.write_zeroes(HostOffset(old), len, ZeroMode::MayUnmap)?;
        storage.sync()?;
        storage.write_at(larger.bytes(), HostOffset(*at))?;
        storage.sync()
    }

    /// Shrinks the disk: writes the footer over the removed range, then truncates the file.
    fn shrink(&self, at: &mut u64, smaller: &Footer) -> Result<()> {
        let (storage, new) = (&*self.flat.storage, smaller.disk_bytes());
        let mut guests = [0; FOOTER_BYTES];
        storage.read_padded(&mut guests, HostOffset(new))?;
        let put = storage.write_at(smaller.bytes(), HostOffset(new));
        let cut = put.and_then(|()| storage.sync());
        let cut = cut.and_then(|()| storage.set_len(new + FOOTER_BYTES as u64));
        if let Err(error) = cut {
            // The disk keeps its size, so restores these guest bytes.
            let _ = storage.write_at(&guests, HostOffset(new));
            return Err(error);
        }
        *at = new;
        storage.sync()
    }
}

/// Truncates a file after its footer; all bytes after it must be zero.
pub(crate) fn cut_behind(storage: &dyn Storage, footer_at: u64) -> Result<()> {
    storage.set_len(footer_at + FOOTER_BYTES as u64)?;
    storage.sync()
}

/// Fails unless the disk ends before the footer.
pub(crate) fn judge_size(file: &str, guest_bytes: u64, footer_at: u64) -> Result<()> {
    if guest_bytes <= footer_at {
        return Ok(());
    }
    Err(Error::corrupt(
        file,
        footer_at + offset_of!(RawFooter, current_size) as u64,
        "current size",
        format!("{guest_bytes} bytes"),
        format!("at most the {footer_at} bytes before the footer"),
    ))
}

impl FlatFormat for FixedVhd {
    fn name(&self) -> &'static str {
        "vpc"
    }

    fn flat(&self) -> &Flat {
        &self.flat
    }

    fn warnings(&self) -> &[String] {
        &self.warnings
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        let (storage, file) = (&*self.flat.storage, self.flat.storage.name());
        if !storage.caps().growable {
            let what = "not supported: another size of a VHD on a device";
            return Err(Error::unsupported(file, what, "convert it to a new image"));
        }
        let mut end = self.end.lock();
        let old = end.footer.disk_bytes();
        let (bytes, geometry) = size_of(file, guest_bytes, !end.footer.sized_by_geometry())?;
        if bytes == old {
            return Ok(());
        }
        let End { footer, at } = &mut *end;
        let resized = footer.clone().sized(bytes, geometry);
        let done = match bytes > old {
            true => self.grow(at, footer, &resized),
            false => {
                self.flat.shrink(bytes);
                self.shrink(at, &resized)
            }
        };
        if done.is_ok() {
            *footer = resized;
        } else if let Ok(Footers { back: Ok(stored), back_at, .. }) = Footers::read(storage) {
            // The failed change may have reached the file, so rereads it.
            *end = End { footer: stored, at: back_at };
        }
        self.flat.resized(end.footer.disk_bytes());
        done
    }
}
