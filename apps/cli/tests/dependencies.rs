//! What vdkit is made of, against deny.toml: licenses, sources, duplicates. `make audit` asks cargo-deny itself, which
//! takes minutes to build; this takes none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use toml::{Table, Value};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn table(name: &str) -> Table {
    std::fs::read_to_string(root().join(name)).unwrap().parse().unwrap()
}

fn list<'a>(table: &'a Table, section: &str, key: &str) -> &'a [Value] {
    table[section][key].as_array().unwrap()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_else(|| panic!("{value} has no {key}"))
}

/// A crate of another project.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Crate {
    name: String,
    version: String,
    license: String,
}

/// All that is built for programs, for tests and during builds.
fn crates() -> BTreeSet<Crate> {
    let mut tree = Command::new(env!("CARGO"));
    tree.args(["tree", "--workspace", "--locked", "--offline", "--all-features"]);
    tree.args(["--edges", "normal,build,dev", "--prefix", "none", "--format", "{p}\t{l}"]);
    let output = tree.current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().filter_map(of_line).collect()
}

/// `NAME vVERSION (WHERE)`, a tab, the license, ` (*)` if it was listed before; `None` for a crate of this tree.
fn of_line(line: &str) -> Option<Crate> {
    let (package, license) = line.trim_end_matches(" (*)").split_once('\t')?;
    let mut words = package.split(' ');
    let (name, version) = (words.next()?, words.next()?.strip_prefix('v')?);
    if words.any(|word| word.starts_with("(/")) {
        return None;
    }
    Some(Crate { name: name.into(), version: version.into(), license: license.into() })
}

/// The words of an SPDX expression. Old crates write a slash for OR.
fn words(expression: &str) -> Vec<String> {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    spaced.split_whitespace().map(str::to_owned).collect()
}

/// Whether one may follow an SPDX expression with these licenses alone.
fn satisfied(expression: &str, allowed: &BTreeSet<&str>) -> bool {
    let words = words(expression);
    let mut rest = &words[..];
    let answer = any_of(&mut rest, allowed);
    assert!(rest.is_empty() && !words.is_empty(), "not an SPDX expression: '{expression}'");
    answer
}

fn take(rest: &mut &[String], word: &str) -> bool {
    let found = rest.first().is_some_and(|first| first == word);
    if found {
        *rest = &rest[1..];
    }
    found
}

fn any_of(rest: &mut &[String], allowed: &BTreeSet<&str>) -> bool {
    let mut answer = all_of(rest, allowed);
    while take(rest, "OR") {
        answer |= all_of(rest, allowed);
    }
    answer
}

fn all_of(rest: &mut &[String], allowed: &BTreeSet<&str>) -> bool {
    let mut answer = one(rest, allowed);
    while take(rest, "AND") {
        answer &= one(rest, allowed);
    }
    answer
}

fn one(rest: &mut &[String], allowed: &BTreeSet<&str>) -> bool {
    if take(rest, "(") {
        let answer = any_of(rest, allowed);
        assert!(take(rest, ")"), "a bracket is not closed before {rest:?}");
        return answer;
    }
    let mut license = rest.first().cloned().unwrap_or_default();
    *rest = rest.get(1..).unwrap_or_default();
    if take(rest, "WITH") {
        license = format!("{license} WITH {}", rest.first().cloned().unwrap_or_default());
        *rest = rest.get(1..).unwrap_or_default();
    }
    allowed.contains(license.as_str())
}

#[test]
fn each_license_is_allowed() {
    let rules = table("deny.toml");
    let allowed: BTreeSet<&str> =
        list(&rules, "licenses", "allow").iter().map(|license| license.as_str().unwrap()).collect();
    let exceptions: BTreeMap<&str, &Value> = list(&rules, "licenses", "exceptions")
        .iter()
        .map(|exception| (text(exception, "crate"), &exception["allow"]))
        .collect();
    let crates = crates();
    assert!(crates.len() > 150, "{crates:?}");
    for found in &crates {
        let mut here = allowed.clone();
        let more = exceptions.get(found.name.as_str()).and_then(|more| more.as_array());
        here.extend(more.into_iter().flatten().map(|license| license.as_str().unwrap()));
        assert!(
            satisfied(&found.license, &here),
            "{found:?}: deny.toml does not allow its license"
        );
    }
}

/// A second version of a crate is a decision, which deny.toml records.
#[test]
fn duplicates_are_known() {
    let rules = table("deny.toml");
    let known: BTreeSet<&str> = list(&rules, "bans", "skip")
        .iter()
        .map(|entry| {
            assert!(!text(entry, "reason").is_empty(), "{entry}");
            text(entry, "crate")
        })
        .collect();
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for found in crates() {
        versions.entry(found.name).or_default().push(found.version);
    }
    for (name, mut versions) in versions {
        // What a build adds to a version (+spec-1.1.0) does not distinguish it.
        versions.retain(|version| {
            let plain = version.split('+').next().unwrap();
            !known.contains(format!("{name}@{plain}").as_str())
        });
        assert!(versions.len() <= 1, "{name} is built as {versions:?}; deny.toml gives no reason");
    }
}

/// Everything comes from one registry, with a checksum.
#[test]
fn sources_are_the_registry() {
    let lock = table("Cargo.lock");
    let mut sources = BTreeSet::new();
    for package in lock["package"].as_array().unwrap() {
        let Some(source) = package.get("source") else { continue };
        let source = source.as_str().unwrap();
        assert!(source.starts_with("registry+"), "{package}");
        assert!(package.get("checksum").is_some(), "{package}");
        sources.insert(source.to_owned());
    }
    assert_eq!(sources.len(), 1, "{sources:?}");
}

#[test]
fn expressions_are_judged() {
    let allowed = BTreeSet::from(["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"]);
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0-only", false),
        ("GPL-3.0-only OR MIT", true),
        ("GPL-3.0-only/MIT", true),
        ("MIT AND GPL-3.0-only", false),
        ("ISC AND (GPL-3.0-only OR MIT)", true),
        ("(MIT OR ISC) AND OpenSSL", false),
        ("OpenSSL OR MIT AND ISC", true),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("Apache-2.0", false),
    ] {
        assert_eq!(satisfied(expression, &allowed), expected, "{expression}");
    }
}
