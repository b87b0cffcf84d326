//! `vdkit lab`: plans that are run for real, on scratch file systems and loop devices.

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Scratch, signal};
use rustix::pty::OpenptFlags;
use serde_json::Value;
use vdkit_lab::model::{Cell, Outcome, Run};
use vdkit_lab::store::Store;
use vdkit_testkit::fs::{LoopDevice, loop_device, mounted};
use vdkit_testkit::{require_fuse, require_peer, require_root};

/// A plan with these axes (TOML).
fn plan(scratch: &Scratch, rounds: u32, seconds: f64, axes: &[(&str, &str)]) -> String {
    let mut text = format!(
        "name = \"tiny\"\ntitle = \"Tiny\"\nquestion = \"Which?\"\nmetric = \"iops\"\n\
         [full]\nrounds = {rounds}\nseconds = {seconds}\ndisk = \"16M\"\nbytes = \"2M\"\n\
         [quick]\nrounds = 1\nseconds = 0.1\ndisk = \"8M\"\nbytes = \"1M\"\n"
    );
    for (name, values) in axes {
        text.push_str(&format!("[[axis]]\nname = \"{name}\"\nvalues = [{values}]\n"));
    }
    scratch.write("tiny.toml", text.as_bytes());
    "tiny.toml".to_owned()
}

fn load(scratch: &Scratch) -> Run {
    Store::load(&scratch.path("run.sqlite")).unwrap()
}

fn entries(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != "lost+found").collect()
}

fn cell<'a>(run: &'a Run, part: &str) -> &'a Cell {
    let found: Vec<&Cell> = run.cells.iter().filter(|cell| cell.key.contains(part)).collect();
    assert_eq!(
        found.len(),
        1,
        "{part}: {:?}",
        run.cells.iter().map(|c| &c.key).collect::<Vec<_>>()
    );
    found[0]
}

/// Nothing of the lab is mounted or attached, and its folder is empty.
fn nothing_left(folder: &Path) {
    assert_eq!(entries(folder), [""; 0]);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let beneath = format!("{}/vdkit-lab-", folder.display());
    assert!(!mounts.contains(&beneath), "{mounts}");
    let loops = Command::new("losetup").args(["--list", "--output", "BACK-FILE"]).output();
    let loops = String::from_utf8(loops.unwrap().stdout).unwrap();
    assert!(!loops.contains(&beneath), "{loops}");
}

#[test]
fn plans_are_listed_and_shown() {
    let scratch = Scratch::new();
    let list = scratch.json_of("lab-list", 0, &[]);
    let names: Vec<&str> =
        list.as_array().unwrap().iter().map(|plan| plan["name"].as_str().unwrap()).collect();
    let all = [
        "zvol-vs-qcow2",
        "convert-table",
        "cache-modes",
        "cold-open",
        "install",
        "preallocation",
        "nospace",
    ];
    assert_eq!(names, all);
    for name in names {
        let shown = scratch.json_of("lab-show", 0, &[name]);
        assert!(!shown["axes"].as_array().unwrap().is_empty(), "{shown}");
        assert!(scratch.ok(&["lab", "show", name]).stdout.contains("rounds"));
    }
    // What a run would do is told without doing anything, after trials of servers and of a guest.
    let dry = ["cache-modes", "--dry-run", "--quick", "--on", "."];
    let told = scratch.json_of("lab-run", 0, &dry);
    assert!(!told["cells"].as_array().unwrap().is_empty(), "{told}");
    assert!(told["estimated-seconds"].as_f64().unwrap() > 60.0, "nothing was tried: {told}");
    assert_eq!(scratch.names(), [""; 0]);
}

/// A pipe cannot be read twice.
#[test]
fn a_plan_may_come_through_a_pipe() {
    if !require_peer("fio") {
        return;
    }
    let scratch = Scratch::new();
    let file = plan(&scratch, 1, 0.1, &[("profile", "\"rnd4k-q1-read\"")]);
    let text = std::fs::read(scratch.path(&file)).unwrap();
    let run = ["lab", "run", "--plan", "/dev/stdin", "--dry-run", "--on", "."];
    let told = scratch.run_with_input(&run, &text);
    assert_eq!(told.code, Some(0), "{told:?}");
    assert!(told.stdout.contains("1 cell"), "{told:?}");
}

#[test]
fn wrong_plans_and_places_are_refused() {
    let scratch = Scratch::new();
    scratch.fails(2, "known: zvol-vs-qcow2", &["lab", "run", "zvol", "--on", "."]);
    scratch.fails(2, "--on DIR or --device", &["lab", "run", "nospace"]);
    scratch.fails(2, "name a plan", &["lab", "run", "--on", "."]);
    let swallowed = ["lab", "run", "--quick", "--on", ".", "nospace"];
    scratch.fails(2, "the plan comes first: vdkit lab run nospace --on", &swallowed);
    scratch.fails(
        2,
        "needs --device",
        &["lab", "run", "nospace", "--on", ".", "--erase", "/dev/x"],
    );
    scratch.fails(1, "nowhere", &["lab", "run", "nospace", "--on", "nowhere"]);
    let file = plan(&scratch, 1, 0.1, &[("profile", "\"rnd4k-q1-read\""), ("cache", "\"fast\"")]);
    scratch.fails(2, "line 20: unknown cache 'fast'; known: w", &["lab", "show", "--plan", &file]);
    scratch.fails(5, "not a block device", &["lab", "run", "install", "--device", &file]);
    scratch.fails(1, "not a SQLite database", &["lab", "export", &file]);
    scratch.fails(1, "no such file", &["lab", "run", "--resume", "none.sqlite"]);
    assert_eq!(scratch.names(), ["tiny.toml"]);
}

/// A cell of the profile `rnd4k-q1-write`, run for 0.3 seconds, has all its values.
fn assert_measured(cell: &Cell) {
    assert_eq!(cell.outcome, Outcome::Measured, "{}", cell.key);
    let sample = &cell.samples[0];
    let value = |key: &str| sample.values[key];
    assert!(value("iops") > 0.0, "{}: {:?}", cell.key, sample.values);
    assert!((value("bytes_per_second") / value("iops") - 4096.0).abs() < 1.0);
    assert!(value("latency_p50_ns") <= value("latency_p9999_ns"));
    assert!(value("final_fsync_seconds") >= 0.0 && value("host_bytes") > 0.0);
    let requests = sample.latencies.as_ref().unwrap().count() as f64;
    // (A busy machine makes a load longer than it was to be.)
    assert!(requests > value("iops") * 0.3 / 2.0, "{}: {requests}", cell.key);
    let commands = cell.commands.join("\n");
    if cell.axis("front") != Some("in-process") {
        assert!(commands.contains("fio ") && commands.contains("--rw=randwrite"), "{commands}");
        assert_eq!(sample.raw.as_ref().unwrap()["jobs"][0]["jobname"], "load");
    }
}

fn assert_has_series(run: &Run) {
    // In the lab's own process the intervals are counted, so all are there.
    for cell in run.cells.iter().filter(|cell| cell.axis("front") == Some("in-process")) {
        let series = &cell.samples[0].series;
        assert_eq!(series.len(), 2, "{}", cell.key);
        assert!(series[1].values.len() >= 2 && series[1].values.iter().any(|iops| *iops > 0.0));
    }
    // A load this short has no second interval where the machine is busy.
    let series = run.cells.iter().flat_map(|cell| &cell.samples).flat_map(|s| &s.series).count();
    assert!(series > 0, "no cell has a series");
}

/// The run is exported for other programs.
fn assert_exports(scratch: &Scratch, run: &Run) {
    let exported = scratch.json_of("lab-export", 0, &["run.sqlite"]);
    assert_eq!(exported["id"], run.id.as_str());
    let text = scratch.ok(&["lab", "export", "run.sqlite"]).stdout;
    assert!(text.trim_end() == serde_json::to_string_pretty(run).unwrap());
    let csv = scratch.ok(&["lab", "export", "run.sqlite", "--csv"]).stdout;
    assert!(
        csv.starts_with("backend,layout,front,profile,outcome,reason,round,metric,unit,value\n")
    );
    assert!(csv.contains("\next4,qcow2,nbd,rnd4k-q1-write,measured,,0,iops,1/s,"), "{csv}");
}

#[test]
fn a_plan_is_measured_on_two_file_systems() {
    if !require_peer("fio") || !require_peer("qemu-nbd") {
        return;
    }
    let (Some(tmpfs), Some(ext4)) = (mounted("tmpfs", 512 << 20), mounted("ext4", 512 << 20))
    else {
        return;
    };
    let scratch = Scratch::new();
    let axes = [
        ("layout", "\"raw\", \"qcow2\""),
        ("front", "\"file\", \"in-process\", \"nbd\", \"nbd-qemu-nbd\""),
        ("profile", "\"rnd4k-q1-write\""),
    ];
    let file = plan(&scratch, 1, 0.3, &axes);
    let (on, also) = (tmpfs.path().to_str().unwrap(), ext4.path().to_str().unwrap());
    let arguments = ["--plan", &file, "--on", on, also, "--out", "run.sqlite", "--seed", "5"];
    let answer = scratch.json_of("lab-run", 0, &arguments);
    assert_eq!(answer["cells"].as_array().unwrap().len(), 16);
    // The run says at its end what the report says.
    let again = scratch.json_of("lab-report", 0, &["run.sqlite"]);
    assert!(answer["verdict"] == again && again.get("leading").is_some(), "{answer}");
    // Of one round nothing is advised; and a qcow2 file that a program reads is named first.
    assert_eq!((again["advice"].as_str(), again.get("best")), (Some("untold"), None), "{again}");
    assert_eq!(again["not-measured"][0]["what"]["front"], "file", "{again}");
    let run = load(&scratch);
    assert!(run.ended.is_some() && run.seed == 5);
    for cell in &run.cells {
        let qcow2_file = cell.axis("layout") == Some("qcow2") && cell.axis("front") == Some("file");
        if qcow2_file {
            assert!(matches!(&cell.outcome, Outcome::Skipped(why) if why.contains("qcow2 image")));
            continue;
        }
        assert_measured(cell);
    }
    assert_has_series(&run);
    let commands = cell(&run, "ext4/layout=qcow2/front=nbd/").commands.join("\n");
    assert!(commands.contains("vdkit create -f qcow2"), "{commands}");
    assert!(commands.contains("vdkit serve -f qcow2 --cache writeback --nbd"), "{commands}");
    let ext4_info = run.environment.places.iter().find(|place| place.name == "ext4").unwrap();
    assert!(ext4_info.beneath[0].contains("loop device over"), "{ext4_info:?}");
    nothing_left(tmpfs.path());
    nothing_left(ext4.path());
    assert_exports(&scratch, &run);
    // Results are not overwritten, a seed gives the same order.
    scratch.fails(1, "already exists", &[&["lab", "run"][..], &arguments[..]].concat());
}

/// Runs a plan on a file system of its own, on which nothing is left. Each cell has all its rounds.
fn measured(rounds: u32, axes: &[(&str, &str)]) -> Option<Run> {
    if !require_peer("fio") || !require_peer("qemu-img") {
        return None;
    }
    let place = mounted("ext4", 700 << 20)?;
    let scratch = Scratch::new();
    let file = plan(&scratch, rounds, 0.2, axes);
    let on = place.path().to_str().unwrap();
    scratch.ok(&["lab", "run", "--plan", &file, "--on", on, "--out", "run.sqlite"]);
    let run = load(&scratch);
    for cell in &run.cells {
        assert_eq!(cell.outcome, Outcome::Measured, "{}", cell.key);
        assert_eq!(cell.samples.len(), rounds as usize, "{}", cell.key);
    }
    nothing_left(place.path());
    Some(run)
}

#[test]
fn conversions_read_what_was_written() {
    let axes = [
        ("layout", "\"raw\", \"qcow2\", \"vmdk\""),
        ("content", "\"sparse\", \"full\""),
        ("tool", "\"vdkit\", \"qemu-img\""),
        ("profile", "\"convert\""),
    ];
    let Some(converted) = measured(1, &axes) else { return };
    for cell in &converted.cells {
        assert!(cell.values("elapsed_seconds").iter().all(|s| *s > 0.0005), "{}", cell.key);
        let full = cell.axis("content") == Some("full");
        // (All but 64 KiB.)
        let there = cell.values("host_bytes")[0] >= f64::from(15 << 20);
        assert_eq!(there, full, "{}", cell.key);
    }
}

#[test]
fn opens_are_cold_and_of_each_image() {
    let axes = [
        ("layout", "\"qcow2-metadata\", \"qcow2-fragmented\""),
        ("images", "\"1\", \"4\""),
        ("tool", "\"vdkit\", \"qemu-img\", \"library\""),
        ("profile", "\"open\""),
    ];
    let Some(opened) = measured(1, &axes) else { return };
    for cell in &opened.cells {
        let reads = cell.values("reads");
        assert!(reads.iter().all(|reads| *reads >= 1.0), "{}: {reads:?}", cell.key);
        // Cold: the device had to be asked.
        assert!(cell.values("device_reads")[0] >= 1.0, "{}", cell.key);
    }
    let one = cell(&opened, "fragmented/images=1/tool=library").values("reads")[0];
    let four = cell(&opened, "fragmented/images=4/tool=library").values("reads")[0];
    assert!(four > one, "{one} {four}");
}

#[test]
fn loads_of_each_kind_reach_the_device() {
    let axes = [
        ("layout", "\"qcow2-8k\""),
        ("cache", "\"none\""),
        ("front", "\"nbd\""),
        ("profile", "\"sync16\", \"mixed-fsync\", \"rnd4k-q32-read\""),
    ];
    let Some(loads) = measured(2, &axes) else { return };
    let flushed = cell(&loads, "qcow2-8k/cache=none/front=nbd/profile=mixed-fsync");
    assert!(flushed.values("flushes")[0] >= 1.0, "flushes do not reach the device");
    // One after each 32 writes, where the machine is not too busy for so many.
    let sample = &flushed.samples[0];
    let writes = sample.raw.as_ref().unwrap()["jobs"][0]["write"]["total_ios"].as_u64().unwrap();
    assert!(writes < 64 || sample.values["sync_mean_ns"] > 0.0, "{writes} writes");
}

#[test]
fn an_installation_is_in_the_image() {
    if !require_fuse() {
        return;
    }
    let Some(place) = mounted("ext4", 1 << 30) else { return };
    let on = place.path().to_str().unwrap();
    let scratch = Scratch::new();
    let axes = [("layout", "\"qcow2\""), ("front", "\"fuse\""), ("profile", "\"install\"")];
    let text = std::fs::read_to_string(scratch.path(&plan(&scratch, 1, 0.2, &axes)));
    let text = text.unwrap().replace("disk = \"16M\"", "disk = \"64M\"");
    scratch.write("tiny.toml", text.as_bytes());
    scratch.ok(&["lab", "run", "--plan", "tiny.toml", "--on", on, "--out", "run.sqlite"]);
    let run = load(&scratch);
    assert_eq!(run.cells[0].outcome, Outcome::Measured);
    let values = &run.cells[0].samples[0].values;
    assert!(values["elapsed_seconds"] > 0.0 && values["second_pass_seconds"] > 0.0, "{values:?}");
    // The files are in the image.
    assert!(values["host_bytes"] > 1e6, "{values:?}");
    nothing_left(place.path());
}

#[test]
fn a_full_pool_makes_clients_wait_or_fail() {
    if !require_peer("qemu-nbd") {
        return;
    }
    let fronts = "\"nbd\", \"nbd-qemu-nbd\"";
    let axes = [("layout", "\"qcow2\""), ("front", fronts), ("profile", "\"nospace\"")];
    let Some(run) = measured(1, &axes) else { return };
    let value = |front: &str, key: &str| cell(&run, front).values(key)[0];
    assert_eq!(value("front=nbd/", "survived"), 1.0, "{:?}", cell(&run, "front=nbd/"));
    assert!(value("front=nbd/", "stalled_seconds") >= 3.0);
    // qemu-nbd tells its client.
    assert_eq!(value("front=nbd-qemu-nbd/", "survived"), 0.0);
    assert_eq!(value("front=nbd-qemu-nbd/", "io_errors"), 1.0);
}

/// Runs a program that is to succeed, without its output.
fn succeed(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).stdout(Stdio::null()).status();
    assert!(status.unwrap().success(), "{program} {arguments:?}");
}

/// With a file system on it, a device is refused and stays untouched; when it is mounted, whatever
/// the user says.
fn assert_file_system_is_refused(scratch: &Scratch, device: &LoopDevice, run: &[&str]) {
    let name = device.path().to_str().unwrap();
    let read = || std::fs::read(device.file()).unwrap();
    succeed("mkfs.ext4", &["-q", "-F", name]);
    succeed("sync", &[]);
    let before = read();
    let answer = scratch.fails(5, "contains a signature (ext4)", run);
    assert!(answer.stderr.contains(&format!("--erase {name}")), "{answer:?}");
    assert!(before == read(), "a device that was refused was written to");
    let at = scratch.path("at");
    std::fs::create_dir(&at).unwrap();
    succeed("mount", &[name, at.to_str().unwrap()]);
    scratch.fails(5, "mounted at", &[run, &["--erase", name]].concat());
    succeed("umount", &[at.to_str().unwrap()]);
    std::fs::remove_dir(&at).unwrap();
    assert!(scratch.names() == ["tiny.toml"], "{:?}", scratch.names());
}

/// A device that begins with zeroes is confirmed for each run all the same, by its own name.
fn assert_must_be_confirmed(scratch: &Scratch, device: &LoopDevice, run: &[&str]) {
    let name = device.path().to_str().unwrap();
    let read = || std::fs::read(device.file()).unwrap();
    let before = read();
    let answer = scratch.fails(5, "was not confirmed", run);
    assert!(answer.stderr.contains(&format!("--erase {name}")), "{answer:?}");
    scratch.fails(2, "needs --device", &[run, &["--erase", "/dev/loop-control"]].concat());
    scratch.ok(&[run, &["--dry-run"]].concat());
    assert!(before == read() && scratch.names() == ["tiny.toml"], "{:?}", scratch.names());
}

/// On a terminal the name of a device is typed.
fn assert_is_confirmed_by_typing(scratch: &Scratch, name: &str, run: &[&str]) {
    let run_quietly = [run, &["--progress", "none"]].concat();
    for (typed, code) in [("yes", 5), ("", 5), (name, 0)] {
        let (found, told) = answered(scratch, &run_quietly, typed);
        assert!(told.contains("Type the device's name") && told.contains("96 MiB"), "{told}");
        assert_eq!(found, Some(code), "{typed}: {told}");
        assert_eq!(scratch.path("run.sqlite").exists(), code == 0);
    }
    let other = load(scratch);
    assert!(other.cells.iter().all(|cell| cell.outcome == Outcome::Measured));
}

#[test]
fn devices_are_used_only_when_nothing_is_on_them() {
    if !require_peer("fio") {
        return;
    }
    let Some(device) = loop_device(96 << 20, 512) else { return };
    let name = device.path().to_str().unwrap();
    let scratch = Scratch::new();
    let axes =
        [("layout", "\"raw\", \"qcow2\""), ("front", "\"nbd\""), ("profile", "\"rnd4k-q1-write\"")];
    let file = plan(&scratch, 1, 0.1, &axes);
    let run = ["lab", "run", "--plan", &file, "--out", "run.sqlite", "--device", name];
    assert_file_system_is_refused(&scratch, &device, &run);

    // Confirmed by name. Nobody wants to hear of progress.
    let erase = [&run[..], &["--erase", name]].concat();
    let quiet = scratch.ok(&[&erase[..], &["--progress", "none"]].concat());
    assert_eq!(quiet.stderr, "");
    let measured = load(&scratch);
    for cell in &measured.cells {
        assert_eq!(cell.outcome, Outcome::Measured, "{}", cell.key);
        assert!(cell.samples[0].values["iops"] > 0.0);
    }
    assert!(measured.environment.places[0].beneath[0].contains("loop device over"));
    std::fs::remove_file(scratch.path("run.sqlite")).unwrap();
    assert_must_be_confirmed(&scratch, &device, &run);
    assert_is_confirmed_by_typing(&scratch, name, &run);
    // Progress for programs is JSON, what a run will take too; what wipefs does not know counts.
    std::fs::remove_file(scratch.path("run.sqlite")).unwrap();
    let answer = scratch.ok(&[&erase[..], &["--progress", "json"]].concat());
    let lines = answer.stderr.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<Value> = lines.collect();
    assert_eq!(lines[0]["event"], "message");
    assert!(lines[0]["text"].as_str().unwrap().contains("2 cells, 1 round;"), "{answer:?}");
    std::fs::OpenOptions::new()
        .write(true)
        .open(name)
        .and_then(|file| std::os::unix::fs::FileExt::write_all_at(&file, b"mine", 5000))
        .unwrap();
    std::fs::remove_file(scratch.path("run.sqlite")).unwrap();
    scratch.fails(5, "contains data", &run);
}

/// Runs a command on a terminal and types a line; gives its exit code and what was on the terminal.
fn answered(scratch: &Scratch, arguments: &[&str], typed: &str) -> (Option<i32>, String) {
    let master = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    rustix::pty::grantpt(&master).unwrap();
    rustix::pty::unlockpt(&master).unwrap();
    let name = rustix::pty::ptsname(&master, Vec::new()).unwrap();
    let slave = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let mut command = scratch.command(arguments);
    command.stdin(slave.try_clone().unwrap()).stderr(slave.try_clone().unwrap());
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    let mut master = File::from(master);
    writeln!(master, "{typed}").unwrap();
    let status = child.wait().unwrap();
    // With nobody at the other end reading ends with an error once all was read.
    drop((command, slave));
    let mut told = Vec::new();
    let _ = master.read_to_end(&mut told);
    (status.code(), String::from_utf8_lossy(&told).into_owned())
}

#[test]
fn a_place_that_is_too_small_is_refused_beforehand() {
    let Some(place) = mounted("tmpfs", 32 << 20) else { return };
    let scratch = Scratch::new();
    let on = place.path().to_str().unwrap();
    let run = ["lab", "run", "install", "--on", on, "--out", "run.sqlite"];
    scratch.fails(7, "MiB are needed", &run);
    assert_eq!(scratch.names(), [""; 0]);
    assert_eq!(entries(place.path()), [""; 0]);
}

/// Waits until so many samples are in the file, and the next cell is being measured; stops the
/// process there, so that it goes no further while the test looks.
fn stop_at_samples(scratch: &Scratch, pid: u32, folder: &Path, count: usize) {
    let began = Instant::now();
    loop {
        assert!(began.elapsed() < Duration::from_secs(120), "no samples");
        signal(pid, "STOP");
        let run = Store::load(&scratch.path("run.sqlite"));
        let samples = run.map_or(0, |run| run.cells.iter().map(|cell| cell.samples.len()).sum());
        let busy = entries(folder).iter().any(|name| {
            std::fs::read_dir(folder.join(name)).is_ok_and(|files| {
                files.flatten().any(|file| file.file_name().to_string_lossy().contains(".sock"))
            })
        });
        if samples >= count && busy {
            return;
        }
        signal(pid, "CONT");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A run that is interrupted, or killed, goes on with what it has measured, and leaves nothing.
fn assert_goes_on(kill: bool) {
    if !require_root() || !require_peer("fio") {
        return;
    }
    let Some(place) = mounted("ext4", 512 << 20) else { return };
    let on = place.path().to_str().unwrap();
    let scratch = Scratch::new();
    let axes = [
        ("layout", "\"raw\", \"qcow2\""),
        ("front", "\"nbd\""),
        ("profile", "\"rnd4k-q1-write\", \"rnd4k-q1-read\""),
    ];
    let file = plan(&scratch, 2, 0.3, &axes);
    let arguments = ["lab", "run", "--plan", &file, "--on", on, "--out", "run.sqlite"];
    let child =
        scratch.command(&arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    stop_at_samples(&scratch, child.id(), place.path(), 2);
    // Nobody else may go on with it meanwhile.
    let holder = format!("is in use by process {}", child.id());
    scratch.fails(6, &holder, &["lab", "run", "--resume", "run.sqlite"]);
    signal(child.id(), if kill { "KILL" } else { "INT" });
    signal(child.id(), "CONT");
    let ended = child.wait_with_output().unwrap();
    let before = load(&scratch);
    let samples = |run: &Run| run.cells.iter().map(|cell| cell.samples.len()).sum::<usize>();
    assert!((2..8).contains(&samples(&before)), "{}", samples(&before));
    assert_eq!(before.ended, None);
    if kill {
        assert_eq!(ended.status.code(), None);
    } else {
        assert_eq!(ended.status.code(), Some(130), "{ended:?}");
        let text = String::from_utf8_lossy(&ended.stderr);
        assert!(text.contains("vdkit lab run --resume run.sqlite"), "{text}");
        nothing_left(place.path());
    }
    scratch.ok(&["lab", "run", "--resume", "run.sqlite"]);
    let after = load(&scratch);
    assert_eq!(samples(&after), 8);
    assert!(after.ended.is_some());
    for (one, two) in before.cells.iter().zip(&after.cells) {
        assert!(one.samples.iter().all(|sample| two.samples.contains(sample)), "{}", one.key);
        assert_eq!(two.outcome, Outcome::Measured);
    }
    nothing_left(place.path());
}

#[test]
fn an_interrupted_run_leaves_nothing_and_goes_on() {
    assert_goes_on(false);
}

#[test]
fn a_killed_run_goes_on_and_leaves_nothing() {
    assert_goes_on(true);
}

/// fio in a guest, and what it says: needs a kernel for guests.
#[test]
fn a_guest_makes_the_load() {
    if !require_peer("fio") || !vdkit_testkit::guest::require_guest() {
        return;
    }
    let scratch = Scratch::new();
    let axes = [
        ("layout", "\"qcow2\""),
        ("front", "\"guest-vhost-user\""),
        ("profile", "\"rnd4k-q1-write\""),
    ];
    let file = plan(&scratch, 1, 0.5, &axes);
    std::fs::create_dir(scratch.path("place")).unwrap();
    scratch.ok(&["lab", "run", "--plan", &file, "--on", "place", "--out", "run.sqlite"]);
    let run = load(&scratch);
    let cell = &run.cells[0];
    assert_eq!(cell.outcome, Outcome::Measured, "{cell:?}");
    assert!(cell.samples[0].values["iops"] > 0.0, "{cell:?}");
    let raw: &Value = cell.samples[0].raw.as_ref().unwrap();
    assert_eq!(raw["jobs"][0]["job options"]["filename"], "/dev/vda");
    assert!(cell.commands.iter().any(|line| line.contains("vhost-user-blk-pci")), "{cell:?}");
    assert_eq!(entries(&scratch.path("place")), [""; 0]);
}

/// A guest that writes while there is no space: vdkit lets it wait, QEMU stops all of it.
#[test]
fn a_guest_writes_while_the_pool_is_full() {
    if !require_root() || !require_peer("fio") || !vdkit_testkit::guest::require_guest() {
        return;
    }
    let Some(place) = mounted("ext4", 512 << 20) else { return };
    let scratch = Scratch::new();
    let axes = [
        ("layout", "\"qcow2\""),
        ("front", "\"guest-vhost-user\", \"guest-virtio\""),
        ("profile", "\"nospace\""),
    ];
    let file = plan(&scratch, 1, 0.2, &axes);
    let on = place.path().to_str().unwrap();
    scratch.ok(&["lab", "run", "--plan", &file, "--on", on, "--out", "run.sqlite"]);
    let run = load(&scratch);
    for (front, stopped) in [("guest-vhost-user", false), ("guest-virtio", true)] {
        let cell = cell(&run, &format!("front={front}/"));
        assert_eq!(cell.outcome, Outcome::Measured, "{cell:?}");
        let value = |key: &str| cell.values(key)[0];
        assert_eq!((value("survived"), value("io_errors")), (1.0, 0.0), "{cell:?}");
        assert_eq!(value("machine_stops") > 0.0, stopped, "{cell:?}");
        assert!(value("stalled_seconds") >= 3.0, "{cell:?}");
    }
    nothing_left(place.path());
}
