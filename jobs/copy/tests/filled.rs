//! Conversions that fill their target, and conversions onto a backing image that the source's chain
//! does not have.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use vdkit_block::{BackingRef, FormatDriver, GuestOffset, Monitor};
use vdkit_chain::{Disk, OpenOptions, Registry};
use vdkit_copy::{Backing, ConvertOptions, Destination, NewImage, Source, convert};
use vdkit_qcow2::Qcow2Driver;
use vdkit_raw::RawDriver;

const MIB: usize = 1 << 20;

fn registry() -> Registry {
    let drivers: [&'static dyn FormatDriver; 2] = [&Qcow2Driver, &RawDriver];
    Registry::new(drivers)
}

fn raw(path: &Path) -> Disk {
    Disk::open(&registry(), path, &OpenOptions::read_only().format("raw")).unwrap()
}

fn new_image(path: &Path, format: &str, backing: Option<BackingRef>) -> Destination {
    Destination::New(NewImage::new(path, format).backing(backing))
}

#[test]
fn a_filled_target_has_all_its_space() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("from");
    let mut bytes = vec![0; 4 * MIB];
    bytes[MIB..MIB + 5000].fill(7);
    std::fs::write(&from, &bytes).unwrap();
    std::fs::File::options().write(true).open(&from).unwrap().set_len(6 << 20).unwrap();
    bytes.resize(6 * MIB, 0);
    for format in ["raw", "qcow2"] {
        let to = folder.path().join(format);
        let mut options = ConvertOptions::new(new_image(&to, format, None));
        options.fill = true;
        let source = Source::new(vec![raw(&from)]);
        convert(&registry(), &source, &options, &Monitor::default()).unwrap();
        assert!(to.metadata().unwrap().blocks() * 512 >= 6 << 20, "{format}");
        let made = Disk::open(&registry(), &to, &OpenOptions::read_only().format(format)).unwrap();
        let mut found = vec![1; 6 * MIB];
        made.read_at(&mut found, GuestOffset(0)).unwrap();
        assert!(found == bytes, "{format}");
    }
}

#[test]
fn a_backing_image_outside_the_chain_must_be_trusted() {
    let folder = tempfile::tempdir().unwrap();
    let [from, base, to] = ["from", "base", "to"].map(|name| folder.path().join(name));
    std::fs::write(&from, vec![5; MIB]).unwrap();
    std::fs::write(&base, vec![5; MIB]).unwrap();
    let reference = BackingRef {
        name: "base".to_owned(),
        format: Some("raw".to_owned()),
        identity: None,
        modified: None,
    };
    for trusted in [false, true] {
        let mut options = ConvertOptions::new(new_image(&to, "qcow2", Some(reference.clone())));
        let opening = OpenOptions::read_only().format("raw");
        options.backing = Some(Backing::new(base.clone(), opening).trusted(trusted));
        let source = Source::new(vec![raw(&from)]);
        let done = convert(&registry(), &source, &options, &Monitor::default());
        assert_eq!(done.is_ok(), trusted, "{done:?}");
    }
}
