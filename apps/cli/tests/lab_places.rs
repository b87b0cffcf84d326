//! `vdkit lab run` on devices: each plan that comes with vdkit, in tiny form, on loop devices that are too
//! small, just large enough, and larger than what it wants.

mod common;

use common::Scratch;
use vdkit_lab::front::FRONTS;
use vdkit_lab::model::{Cell, Outcome, Run};
use vdkit_lab::store::Store;
use vdkit_testkit::fs::loop_device;
use vdkit_testkit::{require_fuse, require_peer};

/// What plans are run with: a disk of `mib` MiB, as little of all else as there can be.
fn effort(mib: u64) -> String {
    format!("[quick]\nrounds = 1\nseconds = 0.1\ndisk = \"{mib}M\"\nbytes = \"1M\"\n")
}

/// The quick form of a plan that comes with vdkit with an effort of its own, and other changes.
fn tiny(scratch: &Scratch, name: &str, mib: u64, changes: &[(&str, &str)]) -> String {
    let shown = scratch.json_of("lab-show", 0, &[name]);
    let mut text = shown["text"].as_str().unwrap().to_owned();
    let from = text.find("[quick]").unwrap();
    let to = text[from..].find("\n\n").map_or(text.len(), |len| from + len + 1);
    text.replace_range(from..to, &effort(mib));
    for (old, new) in changes {
        assert!(text.contains(old), "{name}: {old}");
        text = text.replace(old, new);
    }
    let file = format!("{name}-{}.toml", scratch.names().len());
    scratch.write(&file, text.as_bytes());
    file
}

/// Runs a plan on a new loop device of so many bytes.
fn on_device(scratch: &Scratch, file: &str, bytes: u64) -> Option<Run> {
    let device = loop_device(bytes, 512)?;
    let name = device.path().to_str().unwrap();
    let out = format!("{bytes}.sqlite");
    scratch.ok(&[
        "lab", "run", "--plan", file, "--quick", "--out", &out, "--device", name, "--erase", name,
    ]);
    let run = Store::load(&scratch.path(&out)).unwrap();
    assert!(run.ended.is_some());
    Some(run)
}

/// As [`on_device`], with several plans at once: fio sleeps for most of so short a load.
fn on_devices<const N: usize>(scratch: &Scratch, plans: [(&str, u64); N]) -> Option<[Run; N]> {
    let runs: Vec<Run> = std::thread::scope(|scope| {
        let start = |(file, bytes)| scope.spawn(move || on_device(scratch, file, bytes));
        plans.map(start).into_iter().filter_map(|run| run.join().unwrap()).collect()
    });
    runs.try_into().ok()
}

/// Each value of these axes has a figure in a cell at least.
fn all_have_figures(run: &Run, axes: &[&str]) {
    for axis in axes {
        let values: Vec<&str> = run.cells.iter().filter_map(|cell| cell.axis(axis)).collect();
        assert!(!values.is_empty(), "{axis}");
        for value in values {
            let mut cells = run.cells.iter().filter(|cell| cell.axis(axis) == Some(value));
            let has = |cell: &Cell| cell.values(&run.plan.metric).iter().any(|value| *value > 0.0);
            assert!(cells.any(has), "{axis}={value} has no figure");
        }
    }
}

/// Nothing failed, and what was skipped was so beforehand, for one of these reasons.
fn nothing_failed(run: &Run, reasons: &[&str]) {
    for cell in &run.cells {
        match &cell.outcome {
            Outcome::Measured => {}
            Outcome::Skipped(why) if reasons.iter().any(|reason| why.contains(reason)) => {
                assert_eq!(cell.commands, [""; 0], "{}: it was begun", cell.key);
            }
            other => panic!("{}: {other:?}", cell.key),
        }
    }
}

/// A device that is too small is refused before anything is written to it.
fn refused(scratch: &Scratch, file: &str, bytes: u64) {
    let Some(device) = loop_device(bytes, 512) else { return };
    let name = device.path().to_str().unwrap();
    let before = std::fs::read(device.file()).unwrap();
    let run = ["lab", "run", "--plan", file, "--quick", "--device", name, "--erase", name];
    let answer = scratch.fails(7, "MiB are needed", &run);
    assert!(answer.stderr.contains(&format!("{} MiB are free", bytes >> 20)), "{answer:?}");
    assert!(before == std::fs::read(device.file()).unwrap());
}

const MIB: u64 = 1 << 20;

fn ready() -> bool {
    ["fio", "qemu-img", "qemu-nbd", "qemu-storage-daemon"].into_iter().all(require_peer)
        && require_fuse()
}

/// The question that it is named for: every raw cell failed, as servers were waited for to show a file
/// of the plan's size, and on a device of just that size every qcow2 cell was skipped.
#[test]
fn zvol_vs_qcow2_has_figures_of_raw_and_of_qcow2_on_a_device_of_any_size() {
    if !ready() {
        return;
    }
    let scratch = Scratch::new();
    let loads = "\"sync16\", \"libaio16\", \"durable16\", \"batch16\"]";
    let all = tiny(&scratch, "zvol-vs-qcow2", 32, &[(loads, "\"sync16\", \"durable16\"]")]);
    refused(&scratch, &all, 31 * MIB);
    // On the smaller device one front of each kind.
    let fronts = "\"fuse\", \"fuse-qsd\", \"nbd-qsd-native\", \"nbd-qsd-uring\"";
    let changes = [(loads, "\"sync16\"]"), (fronts, "\"fuse\", \"nbd-qsd-native\"")];
    let some = tiny(&scratch, "zvol-vs-qcow2", 32, &changes);
    let runs = on_devices(&scratch, [(&all, 100 * MIB), (&some, 32 * MIB)]);
    let Some([larger, exact]) = runs else { return };
    nothing_failed(&larger, &[]);
    all_have_figures(&larger, &["layout", "front", "profile"]);
    assert!(larger.cells.iter().all(|cell| !cell.notes.iter().any(|n| n.contains("instead"))));
    // Just the plan's size: all is there, and the disk is the same for all.
    nothing_failed(&exact, &[]);
    all_have_figures(&exact, &["layout", "front"]);
    for cell in &exact.cells {
        assert!(cell.notes.iter().any(|note| note.contains("27 MiB instead of 32")), "{cell:?}");
    }
}

#[test]
fn installations_have_figures_on_devices() {
    if !ready() {
        return;
    }
    let scratch = Scratch::new();
    let file = tiny(&scratch, "install", 64, &[]);
    refused(&scratch, &file, 48 * MIB);
    let Some(runs) = on_devices(&scratch, [64, 256].map(|mib| (&*file, mib * MIB))) else { return };
    for run in runs {
        nothing_failed(&run, &["needs files"]);
        all_have_figures(&run, &["front"]);
        let raw = run.cells.iter().find(|cell| cell.axis("layout") == Some("raw")).unwrap();
        let commands = raw.commands.join("\n");
        assert!(commands.contains("mkfs.ext4 -q -F -E nodiscard /dev/loop"), "{commands}");
    }
}

/// What fits, is measured: an image without content is small, whatever its disk.
#[test]
fn opens_have_figures_on_devices() {
    if !ready() {
        return;
    }
    let scratch = Scratch::new();
    let all = tiny(&scratch, "cold-open", 32, &[]);
    refused(&scratch, &all, 4 * MIB);
    let tools = "[\"qemu-img\", \"vdkit\", \"library\"]";
    let vdkit = tiny(&scratch, "cold-open", 32, &[(tools, "[\"vdkit\"]")]);
    let devices = [(&*all, 2 << 30), (&*vdkit, 16 << 30), (&*vdkit, 17 << 30)];
    let Some(runs) = on_devices(&scratch, devices) else { return };
    for (run, (_, bytes)) in runs.iter().zip(devices) {
        nothing_failed(run, &["one image", "the device has 2048 MiB"]);
        all_have_figures(run, &["layout", "size", "tool"]);
        let raw = run.cells.iter().find(|cell| cell.key.contains("layout=raw/size=16G/images=1"));
        let large = bytes >= 16 << 30;
        assert_eq!(raw.unwrap().outcome == Outcome::Measured, large, "{bytes}");
    }
}

#[test]
fn allocations_have_figures_on_devices() {
    if !ready() {
        return;
    }
    let scratch = Scratch::new();
    let served = ("\"nbd\", \"nbd-qemu-nbd\"]", "\"nbd\"]");
    let all = tiny(&scratch, "preallocation", 32, &[served]);
    refused(&scratch, &all, 16 * MIB);
    let loads = ("\"rewrite\", \"first-write-4k\", \"rewrite-4k\"", "\"rewrite\"");
    let some = tiny(&scratch, "preallocation", 32, &[served, loads]);
    let runs = on_devices(&scratch, [(&all, 32 * MIB), (&some, 80 * MIB)]);
    for run in runs.into_iter().flatten() {
        nothing_failed(&run, &["cannot be preallocated"]);
        all_have_figures(&run, &["layout", "profile"]);
    }
}

#[test]
fn cache_modes_has_figures_on_devices_and_plans_about_folders_say_so() {
    if !ready() {
        return;
    }
    let scratch = Scratch::new();
    // Guests have a test of their own.
    let changes = [
        ("front = [\"guest-virtio\", \"guest-ide\"]", "front = \"nbd-qemu-nbd\""),
        (
            "quick = [\"none\", \"writethrough\", \"writeback\"]",
            "quick = [\"none\", \"writeback\"]",
        ),
    ];
    let all = tiny(&scratch, "cache-modes", 32, &changes);
    refused(&scratch, &all, 31 * MIB);
    let some = [changes[0], (changes[1].0, "quick = [\"none\"]")];
    let some = tiny(&scratch, "cache-modes", 32, &some);
    let runs = on_devices(&scratch, [(&all, 80 * MIB), (&some, 32 * MIB)]);
    let Some([larger, exact]) = runs else { return };
    nothing_failed(&larger, &["cannot be preallocated"]);
    all_have_figures(&larger, &["front", "cache"]);
    nothing_failed(&exact, &["cannot be preallocated"]);
    all_have_figures(&exact, &["front"]);
    let Some(device) = loop_device(64 * MIB, 512) else { return };
    let name = device.path().to_str().unwrap();
    for plan in ["convert-table", "nospace"] {
        let run = ["lab", "run", plan, "--quick", "--device", name, "--erase", name];
        scratch.fails(1, "takes folders: --on DIR", &run);
    }
}

/// A plan of one load on all fronts of a kind.
fn fronts(scratch: &Scratch, guests: bool) -> String {
    let names = FRONTS.iter().map(|front| front.name).filter(|name| {
        name.starts_with("guest-") == guests
            && (!guests || ["guest-virtio", "guest-vhost-user"].contains(name))
    });
    let names: Vec<String> = names.map(|name| format!("\"{name}\"")).collect();
    let layouts = if guests { "\"raw\"" } else { "\"raw\", \"qcow2\"" };
    let text = format!(
        "name = \"fronts\"\ntitle = \"Fronts\"\nquestion = \"Which?\"\nmetric = \"iops\"\n\
         axis = [\n{{ name = \"layout\", values = [{layouts}] }},\n\
         {{ name = \"front\", values = [{}] }},\n\
         {{ name = \"profile\", values = [\"rnd4k-q1-write\"] }},\n]\n\
         exclude = [{{ layout = \"qcow2\", front = [\"file\", \"nbd-nbdkit\"] }}]\n\
         {}{}",
        names.join(", "),
        effort(16).replace("quick", "full"),
        effort(16)
    );
    scratch.write("fronts.toml", text.as_bytes());
    "fronts.toml".to_owned()
}

#[test]
fn a_raw_disk_on_a_larger_device_is_served_by_every_front() {
    if !ready() || !require_peer("nbdkit") {
        return;
    }
    let scratch = Scratch::new();
    let file = fronts(&scratch, false);
    let Some(run) = on_device(&scratch, &file, 48 * MIB) else { return };
    nothing_failed(&run, &[]);
    all_have_figures(&run, &["layout", "front"]);
}

#[test]
fn a_guest_has_a_raw_disk_on_a_larger_device() {
    if !ready() || !vdkit_testkit::guest::require_guest() {
        return;
    }
    let scratch = Scratch::new();
    let file = fronts(&scratch, true);
    let Some(run) = on_device(&scratch, &file, 48 * MIB) else { return };
    nothing_failed(&run, &[]);
    all_have_figures(&run, &["front"]);
}
