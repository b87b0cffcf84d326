//! How large an image of a disk would be in another format: `measure FILE FORMAT`.

use vdkit::jobs::measure;
use vdkit::{Disk, Monitor, OpenOptions, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, format] = &args[..] else { return Err("usage: measure FILE FORMAT".into()) };
    let disk = Disk::open(&vdkit::registry(), file, &OpenOptions::read_only())?;
    let driver = vdkit::format(format)?;
    let report = measure(&[disk], driver, &Options::default(), &Monitor::default())?;
    println!("{} bytes; {} if all is written", report.required, report.fully_allocated);
    Ok(())
}
