//! Copies a range of one disk to a range of another, in blocks, like `dd`.

use std::ops::Range;

use serde::Serialize;
use vdkit_block::{Error, GuestOffset, Monitor, Result};
use vdkit_chain::{Disk, Registry};

use crate::mover::zero_max;
use crate::runs::Runs;
use crate::target::{NewImage, Target};

/// Bytes per read and write.
const STEP_BYTES: u64 = 1 << 20;

/// Options of dd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DdOptions {
    /// Bytes per block, the unit of the other counts; not 0.
    pub block_bytes: u64,
    /// Blocks to copy; `None` for all up to the end of the source.
    pub count: Option<u64>,
    /// Blocks to skip at the start of the source.
    pub skip: u64,
    /// Blocks to skip at the start of the target.
    pub seek: u64,
    /// Skip zeroes of the source: the target keeps its content there.
    pub sparse: bool,
    /// Sync the target at the end, and the name of a new one.
    pub sync: bool,
    /// A new target's size is rounded up to a multiple of this.
    pub size_unit: u64,
}

impl Default for DdOptions {
    /// The whole source, in blocks of 512 bytes.
    fn default() -> Self {
        Self {
            block_bytes: 512,
            count: None,
            skip: 0,
            seek: 0,
            sparse: false,
            sync: false,
            size_unit: 1,
        }
    }
}

/// The ranges to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DdPlan {
    /// First byte of the source.
    pub from: u64,
    /// First byte of the target.
    pub to: u64,
    /// Bytes to copy.
    pub len: u64,
}

/// Result of dd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct DdReport {
    /// Bytes of the source that the target now has.
    pub copied_bytes: u64,
    /// Of these, bytes read and written.
    pub data_bytes: u64,
    /// Of these, bytes that are zero by the source's map.
    pub zero_bytes: u64,
}

impl DdPlan {
    /// Computes the ranges for a source of `source_bytes` bytes. Blocks past its end are skipped.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a block size of 0 and for offsets past 2^63.
    pub fn new(source_bytes: u64, options: &DdOptions) -> Result<Self> {
        if options.block_bytes == 0 {
            return Err(Error::invalid("blocks must have at least one byte"));
        }
        let bytes = |blocks: u64, what: &str| {
            let bytes = blocks.checked_mul(options.block_bytes).filter(|&b| b <= i64::MAX as u64);
            bytes.ok_or_else(|| {
                Error::invalid(format!("{what} of {blocks} blocks passes 2^63 bytes"))
            })
        };
        let from = bytes(options.skip, "skip")?.min(source_bytes);
        let to = bytes(options.seek, "seek")?;
        // Clamp to the end of the source.
        let wanted = options.count.map_or(u64::MAX, |n| n.saturating_mul(options.block_bytes));
        Ok(Self { from, to, len: wanted.min(source_bytes - from) })
    }

    /// Size of a new target in bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] past 2^63.
    pub fn target_bytes(&self) -> Result<u64> {
        self.to
            .checked_add(self.len)
            .filter(|&bytes| bytes <= i64::MAX as u64)
            .ok_or_else(|| Error::invalid("the target would pass 2^63 bytes"))
    }

    /// Copies. The target must be another image, open for writing, and contain the range.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a target that is too small; [`Error::Interrupted`]; errors of the
    /// disks. Bytes copied before an error stay.
    pub fn run(
        &self,
        source: &Disk,
        target: &Disk,
        options: &DdOptions,
        monitor: &Monitor<'_>,
    ) -> Result<DdReport> {
        let end = self.target_bytes()?;
        if target.guest_bytes() < end {
            return Err(Error::invalid_for(
                &target.name(),
                format!("its {} bytes are too few: {end} are needed", target.guest_bytes()),
            ));
        }
        let mut report = DdReport { copied_bytes: 0, data_bytes: 0, zero_bytes: 0 };
        let mut buffer = Vec::new();
        let mut runs = Runs::new(source, self.from, self.len)?;
        while let Some(run) = runs.next_run()? {
            let mut at = run.at;
            while at < run.end() {
                monitor.cancel.check()?;
                let to = GuestOffset(self.to + (at - self.from));
                let step = if run.is_zero() { zero_max(target) } else { STEP_BYTES };
                let len = step.min(run.end() - at);
                if !run.is_zero() {
                    buffer.resize(len as usize, 0);
                    source.read_at(&mut buffer, GuestOffset(at))?;
                    target.write_at(&buffer, to)?;
                    report.data_bytes += len;
                } else {
                    if !options.sparse {
                        target.write_zeroes(to, len, true)?;
                    }
                    report.zero_bytes += len;
                }
                at += len;
                report.copied_bytes += len;
                monitor.progress.update(report.copied_bytes, self.len);
            }
        }
        if options.sync {
            target.flush()?;
        }
        Ok(report)
    }
}

/// Zeroes a range in steps between which a cancellation is seen.
fn make_zero(disk: &Disk, range: Range<u64>, monitor: &Monitor<'_>) -> Result<()> {
    let mut at = range.start;
    while at < range.end {
        monitor.cancel.check()?;
        let len = zero_max(disk).min(range.end - at);
        disk.write_zeroes(GuestOffset(at), len, true)?;
        at += len;
    }
    Ok(())
}

/// Copies into a new image, sized by the options. It gets its name when it is complete; on failure
/// an existing file is unchanged.
///
/// # Errors
/// As [`DdPlan::run`], and errors of creating the image.
pub fn dd_new(
    registry: &Registry,
    source: &Disk,
    new: &NewImage,
    options: &DdOptions,
    monitor: &Monitor<'_>,
) -> Result<DdReport> {
    let plan = DdPlan::new(source.guest_bytes(), options)?;
    let bytes = plan.target_bytes()?.next_multiple_of(options.size_unit.max(1));
    let mut target = Target::create(registry, new, bytes, None, &monitor.cancel)?;
    if options.sync {
        target.make_durable();
    }
    if !target.disk.top().new_reads_zero() {
        make_zero(&target.disk, 0..plan.to, monitor)?;
        // The format may have rounded the size.
        make_zero(&target.disk, plan.to + plan.len..target.disk.guest_bytes(), monitor)?;
    }
    // New space mostly reads as zero already.
    let options = DdOptions { sparse: target.disk.top().new_reads_zero(), ..*options };
    let report = plan.run(source, &target.disk, &options, monitor)?;
    target.close()?;
    target.commit(&monitor.cancel)?;
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vdkit_raw::RawDriver;
    use vdkit_testbase::{disk_of, noise};

    fn plan(bytes: u64, count: Option<u64>, skip: u64, seek: u64) -> (u64, u64, u64) {
        let options = DdOptions { count, skip, seek, ..DdOptions::default() };
        let plan = DdPlan::new(bytes, &options).unwrap();
        (plan.from, plan.to, plan.len)
    }

    #[test]
    fn blocks_are_counted_within_the_source() {
        assert_eq!(plan(10_000, None, 0, 0), (0, 0, 10_000));
        assert_eq!(plan(10_000, Some(2), 3, 4), (1536, 2048, 1024));
        assert_eq!(plan(10_000, Some(100), 19, 0), (9728, 0, 272));
        assert_eq!(plan(10_000, None, 20, 1), (10_000, 512, 0));
        assert_eq!(plan(0, None, 0, 0), (0, 0, 0));
        assert_eq!(plan(10_000, Some(u64::MAX), 0, 0), (0, 0, 10_000));
    }

    #[test]
    fn numbers_that_are_too_large_are_refused() {
        let of =
            |options: DdOptions| DdPlan::new(1 << 40, &options).map(|plan| plan.target_bytes());
        let base = DdOptions::default();
        assert!(of(DdOptions { block_bytes: 0, ..base }).is_err());
        assert!(of(DdOptions { skip: u64::MAX, ..base }).is_err());
        assert!(of(DdOptions { seek: u64::MAX, ..base }).is_err());
        let seek = (i64::MAX as u64) / 512;
        assert!(of(DdOptions { seek, ..base }).unwrap().is_err());
    }

    #[test]
    fn a_part_is_copied_and_the_rest_stays() {
        let data = noise(1, 3000);
        let source = disk_of(&RawDriver, 1 << 20, &[(0, &data), (600 << 10, &data)]);
        for sparse in [false, true] {
            let before = vec![7; 2 << 20];
            let target = disk_of(&RawDriver, 2 << 20, &[(0, &before)]);
            let options = DdOptions {
                block_bytes: 1000,
                count: Some(700),
                skip: 1,
                seek: 3,
                sparse,
                sync: true,
                size_unit: 512,
            };
            let plan = DdPlan::new(source.guest_bytes(), &options).unwrap();
            let report = plan.run(&source, &target, &options, &Monitor::default()).unwrap();
            assert_eq!(report.copied_bytes, 700_000);
            assert_eq!(report.copied_bytes, report.data_bytes + report.zero_bytes);
            assert!(report.data_bytes < 20_000, "{report:?}");

            let mut wanted = before;
            let mut from = vec![0; 1 << 20];
            source.read_at(&mut from, GuestOffset(0)).unwrap();
            wanted[3000..703_000].copy_from_slice(&from[1000..701_000]);
            let mut found = vec![0; 2 << 20];
            target.read_at(&mut found, GuestOffset(0)).unwrap();
            if sparse {
                // Zeroes known from the map were skipped.
                for (found, wanted) in found.iter_mut().zip(&wanted) {
                    if *wanted == 0 && *found == 7 {
                        *found = 0;
                    }
                }
            }
            assert!(found == wanted);
        }
    }

    #[test]
    fn a_target_that_is_too_small_is_left_alone() {
        let source = disk_of(&RawDriver, 4096, &[(0, &[1; 4096])]);
        let target = disk_of(&RawDriver, 4096, &[]);
        let options = DdOptions { seek: 1, ..DdOptions::default() };
        let plan = DdPlan::new(4096, &options).unwrap();
        assert_eq!(plan.target_bytes().unwrap(), 4608);
        assert!(plan.run(&source, &target, &options, &Monitor::default()).is_err());
        let mut found = vec![9; 4096];
        target.read_at(&mut found, GuestOffset(0)).unwrap();
        assert_eq!(found, vec![0; 4096]);
    }
}
