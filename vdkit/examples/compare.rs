//! Compares what two disks hold, whatever their formats: `compare A B`.

use vdkit::jobs::{CompareOptions, compare};
use vdkit::{Disk, Monitor, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [a, b] = &args[..] else { return Err("usage: compare A B".into()) };
    let registry = vdkit::registry();
    let open = |path: &str| Disk::open(&registry, path, &OpenOptions::read_only());
    let report = compare(&open(a)?, &open(b)?, &CompareOptions::default(), &Monitor::default())?;
    match report.first_difference {
        None => println!("identical"),
        Some(offset) => println!("different from offset {offset}"),
    }
    Ok(())
}
