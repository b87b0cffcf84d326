//! Packs a disk into an appliance (OVA), and takes it out again: `appliance SOURCE NEW.ova TARGET FORMAT`.

use std::path::Path;

use vdkit::jobs::{
    ConvertOptions, Destination, Extraction, NewAppliance, NewImage, Source, extract,
    open_packaged, pack,
};
use vdkit::ova::{Machine, OPTIONS, Package, PackageLimits};
use vdkit::storage::FileOptions;
use vdkit::{Disk, Monitor, OpenOptions, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [source, appliance, target, format] = &args[..] else {
        return Err("usage: appliance SOURCE NEW.ova TARGET FORMAT".into());
    };
    let (registry, monitor, opening) =
        (vdkit::registry(), Monitor::default(), OpenOptions::read_only());
    let source = Source::new(vec![Disk::open(&registry, source, &opening)?]);
    let machine = Machine::new(&Options::parse("ova", OPTIONS, ["cpus=2"])?, "guest")?;
    pack(&registry, &[source], &NewAppliance::new(appliance, "guest", machine), &monitor)?;

    let storage = registry.open_storage(Path::new(appliance), &FileOptions::read_only())?;
    let package = Package::open(storage, &PackageLimits::default())?;
    // A disk that is compressed as a whole is unpacked in this folder.
    let disk = open_packaged(&registry, &package, 0, &opening, Path::new("."), &monitor)?;
    let how = ConvertOptions::new(Destination::New(NewImage::new(target, format)));
    let part = Extraction::new(0, Source::new(vec![disk]), how);
    let report = extract(&registry, &package, vec![part], None, &monitor)?;
    println!("{}: manifest {}", report.disks[0].file, report.manifest);
    Ok(())
}
