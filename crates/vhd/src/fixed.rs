//! Fixed images: guest byte *n* is byte *n* of the file; the footer follows.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vdkit_block::{
    Error, Extent, FileIndex, Format, FormatCaps, GuestOffset, HostOffset, InFlight, Place,
    Reservation, Result, Storage, ZeroMode,
};

use crate::footer::{FOOTER_BYTES, Footer, size_of};

/// An open fixed image.
#[derive(Debug)]
pub(crate) struct FixedVhd {
    storage: Arc<dyn Storage>,
    writable: bool,
    guest_bytes: AtomicU64,
    footer: Mutex<Footer>,
    in_flight: InFlight,
}

impl FixedVhd {
    /// Takes an image whose footer is at `footer_at`.
    ///
    /// # Errors
    /// [`Error::ReadOnly`]; [`Error::Corrupt`] where the disk does not end before the footer.
    pub(crate) fn open(
        storage: Arc<dyn Storage>,
        footer: Footer,
        footer_at: u64,
        writable: bool,
    ) -> Result<Self> {
        if writable && !storage.caps().writable {
            return Err(Error::ReadOnly { file: storage.name().to_owned() });
        }
        let guest_bytes = footer.disk_bytes();
        judge_size(storage.name(), guest_bytes, footer_at)?;
        Ok(Self {
            storage,
            writable,
            guest_bytes: AtomicU64::new(guest_bytes),
            footer: Mutex::new(footer),
            in_flight: InFlight::default(),
        })
    }

    fn data(at: GuestOffset, len: u64) -> Extent {
        let place = Place::Data { file: FileIndex(0), offset: HostOffset(at.0), exclusive: true };
        Extent { len, place }
    }

    fn need_writable(&self) -> Result<()> {
        if self.writable {
            return Ok(());
        }
        Err(Error::ReadOnly { file: self.storage.name().to_owned() })
    }

    /// The new footer is durable at the new end before the old one is the guest's zeroes; shrinking,
    /// it takes the place of the guest's bytes there before the file is cut.
    fn move_footer(&self, footer: &Footer, old: u64, new: u64) -> Result<()> {
        let storage = &*self.storage;
        let mut guests = [0; FOOTER_BYTES];
        storage.read_padded(&mut guests, HostOffset(new))?;
        let put = storage.write_at(footer.bytes(), HostOffset(new)).and_then(|()| storage.sync());
        if let Err(error) = put {
            if new < old {
                // The disk keeps its size, and these bytes are the guest's.
                let _ = storage.write_at(&guests, HostOffset(new));
            }
            return Err(error);
        }
        if new > old {
            let len = (new - old).min(FOOTER_BYTES as u64);
            storage.write_zeroes(HostOffset(old), len, ZeroMode::MayUnmap)?;
        } else {
            storage.set_len(new + FOOTER_BYTES as u64)?;
        }
        storage.sync()
    }
}

/// The disk must end before the footer, whatever the footer says.
pub(crate) fn judge_size(file: &str, guest_bytes: u64, footer_at: u64) -> Result<()> {
    if guest_bytes <= footer_at {
        return Ok(());
    }
    Err(Error::corrupt(
        file,
        footer_at + crate::footer::field::CURRENT_SIZE as u64,
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
            packed: None,
            one_pass: false,
            cheap_zeroes: true,
            host_aligned: true,
        }
    }

    fn guest_bytes(&self) -> u64 {
        self.guest_bytes.load(Ordering::Acquire)
    }

    fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    fn file(&self, _index: FileIndex) -> &Arc<dyn Storage> {
        &self.storage
    }

    fn in_flight(&self) -> &InFlight {
        &self.in_flight
    }

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

    /// Never a reservation: every byte has its place.
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

    /// Only resizing writes metadata, and makes it durable itself.
    fn close(&self) -> Result<()> {
        if self.writable { self.storage.sync() } else { Ok(()) }
    }

    fn resize(&self, guest_bytes: u64) -> Result<()> {
        self.need_writable()?;
        let file = self.storage.name();
        if !self.storage.caps().growable {
            let hint = "convert it to a new image";
            return Err(Error::unsupported(file, "another size of a VHD on a device", hint));
        }
        let mut footer = self.footer.lock();
        let old = self.guest_bytes();
        let (bytes, geometry) = size_of(file, guest_bytes, !footer.sized_by_geometry())?;
        if bytes == old {
            return Ok(());
        }
        let resized = footer.clone().sized(bytes, geometry);
        let footer_at = self.storage.len()?.saturating_sub(FOOTER_BYTES as u64);
        // What lies between the disk and its footer, in images of others, was never the guest's.
        if bytes > old && footer_at > old {
            let len = footer_at.min(bytes) - old;
            self.storage.write_zeroes(HostOffset(old), len, ZeroMode::MayUnmap)?;
        }
        self.move_footer(&resized, footer_at, bytes)?;
        *footer = resized;
        self.guest_bytes.store(bytes, Ordering::Release);
        Ok(())
    }
}
