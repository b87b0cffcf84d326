//! Shows which image stands on which: `tree FILE|FOLDER`.

use std::path::Path;

use vdkit::Monitor;
use vdkit::jobs::{TreeOptions, tree};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(path) = std::env::args().nth(1) else { return Err("usage: tree FILE|FOLDER".into()) };
    let options = TreeOptions::default();
    let found = tree(&vdkit::registry(), Path::new(&path), &options, &Monitor::default())?;
    for image in &found.images {
        let name = image.path.display();
        match &image.backing {
            Some(backing) => println!("{name} on {} ({:?})", backing.name, backing.standing),
            None => println!("{name}"),
        }
    }
    Ok(())
}
