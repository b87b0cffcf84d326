//! Where a disk's data lies: `extents FILE`.

use vdkit::{Disk, DiskPlace, GuestOffset, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(file) = std::env::args().nth(1) else { return Err("usage: extents FILE".into()) };
    let disk = Disk::open(&vdkit::registry(), &file, &OpenOptions::read_only())?;
    for extent in disk.extents(GuestOffset(0), disk.guest_bytes())? {
        let extent = extent?;
        let place = match extent.place {
            DiskPlace::Data { offset, .. } => format!("data, host offset {}", offset.0),
            DiskPlace::Zero { .. } => "zero".to_owned(),
            DiskPlace::Hole => "hole".to_owned(),
            DiskPlace::Compressed { .. } => "compressed".to_owned(),
        };
        println!("{} +{}: {place}", extent.at.0, extent.len);
    }
    Ok(())
}
