//! Converts a whole disk to nothing, which measures the reading side of a conversion alone.

use crate::error::Result;

use super::{Bench, values};
use crate::layout::{self, Content};
use crate::model::Sample;
use crate::peers::{need, skip};
use crate::process::Line;

pub(super) fn sample(bench: &mut Bench<'_>) -> Result<Sample> {
    let (layout, bytes) = (bench.layout()?, bench.disk_bytes()?);
    let content = bench.content(false);
    if layout.options.contains("preallocation=") && content == Content::Full {
        return skip("the whole disk is written, so its preallocation makes no difference");
    }
    let image = layout::make(bench, layout, bytes, content)?;
    if image.shown_bytes != bytes {
        return skip(
            "a conversion of a raw device reads the whole device, which is larger than the disk",
        );
    }
    let line = match bench.axis("tool") {
        Some("qemu-img") => Line::new(need("qemu-img")?)
            .args(["convert", "-n", "-f", image.format])
            .arg(&image.path)
            .arg("--target-image-opts")
            .arg(format!("driver=null-co,size={bytes}")),
        Some("library") => return skip("'convert' is a command: tool vdkit or qemu-img"),
        _ => bench.vdkit(&["convert", "-f", image.format]).arg(&image.path).arg("null:"),
    };
    // The image is warm, as in the published table, and written back, so that no writeback disturbs
    // the measurement.
    super::sync(&image.files)?;
    let ended = bench.run(&line.timed())?;
    let seconds = ended.elapsed.as_secs_f64();
    let mut values = values([
        ("elapsed_seconds", seconds),
        ("bytes_per_second", bytes as f64 / seconds.max(1e-9)),
    ]);
    values.extend(layout::host_bytes(&image));
    Ok(Sample { values, ..Sample::default() })
}
