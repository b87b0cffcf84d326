//! The facade's names are shown on purpose: the lists of `src/lib.rs`, compared with
//! `public-names.txt`.

use std::collections::BTreeSet;

/// The names of the `pub use` lists, each with its modules.
fn names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut modules = Vec::new();
    let mut lines = include_str!("../src/lib.rs").lines().map(str::trim);
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("pub mod ") {
            match name.strip_suffix(" {") {
                Some(name) => modules.push(name),
                None => assert!(names.insert(name.trim_end_matches(';').to_owned()), "{line}"),
            }
        } else if line == "}" {
            modules.pop();
        } else if let Some(first) = line.strip_prefix("pub use ") {
            let mut list = first.to_owned();
            while !list.ends_with(';') {
                list.push_str(lines.next().expect("a list ends"));
            }
            let list = list.rsplit_once("::").expect("a path").1;
            let shown = list.split(',').map(|name| name.trim_matches([' ', '{', '}', ';']));
            for name in shown.filter(|name| !name.is_empty()) {
                let path = [&modules[..], &[name]].concat().join("::");
                assert!(!path.contains(['*', ' ']), "{path}: name what is shown");
                assert!(names.insert(path.clone()), "{path} is there twice");
            }
        }
    }
    names
}

#[test]
fn no_name_comes_or_goes_unnoticed() {
    let (found, noted) = (names(), include_str!("public-names.txt"));
    let noted: BTreeSet<_> = noted.lines().map(str::to_owned).collect();
    let new: Vec<_> = found.difference(&noted).collect();
    let gone: Vec<_> = noted.difference(&found).collect();
    assert!(new.is_empty() && gone.is_empty(), "public-names.txt lacks {new:?}; gone: {gone:?}");
}
