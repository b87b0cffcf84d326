//! Which parts of a disk changed: adds a dirty bitmap, writes, and lists what is dirty:
//! `bitmap FILE NAME`.

use vdkit::jobs::bitmaps;
use vdkit::{Disk, GuestOffset, NewBitmap, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, name] = &args[..] else { return Err("usage: bitmap FILE NAME".into()) };
    let disk = Disk::open(&vdkit::registry(), file, &OpenOptions::read_write())?;
    let bitmaps = bitmaps(&disk)?;
    bitmaps.add(&NewBitmap { name, granularity: Some(64 << 10), enabled: true })?;
    disk.write_at(b"changed", GuestOffset(3 << 20))?;
    disk.flush()?;
    bitmaps.for_each_dirty(name, &mut |range| {
        println!("{} +{}", range.start, range.end - range.start);
        Ok(())
    })?;
    disk.close()?;
    Ok(())
}
