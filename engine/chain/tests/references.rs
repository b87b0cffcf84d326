//! Which files an image can cause us to open.

mod support;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use support::MapDriver;
use support::map::{CLUSTER, header, header_of};
use vdkit_block::{
    Error, ErrorKind, FormatDriver, GuestOffset, Limits, RefPolicy, Refusal, Remedy,
};
use vdkit_chain::{
    BackingChoice, BackingImage, Disk, OpenOptions, Registry, describe_chain, open_image,
};
use vdkit_raw::RawDriver;
use vdkit_testbase::impossible_here;

const SIZE: u64 = 4 * CLUSTER;

fn registry() -> Registry {
    let drivers: [&'static dyn FormatDriver; 2] = [&MapDriver, &RawDriver];
    Registry::new(drivers)
}

/// A folder with `images/` and `outside/`, and files in both.
struct Place {
    root: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let place = Self { root: tempfile::tempdir().unwrap() };
        fs::create_dir(place.path("images")).unwrap();
        fs::create_dir(place.path("outside")).unwrap();
        fs::write(place.path("images/base.raw"), vec![1; SIZE as usize]).unwrap();
        fs::write(place.path("outside/secret.raw"), vec![9; SIZE as usize]).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn overlay(&self, name: &str, backing: &str, format: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, header(SIZE, backing, format, "")).unwrap();
        path
    }

    fn open(&self, image: &Path, options: &OpenOptions) -> vdkit_block::Result<Disk> {
        Disk::open(&registry(), image, options)
    }

    fn refusal(&self, backing: &str, options: &OpenOptions) -> Refusal {
        let image = self.overlay("images/top.map", backing, "raw");
        match self.open(&image, options) {
            Err(Error::Refused(refusal)) => {
                assert_eq!(refusal.target, backing);
                assert_eq!(refusal.file, image.display().to_string());
                *refusal
            }
            other => panic!("{backing}: {other:?}"),
        }
    }

    fn first_byte(&self, image: &Path, options: &OpenOptions) -> u8 {
        let disk = self.open(image, options).unwrap();
        let mut byte = [0xEE];
        disk.read_at(&mut byte, GuestOffset(0)).unwrap();
        byte[0]
    }
}

fn allowing(folder: PathBuf) -> OpenOptions {
    OpenOptions::read_only().refs(RefPolicy::Folders(vec![folder]))
}

#[test]
fn what_lies_beneath_the_own_folder_is_opened() {
    let place = Place::new();
    fs::create_dir(place.path("images/sub")).unwrap();
    fs::write(place.path("images/sub/deep.raw"), vec![2; 512]).unwrap();
    let absolute = place.path("images/base.raw").display().to_string();
    for (backing, byte) in [
        ("base.raw", 1),
        ("./base.raw", 1),
        ("sub/deep.raw", 2),
        ("sub/../base.raw", 1),
        ("../images/base.raw", 1),
        (absolute.as_str(), 1),
    ] {
        for format in ["raw", ""] {
            let image = place.overlay("images/top.map", backing, format);
            assert_eq!(place.first_byte(&image, &OpenOptions::default()), byte, "{backing}");
        }
    }
}

#[test]
fn what_lies_outside_is_refused_by_whatever_path() {
    let place = Place::new();
    symlink(place.path("outside"), place.path("images/way-out")).unwrap();
    symlink(place.path("outside/secret.raw"), place.path("images/link.raw")).unwrap();
    symlink("link.raw", place.path("images/link-to-link.raw")).unwrap();
    let absolute = place.path("outside/secret.raw").display().to_string();
    for backing in [
        "../outside/secret.raw",
        absolute.as_str(),
        "way-out/secret.raw",
        "link.raw",
        "link-to-link.raw",
        "way-out/../images/../outside/secret.raw",
        "/etc/passwd",
        "/proc/self/root/etc/passwd",
    ] {
        let refusal = place.refusal(backing, &OpenOptions::default());
        assert!(refusal.reason.contains("outside"), "{refusal}");
        assert!(matches!(refusal.remedy, Remedy::AllowFolder(_)), "{refusal}");
    }
    // A sibling whose name begins with the folder's.
    fs::create_dir(place.path("images-secret")).unwrap();
    fs::write(place.path("images-secret/x.raw"), [0]).unwrap();
    place.refusal("../images-secret/x.raw", &OpenOptions::default());
    // The existence of files outside is not revealed either.
    place.refusal("../outside/not-there.raw", &OpenOptions::default());
    place.refusal("/nowhere/at/all.raw", &OpenOptions::default());
}

#[test]
fn the_hint_of_a_refusal_works() {
    let place = Place::new();
    let refusal = place.refusal("../outside/secret.raw", &OpenOptions::default());
    let Remedy::AllowFolder(folder) = refusal.remedy else { panic!("{refusal}") };
    let image = place.path("images/top.map");
    assert_eq!(place.first_byte(&image, &allowing(folder)), 9);
}

#[test]
fn allowed_folders_are_allowed_also_through_links_and_nothing_else_is() {
    let place = Place::new();
    symlink(place.path("outside"), place.path("alias")).unwrap();
    let image = place.overlay("images/top.map", "../outside/secret.raw", "raw");
    for folder in ["outside", "alias", ""] {
        assert_eq!(place.first_byte(&image, &allowing(place.path(folder))), 9, "{folder}");
    }
    place.refusal("/etc/passwd", &allowing(place.path("outside")));
    // The own folder stays allowed.
    let image = place.overlay("images/top.map", "base.raw", "raw");
    assert_eq!(place.first_byte(&image, &allowing(place.path("outside"))), 1);
    // A missing folder is the user's mistake and is reported.
    let image = place.overlay("images/top.map", "../outside/secret.raw", "raw");
    let error = place.open(&image, &allowing(place.path("typo"))).unwrap_err();
    assert!(error.to_string().contains("typo"), "{error}");
}

#[test]
fn no_refs_means_none() {
    let place = Place::new();
    let refusal = place.refusal("base.raw", &OpenOptions::default().refs(RefPolicy::Nothing));
    assert_eq!(refusal.remedy, Remedy::FollowReferences);
    // A user-supplied name is no reference.
    let image = place.path("images/top.map");
    let backing = BackingChoice::Override { path: place.path("outside/secret.raw"), format: None };
    let options = OpenOptions::default().refs(RefPolicy::Nothing).backing(backing);
    assert_eq!(place.first_byte(&image, &options), 9);
    let options = OpenOptions::default().refs(RefPolicy::Nothing).backing(BackingChoice::Ignore);
    assert_eq!(place.first_byte(&image, &options), 0);
}

#[test]
fn protocols_are_refused_always() {
    let place = Place::new();
    for backing in [
        "json:{\"driver\":\"file\",\"filename\":\"base.raw\"}",
        "nbd://localhost/x",
        "nbd:unix:/run/x.sock",
        "http://example.org/x.raw",
        "file:base.raw",
        "fat:rw:images",
    ] {
        for options in [OpenOptions::default(), allowing("/".into())] {
            let refusal = place.refusal(backing, &options);
            assert!(refusal.reason.contains("plain file name"), "{refusal}");
        }
    }
    // A file name with a colon can still be given.
    fs::write(place.path("images/a:b"), [4]).unwrap();
    place.refusal("a:b", &OpenOptions::default());
    let image = place.overlay("images/top.map", "./a:b", "raw");
    assert_eq!(place.first_byte(&image, &OpenOptions::default()), 4);
}

#[test]
fn what_is_no_file_is_refused_even_where_allowed_and_without_touching_it() {
    let place = Place::new();
    let pipe = place.path("images/pipe");
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    fs::create_dir(place.path("images/folder")).unwrap();
    // Opening the pipe for reading would block for ever.
    for backing in ["pipe", "folder", "/dev/null", "/dev/zero", "/dev/tty"] {
        let refusal = place.refusal(backing, &allowing("/".into()));
        assert!(refusal.reason.contains("neither"), "{refusal}");
    }
}

#[test]
fn devices_need_an_explicit_word() {
    // The own folder of an image in /dev is /dev, but it must not reach the disks there.
    let is_block = |path: &PathBuf| {
        use std::os::unix::fs::FileTypeExt;
        fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
    };
    let mut devices = fs::read_dir("/dev").unwrap().flatten().map(|entry| entry.path());
    let image = tempfile::Builder::new().prefix("vdkit-test").tempfile_in("/dev");
    let (Some(device), Ok(image)) = (devices.find(is_block), image) else {
        return impossible_here("no block device in /dev, or no right to write there");
    };
    let name = device.file_name().unwrap().to_str().unwrap();
    fs::write(image.path(), header(SIZE, name, "raw", "")).unwrap();
    match Disk::open(&registry(), image.path(), &OpenOptions::default()) {
        Err(Error::Refused(refusal)) => assert!(refusal.reason.contains("device"), "{refusal}"),
        other => panic!("{other:?}"),
    }
}

/// A link elsewhere that leads back into the allowed folder must not allow its own folder.
#[test]
fn a_detour_does_not_widen_what_is_allowed() {
    let place = Place::new();
    place.overlay("images/middle.map", "secret.raw", "raw");
    symlink(place.path("images/middle.map"), place.path("outside/detour.map")).unwrap();
    let image = place.overlay("images/top.map", "../outside/detour.map", "testmap");
    match place.open(&image, &OpenOptions::default()) {
        Err(Error::Refused(refusal)) => {
            assert_eq!(refusal.target, "secret.raw", "{refusal}");
            assert!(refusal.file.ends_with("detour.map"), "{refusal}");
        }
        other => panic!("{other:?}"),
    }
}

/// Names are relative to the folder of the name by which the image was opened, as in QEMU.
#[test]
fn an_image_that_the_user_names_through_a_link_keeps_both_folders() {
    let place = Place::new();
    place.overlay("images/top.map", "base.raw", "raw");
    let link = place.path("outside/link.map");
    symlink(place.path("images/top.map"), &link).unwrap();
    fs::write(place.path("outside/base.raw"), [5]).unwrap();
    assert_eq!(place.first_byte(&link, &OpenOptions::default()), 5);
    fs::remove_file(place.path("outside/base.raw")).unwrap();
    symlink(place.path("images/base.raw"), place.path("outside/base.raw")).unwrap();
    assert_eq!(place.first_byte(&link, &OpenOptions::default()), 1);
}

#[test]
fn a_missing_backing_file_says_who_names_it_and_what_to_do() {
    let place = Place::new();
    let image = place.overlay("images/top.map", "gone.raw", "raw");
    let error = place.open(&image, &OpenOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let text = error.to_string();
    for part in ["gone.raw", "top.map", "backing file"] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn loops_end_in_a_clear_error() {
    let place = Place::new();
    let itself = place.overlay("images/self.map", "self.map", "testmap");
    place.overlay("images/a.map", "b.map", "testmap");
    place.overlay("images/b.map", "c.map", "");
    let deep = place.overlay("images/c.map", "a.map", "testmap");
    fs::hard_link(place.path("images/a.map"), place.path("images/other-name.map")).unwrap();
    let linked = place.overlay("images/top.map", "other-name.map", "testmap");
    for image in [itself, deep, linked] {
        let error = place.open(&image, &OpenOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("in the chain already"), "{error}");
    }
}

#[test]
fn a_chain_may_be_as_long_as_the_limit() {
    let place = Place::new();
    for layer in 1..10 {
        place.overlay(&format!("images/{layer}.map"), &format!("{}.map", layer - 1), "testmap");
    }
    place.overlay("images/0.map", "", "");
    let top = place.path("images/9.map");
    let mut options = OpenOptions::default();
    options.limits.chain_depth_max = 10;
    assert_eq!(place.open(&top, &options).unwrap().layers().len(), 10);
    options.limits.chain_depth_max = 9;
    let error = place.open(&top, &options).unwrap_err();
    assert!(matches!(error, Error::Limit { limit: 9, .. }), "{error}");
}

#[test]
fn probing_tells_the_format_and_raw_is_not_written_on_a_guess() {
    let place = Place::new();
    let raw = place.path("images/base.raw");
    let disk = place.open(&raw, &OpenOptions::read_only()).unwrap();
    assert!(disk.layers()[0].probed() && !disk.writable());
    assert_eq!(disk.layers()[0].info().format, "raw");
    assert!(matches!(disk.write_at(&[0], GuestOffset(0)), Err(Error::ReadOnly { .. })));
    drop(disk);

    let error = place.open(&raw, &OpenOptions::read_write()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("name its format"), "{error}");
    assert_eq!(fs::read(&raw).unwrap(), vec![1; SIZE as usize]);

    let disk = place.open(&raw, &OpenOptions::read_write().format("raw")).unwrap();
    disk.write_at(&[7], GuestOffset(3)).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert_eq!(fs::read(&raw).unwrap()[..5], [1, 1, 1, 7, 1]);

    let map = place.overlay("images/top.map", "base.raw", "");
    let disk = place.open(&map, &OpenOptions::read_write()).unwrap();
    let formats: Vec<_> = disk.layers().iter().map(|layer| layer.format().name()).collect();
    assert_eq!(formats, ["testmap", "raw"]);
    drop(disk);
    // The user's format overrides the header.
    let disk = place.open(&map, &OpenOptions::read_only().format("raw")).unwrap();
    assert_eq!(disk.layers().len(), 1);
    assert_eq!(disk.guest_bytes(), CLUSTER);

    let error = place.open(&map, &OpenOptions::read_only().format("qcow9")).unwrap_err();
    assert!(error.to_string().contains("testmap, raw"), "{error}");
    let map = place.overlay("images/top.map", "base.raw", "qcow9");
    let error = place.open(&map, &OpenOptions::read_only()).unwrap_err();
    assert!(error.to_string().contains("'qcow9'"), "{error}");
}

/// The overlay's backing format is used, whatever the file contains.
#[test]
fn a_backing_format_is_obeyed() {
    let place = Place::new();
    place.overlay("images/lower.map", "base.raw", "raw");
    let top = place.overlay("images/top.map", "lower.map", "raw");
    let disk = place.open(&top, &OpenOptions::default()).unwrap();
    assert_eq!(disk.layers().len(), 2);
    let mut magic = [0; 7];
    disk.read_at(&mut magic, GuestOffset(0)).unwrap();
    assert_eq!(&magic, b"TESTMAP");
}

#[test]
fn data_files_follow_the_same_policy() {
    let place = Place::new();
    let image = place.path("images/top.map");
    let named = |name: &str| fs::write(&image, header(SIZE, "", "", name)).unwrap();
    fs::write(place.path("images/data"), []).unwrap();
    named("data");
    let disk = place.open(&image, &OpenOptions::read_write()).unwrap();
    disk.write_at(&[3; 100], GuestOffset(0)).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert!(fs::read(place.path("images/data")).unwrap().contains(&3));

    named("../outside/secret.raw");
    let error = place.open(&image, &OpenOptions::read_write()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
    let options = OpenOptions::read_write().data_file(Some(place.path("outside/secret.raw")));
    place.open(&image, &options).unwrap();
    // Whoever names a file for an image without one means another image.
    named("");
    let error = place.open(&image, &options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    assert!(error.to_string().contains("secret.raw"), "{error}");
    named("top.map");
    let error = place.open(&image, &OpenOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    named("gone");
    let error = place.open(&image, &OpenOptions::default()).unwrap_err().to_string();
    assert!(error.contains("as its data file"), "{error}");
}

#[test]
fn several_files_are_opened_in_order_each_once_and_not_too_many() {
    let place = Place::new();
    let image = place.path("images/top.map");
    let named = |names: &str| fs::write(&image, header(SIZE, "", "", names)).unwrap();
    for name in ["b", "a", "c"] {
        fs::write(place.path(&format!("images/{name}")), []).unwrap();
    }
    named("b\na\nc");
    let opened = open_image(&registry(), &image, &OpenOptions::read_write()).unwrap();
    assert_eq!(opened.info.files, ["b", "a", "c"]);
    let names: Vec<_> = opened.files.iter().map(|file| file.name().to_owned()).collect();
    let wanted = ["b", "a", "c"].map(|name| place.path("images").join(name));
    assert_eq!(names, wanted.map(|path| path.display().to_string()));
    // Locked like the image.
    let error = place.open(&place.path("images/c"), &OpenOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    drop(opened);

    let mut limits = Limits::default();
    limits.files_max = 2;
    let error = place.open(&image, &OpenOptions::default().limits(limits)).unwrap_err();
    assert!(matches!(error, Error::Limit { found: 3, limit: 2, .. }), "{error}");
    let other = Some(place.path("images/a"));
    let error = place.open(&image, &OpenOptions::default().data_file(other));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Usage);
    named("a\nb\n./a");
    let error = place.open(&image, &OpenOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    named("a\n../outside/secret.raw");
    let error = place.open(&image, &OpenOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Refused, "{error}");
}

#[test]
fn a_parent_that_is_another_one_or_has_changed_is_refused() {
    let place = Place::new();
    let write = |name: &str, texts: [&str; 5]| {
        fs::write(place.path(name), header_of(texts, SIZE)).unwrap();
    };
    write("images/lower.map", ["", "", "", "17ab", ""]);
    let top = place.path("images/top.map");
    for (noted, fits) in [("17ab", true), ("", true), ("17ac", false)] {
        write("images/top.map", ["lower.map", "testmap", "", "1", noted]);
        let opened = place.open(&top, &OpenOptions::default());
        assert_eq!(opened.is_ok(), fits, "{noted}");
        let Err(error) = opened else { continue };
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let text = error.to_string();
        assert!(matches!(error.remedy(), Some(Remedy::StoreReference { .. })), "{error:?}");
        for part in ["17ab", "17ac", "lower.map"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let report = describe_chain(&registry(), &top, &OpenOptions::default()).unwrap();
        assert!(matches!(report.broken, Some(Error::Parent { .. })));
        // It opens alone, or on a user-supplied backing file.
        place.open(&top, &OpenOptions::default().backing(BackingChoice::Ignore)).unwrap();
        let path = place.path("images/lower.map");
        let named = BackingChoice::Override { path, format: None };
        place.open(&top, &OpenOptions::default().backing(named)).unwrap();
    }
    // A parent without an identity is accepted.
    write("images/lower.map", ["", "", "", "", ""]);
    place.open(&top, &OpenOptions::default()).unwrap();
}

/// Moved files of a chain are given one by one, from the top down.
#[test]
fn parents_further_down_are_given_too() {
    let place = Place::new();
    let write = |name: &str, texts: [&str; 5]| {
        fs::write(place.path(name), header_of(texts, SIZE)).unwrap();
        place.path(name)
    };
    let top = write("images/top.map", ["gone-1.map", "testmap", "", "", "17ab"]);
    let middle = write("outside/m.map", ["gone-2.map", "testmap", "", "17ab", "beef"]);
    let lower = write("outside/l.map", ["secret.raw", "raw", "", "beef", ""]);
    let other = write("outside/o.map", ["secret.raw", "raw", "", "f00d", ""]);
    let raw = place.path("images/base.raw");
    let opened = |parents: &[&PathBuf]| {
        let parents = parents.iter().map(|&path| path.clone()).collect();
        let options = OpenOptions::default().backing(BackingChoice::Parents(parents));
        place.open(&top, &options).map(|_| place.first_byte(&top, &options))
    };
    for parents in [&[][..], &[&middle]] {
        let error = opened(parents).unwrap_err().to_string();
        assert!(error.contains(&format!("gone-{}.map", parents.len() + 1)), "{error}");
    }
    assert_eq!(opened(&[&middle, &lower]).unwrap(), 9);
    assert_eq!(opened(&[&middle, &lower, &raw]).unwrap(), 1);
    let error = opened(&[&middle, &other]).unwrap_err().to_string();
    assert!(error.contains("f00d") && error.contains("beef"), "{error}");
    let error = opened(&[&middle, &lower, &raw, &lower]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("was given as its parent"), "{error}");
    // The policy applies to references in user-supplied files.
    let error = opened(&[&write("outside/x.map", ["../images/base.raw", "raw", "", "17ab", ""])]);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Refused);
}

/// The choices for a backing image reach as deep as they say: what it names itself is not followed
/// then.
#[test]
fn choices_for_backing_images_nest() {
    let place = Place::new();
    let middle = place.overlay("images/middle.map", "gone.map", "testmap");
    let top = place.overlay("images/top.map", "middle.map", "testmap");
    let image = |path: Option<&PathBuf>, backing| {
        let mut image = BackingImage::new();
        (image.path, image.backing) = (path.cloned(), backing);
        BackingChoice::Image(Box::new(image))
    };
    let opened = |backing: BackingChoice| {
        let options = OpenOptions::default().backing(backing);
        place.open(&top, &options).map(|disk| disk.layers().len())
    };
    let ends = || BackingChoice::Ignore;
    assert!(opened(image(Some(&middle), BackingChoice::Follow)).is_err(), "gone.map is followed");
    assert_eq!(opened(image(Some(&middle), ends())).unwrap(), 2);
    assert_eq!(opened(image(None, ends())).unwrap(), 2, "its own reference, and then none");
    let base = BackingChoice::Override {
        path: place.path("images/base.raw"),
        format: Some("raw".to_owned()),
    };
    assert_eq!(opened(image(None, base)).unwrap(), 3);
    // The same file twice ends, unless it is written.
    assert_eq!(opened(image(Some(&middle), image(Some(&middle), ends()))).unwrap(), 3);
    let itself = OpenOptions::read_write().format("testmap").backing(image(Some(&top), ends()));
    assert!(place.open(&top, &itself.lock(false)).is_err());
    let missing = image(Some(&middle), image(None, ends()));
    assert!(opened(missing).is_err(), "gone.map again");
}

/// What the image itself does not know would be filled with zeroes by its next write.
#[test]
fn an_image_without_a_backing_file_is_written_on_none() {
    let place = Place::new();
    let alone = place.path("images/alone.map");
    fs::write(&alone, header(SIZE, "", "", "")).unwrap();
    let named = BackingChoice::Override { path: place.path("images/base.raw"), format: None };
    let reading = OpenOptions::default().backing(named);
    assert_eq!(place.first_byte(&alone, &reading), 1);
    let writing = reading.writable(true).format("testmap");
    let error = place.open(&alone, &writing).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("has no backing file"), "{error}");
}

#[test]
fn a_broken_chain_is_described_as_far_as_it_goes() {
    let place = Place::new();
    place.overlay("images/middle.map", "gone.raw", "raw");
    let top = place.overlay("images/top.map", "middle.map", "testmap");
    let report = describe_chain(&registry(), &top, &OpenOptions::default()).unwrap();
    let paths: Vec<_> = report.links.iter().map(|link| link.path.clone()).collect();
    assert_eq!(paths, [top.clone(), place.path("images/middle.map")]);
    assert!(report.broken.unwrap().to_string().contains("gone.raw"));
    assert_eq!(report.links[0].host.file_bytes, CLUSTER);
    assert!(report.links[0].probed && !report.links[1].probed);

    let alone = OpenOptions::default().backing(BackingChoice::Ignore);
    let report = describe_chain(&registry(), &top, &alone).unwrap();
    assert!(report.links.len() == 1 && report.broken.is_none());
    assert_eq!(report.links[0].info.backing_file.as_deref(), Some("middle.map"));
    assert!(describe_chain(&registry(), place.path("none"), &alone).is_err());
}

/// Backing files are opened read-only, and shared with other readers.
#[test]
fn two_overlays_share_a_base_and_a_writer_of_it_is_kept_away() {
    let place = Place::new();
    let one = place.overlay("images/one.map", "base.raw", "raw");
    let two = place.overlay("images/two.map", "base.raw", "raw");
    let first = place.open(&one, &OpenOptions::read_write()).unwrap();
    let second = place.open(&two, &OpenOptions::read_write()).unwrap();
    let base = place.path("images/base.raw");
    let writer = OpenOptions::read_write().format("raw");
    let error = place.open(&base, &writer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    place.open(&base, &writer.clone().lock(false)).unwrap();
    drop((first, second));
    place.open(&base, &writer).unwrap();
}

/// A link is swapped during the open: the checked file is the one opened.
#[test]
fn a_link_that_is_swapped_meanwhile_opens_nothing_else() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let place = Place::new();
    let image = place.overlay("images/top.map", "link.raw", "raw");
    let (link, next) = (place.path("images/link.raw"), place.path("images/next"));
    symlink("base.raw", &link).unwrap();
    struct Done<'a>(&'a AtomicBool);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let done = AtomicBool::new(false);
    let (mut opened, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let targets = ["../outside/secret.raw", "base.raw"];
            for target in targets.iter().cycle() {
                symlink(target, &next).unwrap();
                fs::rename(&next, &link).unwrap();
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let _done = Done(&done); // also if an assertion fails
        while opened < 2000 || refused < 2000 {
            match place.open(&image, &OpenOptions::default()) {
                Ok(disk) => {
                    let mut byte = [0];
                    disk.read_at(&mut byte, GuestOffset(0)).unwrap();
                    assert_eq!(byte, [1], "the file outside was opened");
                    opened += 1;
                }
                Err(Error::Refused(_)) => refused += 1,
                Err(other) => panic!("{other}"),
            }
        }
    });
}
