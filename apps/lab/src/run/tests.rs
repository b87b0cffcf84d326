use super::*;

#[test]
fn a_guess_that_is_far_off_is_told_once() {
    let mut pace = Pace::default();
    let slow = Duration::from_secs(240);
    assert_eq!(pace.after(60.0, slow, 540.0), None);
    let told = pace.after(60.0, slow, 480.0).unwrap();
    // 480 estimated seconds remain, at a quarter of the speed.
    assert!(told.starts_with("about 32 min left"), "{told}");
    assert_eq!(pace.after(60.0, slow, 420.0), None);
    let mut pace = Pace::default();
    assert_eq!(pace.after(150.0, Duration::from_secs(180), 450.0), None);
    // A third of the run took twice the estimated time; the estimate for the rest is doubled.
    let told = Pace::default().after(100.0, Duration::from_secs(200), 200.0).unwrap();
    assert!(told.starts_with("about 7 min left"), "{told}");
}

/// A resumed run once counted the rounds that it had measured before as still to be measured.
#[test]
fn what_was_measured_before_is_not_left() {
    let cell = |rounds: u32, outcome| Cell {
        samples: (0..rounds).map(|round| Sample { round, ..Sample::default() }).collect(),
        outcome,
        ..Cell::default()
    };
    let estimate =
        Estimate { rounds: 3, seconds: 1200.0, each: vec![100.0; 4], ..Estimate::default() };
    let failed = || Outcome::Failed("no".to_owned());
    let mut cells = vec![
        cell(2, Outcome::Pending),
        cell(2, Outcome::Pending),
        cell(3, Outcome::Measured),
        cell(1, failed()),
    ];
    assert_eq!(ahead(&cells, &estimate), 200.0);
    // One of the two open rounds took three times as long as estimated: so will the other one.
    cells[0].samples.push(Sample { round: 2, ..Sample::default() });
    let left = ahead(&cells, &estimate);
    let told = Pace::default().after(100.0, Duration::from_secs(300), left).unwrap();
    assert!(told.starts_with("about 5 min left"), "{told}");
    // Rounds beyond those of the plan are not estimated.
    cells[1].samples.extend([2, 3].map(|round| Sample { round, ..Sample::default() }));
    assert_eq!(ahead(&cells, &estimate), 0.0);
}

/// One cell, which creates and reads a raw image with a command.
const ONE: &str = r#"
name = "one"
title = "One"
question = "How long does it take?"
metric = "elapsed_seconds"

[[axis]]
name = "layout"
values = ["raw"]

[[axis]]
name = "tool"
values = ["vdkit"]

[[axis]]
name = "profile"
values = ["open"]

[full]
rounds = 3
seconds = 1
disk = "1M"
bytes = "1M"

[quick]
rounds = 3
seconds = 1
disk = "1M"
bytes = "1M"
"#;

/// Runs [`ONE`] with a command whose reads fail where `fails` says so, by their number from 0.
fn run_with_failures(fails: &str) -> Run {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (command, count) = (at("command"), at("count"));
    std::fs::write(&count, "0").unwrap();
    let script = format!(
        "#!/bin/sh\ncase $1 in\ncreate) truncate -s \"$5\" \"$4\" ;;\nread) read n < {count}\n\
         echo $((n + 1)) > {count}\ncase $n in {fails}) echo 'it hangs' >&2; exit 1 ;; esac ;;\nesac\n",
        count = count.display()
    );
    std::fs::write(&command, script).unwrap();
    std::fs::set_permissions(&command, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::create_dir(at("images")).unwrap();
    let request =
        Request { plan: ONE.to_owned(), folders: vec![at("images")], ..Request::default() };
    let request = Request { rounds: Some(3), ..request };
    let tools = Tools {
        command,
        version: String::new(),
        registry: &Registry::default(),
        erase: Vec::new(),
        ask: None,
    };
    let monitor = Monitor::new(&vdkit_block::NoProgress);
    let active = Prepared::new(request).unwrap().begin(&at("run.sqlite"), &tools, &monitor);
    active.unwrap().run(&tools, &monitor).unwrap()
}

/// Whether a run goes on was once decided without its published numbers, whose comparisons have a share
/// of the error. So a run could end before its verdict was decided.
#[test]
fn a_run_goes_on_by_what_its_verdict_depends_on() {
    let folder = tempfile::tempdir().unwrap();
    let published = "[[published]]\naxes = { layout = \"raw\" }\nmetric = \"elapsed_seconds\"\n\
                     value = 1\nsource = \"a page\"\n";
    let plan = format!("{ONE}\n{published}");
    let request = Request { plan, folders: vec![folder.path().to_owned()], ..Request::default() };
    let tools = Tools {
        command: "true".into(),
        version: String::new(),
        registry: &Registry::default(),
        erase: Vec::new(),
        ask: None,
    };
    let monitor = Monitor::new(&vdkit_block::NoProgress);
    let out = folder.path().join("run.sqlite");
    let active = Prepared::new(request).unwrap().begin(&out, &tools, &monitor).unwrap();
    let (so_far, run) = (active.so_far(), active.store.run().unwrap());
    assert_eq!((&so_far.plan, &so_far.published), (&run.plan, &run.published));
    let kinds = |run: &Run| -> Vec<Option<String>> {
        run.environment.places.iter().map(|place| place.file_system.clone()).collect()
    };
    assert_eq!((so_far.published.len(), kinds(&so_far)), (1, kinds(&run)));
}

/// One guest of a run of two hours did not shut down in its fifth round, which cost the whole cell.
#[test]
fn a_round_that_fails_is_measured_again_and_the_page_says_so() {
    let retries = |run: &Run| -> Vec<String> {
        let warnings = run.warnings.iter().filter(|warning| warning.kind == "retry");
        warnings.map(|warning| warning.text.clone()).collect()
    };
    let run = run_with_failures("1");
    assert_eq!((run.cells[0].samples.len(), &run.cells[0].outcome), (3, &Outcome::Measured));
    let told = retries(&run);
    assert!(
        told.len() == 1 && told[0].starts_with("round 2: ") && told[0].contains("raw"),
        "{told:?}"
    );
    assert!(crate::report::html(&run).contains("was measured again, because it failed: "));
    // A cell that fails twice has failed, and so has one that never worked.
    let run = run_with_failures("1 | 2");
    assert!(matches!(run.cells[0].outcome, Outcome::Failed(_)) && retries(&run).len() == 1);
    assert_eq!(run.cells[0].samples.len(), 1);
    let run = run_with_failures("0");
    assert!(matches!(run.cells[0].outcome, Outcome::Failed(_)) && retries(&run).is_empty());
}

/// The name of a device may lead to another disk after a restart.
#[test]
fn a_run_is_resumed_on_its_own_device() {
    let device = |total_bytes, beneath: &str| PlaceInfo {
        path: "/dev/sdb".to_owned(),
        kind: PlaceKind::Device,
        total_bytes,
        beneath: vec![beneath.to_owned()],
        ..PlaceInfo::default()
    };
    let old = device(1 << 40, "sdb: scratch disk");
    let before = Environment { places: vec![old.clone()], ..Environment::default() };
    let mut request = Request::default();
    let check = |place: &PlaceInfo| resume::require_same_place(&before, &request, place, None);
    check(&old).unwrap();
    check(&PlaceInfo { path: "/dev/sdc".to_owned(), ..old.clone() }).unwrap();
    for other in [device(1 << 41, "sdb: scratch disk"), device(1 << 40, "sdb: family photos")] {
        let error = check(&other).unwrap_err().to_string();
        assert!(error.contains("is another device than that of the run"), "{error}");
    }
    // Two disks of one model have equal names and sizes. One disk may have two names.
    request.identities.insert(old.path.clone(), "wwid naa.1".to_owned());
    let check = |place: &PlaceInfo, identity: &str| {
        resume::require_same_place(&before, &request, place, Some(identity.to_owned()))
    };
    check(&old, "wwid naa.1").unwrap();
    check(&device(1 << 40, "sdc: scratch disk"), "wwid naa.1").unwrap();
    let error = check(&old, "wwid naa.2").unwrap_err().to_string();
    assert!(error.contains("wwid naa.2) now") && error.contains("wwid naa.1) then"), "{error}");
}

/// A run was once resumed on the root disk, because the disk of its folder was not mounted. The folder
/// that it had left there was forgotten.
#[test]
fn a_run_is_resumed_on_its_own_file_system() {
    let folder = tempfile::tempdir().unwrap();
    let request = Request {
        plan: ONE.to_owned(),
        folders: vec![folder.path().to_owned()],
        rounds: Some(3),
        ..Request::default()
    };
    let tools = Tools {
        command: "true".into(),
        version: "2".to_owned(),
        registry: &Registry::default(),
        erase: Vec::new(),
        ask: None,
    };
    let monitor = Monitor::new(&vdkit_block::NoProgress);
    let out = folder.path().join("run.sqlite");
    let mut active = Prepared::new(request).unwrap().begin(&out, &tools, &monitor).unwrap();
    let left = folder.path().join("vdkit-lab-1");
    active.store.add_scratch(&left).unwrap();
    let mut environment = active.store.run().unwrap().environment;
    environment.places[0].total_bytes += 4096;
    active.store.set_environment(&environment).unwrap();
    drop(active);
    let error = ActiveRun::resume(&out, &tools, &monitor).map(drop).unwrap_err().to_string();
    assert!(error.contains("is on another device than in the run"), "{error}");
    let mut store = Store::open(&out).unwrap();
    assert_eq!(store.scratch().unwrap(), [left]);
    // With the right disk it goes on, and the reader is told what has changed.
    environment.places[0].total_bytes -= 4096;
    environment.kernel = "Linux 5.0".to_owned();
    store.set_environment(&environment).unwrap();
    drop(store);
    let tools = Tools { version: "3".to_owned(), ..tools };
    let active = ActiveRun::resume(&out, &tools, &monitor).unwrap();
    assert!(active.store.scratch().unwrap().is_empty());
    let said = active.store.run().unwrap().warnings;
    for what in ["the kernel was 'Linux 5.0'", "the version of vdkit was '2' and is '3'"] {
        assert_eq!(
            said.iter().filter(|warning| warning.text.contains(what)).count(),
            1,
            "{said:?}"
        );
    }
    assert!(said.iter().any(|warning| warning.kind == "resume"), "{said:?}");
    // A second time nothing has changed but the version, which was told.
    drop(active);
    let active = ActiveRun::resume(&out, &tools, &monitor).unwrap();
    let told = |run: Run| run.warnings.iter().filter(|warning| warning.kind == "resume").count();
    assert_eq!(told(active.store.run().unwrap()), 2);
}
