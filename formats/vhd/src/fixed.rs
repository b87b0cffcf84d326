//! Fixed images: guest byte *n* is byte *n* of the file; the footer follows.

use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vdkit_block::{
    Error, Extent, FileIndex, Format, FormatCaps, GuestOffset, HostOffset, InFlight, Place,
    Reservation, Result, Storage, ZeroMode, require_writable,
};

use crate::footer::{FOOTER_BYTES, Footer, size_of};
use crate::locate::Footers;
use crate::on_disk::RawFooter;

/// An open fixed image.
#[derive(Debug)]
pub(crate) struct FixedVhd {
    storage: Arc<dyn Storage>,
    writable: bool,
    warnings: Vec<String>,
    guest_bytes: AtomicU64,
    end: Mutex<End>,
    in_flight: InFlight,
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
        require_writable(!writable || storage.caps().writable, storage.name())?;
        let (guest_bytes, footer_at) = (footer.disk_bytes(), footers.back_at);
        judge_size(storage.name(), guest_bytes, footer_at)?;
        if writable && footers.behind > 0 {
            cut_behind(&*storage, footer_at)?;
        }
        let warnings = footers.warning(storage.name()).into_iter().collect();
        Ok(Self {
            storage,
            writable,
            warnings,
            guest_bytes: AtomicU64::new(guest_bytes),
            end: Mutex::new(End { footer, at: footer_at }),
            in_flight: InFlight::default(),
        })
    }

    fn data(at: GuestOffset, len: u64) -> Extent {
        let place = Place::Data { file: FileIndex(0), offset: HostOffset(at.0), exclusive: true };
        Extent { len, place }
    }

    fn need_writable(&self) -> Result<()> {
        require_writable(self.writable, self.storage.name())
    }

    /// Grows the disk: the footer keeps the old size until the added range is zero, so that no old
    /// footer becomes guest data. `at` is the offset of the footer in memory and in the file, also
    /// after an error.
    fn grow(&self, at: &mut u64, footer: &Footer, larger: &Footer) -> Result<()> {
        let storage = &*self.storage;
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
        let (storage, new) = (&*self.storage, smaller.disk_bytes());
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

impl Format for FixedVhd {
    fn name(&self) -> &'static str {
        "vpc"
    }

    fn caps(&self) -> FormatCaps {
        FormatCaps {
            writable: self.writable,
            cluster_bytes: u64::from(self.storage.caps().block_bytes.max(1)),
            fill_bytes: 1,
            compressed: None,
            one_pass: false,
            cheap_zeroes: true,
            host_aligned: true,
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes.load(Ordering::Acquire)
    }

    vdkit_block::accessors!(warnings, storage, in_flight);

    fn resolve(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        if !self.storage.may_have_holes()? {
            return Ok(Self::data(at, len));
        }
        let run = self.storage.extent_at(HostOffset(at.0), len)?;
        let len = run.len.min(len);
        if run.data {
            return Ok(Self::data(at, len));
        }
        Ok(Extent { len, place: Place::Zero { allocated: false } })
    }

    fn resolve_for_io(&self, at: GuestOffset, len: u64) -> Result<Extent> {
        Ok(Self::data(at, len))
    }

    fn resolve_cached(&self, at: GuestOffset, len: u64) -> Option<Extent> {
        Some(Self::data(at, len))
    }

    /// Never returns a reservation: every byte has its place.
    fn reserve(&self, _at: GuestOffset, _len: u64) -> Result<Option<Reservation<'_>>> {
        self.need_writable()?;
        Ok(None)
    }

    fn zero(&self, at: GuestOffset, len: u64, may_unmap: bool) -> Result<Range<u64>> {
        self.need_writable()?;
        let mode = if may_unmap { ZeroMode::MayUnmap } else { ZeroMode::KeepAllocated };
        self.storage.write_zeroes(HostOffset(at.0), len, mode)?;
        Ok(at.0..at.0 + len)
    }

    fn discard(&self, at: GuestOffset, len: u64) -> Result<()> {
        self.need_writable()?;
        self.storage.discard(HostOffset(at.0), len)
    }

    fn flush(&self) -> Result<()> {
        self.storage.sync()
    }

    /// Only a resize writes metadata, and makes it durable itself.
    fn close(&self) -> Result<()> {
        if self.writable { self.storage.sync() } else { Ok(()) }
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.need_writable()?;
        let file = self.storage.name();
        if !self.storage.caps().growable {
            let hint = "convert it to a new image";
            return Err(Error::unsupported(
                file,
                "not supported: another size of a VHD on a device",
                hint,
            ));
        }
        let mut end = self.end.lock();
        let old = self.guest_bytes();
        let (bytes, geometry) = size_of(file, guest_bytes, !end.footer.sized_by_geometry())?;
        if bytes == old {
            return Ok(());
        }
        let End { footer, at } = &mut *end;
        let resized = footer.clone().sized(bytes, geometry);
        let done = match bytes > old {
            true => self.grow(at, footer, &resized),
            false => self.shrink(at, &resized),
        };
        if done.is_ok() {
            *footer = resized;
        } else if let Ok(Footers { back: Ok(stored), back_at, .. }) = Footers::read(&*self.storage)
        {
            // The failed change may have reached the file, so rereads it.
            *end = End { footer: stored, at: back_at };
        }
        self.guest_bytes.store(end.footer.disk_bytes(), Ordering::Release);
        done
    }
}
