//! Whether an image from a stranger is safe.

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use vdkit::jobs::inspect::{InspectOptions, InspectReport, Verdict, inspect};
use vdkit::storage::FileOptions;
use vdkit::{HostOffset, Storage};

use crate::border::{self, Result, call, given, misuse};
use crate::jobs::{Watch, put_report, vdkit_monitor};

/// In vdkit_verdict: nothing speaks against the image.
pub const VDKIT_ACCEPT: c_int = 0;
/// In vdkit_verdict: do not use it.
pub const VDKIT_REFUSE: c_int = 1;
/// In vdkit_verdict: it could not be judged, so do not use it.
pub const VDKIT_UNKNOWN: c_int = 2;

/// What vdkit_inspect() found.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vdkit_verdict {
    /// sizeof(vdkit_verdict), set by the program, so that later versions can add members.
    pub struct_size: usize,
    /// VDKIT_ACCEPT, VDKIT_REFUSE or VDKIT_UNKNOWN.
    pub verdict: c_int,
    /// How many findings there are; the report lists them.
    pub findings: u32,
    /// The name of the format, which ends with a NUL.
    pub format: [c_char; 16],
    /// Bytes of the disk, or -1 if that is not known.
    pub virtual_size: i64,
    /// Bytes of the disk for which the image has data, or -1 if that is not known.
    pub data_bytes: i64,
    /// Bytes of the file.
    pub file_length: u64,
}

impl vdkit_verdict {
    /// Nothing is known yet.
    const NONE: Self = Self {
        struct_size: size_of::<Self>(),
        verdict: VDKIT_UNKNOWN,
        findings: 0,
        format: [0; 16],
        virtual_size: -1,
        data_bytes: -1,
        file_length: 0,
    };

    fn of(report: &InspectReport) -> Self {
        let known =
            |bytes: Option<u64>| bytes.and_then(|bytes| bytes.try_into().ok()).unwrap_or(-1);
        let findings = (report.findings.len() as u64).saturating_add(report.findings_omitted);
        let mut format = [0; 16];
        for (to, from) in format[..15].iter_mut().zip(report.format.bytes()) {
            *to = from as c_char;
        }
        Self {
            verdict: match report.verdict {
                Verdict::Accept => VDKIT_ACCEPT,
                Verdict::Refuse => VDKIT_REFUSE,
                Verdict::Unknown => VDKIT_UNKNOWN,
            },
            findings: findings.try_into().unwrap_or(u32::MAX),
            format,
            virtual_size: known(report.virtual_size),
            data_bytes: known(report.data_bytes),
            file_length: report.file_length,
            ..Self::NONE
        }
    }
}

/// For vdkit_inspect(): findings that only warn refuse the image too.
pub const VDKIT_INSPECT_STRICT: u32 = 1;

/// Judges an image from a stranger without opening what it names: reads little, within limits of time
/// and memory. `format`: what it must be, or NULL. `verdict` is filled, but for its `struct_size`; a bad image
/// is a result and no error. `monitor` hears of the bytes that are read. `monitor` and `report` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdkit_inspect(
    path: *const c_char,
    format: *const c_char,
    flags: u32,
    monitor: Option<&vdkit_monitor>,
    verdict: Option<&mut MaybeUninit<vdkit_verdict>>,
    report: Option<&mut MaybeUninit<*mut c_char>>,
) -> c_int {
    call(|| {
        let place = given(verdict, "verdict")?;
        // SAFETY: the program has set the first member, says the header.
        let bytes = unsafe { (&raw const (*place.as_ptr()).struct_size).read() };
        if bytes != size_of::<vdkit_verdict>() {
            return Err(misuse("struct_size of the verdict is not set"));
        }
        place.write(vdkit_verdict::NONE);
        border::known(flags, VDKIT_INSPECT_STRICT)?;
        // SAFETY: the header's promise.
        let (path, format) = unsafe { (border::path(path, "path")?, border::maybe_text(format)?) };
        let inner = vdkit::registry().open_storage(path, &FileOptions::read_only())?;
        let (len, watch) = (inner.len()?, Watch::new(monitor)?);
        watch.reached(0, len)?;
        let storage = Arc::new(WatchedReads { inner, len, watch, read: AtomicU64::new(0) });
        let mut options = InspectOptions::default();
        options.format = format.map(str::to_owned);
        options.strict = flags & VDKIT_INSPECT_STRICT != 0;
        let found = inspect(storage, &options)?;
        put_report(report, &found);
        place.write(vdkit_verdict::of(&found));
        Ok(())
    })
}

/// Tells a program of each read, which it may end.
#[derive(Debug)]
struct WatchedReads {
    inner: Arc<dyn Storage>,
    len: u64,
    watch: Watch,
    read: AtomicU64,
}

impl vdkit::StorageLayer for WatchedReads {
    const INTERCEPTS: bool = true;

    fn inner(&self) -> &dyn Storage {
        &*self.inner
    }

    fn read_up_to(&self, buf: &mut [u8], offset: HostOffset) -> Result<usize> {
        let got = self.inner.read_up_to(buf, offset)?;
        let read = self.read.fetch_add(got as u64, Ordering::Relaxed) + got as u64;
        // Parts of a file may be read twice.
        self.watch.reached(read, self.len.max(read))?;
        Ok(got)
    }
}
