//! `vdkit formats`.

mod common;

use common::Scratch;

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
