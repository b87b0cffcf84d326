//! Converts an image, showing progress: `convert FROM TO FORMAT`.

use vdkit::jobs::{ConvertOptions, Destination, NewImage, Source, convert};
use vdkit::{Disk, Monitor, OpenOptions, Progress};

struct Bar;

impl Progress for Bar {
    fn update(&self, done: u64, total: u64) {
        eprint!("\r{:3} %", done * 100 / total.max(1));
    }

    fn message(&self, text: &str) {
        eprintln!("\r{text}");
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [from, to, format] = &args[..] else {
        return Err("usage: convert FROM TO FORMAT".into());
    };
    let registry = vdkit::registry();
    let disk = Disk::open(&registry, from, &OpenOptions::read_only())?;
    let mut options = ConvertOptions::new(Destination::New(NewImage::new(to, format)));
    options.verify = true;
    let monitor = Monitor::new(&Bar);
    let report = convert(&registry, &Source::new(vec![disk]), &options, &monitor)?;
    println!("{to}: {} bytes in {:.1} s", report.virtual_size, report.seconds);
    Ok(())
}
