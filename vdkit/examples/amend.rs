//! Changes options of an existing image: `amend FILE OPTION=VALUE...`.

use std::path::Path;

use vdkit::jobs::amend;
use vdkit::{Monitor, OpenOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, options @ ..] = &args[..] else {
        return Err("usage: amend FILE OPTION=VALUE...".into());
    };
    let (texts, opening) = (options.iter().map(String::as_str), OpenOptions::read_write());
    let monitor = Monitor::default();
    let done = amend(&vdkit::registry(), Path::new(file), &opening, texts, &monitor)?;
    println!("changed: {}", done.changed.join(", "));
    Ok(())
}
