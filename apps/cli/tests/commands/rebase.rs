//! `vdkit rebase`.

use crate::common::chains::{self, Link, copy, flatten, same, sound};
use crate::common::{self, Scratch, peer};
use vdkit_testkit::Rng;

const M: u64 = 1 << 20;

/// Old base, image, and a new base of another size and content.
fn families() -> Vec<([Link; 2], Link)> {
    let image = |options| Link::qcow2("image", options, 4 * M);
    let old = |options, bytes| Link::qcow2("old", options, bytes);
    let new = |options, bytes| Link::qcow2("new", options, bytes);
    vec![
        ([old("", 4 * M), image("").compressed(65536)], new("", 4 * M)),
        ([old("", 2 * M + 512), image("")], new(",cluster_size=4096", 5 * M).compressed(4096)),
        ([old("", 6 * M).compressed(65536), image(",cluster_size=512")], new("", M)),
        ([old("", 3 * M), image(",extended_l2=on")], new(",extended_l2=on", 4 * M + 1536)),
        ([old(",compat=0.10", 3 * M), image(",compat=0.10")], new(",cluster_size=2M", 4 * M)),
        ([old("", 4 * M), image(",cluster_size=2M")], Link::raw("new", 3 * M + 512)),
        ([Link::raw("old", 4 * M), image(",data_file=image.data")], new("", 4 * M)),
        ([old("", 4 * M), image(",lazy_refcounts=on")], new(",data_file=new.data", 2 * M)),
    ]
}

fn make(scratch: &Scratch, family: &([Link; 2], Link), rng: &mut Rng) {
    chains::make(scratch, &family.0, rng);
    chains::make(scratch, std::slice::from_ref(&family.1), rng);
    flatten(scratch, "image", "before");
}

fn backing_of(scratch: &Scratch) -> (Option<String>, Option<String>) {
    let output = peer(&scratch.path(""), "qemu-img", &["info", "--output", "json", "image"]);
    let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |key: &str| info[key].as_str().map(str::to_owned);
    (text("backing-filename"), text("backing-filename-format"))
}

#[test]
fn the_disk_stays_the_same_on_another_base_and_on_none() {
    let mut rng = Rng::from_env(30);
    let mut changed = 0;
    for family in families() {
        let scratch = Scratch::new();
        make(&scratch, &family, &mut rng);
        let theirs = copy(&scratch);
        let format = family.1.format;
        let json = scratch.json_of(
            "rebase",
            0,
            &["image", "--backing", "new", "--backing-format", format],
        );
        changed += ["copied", "zeroed"].map(|key| json[key].as_u64().unwrap()).iter().sum::<u64>();
        assert_eq!(backing_of(&scratch), (Some("new".to_owned()), Some(format.to_owned())));
        same(&scratch, ("image", "qcow2"), ("before", "raw"));
        sound(&scratch, "image", false);
        // QEMU comes to the same with its own, and goes on with ours.
        peer(&theirs.path(""), "qemu-img", &["rebase", "-b", "new", "-F", format, "image"]);
        let theirs = theirs.path("image").display().to_string();
        same(&scratch, ("image", "qcow2"), (&theirs, "qcow2"));
        peer(
            &scratch.path(""),
            "qemu-img",
            &["rebase", "-b", "old", "-F", family.0[0].format, "image"],
        );
        same(&scratch, ("image", "qcow2"), ("before", "raw"));
        // And alone.
        let json = scratch.json_of("rebase", 0, &["image", "--no-backing"]);
        assert_eq!(json["backing"], serde_json::Value::Null);
        assert_eq!(backing_of(&scratch), (None, None));
        std::fs::remove_file(scratch.path("old")).unwrap();
        std::fs::remove_file(scratch.path("new")).unwrap();
        same(&scratch, ("image", "qcow2"), ("before", "raw"));
        sound(&scratch, "image", false);
        // From nothing onto something: what was zero without an entry must stay so.
        chains::make(&scratch, &[Link::qcow2("third", "", 4 * M)], &mut rng);
        scratch.ok(&["rebase", "image", "--backing", "third"]);
        same(&scratch, ("image", "qcow2"), ("before", "raw"));
        sound(&scratch, "image", false);
    }
    assert!(changed > M, "hardly anything differed: {changed}");
}

#[test]
fn what_two_chains_share_is_not_read() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "low.qcow2", "8M"]);
    scratch.ok(&["write", "low.qcow2", "0", "8M", "--pattern", "1"]);
    for name in ["old.qcow2", "new.qcow2"] {
        scratch.ok(&["create", name, "--backing", "low.qcow2"]);
        scratch.ok(&["write", name, "1M", "64K", "--pattern", "2"]);
    }
    scratch.ok(&["write", "new.qcow2", "2M", "64K", "--pattern", "3"]);
    scratch.ok(&["create", "image.qcow2", "--backing", "old.qcow2"]);
    let json = scratch.json_of("rebase", 0, &["image.qcow2", "--backing", "new.qcow2"]);
    assert_eq!(json["compared"], 128 << 10);
    assert_eq!(json["copied"], 64 << 10);
    // A middle image can go without anything being copied.
    let json = scratch.json_of("rebase", 0, &["image.qcow2", "--backing", "new.qcow2"]);
    assert_eq!((&json["compared"], &json["copied"]), (&0.into(), &0.into()));
}

#[test]
fn blocks_are_shared_where_the_file_system_can() {
    let Some(disk) = vdkit_testkit::fs::mounted("btrfs", 384 << 20) else { return };
    let scratch = Scratch::new();
    let path = |name: &str| disk.path().join(name).display().to_string();
    let (old, new, image) = (path("old.qcow2"), path("new.qcow2"), path("image.qcow2"));
    scratch.ok(&["create", &old, "32M"]);
    scratch.ok(&["write", &old, "0", "20M", "--pattern", "1"]);
    scratch.ok(&["write", &old, "25M", "5000", "--pattern", "2"]);
    scratch.ok(&["create", &new, "32M"]);
    scratch.ok(&["write", &new, "4M", "8M", "--pattern", "3"]);
    for onto in [&["--no-backing"][..], &["--backing", &new]] {
        scratch.ok(&["create", &image, "--backing", &old, "--force"]);
        scratch.ok(&["write", &image, "1M", "100K", "--pattern", "4"]);
        let before = scratch.ok(&["read", &image, "0"]).bytes;
        let json = scratch.json_of("rebase", 0, &[&[image.as_str()], onto].concat());
        let number = |key: &str| json[key].as_u64().unwrap();
        assert!(number("reflinked") >= 19 << 20, "{onto:?}: {json}");
        assert!(number("copied") < 256 << 10, "{onto:?}: {json}");
        // Only where both have something must anything be compared.
        let compared = if onto.len() > 1 { 9 << 20 } else { 1 << 20 };
        assert!(number("compared") < compared, "{onto:?}: {json}");
        assert!(scratch.ok(&["read", &image, "0"]).bytes == before, "{onto:?}");
        peer(disk.path(), "qemu-img", &["check", "-q", &image]);
        // Shared blocks are copied when either is written.
        scratch.ok(&["write", &image, "2M", "1M", "--pattern", "5"]);
        assert!(scratch.ok(&["read", &old, "2M", "1M"]).bytes == vec![1; 1 << 20]);
        std::fs::remove_file(&image).unwrap();
    }
}

#[test]
fn unsafe_changes_the_name_alone() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "1M"]);
    scratch.ok(&["write", "base.qcow2", "0", "1M", "--pattern", "5"]);
    scratch.ok(&["create", "image.qcow2", "--backing", "base.qcow2"]);
    std::fs::create_dir(scratch.path("sub")).unwrap();
    std::fs::rename(scratch.path("base.qcow2"), scratch.path("sub/moved.qcow2")).unwrap();
    scratch.fails(1, "base.qcow2", &["rebase", "image.qcow2", "--backing", "sub/moved.qcow2"]);
    let len = scratch.path("image.qcow2").metadata().unwrap().len();
    scratch.ok(&["rebase", "--unsafe", "image.qcow2", "--backing", "sub/moved.qcow2"]);
    assert_eq!(scratch.path("image.qcow2").metadata().unwrap().len(), len);
    assert!(scratch.ok(&["read", "image.qcow2", "0"]).bytes == vec![5; 1 << 20]);
    // What is not there yet needs its format.
    let later = ["rebase", "--unsafe", "image.qcow2", "--backing", "later.raw"];
    scratch.fails(2, "format", &later);
    scratch.ok(&[&later[..], &["--backing-format", "raw"]].concat());
    let json = scratch.json_of("info", 0, &["image.qcow2"]);
    assert!(json.to_string().contains("later.raw"), "{json}");
    let long = format!("{}/base.qcow2", "x".repeat(1000));
    let args = ["rebase", "-u", "image.qcow2", "--backing-format", "qcow2", "--backing", &long];
    scratch.ok(&args);
    scratch.ok(&["rebase", "-u", "image.qcow2", "--backing", "sub/moved.qcow2"]);
    let longer = format!("{}/base.qcow2", "x".repeat(1020));
    let args = ["rebase", "-u", "image.qcow2", "--backing-format", "qcow2", "--backing", &longer];
    scratch.fails(2, "1023", &args);
    sound(&scratch, "image.qcow2", false);
}

#[test]
fn circles_and_guesses_are_refused() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "base.qcow2", "1M"]);
    scratch.ok(&["create", "middle.qcow2", "--backing", "base.qcow2"]);
    scratch.ok(&["create", "top.qcow2", "--backing", "middle.qcow2"]);
    for more in [&[][..], &["--unsafe"]] {
        let circle = [&["rebase", "base.qcow2", "--backing", "top.qcow2"], more].concat();
        scratch.fails(2, "stands on it", &circle);
        let own = [&["rebase", "base.qcow2", "--backing", "base.qcow2"], more].concat();
        scratch.fails(2, "cannot stand on itself", &own);
        std::fs::write(scratch.path("plain"), [0; 512]).unwrap();
        let guess = [&["rebase", "top.qcow2", "--backing", "plain"], more].concat();
        let answer = scratch.fails(2, "its format was not detected", &guess);
        assert!(answer.stderr.contains("-F raw"), "{answer:?}");
    }
    scratch.write("raw.img", &[0; 4096]);
    scratch.fails(1, "raw", &["rebase", "-f", "raw", "raw.img", "--backing", "base.qcow2"]);
    scratch.fails(2, "required", &["rebase", "top.qcow2"]);
    scratch.fails(1, "no-such", &["rebase", "no-such", "--no-backing"]);
    let before = std::fs::read(scratch.path("top.qcow2")).unwrap();
    let writer = common::Writer::start(&scratch.path(""), "top.qcow2");
    scratch.fails(6, "in use", &["rebase", "top.qcow2", "--no-backing"]);
    drop(writer);
    assert!(std::fs::read(scratch.path("top.qcow2")).unwrap() == before);
}

#[test]
fn killed_at_any_moment_and_run_again() {
    let mut rng = Rng::from_env(31);
    for options in [",cluster_size=512", ",extended_l2=on"] {
        let made = Scratch::new();
        let family = (
            [Link::qcow2("old", "", 32 * M), Link::qcow2("image", options, 32 * M)],
            Link::qcow2("new", "", 32 * M),
        );
        make(&made, &family, &mut rng);
        let args = ["rebase", "image", "--backing", "new"];
        let scratch = chains::killed_until_done(&made, &args, |scratch| {
            same(scratch, ("image", "qcow2"), ("before", "raw"));
            sound(scratch, "image", true);
        });
        assert_eq!(backing_of(&scratch).0.as_deref(), Some("new"));
    }
}

#[test]
fn snapshots_do_not_show_another_backing_image_unasked() {
    let scratch = Scratch::new();
    for (base, byte) in [("old.qcow2", "1"), ("new.qcow2", "2")] {
        scratch.ok(&["create", base, "1M"]);
        scratch.ok(&["write", base, "0", "1M", "--pattern", byte]);
    }
    scratch.ok(&["create", "top.qcow2", "--backing", "old.qcow2"]);
    scratch.ok(&["write", "top.qcow2", "0", "64K", "--pattern", "3"]);
    scratch.ok(&["snapshot", "create", "top.qcow2", "s"]);
    let before = std::fs::read(scratch.path("top.qcow2")).unwrap();
    for new in [&["--backing", "new.qcow2"][..], &["--no-backing"]] {
        scratch.fails(5, "snapshots", &[&["rebase", "top.qcow2"], new].concat());
    }
    assert!(before == std::fs::read(scratch.path("top.qcow2")).unwrap());
    let shown = || scratch.ok(&["read", "top.qcow2", "0", "--snapshot", "s"]).bytes;
    assert_eq!(shown()[1 << 19], 1);
    scratch.ok(&["rebase", "--force", "top.qcow2", "--backing", "new.qcow2"]);
    assert_eq!(shown()[1 << 19], 2);
    assert_eq!(scratch.ok(&["read", "top.qcow2", "0"]).bytes[1 << 19], 1);
    scratch.ok(&["snapshot", "delete", "top.qcow2", "s"]);
    scratch.ok(&["rebase", "top.qcow2", "--no-backing"]);
    assert_eq!(scratch.ok(&["read", "top.qcow2", "0"]).bytes[1 << 19], 1);
}

#[test]
fn snapshots_of_an_image_that_stood_on_nothing_do_not_show_a_new_backing_image() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "new.qcow2", "1M"]);
    scratch.ok(&["write", "new.qcow2", "0", "1M", "--pattern", "2"]);
    scratch.ok(&["create", "alone.qcow2", "1M"]);
    scratch.ok(&["rebase", "alone.qcow2", "--no-backing"]);
    scratch.ok(&["snapshot", "create", "alone.qcow2", "s"]);
    let before = std::fs::read(scratch.path("alone.qcow2")).unwrap();
    scratch.fails(5, "zeroes", &["rebase", "alone.qcow2", "--backing", "new.qcow2"]);
    assert!(before == std::fs::read(scratch.path("alone.qcow2")).unwrap());
    let shown = scratch.ok(&["read", "alone.qcow2", "0", "--snapshot", "s"]).bytes;
    assert!(shown.iter().all(|byte| *byte == 0));
    // Nothing changes for its snapshots.
    scratch.ok(&["rebase", "alone.qcow2", "--no-backing"]);
    scratch.ok(&["rebase", "--force", "alone.qcow2", "--backing", "new.qcow2"]);
}

/// What cannot be ended is not begun.
#[test]
fn a_format_that_cannot_change_its_parent_is_left_alone() {
    let scratch = Scratch::new();
    scratch.ok(&["create", "-f", "vpc", "-o", "force_size=on", "a.vhd", "8M"]);
    scratch.ok(&["write", "a.vhd", "0", "3M", "--pattern", "5"]);
    scratch.ok(&["create", "-f", "vpc", "--backing", "a.vhd", "b.vhd"]);
    let before = std::fs::read(scratch.path("b.vhd")).unwrap();
    let answer = scratch.fails(1, "in place", &["rebase", "b.vhd", "--no-backing"]);
    assert!(answer.stderr.contains("hint: convert it to a new image"), "{answer:?}");
    assert_eq!(std::fs::read(scratch.path("b.vhd")).unwrap(), before);
}
