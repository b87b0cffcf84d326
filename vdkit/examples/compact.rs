//! Gives an image's unused space back to the host: `compact FILE`.

use vdkit::jobs::compact;
use vdkit::{CompactOptions, Monitor, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(file) = std::env::args().nth(1) else { return Err("usage: compact FILE".into()) };
    let how = CompactOptions::default().zero_scan(true);
    let opening = OpenOptions::read_write();
    let done = compact(&vdkit::registry(), &file, &opening, how, &Monitor::default())?;
    println!("{} → {} bytes", done.report.allocated_before, done.report.allocated_after);
    Ok(())
}
