//! `vdkit man`.

use crate::common::Scratch;

#[test]
fn a_folder_gets_a_page_for_every_subcommand() {
    let scratch = Scratch::new();
    scratch.ok(&["man", "share/man/man1"]);
    let main = std::fs::read_to_string(scratch.path("share/man/man1/vdkit.1")).unwrap();
    for entry in vdkit_cli::commands::all() {
        assert!(main.contains(entry.name), "{}", entry.name);
        let page = scratch.path(&format!("share/man/man1/vdkit-{}.1", entry.name));
        let text = std::fs::read_to_string(&page).unwrap();
        for heading in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "EXIT STATUS"] {
            let quoted = format!(".SH \"{heading}\"");
            let plain = format!(".SH {heading}");
            assert!(
                text.lines().any(|line| line == quoted || line == plain),
                "{}: {heading}",
                page.display()
            );
        }
    }
}

#[test]
fn pages_go_to_stdout_too() {
    let scratch = Scratch::new();
    assert!(scratch.ok(&["man"]).stdout.contains(".TH VDKIT 1"));
    assert!(scratch.ok(&["man", "--page", "info"]).stdout.contains("vdkit info disk.qcow2"));
    scratch.fails(2, "'no-such'", &["man", "--page", "no-such"]);
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let scratch = Scratch::new();
    scratch.write("file", b"");
    scratch.fails(1, "file/pages", &["man", "file/pages"]);
}
