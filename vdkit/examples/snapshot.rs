//! Takes a snapshot within an image, and lists them: `snapshot FILE NAME`.

use vdkit::jobs::{SnapshotAction, snapshot, snapshots};
use vdkit::{Disk, Monitor, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, name] = &args[..] else { return Err("usage: snapshot FILE NAME".into()) };
    let disk = Disk::open(&vdkit::registry(), file, &OpenOptions::read_write())?;
    snapshot(&disk, &SnapshotAction::Create(name.clone()), &Monitor::default())?;
    for found in snapshots(&disk)? {
        println!("{} {}", found.id, found.name);
    }
    disk.close()?;
    Ok(())
}
