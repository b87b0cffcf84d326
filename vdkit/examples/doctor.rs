//! Says what is wrong or slow about an image on this host: `doctor FILE|FOLDER`.

use std::path::Path;

use vdkit::Monitor;
use vdkit::jobs::{DoctorOptions, doctor};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(path) = std::env::args().nth(1) else {
        return Err("usage: doctor FILE|FOLDER".into());
    };
    let options = DoctorOptions::default();
    let report = doctor(&vdkit::registry(), Path::new(&path), &options, &Monitor::default())?;
    for finding in report.images.iter().flat_map(|image| &image.findings).chain(&report.findings) {
        println!("{:?}: {}", finding.severity, finding.message);
    }
    println!("{} errors, {} warnings", report.errors, report.warnings);
    Ok(())
}
