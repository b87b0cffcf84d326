//! Changes of the descriptor with a power cut at each write.

use std::collections::BTreeSet;
use std::sync::Arc;

use vdkit_block::{
    AmendRequest, Amendment, BackingRef, Creation, FormatDriver, HostOffset, Limits, Monitor,
    Options, Storage,
};
use vdkit_storage::MemoryStorage;
use vdkit_testbase::{CrashStorage, Rng, create_image};
use vdkit_vmdk::VmdkDriver;

/// A descriptor as VMware's programs write it, with `lines` more lines.
fn text(parent: &str, extent: &str, lines: usize) -> String {
    let more: String = (0..lines).map(|n| format!("ddb.more{n} = \"{n:060}\"\n")).collect();
    format!(
        "# Disk DescriptorFile\nversion=1\nencoding=\"UTF-8\"\nCID=0badcafe\n{parent}\
         createType=\"monolithicSparse\"\n\n# Extent description\n{extent}\n\n\
         # The Disk Data Base \n#DDB\n\nddb.adapterType = \"ide\"\n{more}\
         ddb.geometry.cylinders = \"1\"\nddb.geometry.heads = \"16\"\n\
         ddb.geometry.sectors = \"63\"\nddb.longContentID = \"0123456789abcdef0123456789abcdef\"\n\
         ddb.virtualHWVersion = \"4\"\n"
    )
}

const CHILD: &str = "parentCID=12345678\nparentFileNameHint=\"base.vmdk\"\n";
const ALONE: &str = "parentCID=ffffffff\n";

/// A sparse extent with this descriptor in it.
fn embedded(text: &str) -> MemoryStorage {
    let storage = Arc::new(MemoryStorage::new("image"));
    create_image(&VmdkDriver, storage.clone(), 1 << 20, "");
    let mut room = text.as_bytes().to_vec();
    room.resize(20 * 512, 0);
    storage.write_at(&room, HostOffset(512)).unwrap();
    MemoryStorage::clone(&storage)
}

fn amend(storage: &Arc<dyn Storage>, name: Option<&str>, options: &str) -> vdkit_block::Result<()> {
    let specs = VmdkDriver.options();
    let backing = name.map(|name| BackingRef {
        identity: Some("87654321".to_owned()),
        ..BackingRef::new(name, Some("vmdk".to_owned()))
    });
    let request = AmendRequest {
        storage: storage.clone(),
        files: Vec::new(),
        backing: (options.is_empty()).then_some(backing),
        options: Options::parse("vmdk", specs, Some(options).filter(|o| !o.is_empty())).unwrap(),
        limits: Limits::default(),
    };
    VmdkDriver.amend(&request, &Monitor::default()).map(|_| ())
}

/// The set of significant lines of the image's descriptor.
fn says(storage: &Arc<dyn Storage>, at: u64) -> BTreeSet<String> {
    VmdkDriver.describe(storage, &Limits::default()).expect("a survivor can be read");
    let mut bytes = vec![0; 20 * 512];
    storage.read_padded(&mut bytes, HostOffset(at)).unwrap();
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    let text = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let lines = text.lines().map(str::trim);
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect()
}

fn old_or_new(before: &MemoryStorage, at: u64, name: Option<&str>, options: &str) {
    let crash = CrashStorage::holding(before);
    let storage: Arc<dyn Storage> = crash.clone();
    let old = says(&storage, at);
    amend(&storage, name, options).unwrap_or_else(|error| panic!("{name:?} {options}: {error}"));
    let new = says(&storage, at);
    assert_ne!(old, new);
    let mut rng = Rng::new(1);
    crash.for_each_crash(|ops, image| {
        let lots = (0..4).map(|n| (format!("lot {n}"), image.survivor(&mut rng)));
        for (which, survivor) in image.extremes().chain(lots.collect::<Vec<_>>()) {
            let storage: Arc<dyn Storage> = Arc::new(survivor);
            let found = says(&storage, at);
            let fits = found == old || found == new;
            assert!(fits, "{name:?} {options}, cut at {ops}, {which}: {found:#?}");
        }
    });
}

const LONG: &str = "a/folder/with/a/name/that/is/longer/than/the/comments/that/can/go/as/it/has/\
                    one-hundred-and-sixty-characters-more-or-less-which-nobody-counts/base.vmdk";

#[test]
fn a_power_cut_leaves_the_old_descriptor_or_the_new_one() {
    for lines in 0..14 {
        for (parent, names) in [
            (CHILD, [Some("other.vmdk"), Some("b.vmdk"), Some(LONG), None]),
            (ALONE, [Some("other.vmdk"), Some("b.vmdk"), Some("o/b.vmdk"), Some(LONG)]),
        ] {
            let image = embedded(&text(parent, "RW 2048 SPARSE \"image\"", lines));
            for name in names {
                old_or_new(&image, 512, name, "");
            }
            old_or_new(&image, 512, None, "adapter_type=lsilogic");
            old_or_new(&image, 512, None, "hwversion=14");
        }
    }
}

/// The text of a separate descriptor file ends with the file.
#[test]
fn a_power_cut_leaves_the_old_descriptor_file_or_the_new_one() {
    for lines in 0..14 {
        let text = text(CHILD, "RW 2048 SPARSE \"image-s001.vmdk\"", lines);
        let image = MemoryStorage::from_bytes("image", text.as_bytes());
        for name in [Some("other.vmdk"), Some("b.vmdk"), Some(LONG), None] {
            old_or_new(&image, 0, name, "");
        }
        old_or_new(&image, 0, None, "adapter_type=lsilogic");
    }
}
