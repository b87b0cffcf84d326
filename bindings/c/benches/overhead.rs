//! What a 4 KiB read costs more through the C functions than by the Rust call: the same reads of the same
//! image in the page cache, a batch of each in turn. Prints medians, and the median ratio of neighbors.
//!
//! ```sh
//! cargo bench -p vdkit-c --bench overhead
//! ```

use std::ffi::CString;
use std::hint::black_box;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use vdkit::jobs::{CreateOptions, create};
use vdkit::{Disk, GuestOffset, Monitor, OpenOptions};
use vdkit_c::disk::{vdkit_close, vdkit_open, vdkit_pread};

const DISK_BYTES: u64 = 64 << 20;
const READ_BYTES: usize = 4096;
const READS: u64 = 4000;
const BATCHES: usize = 400;

fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("disk.qcow2");
    make(&path).expect("an image");
    let disk = Disk::open(&vdkit::registry(), &path, &OpenOptions::read_only()).expect("a disk");
    let name = CString::new(path.as_os_str().as_encoded_bytes()).expect("no NUL in the name");
    let mut handle = MaybeUninit::uninit();
    // SAFETY: the name ends with a NUL, and there is room for the handle.
    assert_eq!(unsafe { vdkit_open(name.as_ptr(), None, Some(&mut handle)) }, 0);
    // SAFETY: the call succeeded, so it is set.
    let handle = unsafe { handle.assume_init() };

    let mut buf = vec![0_u8; READ_BYTES];
    let rust = |at: u64, buf: &mut [u8]| disk.read_at(buf, GuestOffset(at)).expect("a read");
    let c = |at: u64, buf: &mut [u8]| {
        // SAFETY: the handle is open until the end, and the buffer is as long as said.
        let done = unsafe { vdkit_pread(handle.as_ref(), buf.as_mut_ptr().cast(), buf.len(), at) };
        assert_eq!(done, 0);
    };
    let mut pairs = Vec::new();
    for batch in 0..=BATCHES {
        // Each begins as often as the other.
        let pair = if batch % 2 == 0 {
            let first = timed(&mut buf, rust);
            (first, timed(&mut buf, c))
        } else {
            let first = timed(&mut buf, c);
            (timed(&mut buf, rust), first)
        };
        // The first one fills caches.
        if batch > 0 {
            pairs.push(pair);
        }
    }
    // SAFETY: nothing uses it any more.
    assert_eq!(unsafe { vdkit_close(handle) }, 0);
    report(&pairs);
}

fn make(path: &std::path::Path) -> vdkit::Result<()> {
    let registry = vdkit::registry();
    let image = CreateOptions::new(path, vdkit::format("qcow2")?).guest_bytes(DISK_BYTES);
    create(&registry, &image, &Monitor::default())?;
    let disk = Disk::open(&registry, path, &OpenOptions::read_write())?;
    for at in (0..DISK_BYTES).step_by(1 << 20) {
        disk.write_at(&vec![0xa5; 1 << 20], GuestOffset(at))?;
    }
    disk.close()
}

/// A batch of reads all over the disk, in the same order each time.
fn timed(buf: &mut [u8], read: impl Fn(u64, &mut [u8])) -> Duration {
    let begun = Instant::now();
    for i in 0..READS {
        let page = i.wrapping_mul(0x9e37_79b9) % (DISK_BYTES / READ_BYTES as u64);
        read(page * READ_BYTES as u64, buf);
        black_box(&mut *buf);
    }
    begun.elapsed()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn report(pairs: &[(Duration, Duration)]) {
    let nanoseconds = |batch: &Duration| batch.as_secs_f64() * 1e9 / READS as f64;
    let rust = median(pairs.iter().map(|(rust, _)| nanoseconds(rust)).collect());
    let c = median(pairs.iter().map(|(_, c)| nanoseconds(c)).collect());
    let ratio = median(pairs.iter().map(|(r, c)| c.as_secs_f64() / r.as_secs_f64()).collect());
    println!("a read of 4 KiB: {rust:.0} ns in Rust, {c:.0} ns through C, ratio {ratio:.4}");
}
