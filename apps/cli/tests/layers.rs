//! Imports go downward only, the folders are the floors, and words of the command stay on its floor.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// The floors from the ground up: a crate may import crates of lower floors. On a floor that lists several rows, it may
/// import those of the rows before its own too.
const FLOORS: &[(&str, &[&[&str]])] = &[
    ("engine", &[&["vdkit-block"], &["vdkit-meta"], &["vdkit-storage"], &["vdkit-chain"]]),
    (
        "formats",
        &[
            &["vdkit-luks", "vdkit-blockmap"],
            &[
                "vdkit-raw",
                "vdkit-qcow2",
                "vdkit-vdi",
                "vdkit-vhd",
                "vdkit-vhdx",
                "vdkit-vmdk",
                "vdkit-legacy",
            ],
        ],
    ),
    ("sources", &[&["vdkit-stream", "vdkit-nbd-wire"], &["vdkit-nbd-client"], &["vdkit-ova"]]),
    (
        "jobs",
        &[
            &["vdkit-deflate", "vdkit-tree", "vdkit-inspect", "vdkit-libvirt"],
            &["vdkit-copy"],
            &["vdkit-image", "vdkit-doctor", "vdkit-appliance"],
        ],
    ),
    ("serve", &[&["vdkit-serve"], &["vdkit-nbd", "vdkit-vhost", "vdkit-fuse"]]),
    ("vdkit", &[&["vdkit"]]),
    ("bindings", &[&["vdkit-c", "vdkit-python"]]),
    ("apps", &[&["vdkit-lab", "vdkit-qemu"], &["vdkit-cli"]]),
];

/// Formats know storages only as the trait that they are handed. A format imports the contract, the engine of metadata,
/// and what formats share.
const WITHIN_FORMATS: &[&str] = &["vdkit-block", "vdkit-meta", "vdkit-luks", "vdkit-blockmap"];

/// Floors whose crates know formats only by the contract: they are handed drivers and images.
const KNOW_NO_FORMAT: &[&str] = &["sources", "jobs", "serve"];

/// Judges images from strangers by rules that are about formats.
const KNOWS_FORMATS: &str = "vdkit-inspect";

/// Kept for tests and benchmarks: any crate may have these as dev-dependencies.
const FOR_TESTS: &[&str] =
    &["vdkit-testbase", "vdkit-testkit", "vdkit-supervisor", "vdkit-bench", "vdkit-differential"];

/// Boots Linux: for tests, and for the lab, which measures guests.
const GUEST: &str = "vdkit-guest";

/// What `vdkit`, which other programs import, must not bring along.
const NOT_IN_THE_FACADE: &[&str] =
    &["vdkit-lab", "rusqlite", "maud", "clap", "anyhow", "vdkit-guest", "vdkit-testbase"];

/// The floor and the row on it.
fn place(name: &str) -> Option<(usize, usize)> {
    FLOORS.iter().enumerate().find_map(|(floor, (_, rows))| {
        rows.iter().position(|row| row.contains(&name)).map(|row| (floor, row))
    })
}

/// The folder in which the crate lies.
fn folder(name: &str) -> Option<&'static str> {
    if FOR_TESTS.contains(&name) || name == GUEST {
        return Some("dev");
    }
    place(name).map(|(floor, _)| FLOORS[floor].0)
}

/// Whether `from` may import `to`, and if not why.
fn judge(from: &str, to: &str, kind: Option<&str>) -> Result<(), String> {
    if kind == Some("dev") || FOR_TESTS.contains(&from) {
        // Tests may import downward and sideways, and the tools for tests.
        return Ok(());
    }
    if FOR_TESTS.contains(&to) {
        return Err(format!("{from} imports {to} outside its tests"));
    }
    if to == GUEST {
        return if from == "vdkit-lab" { Ok(()) } else { Err(format!("{from} imports {to}")) };
    }
    let (Some(upper), Some(lower)) = (place(from), place(to)) else {
        return Err(format!("{from} or {to} has no place on the floors of this test"));
    };
    if FLOORS[upper.0].0 == "formats" && !WITHIN_FORMATS.contains(&to) {
        return Err(format!(
            "the format {from} imports {to}; a format imports {WITHIN_FORMATS:?} alone"
        ));
    }
    let floor = FLOORS[upper.0].0;
    if FLOORS[lower.0].0 == "formats" && KNOW_NO_FORMAT.contains(&floor) && from != KNOWS_FORMATS {
        return Err(format!("{from} imports the format {to}; it should know none by name"));
    }
    if lower < upper { Ok(()) } else { Err(format!("{from} imports {to}, which is not below it")) }
}

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn packages() -> Vec<Value> {
    let metadata = cargo(&["metadata", "--format-version", "1", "--no-deps", "--offline"]);
    let metadata: Value = serde_json::from_str(&metadata).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

#[test]
fn imports_go_downward_only() {
    let packages = packages();
    let names: Vec<&str> = packages.iter().map(|p| p["name"].as_str().unwrap()).collect();
    let mut edges = 0;
    let mut faults = Vec::new();
    for package in &packages {
        let from = package["name"].as_str().unwrap();
        for dependency in package["dependencies"].as_array().unwrap() {
            let to = dependency["name"].as_str().unwrap();
            if names.contains(&to) {
                edges += 1;
                faults.extend(judge(from, to, dependency["kind"].as_str()).err());
            }
        }
    }
    assert!(edges >= 100, "only {edges} edges were seen");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// Only the names of the facade are promised. So a crate of one version works with no other version of a crate beneath it,
/// and cargo must not put two versions together.
#[test]
fn crates_ask_for_one_version_of_each_other() {
    let packages = packages();
    let names: Vec<&str> = packages.iter().map(|p| p["name"].as_str().unwrap()).collect();
    let mut asked = 0;
    for package in &packages {
        let exactly = format!("={}", env!("CARGO_PKG_VERSION"));
        for dependency in package["dependencies"].as_array().unwrap() {
            let (to, version) = (dependency["name"].as_str().unwrap(), &dependency["req"]);
            // By path alone: what is not published, and what only tests need.
            if names.contains(&to) && version != "*" {
                asked += 1;
                assert_eq!(version, &exactly, "{} asks for {to}", package["name"]);
            }
        }
    }
    assert!(asked >= 100, "only {asked} versions were seen");
}

#[test]
fn each_crate_lies_in_the_folder_of_its_floor() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    for package in packages() {
        let name = package["name"].as_str().unwrap();
        let manifest = Path::new(package["manifest_path"].as_str().unwrap());
        let found = manifest.strip_prefix(&root).unwrap().iter().next().unwrap();
        assert_eq!(Some(found.to_str().unwrap()), folder(name), "{name}");
    }
}

/// The tree of what a program gets that imports the facade without features.
fn facade_tree(edges: &str, prefix: &str) -> String {
    cargo(&["tree", "--package", "vdkit", "--edges", edges, "--prefix", prefix, "--offline"])
}

/// Who embeds vdkit builds no SQLite, no HTML and no command line.
#[test]
fn the_facade_brings_no_lab_along() {
    let tree = facade_tree("normal,build", "none");
    let crates: Vec<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(crates.contains(&"vdkit-qcow2"), "{tree}");
    for unwanted in NOT_IN_THE_FACADE {
        assert!(!crates.contains(unwanted), "vdkit imports {unwanted}");
    }
}

/// docs/library.md says for what each crate is that the facade needs, and their number fits on a page.
#[test]
fn the_facade_brings_what_its_page_lists() {
    let tree = facade_tree("normal", "depth");
    let ours = |name: &str| name == "vdkit" || name.starts_with("vdkit-");
    let (mut path, mut needed, mut all) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
    for line in tree.lines() {
        let start = line.find(|c: char| !c.is_ascii_digit()).unwrap();
        let (depth, name) = (line[..start].parse().unwrap(), &line[start..]);
        let name = name.split(' ').next().unwrap();
        path.truncate(depth);
        if !ours(name) {
            all.insert(name);
            if ours(path[depth - 1]) {
                needed.insert(name);
            }
        }
        path.push(name);
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/library.md");
    let page = std::fs::read_to_string(page).unwrap();
    let section = page.split("## What it brings along").nth(1).expect("the section");
    let section = section.split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| "));
    let listed: BTreeSet<&str> = rows.flat_map(|row| row.split('`').skip(1).step_by(2)).collect();
    assert_eq!(listed, needed);
    assert!(all.len() <= 64, "{} crates: {all:?}", all.len());
}

#[test]
fn upward_and_sideways_edges_are_seen() {
    for (from, to, allowed) in [
        ("vdkit-copy", "vdkit-block", true),
        ("vdkit-block", "vdkit-storage", false),
        ("vdkit-qcow2", "vdkit-storage", false),
        ("vdkit-qcow2", "vdkit-luks", true),
        ("vdkit-luks", "vdkit-qcow2", false),
        ("vdkit-luks", "vdkit-storage", false),
        ("vdkit-storage", "vdkit-raw", false),
        ("vdkit-chain", "vdkit-copy", false),
        ("vdkit-cli", "vdkit-testkit", false),
        ("vdkit-copy", "vdkit-supervisor", false),
        ("vdkit-bench", "vdkit-supervisor", true),
        ("vdkit-cli", "vdkit-lab", true),
        ("vdkit", "vdkit-lab", false),
        ("vdkit-lab", "vdkit-guest", true),
        ("vdkit-copy", "vdkit-guest", false),
        ("vdkit-copy", "vdkit-qcow2", false),
        ("vdkit-inspect", "vdkit-qcow2", true),
        ("vdkit-image", "vdkit-copy", true),
        ("vdkit-copy", "vdkit-image", false),
        ("vdkit-cli", "vdkit-unheard-of", false),
    ] {
        assert_eq!(judge(from, to, None).is_ok(), allowed, "{from} to {to}");
    }
    assert!(judge("vdkit-qcow2", "vdkit-storage", Some("dev")).is_ok());
}

/// Floors whose messages reach users of the libraries too, who have no command line.
const BENEATH_THE_COMMAND: &[&str] =
    &["engine", "formats", "sources", "jobs", "serve", "vdkit", "bindings"];

/// Reports that consist of commands, and what a service answers to `vdkit ctl`.
const SPEAK_TO_THE_COMMAND: &[&str] =
    &["jobs/doctor/", "jobs/inspect/", "serve/core/src/control.rs"];

/// Programs of others.
const OTHER_PROGRAMS: &[&str] = &["cryptsetup", "nbdinfo", "tar --"];

/// Whether a line of code has an option or a subcommand of `vdkit` in a text.
fn names_an_option(line: &str) -> bool {
    let line = line.trim_start();
    let followed_by_letter = |start: &str| {
        let mut rest = line.split(start).skip(1);
        rest.any(|rest| rest.starts_with(|next: char| next.is_ascii_lowercase()))
    };
    let options = [" --", "'--", "\"--", " -o ", "'-f ", "'-O ", "'vdkit ", ": vdkit "];
    !line.starts_with("//")
        && !OTHER_PROGRAMS.iter().any(|other| line.contains(other))
        && options.iter().any(|option| followed_by_letter(option))
}

fn sources_in(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        match path.is_dir() {
            true if path.ends_with("tests") || path.ends_with("target") => {}
            true => sources_in(&path, found),
            false if path.extension().is_some_and(|extension| extension == "rs") => {
                found.push(path);
            }
            false => {}
        }
    }
}

#[test]
fn messages_of_the_libraries_name_no_option_of_the_command() {
    assert!(names_an_option("    \"if it is raw, say so: '--backing-format raw'\""));
    assert!(names_an_option("let hint = \"'vdkit resize --shrink' does that\";"));
    assert!(!names_an_option("// as `vdkit create -o`") && !names_an_option("at -= one;"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for floor in BENEATH_THE_COMMAND {
        let mut files = Vec::new();
        sources_in(&root.join(floor), &mut files);
        for file in files {
            let name = file.strip_prefix(&root).unwrap().display().to_string();
            let own = name.contains("/src/") && !name.ends_with("/tests.rs");
            if !own || SPEAK_TO_THE_COMMAND.iter().any(|start| name.starts_with(start)) {
                continue;
            }
            let text = std::fs::read_to_string(&file).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            let found: Vec<_> = code.lines().filter(|line| names_an_option(line)).collect();
            assert!(found.is_empty(), "{name}: {found:?}");
        }
    }
}
