//! Moves an overlay's data into its backing image: `commit OVERLAY`.

use std::path::Path;

use vdkit::jobs::{CommitOptions, commit};
use vdkit::{Monitor, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(overlay) = std::env::args().nth(1) else { return Err("usage: commit OVERLAY".into()) };
    let report = commit(
        &vdkit::registry(),
        Path::new(&overlay),
        &OpenOptions::read_write(),
        &CommitOptions::default(),
        &Monitor::default(),
    )?;
    println!("into {}: now {} bytes", report.base.display(), report.base_size);
    Ok(())
}
