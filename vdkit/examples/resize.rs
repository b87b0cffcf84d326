//! Makes a disk larger: `resize FILE BYTES`.

use vdkit::jobs::{ResizeOptions, resize};
use vdkit::{Disk, Monitor, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, bytes] = &args[..] else { return Err("usage: resize FILE BYTES".into()) };
    let disk = Disk::open(&vdkit::registry(), file, &OpenOptions::read_write())?;
    // Smaller needs `shrink`: what lies beyond the new end is lost.
    resize(&disk, bytes.parse()?, &ResizeOptions::default(), &Monitor::default())?;
    println!("{} bytes", disk.guest_bytes());
    disk.close()?;
    Ok(())
}
