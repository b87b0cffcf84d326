use super::*;

const SMALL: &str = r#"
name = "small"
title = "A small plan"
question = "Which is faster?"
metric = "iops"

[[axis]]
name = "layout"
values = ["raw", "qcow2"]
quick = ["qcow2"]

[[axis]]
name = "profile"
values = ["rnd4k-q1-read"]

[[include]]
profile = "database"
layout = "raw"

[[exclude]]
layout = ["raw"]
backend = "tmpfs"

[baseline]
layout = "qcow2"

[full]
rounds = 3
seconds = 2.5
disk = "1G"
bytes = "64M"

[quick]
rounds = 1
seconds = 1
disk = "64M"
bytes = "1M"

[[published]]
axes = { layout = "raw" }
metric = "iops"
value = 12
source = "somewhere"
"#;

#[test]
fn a_plan_is_read() {
    let plan = Plan::parse(SMALL, "small.toml").unwrap();
    assert_eq!(plan.axes[0].values, ["raw", "qcow2"]);
    assert_eq!(plan.axes[0].quick, ["qcow2"]);
    assert_eq!(plan.axes[1].quick, ["rnd4k-q1-read"]);
    // In the order of the axes, whatever the order in the text.
    assert_eq!(plan.include[0][0], ("layout".to_owned(), "raw".to_owned()));
    assert_eq!(plan.summary().axes, ["backend", "layout", "profile"]);
    let effort = Effort { rounds: 3, seconds: 2.5, disk: 1 << 30, bytes: 64 << 20 };
    assert_eq!(plan.effort(false), effort);
    assert_eq!(plan.effort(true).seconds, 1.0);
    assert_eq!(plan.published[0].value, 12.0);
    assert_eq!(plan.places, [PlaceKind::Directory, PlaceKind::Device]);
}

#[test]
fn faults_are_told_with_file_line_and_what_would_be_right() {
    for (from, to, line, words) in [
        ("\"raw\", \"qcow2\"", "\"raw\", \"qcow3\"", 9, "unknown layout 'qcow3'; known: raw"),
        ("name = \"layout\"", "name = \"layouts\"", 8, "unknown axis 'layouts'; known: backend"),
        ("name = \"layout\"", "name = \"backend\"", 8, "come from --on"),
        ("quick = [\"qcow2\"]", "quik = [\"qcow2\"]", 10, "unknown field `quik`"),
        (
            "metric = \"iops\"\n\n",
            "metric = \"speed\"\n\n",
            5,
            "unknown metric 'speed'; known: iops",
        ),
        ("disk = \"1G\"", "disk = \"1000\"", 30, "whole MiB"),
        ("rounds = 3", "rounds = 0", 28, "from 1 to 1000"),
        ("rounds = 3", "rounds = \"3\"", 28, "expected u32"),
        ("seconds = 2.5", "seconds = -1.0", 29, "from 0.1"),
        ("layout = [\"raw\"]", "cache = [\"none\"]", 21, "no axis of this plan; axes: layout"),
        ("layout = [\"raw\"]", "layout = 5", 21, "write \"value\""),
        ("profile = \"database\"", "", 16, "a value for 'profile'"),
        ("layout = \"qcow2\"\n", "layout = [\"raw\", \"qcow2\"]\n", 25, "one value"),
        ("[\"rnd4k-q1-read\"]", "[]", 13, "each once"),
        ("\"raw\", \"qcow2\"", "\"raw\", \"raw\"", 8, "each once"),
        ("name = \"small\"", "name = \"a b\"", 2, "letters, digits"),
        ("name = \"profile\"", "name = \"layout\"", 14, "unknown layout 'rnd4k-q1-read'"),
    ] {
        assert!(SMALL.contains(from), "{from}");
        let text = SMALL.replacen(from, to, 1);
        let error = Plan::parse(&text, "small.toml").unwrap_err().to_string();
        assert!(error.starts_with(&format!("small.toml: line {line}: ")), "{to}: {error}");
        assert!(error.contains(words), "{to}: {error}");
    }
}

#[test]
fn the_built_in_plans_are_sound() {
    let plans = built_in().unwrap();
    assert_eq!(plans.len(), 6);
    for (plan, (name, _)) in plans.iter().zip(BUILT_IN) {
        assert_eq!(plan.name, *name);
        assert!(plan.question.ends_with('?'), "{name}");
        assert!(!plan.published.is_empty() || plan.name == "nospace" || plan.name == "cache-modes");
    }
    let error = Plan::named("other").unwrap_err().to_string();
    assert!(error.contains("zvol-vs-qcow2, convert-table"), "{error}");
}

#[test]
fn published_numbers_come_with_what_differs() {
    for plan in built_in().unwrap() {
        assert_eq!(plan.published.is_empty(), plan.differs.is_empty(), "{}", plan.name);
        assert_eq!(plan.summary().differs, plan.differs);
    }
}
