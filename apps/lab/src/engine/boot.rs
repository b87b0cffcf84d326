//! Opens many overlays of one image at once and reads from each, as when guests boot after a power
//! failure.

use crate::error::Result;

use super::{Bench, open};
use crate::layout::{Content, More};
use crate::model::Sample;
use crate::peers::skip;

/// Bytes that each guest reads first.
const FIRST: u64 = 1 << 20;

pub(super) fn sample(bench: &mut Bench<'_>) -> Result<Sample> {
    let bytes = bench.disk_bytes()?;
    if bench.layout()?.more != More::Backing {
        return skip("several guests boot from overlays of one image: layout qcow2-overlay");
    }
    let images = open::cold_images(bench, Content::All, "guest")?;
    open::measure(bench, &images, 0, FIRST.min(bytes))
}
