//! `vdkit tree`.

use crate::common::Scratch;

fn family(scratch: &Scratch) {
    std::fs::create_dir(scratch.path("images")).unwrap();
    scratch.ok(&["create", "images/base.qcow2", "1M"]);
    for (name, on) in
        [("left.qcow2", "base.qcow2"), ("right.qcow2", "base.qcow2"), ("leaf.qcow2", "left.qcow2")]
    {
        scratch.ok(&["create", &format!("images/{name}"), "--backing", on]);
    }
    scratch.write("images/notes.txt", b"not an image");
}

#[test]
fn draws_who_stands_on_whom() {
    let scratch = Scratch::new();
    family(&scratch);
    assert_eq!(
        scratch.ok(&["tree", "images"]).stdout,
        "base.qcow2  qcow2 1 MiB  (deleting it breaks 3 images)\n\
         ├─ left.qcow2  qcow2 1 MiB  (deleting it breaks 1 image)\n\
         │  └─ leaf.qcow2  qcow2 1 MiB\n\
         └─ right.qcow2  qcow2 1 MiB\n"
    );
    let json = scratch.json_of("tree", 0, &["images"]);
    assert_eq!(json["images"].as_array().unwrap().len(), 4);
    assert_eq!(json["orphans"], serde_json::json!([]));
}

#[test]
fn an_image_shows_its_own_family() {
    let scratch = Scratch::new();
    family(&scratch);
    scratch.ok(&["create", "images/stranger.qcow2", "1M"]);
    let text = scratch.ok(&["tree", "images/leaf.qcow2"]).stdout;
    assert!(text.contains("base.qcow2") && text.contains("leaf.qcow2"), "{text}");
    assert!(!text.contains("stranger"), "{text}");
}

#[test]
fn what_is_missing_is_told() {
    let scratch = Scratch::new();
    family(&scratch);
    std::fs::remove_file(scratch.path("images/base.qcow2")).unwrap();
    let text = scratch.ok(&["tree", "images"]).stdout;
    assert!(text.contains("base.qcow2 (missing)\n└─ left.qcow2"), "{text}");
    assert!(scratch.json_of("tree", 0, &["images"])["orphans"].as_array().unwrap().len() >= 2);
}

#[test]
fn folders_within_are_followed_when_asked() {
    let scratch = Scratch::new();
    family(&scratch);
    assert_eq!(scratch.ok(&["tree"]).stdout, "no images\n");
    assert!(scratch.ok(&["tree", "--recursive"]).stdout.contains("images/base.qcow2"));
}

#[test]
fn a_loop_is_drawn_and_ends() {
    let scratch = Scratch::new();
    for (name, on) in [("a.qcow2", "b.qcow2"), ("b.qcow2", "a.qcow2")] {
        scratch.ok(&["create", name, "1M", "-u", "-b", on, "-F", "qcow2"]);
    }
    let text = scratch.ok(&["tree"]).stdout;
    assert_eq!(text.matches("chain without an end").count(), 2, "{text}");
}

#[test]
fn nothing_outside_is_opened() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("images")).unwrap();
    scratch.ok(&["create", "images/a.qcow2", "1M", "-u", "-b", "/etc/passwd", "-F", "raw"]);
    let text = scratch.ok(&["tree", "images"]).stdout;
    assert!(text.contains("/etc/passwd (refused by policy)"), "{text}");
    let text = scratch.ok(&["tree", "--no-refs", "images"]).stdout;
    assert!(text.contains("refused"), "{text}");
}

#[test]
fn hostile_input_is_a_clear_error() {
    let scratch = Scratch::new();
    scratch.fails(1, "no-such", &["tree", "no-such"]);
    scratch.write("cut.qcow2", b"QFI\xfb\0\0\0\x03");
    let answer = scratch.ok(&["tree"]);
    assert!(
        answer.stderr.contains("warning: ") && answer.stderr.contains("cut.qcow2"),
        "{answer:?}"
    );
}

#[test]
fn a_file_may_be_deleted_or_not() {
    let scratch = Scratch::new();
    family(&scratch);
    let text = scratch.run(&["tree", "--delete-check", "images/left.qcow2"]);
    assert_eq!(text.code, Some(5), "{text:?}");
    assert_eq!(text.stdout, "images/left.qcow2: deleting it orphans images/leaf.qcow2\n");
    scratch.ok(&["tree", "--delete-check", "images/leaf.qcow2"]);
    let json = scratch.json_of("tree", 5, &["--delete-check", "images/base.qcow2"]);
    let base = json["images"].as_array().unwrap().iter();
    let base = base.clone().find(|i| i["path"].as_str().unwrap().ends_with("base.qcow2")).unwrap();
    assert_eq!(base["deleting-orphans"].as_array().unwrap().len(), 3);
    // An overlay whose header is damaged cannot say that it needs the image.
    scratch.write("images/cut.qcow2", b"QFI\xfb\0\0\0\x03");
    let answer = scratch.run(&["tree", "--delete-check", "images/leaf.qcow2"]);
    assert_eq!(answer.code, Some(8), "{answer:?}");
    assert!(answer.stderr.contains("cut.qcow2"), "{answer:?}");
    assert!(answer.stderr.contains("may need it too"), "{answer:?}");
    scratch.json_of("tree", 8, &["--delete-check", "images/leaf.qcow2"]);
    scratch.json_of("tree", 5, &["--delete-check", "images/base.qcow2"]);
    std::fs::remove_file(scratch.path("images/cut.qcow2")).unwrap();
    // A data file is needed too.
    scratch.ok(&["create", "images/apart.qcow2", "1M", "-o", "data_file=apart.data"]);
    let text = scratch.run(&["tree", "--delete-check", "images/apart.data"]);
    assert_eq!((text.code, text.stdout.contains("apart.qcow2")), (Some(5), true), "{text:?}");
}
