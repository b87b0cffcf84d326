//! The bodies of the fuzz targets, as functions of bytes: the targets in `dev/fuzz` call them with
//! the fuzzer's inputs, and ordinary tests with the corpus.
//!
//! A function here panics if, and only if, the code under test breaks a guarantee.

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

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vdkit_block::{
    CheckReport, Format, ImageInfo, Limits, Monitor, OpenRequest, Repair, Result, Secret, Storage,
};
use vdkit_chain::{Disk, OpenOptions};
use vdkit_qcow2::{Qcow2, check};
use vdkit_testbase::Rng;

/// The kept inputs of a target.
fn corpus(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut files: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 10, "{} has {} inputs", folder.display(), files.len());
    files
}

/// Runs a target on its kept inputs; panics with the names of those that fail.
pub fn replay(target: &str, run: fn(&[u8])) {
    let mut failed = corpus(target);
    failed.retain(|file| catch_unwind(|| run(&fs::read(file).unwrap())).is_err());
    assert!(failed.is_empty(), "failed: {failed:?}");
}

/// Calls `run` with the seeds from 1 to `usually`, or to `VDKIT_FUZZ_SEEDS`; panics with those that
/// fail.
pub fn for_fuzz_seeds(usually: u64, run: impl Fn(u64)) {
    let asked = std::env::var("VDKIT_FUZZ_SEEDS").ok().and_then(|n| n.parse().ok());
    let mut failed: Vec<u64> = (1..=asked.unwrap_or(usually)).collect();
    failed.retain(|seed| catch_unwind(AssertUnwindSafe(|| run(*seed))).is_err());
    assert!(failed.is_empty(), "failed seeds: {failed:?}");
}

/// Runs a target on each of its kept inputs with changes, as many as [`for_fuzz_seeds`] has seeds.
pub fn near_corpus(
    target: &str,
    usually: u64,
    run: fn(&[u8]),
    change: impl Fn(&mut Rng, &mut [u8]),
) {
    for file in corpus(target) {
        let kept = fs::read(&file).unwrap();
        let around = AssertUnwindSafe(|| {
            for_fuzz_seeds(usually, |seed| {
                let mut input = kept.clone();
                change(&mut Rng::new(seed), &mut input);
                run(&input);
            });
        });
        assert!(catch_unwind(around).is_ok(), "near {}", file.display());
    }
}

/// So small that an image with a false size is refused.
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

/// Opens an image as a disk without a backing image.
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
