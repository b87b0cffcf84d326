//! Says whether a platform takes an image as it is: `validate FILE PLATFORM` (kvm, openstack, gcp, aws, azure, ...).

use std::path::Path;

use vdkit::OpenOptions;
use vdkit::jobs::{Preset, validate};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, platform] = &args[..] else { return Err("usage: validate FILE PLATFORM".into()) };
    let Some(preset) = Preset::ALL.into_iter().find(|preset| preset.name() == platform) else {
        return Err(format!("unknown platform '{platform}'").into());
    };
    let opening = OpenOptions::read_only();
    let report = validate(&vdkit::registry(), Path::new(file), preset, &opening)?;
    for objection in &report.objections {
        println!("{}", objection.message);
    }
    println!("{}", if report.accepted { "accepted" } else { "not accepted" });
    Ok(())
}
