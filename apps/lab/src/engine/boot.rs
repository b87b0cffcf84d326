//! Opens many overlays of one image at once and reads from each, as when guests boot after a power
//! failure.

use std::path::PathBuf;

use crate::error::Result;

use super::{Bench, drop_caches, open};
use crate::layout::{self, Content, More};
use crate::model::Sample;
use crate::peers::skip;

/// Bytes that each guest reads first.
const FIRST: u64 = 1 << 20;

pub(super) fn sample(bench: &mut Bench<'_>) -> Result<Sample> {
    let (layout, bytes, count) = (bench.layout()?, bench.disk_bytes()?, bench.images());
    if layout.more != More::Backing {
        return skip("several guests boot from overlays of one image: layout qcow2-overlay");
    }
    let images = (0..count)
        .map(|i| layout::make_named(bench, layout, bytes, Content::All, &format!("guest{i}")))
        .collect::<Result<Vec<_>>>()?;
    let files: Vec<PathBuf> = images.iter().flat_map(|image| image.files.clone()).collect();
    drop_caches(&files)?;
    open::measure(bench, &images, 0, FIRST.min(bytes))
}
