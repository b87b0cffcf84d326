//! Creates an image: `create FILE FORMAT BYTES [BACKING FORMAT]`.

use std::path::Path;

use vdkit::jobs::{CreateOptions, NewBacking, create};
use vdkit::{Monitor, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, format, bytes, backing @ ..] = &args[..] else {
        return Err("usage: create FILE FORMAT BYTES [BACKING FORMAT]".into());
    };
    let driver = vdkit::format(format)?;
    // None of qcow2's options is needed; this is how they are given.
    let texts = if format == "qcow2" { &["cluster_size=64K"][..] } else { &[] };
    let new = CreateOptions::new(Path::new(file), driver)
        .guest_bytes(bytes.parse::<u64>()?)
        .options(Options::parse(format, driver.options(), texts.iter().copied())?)
        .backing(backing.first().map(|name| NewBacking::new(name, backing.get(1).cloned())));
    let created = create(&vdkit::registry(), &new, &Monitor::default())?;
    println!("{file}: {} bytes", created.guest_bytes);
    Ok(())
}
