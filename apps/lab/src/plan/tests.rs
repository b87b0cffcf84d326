use super::*;
use crate::model::PlaceInfo;

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
    // The order is that of the axes, whatever the order in the text.
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
        ("rounds = 3", "rounds = 0", 28, "expected 1 to 1000, found 0"),
        ("rounds = 3", "rounds = \"3\"", 28, "expected u32"),
        ("seconds = 2.5", "seconds = -1.0", 29, "expected 0.1"),
        ("layout = [\"raw\"]", "cache = [\"none\"]", 21, "not an axis of this plan; axes: layout"),
        ("layout = [\"raw\"]", "layout = 5", 21, "expected \"value\""),
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
    assert_eq!(plans.len(), 7);
    for (plan, (name, _)) in plans.iter().zip(BUILT_IN) {
        assert_eq!(plan.name, *name);
        assert!(plan.question.ends_with('?'), "{name}");
        for quick in [false, true] {
            let place = PlaceInfo { name: "ext4".into(), ..PlaceInfo::default() };
            assert!(!crate::cells::cells(plan, &[&place], quick).is_empty(), "{name}");
        }
        assert!(
            !plan.published.is_empty()
                || ["nospace", "cache-modes", "preallocation"].contains(&plan.name.as_str())
        );
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

#[test]
fn an_axis_may_be_varied_on_some_file_systems_only() {
    let on = |on: &str, quick: &str| {
        let from = "name = \"layout\"\nvalues = [\"raw\", \"qcow2\"]\nquick = [\"qcow2\"]";
        assert!(SMALL.contains(from));
        let to = format!(
            "name = \"layout\"\nvalues = [\"raw\", \"qcow2\"]\nquick = [{quick}]\non = [{on}]"
        );
        Plan::parse(&SMALL.replace(from, &to), "small.toml")
    };
    assert_eq!(on("\"zfs\"", "\"raw\"").unwrap().axes[0].on, ["zfs"]);
    // On other file systems the axis has its first value, which must be the same in a quick run.
    let error = on("\"zfs\"", "\"qcow2\"").unwrap_err().to_string();
    assert!(error.contains("line 8") && error.contains("first value"), "{error}");
}

/// A plan once compared published numbers of one kind of disk with its own of another.
#[test]
fn every_published_number_is_of_cells_that_its_plan_measures() {
    for plan in built_in().unwrap() {
        for published in &plan.published {
            let backend = published.axes.iter().find(|(axis, _)| axis == crate::axes::BACKEND);
            let name = backend.map_or("ext4", |(_, name)| name).to_owned();
            let place = PlaceInfo { name, ..PlaceInfo::default() };
            let cells = crate::cells::cells(&plan, &[&place], false);
            let of = |cell: &crate::model::Cell| {
                published.axes.iter().all(|entry| cell.axes.contains(entry))
            };
            assert!(cells.iter().any(of), "{}: {}", plan.name, published.source);
        }
    }
    let table = Plan::named("convert-table").unwrap();
    assert_eq!(table.full.disk, 2 << 30);
    for quick in [false, true] {
        let place = PlaceInfo { name: "xfs".into(), ..PlaceInfo::default() };
        let cells = crate::cells::cells(&table, &[&place], quick);
        let has = |layout: &str, content: &str| {
            let is = |cell: &&crate::model::Cell| {
                cell.axis("layout") == Some(layout) && cell.axis("content") == Some(content)
            };
            cells.iter().filter(is).count()
        };
        for layout in ["raw", "qcow2", "vmdk"] {
            let found = ["none", "sparse", "full"].map(|content| has(layout, content));
            assert_eq!(found, [0, 2, 2], "{layout}");
        }
        assert_eq!(has("qcow2-metadata", "none"), 2);
    }
}

#[test]
fn writes_that_must_be_durable_are_synced_one_by_one_and_batch_by_batch_also_in_quick_runs() {
    let plan = Plan::named("zvol-vs-qcow2").unwrap();
    let profiles = plan.axes.iter().find(|axis| axis.name == "profile").unwrap();
    for values in [&profiles.values, &profiles.quick] {
        assert!(["durable16", "batch16"].iter().all(|name| values.iter().any(|v| v == name)));
    }
    let plan = Plan::named("preallocation").unwrap();
    let kinds = &plan.axes.iter().find(|axis| axis.name == "preallocation").unwrap().quick;
    assert_eq!(kinds[..], ["off", "metadata", "falloc", "full"]);
}
