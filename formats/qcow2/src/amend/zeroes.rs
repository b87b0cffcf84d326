//! Removes zero clusters from an image for a downgrade to version 2, which has no flag for them.

use vdkit_block::{AmendRequest, Format, HostOffset, Monitor, Result, ZeroMode};

use crate::check::zero_flags;

/// Removes all zero flags from the disk and its snapshots. The guest-visible content never changes.
pub(super) fn remove(request: &AmendRequest, monitor: &Monitor<'_>) -> Result<()> {
    let (storage, limits) = (&request.storage, &request.limits);
    let needed = zero_flags::prepare(storage, limits, monitor)?;
    let zeroes = if needed > 0 { clusters_of_zeroes(request, needed)? } else { Vec::new() };
    zero_flags::remove(storage, &zeroes, limits, monitor)
}

/// Allocates clusters, fills them with zeroes and leaves them unreferenced: leaks after a crash.
fn clusters_of_zeroes(request: &AmendRequest, count: u64) -> Result<Vec<u64>> {
    let image = super::open(request, true)?;
    super::and_close(&image, |image| {
        let clusters = {
            let mut meta = image.meta.lock();
            image.before_change(&mut meta)?;
            image.take_clusters(&mut meta, count as usize, &mut Vec::new())?
        };
        for &cluster in &clusters {
            let at = HostOffset(cluster << image.geometry.cluster_bits);
            image.storage.write_zeroes(at, image.geometry.cluster_bytes(), ZeroMode::MayUnmap)?;
        }
        image.flush()?;
        Ok(clusters)
    })
}
