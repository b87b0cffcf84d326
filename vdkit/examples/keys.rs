//! Adds a passphrase to an encrypted image, and lists its key slots: `keys FILE PASSPHRASE NEW-PASSPHRASE`.

use std::path::Path;

use vdkit::jobs::{add_key, list_keys};
use vdkit::{Monitor, OpenOptions, Secret};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [file, old, new] = &args[..] else {
        return Err("usage: keys FILE PASSPHRASE NEW-PASSPHRASE".into());
    };
    let (registry, path, monitor) = (vdkit::registry(), Path::new(file), Monitor::default());
    let secret = |text: &str| Secret::new(text.as_bytes().to_vec());
    let (opening, new) = (OpenOptions::read_write().keys(vec![secret(old)]), secret(new));
    // The machine takes 100 ms to try the new one, and so does who guesses it.
    add_key(&registry, path, &opening, &new, None, 100, &monitor)?;
    let opening = OpenOptions::read_only().keys(vec![new]);
    let listed = list_keys(&registry, path, &opening, &monitor)?;
    for slot in listed.slots.iter().filter(|slot| slot.active) {
        let opened = listed.opened.contains(&slot.number);
        println!("slot {}{}", slot.number, if opened { ": the new passphrase" } else { "" });
    }
    Ok(())
}
