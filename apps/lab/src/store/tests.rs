use std::path::PathBuf;

use rusqlite::Connection;
use tempfile::TempDir;

use super::*;
use crate::model::{Histogram, Outcome, PlaceInfo, PlanSummary, Published, Section, Steady};

fn cell(layout: &str) -> Cell {
    let axes = vec![("backend".to_owned(), "ext4".to_owned()), ("layout".into(), layout.into())];
    Cell { key: format!("backend=ext4/layout={layout}"), axes, ..Cell::default() }
}

fn sample(round: u32) -> Sample {
    Sample {
        round,
        values: [("iops".to_owned(), 100.0 + f64::from(round)), ("reads".to_owned(), 7.0)].into(),
        latencies: Some(Histogram { buckets: vec![(1000, 5), (u64::MAX >> 1, 1)] }),
        series: ["bytes_per_second", "iops"]
            .map(|metric| Series {
                metric: metric.into(),
                seconds: vec![0.5, 1.0],
                values: vec![3.0, 4.5],
            })
            .into(),
        steady: Some(Steady { mean: 3.0, metric: "iops".into(), ..Steady::default() }),
        raw: Some(serde_json::json!({"jobs": [1, 2]})),
        started: 77,
        seconds: 1.5,
    }
}

fn run() -> Run {
    Run {
        id: "r".into(),
        plan: PlanSummary { name: "p".into(), axes: vec!["backend".into()], ..Default::default() },
        published: vec![Published {
            axes: vec![("layout".into(), "raw".into())],
            metric: "iops".into(),
            value: 5.0,
            source: "a page".into(),
        }],
        seed: u64::MAX,
        started: 5,
        vdkit_version: "0".into(),
        environment: Environment {
            cores: 2,
            places: vec![PlaceInfo {
                name: "ext4".into(),
                path: "/d".into(),
                ..Default::default()
            }],
            sections: vec![Section {
                title: "Machine".into(),
                entries: vec![("a".into(), "b".into()), ("c".into(), "d".into())],
            }],
            ..Default::default()
        },
        cells: vec![cell("raw"), cell("qcow2")],
        ..Run::default()
    }
}

fn made() -> (TempDir, PathBuf, Store) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sqlite");
    let store = Store::create(&path, &run(), &["asked"]).unwrap();
    (folder, path, store)
}

#[test]
fn a_run_comes_back_as_it_was() {
    let (_folder, path, mut store) = made();
    let mut expected = run();
    assert_eq!(Store::load(&path).unwrap(), expected);
    expected.cells[1].samples = vec![sample(0), sample(2)];
    expected.cells[1].commands = vec!["fio".into()];
    expected.cells[1].outcome = Outcome::Measured;
    expected.cells[0].outcome = Outcome::Skipped("no fio".into());
    expected.warnings = vec![Warning { kind: "load".into(), text: "x".into(), cells: vec![] }];
    expected.ended = Some(9);
    let measured = expected.cells[1].clone();
    for sample in [&measured.samples[1], &measured.samples[0]] {
        store.add_sample(&measured, sample).unwrap();
    }
    for cell in &expected.cells {
        store.set_outcome(cell).unwrap();
    }
    store.add_warning(&expected.warnings[0]).unwrap();
    store.end(9).unwrap();
    assert_eq!(Store::load(&path).unwrap(), expected);
    assert_eq!(store.request::<Vec<String>>().unwrap(), ["asked"]);
    // The same as JSON.
    let json = serde_json::to_string(&expected).unwrap();
    assert_eq!(serde_json::from_str::<Run>(&json).unwrap(), expected);
    assert!(json.contains(r#""outcome":{"state":"skipped","text":"no fio"}"#), "{json}");
    let pending = serde_json::to_value(Outcome::Pending).unwrap();
    assert_eq!(pending, serde_json::json!({"state": "pending"}));
    // A complete run can be written at once.
    let copy = path.with_extension("copy");
    Store::create(&copy, &expected, &()).unwrap();
    assert_eq!(Store::load(&copy).unwrap(), expected);
}

#[test]
fn a_round_is_there_once_and_as_a_whole() {
    let (_folder, path, mut store) = made();
    let cell = cell("raw");
    store.add_sample(&cell, &sample(0)).unwrap();
    assert!(store.add_sample(&cell, &sample(0)).is_err());
    // A duplicate bucket is refused, and nothing of that round may remain.
    let mut broken = sample(1);
    broken.latencies = Some(Histogram { buckets: vec![(5, 1), (5, 1)] });
    assert!(store.add_sample(&cell, &broken).is_err());
    let run = Store::load(&path).unwrap();
    assert_eq!(run.cells[0].samples, [sample(0)]);
    let unknown = Cell { key: "other".into(), ..Cell::default() };
    assert!(store.add_sample(&unknown, &sample(0)).is_err());
}

#[test]
fn one_file_holds_all_and_other_tools_read_it() {
    let (folder, path, mut store) = made();
    store.add_sample(&cell("raw"), &sample(0)).unwrap();
    let names = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(names, 1, "a log or journal stands beside the file");
    let other = Connection::open(&path).unwrap();
    let value = |sql: &str| other.query_row(sql, [], |row| row.get::<_, f64>(0)).unwrap();
    assert_eq!(value("SELECT value FROM results WHERE metric = 'iops'"), 100.0);
    assert_eq!(value("SELECT sum(rounds) FROM cells"), 1.0);
    assert_eq!(value("SELECT count(*) FROM places WHERE path = '/d' AND name = 'ext4'"), 1.0);
}

#[test]
fn other_files_are_refused() {
    let (folder, path, store) = made();
    drop(store);
    let fails = |path: &Path| format!("{:#}", Store::open(path).unwrap_err());
    let other = folder.path().join("other");
    assert!(fails(&other).contains("no such file"));
    std::fs::write(&other, "text ".repeat(1000)).unwrap();
    assert!(fails(&other).contains("not a SQLite database"));
    std::fs::remove_file(&other).unwrap();
    Connection::open(&other).unwrap().execute_batch("CREATE TABLE a (b)").unwrap();
    assert!(fails(&other).contains("not a result"));
    Connection::open(&path).unwrap().pragma_update(None, "user_version", 99).unwrap();
    assert!(fails(&path).contains("version 99"));
    let again = Store::create(&path, &run(), &()).unwrap_err();
    assert!(again.to_string().contains("already exists"));
}

#[test]
fn one_process_measures_into_a_file_and_any_may_read_it() {
    let (_folder, path, store) = made();
    let told = Store::open(&path).unwrap_err();
    let Some(vdkit_block::Error::Locked { holder, .. }) = told.engine() else { panic!("{told:#}") };
    assert_eq!(holder.as_ref().map(|holder| holder.pid), Some(std::process::id()));
    Store::load(&path).unwrap();
    // A failed attempt must not release the lock.
    Store::open(&path).unwrap_err();
    drop(store);
    let again = Store::open(&path).unwrap();
    Store::open(&path).unwrap_err();
    drop(again);
    Store::open(&path).unwrap();
}

/// The reader of a run whose process was killed while it saved was once told that the file is no
/// database.
#[test]
fn what_was_interrupted_while_it_was_saved_can_be_read() {
    let (folder, path, store) = made();
    drop(store);
    let copied = |name: &str| {
        let copy = folder.path().join(name);
        std::fs::create_dir(&copy).unwrap();
        for file in ["run.sqlite", "run.sqlite-journal"] {
            std::fs::copy(folder.path().join(file), copy.join(file)).unwrap();
        }
        copy.join("run.sqlite")
    };
    let writer = Connection::open(&path).unwrap();
    writer.pragma_update(None, "cache_size", 1).unwrap();
    writer.execute_batch("BEGIN").unwrap();
    for i in 0..50 {
        let row = params![i.to_string(), "x".repeat(5000)];
        writer.execute("INSERT INTO warning (kind, text, cells) VALUES (?, ?, '[]')", row).unwrap();
    }
    // As a crash leaves them: the journal has the old pages, and nobody holds SQLite's locks.
    let (copy, busy) = (copied("copy"), copied("busy"));
    drop(writer);
    assert_eq!(Store::load(&copy).unwrap(), run());
    assert!(!copy.with_file_name("run.sqlite-journal").exists());
    // While another process has the run, its file is left alone.
    let _lock = own(&busy).unwrap();
    let told = format!("{:#}", Store::load(&busy).unwrap_err());
    assert!(!told.contains("not a SQLite database"), "{told}");
    assert!(busy.with_file_name("run.sqlite-journal").exists());
}

#[test]
fn folders_to_remove_are_remembered() {
    let (_folder, path, mut store) = made();
    store.add_scratch(Path::new("/a/vdkit-lab-1")).unwrap();
    store.add_scratch(Path::new("/a/vdkit-lab-1")).unwrap();
    drop(store);
    let mut store = Store::open(&path).unwrap();
    assert_eq!(store.scratch().unwrap(), [PathBuf::from("/a/vdkit-lab-1")]);
    store.forget_scratch(Path::new("/a/vdkit-lab-1")).unwrap();
    assert!(store.scratch().unwrap().is_empty());
}
