//! Imports go downward only: no crate of the house depends on one above it.

use std::process::Command;

use serde_json::Value;

/// The house from the ground up: a crate may import what stands before it.
const LAYERS: &[&[&str]] = &[
    &["vdkit-block", "vdkit-guest"],
    &["vdkit-meta"],
    &["vdkit-luks", "vdkit-blockmap"],
    &[
        "vdkit-storage",
        "vdkit-raw",
        "vdkit-qcow2",
        "vdkit-vdi",
        "vdkit-vhd",
        "vdkit-vhdx",
        "vdkit-vmdk",
        "vdkit-legacy",
    ],
    &["vdkit-chain", "vdkit-stream"],
    &["vdkit-ova"],
    &["vdkit-jobs", "vdkit-export"],
    &["vdkit-export-nbd", "vdkit-export-vhost", "vdkit-export-fuse"],
    &["vdkit-lab"],
    &["vdkit"],
    &["vdkit-cli"],
];

/// Formats know storages only as the trait that they are handed, so each imports block and the engine of metadata alone, but
/// for the encryption that is inside of others too, and what formats of tables of blocks share.
const FORMATS: &[&str] = &[
    "vdkit-raw",
    "vdkit-qcow2",
    "vdkit-luks",
    "vdkit-vdi",
    "vdkit-vhd",
    "vdkit-vhdx",
    "vdkit-vmdk",
    "vdkit-legacy",
];
const WITHIN_FORMATS: &[&str] = &["vdkit-block", "vdkit-meta", "vdkit-luks", "vdkit-blockmap"];

/// Kept for tests and benchmarks; anybody may have these as dev-dependencies, nobody in the house
/// otherwise.
const FOR_TESTS: &[&str] = &["vdkit-testkit", "vdkit-supervisor"];

/// Stands outside the house and may import all of it; nobody imports these.
const OUTSIDE: &[&str] = &["vdkit-bench", "vdkit-fuzz"];

fn layer(name: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&name))
}

/// Whether `from` may import `to`, and if not why.
fn judge(from: &str, to: &str, kind: Option<&str>) -> Result<(), String> {
    if kind == Some("dev") {
        // Tests may look down and sideways, and at the tools for tests.
        return Ok(());
    }
    if OUTSIDE.contains(&to) {
        return Err(format!("{from} imports {to}, which stands outside the house"));
    }
    if FOR_TESTS.contains(&from) || OUTSIDE.contains(&from) {
        return Ok(());
    }
    if FOR_TESTS.contains(&to) {
        return Err(format!("{from} imports {to} outside its tests"));
    }
    if FORMATS.contains(&from) && !WITHIN_FORMATS.contains(&to) {
        return Err(format!("the format {from} imports {to}; a format imports block alone"));
    }
    let (Some(a), Some(b)) = (layer(from), layer(to)) else {
        return Err(format!("{from} or {to} has no place in the layers of this test"));
    };
    if b < a { Ok(()) } else { Err(format!("{from} imports {to}, which is not below it")) }
}

#[test]
fn imports_go_downward_only() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let names: Vec<&str> = packages.iter().map(|p| p["name"].as_str().unwrap()).collect();
    let mut edges = 0;
    let mut faults = Vec::new();
    for package in packages {
        let from = package["name"].as_str().unwrap();
        for dependency in package["dependencies"].as_array().unwrap() {
            let to = dependency["name"].as_str().unwrap();
            if names.contains(&to) {
                edges += 1;
                faults.extend(judge(from, to, dependency["kind"].as_str()).err());
            }
        }
    }
    assert!(edges >= 8, "only {edges} edges were seen in the house");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn upward_and_sideways_edges_are_seen() {
    assert!(judge("vdkit-jobs", "vdkit-block", None).is_ok());
    assert!(judge("vdkit-block", "vdkit-storage", None).is_err());
    assert!(judge("vdkit-qcow2", "vdkit-storage", None).is_err());
    assert!(judge("vdkit-qcow2", "vdkit-luks", None).is_ok());
    assert!(judge("vdkit-luks", "vdkit-qcow2", None).is_err());
    assert!(judge("vdkit-luks", "vdkit-storage", None).is_err());
    assert!(judge("vdkit-qcow2", "vdkit-storage", Some("dev")).is_ok());
    assert!(judge("vdkit-storage", "vdkit-raw", None).is_err());
    assert!(judge("vdkit-chain", "vdkit-jobs", None).is_err());
    assert!(judge("vdkit-cli", "vdkit-testkit", None).is_err());
    assert!(judge("vdkit-jobs", "vdkit-supervisor", None).is_err());
    assert!(judge("vdkit-bench", "vdkit-supervisor", None).is_ok());
    assert!(judge("vdkit-testkit", "vdkit-bench", None).is_err());
    assert!(judge("vdkit-cli", "vdkit-unheard-of", None).is_err());
}
