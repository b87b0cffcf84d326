//! The README's examples run as they stand.

use std::path::Path;
use std::process::Command;

#[test]
fn the_readmes_examples_run() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/readme-examples");
    let output = Command::new(script).arg(env!("CARGO_BIN_EXE_vdkit")).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    // What the examples' own comments promise.
    assert!(said.contains("aa aa aa aa"), "{said}");
}
