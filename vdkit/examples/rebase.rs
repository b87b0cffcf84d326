//! Gives an overlay another backing image, or none, keeping what its guest sees:
//! `rebase OVERLAY [BACKING FORMAT]`.

use std::path::Path;

use vdkit::jobs::{NewBacking, RebaseOptions, rebase};
use vdkit::{Monitor, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [overlay, backing @ ..] = &args[..] else {
        return Err("usage: rebase OVERLAY [BACKING FORMAT]".into());
    };
    let mut options = RebaseOptions::default();
    options.backing = backing.first().map(|name| NewBacking::new(name, backing.get(1).cloned()));
    let opening = OpenOptions::read_write();
    let path = Path::new(overlay);
    let report = rebase(&vdkit::registry(), path, &opening, &options, &Monitor::default())?;
    println!("{} bytes copied", report.copied);
    Ok(())
}
