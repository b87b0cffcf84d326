//! What the fuzz targets run, as plain functions of bytes: the targets in `fuzz/` call them with
//! what the fuzzer thinks of, and ordinary tests with the kept corpus.
//!
//! A function here panics where the code under test breaks a promise, and only then.

mod formats;
mod hostile;
mod lives;
mod luks;
#[cfg(feature = "nbd")]
mod nbd;
mod operations;
#[cfg(feature = "ova")]
mod ova;
mod vhdx;

pub use formats::format_open;
pub use hostile::qcow2_open_read;
pub use lives::{vdi_ops, vhd_ops, vhdx_ops, vmdk_ops};
pub use luks::luks_open;
#[cfg(feature = "nbd")]
pub use nbd::nbd_session;
pub use operations::{qcow2_life, qcow2_ops};
#[cfg(feature = "ova")]
pub use ova::ova_open;
pub use vhdx::vhdx_open;

use std::sync::Arc;

use vdkit_block::{
    CheckReport, Format, ImageInfo, Limits, Monitor, OpenRequest, Repair, Result, Secret, Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_qcow2::{Qcow2, check};

/// Little enough that a lie about a size is refused rather than believed.
const LIMITS: Limits = {
    let mut limits = Limits::DEFAULT;
    limits.table_bytes_max = 1 << 20;
    limits.snapshots_bytes_max = 1 << 20;
    limits.files_max = 4;
    limits.chain_depth_max = 4;
    limits.cache_bytes = 64 << 10;
    limits.compressed_bytes_max = 4 << 20;
    limits.check_bytes_max = 16 << 20;
    limits.key_rounds_max = 1 << 12;
    limits
};

/// What opens the encrypted images of the corpus.
fn key() -> Secret {
    Secret::new(b"fuzz".to_vec())
}

fn run_check(
    storage: &Arc<dyn Storage>,
    data_file: Option<&Arc<dyn Storage>>,
    repair: Repair,
) -> Result<CheckReport> {
    let monitor = Monitor::default();
    check::check(storage, data_file, repair, &LIMITS, &monitor)
}

/// Opens an image as a disk that stands on nothing.
fn open(
    storage: &Arc<dyn Storage>,
    data_file: Option<&Arc<dyn Storage>>,
    writable: bool,
) -> Result<Disk> {
    let request = OpenRequest {
        storage: storage.clone(),
        files: data_file.cloned().into_iter().collect(),
        writable,
        limits: LIMITS,
    };
    let format: Arc<dyn Format> = Qcow2::open_with_keys(request, &[key()])?;
    let options = if writable { OpenOptions::read_write() } else { OpenOptions::read_only() };
    let options = options.limits(LIMITS);
    Ok(Disk::from_format(format, ImageInfo::new("qcow2", 0), &options))
}
