//! Computes the size of a converted or new image.

use serde::Serialize;
use vdkit_block::{FormatDriver, Measured, Monitor, Options, Result};
use vdkit_chain::Disk;

use vdkit_copy::runs::Runs;

/// Required sizes of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub struct MeasureReport {
    /// Bytes with the current data, uncompressed.
    pub required: u64,
    /// Bytes with every guest byte allocated.
    pub fully_allocated: u64,
    /// Bytes of the guest disk.
    pub guest_bytes: u64,
    /// Clusters of the new image with data.
    pub data_clusters: u64,
    /// Cluster size in bytes.
    pub cluster_bytes: u64,
}

/// Measures the conversion of concatenated disks. Only maps are read.
///
/// Source clusters in holes of its file count as zeroes, as in a conversion; `qemu-img measure`
/// mostly counts them as data.
///
/// # Errors
/// Errors of the driver about the options; errors of the source's maps.
pub fn measure(
    disks: &[Disk],
    driver: &dyn FormatDriver,
    options: &Options,
    monitor: &Monitor<'_>,
) -> Result<MeasureReport> {
    let cluster_bytes = driver.require_creation("a new image")?.cluster_bytes(options)?.max(1);
    let total = disks.iter().fold(0u64, |sum, disk| sum.saturating_add(disk.guest_bytes()));
    let mut data_clusters = 0;
    // The first cluster not yet counted.
    let mut uncounted = 0;
    let mut start = 0u64;
    for disk in disks {
        let mut runs = Runs::new(disk, 0, disk.guest_bytes())?;
        while let Some(run) = runs.next_run()? {
            monitor.progress.update(start + run.end(), total);
            monitor.cancel.check()?;
            if run.is_zero() {
                continue;
            }
            let first = ((start + run.at) / cluster_bytes).max(uncounted);
            let end = (start + run.end()).div_ceil(cluster_bytes);
            data_clusters += end.saturating_sub(first);
            uncounted = uncounted.max(end);
        }
        start = start.saturating_add(disk.guest_bytes());
    }
    report(total, driver, options, data_clusters)
}

/// Measures a new, empty image of `guest_bytes`.
///
/// # Errors
/// Errors of the driver about the options and the size.
pub fn measure_empty(
    guest_bytes: u64,
    driver: &dyn FormatDriver,
    options: &Options,
) -> Result<MeasureReport> {
    report(guest_bytes, driver, options, 0)
}

fn report(
    guest_bytes: u64,
    driver: &dyn FormatDriver,
    options: &Options,
    data_clusters: u64,
) -> Result<MeasureReport> {
    let creation = driver.require_creation("a new image")?;
    let Measured { required, fully_allocated } =
        creation.measure(guest_bytes, options, data_clusters)?;
    let cluster_bytes = creation.cluster_bytes(options)?;
    Ok(MeasureReport { required, fully_allocated, guest_bytes, data_clusters, cluster_bytes })
}

#[cfg(test)]
mod tests {
    use vdkit_block::Creation;
    use vdkit_raw::RawDriver;

    use super::*;
    use vdkit_testbase::disk_of;

    #[test]
    fn each_cluster_with_data_counts_once() {
        let unit = RawDriver.cluster_bytes(&Options::default()).unwrap().max(1);
        let len = 64 * unit;
        // Data in two clusters; the border between two disks lies in one of them.
        let first = disk_of(&RawDriver, len, &[(unit * 3, &[1]), (len - 512, &[2])]);
        let second = disk_of(&RawDriver, len, &[(0, &[3; 512])]);
        let disks = [first, second];
        let report = measure(&disks, &RawDriver, &Options::default(), &Monitor::default()).unwrap();
        assert_eq!(report.guest_bytes, 2 * len);
        assert_eq!(report.fully_allocated, 2 * len);
        assert!(report.data_clusters >= 3, "{report:?}");
        let empty = measure_empty(len, &RawDriver, &Options::default()).unwrap();
        assert_eq!((empty.data_clusters, empty.guest_bytes), (0, len));
    }
}
