//! Copies a part of a disk into a new image: `dd SOURCE TARGET FORMAT FIRST-BLOCK BLOCKS`, in blocks of 1 MiB.

use vdkit::jobs::{DdOptions, NewImage, dd_new};
use vdkit::{Disk, Monitor, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [source, target, format, first, count] = &args[..] else {
        return Err("usage: dd SOURCE TARGET FORMAT FIRST-BLOCK BLOCKS".into());
    };
    let registry = vdkit::registry();
    let disk = Disk::open(&registry, source, &OpenOptions::read_only())?;
    let mut options = DdOptions::default();
    (options.block_bytes, options.skip) = (1 << 20, first.parse()?);
    options.count = Some(count.parse()?);
    let new = NewImage::new(target, format);
    let done = dd_new(&registry, &disk, &new, &options, &Monitor::default())?;
    println!("{} bytes, {} of them zero", done.copied_bytes, done.zero_bytes);
    Ok(())
}
