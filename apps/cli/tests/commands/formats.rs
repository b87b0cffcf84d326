//! `vdkit formats`.

use std::path::Path;

use crate::common::Scratch;

#[test]
fn lists_every_format_of_the_registry() {
    let scratch = Scratch::new();
    let text = scratch.ok(&["formats"]).stdout;
    let json = scratch.json_of("formats", 0, &[]);
    let names: Vec<_> =
        json.as_array().unwrap().iter().map(|f| f["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"raw") && names.contains(&"qcow2"), "{names:?}");
    for name in names {
        assert!(text.lines().any(|line| line.starts_with(&format!("{name} "))), "{name}: {text}");
    }
}

#[test]
fn shows_kinds_defaults_and_meanings_of_options() {
    let scratch = Scratch::new();
    let text = scratch.ok(&["formats", "qcow2"]).stdout;
    let json = scratch.json_of("formats", 0, &["qcow2"]);
    let options = json["options"].as_array().unwrap();
    let keys: Vec<_> = options.iter().map(|option| option["key"].as_str().unwrap()).collect();
    for key in ["cluster_size", "preallocation", "compat", "compression_type", "data_file"] {
        assert!(keys.contains(&key), "{keys:?}");
    }
    for option in options {
        let row = text
            .lines()
            .find(|line| {
                line.trim_start().starts_with(&format!("{} ", option["key"].as_str().unwrap()))
            })
            .unwrap_or_else(|| panic!("{option}: {text}"));
        assert!(row.contains(option["help"].as_str().unwrap()), "{row}");
        assert!(row.contains(option["default"].as_str().unwrap()), "{row}");
    }
}

#[test]
fn an_unknown_format_is_a_usage_error_that_names_the_known() {
    let answer = Scratch::new().fails(2, "'qcow3'", &["formats", "qcow3"]);
    assert!(answer.stderr.contains("raw") && answer.stderr.contains("qcow2"), "{answer:?}");
}

/// The rows of the table in docs/formats/README.md: a format's name, and what can be done with it.
fn table() -> Vec<(String, Vec<String>)> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/formats/README.md");
    let text = std::fs::read_to_string(page).unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| ["));
    let row = |row: &str| {
        let (name, rest) = row.split_once(']').unwrap();
        let cells = rest.split('|').map(|cell| cell.trim().to_owned());
        (name.to_owned(), cells.collect())
    };
    rows.map(row).collect()
}

#[test]
fn the_page_of_the_formats_says_what_works() {
    let scratch = Scratch::new();
    scratch.write("key", b"secret");
    let json = scratch.json_of("formats", 0, &[]);
    let names = json.as_array().unwrap().iter().map(|format| format["name"].as_str().unwrap());
    let table = table();
    assert!(names.eq(table.iter().map(|(name, _)| name.as_str())), "{table:?}");
    for (name, cells) in &table {
        let (image, overlay) = (format!("disk.{name}"), format!("overlay.{name}"));
        let key: &[&str] = match name.as_str() {
            "luks" => &["-o", "iter-time=10", "--key-file", "key"],
            _ => &[],
        };
        let create = [&["create", "-f", name, &image, "8M"][..], key].concat();
        let resize =
            [&["resize", "-f", name, &image, "16M"][..], &key[key.len().min(2)..]].concat();
        for (column, command) in [
            (1, &create[..]),
            (2, &resize),
            (3, &["compact", "-f", name, &image]),
            (5, &["create", "-f", name, &overlay, "--backing", &image, "--backing-format", name]),
            (6, &["snapshot", "create", "-f", name, &image, "one"]),
            (7, &["bitmap", "add", "-f", name, &image, "one"]),
        ] {
            let answer = scratch.run(command);
            assert_eq!(
                cells[column].starts_with("yes"),
                answer.code == Some(0),
                "{command:?}: {answer:?}"
            );
        }
    }
}
